"""Which keys a block sees, what it reads and what it must predict, against loops over every pair and every slot."""

import math
import random

import pytest
import torch

from graphcap.model.blocks import (
    UNUSED,
    decay,
    default_gamma,
    document_start,
    leading_matches,
    make_blocks,
    row_visibility,
)
from tests.toys import (
    MASK_ID,
    document_numbers,
    fresh_seed,
    naive_labels,
    naive_visible,
    padded,
    random_lengths,
    random_row,
)

LENGTH, NUM_ANCHORS, GAMMA = 64, 6, 5.0
BLOCK_SIZES = [4, 7, 8, 10, 16]


def random_inputs(seed: int):
    """A padded row of several documents with a few anchors and at least one unused slot, and the same as lists."""
    rng = random.Random(seed)
    arrays = random_row(random_lengths(LENGTH, rng), rng, num_anchors=NUM_ANCHORS - 1)
    tensors = padded(arrays, LENGTH, NUM_ANCHORS)
    return tensors, [tensor.tolist() for tensor in tensors]


def blocks_of(tensors, block_size: int, gamma: float = GAMMA):
    return make_blocks(*tensors, decay_J=torch.tensor(decay(block_size, gamma)), mask_token_id=MASK_ID)


def visible_of(visibility, num_queries: int, num_keys: int) -> torch.Tensor:
    allows = visibility.predicate()
    return torch.tensor(
        [[bool(allows(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(num_keys)] for q in range(num_queries)]
    )


def dense_visible(visibility, num_queries: int, num_keys: int) -> torch.Tensor:
    return visibility.predicate()(None, None, torch.arange(num_queries)[:, None], torch.arange(num_keys)[None])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_query_sees_exactly_the_keys_of_a_loop_over_all_pairs(block_size):
    tensors, lists = random_inputs(fresh_seed())
    num_queries = NUM_ANCHORS * block_size
    seen = dense_visible(blocks_of(tensors, block_size).visibility, num_queries, LENGTH + num_queries)
    assert torch.equal(seen, naive_visible(lists[1], lists[3], block_size))
    lists[3][0] += 1  # must fail: one anchor stands one token further
    assert not torch.equal(seen, naive_visible(lists[1], lists[3], block_size))


def test_the_predicate_says_the_same_of_single_pairs_as_of_whole_matrices():
    tensors, _ = random_inputs(fresh_seed())
    visibility = blocks_of(tensors, 4).visibility
    assert torch.equal(visible_of(visibility, 8, 72), dense_visible(visibility, 8, 72))


def test_the_context_ends_strictly_before_the_anchor():
    """At the anchor the target has no state yet when serving; seeing it would leak the answer."""
    anchors = torch.tensor([5, 9])
    tensors = (torch.arange(16), torch.arange(16), torch.ones(16, dtype=torch.int64), anchors)
    seen = dense_visible(blocks_of(tensors, 4).visibility, 8, 24)
    for block, anchor in enumerate(anchors.tolist()):
        for query in range(4 * block, 4 * block + 4):
            assert seen[query, :16].tolist() == [key < anchor for key in range(16)]


def test_no_block_sees_a_key_of_another_document_or_block():
    position = torch.tensor([*range(6), *range(7), 0, 0, 0])
    tensors = (torch.arange(16), position, torch.ones(16, dtype=torch.int64), torch.tensor([2, 8, UNUSED]))
    seen = dense_visible(blocks_of(tensors, 4).visibility, 12, 28)
    assert seen[0].nonzero()[:, 0].tolist() == [0, 1, 16, 17, 18, 19]
    assert seen[4].nonzero()[:, 0].tolist() == [6, 7, 20, 21, 22, 23]
    assert seen[8].nonzero()[:, 0].tolist() == [
        24,
        25,
        26,
        27,
    ]  # an unused slot sees itself only, so no softmax is empty


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_labels_weights_ids_and_positions_are_those_of_a_loop_over_slots(block_size):
    tensors, (tokens, position, supervised, anchors) = random_inputs(fresh_seed())
    blocks = blocks_of(tensors, block_size)
    label, weight = naive_labels(tokens, position, supervised, anchors, block_size, GAMMA)
    assert torch.equal(blocks.label_NJ, label)
    torch.testing.assert_close(blocks.weight_NJ.double(), weight, rtol=1e-6, atol=0)
    for n, anchor in enumerate(anchors):
        here = slice(n * block_size, (n + 1) * block_size)
        assert blocks.keep_N[n] == (anchor != UNUSED)
        if anchor == UNUSED:
            continue
        assert blocks.token_ids_U[n] == tokens[anchor]
        assert blocks.position_Q[here].tolist() == [position[anchor] + k for k in range(block_size)]
    assert (blocks.label_NJ[blocks.weight_NJ == 0] == 0).all()
    supervised[anchors[0] + 1] = 0  # must fail: one label is not supervised
    changed = naive_labels(tokens, position, supervised, anchors, block_size, GAMMA)
    assert not torch.equal(blocks.weight_NJ > 0, changed[1] > 0)


def test_the_label_of_slot_k_is_the_token_k_after_the_anchor_and_slot_0_has_none():
    tensors = (torch.arange(32) + 20, torch.arange(32), torch.ones(32, dtype=torch.int64), torch.tensor([10]))
    blocks = blocks_of(tensors, 8)
    assert blocks.label_NJ.tolist() == [[31, 32, 33, 34, 35, 36, 37]]
    assert blocks.token_ids_U.tolist() == [30, MASK_ID]


def test_no_label_has_weight_past_the_end_of_its_document_or_row():
    position = torch.tensor([*range(10), *range(6)])
    tensors = (torch.arange(16), position, torch.ones(16, dtype=torch.int64), torch.tensor([0, 8, 9, 14, 15]))
    used = (blocks_of(tensors, 4).weight_NJ > 0).int().tolist()
    assert used == [[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_unsupervised_tokens_are_no_labels():
    supervised = torch.tensor([1, 1, 0, 1, 1, 0, 0, 1])
    tensors = (torch.arange(8), torch.arange(8), supervised, torch.tensor([0, 3]))
    assert (blocks_of(tensors, 4).weight_NJ > 0).int().tolist() == [[1, 0, 1], [1, 0, 0]]


def test_unused_slots_have_no_labels_and_no_context():
    tensors, _ = random_inputs(fresh_seed())
    anchors = tensors[3].clone()
    anchors[1::2] = UNUSED
    blocks = blocks_of((*tensors[:3], anchors), 8)
    unused = ~blocks.keep_N
    assert blocks.keep_N.tolist() == [anchor != UNUSED for anchor in anchors.tolist()] and unused.any()
    assert not blocks.weight_NJ[unused].any() and not blocks.label_NJ[unused].any()
    assert (blocks.visibility.low_R[unused] >= blocks.visibility.high_R[unused]).all()


def test_loss_weights_fall_by_the_papers_formula():
    assert decay(8, 4.0) == pytest.approx([math.exp(-(k - 1) / 4.0) for k in (1, 2, 3, 4, 5, 6, 7)])
    assert decay(8, 4.0)[0] == 1.0 and len(decay(16, 7.0)) == 15


def test_gamma_is_7_5_4_for_blocks_of_16_10_8_and_lies_between_elsewhere():
    assert [default_gamma(size) for size in (16, 10, 8)] == [7, 5, 4]
    between = [default_gamma(size) for size in range(8, 17)]
    assert between == sorted(between) and default_gamma(9) == 4.5 and default_gamma(13) == 6
    assert default_gamma(2) >= 1 and default_gamma(4) == 2


@pytest.mark.parametrize("window", [None, 1, 5, 64])
def test_the_targets_row_is_causal_inside_each_document_and_window(window):
    rng = random.Random(fresh_seed())
    position = padded(random_row(random_lengths(LENGTH, rng), rng), LENGTH, LENGTH)[1]
    document = document_numbers(position.tolist())
    expected = torch.tensor(
        [
            [k <= q and document[k] == document[q] and (window is None or q - k < window) for k in range(LENGTH)]
            for q in range(LENGTH)
        ]
    )
    assert torch.equal(dense_visible(row_visibility(position, window=window), LENGTH, LENGTH), expected)
    other = 6 if window != 6 else 7
    assert not torch.equal(dense_visible(row_visibility(position, window=other), LENGTH, LENGTH), expected)  # must fail


def test_each_document_and_each_padding_token_starts_where_its_position_is_zero():
    position = torch.tensor([0, 1, 2, 0, 1, 0, 0, 0], dtype=torch.int32)
    assert document_start(position).tolist() == [0, 0, 0, 3, 3, 5, 6, 7]


def test_leading_matches_stop_at_the_first_wrong_slot():
    fresh_seed()
    correct = torch.rand(64, 7) > 0.3
    expected = []
    for row in correct.tolist():
        count = 0
        while count < len(row) and row[count]:
            count += 1
        expected.append(count)
    assert leading_matches(correct).tolist() == expected
    assert leading_matches(~correct).tolist() != expected  # must fail
