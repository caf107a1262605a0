"""Which buckets: sets of them are tried on a sample of the documents, packed as the run will pack them.

`packed` is a local search: the best single bucket, then one more at a time from a coarse grid, then small moves of all,
for as long as it pays. `single`, one document a row, has an exact answer (dynamic programming). Whole numbers only.
Called by planner.py.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphcap.data import rows
from graphcap.data.packing import tables_of

if TYPE_CHECKING:
    from graphcap.data.costs import Costs
    from graphcap.data.planner import Bucket

# Slots of one bucket tried, relative to the mean number of anchors in a full row.
_MARGINS = (100, 101, 102, 104, 106, 110, 115, 120, 130, 145, 160, 200)
# The grid of further buckets: lengths in eighths of the greatest, slots in hundredths of the mean for the length.
_EIGHTHS = (8, 7, 6, 4, 2, 1)
_PERCENTS = (55, 75, 90, 100, 105, 120, 145)
_FIRST_STEP, _LAST_STEP = 16, 64  # small moves: this part of a row, and half of it when no move helps
_LEAST_MOVE = 5000  # saves less than this part: try smaller ones
_MOST_ROUNDS = 6
# The sample: a window of documents for so many rows, of at most so many documents; two windows where these are few.
_SAMPLE_ROWS, _SAMPLE_WINDOW = 900, 4096
_LEAST_GAIN = 2000  # a bucket saves at least this part of an epoch, or the sample's chance may have chosen it


@dataclass(frozen=True)
class Problem:
    """What buckets are chosen for. lengths, anchor_counts: int64 [n], all documents.

    largest: the longest row, with slots for the document of most anchors. tile, unit: what lengths and slots are
    multiples of. max_buckets: at most so many. epochs: over which a bucket has to pay for itself.
    """

    lengths: np.ndarray
    anchor_counts: np.ndarray
    largest: Bucket
    costs: Costs
    block_size: int
    tile: int
    unit: int
    window: int
    max_buckets: int
    epochs: int

    def price(self, epoch_ps: int) -> int:
        """What one more bucket must save in an epoch, ps."""
        return max(self.costs.bucket_ps // self.epochs, epoch_ps // _LEAST_GAIN)

    def padded(self, length: int, num_anchors: int) -> Bucket:
        """The bucket with these sizes rounded up, no longer than the largest."""
        length = min(round_up(length, self.tile), self.largest.length)
        return replace(self.largest, length=length, num_anchors=round_up(num_anchors, self.unit))


def round_up(number: int, unit: int) -> int:
    """The next multiple of unit, at least one of them."""
    return max(unit, -(-number // unit) * unit)


def packed(problem: Problem) -> tuple[Bucket, ...]:
    """Buckets for rows of several documents, largest first. The first holds every document."""
    sample = _Sample(problem)
    best, cost = _one(problem, sample)
    while len(best) < problem.max_buckets:
        if cost - sample.bound < problem.price(cost):
            break  # even rows without any padding would not pay for another bucket
        more, _ = sample.cheapest([_with(best, bucket) for bucket in _grid(problem)])
        more, found = _moved(sample, more, rounds=1)
        if cost - found < problem.price(cost):
            break
        best, cost = more, found
    if len(best) > 1:
        best, cost = _moved(sample, best, rounds=_MOST_ROUNDS)
    while len(best) > 1:
        fewer, found = sample.cheapest([best[:i] + best[i + 1 :] for i in range(1, len(best))])
        if found - cost >= problem.price(cost):
            break
        best, cost = fewer, found
    return best


def least_of_one(problem: Problem) -> tuple[int, int]:
    """Predicted time of an epoch in the best single bucket, and in rows without any padding, ps."""
    sample = _Sample(problem)
    return _one(problem, sample)[1], sample.bound


def _one(problem: Problem, sample: _Sample) -> tuple[tuple[Bucket, ...], int]:
    slots = [problem.largest.num_anchors, *(_mean(problem, problem.largest.length) * m // 100 for m in _MARGINS)]
    ones = [problem.padded(problem.largest.length, max(n, problem.largest.num_anchors)) for n in slots]
    return sample.cheapest([(bucket,) for bucket in dict.fromkeys(ones)])


def single(problem: Problem) -> tuple[Bucket, ...]:
    """Buckets for one document a row: the lengths that cost least, exactly; largest first.

    A document takes the shortest length that it fits; a bucket's slots are the most anchors of its documents, the longest
    bucket's the most of all. As many buckets as pay for themselves.
    """
    tiles = np.maximum(1, -(-problem.lengths // problem.tile))
    ends = np.unique(np.append(tiles, problem.largest.length // problem.tile))
    group = np.searchsorted(ends, tiles)
    counts, most = np.bincount(group, minlength=len(ends)), np.zeros(len(ends), np.int64)
    np.maximum.at(most, group, problem.anchor_counts)
    chosen = []
    for total, lasts in fewest_padded(ends * problem.tile, counts, most, problem):
        borders = [-1, *lasts]
        slots = [int(most[low + 1 : high + 1].max()) for low, high in itertools.pairwise(borders)]
        slots[-1] = int(most.max())
        buckets = {problem.padded(int(ends[last]) * problem.tile, n) for last, n in zip(lasts, slots)}
        chosen.append((total * problem.epochs + len(lasts) * problem.costs.bucket_ps, sorted(buckets, reverse=True)))
    return tuple(min(chosen)[1])


def fewest_padded(lengths: np.ndarray, counts: np.ndarray, most: np.ndarray, problem: Problem):
    """For each number of buckets k = 1, 2, …: (least cost of all rows in ps, indices of the k lengths chosen, rising).

    lengths: int64 [m], rising, what a bucket may be as long as; counts, most: int64 [m], documents that need just that
    length, and the most anchors of one. The last length is always chosen. Exact: the least cost of the documents up to
    one length with k buckets follows from the least costs with k - 1. Costs of more than 2^60 ps in all are counted in a
    unit so large that their sums stay below 2^62.
    """
    size, never = len(lengths), 1 << 61
    slots = np.zeros((size, size), np.int64)  # [j, i]: the most anchors of documents i … j
    for j in range(size):
        slots[j, : j + 1] = np.maximum(slots[j - 1, : j + 1], most[j])
    slots[-1] = most.max()
    slots = np.maximum(1, -(-slots // problem.unit)) * problem.unit
    total = np.append(0, np.cumsum(counts))
    each = problem.costs.bucket(lengths[:, None], slots, problem.block_size)
    unit = 1 + (int(total[-1]) * int(each.max()) >> 60)
    cost = (total[1:, None] - total[None, :-1]) * (each // unit)
    cost[np.triu_indices(size, 1)] = never  # [j, i]: documents i … j in the bucket that ends with j
    least, before = cost[:, 0], []
    yield int(least[-1]) * unit, [size - 1]
    for _ in range(1, min(problem.max_buckets, size)):
        sums = least[None, :-1] + cost[:, 1:]
        before.append(sums.argmin(axis=1))
        least = np.minimum(sums.min(axis=1), never)
        lasts = [size - 1]
        for step in reversed(before):
            lasts.append(int(step[lasts[-1]]))
        yield int(least[-1]) * unit, lasts[::-1]


class _Sample:
    """Documents that stand for all, spread evenly over the order by length, and what sets of buckets cost with them."""

    def __init__(self, problem: Problem) -> None:
        total = len(problem.lengths)
        wanted = _SAMPLE_ROWS * problem.largest.length * total // int(problem.lengths.sum())
        window = max(1, min(problem.window, _SAMPLE_WINDOW, wanted))
        count = min(total, window if window == wanted else 2 * window)
        self.num_windows = -(-count // window)
        order = np.lexsort((problem.anchor_counts, problem.lengths))
        places = order[(2 * np.arange(count) + 1) * total // (2 * count)]
        dealt = [places[first :: self.num_windows] for first in range(self.num_windows)]
        self.sizes = np.array([len(part) for part in dealt])
        self.lengths, self.anchor_counts = problem.lengths[np.concatenate(dealt)], problem.anchor_counts[np.concatenate(dealt)]
        self.problem = problem
        linear = replace(problem.costs, pair_ps=0)
        self.bound = linear.bound(problem.lengths, problem.anchor_counts, problem.block_size)
        self._own_bound = linear.bound(self.lengths, self.anchor_counts, problem.block_size)

    def epoch_ps(self, sets: list[tuple[Bucket, ...]]) -> list[int]:
        """Predicted time of an epoch's micro steps with each set of buckets, attention apart."""
        tables = tables_of([one for one in sets for _ in range(self.num_windows)], self.problem.costs, self.problem.block_size)
        lengths, anchor_counts, sizes = (np.tile(a, len(sets)) for a in (self.lengths, self.anchor_counts, self.sizes))
        packed = rows.pack(lengths, anchor_counts, sizes, tables)
        of_set = packed.window // self.num_windows
        own = np.zeros(len(sets), np.int64)
        np.add.at(own, of_set, tables.cost[packed.window, packed.bucket])
        return [cost * self.bound // self._own_bound for cost in own.tolist()]

    def cheapest(self, sets: list[tuple[Bucket, ...]]) -> tuple[tuple[Bucket, ...], int]:
        """The set that costs least, and its cost; of equals the first."""
        costs = self.epoch_ps(sets)
        return sets[costs.index(min(costs))], min(costs)


def _mean(problem: Problem, length: int) -> int:
    """Anchors of so many tokens, on average."""
    return -(-int(problem.anchor_counts.sum()) * length // int(problem.lengths.sum()))


def _with(buckets: tuple[Bucket, ...], bucket: Bucket) -> tuple[Bucket, ...]:
    """The set with this bucket too, which gets no more slots than the first: that one holds every row."""
    bucket = replace(bucket, num_anchors=min(bucket.num_anchors, buckets[0].num_anchors))
    return tuple(sorted({*buckets, bucket}, reverse=True))


def _replaced(buckets: tuple[Bucket, ...], others: dict[int, Bucket]) -> tuple[Bucket, ...]:
    """The set with some of its buckets, by their place, made others."""
    made = (others.get(0, buckets[0]),)
    for place, bucket in enumerate(buckets[1:], 1):
        made = _with(made, others.get(place, bucket))
    return made


def _grid(problem: Problem) -> list[Bucket]:
    sizes = itertools.product((problem.largest.length * eighth // 8 for eighth in _EIGHTHS), _PERCENTS)
    return list(dict.fromkeys(problem.padded(length, _mean(problem, length) * p // 100) for length, p in sizes))


def _moved(sample: _Sample, best: tuple[Bucket, ...], *, rounds: int) -> tuple[tuple[Bucket, ...], int]:
    """The set after small moves of its buckets, each of which saved time, and its cost."""
    step, together = _FIRST_STEP, None
    for _ in range(rounds):
        moves = [(i, bucket) for i, old in enumerate(best) for bucket in _near(sample.problem, old, step, first=i == 0)]
        sets = [best, *(_replaced(best, {i: bucket}) for i, bucket in moves), *([together] if together else [])]
        costs = sample.epoch_ps(sets)
        now, least = costs[0], min(costs)
        gains = {i: min((c, bucket) for c, (j, bucket) in zip(costs[1:], moves) if j == i) for i, _ in moves}
        # All moves that help, at once: tried in the next round.
        together = _replaced(best, {i: bucket for i, (c, bucket) in gains.items() if c < now})
        best = sets[costs.index(least)]
        if now - least < now // _LEAST_MOVE:
            if step == _LAST_STEP:
                break
            step *= 2
    return best, least


def _near(problem: Problem, bucket: Bucket, step: int, *, first: bool) -> list[Bucket]:
    """The bucket a little longer or shorter, with a few slots more or fewer. The first keeps room for every document."""
    length_step = max(problem.tile, problem.largest.length // step // problem.tile * problem.tile)
    slots_step = max(problem.unit, _mean(problem, bucket.length) // step // problem.unit * problem.unit)
    near = set()
    for along, across in itertools.product((-1, 0, 1), repeat=2):
        length, slots = bucket.length + along * length_step, bucket.num_anchors + across * slots_step
        if first:
            length, slots = problem.largest.length, max(slots, problem.largest.num_anchors)
        near.add(problem.padded(max(length, problem.tile), max(slots, problem.unit)))
    return sorted(near - {bucket})
