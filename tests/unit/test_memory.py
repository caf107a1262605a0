"""Predicted memory: counted by hand for one bucket, what fits and what does not. Against a GPU: tests/cuda/test_memory.py."""

import random
from dataclasses import replace

import pytest

from graphcap.data.planner import Bucket
from graphcap.engine.memory import ROUNDING, SEGMENT_BYTES, WORKSPACE_BYTES, Sizes
from tests.toys import drafter_config, fresh_seed


def sizes(**changes) -> Sizes:
    """Of a toy drafter: hidden 32, 2 layers, 4 query and 2 key heads of 8, MLP 64, vocabulary 64, blocks of 8, 2 taps."""
    drafter = drafter_config(num_layers=2, block_size=8, target_layer_ids=(0, 2))
    plain = {
        "drafter": drafter,
        "num_parameters": 1000,
        "target_bytes": 5000,
        "target_intermediate": 64,
        "itemsize": 2,
        "chunk_tokens": 100,
    }
    return Sizes(**{**plain, **changes})


def forward_by_hand(c) -> int:
    """What is kept of 256 tokens and 16 blocks of 8 when the loss is computed, in numbers, each tensor named once."""
    rows, draft, predicted, keys, queries = 256, 128, 16 * 7, c.num_kv_heads * c.head_dim, c.num_heads * c.head_dim
    numbers = rows * 2 * c.hidden_size  # features
    numbers += rows * (2 * c.hidden_size + 2 * c.head_dim)  # fused, normed, rotary table
    numbers += c.num_layers * rows * 3 * keys  # raw keys, rotated keys, values
    for layer in range(c.num_layers):
        if layer:
            numbers += 2 * draft * c.hidden_size  # the sum before attention and its norm: in the first layer a row a block
        numbers += draft * (4 * queries + 3 * keys)  # raw and rotated queries, output, what it is projected from; keys, values
        behind = draft if layer + 1 < c.num_layers else predicted
        numbers += behind * (2 * c.hidden_size + 3 * c.intermediate_size)  # the sum before the MLP, its norm; the MLP
    numbers += 2 * draft * c.head_dim  # rotary table
    return numbers + 3 * predicted * c.hidden_size  # the last sum, its norm, which predicts, and that one's gradient


def test_a_bucket_counted_by_hand():
    few, many = sizes(), sizes(drafter=replace(sizes().drafter, vocab_size=1000))
    heads = 2 * 256 * 32 * 2  # when the backward begins: gradients of keys and values of every query head, in float32
    logits = 64 * 1000  # of 112 draft tokens, in two chunks of at most 100, as even as 16 at a time can be
    for one, extra in ((few, heads), (many, logits)):
        numbers = forward_by_hand(one.drafter) + extra
        assert one.step_bytes(Bucket(256, 16)) == pytest.approx(SEGMENT_BYTES + ROUNDING * 2 * numbers, abs=1)
    assert few.held_bytes() == 5000 + 1000 * (2 + 16) + WORKSPACE_BYTES


def test_with_checkpoints_a_layers_input_is_kept_and_one_layer_run_again():
    c, rows, draft = sizes().drafter, 128, 256
    keys, queries = c.num_kv_heads * c.head_dim, c.num_heads * c.head_dim
    numbers = rows * (2 * c.hidden_size + 2 * c.hidden_size + 2 * c.head_dim + 3 * c.num_layers * keys)  # features, context
    numbers += 2 * draft * c.head_dim + 3 * 32 * 7 * c.hidden_size
    numbers += draft * c.hidden_size  # the second layer's input; the first one's is a row a block
    numbers += draft * (4 * (c.hidden_size + queries) + 3 * c.intermediate_size + 3 * keys) + 2 * rows * queries * 2
    expected = SEGMENT_BYTES + ROUNDING * 2 * numbers
    assert sizes(checkpointing=True).step_bytes(Bucket(128, 32)) == pytest.approx(expected, abs=1)


def test_at_the_end_of_the_backward_every_gradient_is_there():
    large, c, rows, draft = sizes(num_parameters=10**7), sizes().drafter, 256, 128
    keys, queries = c.num_kv_heads * c.head_dim, c.num_heads * c.head_dim
    numbers = rows * (2 * c.hidden_size + 2 * c.hidden_size + 2 * c.head_dim + 3 * c.num_layers * keys)  # features, context
    numbers += 2 * draft * c.head_dim + 2 * 16 * 7 * c.hidden_size
    numbers += (
        draft * (4 * (c.hidden_size + queries) + 3 * c.intermediate_size + 3 * keys) + 2 * rows * queries * 2
    )  # one layer
    numbers += 10**7 + c.num_layers * rows * 2 * keys  # the gradients: of parameters, and of the context's keys and values
    assert large.step_bytes(Bucket(256, 16)) == pytest.approx(SEGMENT_BYTES + ROUNDING * 2 * numbers, abs=1)


def test_extraction_needs_the_target_and_its_features_alone():
    one, bucket = sizes(), Bucket(256, 16)
    features, layer = 256 * 2 * one.drafter.hidden_size, 256 * (3 * 64 + 4 * one.drafter.hidden_size)
    expected = 5000 + WORKSPACE_BYTES + SEGMENT_BYTES + 2 * features + ROUNDING * 2 * layer
    assert one.extraction_bytes(bucket) == pytest.approx(expected, abs=1)


def test_checkpointing_keeps_less_and_a_wide_target_counts():
    bucket = Bucket(1024, 128)
    assert sizes(checkpointing=True).step_bytes(bucket) < sizes().step_bytes(bucket)
    assert sizes(target_intermediate=100_000).step_bytes(bucket) > sizes().step_bytes(bucket)
    assert sizes(target_intermediate=0).step_bytes(bucket) == sizes().step_bytes(bucket)


def test_the_largest_that_fits_fits_and_the_next_does_not():
    fresh_seed()
    for _ in range(20):
        bucket = Bucket(128 * random.randint(8, 64), 16 * random.randint(1, 64))
        one = sizes(checkpointing=random.random() < 0.5, chunk_tokens=random.randint(1, 4000))
        smallest = one.needed_bytes(Bucket(128, 16))
        room = random.randint(smallest + (1 << 16), max(one.needed_bytes(bucket) - 1, smallest + (1 << 17)))
        fitting = one.largest_that_fits(bucket, room)
        assert fitting is None or one.needed_bytes(fitting) <= room
        for length in range((0 if fitting is None else fitting.length) + 128, bucket.length + 1, 128):
            longer = Bucket(length, max(16, -(-bucket.num_anchors * length // bucket.length // 16) * 16))
            assert one.needed_bytes(longer) > room


def test_stored_features_lie_in_slots_and_staging_and_not_in_the_pool():
    online, stored, buckets = sizes(), sizes(stored=True, target_intermediate=0), (Bucket(512, 256), Bucket(256, 128))
    row = 2 * online.drafter.hidden_size * 2
    assert online.step_bytes(buckets[0]) - stored.step_bytes(buckets[0]) == pytest.approx(ROUNDING * 512 * row, abs=2)
    assert stored.needed_bytes(*buckets) - stored.held_bytes() - stored.step_bytes(buckets[0]) == row * (512 + 256 + 3 * 512)


def test_a_long_row_of_few_anchors_needs_what_its_audit_takes():
    one, bucket, c, rows = sizes(), Bucket(1 << 17, 16), sizes().drafter, 1 << 17
    keys, queries = c.num_kv_heads * c.head_dim, c.num_heads * c.head_dim
    floats = c.hidden_size * (2 * queries + 2 * keys + 3 * c.intermediate_size)  # the layer
    floats += rows * (2 * queries + queries)  # keys and values once a query head, a gradient of one
    floats += rows * 2 * (keys + keys + keys)  # keys and values, their gradients' sums, what two blocks add
    floats += rows * 3 * c.num_heads * 2 * c.block_size  # scores of two blocks, softmax, gradient
    numbers = rows * (2 * c.num_layers * keys + keys) + 4 * 128 * c.hidden_size  # context; block states and gradients
    expected = ROUNDING * (4 * floats + 2 * numbers)
    wide = sizes(drafter=replace(c, hidden_size=4096, intermediate_size=8), stored=True, target_intermediate=0)
    made = rows * (2 * 4096 + 2 * 4096 + 2 * c.head_dim + 3 * c.num_layers * keys)  # features of two layers, and their context
    assert wide.audit_bytes(bucket) == pytest.approx(ROUNDING * 2 * made, abs=1)
    assert one.needed_bytes(bucket) - one.held_bytes() == pytest.approx(expected, abs=1) and expected > one.step_bytes(bucket)
