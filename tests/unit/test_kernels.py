"""Our kernels in triton's interpreter, on a CPU in float32, against plain torch. On a GPU: tests/cuda/test_kernels.py."""

import itertools
import math
import os
import random

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, not interpreted: see tests/cuda/test_kernels.py", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/conftest.py sets TRITON_INTERPRET=1; this process does not have it", allow_module_level=True)
pytest.importorskip("triton", reason="triton, of graphcap's test extra, is not installed")

from graphcap import kernels  # noqa: E402
from graphcap.errors import ConfigError  # noqa: E402
from graphcap.kernels import attention, loss, options, rows, sums, update  # noqa: E402 - after the checks
from graphcap.model.attention import TILE, DenseAttention, IntervalAttention  # noqa: E402
from graphcap.model.blocks import Visibility, row_visibility  # noqa: E402
from graphcap.model.fused import RMSNorm, gate, heads_rotated, in_blocks, rotary_table  # noqa: E402
from graphcap.model.loss import chunk_loss  # noqa: E402
from tests.toys import fresh_seed, relative  # noqa: E402

HEADS, CHANNELS, SCALE = 2, 20, 0.3  # a head size that is no power of two
options_of = options.options


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles in a short row, of keys and of queries, and one size for each."""
    monkeypatch.setattr(
        options, "options", lambda kernel, *chip: options.Tiles(*((32, 64) if kernel == "dq" else (64, 32)), 4, 1)
    )


def states(heads: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, heads, CHANNELS).transpose(0, 1).requires_grad_()


def compare(visibility: Visibility, num_queries: int, key_heads: int, *, hurt=None) -> dict[str, float]:
    """Relative differences of output and gradients from dense attention. hurt: a change of the dense mask."""
    names = ("output", "queries", "keys", "values", "block keys", "block values")
    q, context = states(HEADS, num_queries), [states(key_heads, visibility.num_context) for _ in range(2)]
    blocks = [states(key_heads, num_queries) for _ in range(2)]
    upstream = torch.randn(HEADS, num_queries, CHANNELS)
    dense, ours = DenseAttention(), IntervalAttention()
    visible = dense.mask(visibility, num_queries)
    if hurt is not None:
        hurt(visible)
    found = []
    for attend, mask in ((ours, ours.mask(visibility, num_queries)), (dense, visible)):
        out = attend(q, context, blocks, mask, SCALE)
        found.append((out.detach(), *torch.autograd.grad(out, (q, *context, *blocks), upstream)))
    return {name: relative(left - right, right) for name, left, right in zip(names, *found)}


def intervals(num_blocks: int, num_context: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks over two documents and some over others in between; one in eight sees nothing. In no order."""
    high = [rng.randrange(1, num_context + 1) for _ in range(num_blocks)]
    low = [min(one - 1, rng.choice((0, 0, 0, num_context // 2, max(0, one - 40)))) for one in high]
    none = [rng.random() < 0.125 for _ in high]
    return tuple(torch.tensor([0 if hide else one for one, hide in zip(edges, none)]) for edges in (low, high))


@pytest.mark.parametrize(
    ("block_size", "key_heads", "ordered", "apart"), [(16, 2, True, False), (12, 1, True, False), (16, 1, False, True)]
)
def test_attention_and_its_gradients_are_dense_attentions(block_size, key_heads, ordered, apart, monkeypatch):
    monkeypatch.setattr(options, "heads_apart", lambda *_: apart)
    rng = random.Random(fresh_seed())
    num_blocks = 128 // math.gcd(128, block_size)
    num_context = 256 if block_size == 16 else 128
    low, high = intervals(num_blocks, num_context, rng)
    if ordered:  # as in training: blocks that see all of a tile of keys follow one another
        order = (low + 1000 * high).argsort()
        low, high = low[order], high[order]
    visibility = Visibility(low, high, group=block_size, num_context=num_context)
    num_queries = num_blocks * block_size
    errors = compare(visibility, num_queries, key_heads)
    assert max(errors.values()) < 1e-5, errors
    block = int((high - low).argmax())

    def hurt(visible):  # must fail: one key of one block, and one of its own
        visible[block * block_size, [int(high[block]) - 1, num_context + block * block_size]] = False

    errors = compare(visibility, num_queries, key_heads, hurt=hurt)
    assert min(errors.values()) > 1e-5, errors


def test_a_key_that_one_block_alone_sees_has_its_gradient():
    low, high = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    low[3], high[3] = 64, 65  # the first of a tile
    errors = compare(Visibility(low, high, group=16, num_context=128), 128, 1)
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("window", [None, 50])
def test_attention_of_a_targets_row_is_dense_attention(window):
    fresh_seed()
    position = torch.cat([torch.arange(n) for n in (70, 90, 60)] + [torch.zeros(36, dtype=torch.int64)])
    visibility = row_visibility(position, window=window)
    q, *context = (states(HEADS, 256).detach() for _ in range(3))
    dense, ours = DenseAttention(), IntervalAttention()
    expected = dense(q, context, None, dense.mask(visibility, 256), SCALE)
    assert relative(ours(q, context, None, ours.mask(visibility, 256), SCALE) - expected, expected) < 1e-5
    shifted = row_visibility((position - 1).clamp(min=0), window=window)  # must fail
    assert relative(ours(q, context, None, ours.mask(shifted, 256), SCALE) - expected, expected) > 1e-3


def test_a_row_that_is_not_whole_tiles_is_refused():
    with pytest.raises(AssertionError, match="160"):
        IntervalAttention().mask(row_visibility(torch.arange(160)), 160)


def test_every_chip_has_tiles_for_every_kernel_and_head_size():
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 7)):
        for head_dim in (16, 32, 64, 128, 256):
            for kernel, itemsize in itertools.product(("forward", "dq", "dkv"), (2, 4)):
                tiles = options_of(kernel, capability, head_dim, itemsize)
                assert min(tiles.queries, tiles.keys) >= attention.LEAST, (capability, kernel, head_dim)
                assert TILE % tiles.queries == 0 and TILE % tiles.keys == 0, (capability, kernel, head_dim)
    with pytest.raises(ConfigError, match="head size '512': expected at most 256"):
        options_of("forward", (9, 0), 512, 2)


def test_values_narrower_than_queries_are_seen_as_they_are():
    fresh_seed()
    visibility = row_visibility(torch.arange(128))
    q, k = states(HEADS, 128).detach(), states(HEADS, 128).detach()
    v = torch.randn(HEADS, 128, 12)
    dense, ours = DenseAttention(), IntervalAttention()
    expected = dense(q, (k, v), None, dense.mask(visibility, 128), SCALE)
    out = ours(q, (k, v), None, ours.mask(visibility, 128), SCALE)
    assert out.shape == expected.shape and relative(out - expected, expected) < 1e-5


def test_the_loss_kernel_is_the_plain_loss():
    fresh_seed()
    logits_MV, weight_M = torch.randn(9, 5000) * 3, torch.rand(9)
    label_M = torch.randint(0, 5000, (9,))
    label_M[:4] = logits_MV[:4].argmax(1)
    logits_MV[2, 4999] = logits_MV[2, label_M[2]]  # one as large behind it
    label_M[3], logits_MV[3, 4999] = 4999, logits_MV[3, label_M[3]]  # and one before
    logits_MV[6] = math.nan
    label_M[7], logits_MV[7, [4900, 4950]] = 4900, 20.0  # as large a little behind it, and a little before
    label_M[8], logits_MV[8, [4900, 4950]] = 4950, 20.0
    losses, correct, gradient = chunk_loss(logits_MV, label_M, weight_M)
    loss_M, correct_M = torch.empty(9), torch.empty(9, dtype=torch.bool)
    loss.chunk_loss_(logits_MV, label_M, weight_M, loss_M, correct_M)
    torch.testing.assert_close(loss_M, losses, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.equal(correct_M, correct) and correct[[0, 1, 2, 7]].all() and not correct[[3, 6, 8]].any()
    torch.testing.assert_close(logits_MV, gradient, rtol=1e-4, atol=1e-7, equal_nan=True)


def test_gradients_are_added_at_their_places_however_many_and_large():
    fresh_seed()
    sizes = [5000, 33, 1, 2048, 64] * 4
    places = [sum(math.ceil(size / 32) * 32 for size in sizes[:number]) for number in range(len(sizes))]
    sums, gradients = torch.randn(places[-1] + 64), tuple(torch.randn(size) for size in sizes)
    expected = sums.clone()
    for place, gradient in zip(places, gradients):
        expected[place : place + len(gradient)] += gradient
    update.add_(sums, gradients, places)
    assert torch.equal(sums, expected)


def test_the_update_kernel_is_torchs_adamw():
    fresh_seed()
    rates = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    master, *moments = torch.randn(3000), torch.zeros(3000), torch.zeros(3000)
    weights, step, parameter = torch.zeros(3000), torch.zeros(()), torch.nn.Parameter(master.double())
    optimizer = torch.optim.AdamW([parameter], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for number, skipped in enumerate((False, False, True, False)):
        gradients, rate = torch.randn(3000) * 7 ** (number + 1), 1e-2 / (number + 1)
        before = [tensor.clone() for tensor in (master, *moments, step)]
        scale = 3.0**number  # not the same for all: Adam would forget it
        parameter.grad, optimizer.param_groups[0]["lr"] = gradients.double() / scale, rate
        if skipped:
            gradients[17] = math.nan
        else:
            optimizer.step()
        scalars = {"rate": torch.tensor(rate), "grad_scale": torch.tensor(scale), "found_inf": torch.tensor(float(skipped))}
        update.adamw_(master, *moments, gradients, weights, step, **scalars, **rates)
        assert not gradients.any() and torch.equal(weights, master)
        assert all(map(torch.equal, before, (master, *moments, step))) is skipped
        torch.testing.assert_close(master.double(), parameter.detach(), rtol=1e-5, atol=1e-6)


def assert_same(ours, theirs, inputs, names) -> None:
    """Outputs of two functions, and the gradients of the inputs under one random upstream of every output."""
    for left, right in zip(ours, theirs, strict=True):
        assert relative(left - right, right) < 1e-5, "output"
    upstream = [torch.randn_like(one) for one in ours]
    gradients = [torch.autograd.grad(outputs, inputs, upstream) for outputs in (ours, theirs)]
    for name, left, right in zip(names, *gradients, strict=True):
        assert relative(left - right, right) < 1e-5, name


@pytest.mark.parametrize("width", [20, 64])
@pytest.mark.parametrize("num_rows", [5, 700])  # fewer and more than programs
def test_the_norm_kernel_is_the_norm_of_a_sum_and_adds_what_comes_in_beside_it(width, num_rows, monkeypatch):
    fresh_seed()
    monkeypatch.setattr(rows, "PROGRAMS", 8)
    norm, num_rows = RMSNorm(width, 1e-5), min(num_rows, 40)
    with torch.no_grad():
        norm.weight.normal_()
    x, other = (torch.randn(num_rows, width, requires_grad=True) for _ in range(2))
    inputs, names = (x, other, norm.weight), ("x", "other", "weight")
    assert_same(rows.norm(x, other, norm.weight, norm.eps), norm.after(x, other), inputs, names)
    total, out = norm.after(x)
    assert_same(rows.norm(x, None, norm.weight, norm.eps), (total.view_as(x), out), (x, norm.weight), ("x", "weight"))
    assert_same(rows.norm(x, None, norm.weight, norm.eps)[1:], (norm(x),), (x, norm.weight), ("x", "weight"))
    with pytest.raises(AssertionError, match="output"):  # must fail: another eps
        assert_same(rows.norm(x, None, norm.weight, 0.1)[1:], (norm(x),), (x, norm.weight), ("x", "weight"))


@pytest.mark.parametrize(("num_blocks", "block_size", "width"), [(3, 4, 20), (9, 7, 64), (1, 2, 20), (20, 2, 20)])
def test_the_norm_kernel_leaves_out_the_first_row_of_each_block(num_blocks, block_size, width, monkeypatch):
    fresh_seed()
    monkeypatch.setattr(rows, "PROGRAMS", 3)
    norm, num_rows = RMSNorm(width, 1e-5), num_blocks * block_size
    with torch.no_grad():
        norm.weight.normal_()
    x, other = (torch.randn(num_rows, width, requires_grad=True) for _ in range(2))
    kept = [row for row in range(num_rows) if row % block_size]
    inputs, names = (x, other, norm.weight), ("x", "other", "weight")
    plain = norm.after(x[kept], other[kept])
    assert_same(norm.after(x, other, skipped_of=block_size), plain, inputs, names)
    for outputs in (slice(None), slice(1, None)):
        ours, plain = rows.norm(x, other, norm.weight, norm.eps, block_size), norm.after(x[kept], other[kept])
        assert_same(ours[outputs], plain[outputs], inputs, names)
    wrong = norm.after(x[[row - 1 for row in kept]], other[kept])
    with pytest.raises(AssertionError, match="output"):  # must fail: the last row of each block instead
        assert_same(rows.norm(x, other, norm.weight, norm.eps, block_size), wrong, inputs, names)
    with pytest.raises(AssertionError):
        rows.norm(x[1:], other[1:], norm.weight, norm.eps, block_size)


@pytest.mark.parametrize(("num_blocks", "block_size", "width"), [(1, 2, 5), (7, 3, 40), (5, 16, 20)])
def test_the_kernel_of_blocks_gives_their_first_rows_and_the_sum_of_the_others(num_blocks, block_size, width, monkeypatch):
    fresh_seed()
    monkeypatch.setattr(sums, "PROGRAMS", 2)
    monkeypatch.setattr(sums, "NUMBERS_OF_BLOCK", 16)
    x = torch.randn(num_blocks, block_size, width)
    expected = torch.cat((x[:, 0], x[:, 1:].sum((0, 1))[None]))
    assert relative(sums.of_blocks(x) - expected, expected) < 1e-5
    assert relative(sums.of_blocks(x.flip(1)) - expected, expected) > 1e-2  # must fail: another row first
    monkeypatch.setattr(kernels, "serve", lambda device: True)
    x_UD = torch.randn(num_blocks + 1, width, requires_grad=True)
    upstream = x.flatten(0, 1).T.contiguous().T  # rows that do not follow each other
    (gradient,) = torch.autograd.grad(in_blocks(x_UD, block_size), x_UD, upstream)
    assert relative(gradient - expected, expected) < 1e-5


@pytest.mark.parametrize(("heads", "channels"), [(2, 16), (3, 20)])
def test_the_rotating_kernel_is_the_norm_and_the_rotation(heads, channels, monkeypatch):
    fresh_seed()
    monkeypatch.setattr(rows, "PROGRAMS", 3)
    monkeypatch.setattr(rows, "_rows", lambda channels: 4)
    norm, tokens = RMSNorm(channels, 1e-5), 9
    with torch.no_grad():
        norm.weight.normal_()
    flat = torch.randn(tokens, heads * channels + 7, requires_grad=True)  # a part of a wider matmul's output
    x_HSC = flat[:, : heads * channels].unflatten(1, (heads, channels)).transpose(0, 1)
    table = rotary_table(torch.randint(0, 500, (tokens,)), head_dim=channels, theta=1e4, dtype=torch.float32)
    ours = rows.norm_rotate(x_HSC, norm.weight, table, norm.eps)
    assert_same((ours,), (norm.rotated(x_HSC, table),), (flat, norm.weight), ("x", "weight"))
    other = tuple(reversed(table))
    with pytest.raises(AssertionError, match="output"):  # must fail: sine for cosine
        assert_same((rows.norm_rotate(x_HSC, norm.weight, other, norm.eps),), (ours,), (flat, norm.weight), ("x", "weight"))


def test_heads_of_one_matmul_are_rotated_and_their_gradients_stand_side_by_side(monkeypatch):
    fresh_seed()
    monkeypatch.setattr(rows, "_rows", lambda channels: 4)
    channels, tokens, key_heads = 16, 9, 2
    norms = [RMSNorm(channels, 1e-5) for _ in range(2)]
    with torch.no_grad():
        for norm in norms:
            norm.weight.normal_()
    joined = torch.randn(tokens, (3 + 2 * key_heads) * channels, requires_grad=True)
    table = rotary_table(torch.randint(0, 500, (tokens,)), head_dim=channels, theta=1e4, dtype=torch.float32)
    inputs, names = (joined, *(norm.weight for norm in norms)), ("joined", "queries' weight", "keys' weight")
    ours = rows.heads_rotated(joined, *inputs[1:], table, 1e-5, key_heads)
    assert_same(ours, heads_rotated(joined, *norms, table, key_heads), inputs, names)
    swapped = rows.heads_rotated(joined, *inputs[:0:-1], table, 1e-5, key_heads)
    with pytest.raises(AssertionError, match="output"):  # must fail: the weights swapped
        assert_same(swapped, heads_rotated(joined, *norms, table, key_heads), inputs, names)


def test_the_gate_kernel_is_the_gate(monkeypatch):
    fresh_seed()
    monkeypatch.setattr(rows, "NUMBERS", 64)
    gate_up = torch.randn(7, 2 * 30, requires_grad=True)
    assert_same((rows.gate(gate_up),), (gate(gate_up),), (gate_up,), ("gate and up",))
    with pytest.raises(AssertionError, match="output"):  # must fail: the other half is the gate
        assert_same((rows.gate(gate_up.roll(30, 1)),), (gate(gate_up),), (gate_up,), ("gate and up",))
