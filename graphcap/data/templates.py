"""A chat → token ids and loss mask, by the tokenizer's own chat template.

The ids are those of the tokenizer's own call, so training sees what a server feeds. Supervised is what the target
writes: the words of each assistant turn and the token that ends the turn; neither the header that a server supplies
nor the template's newline after the end of the turn. Where the spans come from:

* generation markers (`{% generation %}`), if the template has them;
* else the chat is rendered prefix by prefix: the messages before a turn with the generation prompt must be the
  beginning of the messages up to the turn, and these the beginning of the whole chat. A template for which they are
  not rewrites what was already said; its spans cannot be known, and that is an error, never a guess.

What a template writes by itself between the prompt and the words is not supervised. Qwen3 and its like put an empty
<think></think> before the last answer and leave it out of earlier ones: only this may differ between a turn as the last
and as an earlier one, so their chats without reasoning are used whole. An earlier turn whose reasoning is cut is refused.

One rule for odd turns: a turn is supervised if a server could have been asked for it and the assistant said something.
So an assistant turn that opens a chat is context only (there is nothing to ask with), one after a system turn alone is
supervised if the template renders that, and an empty turn (no content, no tool call) is never supervised.

Reads no files and drops nothing. Called by conversations.py; the tokenizer is handed in.
"""

import os
import re

import numpy as np

from graphcap.data.encoder import Encoder
from graphcap.errors import DataError

REFUSED = "refused by the chat template"
REWRITTEN = "chat template rewrites earlier turns"

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = "graphcap's words"  # what stands before them in a rendered answer, the template wrote


class BadConversation(DataError):
    """One conversation that cannot be used. reason: the short, stable text that it is counted under when skipped."""

    def __init__(self, reason: str, thing: str, name: object, *, expected: str, got: str, fix: str, cause: str = "") -> None:
        super().__init__(thing, name, expected=expected, got=got, fix=fix, cause=cause)
        self.reason = reason


def tokenize_conversation(
    tokenizer, messages: list[dict], tools: list[dict] | None = None, encoder: Encoder | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (int32 [n]) and loss mask (bool [n]) of a chat; `messages` is not empty.

    tools: JSON schemas for the template, or None. A message may lack content where it has tool calls or reasoning.
    encoder: the tokenizer's, to be handed on from chat to chat, since it remembers words. The ids equal
    `tokenizer.apply_chat_template(messages, tokenize=True)`: nothing is prepended, so there is exactly the BOS that the
    template prints. The mask may be all zeros; the caller says what happens then.
    Raises: DataError if the tokenizer has no template; BadConversation if the template refuses the chat or rewrites
    earlier turns, naming the turn.
    """
    template, encoder = _template(tokenizer, tools), encoder or Encoder(tokenizer)
    text = _render(tokenizer, messages, tools, prompt=False)
    # A tokenizer of transformers renders and encodes; any other may do more with a chat than that.
    if encoder.known:
        token_ids, ends = encoder.encode(text)
    else:
        token_ids, ends = np.array(_apply(tokenizer, messages, tools, tokenize=True), dtype=np.int32), None
    spans = (_spans_by_markers if _MARKER.search(template) else _spans_by_prefixes)(tokenizer, template, messages, tools, text)
    return token_ids, _mask(tokenizer, text, token_ids, ends, spans)


def tokenize_prompt(tokenizer, messages: list[dict], tools: list[dict] | None) -> list[int]:
    """Token ids of `messages` with the header that asks for an answer: what a server feeds. Raises: as above."""
    _template(tokenizer, tools)
    return list(_apply(tokenizer, messages, tools, tokenize=True, prompt=True))


def _template(tokenizer, tools: list[dict] | None) -> str:
    """The text of the template that transformers takes: of several, 'tool_use' where there are tools, else 'default'."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use" if tools and "tool_use" in template else "default")
    if not template:
        raise DataError(
            "tokenizer",
            type(tokenizer).__name__,
            expected="a chat template",
            got="none",
            fix="use the tokenizer of a chat model, or put chat_template.jinja beside it",
        )
    return template


def _render(tokenizer, messages: list[dict], tools: list[dict] | None, *, prompt: bool) -> str:
    """The chat as text. prompt: with the header that a server adds to ask for an answer."""
    return _apply(tokenizer, messages, tools, tokenize=False, prompt=prompt)


def _apply(tokenizer, messages: list[dict], tools: list[dict] | None, *, tokenize: bool, prompt: bool = False):
    """The chat as text or as token ids."""
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=tokenize, add_generation_prompt=prompt, return_dict=False
        )
    except Exception as error:  # a template is foreign code: it may raise anything, and says why in the text
        if any(kind.__name__ == "TemplateSyntaxError" for kind in type(error).__mro__):  # jinja2's: no chat can be rendered
            raise DataError(
                "chat template",
                getattr(tokenizer, "name_or_path", "") or "of the target",
                expected="a template that can be compiled",
                got=f"{type(error).__name__} at line {error.lineno}: {error}",
                fix="mend chat_template in the target's folder, or take it again from whoever made the target",
            ) from error
        raise BadConversation(
            REFUSED,
            "chat template",
            f"messages 1 to {len(messages)}",
            expected="a chat that the template renders",
            got=f"{type(error).__name__}: {error}",
            fix="mend the order or fields of the messages, or leave them out",
        ) from error


def _is_empty(message: dict) -> bool:
    return not (_content(message).strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _content(message: dict) -> str:
    """The message's words; none where tool calls or reasoning stand alone."""
    return message.get("content") or ""


def _spans_by_prefixes(
    tokenizer, template: str, messages: list[dict], tools: list[dict] | None, text: str
) -> list[tuple[int, int]]:
    """Character spans [start, end) of the supervised turns, found by rendering the chat up to each of them."""
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn == 0 or _is_empty(message):
            continue
        asked = _render(tokenizer, messages[:turn], tools, prompt=True)
        # The last turn needs no render of its own; for most chats that halves the work.
        answered = text if turn + 1 == len(messages) else _render(tokenizer, messages[: turn + 1], tools, prompt=False)
        if not answered.startswith(asked):
            raise _rewritten(turn, "the prompt before the answer", asked, "the chat with the answer", answered)
        start = len(asked)
        begin = start + _num_inserted(tokenizer, messages[: turn + 1], tools, asked, answered[start:])
        if text.startswith(answered):
            start, end = begin, len(answered)
        elif begin > start and text.startswith(asked + answered[begin:]):
            end = start + len(answered) - begin  # as an earlier turn it stands there without what the template inserted
        else:
            raise _rewritten(turn, "the chat up to the answer", answered, "the whole chat", text)
        spans.append((start, _end_of_turn(text, start, end, _content(message))))
    return spans


def _num_inserted(tokenizer, messages: list[dict], tools: list[dict] | None, asked: str, answer: str) -> int:
    """Characters at the beginning of `answer`, the last message's text, that the template writes whatever is said.

    An empty <think></think> is; white space is not counted, since it is part of what the target writes. Found by
    rendering other words in place of the message: reasoning of its own would stand inside the block, and differ.
    """
    words = _content(messages[-1]).strip()
    if words and answer.lstrip().startswith(words) and answer.count(words) == 1:
        return 0  # the usual case needs no render; words that stand there twice may begin as the block does
    probed = _render(tokenizer, [*messages[:-1], {"role": "assistant", "content": _PROBE}], tools, prompt=False)
    inserted, found, _ = probed.partition(_PROBE)
    inserted = inserted[len(asked) :] if found and inserted.startswith(asked) else ""
    return len(inserted) if inserted.strip() and answer.startswith(inserted) else 0


def _spans_by_markers(
    tokenizer, template: str, messages: list[dict], tools: list[dict] | None, text: str
) -> list[tuple[int, int]]:
    """Character spans [start, end) inside the template's generation markers, without header and last newline."""
    # Imported here: transformers is large, and only the caller's tokenizer tells that it is there.
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, marked = render_jinja_template(
        conversations=[[{key: value for key, value in message.items() if value is not None} for message in messages]],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
        **tokenizer.special_tokens_map,
    )
    if rendered[0] != text:
        at = len(os.path.commonprefix([text, rendered[0]]))
        raise BadConversation(
            REWRITTEN,
            "chat template",
            "with generation markers",
            expected="the same text each time it writes a chat",
            got=f"{rendered[0][at : at + 30]!r} in place of {text[at : at + 30]!r}",
            cause="it writes a time, or something else that changes",
            fix="use a template that does not",
        )
    turns = [message for message in messages if message["role"] == "assistant"]
    if len(marked[0]) != len(turns):
        turns = [None] * len(marked[0])  # several markers a turn, or none: which is whose cannot be told
    opening = len(_render(tokenizer, messages[:1], tools, prompt=False)) if messages[0]["role"] == "assistant" else 0
    header = _header(tokenizer, messages, tools)
    spans = []
    for turn, (start, end) in zip(turns, marked[0]):
        start = _after_header(text, start, end, header)
        end = _end_of_turn(text, start, end, _content(turn) if turn else "")
        if start >= opening and text[start:end].strip() and not (turn and _is_empty(turn)):
            spans.append((start, end))
    return spans


def _header(tokenizer, messages: list[dict], tools: list[dict] | None) -> str:
    """The text that the template adds to ask for an answer, for example '<|im_start|>assistant\\n'."""
    turn = next((turn for turn, message in enumerate(messages) if message["role"] == "assistant" and turn), 0)
    if turn == 0:
        return ""
    before, asked = (_render(tokenizer, messages[:turn], tools, prompt=prompt) for prompt in (False, True))
    if not asked.startswith(before):
        raise _rewritten(turn, "the chat before the answer", before, "the prompt before the answer", asked)
    return asked[len(before) :]


def _after_header(text: str, start: int, end: int, header: str) -> int:
    """Where the answer begins: at `start`, or behind the header as far as the markers include it."""
    for place in range(start, min(end, start + len(header)) + 1):
        if text.endswith(header, 0, place):
            return place
    return start


def _end_of_turn(text: str, start: int, end: int, content: str) -> int:
    """Where the turn ends: white space behind the mark that ends it is the template's, not the assistant's.

    Where nothing but white space follows the assistant's words, that white space is all that ends the turn: it stays.
    """
    words = text[start:end].rstrip()
    marked = not content.strip() or not words.endswith(content.rstrip())
    return start + len(words) if marked else end


def _mask(tokenizer, text: str, token_ids: np.ndarray, ends: np.ndarray | None, spans: list[tuple[int, int]]) -> np.ndarray:
    """bool [n]: tokens that lie wholly in a span. ends: the byte behind each token, where that is known."""
    mask = np.zeros(len(token_ids), dtype=bool)
    if spans:
        cuts = sorted({place for span in spans for place in span})
        known = ends is not None
        borders = _borders_by_bytes(text, ends, cuts) if known else _borders(tokenizer, text, token_ids.tolist(), cuts)
        for start, end in spans:
            mask[borders[start][1] : borders[end][0]] = True
    return mask


def _borders_by_bytes(text: str, ends: np.ndarray, cuts: list[int]) -> dict[int, tuple[int, int]]:
    """As `_borders`, from the byte behind each token."""
    places = cuts if text.isascii() else [len(text[:cut].encode()) for cut in cuts]
    starts = np.concatenate(([0], ends[:-1]))
    before, behind = np.searchsorted(ends, places, side="right"), np.searchsorted(starts, places, side="left")
    return dict(zip(cuts, zip(before.tolist(), behind.tolist())))


def _borders(tokenizer, text: str, ids: list[int], cuts: list[int]) -> dict[int, tuple[int, int]]:
    """For each cut in the text: how many tokens end at or before it, and the first token that begins at or behind it.

    The two differ where a token straddles the cut. Found by comparing token ids, not character offsets: several
    tokens may share one character, and offsets leave out the space that a token begins with.
    """
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    encoded = _encode(tokenizer, pieces)
    if [token for piece in encoded for token in piece] == ids:
        # The usual case: every cut lies between tokens. One pass over the text, however many turns.
        counts = np.cumsum([len(piece) for piece in encoded]).tolist()
        return {cut: (count, count) for cut, count in zip(cuts, counts)}
    borders = {}
    for cut in cuts:
        prefix, suffix = _encode(tokenizer, [text[:cut], text[cut:]])
        before = behind = _num_common(prefix, ids)
        if before < len(prefix):
            # The token at `before` begins ahead of the cut. Which is the first behind it, the end of the text tells.
            behind = max(before + 1, len(ids) - _num_common(suffix[::-1], ids[::-1]))
            # Unless a space was put before `suffix` by the tokenizer, and this space in the text is ahead of the cut.
            if behind < len(ids) and len(tokenizer.decode(ids[:behind])) < len(tokenizer.decode(prefix)):
                behind += 1
            if len(tokenizer.decode(ids[:behind])) == len(tokenizer.decode(prefix)):
                before = behind  # no token straddles the cut: the tokens before it are others than alone
        borders[cut] = (before, behind)
    return borders


def _encode(tokenizer, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]


def _num_common(left: list[int], right: list[int]) -> int:
    """Length of the common beginning."""
    for place, (one, other) in enumerate(zip(left, right)):
        if one != other:
            return place
    return min(len(left), len(right))


def _rewritten(turn: int, what: str, short: str, other: str, long: str) -> BadConversation:
    at = len(os.path.commonprefix([short, long]))
    return BadConversation(
        REWRITTEN,
        "chat template",
        f"message {turn + 1} (assistant)",
        expected=f"{other} to begin with {what}",
        got=f"{long[at : at + 30]!r} in place of {short[at : at + 30]!r}",
        cause="an unstable template: it rewrites earlier turns, so what the assistant wrote cannot be found",
        fix="if it cuts reasoning, leave that out of all answers but the last, or make a chat of each answer that ends with "
        "it; else use a template with generation markers ({% generation %})",
    )
