"""Files of conversations → documents: token ids and a loss mask, with everything dropped counted by reason.

Which files are read is folders.py's and sources.py's, what a row means forms.py's, the chat template templates.py's, what
becomes of a row tokenising.py's, in which order and by how many processes reading.py's. This file brings them together,
and takes the documents that an earlier run kept where they are the same. Knows nothing of rows and buckets. Called by
train, eval and shapes.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from graphcap.data import tokencache
from graphcap.data.documents import Columns, DocumentList
from graphcap.data.documents import Document as Document
from graphcap.data.encoder import Encoder
from graphcap.data.folders import open_path
from graphcap.data.forms import Conversation, conversation_of
from graphcap.data.reading import Means, Reading, read, rows_of
from graphcap.data.sources import BadLine, Source, place, short
from graphcap.data.templates import BadConversation, tokenize_prompt
from graphcap.data.tokenising import Rules, placed, tokenized
from graphcap.errors import DataError


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
        for entry, form in rows_of(open_path(path), []):
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
    marks = [_mark(source) for source in sources] if means.cache else []  # first: what is hashed must be what is read
    key = tokencache.key_of(sources, tokenizer, rules) if means.cache else None
    if key is None:
        columns = Columns(None, np.int32)
        reading = read(sources, tokenizer, rules, means, columns)
        _check_left(reading, sources, rules)
        return _result(reading, columns.documents(names), sources)
    with tokencache.alone(means.cache, key, means.say):
        if (found := tokencache.find(means.cache, key, names, means.say)) is not None:
            documents, index = found
            means.say(
                f"{len(documents):,} documents of {_age(time.time() - index['made'])} ago are used again, from "
                f"{means.cache / key.name}"
            )
            return _result(Reading.restored(index), documents, sources)
        return _made(sources, marks, tokenizer, rules, means, key)


def _made(sources: list[Source], marks: list, tokenizer, rules: Rules, means: Means, key: tokencache.Key) -> Documents:
    """Tokenise, and keep what comes of it under the key. marks: of the sources, from before the key was made.

    Raises: DataError; then nothing is kept.
    """
    names = [source.name for source in sources]
    making = tokencache.Making(means.cache, key)
    try:
        reading = read(sources, tokenizer, rules, means, making.columns)
        _check_left(reading, sources, rules)
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
    return _result(reading, documents, sources)


def _mark(source: Source) -> list[tuple[int, int]]:
    """Size and time of change of the files, as far as they are there."""
    return [(file.stat().st_size, file.stat().st_mtime_ns) for file in source.files if file.exists()]


def _result(reading: Reading, documents: DocumentList, sources: list[Source]) -> Documents:
    """The documents with what is known of their reading."""
    first = {reason: place(short(sources[number].name), line) for reason, (number, line) in reading.first_places.items()}
    origins = tuple(Origin(one.path, form, one.revision, one.kind) for one, form in zip(sources, reading.forms))
    num_read = reading.num_kept + sum(reading.dropped.values())
    return Documents(documents, dict(reading.dropped), num_read, first, reading.num_truncated, origins)


def _check_left(reading: Reading, sources: list[Source], rules: Rules) -> None:
    """Raises: DataError if no document is left."""
    if not reading.num_kept:
        raise DataError(
            "data",
            ", ".join(source.path for source in sources),
            expected="at least one document with something to learn from",
            got=f"0 supervised tokens within max_length = {rules.max_length}",
            cause=_result(reading, (), sources).summary(),
            fix="mend the conversations, or raise data.max_length if the answers stand behind it"
            if reading.dropped
            else "write conversations into them, one a line",
        )


def _listed(paths: Iterable[str | Path]) -> list[str | Path]:
    return [paths] if isinstance(paths, (str, Path)) else list(paths)


def _age(seconds: float) -> str:
    """A span of time in its largest unit, rounded down."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"
