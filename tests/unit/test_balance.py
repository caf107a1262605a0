"""Updates and ranks: every row in one update and on one rank, and ranks that have about as much to do."""

import itertools
import secrets

import numpy as np
import pytest

from graphcap.data import balance


def random_rows(draw: np.random.Generator, count: int):
    window = np.sort(draw.integers(0, 30, count))
    costs = (1e9 * (1 + draw.pareto(1.5, count).clip(0, 1))).astype(np.int64)
    return window, costs, draw.permutation(2**32 + np.arange(count)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def slowest_over_mean(costs: np.ndarray, rows_per_update: int, world_size: int) -> float:
    ratios = []
    for first in range(0, len(costs), rows_per_update):
        own = costs[first : first + rows_per_update].tolist()
        loads = [0] * world_size
        for cost, rank in zip(own, balance.share(own, world_size)):
            loads[rank] += cost
        ratios.append(max(loads) * world_size / sum(loads))
    return sum(ratios) / len(ratios)


@pytest.mark.parametrize("rows_per_update", [1, 3, 4, 24])
def test_an_order_holds_every_row_once_and_stays_near_its_window(rows_per_update):
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    for count in (0, 1, 5, 23, 500):
        window, costs, keys = random_rows(draw, count)
        order = balance.compose(window, costs, keys, rows_per_update=rows_per_update)
        assert sorted(order.tolist()) == list(range(count)), f"seed {seed}"
        late = window[order] // 8 < np.maximum.accumulate(window[order] // 8) if count else np.zeros(0, bool)
        assert late.sum() <= 4 * rows_per_update, f"seed {seed}: rows that waited"


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_take_about_as_long_and_must_fail_with_rows_in_any_order(world_size):
    seed = secrets.randbits(32)
    window, costs, keys = random_rows(np.random.default_rng(seed), 24 * 100)
    order = balance.compose(window, costs, keys, rows_per_update=24)
    ratio = slowest_over_mean(costs[order], 24, world_size)
    assert ratio < 1.03, f"seed {seed}: {ratio}"
    any_order = slowest_over_mean(costs[np.argsort(keys)], 24, world_size)
    assert world_size < 8 or any_order > 1 + 2 * (ratio - 1), f"seed {seed}: {ratio} against {any_order}"


def test_no_rank_waits_where_two_could_share_better():
    """Longest first is within 4/3 of the best sharing, found here by trying all; and a rank gets a row before another two."""
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    for _ in range(30):
        costs, world_size = draw.integers(1, 100, int(draw.integers(1, 8))).tolist(), int(draw.integers(1, 4))
        ranks = balance.share(costs, world_size)
        slowest = max(sum(c for c, r in zip(costs, ranks) if r == rank) for rank in range(world_size))
        best = min(
            max(sum(c for c, r in zip(costs, tried) if r == rank) for rank in range(world_size))
            for tried in itertools.product(range(world_size), repeat=len(costs))
        )
        assert 3 * slowest <= 4 * best, f"seed {seed}: {costs} on {world_size}"
        assert len(set(ranks)) == min(world_size, len(costs)), f"seed {seed}"
    assert balance.share([0, 0, 0], 3) == [0, 1, 2]
