"""Files of conversations → documents: token ids and a loss mask, with everything dropped counted by reason.

Which files are read is sources.py's, what a row means forms.py's, the chat template templates.py's. Knows nothing of
rows and buckets. Called by train, eval and shapes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from graphcap.data.forms import Conversation, conversation_of, form_of
from graphcap.data.packing import anchor_candidates
from graphcap.data.sources import BadLine, Row, open_source, place, short
from graphcap.data.templates import BadConversation, tokenize_conversation, tokenize_prompt
from graphcap.errors import DataError

NO_SUPERVISED_TOKEN = "no supervised token"
NO_ANCHOR = "no two neighbouring supervised tokens"
TOO_LONG = "longer than max_length"
FIRST_SUPERVISED = "supervised from its first token on"


@dataclass(frozen=True)
class Document:
    """One tokenised conversation. id: 0-based place among the usable conversations read, kept or not.

    token_ids: int32 [n]. loss_mask: bool [n], true where the assistant wrote the token. source, line: where it stood (in a
    table, line is the row).
    """

    id: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    source: str
    line: int

    @property
    def place(self) -> str:
        """Where it stood, in words."""
        return place(self.source, self.line)


@dataclass(frozen=True)
class Origin:
    """A path that was read. path: as given; form: of its rows, one of sources.FORMS, empty if it had no usable row.

    revision: the commit of a data set of the Hub, to be written down; empty for a file.
    """

    path: str
    form: str
    revision: str


@dataclass(frozen=True)
class Documents:
    """What came of the files. num_read = len(documents) + all of `dropped`.

    dropped: conversations by reason. first_places: for each reason, the first file and line. num_truncated: how many of
    the documents lost their end. origins: one for each path, in their order.
    """

    documents: list[Document]
    dropped: dict[str, int]
    num_read: int
    first_places: dict[str, str] = field(default_factory=dict)
    num_truncated: int = 0
    origins: tuple[Origin, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(len(document.token_ids) for document in self.documents)

    @property
    def num_supervised_tokens(self) -> int:
        """Supervised tokens of all documents."""
        return sum(int(np.count_nonzero(document.loss_mask)) for document in self.documents)

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
    for entry in _entries(paths, []):
        if isinstance(entry, Conversation):
            yield entry
        elif on_bad_line == "error":
            raise entry
        else:
            dropped[entry.reason] += 1


def prompt_of(conversation: Conversation, tokenizer) -> list[int]:
    """Token ids up to the first assistant turn, or to the first supervised token, as a target is served them.

    Empty where the assistant speaks first. Raises: DataError with its place, if the template refuses it or a token of a
    tokenised row is not in the vocabulary.
    """
    if conversation.messages is None:
        document = _tokenized(conversation, tokenizer, 0)
        if isinstance(document, BadLine):
            raise document
        return document.token_ids[: int(np.argmax(document.loss_mask)) if document.loss_mask.any() else None].tolist()
    roles = [message["role"] for message in conversation.messages]
    turn = roles.index("assistant") if "assistant" in roles else len(roles)
    try:
        return tokenize_prompt(tokenizer, conversation.messages[:turn], conversation.tools) if turn else []
    except BadConversation as error:
        raise _placed(error, conversation) from error


def load_documents(paths: Iterable[str | Path], tokenizer, *, max_length: int, on_long: str, on_bad_line: str) -> Documents:
    """Read, tokenise and sift the conversations of files and data sets of the Hub.

    max_length: tokens. on_long: what happens to a longer document: "error", "truncate" (its end is cut off) or "drop".
    on_bad_line: "error" or "skip", for rows that cannot be used, chats that the template refuses or rewrites, and a
    document that is supervised from its first token on: a mask of all ones is never taken in silence.
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
    origins: list[Origin] = []
    num_usable = num_truncated = 0

    def drop(reason: str, source: str, line: int) -> None:
        dropped[reason] += 1
        first_places.setdefault(reason, place(short(source), line))

    for entry in _entries(paths, origins):
        if isinstance(entry, Conversation):
            document_id, num_usable = num_usable, num_usable + 1
            entry = _tokenized(entry, tokenizer, document_id)
        if isinstance(entry, BadLine):
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
    num_read = len(documents) + sum(dropped.values())
    result = Documents(documents, dict(dropped), num_read, first_places, num_truncated, tuple(origins))
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
                document.place,
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


def _tokenized(conversation: Conversation, tokenizer, document_id: int) -> Document | BadLine:
    """The document, or the error that says why there is none."""
    at = (conversation.source, conversation.line)
    if conversation.messages is None:
        token_ids, loss_mask = conversation.token_ids, conversation.loss_mask
        if int(token_ids.max()) >= len(tokenizer):
            return BadLine(
                "token id outside the vocabulary",
                *at,
                expected=f"token ids below {len(tokenizer)}, the size of the target's vocabulary",
                got=str(token_ids.max()),
                fix="tokenise with the target's own tokenizer",
            )
    else:
        try:
            token_ids, loss_mask = tokenize_conversation(tokenizer, conversation.messages, conversation.tools)
        except BadConversation as error:
            return _placed(error, conversation)
    if loss_mask[:1].any():
        return BadLine(
            FIRST_SUPERVISED,
            *at,
            expected="a first token that the target did not write",
            got=f"{np.count_nonzero(loss_mask)} of {len(loss_mask)} tokens supervised, the first among them",
            cause="nothing stands before it, so no server could have been asked for it",
            fix="begin with a question, and set loss_mask 0 for all that the target did not write",
        )
    return Document(document_id, token_ids, loss_mask, *at)


def _placed(error: BadConversation, conversation: Conversation) -> BadLine:
    """The same error with the conversation's place."""
    return BadLine(
        error.reason,
        conversation.source,
        conversation.line,
        expected=error.expected,
        got=error.got,
        fix=error.fix,
        cause=f"{error.thing}, {error.name}" + (f": {error.cause}" if error.cause else ""),
    )


def _listed(paths: Iterable[str | Path]) -> list[str | Path]:
    return [paths] if isinstance(paths, (str, Path)) else list(paths)


def _entries(paths: Iterable[str | Path], origins: list[Origin]) -> Iterator[Conversation | BadLine]:
    """Every row of every path: a conversation, or the error that says why it is none. Appends to `origins` on the way."""
    for path in _listed(paths):
        source, form = open_source(path), ""
        for row in source.rows:
            if isinstance(row, Row):
                try:
                    form = form or form_of(row)
                    row = conversation_of(row, form)
                except BadLine as error:
                    row = error
            yield row
        origins.append(Origin(source.path, form, source.revision))
