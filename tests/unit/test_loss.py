"""Head and loss in one against torch's cross-entropy in float64: value, gradient and correct flags."""

import random

import pytest
import torch
import torch.nn.functional as F

from graphcap.model.fused import in_blocks
from graphcap.model.loss import LOGITS_BYTES, chunk_of, default_chunk, head_loss
from tests.toys import fresh_seed

TOKENS, SIZE, VOCAB = 50, 16, 97


def random_inputs(dtype=torch.float64):
    fresh_seed()
    weight = torch.rand(TOKENS) + 0.1
    weight[::5] = 0
    hidden = torch.randn(TOKENS, SIZE, dtype=dtype)
    return hidden, torch.randn(VOCAB, SIZE, dtype=dtype), torch.randint(0, VOCAB, (TOKENS,)), weight


def reference(hidden, head, label, weight):
    """Loss sum and its gradient by torch's own cross-entropy."""
    hidden = hidden.detach().double().requires_grad_()
    each = F.cross_entropy(hidden @ head.double().T, label, reduction="none")
    loss = (each * weight.double()).sum()
    return loss.detach(), torch.autograd.grad(loss, hidden)[0]


def loss_of(hidden, head, label, weight):
    return head_loss(hidden, head, label, weight, chunk_tokens=7, with_gradient=True)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, TOKENS, 1000])
def test_loss_and_gradient_are_torchs_cross_entropy_for_every_chunk_size(chunk_tokens):
    inputs = random_inputs()
    loss, _, gradient = head_loss(*inputs, chunk_tokens=chunk_tokens, with_gradient=True)
    expected, expected_gradient = reference(*inputs)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)  # logits are float32 by design
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    label = inputs[2].clone()
    label[1] = (label[1] + 1) % VOCAB  # must fail: one label
    wrong, wrong_gradient = reference(inputs[0], inputs[1], label, inputs[3])
    for left, right in ((loss.double(), wrong), (gradient, wrong_gradient)):
        with pytest.raises(AssertionError):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_rows_of_weight_0_have_no_gradient_and_no_loss():
    hidden, head, label, weight = random_inputs()
    loss, _, gradient = loss_of(hidden, head, label, weight)
    assert not gradient[weight == 0].any() and gradient[weight > 0].abs().sum(1).all()
    other = hidden.clone()
    other[weight == 0] = 1e6
    assert torch.equal(loss_of(other, head, label, weight)[0], loss)
    other[weight > 0] *= 1.01  # must fail
    assert not torch.equal(loss_of(other, head, label, weight)[0], loss)


def test_correct_flags_are_the_argmax_of_the_logits():
    hidden, head, _, weight = random_inputs()
    right = (hidden @ head.T).argmax(1)
    label = torch.where(torch.rand(TOKENS) > 0.5, right, (right + 1) % VOCAB)
    _, correct, _ = loss_of(hidden, head, label, weight)
    assert correct.dtype == torch.bool and correct.tolist() == (label == right).tolist()
    assert 0 < correct.sum() < TOKENS


def test_the_loss_sums_over_its_rows_however_they_are_split():
    hidden, head, label, weight = random_inputs()
    parts = [loss_of(hidden[p], head, label[p], weight[p])[0] for p in (slice(0, 20), slice(20, None))]
    torch.testing.assert_close(sum(parts), loss_of(hidden, head, label, weight)[0])


@pytest.mark.parametrize("size", [1e4, 1e15, 1e18])
def test_huge_logits_stay_finite(size):
    hidden, head, label, weight = random_inputs(torch.float32)
    loss, _, gradient = loss_of(hidden * size, head, label, weight)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all() and loss > size / 10


def test_bfloat16_loss_and_gradient_stay_near_float64():
    hidden, head, label, weight = random_inputs()
    hidden, head = hidden.bfloat16(), head.bfloat16()
    loss, _, gradient = loss_of(hidden, head, label, weight)
    expected, expected_gradient = reference(hidden, head, label, weight)
    assert gradient.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) < 2**-7 * expected.item()
    assert (gradient.double() - expected_gradient).abs().max() < 2**-6 * expected_gradient.abs().max()


def test_evaluation_makes_no_gradient_and_the_same_loss():
    inputs = random_inputs()
    loss, correct, gradient = head_loss(*inputs, chunk_tokens=7, with_gradient=False)
    expected = loss_of(*inputs)
    assert gradient is None and torch.equal(loss, expected[0]) and torch.equal(correct, expected[1])
    hidden, *rest = inputs
    assert not torch.equal(head_loss(hidden * 1.01, *rest, chunk_tokens=7, with_gradient=False)[0], loss)  # must fail


def test_rows_in_blocks_are_what_indexing_gives_forward_and_backward():
    fresh_seed()
    kinds = ((3, 4, torch.float64, 6), (1, 2, torch.float32, 5), (5, 3, torch.bfloat16, 8), (2, 7, torch.bfloat16, 5))
    for blocks, block_size, dtype, width in kinds:
        place = torch.tensor([[n] + [blocks] * (block_size - 1) for n in range(blocks)]).flatten()
        x_UD = torch.randn(blocks + 1, width, dtype=dtype, requires_grad=True)
        upstream = torch.randn(width, len(place), dtype=dtype).T  # rows that do not follow each other
        ours = in_blocks(x_UD, block_size)
        assert torch.equal(ours, x_UD[place]) and not torch.equal(ours, x_UD[place.roll(1)])
        (gradient,) = torch.autograd.grad(ours, x_UD, upstream)
        summed, wrong = (
            torch.zeros(len(x_UD), width, dtype=torch.float64).index_add_(0, to, upstream.double()).to(dtype)
            for to in (place, place.roll(1))
        )
        torch.testing.assert_close(gradient, summed)
        assert not torch.allclose(gradient, wrong)  # must fail


def test_a_chunk_is_as_many_draft_tokens_as_its_memory_holds():
    for vocab_size, itemsize in ((49152, 2), (151936, 2), (32000, 4), (512, 4), (10**9, 4)):
        chunk = default_chunk(vocab_size, itemsize)
        assert chunk & (chunk - 1) == 0 and (chunk * vocab_size * itemsize <= LOGITS_BYTES or chunk == 1)
        assert 2 * chunk * vocab_size * itemsize > LOGITS_BYTES, "a larger one fits"


def test_chunks_are_alike_few_and_hardly_larger_than_asked():
    fresh_seed()
    for _ in range(300):
        num_tokens, asked = random.randint(1, 100_000), random.choice((1, 5, 7, 100, 2048, 8192))
        chunk = chunk_of(num_tokens, asked)
        count, last = -(-num_tokens // chunk), (num_tokens - 1) % chunk + 1
        assert 1 <= chunk <= asked + asked // 16 and count <= -(-num_tokens // asked)
        assert last >= chunk - 16 * count  # as even as 16 at a time can be
        assert chunk % 16 == 0 or chunk > asked + asked // 16 - 16  # and so, but where no more fits
    assert [chunk_of(67_560, 8192), chunk_of(65_520, 8192), chunk_of(7, 5)] == [8448, 8192, 4]
    assert chunk_of(0, 100) >= 1
