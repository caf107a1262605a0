"""What a plan is predicted to cost and how full its rows are, over one epoch of a schedule. Changes and stores nothing.

Called by shapes.py and tools/bench_plan.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphcap.data import balance
from graphcap.data.packing import Schedule


@dataclass(frozen=True)
class Forecast:
    """One epoch. rows_ps: predicted time of all micro steps; bound_ps: all tokens and anchors at their own cost, no padding.

    updates_ps: of all updates, in neither of the two. linear_over: what padding and constants add to the bound without
    attention, which no plan changes; over: the same beside the whole bound. token_fill, anchor_fill: shares of the
    buckets' tokens and slots in use. rows_of_bucket: rows, by bucket. correlation: between a row's place in the epoch
    and the mean length of its documents.
    """

    rows_ps: int
    bound_ps: int
    updates_ps: int
    over: float
    linear_over: float
    token_fill: float
    anchor_fill: float
    rows_of_bucket: tuple[int, ...]
    correlation: float


def forecast(schedule: Schedule, lengths: np.ndarray, anchor_counts: np.ndarray, *, epoch: int) -> Forecast:
    """Predict one epoch. lengths, anchor_counts: int [n], as the schedule was given."""
    shapes, packed = schedule.shapes, schedule.epoch_rows(epoch)
    lengths, anchor_counts = np.asarray(lengths, np.int64), np.asarray(anchor_counts, np.int64)
    bound, attention = shapes.costs.bound(lengths, anchor_counts, shapes.block_size), shapes.costs.attention(lengths)
    sizes = np.array([(bucket.length, bucket.num_anchors) for bucket in shapes.buckets])[packed.bucket]
    total, num_updates = int(packed.cost_ps.sum()), -(-len(packed.bucket) // schedule.rows_per_update)
    means = np.add.reduceat(lengths[packed.documents], packed.starts[:-1]) / np.diff(packed.starts)
    varies = len(means) > 1 and means.std() > 0
    return Forecast(
        rows_ps=total,
        bound_ps=bound,
        updates_ps=num_updates * shapes.costs.update_ps,
        over=total / bound - 1,
        linear_over=(total - attention) / (bound - attention) - 1,
        token_fill=int(lengths.sum()) / int(sizes[:, 0].sum()),
        anchor_fill=int(anchor_counts.sum()) / int(sizes[:, 1].sum()),
        rows_of_bucket=tuple(np.bincount(packed.bucket, minlength=len(shapes.buckets)).tolist()),
        correlation=float(np.corrcoef(np.arange(len(means)), means)[0, 1]) if varies else 0.0,
    )


def imbalance(schedule: Schedule, world_size: int, *, epoch: int) -> float:
    """Predicted time of the slowest rank over the mean of the ranks, per update, averaged over an epoch's updates."""
    costs, ratios = schedule.epoch_rows(epoch).cost_ps, []
    for first in range(0, len(costs), schedule.rows_per_update):
        own = costs[first : first + schedule.rows_per_update]
        loads = np.bincount(balance.share(own.tolist(), world_size), own, world_size)
        ratios.append(loads.max() / loads.mean())
    return float(np.mean(ratios))
