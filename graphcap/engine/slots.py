"""Slots: the static input buffers of a bucket. `fill` copies a row in and rewrites the whole tail.

All buffers that the host fills lie in one flat tensor of bytes, so that a row travels in one copy. On a GPU the copy goes
through `Staging`: pinned host memory → a device buffer on a copy stream, while the replay before still runs → the slot,
on the stream of the replays.

Calls: engine/buckets.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphcap.engine.optimizer import ALIGNMENT_BYTES
from graphcap.errors import ShapeError


def as_numpy(tensor: Tensor) -> np.ndarray:
    """A host tensor as numpy sees it, sharing its memory: bfloat16, which numpy lacks, as uint16, its bits."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


@dataclass(frozen=True)
class Buffer:
    """One host-filled buffer: name, length of its first dimension, and the value of the tail that a row does not reach.

    `trailing` are the dimensions behind the first. The host's arrays have its dtype; for bfloat16 they are uint16, the bits.
    """

    name: str
    length: int
    pad_value: float
    dtype: torch.dtype = torch.int32
    trailing: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length, *self.trailing)

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def host_dtype(self) -> str:
        """numpy's name of what the host fills in."""
        return "uint16" if self.dtype == torch.bfloat16 else str(self.dtype).removeprefix("torch.")

    @property
    def host_pad(self) -> np.ndarray:
        """`pad_value` as the host writes it."""
        return as_numpy(torch.full((1,), self.pad_value, dtype=self.dtype))


class Slot:
    """The static buffers of one bucket. `slot[name]` is the device tensor, at an address that never moves."""

    def __init__(self, name: str, buffers: tuple[Buffer, ...], device: torch.device, staging: "Staging | None" = None) -> None:
        """staging: shared by all slots of an engine on a GPU; elsewhere None, and the host fills the buffers directly."""
        self.name, self.buffers = name, buffers
        self._parts: dict[str, slice] = {}
        end = 0
        for buffer in buffers:
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            end = start + buffer.size_bytes
            self._parts[buffer.name] = slice(start, end)
        self.flat = torch.zeros(end, dtype=torch.uint8, device=device)
        self._staging = staging
        self._views = {buffer.name: self._view(self.flat, buffer) for buffer in buffers}

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def fill(self, arrays: dict[str, np.ndarray]) -> None:
        """Copy arrays in and write `pad_value` behind each, to the end of its buffer.

        arrays: one for every buffer, [n, …] of the buffer's dtype (bfloat16: uint16, its bits), n at most its length.
        Raises: ShapeError naming the buffer if one is missing, unknown, of another dtype or shape, or too long.
        """
        self._check(arrays)
        if self._staging is None:
            self.pack(arrays, self.flat)
        else:
            self._staging.send(self, arrays)

    def pack(self, arrays: dict[str, np.ndarray], flat: Tensor) -> None:
        """Write arrays and tails into `flat`, host bytes of the slot's layout."""
        for buffer in self.buffers:
            host, array = as_numpy(self._view(flat, buffer)), arrays[buffer.name]
            host[: len(array)] = array
            host[len(array) :] = buffer.host_pad

    def _view(self, flat: Tensor, buffer: Buffer) -> Tensor:
        return flat[self._parts[buffer.name]].view(buffer.dtype).view(buffer.shape)

    def _check(self, arrays: dict[str, np.ndarray]) -> None:
        unknown = set(arrays) - set(self._parts)
        if unknown:
            raise ShapeError(
                "buffer",
                min(unknown),
                expected=f"one of {', '.join(self._parts)} ({self.name})",
                got="an unknown name",
                fix="pass exactly the slot's buffers",
            )
        for buffer in self.buffers:
            array, name = arrays.get(buffer.name), buffer.host_dtype
            expected = f"{name}{[f'0…{buffer.length}', *buffer.trailing]} ({self.name})".replace("'", "")
            if array is None:
                raise ShapeError("buffer", buffer.name, expected=expected, got="nothing", fix="pass every buffer of the slot")
            fits = array.ndim == 1 + len(buffer.trailing) and array.shape[1:] == buffer.trailing and len(array) <= buffer.length
            if str(array.dtype) != name or not fits:
                raise ShapeError(
                    "buffer",
                    buffer.name,
                    expected=expected,
                    got=f"{array.dtype}{list(array.shape)}",
                    fix="plan the row for a larger bucket, or convert the array (bfloat16: as_numpy gives a tensor's bits)",
                )


class Staging:
    """The way from the host into the slots of a GPU: `depth` rows may be under way while replays run.

    Order of one row: pinned buffer → (copy stream) → device buffer → (replay stream) → slot. A pinned buffer is written
    again only after its copy to the device is done, a device buffer only after its copy into the slot is.
    """

    def __init__(self, size_bytes: int, device: torch.device, *, depth: int = 3) -> None:
        self.copy_stream = torch.cuda.Stream(device)
        self.host = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(depth)]
        self.device = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(depth)]
        self.copy_stream.wait_stream(torch.cuda.current_stream())
        self.arrived = [torch.cuda.Event() for _ in range(depth)]
        self.taken = [torch.cuda.Event() for _ in range(depth)]
        self._next = 0

    def send(self, slot: Slot, arrays: dict[str, np.ndarray]) -> None:
        """Copy a row into `slot` behind all work already on the current stream."""
        place, size = self._next, slot.flat.numel()
        self._next = (place + 1) % len(self.host)
        self.arrived[place].synchronize()
        slot.pack(arrays, self.host[place])
        with torch.cuda.stream(self.copy_stream):
            self.copy_stream.wait_event(self.taken[place])
            self.device[place][:size].copy_(self.host[place][:size], non_blocking=True)
            self.arrived[place].record()
        torch.cuda.current_stream().wait_event(self.arrived[place])
        slot.flat.copy_(self.device[place][:size], non_blocking=True)
        self.taken[place].record()
