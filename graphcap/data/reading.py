"""Rows of all sources → columns of documents, in order, and what was dropped: the reading itself.

Small texts are read in this process; large ones go in batches to others, and come back in their order. Called by
conversations.py.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from graphcap.data.documents import Columns
from graphcap.data.forms import form_of
from graphcap.data.sources import BadLine, Row, Source
from graphcap.data.tokenising import Rules, Tokenised, Tokeniser
from graphcap.data.workers import Workers
from graphcap.errors import DataError

_BATCH_ROWS = 64  # tokenised by one process at a time
_ALONE_TOKENS = 2_000_000  # that this process makes, in seconds, before it starts others
_AHEAD = 3  # batches on their way for each of them
_SAY_EVERY_S = 30.0


@dataclass(frozen=True)
class Means:
    """With what texts are read. cache: folder of kept documents, or None. num_workers: processes for large texts.

    say: called with a line for people, every half minute while it takes long. Results do not depend on any of these.
    """

    cache: Path | None
    num_workers: int
    say: Callable[[str], None]


@dataclass
class Reading:
    """What has been read so far, but for the documents themselves. first_places: reason → number of the source, and line."""

    num_usable: int = 0
    num_kept: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    dropped: Counter = field(default_factory=Counter)
    first_places: dict[str, list[int]] = field(default_factory=dict)
    forms: list[str] = field(default_factory=list)

    def take(self, number: int, batch: Tokenised, columns: Columns) -> None:
        """Add the next batch, which is of source `number`. Raises: the batch's error, behind what stood before it."""
        batch.documents.numbers["id"] += self.num_usable
        batch.documents.numbers["source"] = number
        columns.append(batch.documents)
        self.num_usable += batch.num_usable
        self.num_kept += len(batch.documents.numbers)
        self.num_tokens += len(batch.documents.token_ids)
        self.num_truncated += batch.num_truncated
        for reason, line in batch.dropped:
            self.dropped[reason] += 1
            self.first_places.setdefault(reason, [number, line])
        if batch.error is not None:
            raise batch.error

    def index(self) -> dict:
        """As JSON."""
        names = ("num_usable", "num_kept", "num_tokens", "num_truncated", "first_places", "forms")
        return {name: getattr(self, name) for name in names} | {"dropped": dict(self.dropped)}

    @classmethod
    def restored(cls, index: dict) -> "Reading":
        """From what `index` gave."""
        names = ("num_usable", "num_kept", "num_tokens", "num_truncated", "first_places", "forms")
        return cls(**{name: index[name] for name in names}, dropped=Counter(index["dropped"]))


def read(sources: list[Source], tokenizer, rules: Rules, means: Means, columns: Columns) -> Reading:
    """Tokenise every row into the columns, in order; in other processes once it proves to be much."""
    reading, told = Reading(), _Told(sources, means.say)
    tokeniser, workers = Tokeniser(tokenizer, rules), None
    ahead: deque[tuple[int, Future[Tokenised]]] = deque()
    with contextlib.ExitStack() as ending:
        for number, form, entries in _batches(sources, reading.forms):
            if workers is None and reading.num_tokens >= _ALONE_TOKENS and means.num_workers > 1:
                workers = Workers(tokenizer, rules, count=means.num_workers)
                ending.callback(workers.close)
            if workers is None:
                reading.take(number, tokeniser.tokenise(entries, form), columns)
            else:
                ahead.append((number, workers.submit(entries, form)))
                if len(ahead) > _AHEAD * workers.count:
                    number, batch = ahead.popleft()
                    reading.take(number, batch.result(), columns)
            told.now(reading)
        for number, batch in ahead:
            reading.take(number, batch.result(), columns)
    return reading


def _batches(sources: list[Source], forms: list[str]) -> Iterator[tuple[int, str, list[Row | DataError]]]:
    """Number of the source, its form, and its next rows. What ends the reading is the last entry, behind the rows before it."""
    for number, source in enumerate(sources):
        form, entries = "", []
        try:
            for entry, form in rows_of(source, forms):
                entries.append(entry)
                if len(entries) == _BATCH_ROWS:
                    yield number, form, entries
                    entries = []
        except DataError as error:
            entries.append(error)
        if entries:
            yield number, form, entries


def rows_of(source: Source, forms: list[str]) -> Iterator[tuple[Row | BadLine, str]]:
    """Every row, or the error that says why it is none, with the form of its file so far. Appends the form to `forms`."""
    form = ""
    for row in source.rows:
        if isinstance(row, Row):
            try:
                form = form or form_of(row)
            except BadLine as error:
                row = error
        yield row, form
    forms.append(form)


class _Told:
    """Says every half minute how far the reading has come."""

    def __init__(self, sources: list[Source], say: Callable[[str], None]) -> None:
        self._sources, self._say = sources, say
        sizes = [source.size_bytes() for source in sources if source.name.endswith(".jsonl")]
        self._total_bytes = sum(sizes) if len(sizes) == len(sources) and None not in sizes else 0  # of others it is a guess
        self._begin = self._last = time.monotonic()

    def now(self, reading: Reading) -> None:
        """Say it, if it is time."""
        now = time.monotonic()
        if now - self._last < _SAY_EVERY_S:
            return
        self._last = now
        done_bytes = sum(source.meter.num_bytes for source in self._sources)
        share = f" ({done_bytes / self._total_bytes:.0%} of {self._total_bytes / 1e9:.2f})" if self._total_bytes else ""
        rate = done_bytes / 1e6 / (now - self._begin)
        self._say(f"tokenising: {done_bytes / 1e9:.2f} GB{share}, {rate:.1f} MB/s, {reading.num_kept:,} documents")
