"""The engine: a slot per bucket, and a step launched on it, eagerly or by replaying the graph captured for that bucket.

`fill` puts a row into its bucket's slot, `micro_step` runs the step on that slot, `update` ends an update. On a GPU
`prepare` first warms up every bucket, shuts the door to further compiles, audits, and captures one graph per bucket and
function, largest bucket first; the same calls then replay. Eager and captured run the same functions on the same slots.

Calls: train.py, engine/evaluation.py, and anybody with a step of their own: a `Step` is all the engine knows.
"""

import functools
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from graphcap.engine.capture import Capturer, Graph
from graphcap.engine.guard import Census, Door, check_same_bits
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
        """A row that fills the bucket, for warm-up and audit."""
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

    def audit(self, bucket, slot: Slot) -> None:
        """Check what the step wants checked on its example in `slot`, before capture; raises if it is wrong."""

    def _missing(self, name: str) -> TypeError:
        return TypeError(f"{type(self).__name__} has no {name}(); a step needs it, see graphcap.engine.Step")


@dataclass
class StartUp:
    """What `prepare` did, for the start-up lines and the summary at the end."""

    warm_up_s: dict[str, float] = field(default_factory=dict)
    capture_s: dict[str, float] = field(default_factory=dict)
    pool_bytes: dict[str, int] = field(default_factory=dict)


class Engine:
    """Runs a step over buckets. A bucket is anything hashable with a `name`; give the largest first."""

    def __init__(self, step: Step, buckets: tuple) -> None:
        self.step = step
        on_gpu = step.device.type == "cuda"
        self.stream = torch.cuda.current_stream() if on_gpu else None
        largest = max(Slot(b.name, step.buffers(b), torch.device("meta")).flat.numel() for b in buckets)
        staging = Staging(largest, step.device) if on_gpu else None
        self.slots = {b: Slot(b.name, step.buffers(b), step.device, staging) for b in buckets}
        self.door: Door | None = None
        self.start_up = StartUp()
        self._capturer: Capturer | None = None
        self._census: Census | None = None
        self._micro = {b: functools.partial(step.micro, slot) for b, slot in self.slots.items()}
        self._evaluate = {b: functools.partial(step.evaluate, slot) for b, slot in self.slots.items()}
        self._update = step.update

    def prepare(self, *, eager: bool, say=lambda line: None) -> None:
        """Warm up, shut the door and, unless `eager`, capture every bucket. On a CPU there is nothing to prepare.

        The step's state is scratch until this returns: it ends with `step.reset()`. say: called with a line per bucket.
        Raises: CaptureError if CUDA refuses, if a compile is still running, or if a replay differs from the eager step.
        """
        if self.step.device.type != "cuda":
            return
        self.door = Door()
        self._capturer = Capturer(self.step.device)
        self.stream = self._capturer.stream
        torch.cuda.set_stream(self.stream)
        for bucket in self.slots:
            begin = time.perf_counter()
            self.step.reset()
            self._warm_up(bucket)
            self.start_up.warm_up_s[bucket.name] = time.perf_counter() - begin
            say(f"compile   bucket {bucket.name}: {self.start_up.warm_up_s[bucket.name]:.1f} s")
            self.step.audit(bucket, self.slots[bucket])
        self.door.close()
        expected = {bucket: self._audited(bucket) for bucket in self.slots}
        if not eager:
            self._capture(say)
            for bucket in self.slots:
                check_same_bits(bucket.name, expected[bucket], self._audited(bucket))
        self.step.reset()
        self._census = Census(self.addressed())

    def fill(self, bucket, arrays: dict[str, np.ndarray]) -> None:
        """Copy a row into the slot of its bucket. Raises: ShapeError if there is no such bucket or the row does not fit."""
        self._slot(bucket).fill(arrays)

    def micro_step(self, bucket) -> None:
        """Forward and backward of the row in the bucket's slot."""
        self._slot(bucket)
        self._micro[bucket]()

    def evaluate(self, bucket):
        """Forward only on the row in the bucket's slot; the results are copies that later launches do not touch."""
        self._slot(bucket)
        return tuple(tensor.clone() for tensor in self._evaluate[bucket]())

    def update(self) -> None:
        """One update from all micro steps since the last."""
        self._update()

    def addressed(self) -> dict[str, Tensor]:
        """Every tensor whose address a graph holds and that outlives a step."""
        slots = {f"slot {slot.name}": slot.flat for slot in self.slots.values()}
        return {**self.step.state_tensors(), **slots}

    def check_addresses(self) -> None:
        """Raises: CaptureError if anything a graph reads or writes has moved, for example after a load."""
        if self._census is not None:
            self._census.check(self.addressed())

    def close(self) -> None:
        """Destroy the graphs and open the door. A second time does nothing."""
        if self._capturer is not None:
            torch.cuda.synchronize()
            self._micro = self._evaluate = {}
            self._capturer.close()
            self._capturer = None
        if self.door is not None:
            self.door.remove()
            self.door = None

    def _warm_up(self, bucket) -> None:
        self.fill(bucket, self.step.example(bucket))
        for _ in range(2):
            self._micro[bucket]()
            self._evaluate[bucket]()
            self._update()
        torch.cuda.synchronize()

    def _audited(self, bucket) -> dict[str, Tensor]:
        """Copies of the state after one micro step from the start on the bucket's example."""
        self.step.reset()
        self.fill(bucket, self.step.example(bucket))
        self.micro_step(bucket)
        return {name: tensor.clone() for name, tensor in self.step.state_tensors().items()}

    def _capture(self, say) -> None:
        """One graph per bucket and function, largest bucket first; then the update. From here on the calls replay."""
        before = torch.cuda.memory_reserved()
        for bucket, slot in self.slots.items():
            begin = time.perf_counter()
            micro = self._captured(f"micro step {bucket.name}", functools.partial(self.step.micro, slot))
            evaluate = self._captured(f"evaluation {bucket.name}", functools.partial(self.step.evaluate, slot))
            self._micro[bucket] = micro.replay
            self._evaluate[bucket] = functools.partial(_replayed, evaluate)
            self.start_up.capture_s[bucket.name] = time.perf_counter() - begin
            self.start_up.pool_bytes[bucket.name] = torch.cuda.memory_reserved() - before
            say(
                f"capture   bucket {bucket.name}: {self.start_up.capture_s[bucket.name]:.2f} s, "
                f"pool {self.start_up.pool_bytes[bucket.name] / 2**20:,.0f} MiB"
            )
        self._update = self._captured("update", self.step.update).replay

    def _captured(self, name: str, function) -> Graph:
        return self._capturer.capture(name, function)

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


def _replayed(graph: Graph):
    graph.replay()
    return graph.outputs
