"""Warm up, capture, replay and close: CUDA graphs of plain functions, in one memory pool, on one stream.

Knows nothing of drafters. A captured function reads and writes tensors that its owner keeps at fixed addresses; nothing in
it may read a value on the host. A `Graph` keeps no reference to the function it was captured from, so a replay cannot run
Python.

Calls: engine/buckets.py. The only file that names torch.cuda.CUDAGraph.
"""

import gc
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from graphcap.errors import CaptureError


class Graph:
    """One captured function: `replay()` launches it, `outputs` are its results, overwritten by every replay of the pool."""

    def __init__(self, name: str, graph: torch.cuda.CUDAGraph, outputs) -> None:
        self.name, self._graph, self.outputs = name, graph, outputs
        self.num_replays = 0

    def replay(self) -> None:
        self._graph.replay()
        self.num_replays += 1

    def close(self) -> None:
        self._graph.reset()
        self.outputs = None


class Capturer:
    """Captures functions one after the other into one pool; all of them run on `stream`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[Graph] = []

    def warm_up(self, function: Callable[[], object], *, times: int = 2) -> None:
        """Run `function` eagerly on the capture stream: compilation, library workspaces and lazy state happen here."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for _ in range(times):
                function()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.synchronize(self.device)

    def capture(self, name: str, function: Callable[[], object]) -> Graph:
        """Record one call of `function`. It does not run; the first replay does.

        Raises: CaptureError naming the cause and remedies where CUDA cannot record something; what the function raises
        itself as it came. Stream and garbage collector are as before; torch may keep the pool and a wrong capture state, so
        the process should end.
        """
        before, collecting = torch.cuda.current_stream(), gc.isenabled()
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # a collected graph would destroy CUDA objects in the middle of this capture
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                outputs = function()
        except Exception as error:
            first = _first(error)
            if "captur" in str(first).lower():
                raise _capture_error(name, first) from error
            if first is error:
                raise
            raise first from None  # the others in its chain are its echo: a capture that was cut off
        finally:
            torch.cuda.set_stream(before)
            if collecting:
                gc.enable()
        captured = Graph(name, graph, outputs)
        self.graphs.append(captured)
        return captured

    def pool_bytes(self) -> int:
        """Memory reserved for the pool: what all graphs captured so far share."""
        segments = torch.cuda.memory_snapshot()
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) == tuple(self.pool))

    def close(self) -> None:
        """Destroy every graph; before process groups, whose communicators graphs may hold."""
        torch.cuda.synchronize(self.device)
        for graph in self.graphs:
            graph.close()
        self.graphs = []


def _first(error: BaseException) -> BaseException:
    """The first error in the chain is the true one: what follows it in a capture is its echo."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _capture_error(name: str, first: BaseException) -> CaptureError:
    text = (str(first).strip().splitlines() or [type(first).__name__])[0]
    cause = f"{_place(first)} reads a value on the host, synchronizes or copies from pageable memory"
    fix = (
        "(1) keep .item(), .tolist(), bool(tensor), torch.cuda.synchronize() out of the step, "
        "(2) run the same command with --eager, which needs no capture"
    )
    return CaptureError(
        "capture", name, expected="a step that CUDA can record", got=f"{type(first).__name__}: {text}", cause=cause, fix=fix
    )


def _place(error: BaseException) -> str:
    """The innermost line of the error that is not torch's own, as file:line and function."""
    inside = [frame for frame in traceback.extract_tb(error.__traceback__) if f"{os.sep}torch{os.sep}" not in frame.filename]
    if not inside:
        return "the step"
    return f"{Path(inside[-1].filename).name}:{inside[-1].lineno} ({inside[-1].name})"
