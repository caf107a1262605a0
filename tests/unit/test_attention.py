"""Dense attention against float64 loops."""

import random

import pytest
import torch

from graphcap.model.attention import TILE, DenseAttention, attention_for
from graphcap.model.blocks import Visibility, decay, make_blocks
from tests.toys import MASK_ID, fresh_seed, naive_attention, padded, random_lengths, random_row

SLOTS = {4: 32, 7: 128, 8: 32, 10: 64, 16: 16}  # anchor slots that make whole tiles


def block_visibility(block_size: int, length: int, rng: random.Random, *, share_used: float = 0.8) -> tuple[Visibility, int]:
    """The visibility of random blocks: several documents, anchors at 0, at tile edges and last; some slots unused."""
    num_slots = SLOTS[block_size]
    arrays = random_row(random_lengths(length, rng), rng, num_anchors=max(1, int(share_used * num_slots)))
    token_ids, position, supervised, anchors = padded(arrays, length, num_slots)
    special = [place for place in (0, TILE - 1, TILE, TILE + 1, length - 1) if place < length]
    used = sorted({*special, *anchors[anchors >= 0].tolist()})[: num_slots - 1]
    anchors = torch.tensor(used + [-1] * (num_slots - len(used)))
    blocks = make_blocks(
        token_ids, position, supervised, anchors, decay_J=torch.tensor(decay(block_size, 4.0)), mask_token_id=MASK_ID
    )
    return blocks.visibility, num_slots * block_size


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dense_attention_is_softmax_attention_in_float64_loops(groups):
    seed = fresh_seed()
    visibility, num_queries = block_visibility(4, 128, random.Random(seed))
    num_queries = 32  # the first blocks are enough for a loop
    visibility = Visibility(visibility.low_R[:8], visibility.high_R[:8], group=4, num_context=128)
    q, k, v = torch.randn(4, num_queries, 8), torch.randn(groups, 160, 8), torch.randn(groups, 160, 8)
    mask = DenseAttention().mask(visibility, num_queries)
    out = DenseAttention()(q, (k[:, :128], v[:, :128]), (k[:, 128:], v[:, 128:]), mask, 0.35)
    expected = naive_attention(q, k, v, mask, 0.35)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    mask[0, 128] = ~mask[0, 128]  # must fail: one pair
    with pytest.raises(AssertionError):
        torch.testing.assert_close(out.double(), naive_attention(q, k, v, mask, 0.35), rtol=1e-5, atol=1e-5)


def test_the_device_chooses_the_body():
    assert isinstance(attention_for(torch.device("cpu")), DenseAttention)
