"""Slots: the static input buffers of a bucket. `fill` copies a row in and rewrites the whole tail.

All buffers that the host fills are int32 and lie in one flat tensor, so that a row travels in one copy. A buffer that the
device itself fills on every micro step (the target's features) is declared too, but never copied to.

Calls: engine/buckets.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphcap.errors import ShapeError


@dataclass(frozen=True)
class Buffer:
    """One host-filled int32 buffer: its name, its fixed length, and the value of the tail that a row does not reach."""

    name: str
    length: int
    pad_value: int


class Slot:
    """The static buffers of one bucket. `slot[name]` is the device tensor, int32 [length], at an address that never moves."""

    def __init__(self, name: str, buffers: tuple[Buffer, ...], device: torch.device) -> None:
        self.name, self.buffers = name, buffers
        size = sum(buffer.length for buffer in buffers)
        self.device_flat = torch.empty(size, dtype=torch.int32, device=device)
        self.host_flat = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._parts: dict[str, slice] = {}
        start = 0
        for buffer in buffers:
            self._parts[buffer.name] = slice(start, start + buffer.length)
            start += buffer.length
        self._views = {name: self.device_flat[part] for name, part in self._parts.items()}
        self._host = {name: self.host_flat.numpy()[part] for name, part in self._parts.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def fill(self, arrays: dict[str, np.ndarray]) -> None:
        """Copy arrays in and write `pad_value` behind each, to the end of its buffer.

        arrays: int32 [n] for every buffer, n at most its length.
        Raises: ShapeError naming the buffer if one is missing, unknown, of another dtype or shape, or too long.
        """
        if self._copied is not None:
            self._copied.synchronize()  # the host buffer may still be read by the copy before
        for buffer in self.buffers:
            array = self._checked(buffer, arrays)
            host = self._host[buffer.name]
            host[: len(array)] = array
            host[len(array) :] = buffer.pad_value
        unknown = set(arrays) - {buffer.name for buffer in self.buffers}
        if unknown:
            raise ShapeError("buffer", min(unknown), expected=f"one of {', '.join(self._parts)} ({self.name})", got="an unknown name",
                             fix="pass exactly the slot's buffers")
        self.device_flat.copy_(self.host_flat, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _checked(self, buffer: Buffer, arrays: dict[str, np.ndarray]) -> np.ndarray:
        array = arrays.get(buffer.name)
        expected = f"int32[0…{buffer.length}] ({self.name})"
        if array is None:
            raise ShapeError("buffer", buffer.name, expected=expected, got="nothing", fix="pass every buffer of the slot")
        if array.dtype != np.int32 or array.ndim != 1 or len(array) > buffer.length:
            raise ShapeError("buffer", buffer.name, expected=expected, got=f"{array.dtype}{list(array.shape)}",
                             fix="plan the row for a larger bucket, or convert the array")
        return array
