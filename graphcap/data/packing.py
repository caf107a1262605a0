"""Which documents share a row, which rows an update has, and where the anchors are: all derived, nothing stored.

The schedule follows from (shapes, ids, lengths, anchor counts, seed, epoch) by integer arithmetic alone, so it is the
same on every rank and machine; its hash per epoch says so. This file builds no arrays for the device (loader.py) and
chooses no bucket sizes (planner.py, which tries its choices with `pack_rows`).
Called by planner.py, loader.py, train and eval.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphcap.errors import DataError

if TYPE_CHECKING:
    from graphcap.data.conversations import Document
    from graphcap.data.planner import Bucket, Shapes

# Any change to the draws or to the packing makes other updates from the same recipe: raise it then.
PACKING_VERSION = 1

# Purposes keep the draws apart: the same (seed, epoch, number) gives unrelated values for each of them.
_ANCHORS, _DOCUMENT_ORDER, _ROW_ORDER = 1, 2, 3

# Documents looked at for a place in a row before the row is closed. More fills rows by less than a thousandth.
_SCANNED = 128

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
    """Documents laid end to end in one bucket. document_ids: ids of Document, in this order."""

    bucket: Bucket
    document_ids: tuple[int, ...]


@dataclass(frozen=True)
class Update:
    """The rows of one optimizer step over all ranks. index: 0-based over the whole run. epoch: 0-based."""

    index: int
    epoch: int
    rows: tuple[Row, ...]

    def rows_of(self, rank: int, world_size: int = 1) -> tuple[Row, ...]:
        """The rows of this rank: every world_size-th. The ranks' shares are disjoint and cover all rows."""
        assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
        return self.rows[rank::world_size]


def pack_rows(
    lengths: np.ndarray, anchor_counts: np.ndarray, *, length: int, num_anchors: int, most_anchors: int
) -> list[list[int]]:
    """Put documents into few rows under two capacities, tokens and anchor slots.

    lengths, anchor_counts: int [n], each at most `length` and `most_anchors`. A row has `length` tokens and
    `num_anchors` slots; one that begins with a document of more anchors than that has `most_anchors` slots.
    Returns indices into the inputs, one list a row; each index once, the largest documents first. Ties are broken by
    index, so the result is a function of the input alone. Time: n log n, plus at most 2 · `_SCANNED` steps a
    document.

    Row by row: begin with the largest document left, then add the largest that fits, from the documents with many
    anchors for their length or from those with few, whichever evens out what the row has left. (Best-fit-decreasing
    does not look at the mix: it left 5 % more of both capacities empty, and far more for tens of thousands of
    short documents.)
    """
    lengths, anchor_counts = np.asarray(lengths, dtype=np.int64), np.asarray(anchor_counts, dtype=np.int64)
    many = anchor_counts * length > lengths * num_anchors
    # Sorted by the capacity that the document takes more of; the other one is checked when a place is found.
    pairs = list(zip(lengths.tolist(), anchor_counts.tolist()))
    few_pool = sorted((pairs[index][0], pairs[index][1], index) for index in np.flatnonzero(~many).tolist())
    many_pool = sorted((pairs[index][1], pairs[index][0], index) for index in np.flatnonzero(many).tolist())

    rows = []
    while few_pool or many_pool:
        if not many_pool or few_pool and few_pool[-1][0] * num_anchors >= many_pool[-1][0] * length:
            tokens, anchors, index = few_pool.pop()
        else:
            anchors, tokens, index = many_pool.pop()
        row = [index]
        tokens_left = length - tokens
        anchors_left = (most_anchors if anchors > num_anchors else num_anchors) - anchors
        while True:
            wants_tokens = tokens_left * num_anchors >= anchors_left * length
            found = None
            for from_few in (wants_tokens, not wants_tokens):
                if from_few:
                    found = _pop_largest(few_pool, tokens_left, anchors_left)
                else:
                    found = _pop_largest(many_pool, anchors_left, tokens_left)
                if found:
                    break
            if not found:
                break
            tokens, anchors = found[:2] if from_few else found[1::-1]
            tokens_left, anchors_left = tokens_left - tokens, anchors_left - anchors
            row.append(found[2])
        rows.append(row)
    return rows


def _pop_largest(pool: list[tuple[int, int, int]], first_left: int, second_left: int) -> tuple[int, int, int] | None:
    """Take the last entry of the sorted pool with first <= first_left and second <= second_left, looking at a few."""
    at = bisect.bisect_right(pool, (first_left, math.inf)) - 1
    for place in range(at, max(at - _SCANNED, -1), -1):
        if pool[place][1] <= second_left:
            return pool.pop(place)
    return None


class Schedule:
    """Every update of a run, the same list on every rank.

    Epochs are packed when first asked for. Every document is in exactly one row of every epoch; the last update of an
    epoch may hold fewer rows.
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

        Raises: DataError naming the first document that does not fit the largest bucket.
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
        self._num_rows: dict[int, int] = {}  # rows of each epoch packed so far
        self._packed: dict[int, list[Row]] = {}  # the last epoch packed, whole
        check_fit(shapes.buckets[0], self._ids, self._lengths, self._anchor_counts)

    @property
    def rows_per_epoch(self) -> tuple[int, ...]:
        """Rows of each epoch. They differ by a few, because each epoch shuffles anew."""
        return tuple(self._count(epoch) for epoch in range(self.epochs))

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
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
            rows = self._rows(epoch)
            for first in range(0, len(rows), self.rows_per_update):
                if self.max_updates and index >= self.max_updates:
                    return
                if index >= start:
                    yield Update(index, epoch, tuple(rows[first : first + self.rows_per_update]))
                index += 1

    def epoch_hash(self, epoch: int) -> str:
        """sha256 (hex) of the epoch's rows in order: buckets, documents and the borders between updates."""
        if epoch in self._hashes:
            return self._hashes[epoch]
        digest = hashlib.sha256(f"packing {PACKING_VERSION}, {self.rows_per_update} rows an update\n".encode())
        for row in self._rows(epoch):
            digest.update(f"{row.bucket.name}: {' '.join(map(str, row.document_ids))}\n".encode())
        self._hashes[epoch] = digest.hexdigest()
        return self._hashes[epoch]

    def _count(self, epoch: int) -> int:
        if epoch not in self._num_rows:
            self._rows(epoch)
        return self._num_rows[epoch]

    def _rows(self, epoch: int) -> list[Row]:
        """All rows of one epoch. Only the last epoch asked for is kept: a run needs one at a time."""
        assert 0 <= epoch, f"epoch {epoch}"
        if epoch not in self._packed:
            order = np.argsort(_hash(self._ids, self.seed, _DOCUMENT_ORDER, epoch), kind="stable")
            # Windows of equal size, none larger than asked: a last window of three documents would fill no row.
            num_windows = max(1, -(-len(order) // self.shapes.window))
            windows = np.array_split(order, num_windows)
            rows = list(itertools.chain.from_iterable(self._window_rows(window, epoch) for window in windows))
            self._packed = {epoch: rows}
            self._num_rows[epoch] = len(rows)
        return self._packed[epoch]

    def _window_rows(self, window: np.ndarray, epoch: int) -> list[Row]:
        """Pack one window and shuffle its rows, because packing puts the longest documents first."""
        largest = self.shapes.buckets[0]
        # Of buckets of the greatest length, the one with the fewest slots is for most rows, the others for outliers.
        num_anchors = min(bucket.num_anchors for bucket in self.shapes.buckets if bucket.length == largest.length)
        lengths, anchor_counts = self._lengths[window], self._anchor_counts[window]
        packed = pack_rows(
            lengths, anchor_counts, length=largest.length, num_anchors=num_anchors, most_anchors=largest.num_anchors
        )
        if not packed:
            return []
        ids = self._ids[window].tolist()
        rows = [
            Row(
                self._smallest_bucket(int(lengths[members].sum()), int(anchor_counts[members].sum())),
                tuple(ids[member] for member in members),
            )
            for members in packed
        ]
        keys = _hash(np.array([row.document_ids[0] for row in rows]), self.seed, _ROW_ORDER, epoch)
        return [rows[place] for place in np.argsort(keys, kind="stable")]

    def _smallest_bucket(self, num_tokens: int, num_anchors: int) -> Bucket:
        for bucket in reversed(self.shapes.buckets):
            if num_tokens <= bucket.length and num_anchors <= bucket.num_anchors:
                return bucket
        raise AssertionError(f"a row of {num_tokens} tokens and {num_anchors} anchors was packed but fits no bucket")


def check_fit(largest: Bucket, ids: np.ndarray, lengths: np.ndarray, anchor_counts: np.ndarray) -> None:
    """Raises: DataError naming the first document with more tokens or anchors than the largest bucket has."""
    too_long = np.flatnonzero((lengths > largest.length) | (anchor_counts > largest.num_anchors))
    if len(too_long):
        at = int(too_long[0])
        raise DataError(
            "document",
            int(ids[at]),
            expected=f"at most {largest.length} tokens and {largest.num_anchors} anchors",
            got=f"{int(lengths[at])} tokens and {int(anchor_counts[at])} anchors",
            cause=f"the nearest bucket, {largest.name}, is the largest; {len(too_long)} documents do not fit",
            fix='raise shapes.row_length, or lower data.max_length with data.on_long = "truncate" or "drop"',
        )
