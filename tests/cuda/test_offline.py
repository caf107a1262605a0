"""On a GPU: features extracted by replay train bit-equal to features computed in the captured step, in bfloat16."""

import numpy as np
import pytest
import torch

from graphcap.engine import Engine
from graphcap.engine.guard import bits_of
from graphcap.engine.offline import FeatureStep, StoredStep
from graphcap.model.target import Target
from tests.cuda.test_engine import BUCKETS, DEVICE, random_row, small_step
from tests.toys import tiny_model

pytestmark = pytest.mark.cuda


def rows(seed: int) -> list[tuple]:
    rng = np.random.default_rng(seed)
    return [(bucket, random_row(bucket, rng)) for bucket in BUCKETS for _ in range(2)]


def extracted(filled: list[tuple]) -> list[np.ndarray]:
    """The features of the rows, by a captured engine, each taken after the next was launched."""
    step = FeatureStep(Target(tiny_model("qwen3", 0, head_dim=32).to(DEVICE, torch.bfloat16), (0, 2)), largest=512)
    engine = Engine(step, BUCKETS)
    engine.prepare(eager=False)
    found, lengths = [], [len(arrays["token_ids"]) for _, arrays in filled]
    for number, (bucket, arrays) in enumerate(filled):
        engine.fill(bucket, {name: arrays[name] for name in ("token_ids", "position")})
        engine.micro_step(bucket)
        step.send(number, lengths[number])
        if number:
            found.append(step.received(number - 1, lengths[number - 1]).copy())
    found.append(step.received(len(filled) - 1, lengths[-1]).copy())
    engine.close()
    return found


def trained(step, filled: list[tuple]) -> dict[str, int]:
    """Checksums of state and evaluation after an update of every row."""
    engine = Engine(step, BUCKETS)
    engine.prepare(eager=False)
    for bucket, arrays in filled:
        engine.fill(bucket, arrays)
        engine.micro_step(bucket)
        engine.update()
    bits = {name: bits_of(tensor) for name, tensor in step.state_tensors().items()}
    engine.fill(*filled[0])
    bits |= {f"evaluation {n}": bits_of(tensor) for n, tensor in enumerate(engine.evaluate(filled[0][0]))}
    engine.close()
    return bits


def test_extracted_features_train_bit_equal_to_computed_ones_and_one_changed_element_does_not():
    filled = rows(int(np.random.SeedSequence().entropy % 2**32))
    features = extracted(filled)
    computed = trained(small_step(), filled)
    stored = [(bucket, {**arrays, "features": one}) for (bucket, arrays), one in zip(filled, features, strict=True)]
    assert trained(small_step(kind=StoredStep), stored) == computed
    anchor = next(int(p) for p in filled[0][1]["anchors"] if filled[0][1]["position"][p] > 0)
    features[0][anchor - 1, 0] ^= 1 << 14  # must fail
    assert trained(small_step(kind=StoredStep), stored) != computed
