"""Rows under two capacities: every document once, no capacity exceeded, windows apart, the same each time, and full."""

import secrets

import numpy as np
import pytest

from graphcap.data import rows
from graphcap.data.costs import ASSUMED
from graphcap.data.packing import tables_of
from graphcap.data.planner import Bucket

BLOCK_SIZE = 16


def packed(lengths, anchor_counts, sizes, sets) -> rows.Packed:
    numbers = (np.asarray(one, np.int64) for one in (lengths, anchor_counts, sizes))
    return rows.pack(*numbers, tables_of(sets, ASSUMED, BLOCK_SIZE))


def random_problem(draw: np.random.Generator):
    """Windows of a few to 200 documents, each with one to five buckets of its own; its first bucket holds any document."""
    sizes = draw.integers(1, 200, int(draw.integers(1, 6)))
    length, slots = int(draw.integers(20, 400)), int(draw.integers(4, 80))
    lengths, counts = draw.integers(1, length + 1, sizes.sum()), draw.integers(0, slots + 1, sizes.sum())
    others = [[Bucket(int(draw.integers(1, length + 1)), int(draw.integers(1, slots + 1))) for _ in range(4)] for _ in sizes]
    sets = [(Bucket(length, slots), *more[: int(draw.integers(0, 5))]) for more in others]
    return lengths, counts, sizes, sets


def faults(result: rows.Packed, lengths, counts, sizes, sets) -> list[str]:
    """What is wrong with these rows, by a loop over them."""
    found = [] if sorted(result.order.tolist()) == list(range(len(lengths))) else ["not every document once"]
    window_of = [window for window, size in enumerate(sizes) for _ in range(size)]
    for place, (start, end) in enumerate(zip(result.starts, result.starts[1:])):
        members, bucket = result.order[start:end].tolist(), sets[result.window[place]][result.bucket[place]]
        if not members or {window_of[member] for member in members} != {int(result.window[place])}:
            found.append(f"row {place} is empty or of several windows")
        tokens, anchors = sum(int(lengths[m]) for m in members), sum(int(counts[m]) for m in members)
        holding = [b for b in sets[result.window[place]] if tokens <= b.length and anchors <= b.num_anchors]
        if bucket not in holding:
            found.append(f"row {place} exceeds its bucket")
        elif min(ASSUMED.bucket(b.length, b.num_anchors, BLOCK_SIZE) for b in holding) < ASSUMED.bucket(
            bucket.length, bucket.num_anchors, BLOCK_SIZE
        ):
            found.append(f"row {place} fits a cheaper bucket")
    return found


def test_every_document_once_no_capacity_exceeded_and_windows_apart():
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    for _ in range(40):
        problem = random_problem(draw)
        result = packed(*problem)
        assert faults(result, *problem) == [], f"seed {seed}"
        assert np.all(np.diff(result.window) >= 0), f"seed {seed}"


def test_must_fail_a_changed_row_is_found():
    draw = np.random.default_rng(0)
    lengths, counts = draw.integers(20, 60, 40), draw.integers(1, 9, 40)
    problem = (lengths, counts, [20, 20], [(Bucket(128, 16),)] * 2)
    result = packed(*problem)
    assert faults(result, *problem) == []
    twice = result.order.copy()
    twice[0] = twice[1]
    swapped = result.order[np.r_[-1, 1:39, 0]]
    longer = result.starts[np.r_[0, 2 : len(result.starts)]]
    assert faults(rows.Packed(twice, result.starts, result.window, result.bucket), *problem)
    assert faults(rows.Packed(swapped, result.starts, result.window, result.bucket), *problem)
    assert faults(rows.Packed(result.order, longer, result.window[1:], result.bucket[1:]), *problem)


def test_a_window_is_packed_the_same_alone_and_in_company():
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    lengths, counts, sizes, sets = random_problem(draw)
    result, first = packed(lengths, counts, sizes, sets), 0
    for window, size in enumerate(sizes):
        alone = packed(lengths[first : first + size], counts[first : first + size], [size], [sets[window]])
        in_company = result.window == window
        starts = result.starts[np.append(in_company, False)]
        assert (alone.order + first).tolist() == result.order[first : first + size].tolist(), f"seed {seed}"
        assert (alone.starts[:-1] + first).tolist() == starts.tolist(), f"seed {seed}"
        assert alone.bucket.tolist() == result.bucket[in_company].tolist(), f"seed {seed}"
        first += size


def test_no_documents_make_no_rows():
    result = packed([], [], [0], [(Bucket(128, 8),)])
    assert (result.order.tolist(), result.starts.tolist(), result.bucket.tolist()) == ([], [0], [])


def test_a_document_that_fits_no_bucket_is_a_fault_of_ours():
    with pytest.raises(AssertionError, match="fits no bucket"):
        packed([10, 200], [1, 1], [2], [(Bucket(128, 8),)])


def test_both_capacities_of_mixed_rows_fill_close_to_full():
    """Documents with 0.05 to 0.16 anchors a token: a row needs the right company for its slots to fill too."""
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    lengths = np.clip(np.exp(draw.normal(np.log(200), 0.6, 4000)), 20, 1024).astype(np.int64)
    counts = np.maximum(1, np.ceil(lengths * draw.uniform(0.05, 0.16, len(lengths)))).astype(np.int64)
    slots = int(counts.sum() / lengths.sum() * 2048 * 1.01)
    result = packed(lengths, counts, [4000], [(Bucket(2048, slots),)])
    num_rows = len(result.bucket)
    assert lengths.sum() > 0.98 * 2048 * num_rows and counts.sum() > 0.97 * slots * num_rows, f"seed {seed}: {num_rows} rows"


def test_short_documents_fill_the_rows_of_long_ones_first():
    """Two long documents never share a row here; each has room for two short ones, and there are just so many."""
    lengths, counts = [700] * 30 + [150] * 60, [7] * 30 + [1] * 60
    result = packed(lengths, counts, [90], [(Bucket(1024, 16), Bucket(512, 8))])
    assert len(result.bucket) == 30 and np.all(np.diff(result.starts) == 3)
