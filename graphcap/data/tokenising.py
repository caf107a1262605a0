"""Rows → documents, a batch at a time: the work that is spread over processes. Opens no files and keeps nothing but words.

Called by conversations.py, in its own process or in others (workers.py).
"""

from dataclasses import dataclass

import numpy as np

from graphcap.data.documents import COLUMNS, Batch
from graphcap.data.encoder import Encoder
from graphcap.data.forms import Conversation, conversation_of
from graphcap.data.packing import anchor_candidates
from graphcap.data.sources import BadLine, Row, place
from graphcap.data.templates import BadConversation, tokenize_conversation
from graphcap.errors import DataError

VERSION = 1  # of what text becomes; raise it with any change to ids, masks, drops or reasons, so that no old cache is used

NO_SUPERVISED_TOKEN = "no supervised token"
NO_ANCHOR = "no two neighbouring supervised tokens"
TOO_LONG = "longer than max_length"
FIRST_SUPERVISED = "supervised from its first token on"


@dataclass(frozen=True)
class Rules:
    """Which documents are kept. max_length: tokens. on_long: error, truncate or drop. on_bad_line: error or skip."""

    max_length: int
    on_long: str
    on_bad_line: str


@dataclass(frozen=True)
class Tokenised:
    """What came of a batch. documents: their ids count this batch's usable conversations from 0, num_usable of them.

    dropped: reason and line of each row left out, in order. error: what ends the reading, behind all of these, or None.
    """

    documents: Batch
    num_usable: int
    num_truncated: int
    dropped: list[tuple[str, int]]
    error: DataError | None


class Tokeniser:
    """Makes documents of rows by one tokenizer and one set of rules."""

    def __init__(self, tokenizer, rules: Rules) -> None:
        self._tokenizer, self._encoder, self._rules = tokenizer, Encoder(tokenizer), rules

    def tokenise(self, entries: list[Row | DataError], form: str) -> Tokenised:
        """The documents of these rows, all of one file, whose form is `form`. A DataError that is no BadLine ends it."""
        kept: list[tuple[int, int, np.ndarray, np.ndarray]] = []
        dropped: list[tuple[str, int]] = []
        num_usable = num_truncated = 0
        error = None
        for entry in entries:
            try:
                conversation = _conversation(entry, form)
                document_id, num_usable = num_usable, num_usable + 1
                token_ids, loss_mask = tokenized(conversation, self._tokenizer, self._encoder)
            except BadLine as bad:
                if self._rules.on_bad_line == "error":
                    error = bad
                    break
                dropped.append((bad.reason, bad.line))
                continue
            except DataError as end:
                error = end
                break
            if len(token_ids) > self._rules.max_length and self._rules.on_long == "error":
                error = _too_long(conversation, len(token_ids), self._rules.max_length)
                break
            reason, cut = _sifted(token_ids, loss_mask, self._rules)
            if reason:
                dropped.append((reason, conversation.line))
                continue
            num_truncated += cut < len(token_ids)
            kept.append((document_id, conversation.line, token_ids[:cut], loss_mask[:cut]))
        return Tokenised(_batch(kept), num_usable, num_truncated, dropped, error)


def tokenized(conversation: Conversation, tokenizer, encoder: Encoder) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int32 [n]) and loss mask (bool [n]) of a conversation. Raises: BadLine that says why there are none."""
    at = (conversation.source, conversation.line)
    if conversation.messages is None:
        token_ids, loss_mask = conversation.token_ids, conversation.loss_mask
        if int(token_ids.max()) >= len(tokenizer):
            raise BadLine(
                "token id outside the vocabulary",
                *at,
                expected=f"token ids below {len(tokenizer)}, the size of the target's vocabulary",
                got=str(token_ids.max()),
                fix="tokenise with the target's own tokenizer",
            )
    else:
        try:
            token_ids, loss_mask = tokenize_conversation(tokenizer, conversation.messages, conversation.tools, encoder)
        except BadConversation as error:
            raise placed(error, conversation) from error
    if loss_mask[:1].any():
        raise BadLine(
            FIRST_SUPERVISED,
            *at,
            expected="a first token that the target did not write",
            got=f"{np.count_nonzero(loss_mask)} of {len(loss_mask)} tokens supervised, the first among them",
            cause="nothing stands before it, so no server could have been asked for it",
            fix="begin with a question, and set loss_mask 0 for all that the target did not write",
        )
    return token_ids, loss_mask


def placed(error: BadConversation, conversation: Conversation) -> BadLine:
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


def _conversation(entry: Row | DataError, form: str) -> Conversation:
    if isinstance(entry, DataError):
        raise entry
    return conversation_of(entry, form)


def _too_long(conversation: Conversation, num_tokens: int, max_length: int) -> DataError:
    return DataError(
        "conversation",
        place(conversation.source, conversation.line),
        got=f"{num_tokens} tokens",
        expected=f"at most max_length = {max_length} tokens",
        fix="raise data.max_length, or set data.on_long to truncate or drop",
    )


def _sifted(token_ids: np.ndarray, loss_mask: np.ndarray, rules: Rules) -> tuple[str, int]:
    """Why a document is dropped, or ""; how many of its tokens stay. Judged after truncation."""
    cut = min(len(token_ids), rules.max_length)
    truncated = cut < len(token_ids)
    if truncated and rules.on_long == "drop":
        return TOO_LONG, cut
    reason = ""
    if not loss_mask[:cut].any():
        reason = NO_SUPERVISED_TOKEN
    elif not len(anchor_candidates(loss_mask[:cut])):
        reason = NO_ANCHOR
    return reason + " after truncation" if reason and truncated else reason, cut


def _batch(kept: list[tuple[int, int, np.ndarray, np.ndarray]]) -> Batch:
    """Columns of (id, line, token ids, loss mask)."""
    numbers = np.zeros(len(kept), COLUMNS)
    for row, (document_id, line, _, loss_mask) in zip(numbers, kept):
        row["id"], row["line"], row["length"] = document_id, line, len(loss_mask)
        row["supervised"], row["candidates"] = np.count_nonzero(loss_mask), np.count_nonzero(loss_mask[:-1] & loss_mask[1:])
    token_ids = np.concatenate([np.zeros(0, np.int32), *(one[2] for one in kept)])
    return Batch(numbers, token_ids, np.concatenate([np.zeros(0, bool), *(one[3] for one in kept)]))
