"""Launches that the GPU has begun and finished, written by the GPU itself into memory of the host that outlives the process.

A fault shows on the host only at some later call. These two numbers say which launch it was in.

Calls: engine/buckets.py. Made by build.py on the flight recorder's memory.
"""

from collections.abc import Callable

import torch

from graphcap.errors import CaptureError


class Marks:
    """Two int64 in host memory, [begun, finished], that every marked launch raises by one."""

    def __init__(self, memory, place: int, device: torch.device) -> None:
        """memory: a writable buffer of the host, page-aligned; the numbers stand at byte `place`, on a page of their own.

        Raises: CaptureError if the driver does not take this memory.
        """
        self._page = torch.frombuffer(memory, dtype=torch.int64, count=2, offset=place)
        address = self._page.data_ptr()
        assert address % 4096 == 0, f"the marks begin at {address % 4096} bytes of a page"
        # Pinned, so that a copy into it can be captured; never unregistered, the process keeps the mapping to its end.
        code = int(torch.cuda.cudart().cudaHostRegister(address, 4096, 0))
        if code:
            raise CaptureError(
                "flight record",
                "its page for the GPU",
                expected="memory that the driver can write to",
                got=f"error {code} of cudaHostRegister",
                fix="make /dev/shm writable",
            )
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)

    def reset(self) -> None:
        """No launch so far. Waits for those under way."""
        torch.cuda.synchronize()
        self._counts.zero_()
        self._page.zero_()

    def around(self, function: Callable[[], object]) -> Callable[[], object]:
        """The function with a mark before and after it. Capture: safe."""

        def marked():
            self._mark(0)
            result = function()
            self._mark(1)
            return result

        return marked

    def _mark(self, which: int) -> None:
        self._counts[which].add_(1)
        self._page[which : which + 1].copy_(self._counts[which : which + 1], non_blocking=True)
