"""JSONL files of conversations → documents: token ids and a loss mask, with everything dropped counted by reason.

A line is an object with `messages`, a list of {"role": user | assistant | system | tool, "content": text, …}; empty
lines are ignored. Knows nothing of rows and buckets, and leaves the chat template to templates.py.
Called by train, eval and shapes.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from graphcap.data.packing import anchor_candidates
from graphcap.data.templates import BadConversation, tokenize_conversation
from graphcap.errors import DataError

ROLES = ("user", "assistant", "system", "tool")

NO_SUPERVISED_TOKEN = "no supervised token"
NO_ANCHOR = "no two neighbouring supervised tokens"
TOO_LONG = "longer than max_length"


@dataclass(frozen=True)
class Conversation:
    """One usable line of a file. source: the path as given; line: 1-based; messages: the parsed list, not empty."""

    source: str
    line: int
    messages: list[dict]


@dataclass(frozen=True)
class Document:
    """One tokenised conversation. id: 0-based place among the usable conversations read, kept or not.

    token_ids: int32 [n]. loss_mask: bool [n], true where the assistant wrote the token. source, line: where it stood.
    """

    id: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    source: str
    line: int


@dataclass(frozen=True)
class Documents:
    """What came of the files. num_read = len(documents) + all of `dropped`.

    dropped: conversations by reason. first_places: for each reason, the first file and line. num_truncated: how many of
    the documents lost their end.
    """

    documents: list[Document]
    dropped: dict[str, int]
    num_read: int
    first_places: dict[str, str] = field(default_factory=dict)
    num_truncated: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(len(document.token_ids) for document in self.documents)

    @property
    def num_supervised_tokens(self) -> int:
        """Supervised tokens of all documents."""
        return sum(int(np.count_nonzero(document.loss_mask)) for document in self.documents)

    def summary(self) -> str:
        """One line: conversations read, kept, truncated, and dropped by reason with the first place of each."""
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
        return line


def read_conversations(paths: Iterable[str | Path], *, on_bad_line: str, dropped: Counter) -> Iterator[Conversation]:
    """Yield the conversations of JSONL files in UTF-8, one line at a time.

    on_bad_line: "error" raises at the first line that cannot be used; "skip" counts it in `dropped` by reason instead.
    Raises: DataError naming file and line; for a missing file or a folder also with "skip".
    """
    assert on_bad_line in ("error", "skip"), on_bad_line
    for entry in _entries(paths):
        if isinstance(entry, Conversation):
            yield entry
        elif on_bad_line == "error":
            raise entry
        else:
            dropped[entry.reason] += 1


def load_documents(paths: Iterable[str | Path], tokenizer, *, max_length: int, on_long: str, on_bad_line: str) -> Documents:
    """Read, tokenise and sift the conversations of JSONL files.

    max_length: tokens. on_long: what happens to a longer document: "error", "truncate" (its end is cut off) or "drop".
    on_bad_line: "error" or "skip", for lines that cannot be used and chats that the template refuses or rewrites.
    A document without an anchor candidate (two neighbouring supervised tokens) teaches nothing and is dropped; this is
    judged after truncation. Which turns are supervised: templates.py.
    Raises: DataError naming file and line, or naming max_length and the reasons if nothing is left.
    """
    assert max_length >= 1 and on_long in ("error", "truncate", "drop"), (max_length, on_long)
    assert on_bad_line in ("error", "skip"), on_bad_line
    paths = _listed(paths)
    documents: list[Document] = []
    dropped: Counter = Counter()
    first_places: dict[str, str] = {}
    num_usable = num_truncated = 0

    def drop(reason: str, source: str, line: int) -> None:
        dropped[reason] += 1
        first_places.setdefault(reason, f"{Path(source).name} line {line}")

    for entry in _entries(paths):
        if isinstance(entry, Conversation):
            document_id, num_usable = num_usable, num_usable + 1
            entry = _tokenized(entry, tokenizer, document_id)
        if isinstance(entry, _BadLine):
            if on_bad_line == "error":
                raise entry
            drop(entry.reason, entry.source, entry.line)
            continue
        document, reason, truncated = _sift(entry, max_length=max_length, on_long=on_long)
        if reason:
            drop(reason, entry.source, entry.line)
        else:
            documents.append(document)
            num_truncated += truncated
    result = Documents(documents, dict(dropped), len(documents) + sum(dropped.values()), first_places, num_truncated)
    if not documents:
        raise DataError(
            "data",
            ", ".join(map(str, paths)),
            expected="at least one document with something to learn from",
            got=f"0 supervised tokens within max_length = {max_length}",
            cause=result.summary(),
            fix="mend the conversations, or raise data.max_length if the answers stand behind it",
        )
    return result


def _sift(document: Document, *, max_length: int, on_long: str) -> tuple[Document, str, bool]:
    """The document, cut if asked; why it is dropped, or ""; whether it was cut."""
    num_tokens = len(document.token_ids)
    truncated = num_tokens > max_length
    if truncated:
        if on_long == "error":
            raise DataError(
                "conversation",
                f"{document.source} line {document.line}",
                got=f"{num_tokens} tokens",
                expected=f"at most max_length = {max_length} tokens",
                fix="raise data.max_length, or set data.on_long to truncate or drop",
            )
        if on_long == "drop":
            return document, TOO_LONG, False
        # Copies, so that the long arrays can go.
        token_ids, loss_mask = document.token_ids[:max_length].copy(), document.loss_mask[:max_length].copy()
        document = Document(document.id, token_ids, loss_mask, document.source, document.line)
    reason = ""
    if not document.loss_mask.any():
        reason = NO_SUPERVISED_TOKEN
    elif not len(anchor_candidates(document.loss_mask)):
        reason = NO_ANCHOR
    return document, reason + " after truncation" if reason and truncated else reason, truncated


class _BadLine(BadConversation):
    """A bad conversation with its place."""

    def __init__(self, reason: str, source: str, line: int, *, expected: str, got: str, fix: str, cause: str = "") -> None:
        place = f"{source} line {line}"
        super().__init__(reason, "conversation", place, expected=expected, got=got, fix=fix, cause=cause)
        self.source, self.line = source, line


def _tokenized(conversation: Conversation, tokenizer, document_id: int) -> "Document | _BadLine":
    try:
        token_ids, loss_mask = tokenize_conversation(tokenizer, conversation.messages)
    except BadConversation as error:
        cause = f"{error.thing}, {error.name}" + (f": {error.cause}" if error.cause else "")
        return _BadLine(
            error.reason,
            conversation.source,
            conversation.line,
            expected=error.expected,
            got=error.got,
            fix=error.fix,
            cause=cause,
        )
    return Document(document_id, token_ids, loss_mask, conversation.source, conversation.line)


def _listed(paths: Iterable[str | Path]) -> list[str | Path]:
    return [paths] if isinstance(paths, (str, Path)) else list(paths)


def _entries(paths: Iterable[str | Path]) -> "Iterator[Conversation | _BadLine]":
    """Every line of every file that is not empty: a conversation, or the error that says why it is none."""
    for path in _listed(paths):
        try:
            file = open(path, "rb")
        except OSError as error:
            raise DataError(
                "data file",
                path,
                expected="a JSONL file of conversations",
                got=(error.strerror or str(error)).lower(),
                cause="a relative path begins in the folder that graphcap runs in",
                fix="give the path of a file",
            ) from error
        with file:
            for line, raw in enumerate(file, start=1):
                # A byte order mark at the start is legal UTF-8 and common in files from Windows.
                raw = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
                if not raw.strip():
                    continue
                try:
                    yield Conversation(str(path), line, _messages(raw, str(path), line))
                except _BadLine as error:
                    yield error


def _messages(raw: bytes, source: str, line: int) -> list[dict]:
    """Parse and check one line. Raises: _BadLine."""
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        got = f"byte 0x{raw[error.start]:02x} at place {error.start + 1}"
        raise _BadLine("invalid UTF-8", source, line, expected="UTF-8", got=got, fix="save it in UTF-8") from error
    except (ValueError, RecursionError) as error:
        got = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise _BadLine(
            "broken JSON",
            source,
            line,
            expected="one JSON object",
            got=got,
            fix="mend or remove the line; each line is one whole conversation",
        ) from error
    expected = "an object with the key 'messages'"
    fix = 'write each line as {"messages": [{"role": …, "content": …}, …]}'
    if not isinstance(row, dict):
        raise _BadLine("not a JSON object", source, line, expected=expected, got=type(row).__name__, fix=fix)
    if "messages" not in row:
        keys = ", ".join(map(str, list(row)[:12])) or "none"
        raise _BadLine("no messages", source, line, expected=expected, got=f"the keys {keys}", fix=fix)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        got = "an empty list" if messages == [] else type(messages).__name__
        expected = "at least one message in the list 'messages'"
        raise _BadLine("messages empty or no list", source, line, expected=expected, got=got, fix=fix)
    for number, message in enumerate(messages, start=1):
        _check_message(message, number, source, line)
    return messages


def _check_message(message: object, number: int, source: str, line: int) -> None:
    """Raises: _BadLine naming the message."""
    fix = "give every message a role and its text"
    if not isinstance(message, dict):
        raise _BadLine(
            "broken message", source, line, expected=f"message {number} to be an object", got=type(message).__name__, fix=fix
        )
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            found = ", ".join(list(message)[:12]) or "none"
            got = type(message[key]).__name__ if key in message else f"the keys {found}"
            expected = f"text as '{key}' of message {number}"
            raise _BadLine("broken message", source, line, expected=expected, got=got, fix=fix)
    if message["role"] not in ROLES:
        expected = f"one of {', '.join(ROLES)} as the role of message {number}"
        got = repr(message["role"][:40])
        raise _BadLine("unknown role", source, line, expected=expected, got=got, fix="rename the role")
    try:
        message["content"].encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair; no tokenizer takes it.
        got = f"half a surrogate pair at character {error.start + 1}"
        raise _BadLine(
            "invalid Unicode", source, line, expected=f"Unicode text in message {number}", got=got, fix="mend the \\u escapes"
        ) from error
