"""Features apart from the step that uses them: a step that only computes them, and one that finds them in its slot.

`FeatureStep` is the first half of engine/step.py's micro step, for `graphcap extract`; `StoredStep` the other half, with no
target but its embedding and head. Both run at the same shapes as the whole.

Calls: extract.py, build.py.
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from graphcap.engine.buckets import Step
from graphcap.engine.slots import Buffer, Slot, as_numpy
from graphcap.engine.step import DrafterStep
from graphcap.model.target import Target

EXAMPLE_TOKENS = 251  # of random features that an example repeats: of a long row they would take seconds to draw


class StoredStep(DrafterStep):
    """The drafter's step on features that the host fills in. `target` needs its embedding and head only."""

    def buffers(self, bucket) -> tuple[Buffer, ...]:
        dtype, trailing = self.target.head_VD.dtype, (self.target.num_features,)
        features = Buffer("features", bucket.length, pad_value=0, dtype=dtype, trailing=trailing)
        return (*super().buffers(bucket), features)

    def example(self, bucket, *, num_documents: int = 3, full: bool = False) -> dict[str, np.ndarray]:
        arrays = super().example(bucket, num_documents=num_documents, full=full)
        generator = torch.Generator().manual_seed(int(arrays["anchors"].sum()))
        some_PF = torch.randn(EXAMPLE_TOKENS, self.target.num_features, generator=generator).to(self.target.head_VD.dtype)
        place_T = torch.arange(len(arrays["token_ids"])) % EXAMPLE_TOKENS
        return {**arrays, "features": as_numpy(some_PF[place_T])}

    def _features(self, slot: Slot) -> Tensor:
        return slot["features"]


class FeatureStep(Step):
    """The target's forward over a row into one static tensor. An update only counts: there is nothing to learn."""

    def __init__(self, target: Target, *, largest: int) -> None:
        """largest: tokens of the largest bucket."""
        self.target, self.device = target, target.head_VD.device
        self.features_TF = target.head_VD.new_zeros(largest, target.num_features)
        self.counter = torch.zeros((), dtype=torch.int64, device=self.device)
        on_gpu = self.device.type == "cuda"
        shape, dtype = self.features_TF.shape, self.features_TF.dtype
        self._host = [torch.zeros(shape, dtype=dtype, pin_memory=on_gpu) for _ in range(2)]
        self._arrived = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._examples = itertools.count()

    def buffers(self, bucket) -> tuple[Buffer, ...]:
        return Buffer("token_ids", bucket.length, pad_value=0), Buffer("position", bucket.length, pad_value=0)

    def example(self, bucket) -> dict[str, np.ndarray]:
        """A row of two documents and a padded tail, another one at every call."""
        draw = np.random.default_rng((bucket.length, next(self._examples)))
        length = bucket.length - bucket.length // 16
        parts = [length // 2, length - length // 2]
        return {
            "token_ids": draw.integers(0, self.target.head_VD.shape[0], length).astype(np.int32),
            "position": np.concatenate([np.arange(part) for part in parts]).astype(np.int32),
        }

    def micro(self, slot: Slot) -> None:
        """The features of the row in `slot`, into the first rows of `features_TF`. Capture: safe."""
        length = slot["token_ids"].numel()
        self.target.features(slot["token_ids"], slot["position"], self.features_TF[:length])

    def update(self) -> None:
        self.counter += 1

    def state_tensors(self) -> dict[str, Tensor]:
        return {"features": self.features_TF, "counter": self.counter}

    def addressed(self) -> dict[str, Tensor]:
        model = self.target.model
        return {f"target {name}": tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    def reset(self) -> None:
        self.features_TF.zero_()
        self.counter.zero_()

    def send(self, number: int, num_tokens: int) -> None:
        """Begin to copy the features of the row launched last to the host, as row `number`."""
        self._host[number % 2][:num_tokens].copy_(self.features_TF[:num_tokens], non_blocking=True)
        if self._arrived[number % 2] is not None:
            self._arrived[number % 2].record()

    def received(self, number: int, num_tokens: int) -> np.ndarray:
        """The features of row `number`, [num_tokens, F] as the host holds them; overwritten by row number + 2."""
        if self._arrived[number % 2] is not None:
            self._arrived[number % 2].synchronize()
        return as_numpy(self._host[number % 2][:num_tokens])
