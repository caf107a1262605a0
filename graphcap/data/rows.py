"""Documents → rows: fills rows of several buckets close to full under two capacities, tokens and anchor slots.

Row by row: the longest document that is left opens a row in the bucket whose cost it will fill best; then the document
joins whose length fits and whose anchors keep what is left of the row like what is left of the documents. All windows
are packed in lock step, one document of each at a time, so a million documents take seconds in NumPy. Whole numbers
only: the same rows on every machine. Knows no ids, epochs or seeds (packing.py) and chooses no buckets (search.py,
which tries sets of them here). Called by packing.py and search.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Documents looked at for the next place in a row: the longest that fit. Twice as many gain a thousandth.
_CANDIDATES = 128
# Steps after which documents that have a row leave the stock: fewer than the candidates, so some of these are left.
_SWEEP = 64
# Anchors of a document that has a row: it fits nowhere any more.
_GONE = 1 << 30
_NEVER = 1 << 62
# Fixed point: fractional bits of anchors per token, and of a bucket's merit.
_RATIO_BITS, _MERIT_BITS = 12, 20
# What a row's own room counts beside its imbalance, 2^-4: at 1, rows are full of tokens and the mix runs out.
_ROOM_BITS = 4


@dataclass(frozen=True)
class Tables:
    """The buckets that each window may use. length, slots, cost: int64 [w, j]; a length of -1 stands for no bucket.

    token_cost, slot_cost: what one token and one anchor slot of a bucket cost, in the unit of `cost`.
    """

    length: np.ndarray
    slots: np.ndarray
    cost: np.ndarray
    token_cost: int
    slot_cost: int

    def scaled(self) -> Tables:
        """The same in a unit so large that products of three factors stay below 2^63."""
        unit = max(1, max(self.token_cost, self.slot_cost) >> 12)
        return Tables(self.length, self.slots, self.cost // unit, max(1, self.token_cost // unit), self.slot_cost // unit)


@dataclass(frozen=True)
class Packed:
    """Rows of documents. order: int64 [n], indices of documents, row after row; starts: int64 [r + 1], borders of rows in it.

    window, bucket: int64 [r]; bucket is the cheapest column of the tables that holds the row.
    """

    order: np.ndarray
    starts: np.ndarray
    window: np.ndarray
    bucket: np.ndarray


def pack(lengths: np.ndarray, anchor_counts: np.ndarray, sizes: np.ndarray, tables: Tables) -> Packed:
    """Put every document into a row of its window.

    lengths, anchor_counts: int64 [n], windows end to end; each document fits a bucket of its window. sizes: int64 [w],
    documents of each window. Every index is in one row; windows stay apart and in order.
    """
    if not len(lengths):
        nothing = np.zeros(0, np.int64)
        return Packed(nothing, np.zeros(1, np.int64), nothing, nothing)
    stock, scaled = _Stock(lengths, anchor_counts, sizes, tables.length.max(axis=1)), tables.scaled()
    num_steps = int(sizes.max())
    placed = np.full((num_steps, len(sizes)), -1, np.int32)
    opened = np.zeros((num_steps, len(sizes)), bool)
    tokens_room, anchors_room = np.full(len(sizes), -1), np.full(len(sizes), -1)  # a row that nothing fits: none is open
    for step in range(num_steps):
        if step and step % _SWEEP == 0:
            stock.sweep()
        windows = np.flatnonzero(sizes > step)
        at, found = stock.find(windows, tokens_room[windows], anchors_room[windows], scaled)
        opening = windows[~found]
        if len(opening):
            at[~found] = firsts = stock.longest(opening)
            opened[step, opening] = True
            tokens_room[opening], anchors_room[opening] = _open(stock, opening, firsts, scaled)
        placed[step, windows] = stock.documents[at]
        tokens_room[windows] -= stock.tokens[at]
        anchors_room[windows] -= stock.anchors[at]
        stock.take(windows, at)
    real = placed.T >= 0
    order, starts = placed.T[real].astype(np.int64), np.flatnonzero(opened.T[real])
    window = np.repeat(np.arange(len(sizes)), sizes)[starts]
    tokens, anchors = (np.add.reduceat(numbers[order], starts) for numbers in (lengths, anchor_counts))
    return Packed(order, np.append(starts, len(order)), window, cheapest(tokens, anchors, window, tables))


def cheapest(tokens: np.ndarray, anchors: np.ndarray, window: np.ndarray, tables: Tables) -> np.ndarray:
    """The column of the cheapest bucket that holds each row; of equals the first. All int64 [r]. Every row fits one."""
    lengths, slots = tables.length[window], tables.slots[window]
    holds = (lengths >= tokens[:, None]) & (slots >= anchors[:, None])
    assert holds.any(axis=1).all(), "a row fits no bucket"
    return np.where(holds, tables.cost[window], _NEVER).argmin(axis=1)


def _open(stock: _Stock, windows: np.ndarray, firsts: np.ndarray, tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and slots of the bucket in which each window opens a row with the document at `firsts`: int64 [w] each.

    The best bucket has most content for its cost, if it is filled with the mix of what is left. Long documents, more
    than half a row, cannot fill each other's rows, so each counts on its share of the short ones.
    """
    tokens, anchors = stock.tokens[firsts][:, None], stock.anchors[firsts][:, None]
    filling = stock.short_tokens[windows] - np.where(stock.is_long(windows, firsts), 0, stock.tokens[firsts])
    share = filling // np.maximum(1, stock.num_long[windows])
    ratio = np.maximum(1, stock.ratio(windows))[:, None]
    length, slots, cost = tables.length[windows], tables.slots[windows], tables.cost[windows]
    fill = np.minimum(np.minimum(length - tokens, ((slots - anchors) << _RATIO_BITS) // ratio), share[:, None])
    content = tables.token_cost * (tokens + fill) + tables.slot_cost * (anchors + ((fill * ratio) >> _RATIO_BITS))
    merit = (content << _MERIT_BITS) // np.maximum(1, cost)
    merit[(length < tokens) | (slots < anchors)] = -1
    best, each = merit.argmax(axis=1), np.arange(len(windows))
    assert (merit[each, best] >= 0).all(), "a document fits no bucket"
    return length[each, best], slots[each, best]


class _Stock:
    """The documents that have no row yet, the longest of a window first.

    Flat arrays over all windows. Each window ends in as many empty places as there are candidates, so that reading
    candidates from any place stays inside the window. `keys` rise: window first, then falling tokens.
    """

    def __init__(self, lengths: np.ndarray, anchor_counts: np.ndarray, sizes: np.ndarray, row_tokens: np.ndarray) -> None:
        num_windows, self._longest = len(sizes), int(lengths.max())
        window = np.repeat(np.arange(num_windows), sizes)
        self._last_key = np.arange(1, num_windows + 1) * (self._longest + 2) - 1  # of a window's empty places
        key = self._last_key[window] - 1 - lengths
        order = np.argsort(key, kind="stable")
        place = np.arange(len(lengths)) + window * _CANDIDATES
        size = len(lengths) + num_windows * _CANDIDATES
        self.keys = np.repeat(self._last_key, sizes + _CANDIDATES)
        self.tokens, self.anchors = np.zeros(size, np.int64), np.full(size, _GONE)
        self.documents = np.full(size, -1)
        for array, values in (
            (self.keys, key),
            (self.tokens, lengths),
            (self.anchors, anchor_counts),
            (self.documents, np.arange(len(lengths))),
        ):
            array[place] = values[order]
        self._half = row_tokens // 2
        is_long = lengths > self._half[window]
        self.num_long = np.bincount(window[is_long], minlength=num_windows)
        starts = np.cumsum(sizes) - sizes
        self.short_tokens = np.add.reduceat(np.where(is_long, 0, lengths), starts)
        self.tokens_left, self.anchors_left = (np.add.reduceat(numbers, starts) for numbers in (lengths, anchor_counts))
        self._views()

    def _views(self) -> None:
        self._first = np.searchsorted(self.keys, np.append(0, self._last_key[:-1] + 1))
        view = np.lib.stride_tricks.sliding_window_view
        self._tokens_from, self._anchors_from = view(self.tokens, _CANDIDATES), view(self.anchors, _CANDIDATES)

    def sweep(self) -> None:
        """Drop the documents that have a row."""
        left = (self.anchors < _GONE) | (self.documents < 0)
        self.keys, self.tokens, self.anchors = self.keys[left], self.tokens[left], self.anchors[left]
        self.documents = self.documents[left]
        self._views()

    def ratio(self, windows: np.ndarray) -> np.ndarray:
        """Anchors per token of what is left, in fixed point: int64 [w]."""
        return (self.anchors_left[windows] << _RATIO_BITS) // np.maximum(1, self.tokens_left[windows])

    def is_long(self, windows: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Whether the documents at these places are longer than half the longest row: bool [w]."""
        return self.tokens[at] > self._half[windows]

    def longest(self, windows: np.ndarray) -> np.ndarray:
        """Places of the longest documents left: int64 [w]. Each window has one."""
        first = self._first[windows]
        first = first + (self._anchors_from[first] < _GONE).argmax(axis=1)
        self._first[windows] = first
        return first

    def find(self, windows: np.ndarray, tokens_room: np.ndarray, anchors_room: np.ndarray, tables: Tables):
        """(places, found): the best document for each open row and whether there is one; int64 and bool [w].

        Of the longest documents that fit, the one that wastes least: what the row will lack of the one capacity if the
        other is filled with the mix of what is left, and a little for what stays empty.
        """
        start = np.searchsorted(self.keys, self._last_key[windows] - 1 - np.minimum(tokens_room, self._longest))
        tokens_left = tokens_room[:, None] - self._tokens_from[start]
        anchors_left = anchors_room[:, None] - self._anchors_from[start]
        token_cost, slot_cost = tables.token_cost, tables.slot_cost
        short_cost = token_cost * self.tokens_left[windows] // np.maximum(1, self.anchors_left[windows])
        spare = anchors_left - ((self.ratio(windows)[:, None] * tokens_left) >> _RATIO_BITS)
        waste = np.maximum(slot_cost * spare, -short_cost[:, None] * spare)
        waste += (token_cost * tokens_left + slot_cost * anchors_left) >> _ROOM_BITS
        waste[anchors_left < 0] = _NEVER
        best = waste.argmin(axis=1)
        return start + best, waste[np.arange(len(windows)), best] < _NEVER

    def take(self, windows: np.ndarray, at: np.ndarray) -> None:
        """The documents at these places have a row now. windows, at: int64 [w], one place a window."""
        tokens, is_long = self.tokens[at], self.is_long(windows, at)
        self.tokens_left[windows] -= tokens
        self.anchors_left[windows] -= self.anchors[at]
        self.num_long[windows] -= is_long
        self.short_tokens[windows] -= np.where(is_long, 0, tokens)
        self.anchors[at] = _GONE
