"""Whether the memory holds the buckets of a plan, and which keys make it hold them: each was planned with before it is named.

Called by build.py and shapes.py, before a target is loaded.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from graphcap.config import Recipe
from graphcap.data.documents import DocumentList
from graphcap.data.planner import TILE_TOKENS, Bucket, Shapes
from graphcap.data.search import round_up
from graphcap.engine.memory import Sizes, gib
from graphcap.errors import ConfigError
from graphcap.layout import Frame, planned_for

_PARTS = (1, 2, 4)  # of the longest row that the sizes alone let expect, tried for documents that are cut


@dataclass(frozen=True)
class Room:
    """Memory for the rows of some documents. num_bytes: from layout.room_bytes; None: nobody counts."""

    recipe: Recipe
    documents: DocumentList
    frame: Frame
    sizes: Sizes
    num_bytes: int | None

    def check(self, shapes: Shapes, *, fixed: bool) -> None:
        """Raises: ConfigError if the buckets need more, naming the one that needs most and what would fit.

        fixed: the run goes on, with the rows that it has.
        """
        needed = self.sizes.needed_bytes(*shapes.buckets)
        if self.num_bytes is None or needed <= self.num_bytes:
            return
        held = self.sizes.held_bytes()
        tried = [] if fixed or held > self.num_bytes else self._shorter(shapes)
        shortest, least = tried[-1] if tried else (shapes.buckets, needed)
        fitting = next((buckets[0].length for buckets, need in tried if need <= self.num_bytes), None)
        digits = digits_apart(self.num_bytes, needed, held if held > self.num_bytes else least)
        if held > self.num_bytes:
            cause = f"target, drafter and optimizer alone take {gib(held, digits)}"
            fixes = ["a smaller target", *self._kept_rows(shapes, shapes.buckets)]
        elif fixed:
            cause, fixes = "a run that goes on keeps its rows", self._kept_rows(shapes, None)
        else:
            cause = (
                f"the longest document has {int(self.documents.lengths.max())} tokens, and the shortest row that it fits, "
                f"{shortest[0].name}, needs {gib(least, digits)}{'' if fitting else ', which is too much'}"
            )
            fixes = [f"{self._again}shapes.row_length={fitting}"] if fitting else self._cut(shapes)
            fixes += self._kept_rows(shapes, None if fitting else shortest)
        raise ConfigError(
            "bucket",
            max(shapes.buckets, key=self.sizes.bucket_bytes).name,
            expected=f"at most {gib(max(0, self.num_bytes), digits)} ({limit_name(self.recipe)})",
            got=gib(needed, digits),
            cause=cause,
            fix=f"use {', or '.join(fixes)}",
        )

    @property
    def _again(self) -> str:
        return "" if self.recipe.shapes.plan == "auto" else "shapes.plan=auto "

    def _shorter(self, shapes: Shapes) -> list[tuple[tuple[Bucket, ...], int]]:
        """Plans of shorter rows, and the bytes they need: one that may fit, and last the shortest that the documents allow."""
        lengths, anchors = self.documents.lengths, self.documents.num_anchors(self.recipe.shapes.anchor_density)
        shortest, now = round_up(int(lengths.max()), TILE_TOKENS), shapes.buckets[0].length
        tried = []
        for length in dict.fromkeys((min(max(self._hoped(shapes), shortest), now), shortest)):
            if length < now:
                buckets = planned_for(self.recipe, self.frame, lengths, anchors, row_length=length).buckets
                tried.append((buckets, self.sizes.needed_bytes(*buckets)))
        return tried

    def _cut(self, shapes: Shapes) -> list[str]:
        """Keys that cut the documents to a length so that rows as long fit; none where none was found."""
        density = self.recipe.shapes.anchor_density
        lengths, anchors = self.documents.lengths, self.documents.num_anchors(density)
        for length in dict.fromkeys(self._hoped(shapes) // part // TILE_TOKENS * TILE_TOKENS for part in _PARTS):
            if length:
                most = np.minimum(anchors, math.ceil(density * length))
                planned = planned_for(self.recipe, self.frame, np.minimum(lengths, length), most, row_length=length)
                if self.sizes.needed_bytes(*planned.buckets) <= self.num_bytes:
                    return [f"{self._again}data.max_length={length} data.on_long=truncate shapes.row_length={length}"]
        return []

    def _hoped(self, shapes: Shapes) -> int:
        """Tokens of the longest row that fits if a plan of shorter rows has as many anchors a token; 0: none."""
        fitting = self.sizes.largest_that_fits(max(shapes.buckets, key=self.sizes.bucket_bytes), self.num_bytes)
        return 0 if fitting is None else fitting.length

    def _kept_rows(self, shapes: Shapes, shortest: tuple[Bucket, ...] | None) -> list[str]:
        """What lets the planned rows stay. shortest: rows to fall back to where they cannot, and all else to try; or None."""
        rows, buckets, found = "", shapes.buckets, []
        if shortest is not None and shortest != buckets:
            rows, buckets = f"{self._again}shapes.row_length={shortest[0].length} ", shortest
        for bare, first in ((shapes.buckets, ""), (buckets, rows)):
            if replace(self.sizes, checkpointing=True).needed_bytes(*bare) <= self.num_bytes:
                found.append(f"{first}drafter.checkpointing=true")
                break
        if shortest is not None and _as_stored(self.sizes).needed_bytes(*buckets) <= self.num_bytes:
            found.append(f"{rows}and stored features (features.path)" if rows else "stored features (features.path)")
        if self.recipe.shapes.memory_gib:
            return [*found, f"{rows}shapes.memory_gib={math.ceil(100 * self.sizes.needed_bytes(*buckets) / 2**30) / 100:.2f}"]
        return [*found, "a GPU with more memory"]


def limit_name(recipe: Recipe) -> str:
    """What sets the limit of memory."""
    return "shapes.memory_gib" if recipe.shapes.memory_gib else "free on the GPU"


def _as_stored(sizes: Sizes) -> Sizes:
    """The same run from stored features, at most: embedding and head as two tables."""
    ends = 2 * sizes.drafter.vocab_size * sizes.drafter.hidden_size * sizes.itemsize
    return replace(sizes, stored=True, target_intermediate=0, target_bytes=min(sizes.target_bytes, ends))


def digits_apart(limit: int, *others: int) -> int:
    """So many digits behind the point, two or more, that each size that is not the limit reads as another one."""
    return next(
        digits for digits in range(2, 12) if all(gib(size, digits) != gib(limit, digits) for size in {*others} - {limit})
    )
