"""The audit of a bucket's attention: the right layer passes, and each way of being wrong is named with its bucket."""

import pytest

from graphcap.errors import CaptureError
from graphcap.model.blocks import Visibility
from tests.toys import fresh_seed, make_engine, make_step, random_drafter, tiny_target


def audited(attention_class=None) -> None:
    """Audit a step's example; attention_class: wraps the step's attention."""
    seed = fresh_seed()
    step = make_step(tiny_target(seed), random_drafter(seed))
    if attention_class is not None:
        step.attention = attention_class(step.attention)
    engine, (bucket,) = make_engine(step, (256, 32))
    engine.fill(bucket, step.example(bucket))
    step.audit(bucket, engine.slots[bucket])


class Wrapped:
    def __init__(self, right) -> None:
        self.right = right

    def mask(self, visibility, num_queries):
        return self.right.mask(visibility, num_queries)

    def __call__(self, q, context, blocks, mask, scale):
        return self.right(q, self.changed(context), self.changed(blocks), mask, scale)

    def changed(self, keys_values):
        return keys_values


class OneKeyTooMany(Wrapped):
    def mask(self, visibility, num_queries):
        moved = Visibility(visibility.low_R, visibility.high_R + 1, visibility.group, visibility.num_context)
        return self.right.mask(moved, num_queries)


class OneKeyTooFew(Wrapped):
    def mask(self, visibility, num_queries):
        moved = Visibility(visibility.low_R + 1, visibility.high_R, visibility.group, visibility.num_context)
        return self.right.mask(moved, num_queries)


class NoGradientOfKeys(Wrapped):
    def changed(self, keys_values):
        k, v = keys_values
        return k.detach() + 0 * k, v


class HalfGradientOfValues(Wrapped):
    def changed(self, keys_values):
        k, v = keys_values
        return k, v.detach() + 0.5 * (v - v.detach())


def test_the_attention_that_trains_passes():
    audited()
    audited(Wrapped)


@pytest.mark.parametrize(
    "fault, quantity",
    [
        (OneKeyTooMany, "output"),
        (OneKeyTooFew, "output"),
        (NoGradientOfKeys, "gradient of the (blocks|context's keys)"),
        (HalfGradientOfValues, "gradient of the (blocks|context's values)"),
    ],
)
def test_a_wrong_attention_is_named_with_bucket_and_quantity(fault, quantity):
    with pytest.raises(CaptureError, match=f"256/32.*attention's {quantity}"):
        audited(fault)
