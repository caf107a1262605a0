"""A step that is no drafter runs over two buckets on the engine: the README's last example."""

from pathlib import Path

import numpy as np
import pytest
import torch

from graphcap.engine import Bucket, Engine, Step


def least_squares(device: torch.device) -> Step:
    """The README's example, run as it stands there."""
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 40
    names: dict = {}
    exec(code, names)  # noqa: S102 - our own README
    return names["LeastSquares"](device)


def fit(device: torch.device) -> torch.Tensor:
    """Train on rows of 5 to 16 points; the weight found."""
    buckets = (Bucket(16), Bucket(8))
    engine = Engine(least_squares(device), buckets)
    engine.prepare(eager=False)
    rng, truth = np.random.default_rng(), np.array([1.0, -2.0, 0.5, 3.0], np.float32)
    for number in range(400):
        bucket = buckets[number % 2]
        x = rng.standard_normal((bucket.length - int(rng.integers(3)), 4)).astype(np.float32)
        engine.fill(bucket, {"x": x, "y": x @ truth})
        engine.micro_step(bucket)
        engine.update()
    found = engine.step.weight.cpu()
    engine.close()
    return found


def test_a_step_that_is_no_drafter_learns_over_two_buckets():
    assert torch.allclose(fit(torch.device("cpu")), torch.tensor([1.0, -2.0, 0.5, 3.0]), atol=1e-3)


@pytest.mark.cuda
def test_a_step_that_is_no_drafter_is_captured_and_replayed_over_two_buckets():
    assert torch.allclose(fit(torch.device("cuda")), torch.tensor([1.0, -2.0, 0.5, 3.0]), atol=1e-3)


def test_a_step_that_lacks_a_function_is_told_which():
    class Half(Step):
        device = torch.device("cpu")

    with pytest.raises(TypeError, match=r"Half has no buffers\(\)"):
        Engine(Half(), (Bucket(8),))
