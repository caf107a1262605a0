"""Our kernels against plain references: attention in float64, the loss, the sums and AdamW as torch has them."""

import random

import pytest
import torch

from graphcap.kernels import options, rows, sums, update
from graphcap.model import loss
from graphcap.model.attention import TILE, DenseAttention, attention_for, joined
from graphcap.model.blocks import Visibility, decay, make_blocks, row_visibility
from graphcap.model.fused import rotary_table, rotate
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
    rows = [visibility.num_context] * 2 + [num_queries] * (2 if visibility.group > 1 else 0)
    shapes = [(num_queries, HEADS), *((number, groups) for number in rows)]
    inputs = [  # [heads, rows, C], laid out as a projection leaves them
        torch.randn(*shape, head_dim, device=device, dtype=torch.bfloat16).transpose(0, 1).requires_grad_(visibility.group > 1)
        for shape in shapes
    ]
    upstream = torch.randn(HEADS, num_queries, head_dim, device=device).bfloat16() * used[None, :, None]
    scale = head_dim**-0.5
    attention = attention_for(device)
    mask = attention.mask(visibility, num_queries)
    ours = attention(inputs[0], tuple(inputs[1:3]), tuple(inputs[3:]) or None, mask, scale)

    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    visible = DenseAttention().mask(visibility, num_queries)
    if hurt is not None:
        hurt(visible)
    keys = joined(exact[1:3], exact[3:]) if visibility.group > 1 else exact[1:]
    expected = reference(exact[0], *keys, visible, scale)
    assert_near("output", ours.detach()[:, used], expected.detach()[:, used])
    if visibility.group == 1:
        return
    gradients = torch.autograd.grad(ours, inputs, upstream)
    for number, (left, right) in enumerate(
        zip(gradients, torch.autograd.grad(expected, exact, upstream.double()), strict=True)
    ):
        assert_near(f"gradient {number}", left, right)
    again = attention(inputs[0], tuple(inputs[1:3]), tuple(inputs[3:]), mask, scale)
    repeated = torch.autograd.grad(again, inputs, upstream)
    assert torch.equal(again, ours) and all(map(torch.equal, gradients, repeated)), "two runs differ"


@pytest.mark.parametrize(
    ("block_size", "head_dim", "groups"),  # as many key heads as query heads, or one for four
    [(16, 16, 1), (16, 64, 4), (16, 64, 1), (16, 80, 1), (16, 128, 4), (16, 128, 1), (16, 256, 1)]
    + [(4, 64, 1), (7, 64, 1), (8, 64, 1), (10, 64, 1)],
)
@pytest.mark.parametrize("apart", [False, True])
def test_attention_of_blocks_is_dense_float64_attention(device, block_size, head_dim, groups, apart, monkeypatch):
    monkeypatch.setattr(options, "heads_apart", lambda *_: apart)
    visibility, used = random_blocks(block_size, random.Random(fresh_seed()), device)
    compare(visibility, used, head_dim, groups)


@pytest.mark.parametrize("groups", [HEADS, 1])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_of_the_targets_row_is_dense_float64_attention(device, window, groups):
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


def wide_norm(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def same_as_in_float64(kernel, reference, *inputs: torch.Tensor) -> None:
    """Outputs and gradients, with one random upstream, of a bfloat16 function and of the plain one on the same numbers."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ours, theirs = kernel(*inputs), reference(*exact)
    upstream = [torch.randn_like(one) for one in ours]
    gradients = torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, exact, [u.double() for u in upstream])
    for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert_near(f"output {number}", left, right)
    for number, (left, right) in enumerate(zip(*gradients, strict=True)):
        assert_near(f"gradient {number}", left, right)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To bfloat16 and back, as far as values go; its gradient is that of the identity."""
    return x + (x.bfloat16().double() - x).detach()


def halves(device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16().requires_grad_()


@pytest.mark.parametrize("width", [576, 1024, 4096, 5120])
def test_norm_and_gate_are_the_plain_ones(device, width):
    fresh_seed()
    x, other, weight = halves(device, 3000, width), halves(device, 3000, width), halves(device, width)

    def plain(x, other, weight):
        total = rounded(x + other)
        return total, wide_norm(total, weight)

    same_as_in_float64(lambda *given: rows.norm(*given, 1e-6), plain, x, other, weight)
    same_as_in_float64(lambda x, w: rows.norm(x, None, w, 1e-6)[1:], lambda x, w: (wide_norm(x, w),), x, weight)
    kept = [row for row in range(len(x)) if row % 15]
    skipped = lambda x, other, weight: plain(x[kept], other[kept], weight)  # noqa: E731
    same_as_in_float64(lambda *given: rows.norm(*given, 1e-6, 15), skipped, x, other, weight)
    blocks = x.detach().unflatten(0, (-1, 15))
    exact = torch.cat((blocks[:, 0].double(), blocks[:, 1:].double().sum((0, 1))[None]))
    assert_near("first rows, and the sum of the others", sums.of_blocks(blocks), exact)

    def plain_gate(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up,)

    same_as_in_float64(lambda gate_up: (rows.gate(gate_up),), plain_gate, halves(device, 1000, 2 * width))
    with pytest.raises(AssertionError, match="output 0"):  # must fail: another eps
        same_as_in_float64(lambda x, w: rows.norm(x, None, w, 0.1)[1:], lambda x, w: (wide_norm(x, w),), x, weight)


@pytest.mark.parametrize(("heads", "channels"), [(9, 64), (8, 128), (3, 80)])
def test_norm_and_rotation_are_the_plain_ones(device, heads, channels):
    fresh_seed()
    flat, weight = halves(device, 1000, heads * channels + 64), halves(device, channels)  # a part of a wider matmul's output
    position = torch.randint(0, 4000, (1000,), device=device)
    table = rotary_table(position, head_dim=channels, theta=1e4, dtype=torch.bfloat16)
    exact = tuple(part.double() for part in table)

    def heads_of(flat):
        return flat[:, : heads * channels].unflatten(1, (heads, channels)).transpose(0, 1)

    def plain(flat, weight):
        return (rotate(wide_norm(heads_of(flat), weight), exact),)

    same_as_in_float64(lambda x, w: (rows.norm_rotate(heads_of(x), w, table, 1e-6),), plain, flat, weight)
    with pytest.raises(AssertionError, match="output 0"):  # must fail: sine for cosine
        same_as_in_float64(lambda x, w: (rows.norm_rotate(heads_of(x), w, table[::-1], 1e-6),), plain, flat, weight)
    joined = halves(device, 1000, (heads + 4) * channels)  # two key heads

    def plain_heads(joined, q_weight, k_weight):
        q, k, v = joined.unflatten(1, (-1, channels)).transpose(0, 1).split([heads, 2, 2])
        return rotate(wide_norm(q, q_weight), exact), rotate(wide_norm(k, k_weight), exact), v

    same_as_in_float64(
        lambda joined, *weights: rows.heads_rotated(joined, *weights, table, 1e-6, 2), plain_heads, joined, weight,
        halves(device, channels),
    )  # fmt: skip


@pytest.mark.parametrize("vocabulary", [501, 49152, 151936])
def test_the_loss_of_a_chunk_is_the_plain_one_and_its_gradient_lies_over_the_logits(device, vocabulary):
    fresh_seed()
    logits_MV = (torch.randn(64, vocabulary, device=device) * 3).bfloat16()  # ties among the largest
    label_M, weight_M = torch.randint(0, vocabulary, (64,), device=device), torch.rand(64, device=device)
    label_M[:32] = logits_MV[:32].argmax(1)
    logits_MV[16:32, -1] = logits_MV[16:32].amax(1)  # a later one as large: the first is the prediction
    label_M[24:32] = vocabulary - 1
    losses, correct, gradient = loss.chunk_loss(logits_MV.double(), label_M, weight_M)
    loss_M, correct_M = torch.empty_like(weight_M), torch.empty_like(label_M, dtype=torch.bool)
    loss.chunk_loss_(logits_MV, label_M, weight_M, loss_M, correct_M)
    torch.testing.assert_close(loss_M.double(), losses.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(correct_M, correct) and correct[:24].all() and not correct.all()
    torch.testing.assert_close(logits_MV.double(), gradient.double(), rtol=2**-8, atol=1e-6)


def test_gradients_of_any_sizes_are_added_at_their_places(device):
    fresh_seed()
    sizes = [3, 5000, 64, 1, 40000, 33] * 5
    places = [sum((size + 31) // 32 * 32 for size in sizes[:number]) for number in range(len(sizes))]
    sums = torch.randn(places[-1] + 64, device=device)
    gradients = tuple(torch.randn(size, device=device).bfloat16() for size in sizes)
    expected = sums.clone()
    for place, gradient in zip(places, gradients):
        expected[place : place + gradient.numel()] += gradient.float()
    update.add_(sums, gradients, places)
    assert torch.equal(sums, expected)


def test_an_update_is_torchs_adamw_and_a_skipped_one_changes_only_the_gradients(device):
    fresh_seed()
    rates = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    master, moments = torch.randn(5003, device=device), [torch.zeros(5003, device=device) for _ in range(2)]
    step, weights = torch.zeros((), device=device), torch.zeros(5003, device=device, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(master.double())
    optimizer = torch.optim.AdamW([parameter], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for number in range(20):
        gradients, rate, skipped = torch.randn(5003, device=device) * 7, 1e-2 / (number + 1), number % 5 == 3
        scale = 3.0 ** (number % 7)  # not the same for all: Adam would forget it
        parameter.grad, optimizer.param_groups[0]["lr"] = gradients.double() / scale, rate
        before = [tensor.clone() for tensor in (master, *moments, step)]
        if skipped:
            gradients[17] = float("nan")
        else:
            optimizer.step()
        scalars = {"rate": rate, "grad_scale": scale, "found_inf": float(skipped)}
        tensors = {name: torch.tensor(value, device=device) for name, value in scalars.items()}
        update.adamw_(master, *moments, gradients, weights, step, **tensors, **rates)
        assert not gradients.any()
        if skipped:
            assert all(map(torch.equal, before, (master, *moments, step)))
        torch.testing.assert_close(master.double(), parameter.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weights, master.bfloat16())
