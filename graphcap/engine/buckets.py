"""The engine: a slot per bucket, and the step launched on it.

`fill` puts a row into its bucket's slot, `micro_step` runs the step on that slot, `update` ends an update. This is the
eager way: the same functions on the same padded slots that a capture would record.

Calls: train.py, engine/evaluation.py.
"""

import numpy as np
import torch

from graphcap.engine.slots import Slot
from graphcap.engine.step import DrafterStep
from graphcap.errors import ShapeError


class Engine:
    """Runs a step over buckets. A bucket is anything hashable with `length`, `num_anchors` and `name`."""

    def __init__(self, step: DrafterStep, buckets: tuple) -> None:
        self.step = step
        self.slots = {b: Slot(b.name, step.buffers(b.length, b.num_anchors), step.device) for b in buckets}
        self.features = {bucket: step.features_of(slot) for bucket, slot in self.slots.items()}

    @property
    def gradients(self) -> torch.Tensor:
        """float32 [P' + statistics]: what ranks sum before an update."""
        return self.step.state.sums

    def fill(self, bucket, arrays: dict[str, np.ndarray]) -> None:
        """Copy a row into the slot of its bucket. Raises: ShapeError if there is no such bucket or the row does not fit."""
        self._slot(bucket).fill(arrays)

    def micro_step(self, bucket) -> None:
        """Forward and backward of the row in the bucket's slot."""
        self.step.micro(self._slot(bucket), self.features[bucket])

    def evaluate(self, bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward only: statistics float32 [4 + J] and bool [N, J], which slots are right."""
        return self.step.evaluate(self._slot(bucket), self.features[bucket])

    def update(self) -> None:
        """One optimizer update from all micro steps since the last."""
        self.step.update()

    def _slot(self, bucket) -> Slot:
        if bucket not in self.slots:
            nearest = min(self.slots, key=lambda known: abs(known.length - bucket.length))
            raise ShapeError("bucket", bucket.name, expected=f"one of {', '.join(b.name for b in self.slots)}", got=bucket.name,
                             fix=f"plan again; the nearest bucket is {nearest.name}")
        return self.slots[bucket]
