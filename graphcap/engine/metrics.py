"""What a run measures of itself: metrics on their way from the device, the GPU's idle time, the gaps inside a replay.

Calls: train.py, engine/buckets.py, tools/bench_step.py, tools/bench_run.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

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


class Idle:
    """How long the GPU has nothing to do between launches, from an event at the begin and one at the end of each.

    A copy into a slot or out of the ring between two launches counts as idle, which makes the figure a little too large;
    where the host is late, the launch's own latency of some microseconds is missed.
    """

    def __init__(self, *, depth: int = 256) -> None:
        """depth: launches that may be under way; with more the host waits for the oldest."""
        self._events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(depth)]
        self._follows = [False] * depth
        self._count = self._read = 0
        self._paused = True
        self._busy_ms = self._idle_ms = 0.0

    def around(self, launch: Callable[[], None]) -> None:
        """Launch, with an event before and after on the current stream."""
        if self._count - self._read == len(self._events):
            self._collect()
        place = self._count % len(self._events)
        begin, end = self._events[place]
        self._follows[place], self._paused = not self._paused, False
        begin.record()
        launch()
        end.record()
        self._count += 1

    def pause(self) -> None:
        """The time until the next launch is not idle time: the run evaluates or saves."""
        self._paused = True

    def take(self) -> float:
        """Idle time ÷ all time since the last `take`, pauses left out; waits for the last launch. nan without launches."""
        while self._read < self._count:
            self._collect()
        total = self._busy_ms + self._idle_ms
        share = self._idle_ms / total if total else float("nan")
        self._busy_ms = self._idle_ms = 0.0
        return share

    def _collect(self) -> None:
        """Add the oldest launch that was not read yet, and the gap behind it if there is a launch behind it."""
        depth = len(self._events)
        begin, end = self._events[self._read % depth]
        end.synchronize()
        self._busy_ms += begin.elapsed_time(end)
        self._read += 1
        following = self._read % depth
        if self._read < self._count and self._follows[following]:
            next_begin = self._events[following][0]
            next_begin.synchronize()
            self._idle_ms += end.elapsed_time(next_begin)


@dataclass(frozen=True)
class Gaps:
    """Kernels of a replay and the time it ran without any, from torch's profiler. `longest_ms`: kernel names with their ms."""

    num_nodes: int
    total_ms: float
    without_kernel_ms: float
    longest_ms: dict[str, float]

    @property
    def share(self) -> float:
        return self.without_kernel_ms / self.total_ms

    @property
    def us_per_node(self) -> float:
        return 1e3 * self.without_kernel_ms / self.num_nodes


def gaps_of(launch: Callable[[], None], *, times: int) -> Gaps | None:
    """Profile `times` launches in a row; of one launch: kernels and copies, whole time, time without any of them.

    None where the profiler sees no kernel: some containers do not allow it.
    """
    from torch.profiler import ProfilerActivity, profile

    launch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            launch()
        torch.cuda.synchronize()
    spans, by_name = [], {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name] = by_name.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e3 / times
    if not spans:
        return None
    spans.sort()
    busy_us = end = 0.0
    for left, right in spans:
        busy_us += max(0.0, right - max(left, end))
        end = max(end, right)
    total_us = end - spans[0][0]
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:12]
    return Gaps(
        num_nodes=len(spans) // times,
        total_ms=total_us / 1e3 / times,
        without_kernel_ms=(total_us - busy_us) / 1e3 / times,
        longest_ms={name[:70]: round(ms, 3) for name, ms in longest},
    )
