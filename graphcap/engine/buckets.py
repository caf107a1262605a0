"""The engine: a slot per bucket, and a step launched on it, eagerly or by replaying the graph captured for that bucket.

`fill` puts a row into its bucket's slot, `micro_step` runs the step on that slot, `update` ends an update. On a GPU
`prepare` first warms up every bucket, shuts the door to compiles, audits, and captures one graph per bucket and
function, largest bucket first; the same calls then replay. Eager and captured run the same functions on the same slots.

Calls: train.py, engine/evaluation.py, and anybody with a step of their own: a `Step` is all the engine knows.
"""

import functools
import gc
import math
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from graphcap.engine.capture import Capturer, Graph
from graphcap.engine.guard import Census, Compiles, Door, bits_of, check_same_bits, explained
from graphcap.engine.marks import Marks
from graphcap.engine.metrics import Idle, gaps_of
from graphcap.engine.slots import Buffer, Slot, Staging
from graphcap.errors import ShapeError


class Step:
    """What the engine runs; derive from it. Functions read their slot and the step's own tensors, nothing on the host.

    A step needs `device`, `buffers`, `example`, `micro`, `update`, `state_tensors` and `reset`; the rest may be left out.
    """

    device: torch.device

    def buffers(self, bucket) -> tuple[Buffer, ...]:
        """The host-filled buffers of a bucket."""
        raise self._missing("buffers")

    def example(self, bucket) -> dict[str, np.ndarray]:
        """A row that fills the bucket, for warm-up and audit; better another one at every call."""
        raise self._missing("example")

    def micro(self, slot: Slot) -> None:
        """One micro step; adds to tensors of `state_tensors`."""
        raise self._missing("micro")

    def update(self) -> None:
        """Ends an update."""
        raise self._missing("update")

    def state_tensors(self) -> dict[str, Tensor]:
        """Every tensor that outlives a step, by name. Their addresses never change."""
        raise self._missing("state_tensors")

    def reset(self) -> None:
        """Bring the state, in place, to where training begins."""
        raise self._missing("reset")

    def evaluate(self, slot: Slot) -> tuple[Tensor, ...]:
        """Forward only; returns tensors. A step without evaluation returns none."""
        return ()

    def addressed(self) -> dict[str, Tensor]:
        """Beside `state_tensors`, every tensor that a captured function reads and that outlives it."""
        return {}

    def audit(self, bucket, slot: Slot) -> None:
        """Check what the step wants checked on its example in `slot`, before capture; raises if it is wrong."""

    def _missing(self, name: str) -> TypeError:
        return TypeError(f"{type(self).__name__} has no {name}(); a step needs it, see graphcap.engine.Step")


@dataclass
class StartUp:
    """What `prepare` did, for the start-up lines and the summary at the end.

    total_s: warm-ups, audits and captures. memory_bytes: all GPU memory that this process holds then, CUDA's context apart.
    """

    total_s: float = 0.0
    memory_bytes: int = 0
    warm_up_s: dict[str, float] = field(default_factory=dict)
    capture_s: dict[str, float] = field(default_factory=dict)
    pool_bytes: dict[str, int] = field(default_factory=dict)
    compiles: Compiles = field(default_factory=Compiles)


class Engine:
    """Runs a step over buckets. A bucket is anything hashable with a `name`; give the largest first."""

    def __init__(self, step: Step, buckets: tuple, *, note=None, marks: Marks | None = None) -> None:
        """note: called with (phase, bucket=…, launch=…) before everything the engine begins. marks: set by every launch."""
        self.step = step
        self._note = note if note is not None else _nothing
        self._marks, self._num_launches, self._preparing = marks, 0, False
        on_gpu = step.device.type == "cuda"
        largest = max(Slot(b.name, step.buffers(b), torch.device("meta")).flat.numel() for b in buckets)
        staging = Staging(largest, step.device) if on_gpu else None
        self.slots = {b: Slot(b.name, step.buffers(b), step.device, staging) for b in buckets}
        self.door: Door | None = None
        self.start_up = StartUp()
        self._capturer: Capturer | None = None
        self._stream_before: torch.cuda.Stream | None = None
        self._census: Census | None = None
        self._idle: Idle | None = None  # once captured
        # What a call launches: the step's function itself, or, once captured, the replay of its graph.
        self._micro = {b: self._marked(functools.partial(step.micro, slot)) for b, slot in self.slots.items()}
        self._evaluate = {b: functools.partial(step.evaluate, slot) for b, slot in self.slots.items()}
        self._update = self._marked(step.update)

    def prepare(self, *, eager: bool, say=lambda line: None) -> None:
        """Warm up, shut the door and, unless `eager`, capture every bucket. On a CPU there is nothing to prepare.

        The step's state is scratch until this returns: it ends with `step.reset()`. say: called with a line per bucket.
        Raises: CaptureError if CUDA refuses, if a compile is still running, or if a replay differs from the eager step.
        """
        if self.step.device.type != "cuda":
            return
        start = time.perf_counter()
        self.door = Door()
        self.start_up.compiles = self.door.counts
        self._capturer = Capturer(self.step.device)
        self._stream_before = torch.cuda.current_stream()
        self._capturer.stream.wait_stream(self._stream_before)
        torch.cuda.set_stream(self._capturer.stream)
        self._preparing = True
        for bucket in self.slots:
            begin = time.perf_counter()
            self._note("warm-up", bucket=bucket.name)
            self.step.reset()
            with explained(bucket.name, self._smaller(bucket)):
                self._warm_up(bucket)
                self.start_up.warm_up_s[bucket.name] = time.perf_counter() - begin
                say(f"warm-up   bucket {bucket.name}: {self.start_up.warm_up_s[bucket.name]:.1f} s")
                self._note("audit", bucket=bucket.name)
                self.step.audit(bucket, self.slots[bucket])
        self.door.close()
        rows = {bucket: self.step.example(bucket) for bucket in self.slots}  # not those of the warm-up, if examples differ
        expected = {bucket: self._audited(bucket, rows[bucket]) for bucket in self.slots}
        if not eager:
            self._capture(say)
            for bucket in self.slots:
                check_same_bits(bucket.name, expected[bucket], self._audited(bucket, rows[bucket]))
            self._idle = Idle()
        self._preparing = False
        self.step.reset()
        if self._marks is not None:
            self._marks.reset(self._num_launches)
        self._census = Census(self.addressed())
        torch.cuda.empty_cache()  # what only the warm-up needed is free for others
        self.start_up.memory_bytes = torch.cuda.memory_reserved(self.step.device)
        self.start_up.total_s = time.perf_counter() - start

    def fill(self, bucket, arrays: dict[str, np.ndarray]) -> None:
        """Copy a row into the slot of its bucket. Raises: ShapeError if there is no such bucket or the row does not fit."""
        self._slot(bucket).fill(arrays)

    def micro_step(self, bucket) -> None:
        """Forward and backward of the row in the bucket's slot."""
        self._slot(bucket)
        self._launch(self._micro[bucket], bucket.name)

    def evaluate(self, bucket):
        """Forward only on the row in the bucket's slot; the results are copies that later launches do not touch."""
        self._slot(bucket)
        self._note("audit" if self._preparing else "eval", bucket=bucket.name)
        self.pause()
        return tuple(tensor.clone() for tensor in self._evaluate[bucket]())

    def update(self) -> None:
        """One update from all micro steps since the last."""
        self._launch(self._update, "update")

    def pause(self) -> None:
        """Leave the time until the next launch out of the GPU's idle time: the run evaluates or saves."""
        if self._idle is not None:
            self._idle.pause()

    def idle_share(self) -> float:
        """The GPU's idle time between replays ÷ all time, since the last call; pauses left out. nan if nothing was replayed."""
        return self._idle.take() if self._idle is not None else float("nan")

    def addressed(self) -> dict[str, Tensor]:
        """Every tensor whose address a graph holds and that outlives a step."""
        slots = {f"slot {slot.name}": slot.flat for slot in self.slots.values()}
        return {**self.step.state_tensors(), **self.step.addressed(), **slots}

    def check_addresses(self) -> None:
        """Raises: CaptureError if anything a graph reads or writes has moved, for example after a load."""
        if self._census is not None:
            self._census.check(self.addressed())

    def summary(self) -> list[str]:
        """Lines for people at the end of a run: what was compiled and captured, what was replayed, and where time was lost.

        Replays the largest bucket a few times more under a profiler, so what the step sums up is no longer training's.
        """
        if self._stream_before is None:
            return []
        compiles, start = self.start_up.compiles, self.start_up
        lines = [f"buckets {len(self.slots)}, compiles {compiles.before} before training and {compiles.refused} refused after"]
        if self._idle is not None:
            graphs, pool = self._capturer.graphs, max(start.pool_bytes.values()) / 2**20
            lines.append(f"graphs {len(graphs)}, replays {sum(graph.num_replays for graph in graphs):,}, pool {pool:,.0f} MiB")
        lines.append(f"start-up {start.total_s:.0f} s, memory {start.memory_bytes / 2**30:.2f} GiB")
        return [*lines, *self._time_lost()]

    def _time_lost(self) -> list[str]:
        """The GPU's idle share between replays and the share of a replay without a kernel, if anything was replayed."""
        share = self.idle_share()
        if math.isnan(share):
            return []
        bucket = next(iter(self.slots))
        gaps = gaps_of(self._micro[bucket], times=3)
        inside = "not measured, the profiler sees no kernels here"
        if gaps is not None:
            inside = f"{gaps.share:.1%} of {gaps.total_ms:.2f} ms ({bucket.name}, {gaps.num_nodes} nodes)"
        return [f"GPU idle {share:.1%} between replays; without a kernel in a replay {inside}"]

    def close(self) -> None:
        """Destroy the graphs, open the door and give the stream back. A second time does nothing.

        Raises: what CUDA says if it is dead; the door is open then, too.
        """
        capturer, self._capturer = self._capturer, None
        door, self.door = self.door, None
        stream, self._stream_before = self._stream_before, None
        try:
            if capturer is not None:
                torch.cuda.synchronize()
                self._micro = self._evaluate = {}
                capturer.close()
                self._idle = None
        finally:
            gc.unfreeze()
            if door is not None:
                door.remove()
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
                torch.cuda.set_stream(stream)

    def _warm_up(self, bucket) -> None:
        self.fill(bucket, self.step.example(bucket))
        for _ in range(2):
            self._micro[bucket]()
            self._evaluate[bucket]()
            self._update()
        torch.cuda.synchronize()

    def _audited(self, bucket, arrays: dict[str, np.ndarray]) -> dict[str, int]:
        """Checksums of what an evaluation, a micro step and an update from the start leave on these inputs."""
        self.step.reset()
        with explained(bucket.name, self._smaller(bucket)):
            self.fill(bucket, arrays)
            bits = {f"evaluation {number}": bits_of(tensor) for number, tensor in enumerate(self.evaluate(bucket))}
            self.micro_step(bucket)
            bits |= {f"{name} after a micro step": bits_of(tensor) for name, tensor in self.step.state_tensors().items()}
            self.update()
            return bits | {f"{name} after an update": bits_of(tensor) for name, tensor in self.step.state_tensors().items()}

    def _capture(self, say) -> None:
        """One graph per bucket and function, largest bucket first; then the update. From here on the calls replay."""
        gc.collect()
        gc.freeze()  # what stands now stays: torch collects before each capture, and would search all of it each time
        for bucket in self.slots:
            begin = time.perf_counter()
            self._note("capture", bucket=bucket.name)
            with explained(bucket.name, self._smaller(bucket)):
                micro = self._capturer.capture(f"micro step {bucket.name}", self._micro[bucket])
                evaluate = self._capturer.capture(f"evaluation {bucket.name}", self._evaluate[bucket])
            self._micro[bucket] = micro.replay
            self._evaluate[bucket] = functools.partial(_replayed, evaluate)
            self.start_up.capture_s[bucket.name] = time.perf_counter() - begin
            self.start_up.pool_bytes[bucket.name] = self._capturer.pool_bytes()
            say(
                f"capture   bucket {bucket.name}: {self.start_up.capture_s[bucket.name]:.2f} s, "
                f"pool {self.start_up.pool_bytes[bucket.name] / 2**20:,.0f} MiB"
            )
        self._update = self._capturer.capture("update", self._update).replay

    def _launch(self, launch, what: str) -> None:
        """Note it and call it; once captured, between the two events that tell the GPU's idle time. what: bucket or update."""
        self._num_launches += 1
        number = self._num_launches if self._marks is not None else 0
        phase = "audit" if self._preparing else "step" if self._idle is None else "replay"
        self._note(phase, bucket=what, launch=number)
        if self._idle is None:
            launch()
        else:
            self._idle.around(launch)

    def _marked(self, function):
        return function if self._marks is None else self._marks.around(function)

    def _smaller(self, bucket) -> str:
        """Name of the next smaller bucket, or nothing."""
        names = [one.name for one in self.slots]
        return "".join(names[names.index(bucket.name) + 1 :][:1])

    def _slot(self, bucket) -> Slot:
        if bucket not in self.slots:
            names = ", ".join(known.name for known in self.slots)
            size = getattr(bucket, "length", None)
            near = min(self.slots, key=lambda known: abs(known.length - size)).name if size is not None else names
            raise ShapeError(
                "bucket",
                bucket.name,
                expected=f"one of {names}",
                got=bucket.name,
                fix=f"plan again; the nearest bucket is {near}",
            )
        return self.slots[bucket]


def _nothing(phase: str, *, bucket: str, launch: int = 0) -> None:
    """Nobody keeps a record."""


def _replayed(graph: Graph):
    graph.replay()
    return graph.outputs
