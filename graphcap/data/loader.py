"""A row of the schedule → the arrays the engine fills a slot with, unpadded.

Lays documents end to end and moves their anchors to row positions. Pads nothing (the engine owns padding) and touches
no device. Called by train and eval.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from graphcap.data.conversations import Document
from graphcap.data.packing import Row, choose_anchors
from graphcap.data.planner import Bucket
from graphcap.errors import ShapeError


@dataclass(frozen=True)
class RowArrays:
    """One row of t tokens and n anchors, each at most what the bucket has.

    token_ids int32 [t]; document int32 [t]: 0, 1, … within the row; position int32 [t]: restarts at each document;
    supervised int32 [t]: 0 or 1; anchors int32 [n]: places in the row, rising; document_ids: ids of Document in order.
    """

    bucket: Bucket
    token_ids: np.ndarray
    document: np.ndarray
    position: np.ndarray
    supervised: np.ndarray
    anchors: np.ndarray
    document_ids: tuple[int, ...]

    def arrays(self) -> dict[str, np.ndarray]:
        """What a slot is filled with, by buffer name. Without `document`: a position of 0 says where one begins."""
        names = ("token_ids", "position", "supervised", "anchors")
        return {name: getattr(self, name) for name in names}


def arrange(row: Row, documents_by_id: Mapping[int, Document], *, seed: int, epoch: int, density: float) -> RowArrays:
    """The row with this epoch's anchors. density: anchors per supervised token. Raises: ShapeError, as arrange_with."""
    return arrange_with(row, documents_by_id, lambda one: choose_anchors(one, seed=seed, epoch=epoch, density=density))


def arrange_with(row: Row, documents_by_id: Mapping[int, Document], anchors_of: Callable[[Document], np.ndarray]) -> RowArrays:
    """The row with the anchors that `anchors_of` gives: positions in the document, rising, possibly none.

    Raises: ShapeError naming the bucket if tokens or anchors exceed it.
    """
    documents = [documents_by_id[document_id] for document_id in row.document_ids]
    lengths = [len(document.token_ids) for document in documents]
    starts = np.cumsum([0, *lengths])
    anchors = []
    for document, length, start in zip(documents, lengths, starts):
        positions = np.asarray(anchors_of(document), dtype=np.int64)
        assert not len(positions) or 0 <= positions[0] and positions[-1] < length and np.all(np.diff(positions) > 0), (
            f"anchors of document {document.id} ({length} tokens) are not rising positions in it: {positions}"
        )
        anchors.append(positions + start)
    arrays = RowArrays(
        bucket=row.bucket,
        token_ids=_joined([document.token_ids for document in documents]),
        document=np.repeat(np.arange(len(documents), dtype=np.int32), lengths),
        position=_joined([np.arange(length) for length in lengths]),
        supervised=_joined([document.loss_mask for document in documents]),
        anchors=_joined(anchors),
        document_ids=row.document_ids,
    )
    for what, count, room in (
        ("tokens", len(arrays.token_ids), row.bucket.length),
        ("anchors", len(arrays.anchors), row.bucket.num_anchors),
    ):
        if count > room:
            raise ShapeError(
                "bucket",
                row.bucket.name,
                expected=f"at most {room} {what} in a row",
                got=f"{count} {what}",
                cause=f"the row has documents {', '.join(map(str, row.document_ids[:8]))}",
                fix="pack the row under the bucket's sizes, or hand over its anchors in chunks",
            )
    return arrays


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, dtype=np.int32)
