"""A step that is no drafter runs over two buckets on the engine: the README's last example, in one class."""

import numpy as np
import pytest
import torch

from graphcap.engine import Bucket, Buffer, Engine, Step


class Regression(Step):
    """Least squares by gradient descent on rows of x and y; a row may be shorter than its bucket."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.weight, self.gradient = torch.zeros(4, device=device), torch.zeros(4, device=device)

    def buffers(self, bucket):
        x = Buffer("x", bucket.length, pad_value=0.0, dtype=torch.float32, trailing=(4,))
        return x, Buffer("y", bucket.length, pad_value=0.0, dtype=torch.float32)

    def example(self, bucket):
        return {"x": np.ones((bucket.length, 4), np.float32), "y": np.ones(bucket.length, np.float32)}

    def micro(self, slot):
        self.gradient += slot["x"].T @ (slot["x"] @ self.weight - slot["y"])

    def update(self):
        self.weight -= 0.02 * self.gradient
        self.gradient.zero_()

    def state_tensors(self):
        return {"weight": self.weight, "gradient": self.gradient}

    def reset(self):
        self.weight.zero_()
        self.gradient.zero_()


def fit(device: torch.device) -> torch.Tensor:
    """Train on rows of 5 to 16 points; the weight found."""
    buckets = (Bucket(16), Bucket(8))
    engine = Engine(Regression(device), buckets)
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
