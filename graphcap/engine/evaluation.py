"""Held-out evaluation: the loss, `block_match` and the walked estimate, from forward-only runs on the training slots.

Every supervised position of every held-out document is an anchor once, so the walk that decoding would take through a
document can be followed on the host: first anchor at the reply's first token, next anchor leading matches + 1 further.

Calls: train.py.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from graphcap.data.conversations import Document
from graphcap.data.loader import arrange_with
from graphcap.data.packing import Row, anchor_candidates
from graphcap.engine.buckets import Engine
from graphcap.errors import DataError
from graphcap.model.blocks import leading_matches
from graphcap.model.decode import walk


@dataclass(frozen=True)
class Pass:
    """One forward: a row, its arrays, and which document and position each anchor slot belongs to."""

    row: Row
    arrays: dict[str, np.ndarray]
    anchors: list[tuple[int, int]]


class Evaluation:
    """Evaluates on fixed held-out documents. The passes are laid out once and are the same every time."""

    def __init__(self, documents: list[Document], buckets: tuple, *, rows: str) -> None:
        """documents: each at most as long as the largest bucket; `fitting` finds them. rows: as in Shapes."""
        self.documents = {document.id: document for document in documents}
        self.passes = [one for row in _rows(documents, buckets, rows) for one in _passes(row, self.documents)]

    @property
    def rows(self) -> list[Row]:
        """The rows that the passes go over, each once."""
        return list(dict.fromkeys(one.row for one in self.passes))

    def run(self, engine: Engine, *, asked_to_stop=lambda: False, complete=None) -> dict[str, float] | None:
        """loss, block_match, walked_estimate (tokens committed ÷ visits) and documents. Reads results on the host.

        complete(row, arrays) adds what a slot needs besides, stored features. None if `asked_to_stop()` was true
        before all passes were made.
        """
        total = None
        matches: dict[int, dict[int, int]] = {number: {} for number in self.documents}
        for one in self.passes:
            if asked_to_stop():
                return None
            arrays = complete(one.row, one.arrays) if complete is not None else one.arrays
            engine.fill(one.row.bucket, arrays)
            statistics, correct_NJ = engine.evaluate(one.row.bucket)
            total = statistics.double() if total is None else total + statistics.double()
            for (number, position), count in zip(one.anchors, leading_matches(correct_NJ).tolist()):
                matches[number][position] = count
        loss_sum, weight_sum, num_blocks, num_matches = total[:4].tolist()
        steps = [step for number, document in self.documents.items() for step in _walked(document, matches[number])]
        return {
            "loss": loss_sum / weight_sum,
            "block_match": 1 + num_matches / num_blocks,
            "walked_estimate": sum(steps) / len(steps),
            "documents": len(self.documents),
        }


def fitting(documents: list[Document], buckets: tuple, *, count: int) -> list[Document]:
    """The first `count` documents that fit the largest bucket. Raises: DataError if none does."""
    longest = max(bucket.length for bucket in buckets)
    found = list(itertools.islice((document for document in documents if len(document.token_ids) <= longest), count))
    if not found:
        raise DataError(
            "held-out documents",
            len(documents),
            expected=f"one of at most {longest} tokens",
            got="only longer ones",
            cause="the largest bucket is as long as the longest training document needs",
            fix="raise shapes.row_length, or give shorter held-out conversations",
        )
    return found


def _walked(document: Document, matches: dict[int, int]) -> list[int]:
    """Tokens committed at each visit, over every supervised span of a document."""
    supervised = np.flatnonzero(document.loss_mask)
    spans = np.split(supervised, np.flatnonzero(np.diff(supervised) > 1) + 1)
    return [step for span in spans for step in walk(matches, int(span[0]), int(span[-1]))]


def _rows(documents: list[Document], buckets: tuple, how: str) -> list[Row]:
    """Documents in their order, as many a row as the largest bucket holds, or with "single" one."""
    largest = max(buckets, key=lambda bucket: bucket.length)
    rows, current, used = [], [], 0
    for document in documents:
        if current and (how == "single" or used + len(document.token_ids) > largest.length):
            rows.append(Row(largest, tuple(current)))
            current, used = [], 0
        current.append(document.id)
        used += len(document.token_ids)
    rows.append(Row(largest, tuple(current)))
    return rows


def _passes(row: Row, documents: dict[int, Document]) -> list[Pass]:
    """The row once for every `num_anchors` of its candidate anchors."""
    every = [(number, int(p)) for number in row.document_ids for p in anchor_candidates(documents[number].loss_mask)]
    passes = []
    for first in range(0, len(every), row.bucket.num_anchors):
        chosen = every[first : first + row.bucket.num_anchors]
        positions = {number: np.array([p for n, p in chosen if n == number], np.int32) for number in row.document_ids}
        arranged = arrange_with(row, documents, lambda document, positions=positions: positions[document.id])
        passes.append(Pass(row, arranged.arrays(), chosen))
    return passes
