"""Compiled flex attention in bfloat16 against dense float64: outputs and gradients, on the analytic block mask."""

import random

import pytest
import torch

from graphcap.model.attention import TILE, DenseAttention, attention_for
from graphcap.model.blocks import Visibility, decay, make_blocks, row_visibility
from tests.toys import MASK_ID, fresh_seed, padded, random_row

pytestmark = pytest.mark.cuda

BOUND = 2**-7  # largest difference ÷ largest value of the reference
LENGTH, HEADS = 512, 4
SLOTS = {4: 64, 7: 128, 8: 64, 10: 64, 16: 40}  # anchor slots that make whole tiles


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda")


def random_blocks(block_size: int, rng: random.Random, device: torch.device) -> tuple[Visibility, torch.Tensor]:
    """Three documents and padding; anchors at 0, around multiples of 128, at the last place, and dropped in between.

    Returns the visibility and which queries belong to a used slot, bool [N·K].
    """
    row = random_row([130, 201, 160], rng)
    tensors = padded(row, LENGTH, LENGTH)
    num_slots = SLOTS[block_size]
    special = {0, TILE - 1, TILE, TILE + 1, 2 * TILE, 3 * TILE, LENGTH - 1}
    anchors = sorted(special | set(rng.sample(range(LENGTH), num_slots // 2 - len(special))))
    slots = anchors + [-1] * (num_slots - len(anchors))
    rng.shuffle(slots)
    blocks = make_blocks(*tensors[:3], torch.tensor(slots), decay_J=torch.tensor(decay(block_size, 4.0)), mask_token_id=MASK_ID)
    seen = blocks.visibility
    visibility = Visibility(seen.low_R.to(device), seen.high_R.to(device), group=block_size, num_context=LENGTH)
    return visibility, blocks.keep_N.repeat_interleave(block_size).to(device)


def reference(q, k, v, visible, scale):
    """Dense softmax attention in float64; keys and values repeated for their heads."""
    repeat = q.shape[0] // k.shape[0]
    score = torch.einsum("hqc,hkc->hqk", q, k.repeat_interleave(repeat, 0)) * scale
    share = score.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,hkc->hqc", share, v.repeat_interleave(repeat, 0))


def assert_near(name: str, ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(ours).all(), f"{name} is not finite"
    error = ((ours.double() - expected).abs().max() / expected.abs().max()).item()
    assert error <= BOUND, f"{name}: {error:.2e} of the largest value"


def compare(visibility: Visibility, used: torch.Tensor, head_dim: int, groups: int, *, hurt=None) -> None:
    """Output and gradients of a loss on the used queries only. hurt: a change of the reference's mask."""
    device, num_queries = used.device, used.numel()
    num_keys = visibility.num_context + (num_queries if visibility.group > 1 else 0)
    q = torch.randn(HEADS, num_queries, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(groups, num_keys, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(groups, num_keys, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(HEADS, num_queries, head_dim, device=device).bfloat16() * used[None, :, None]
    scale = head_dim**-0.5
    attention = attention_for(device)
    ours = attention(q, k, v, attention.mask(visibility, num_queries), scale)
    gradients = torch.autograd.grad(ours, (q, k, v), upstream)

    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    visible = DenseAttention().mask(visibility, num_queries)
    if hurt is not None:
        hurt(visible)
    expected = reference(*exact, visible, scale)
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    assert_near("output", ours.detach()[:, used], expected.detach()[:, used])
    for name, left, right in zip(("gradient of q", "gradient of k", "gradient of v"), gradients, expected_gradients):
        assert_near(name, left, right)


@pytest.mark.parametrize("groups", [HEADS, 1])  # as many key heads as query heads, and one for four
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [4, 7, 8, 10, 16])
def test_flex_attention_of_blocks_is_dense_float64_attention(device, block_size, head_dim, groups):
    visibility, used = random_blocks(block_size, random.Random(fresh_seed()), device)
    compare(visibility, used, head_dim, groups)


@pytest.mark.parametrize("groups", [HEADS, 1])
@pytest.mark.parametrize("window", [None, 100])
def test_flex_attention_of_the_targets_row_is_dense_float64_attention(device, window, groups):
    row = random_row([130, 201, 160], random.Random(fresh_seed()))
    position = padded(row, LENGTH, LENGTH)[1].to(device)
    compare(row_visibility(position, window=window), torch.ones(LENGTH, dtype=torch.bool, device=device), 64, groups)


def test_the_comparison_notices_one_context_tile_that_a_block_does_not_see(device):
    """Must fail: the reference hides the last 32 context keys before the anchor of a block that sees many."""
    visibility, used = random_blocks(8, random.Random(fresh_seed()), device)
    block = int((visibility.high_R - visibility.low_R).argmax())
    high = int(visibility.high_R[block])

    def hurt(visible: torch.Tensor) -> None:
        visible[8 * block : 8 * block + 8, high - 32 : high] = False

    with pytest.raises(AssertionError, match="output|gradient"):
        compare(visibility, used, 64, HEADS, hurt=hurt)
