"""Rows → updates, and updates → ranks: each update's rows can be shared evenly, whatever the number of ranks.

An update is made of groups of rows of about the same cost, one for each of up to eight ranks, so its make-up knows no
ranks; which rank takes which row is decided when asked, longest first. Whole numbers only. Called by packing.py.
"""

from __future__ import annotations

import numpy as np

# Rows of a group: ranks that it is even for. Fewer where an update's rows are no multiple of it.
_GROUP_ROWS = 8
# Costs that differ by less than this share of the largest count as equal, so that most groups stay mixed by chance.
_STEPS = 48
# Packing windows whose rows make updates together: enough that a group's rows are alike, few beside an epoch.
_WINDOWS = 8
_ODD = np.uint64(0x9E3779B97F4A7C15)


def compose(window: np.ndarray, costs: np.ndarray, keys: np.ndarray, *, rows_per_update: int) -> np.ndarray:
    """An order of the rows, int64 [r], in which every `rows_per_update` are an update; the last may have fewer.

    window: int64 [r], rising; costs: int64 [r], above 0; keys: uint64 [r], random and all different.
    """
    group = int(np.gcd(rows_per_update, _GROUP_ROWS))
    borders = np.searchsorted(window, np.arange(_WINDOWS, int(window[-1]) + 1, _WINDOWS)) if len(window) else []
    updates, kept = [], np.zeros(0, np.int64)
    for rows in np.split(np.arange(len(window)), borders):
        pool = np.concatenate([kept, rows])
        pool = pool[np.argsort(keys[pool], kind="stable")]
        num_kept = len(pool) % rows_per_update  # wait for the next windows, so that only an epoch's last update is short
        kept, pool = pool[:num_kept], pool[num_kept:]
        if not len(pool):
            continue
        level = costs[pool] * _STEPS // int(costs[pool].max())
        groups = pool[np.argsort(level, kind="stable")].reshape(-1, group)  # equals stay in the order of their keys
        # A group begins with its smallest key; multiplied, it says nothing about how small.
        updates.append(groups[np.argsort(keys[groups[:, 0]] * _ODD, kind="stable")].ravel())
    return np.concatenate([*updates, kept])


def share(costs: list[int], world_size: int) -> list[int]:
    """The rank of each row: the costliest row first, each to the rank with least to do, then with fewest rows."""
    loads = [(0, 0, rank) for rank in range(world_size)]
    ranks = [0] * len(costs)
    for row in sorted(range(len(costs)), key=lambda row: (-costs[row], row)):
        load, count, rank = min(loads)
        loads[rank] = (load + costs[row], count + 1, rank)
        ranks[row] = rank
    return ranks
