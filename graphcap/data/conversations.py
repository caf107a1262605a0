"""Files of conversations → documents: token ids and a loss mask, with everything dropped counted by reason.

Which files are read is folders.py's and sources.py's, what a row means forms.py's, the chat template templates.py's, what
becomes of a row tokenising.py's. This file brings them together: in order, in as many processes as are worth it, from
the documents kept by an earlier run where they are the same. Knows nothing of rows and buckets. Called by train, eval
and shapes.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from graphcap.data import tokencache
from graphcap.data.documents import Columns, DocumentList
from graphcap.data.documents import Document as Document
from graphcap.data.encoder import Encoder
from graphcap.data.folders import open_path
from graphcap.data.forms import Conversation, conversation_of, form_of
from graphcap.data.sources import BadLine, Row, Source, place, short
from graphcap.data.templates import BadConversation, tokenize_prompt
from graphcap.data.tokenising import Rules, Tokenised, Tokeniser, placed, tokenized
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


@dataclass(frozen=True)
class Origin:
    """A path that was read. path: as given; form: of its rows, one of sources.FORMS, empty if it had no usable row.

    revision: the commit of a data set of the Hub, to be written down; empty for a file. kind: what a folder was found to be.
    """

    path: str
    form: str
    revision: str
    kind: str = ""


@dataclass(frozen=True)
class Documents:
    """What came of the files. num_read = len(documents) + all of `dropped`.

    dropped: conversations by reason. first_places: for each reason, the first file and line. num_truncated: how many of
    the documents lost their end. origins: one for each path, in their order.
    """

    documents: DocumentList
    dropped: dict[str, int]
    num_read: int
    first_places: dict[str, str] = field(default_factory=dict)
    num_truncated: int = 0
    origins: tuple[Origin, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.documents.lengths.sum())

    @property
    def num_supervised_tokens(self) -> int:
        """Supervised tokens of all documents."""
        return int(self.documents.supervised.sum())

    def summary(self) -> str:
        """One line: conversations read, kept, truncated, dropped by reason with the first place of each; each file's form."""
        line = f"{self.num_read:,} conversation{'' if self.num_read == 1 else 's'}: {len(self.documents):,} kept"
        if self.num_truncated:
            line += f" ({self.num_truncated:,} truncated)"
        num_dropped = sum(self.dropped.values())
        line += f", {num_dropped:,} dropped"
        if num_dropped:
            ordered = sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))
            line += (
                " ("
                + "; ".join(
                    f"{count:,} {reason}" + (f", first {self.first_places[reason]}" if reason in self.first_places else "")
                    for reason, count in ordered
                )
                + ")"
            )
        forms: dict[str, list[str]] = {}
        for origin in self.origins:
            name = short(origin.path) + (f" at {origin.revision}" if origin.revision else "")
            name += f" ({origin.kind})" if origin.kind else ""
            forms.setdefault(origin.form or "no row", []).append(name)
        for form, names in forms.items():
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            line += f"; {form} in {', '.join(names[:3])}{more}"
        return line


def read_conversations(paths: Iterable[str | Path], *, on_bad_line: str, dropped: Counter) -> Iterator[Conversation]:
    """Yield the conversations of files and data sets of the Hub, one row at a time.

    on_bad_line: "error" raises at the first row that cannot be used; "skip" counts it in `dropped` by reason instead.
    Raises: DataError naming file and line; also with "skip" for a file that is missing, damaged or of another kind.
    """
    assert on_bad_line in ("error", "skip"), on_bad_line
    for path in _listed(paths):
        for entry, form in _rows(open_path(path), []):
            try:
                if isinstance(entry, BadLine):
                    raise entry
                yield conversation_of(entry, form)
            except BadLine as error:
                if on_bad_line == "error":
                    raise
                dropped[error.reason] += 1


def prompt_of(conversation: Conversation, tokenizer) -> list[int]:
    """Token ids up to the first assistant turn, or to the first supervised token, as a target is served them.

    Empty where the assistant speaks first. Raises: DataError with its place, if the template refuses it or a token of a
    tokenised row is not in the vocabulary.
    """
    if conversation.messages is None:
        token_ids, loss_mask = tokenized(conversation, tokenizer, Encoder(tokenizer))
        return token_ids[: int(np.argmax(loss_mask)) if loss_mask.any() else None].tolist()
    roles = [message["role"] for message in conversation.messages]
    turn = roles.index("assistant") if "assistant" in roles else len(roles)
    try:
        return tokenize_prompt(tokenizer, conversation.messages[:turn], conversation.tools) if turn else []
    except BadConversation as error:
        raise placed(error, conversation) from error


def load_documents(
    paths: Iterable[str | Path], tokenizer, *, max_length: int, on_long: str, on_bad_line: str, means: Means | None = None
) -> Documents:
    """Read, tokenise and sift the conversations of files, prepared folders and data sets of the Hub.

    max_length: tokens. on_long: what happens to a longer document: "error", "truncate" (its end is cut off) or "drop".
    on_bad_line: "error" or "skip", for rows that cannot be used, chats that the template refuses or rewrites, and a
    document that is supervised from its first token on: a mask of all ones is never taken in silence.
    A document without an anchor candidate (two neighbouring supervised tokens) teaches nothing and is dropped; this is
    judged after truncation. Which turns are supervised: templates.py. means: None reads in this process and keeps nothing.
    Raises: DataError naming file and line, or naming max_length and the reasons if nothing is left.
    """
    assert max_length >= 1 and on_long in ("error", "truncate", "drop"), (max_length, on_long)
    assert on_bad_line in ("error", "skip"), on_bad_line
    paths = _listed(paths)
    rules = Rules(max_length, on_long, on_bad_line)
    means = means or Means(None, 1, lambda line: None)
    sources = [open_path(path) for path in paths]
    names = [source.name for source in sources]
    key = tokencache.key_of(sources, tokenizer, rules) if means.cache else None
    if key is None:
        columns = Columns(None, np.int32)
        reading = _read(sources, tokenizer, rules, means, columns)
        return reading.result(columns.documents(names), sources)
    with tokencache.alone(means.cache, key, means.say):
        if (found := tokencache.find(means.cache, key, names, means.say)) is not None:
            documents, index = found
            means.say(
                f"{len(documents):,} documents of {_age(time.time() - index['made'])} ago are used again, from "
                f"{means.cache / key.name}"
            )
            return Reading.restored(index).result(documents, sources)
        return _made(sources, tokenizer, rules, means, key)


def _made(sources: list[Source], tokenizer, rules: Rules, means: Means, key: tokencache.Key) -> Documents:
    """Tokenise, and keep what comes of it under the key. Raises: DataError; then nothing is kept."""
    names = [source.name for source in sources]
    marks = [_mark(source) for source in sources]
    making = tokencache.Making(means.cache, key)
    try:
        reading = _read(sources, tokenizer, rules, means, making.columns)
        for source, mark in zip(sources, marks):
            if _mark(source) != mark:
                raise DataError(
                    "data file",
                    source.path,
                    expected="a file that stays as it is while it is read",
                    got="another size or time of change than at the start",
                    fix="wait until it is written, and start again",
                )
        documents = making.finish(reading.index(), names)
    except OSError as error:
        making.discard()
        raise making.failed(error) from error
    except BaseException:
        making.discard()
        raise
    means.say(f"{len(documents):,} documents are kept for the next run, in {means.cache / key.name}")
    return reading.result(documents, sources)


def _mark(source: Source) -> list[tuple[int, int]]:
    """Size and time of change of the files, as far as they are there."""
    return [(file.stat().st_size, file.stat().st_mtime_ns) for file in source.files if file.exists()]


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

    def result(self, documents: DocumentList, sources: list[Source]) -> Documents:
        """The documents with what is known of their reading."""
        first = {reason: place(short(sources[number].name), line) for reason, (number, line) in self.first_places.items()}
        origins = tuple(Origin(one.path, form, one.revision, one.kind) for one, form in zip(sources, self.forms))
        num_read = self.num_kept + sum(self.dropped.values())
        return Documents(documents, dict(self.dropped), num_read, first, self.num_truncated, origins)


def _read(sources: list[Source], tokenizer, rules: Rules, means: Means, columns: Columns) -> Reading:
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
    if not reading.num_kept:
        raise DataError(
            "data",
            ", ".join(source.path for source in sources),
            expected="at least one document with something to learn from",
            got=f"0 supervised tokens within max_length = {rules.max_length}",
            cause=reading.result((), sources).summary(),
            fix="mend the conversations, or raise data.max_length if the answers stand behind it",
        )
    return reading


def _batches(sources: list[Source], forms: list[str]) -> Iterator[tuple[int, str, list[Row | DataError]]]:
    """Number of the source, its form, and its next rows. What ends the reading is the last entry, behind the rows before it."""
    for number, source in enumerate(sources):
        form, entries = "", []
        try:
            for entry, form in _rows(source, forms):
                entries.append(entry)
                if len(entries) == _BATCH_ROWS:
                    yield number, form, entries
                    entries = []
        except DataError as error:
            entries.append(error)
        if entries:
            yield number, form, entries


def _rows(source: Source, forms: list[str]) -> Iterator[tuple[Row | BadLine, str]]:
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


def _listed(paths: Iterable[str | Path]) -> list[str | Path]:
    return [paths] if isinstance(paths, (str, Path)) else list(paths)


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


def _age(seconds: float) -> str:
    """A span of time in its largest unit, rounded down."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"
