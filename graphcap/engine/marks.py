"""How many launches the GPU has finished, written by the GPU itself into memory of the host that outlives the process.

A fault shows on the host only at some later call. This number says which launch it was in: launches run one after the
other, so it was the first that is not finished.

Calls: engine/buckets.py. Made by build.py on the flight recorder's memory.
"""

import contextlib
from collections.abc import Callable

import torch

from graphcap.errors import CaptureError


class Marks:
    """One int64 in host memory that every marked launch raises by one as its last kernel: some 3 µs over the bus."""

    def __init__(self, memory, place: int, device: torch.device) -> None:
        """memory: a writable buffer of the host, page-aligned; the number stands at byte `place`, on a page of its own.

        Raises: CaptureError if the driver does not take this memory.
        """
        page = torch.frombuffer(memory, dtype=torch.int64, count=1, offset=place)
        address = page.data_ptr()
        assert address % 4096 == 0, f"the mark begins at {address % 4096} bytes of a page"
        # Pinned, so that kernels can write it; never unregistered, the process keeps the mapping to its end.
        code = int(torch.cuda.cudart().cudaHostRegister(address, 4096, 0))
        if code:
            with contextlib.suppress(RuntimeError):  # the refusal is CUDA's last error: the next launch raises it, once
                torch.zeros(1, device=device)
            raise CaptureError(
                "flight record",
                "its page for the GPU",
                expected="memory that the driver can write to, as /dev/shm is",
                got=f"error {code} of cudaHostRegister",
                fix="make /dev/shm writable",
            )
        self._finished = _as_seen_by_the_gpu(page, device)

    def reset(self, launches: int) -> None:
        """So many launches have finished. Waits for those under way."""
        torch.cuda.synchronize()
        self._finished.fill_(launches)
        torch.cuda.synchronize()

    def around(self, function: Callable[[], object]) -> Callable[[], object]:
        """The function with a mark at its end. Capture: safe."""

        def marked():
            result = function()
            self._finished.add_(1)
            return result

        return marked


def _as_seen_by_the_gpu(page, device: torch.device):
    """A CUDA tensor on registered memory of the host, which GPUs address as the host does (CUDA's unified addressing)."""
    place = {"shape": (page.numel(),), "typestr": "<i8", "data": (page.data_ptr(), False), "version": 2}
    described = type("Page", (), {"__cuda_array_interface__": place, "memory": page})()
    return torch.as_tensor(described, device=device)
