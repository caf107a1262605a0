"""Lengths → shapes: the few fixed sizes that a run captures graphs for, and the JSON file that keeps them.

`plan` poses the problem and says what the answer is predicted to cost; search.py solves it, rows.py packs. Called by
layout.py and the tools that plan.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphcap.data import search
from graphcap.data.costs import ASSUMED, Costs
from graphcap.data.packing import PACKING_VERSION, check_fit
from graphcap.errors import ConfigError, DataError

# Tiles of the attention kernels: lengths and draft lengths are whole tiles.
TILE_TOKENS = 128
# Rows shorter than this waste launches, so short documents share rows at least this long where there are enough.
LEAST_ROW_TOKENS = 2048
_LEAST_ROWS = 64  # of an epoch, where rows are made longer than the documents need
_EMPTY_PERCENT = 3  # over the time of rows without padding, and other lengths of rows are tried
_MAX_FILE_BYTES = 64 * 1024
_MOST_ROW_PS = 1 << 56  # 20 hours: times of a row and their sums are int64
ROWS = ("packed", "single")
_KEYS = (
    "buckets",
    "block_size",
    "anchor_density",
    "window",
    "packing_version",
    "fingerprint",
    "histogram",
    "rows",
    "costs",
)


@dataclass(frozen=True, order=True)
class Bucket:
    """One fixed set of sizes = one captured graph. length: tokens S, a multiple of 128; num_anchors: anchor slots N."""

    length: int
    num_anchors: int = 0

    @property
    def name(self) -> str:
        """'length/num_anchors', as it stands in logs and errors."""
        return f"{self.length}/{self.num_anchors}"


@dataclass(frozen=True)
class Shapes:
    """The buckets of a run and the inputs they were planned for.

    buckets: largest first. anchor_density: anchors per supervised token. window: documents shuffled and packed
    together. fingerprint: sha256 over the documents' lengths, anchor counts and these settings. histogram: for people.
    rows: "packed", or "single" for one document a row. costs: what the buckets were chosen by, and rows are shared by.
    """

    buckets: tuple[Bucket, ...]
    block_size: int
    anchor_density: float
    window: int
    packing_version: int
    fingerprint: str
    histogram: dict
    rows: str = "packed"
    costs: Costs = ASSUMED

    def check(
        self,
        lengths: np.ndarray,
        anchor_counts: np.ndarray,
        *,
        block_size: int,
        anchor_density: float,
        window: int,
        rows: str = "packed",
        fix: str = 'plan again (shapes.plan = "auto"), or give the inputs that the file was made from',
    ) -> None:
        """Refuse inputs that this was not planned for. lengths, anchor_counts: int [n], in the order of planning.

        fix: what to do about it. Raises: DataError naming the packing version or the settings that differ, else the documents.
        """
        if self.packing_version != PACKING_VERSION:
            raise DataError(
                "shapes",
                "packing_version",
                expected=str(PACKING_VERSION),
                got=str(self.packing_version),
                cause="another version puts other documents into a row",
                fix=fix,
            )
        settings = (("block_size", block_size), ("anchor_density", anchor_density), ("window", window), ("rows", rows))
        for name, now in settings:
            if getattr(self, name) != now:
                raise DataError(
                    "shapes",
                    name,
                    expected=str(getattr(self, name)),
                    got=str(now),
                    cause="the shapes were planned for the former",
                    fix=fix,
                )
        now = fingerprint(lengths, anchor_counts, block_size=block_size, anchor_density=anchor_density, window=window)
        if now != self.fingerprint:
            raise DataError(
                "shapes",
                "fingerprint",
                expected=self.fingerprint[:16],
                got=now[:16],
                fix=fix,
                cause=f"planned for {self.histogram.get('documents')} documents of {self.histogram.get('tokens')} "
                f"tokens, given {len(lengths)} of {int(np.sum(lengths))}",
            )

    def to_json(self) -> str:
        """The shapes as JSON text, under 64 KiB, that `from_json` reads back to an equal Shapes."""
        fields = {name: getattr(self, name) for name in _KEYS}
        fields["buckets"] = [{"length": bucket.length, "num_anchors": bucket.num_anchors} for bucket in self.buckets]
        fields["costs"] = self.costs.to_json()
        text = json.dumps(fields, indent=1) + "\n"
        assert len(text.encode()) < _MAX_FILE_BYTES, f"a shapes file of {len(text.encode())} bytes"
        return text

    @classmethod
    def from_json(cls, text: str, *, source: str = "shapes") -> Shapes:
        """Read JSON text. source: named in errors. Raises: DataError naming what is missing, unknown or wrong."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise _refuse(source, "JSON", str(error)) from error
        version = fields.get("packing_version") if isinstance(fields, dict) else None
        if type(version) is int and version != PACKING_VERSION:
            raise _refuse(source, f"packing_version {PACKING_VERSION}", str(version))
        if not isinstance(fields, dict) or set(fields) != set(_KEYS):
            found = (", ".join(sorted(fields)) or "no keys") if isinstance(fields, dict) else type(fields).__name__
            raise _refuse(source, f"exactly the keys {', '.join(_KEYS)}", found)
        if not isinstance(fields["buckets"], list) or not fields["buckets"]:
            raise _refuse(source, "a list of buckets", repr(fields["buckets"]))
        buckets = tuple(_bucket_from(entry, source) for entry in fields["buckets"])
        for name, kind in (
            ("block_size", int),
            ("window", int),
            ("packing_version", int),
            ("anchor_density", float),
            ("fingerprint", str),
            ("histogram", dict),
        ):
            if kind is float and type(fields[name]) is int:
                fields[name] = float(fields[name])
            if type(fields[name]) is not kind or kind in (int, float) and not 0 < fields[name] < math.inf:
                raise _refuse(
                    source, f"{name}: {kind.__name__}" + (" above 0" if kind in (int, float) else ""), repr(fields[name])
                )
        if fields["rows"] not in ROWS:
            raise _refuse(source, f"rows: {' or '.join(ROWS)}", repr(fields["rows"]))
        if list(buckets) != sorted(set(buckets), reverse=True):
            raise _refuse(source, "buckets largest first, none twice", ", ".join(bucket.name for bucket in buckets))
        for bucket in buckets:
            if bucket.num_anchors * fields["block_size"] % TILE_TOKENS or bucket.num_anchors > buckets[0].num_anchors:
                raise _refuse(
                    source,
                    f"slots times block_size a multiple of {TILE_TOKENS}, and no more than the first bucket's",
                    f"bucket {bucket.name} with block_size {fields['block_size']}",
                )
        costs = _costs_from(fields["costs"], source)
        longest = costs.bucket(buckets[0].length, buckets[0].num_anchors, fields["block_size"])
        if longest + costs.pair_ps * buckets[0].length ** 2 > _MOST_ROW_PS:
            raise _refuse(source, f"costs by which no row takes more than {_MOST_ROW_PS} ps", repr(fields["costs"]))
        return cls(**{**fields, "buckets": buckets, "costs": costs})

    @classmethod
    def load(cls, path: str | Path) -> Shapes:
        """Read a file of `to_json`'s text. Raises: DataError naming the file."""
        try:
            with open(path, "rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
            text = data.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            got = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise _refuse(str(path), "a JSON file in UTF-8", got) from error
        if len(data) >= _MAX_FILE_BYTES:
            raise _refuse(str(path), "less than 64 KiB", "more")
        return cls.from_json(text, source=str(path))


def fingerprint(lengths: np.ndarray, anchor_counts: np.ndarray, *, block_size: int, anchor_density: float, window: int) -> str:
    """sha256 (hex) over lengths and anchor counts (int [n], in order) and the settings. The same on every machine."""
    digest = hashlib.sha256()
    digest.update(
        f"packing {PACKING_VERSION} block {block_size} density {float(anchor_density)!r} window {window} "
        f"documents {len(lengths)}\n".encode()
    )
    for numbers in (lengths, anchor_counts):
        digest.update(np.asarray(numbers).astype("<i8").tobytes())
    return digest.hexdigest()


def plan(
    lengths: np.ndarray,
    anchor_counts: np.ndarray,
    *,
    block_size: int,
    anchor_density: float,
    row_length: int,
    max_buckets: int,
    window: int,
    name_of: Callable[[int], str] = str,
    rows: str = "packed",
    costs: Costs = ASSUMED,
    epochs: int = 1,
) -> Shapes:
    """Choose the buckets for documents of these lengths (tokens) and anchor counts, both int [n].

    row_length: tokens of the largest bucket; 0: the longest document, or 2048 where there are that many tokens.
    max_buckets: at most so many; a further bucket must save more time in the epochs than it takes to capture.
    window: documents packed together. name_of: of the document at a place, for errors. rows: "packed", or "single".
    costs: predicted times. Raises: DataError naming a document that does not fit, or no documents; ConfigError for a
    row_length that is no multiple of 128.
    """
    lengths, anchor_counts = np.asarray(lengths, dtype=np.int64), np.asarray(anchor_counts, dtype=np.int64)
    assert lengths.shape == anchor_counts.shape and lengths.ndim == 1, (lengths.shape, anchor_counts.shape)
    assert block_size >= 2 and max_buckets >= 1 and window >= 1 and epochs >= 1, (block_size, max_buckets, window, epochs)
    assert rows in ROWS, rows
    if not len(lengths):
        raise DataError("plan", "shapes", expected="at least one document", got="none", fix="give conversations")
    if row_length % TILE_TOKENS:
        near = max(TILE_TOKENS, round(row_length / TILE_TOKENS) * TILE_TOKENS)
        raise ConfigError(
            "recipe key", "shapes.row_length", expected=f"a multiple of {TILE_TOKENS}", got=str(row_length), fix=f"write {near}"
        )
    length = row_length or _least_length(lengths, rows)
    problem = _problem(
        lengths,
        anchor_counts,
        length,
        block_size=block_size,
        costs=costs,
        window=window,
        max_buckets=max_buckets,
        epochs=epochs,
    )
    fix = f"set shapes.row_length={search.round_up(int(lengths.max()), TILE_TOKENS)} or more"
    fix += ', or lower data.max_length with data.on_long = "truncate" or "drop"'
    check_fit(problem.largest, lengths, anchor_counts, name_of=name_of, fix=fix)
    density = float(anchor_density)
    return Shapes(
        buckets=search.packed(problem) if rows == "packed" else search.single(problem),
        block_size=block_size,
        anchor_density=density,
        window=window,
        packing_version=PACKING_VERSION,
        histogram=_histogram(lengths, anchor_counts),
        fingerprint=fingerprint(lengths, anchor_counts, block_size=block_size, anchor_density=density, window=window),
        rows=rows,
        costs=costs,
    )


def _problem(lengths: np.ndarray, anchor_counts: np.ndarray, length: int, *, block_size: int, **how) -> search.Problem:
    unit = TILE_TOKENS // math.gcd(TILE_TOKENS, block_size)  # N in these units makes N · block_size whole tiles
    largest = Bucket(length, search.round_up(int(anchor_counts.max()), unit))
    sizes = {"largest": largest, "block_size": block_size, "tile": TILE_TOKENS, "unit": unit}
    return search.Problem(lengths, anchor_counts, **sizes, **how)


def _least_length(lengths: np.ndarray, rows: str) -> int:
    shared = min(LEAST_ROW_TOKENS, int(lengths.sum())) if rows == "packed" else 0
    return search.round_up(max(int(lengths.max()), shared), TILE_TOKENS)


def lengthened(lengths: np.ndarray, anchor_counts: np.ndarray, *, block_size: int, costs: Costs, most_length: int) -> int:
    """The row length that `plan` begins with, doubled while a micro step's constant is more than a hundredth of its time.

    lengths, anchor_counts: int [n]. most_length: tokens. Never so long that the documents fill fewer than 64 rows. No machine
    has a say in it: the same documents and settings are the same rows everywhere.
    """
    length, num_tokens, num_anchors = _least_length(lengths, "packed"), int(lengths.sum()), int(anchor_counts.sum())
    while 2 * length <= most_length and 2 * length * _LEAST_ROWS <= num_tokens:
        if 100 * costs.micro_step_ps <= costs.bucket(length, length * num_anchors // num_tokens, block_size):
            break
        length *= 2
    return length


def fitted(
    length: int,
    lengths: np.ndarray,
    anchor_counts: np.ndarray,
    *,
    block_size: int,
    costs: Costs,
    window: int,
    most_length: int,
) -> int:
    """That row length, or where documents leave such rows too empty, one between its half and its double that costs less.

    As where all are nearly as long as each other, and whole numbers of them fill few lengths. lengths, anchor_counts: int [n].
    most_length: as for `lengthened`, and never so long that there are fewer than 64 rows, unless it is shorter than `length`.
    """

    def one(tokens: int) -> tuple[int, int]:
        how = {"costs": costs, "window": window, "max_buckets": 1, "epochs": 1}
        return search.least_of_one(_problem(lengths, anchor_counts, tokens, block_size=block_size, **how))

    cost, bound = one(length)
    if 100 * cost <= (100 + _EMPTY_PERCENT) * bound:
        return length
    step = search.round_up(length // 16, TILE_TOKENS)
    shortest = max(length // 2, search.round_up(int(lengths.max()), TILE_TOKENS))
    longest = max(length, min(2 * length - step, most_length, int(lengths.sum()) // _LEAST_ROWS))
    costs_of = {tokens: one(tokens)[0] for tokens in range(search.round_up(shortest, TILE_TOKENS), longest + 1, step)}
    return min(costs_of, key=costs_of.get) if 100 * min(costs_of.values(), default=cost) < 99 * cost else length


def _histogram(lengths: np.ndarray, anchor_counts: np.ndarray) -> dict:
    """Totals, and documents by length in powers of two, for a person who reads the file."""
    counts = {}
    low, bound = 0, 64
    while low < lengths.max():
        counts[f"<= {bound}"] = int(np.count_nonzero((lengths > low) & (lengths <= bound)))
        low, bound = bound, bound * 2
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "anchors": int(anchor_counts.sum()),
        "longest": int(lengths.max()),
        "documents_by_length": counts,
    }


def _bucket_from(entry: object, source: str) -> Bucket:
    good = (
        isinstance(entry, dict)
        and set(entry) == {"length", "num_anchors"}
        and all(type(value) is int and value > 0 for value in entry.values())
    )
    if not good or entry["length"] % TILE_TOKENS:
        raise _refuse(source, f"a bucket with length (a multiple of {TILE_TOKENS}) and num_anchors", repr(entry))
    return Bucket(entry["length"], entry["num_anchors"])


def _costs_from(entry: object, source: str) -> Costs:
    names = list(ASSUMED.to_json())
    good = isinstance(entry, dict) and set(entry) == set(names)
    if not good or not all(type(value) is int and 0 <= value < 2**62 for value in entry.values()) or not entry["token_ps"]:
        raise _refuse(source, f"costs in whole picoseconds: {', '.join(names)}", repr(entry))
    return Costs(**entry)


def _refuse(source: str, expected: str, got: str) -> DataError:
    return DataError("shapes file", source, expected=expected, got=got, fix='plan again with shapes.plan = "auto"')
