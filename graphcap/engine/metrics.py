"""Metrics on their way from the device to the host: copied on the stream of the replays, read when the copy is done.

Calls: train.py.
"""

import torch
from torch import Tensor


class Fetch:
    """A copy of some rows of a metrics ring. It begins at once; `ready` says whether `rows` would wait."""

    def __init__(self, ring: Tensor, first: int, count: int) -> None:
        """ring: float32 [R, M]. first: number of the first row ever written that is wanted; rows lie at number % R."""
        size = ring.shape[0]
        assert count <= size, f"{count} rows wanted of a ring of {size}"
        start = first % size
        parts = [ring[start : min(start + count, size)], ring[: max(0, start + count - size)]]
        on_gpu = ring.device.type == "cuda"
        self._host = torch.empty(count, ring.shape[1], dtype=ring.dtype, pin_memory=on_gpu)
        place = 0
        for part in parts:
            self._host[place : place + len(part)].copy_(part, non_blocking=True)
            place += len(part)
        self._done = torch.cuda.Event() if on_gpu else None
        if self._done is not None:
            self._done.record()

    def ready(self) -> bool:
        return self._done is None or self._done.query()

    def rows(self) -> list[list[float]]:
        """The rows, oldest first; waits for the copy."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.tolist()
