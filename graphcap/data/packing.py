"""Which documents share a row, which rows an update has, and where the anchors are: all derived, nothing stored.

The schedule follows from (shapes, ids, lengths, anchor counts, seed, epoch) by integer arithmetic alone, so it is the
same on every machine and whatever the number of ranks; its hash per epoch says so. This file builds no arrays for the
device (loader.py), fills no rows itself (rows.py, balance.py) and chooses no bucket sizes (planner.py).
Called by planner.py, loader.py, train and eval.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphcap.data import balance, rows
from graphcap.errors import DataError

if TYPE_CHECKING:
    from graphcap.data.conversations import Document
    from graphcap.data.costs import Costs
    from graphcap.data.planner import Bucket, Shapes

# Any change to the draws or to the packing makes other updates from the same recipe: raise it then.
PACKING_VERSION = 2

# Purposes keep the draws apart: the same (seed, epoch, number) gives unrelated values for each of them.
_ANCHORS, _DOCUMENT_ORDER, _ROW_ORDER = 1, 2, 3

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """Finaliser of splitmix64 on one 64-bit number. Source: Steele, Lea, Flood, 'Fast splittable PRNGs' (2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _hash(numbers: np.ndarray, *keys: int) -> np.ndarray:
    """uint64 hash of each number under the keys; different numbers never collide under the same keys."""
    state = 0
    for key in keys:
        state = _mix((state + _GOLDEN + key) & _MASK64)
    values = np.asarray(numbers).astype(np.uint64) + np.uint64((state + _GOLDEN) & _MASK64)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def anchor_candidates(loss_mask: np.ndarray) -> np.ndarray:
    """Positions p (int32, rising) at which p and p + 1 are supervised: where a block may begin.

    loss_mask: bool [n]. The anchor is a token the target wrote and the block's first draft token has a label.
    """
    mask = np.asarray(loss_mask, dtype=bool)
    return np.flatnonzero(mask[:-1] & mask[1:]).astype(np.int32)


def num_anchors_of(loss_mask: np.ndarray, *, density: float) -> int:
    """Anchors a document has in every epoch: min(candidates, ceil(density · supervised tokens)).

    loss_mask: bool [n]. density: anchors per supervised token.
    """
    return min(len(anchor_candidates(loss_mask)), math.ceil(density * int(np.count_nonzero(loss_mask))))


def choose_anchors(document: Document, *, seed: int, epoch: int, density: float) -> np.ndarray:
    """The document's anchors of this epoch: int32 [n], positions in the document, rising.

    They are the candidates with the smallest hash of (seed, epoch, document id, position): bucket, row, rank, company
    and platform have no say. density: anchors per supervised token.
    """
    candidates = anchor_candidates(document.loss_mask)
    count = num_anchors_of(document.loss_mask, density=density)
    order = np.argsort(_hash(candidates, seed, _ANCHORS, epoch, document.id), kind="stable")
    return np.sort(candidates[order[:count]])


@dataclass(frozen=True)
class Row:
    """Documents laid end to end in one bucket. document_ids: ids of Document, in this order. cost_ps: its predicted time."""

    bucket: Bucket
    document_ids: tuple[int, ...]
    cost_ps: int = 0


@dataclass(frozen=True)
class Update:
    """The rows of one optimizer step over all ranks. index: 0-based over the whole run. epoch: 0-based."""

    index: int
    epoch: int
    rows: tuple[Row, ...]

    def rows_of(self, rank: int, world_size: int = 1) -> tuple[Row, ...]:
        """The rows of this rank. The ranks' shares are disjoint, cover all rows and take about the same time."""
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        ranks = balance.share([row.cost_ps for row in self.rows], world_size)
        return tuple(row for row, owner in zip(self.rows, ranks) if owner == rank)


@dataclass(frozen=True)
class EpochRows:
    """One epoch's rows in the order of its updates. documents: int32 [n], indices; starts: int64 [r + 1], borders of rows.

    bucket: int64 [r], index of the bucket; cost_ps: int64 [r], predicted times.
    """

    documents: np.ndarray
    starts: np.ndarray
    bucket: np.ndarray
    cost_ps: np.ndarray


class Schedule:
    """Every update of a run, the same list on every rank.

    Epochs are packed when first asked for, in about 3 microseconds a document. Every document is in exactly one row of
    every epoch; the last update of an epoch may hold fewer rows.
    """

    def __init__(
        self,
        shapes: Shapes,
        ids: np.ndarray,
        lengths: np.ndarray,
        anchor_counts: np.ndarray,
        *,
        seed: int,
        epochs: int,
        rows_per_update: int,
        max_updates: int = 0,
    ) -> None:
        """ids, lengths, anchor_counts: int [n], one entry a document. max_updates: stop after so many; 0: never.

        Raises: DataError naming the first document that fits no bucket.
        """
        self._ids = np.asarray(ids, dtype=np.int64)
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._anchor_counts = np.asarray(anchor_counts, dtype=np.int64)
        assert self._ids.shape == self._lengths.shape == self._anchor_counts.shape and self._ids.ndim == 1
        assert len(self._ids) == 0 or self._ids.min() >= 0, "ids of documents are 0 or more"
        assert len(np.unique(self._ids)) == len(self._ids), "every document has its own id"
        assert rows_per_update >= 1 and epochs >= 1 and max_updates >= 0, (rows_per_update, epochs, max_updates)
        self.shapes, self.seed, self.epochs = shapes, seed, epochs
        self.rows_per_update, self.max_updates = rows_per_update, max_updates
        self._hashes: dict[int, str] = {}
        self._packed: dict[int, EpochRows] = {}
        fix = 'plan again with shapes.plan = "auto"'
        check_fit(shapes.buckets[0], self._lengths, self._anchor_counts, name_of=lambda place: str(self._ids[place]), fix=fix)

    @property
    def rows_per_epoch(self) -> tuple[int, ...]:
        """Rows of each epoch. They differ by a few, because each epoch shuffles anew."""
        return tuple(self._count(epoch) for epoch in range(self.epochs))

    @property
    def num_updates(self) -> int:
        """Updates of the whole run. Packs every epoch that it counts."""
        total = 0
        for epoch in range(self.epochs):
            total += -(-self._count(epoch) // self.rows_per_update)
            if self.max_updates and total >= self.max_updates:
                return self.max_updates
        return total

    def updates(self, start: int = 0) -> Iterator[Update]:
        """The updates from number `start` on; the same ones that a run from 0 makes there."""
        assert start >= 0, f"start {start}"
        index = 0
        for epoch in range(self.epochs):
            num_updates = -(-self._count(epoch) // self.rows_per_update)
            if index + num_updates <= start:
                index += num_updates
                continue
            num_rows = self._count(epoch)
            for first in range(0, num_rows, self.rows_per_update):
                if self.max_updates and index >= self.max_updates:
                    return
                if index >= start:
                    places = range(first, min(first + self.rows_per_update, num_rows))
                    yield Update(index, epoch, tuple(self._row(epoch, place) for place in places))
                index += 1

    def epoch_hash(self, epoch: int) -> str:
        """sha256 (hex) of the epoch's rows in order: buckets, documents and the borders between rows and updates."""
        if epoch in self._hashes:
            return self._hashes[epoch]
        packed = self.epoch_rows(epoch)
        sizes = np.array([(bucket.length, bucket.num_anchors) for bucket in self.shapes.buckets])
        digest = hashlib.sha256(f"packing {PACKING_VERSION}, {self.rows_per_update} rows an update\n".encode())
        for numbers in (packed.starts, self._ids[packed.documents], sizes[packed.bucket].ravel()):
            digest.update(np.asarray(numbers).astype("<i8").tobytes())
        self._hashes[epoch] = digest.hexdigest()
        return self._hashes[epoch]

    def _count(self, epoch: int) -> int:
        return len(self.epoch_rows(epoch).bucket)

    def _row(self, epoch: int, place: int) -> Row:
        packed = self._packed[epoch]
        documents = packed.documents[packed.starts[place] : packed.starts[place + 1]]
        bucket = self.shapes.buckets[packed.bucket[place]]
        return Row(bucket, tuple(self._ids[documents].tolist()), int(packed.cost_ps[place]))

    def epoch_rows(self, epoch: int) -> EpochRows:
        """Shuffle, pack and compose one epoch, once."""
        assert 0 <= epoch, f"epoch {epoch}"
        if epoch not in self._packed:
            order = np.argsort(_hash(self._ids, self.seed, _DOCUMENT_ORDER, epoch), kind="stable")
            lengths = self._lengths[order]
            packed = pack_documents(self.shapes, lengths, self._anchor_counts[order])
            firsts = self._ids[order[packed.order[packed.starts[:-1]]]]
            keys = _hash(firsts, self.seed, _ROW_ORDER, epoch)
            costs = row_costs(self.shapes, packed, lengths)
            chosen = balance.compose(packed.window, costs, keys, rows_per_update=self.rows_per_update)
            counts = np.diff(packed.starts)[chosen]
            starts = np.append(0, np.cumsum(counts))
            within = np.arange(len(order)) - np.repeat(starts[:-1], counts)
            documents = order[packed.order[np.repeat(packed.starts[:-1][chosen], counts) + within]]
            self._packed[epoch] = EpochRows(documents.astype(np.int32), starts, packed.bucket[chosen], costs[chosen])
        return self._packed[epoch]


def pack_documents(shapes: Shapes, lengths: np.ndarray, anchor_counts: np.ndarray) -> rows.Packed:
    """Rows of shuffled documents, window by window. lengths, anchor_counts: int64 [n], in the shuffled order."""
    # Windows of equal size, none larger than asked: a last window of three documents would fill no row.
    num_windows = max(1, -(-len(lengths) // shapes.window))
    sizes = np.full(num_windows, len(lengths) // num_windows) + (np.arange(num_windows) < len(lengths) % num_windows)
    tables = tables_of([shapes.buckets] * num_windows, shapes.costs, shapes.block_size)
    if shapes.rows == "packed":
        return rows.pack(lengths, anchor_counts, sizes, tables)
    window, each = np.repeat(np.arange(num_windows), sizes), np.arange(len(lengths))
    bucket = rows.cheapest(lengths, anchor_counts, window, tables)
    return rows.Packed(each, np.arange(len(lengths) + 1), window, bucket)


def tables_of(sets: list[tuple[Bucket, ...]], costs: Costs, block_size: int) -> rows.Tables:
    """What rows.py needs to know of the buckets of each window."""
    most = max(len(buckets) for buckets in sets)
    sizes = np.array([[(b.length, b.num_anchors) for b in buckets] + [(-1, -1)] * (most - len(buckets)) for buckets in sets])
    length, slots = sizes[..., 0], sizes[..., 1]
    cost = np.where(length < 0, 0, costs.bucket(length, slots, block_size))
    return rows.Tables(length, slots, cost, costs.token_ps, costs.draft_token_ps * block_size)


def row_costs(shapes: Shapes, packed: rows.Packed, lengths: np.ndarray) -> np.ndarray:
    """Predicted time of each row, attention included, ps: int64 [r]. lengths: of the documents, in the order packed."""
    sizes = np.array([(bucket.length, bucket.num_anchors) for bucket in shapes.buckets])
    pairs = np.add.reduceat(np.square(lengths[packed.order]), packed.starts[:-1]) if len(packed.bucket) else 0
    own = shapes.costs.bucket(sizes[:, 0], sizes[:, 1], shapes.block_size)
    return own[packed.bucket] + shapes.costs.pair_ps * pairs


def check_fit(
    largest: Bucket, lengths: np.ndarray, anchor_counts: np.ndarray, *, name_of: Callable[[int], str], fix: str
) -> None:
    """Raises: DataError naming the first document with more tokens or anchors than the largest bucket has.

    name_of: of the document at a place in lengths and anchor_counts, int [n]. fix: what to do about it.
    """
    too_long = np.flatnonzero((lengths > largest.length) | (anchor_counts > largest.num_anchors))
    if len(too_long):
        at = int(too_long[0])
        raise DataError(
            "document",
            name_of(at),
            expected=f"at most {largest.length} tokens and {largest.num_anchors} anchors",
            got=f"{int(lengths[at])} tokens and {int(anchor_counts[at])} anchors",
            cause=f"the nearest bucket, {largest.name}, is the largest; {len(too_long)} of {len(lengths)} documents do not fit",
            fix=fix,
        )
