"""Lengths → shapes: the few fixed sizes that a run captures graphs for, and the JSON file that keeps them.

A plain plan: one length that documents are packed into, with slots for the mean number of anchors and, if that saves
work, a second bucket for rows with a document that has many more; then halves and quarters of it for what is left at
the end of a window. Packs nothing itself beyond trying how well a number of anchor slots fills (packing.py).
Called by train and shapes.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphcap.data.packing import PACKING_VERSION, check_fit, pack_rows
from graphcap.errors import ConfigError, DataError

# Tiles of the attention kernels: lengths and draft lengths are whole tiles.
TILE_TOKENS = 128
# Rows shorter than this waste launches, so short documents share rows at least this long where there are enough.
LEAST_ROW_TOKENS = 2048
# Anchor slots tried, relative to the mean number of anchors in a full row.
_SLOT_MARGINS = (1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.45, 1.6, 2.0)
_TRIAL_DOCUMENTS = 4096
_MAX_FILE_BYTES = 64 * 1024
_KEYS = ("buckets", "block_size", "anchor_density", "window", "packing_version", "fingerprint", "histogram")


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
    """

    buckets: tuple[Bucket, ...]
    block_size: int
    anchor_density: float
    window: int
    packing_version: int
    fingerprint: str
    histogram: dict

    def check(
        self, lengths: np.ndarray, anchor_counts: np.ndarray, *, block_size: int, anchor_density: float, window: int
    ) -> None:
        """Refuse inputs that this was not planned for. lengths, anchor_counts: int [n], in the order of planning.

        Raises: DataError naming the packing version or the settings that differ, else the documents.
        """
        fix = 'plan again (shapes.plan = "auto"), or give the inputs that the file was made from'
        if self.packing_version != PACKING_VERSION:
            raise DataError(
                "shapes",
                "packing_version",
                expected=str(PACKING_VERSION),
                got=str(self.packing_version),
                cause="another version puts other documents into a row",
                fix=fix,
            )
        for name, now in (("block_size", block_size), ("anchor_density", anchor_density), ("window", window)):
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
        """The shapes as JSON text that `from_json` reads back to an equal Shapes."""
        fields = {name: getattr(self, name) for name in _KEYS}
        fields["buckets"] = [{"length": bucket.length, "num_anchors": bucket.num_anchors} for bucket in self.buckets]
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "shapes") -> Shapes:
        """Read JSON text. source: named in errors. Raises: DataError naming what is missing, unknown or wrong."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise _refuse(source, "JSON", str(error)) from error
        if not isinstance(fields, dict) or set(fields) != set(_KEYS):
            found = ", ".join(sorted(fields)) if isinstance(fields, dict) else type(fields).__name__
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
        if list(buckets) != sorted(set(buckets), reverse=True):
            raise _refuse(source, "buckets largest first, none twice", ", ".join(bucket.name for bucket in buckets))
        for bucket in buckets:
            if bucket.num_anchors * fields["block_size"] % TILE_TOKENS or bucket.num_anchors > buckets[0].num_anchors:
                raise _refuse(
                    source,
                    f"slots times block_size a multiple of {TILE_TOKENS}, and no more than the first bucket's",
                    f"bucket {bucket.name} with block_size {fields['block_size']}",
                )
        return cls(**{**fields, "buckets": buckets})

    def save(self, path: str | Path) -> None:
        """Write the JSON file, under 64 KiB."""
        text = self.to_json()
        assert len(text.encode()) < _MAX_FILE_BYTES, f"a shapes file of {len(text.encode())} bytes"
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Shapes:
        """Read a file that `save` wrote. Raises: DataError naming the file."""
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
    ids: np.ndarray | None = None,
) -> Shapes:
    """Choose the buckets for documents of these lengths (tokens) and anchor counts, both int [n].

    row_length: tokens of the largest bucket; 0: the longest document, or 2048 where there are that many tokens.
    max_buckets: at most so many. window: documents packed together. ids: int [n], names for errors; left out: 0, 1, ….
    Raises: DataError naming a document that does not fit, or no documents; ConfigError for a row_length that is no
    multiple of 128.
    """
    lengths, anchor_counts = np.asarray(lengths, dtype=np.int64), np.asarray(anchor_counts, dtype=np.int64)
    assert lengths.shape == anchor_counts.shape and lengths.ndim == 1, (lengths.shape, anchor_counts.shape)
    assert block_size >= 2 and max_buckets >= 1 and window >= 1, (block_size, max_buckets, window)
    if not len(lengths):
        raise DataError("plan", "shapes", expected="at least one document", got="none", fix="give conversations")
    if row_length % TILE_TOKENS:
        near = max(TILE_TOKENS, round(row_length / TILE_TOKENS) * TILE_TOKENS)
        raise ConfigError(
            "recipe key", "shapes.row_length", expected=f"a multiple of {TILE_TOKENS}", got=str(row_length), fix=f"write {near}"
        )
    length = row_length or _round_up(max(int(lengths.max()), min(LEAST_ROW_TOKENS, int(lengths.sum()))), TILE_TOKENS)
    unit = TILE_TOKENS // math.gcd(TILE_TOKENS, block_size)  # N in these units makes N · block_size whole tiles
    largest = Bucket(length, _round_up(int(anchor_counts.max()), unit))
    check_fit(largest, np.arange(len(lengths)) if ids is None else np.asarray(ids), lengths, anchor_counts)

    slots = _choose_slots(lengths, anchor_counts, largest, block_size=block_size, window=window, max_buckets=max_buckets)
    buckets, part = [Bucket(length, num_anchors) for num_anchors in slots], 2
    while len(buckets) < max_buckets and buckets[-1].length > TILE_TOKENS:
        smaller = Bucket(_round_up(-(-length // part), TILE_TOKENS), _round_up(-(-slots[-1] // part), unit))
        if smaller.length == buckets[-1].length:
            break
        buckets.append(smaller)
        part *= 2
    density = float(anchor_density)
    return Shapes(
        buckets=tuple(buckets),
        block_size=block_size,
        anchor_density=density,
        window=window,
        packing_version=PACKING_VERSION,
        histogram=_histogram(lengths, anchor_counts),
        fingerprint=fingerprint(lengths, anchor_counts, block_size=block_size, anchor_density=density, window=window),
    )


def _choose_slots(
    lengths: np.ndarray, anchor_counts: np.ndarray, least: Bucket, *, block_size: int, window: int, max_buckets: int
) -> list[int]:
    """Anchor slots of the bucket, or the two buckets, of the greatest length: more slots first.

    least: that length, and the slots of the document with the most anchors. Few slots make rows end before their
    tokens are full, many stay empty; which is worse depends on how much documents differ. So a few numbers around the
    mean are tried on a sample, and the least work wins, counted in positions: row tokens + draft tokens, padded.
    A second bucket must save a twentieth, for it costs a compilation.
    """
    unit = TILE_TOKENS // math.gcd(TILE_TOKENS, block_size)
    places = np.unique(np.linspace(0, len(lengths) - 1, min(len(lengths), window, _TRIAL_DOCUMENTS)).astype(np.int64))
    lengths_tried, anchors_tried = lengths[places], anchor_counts[places]
    length, needed = least.length, least.num_anchors
    mean = int(anchor_counts.sum()) * length / int(lengths.sum())
    costs = {}
    for margin in _SLOT_MARGINS:
        slots = _round_up(math.ceil(mean * margin), unit)
        most = max(slots, needed)
        rows = pack_rows(lengths_tried, anchors_tried, length=length, num_anchors=slots, most_anchors=most)
        num_high = sum(int(anchors_tried[row].sum()) > slots for row in rows)
        costs[most, slots] = len(rows) * (length + slots * block_size) + num_high * (most - slots) * block_size
        if most > slots and (most, most) not in costs:
            rows = pack_rows(lengths_tried, anchors_tried, length=length, num_anchors=most, most_anchors=most)
            costs[most, most] = len(rows) * (length + most * block_size)
    best_one = min((cost, slots) for (most, slots), cost in costs.items() if most == slots)
    best = min((cost, most, slots) for (most, slots), cost in costs.items())
    if max_buckets >= 2 and best[0] < 0.95 * best_one[0]:
        return [best[1], best[2]]
    return [best_one[1]]


def _round_up(number: int, unit: int) -> int:
    return max(unit, -(-number // unit) * unit)


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


def _refuse(source: str, expected: str, got: str) -> DataError:
    return DataError("shapes file", source, expected=expected, got=got, fix='plan again with shapes.plan = "auto"')
