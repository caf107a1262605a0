"""A row → a conversation: its messages and tools, or its token ids and loss mask. Reads no files.

Row forms, by the keys that a row has (the first that fits, in this order):

* `messages`: a list of {"role": user | assistant | system | tool, "content": text, …}.
* `conversations`: ShareGPT's, {"from": human | gpt | system | tool, "value": text} or role and content under these names.
* `prompt` + `response`: two texts, one question and its answer.
* `input_ids` + `loss_mask`: already tokenised; passes as it is, once checked.

A file has one form, that of its first row that has any; a row without the keys of that form is a bad row. The row's
`tools` (a list, or that list as JSON text) and all keys of a message go to the chat template; the row's `system`, a text,
goes before the messages. Content may be absent or
null where tool calls or reasoning stand. Called by conversations.py.
"""

import json
from dataclasses import dataclass

import numpy as np

from graphcap.data.sources import FORMS, Row, shown

ROLES = ("user", "assistant", "system", "tool")
# ShareGPT's names for the roles; `messages` must have the roles themselves.
ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
MAX_DEPTH = 64  # of lists and objects in a message or a tool: templates are run by recursion

_MESSAGES_FIX = 'write each row as {"messages": [{"role": …, "content": …}, …]}'


@dataclass(frozen=True)
class Conversation:
    """One usable row. source: the path as given; line: 1-based line or row.

    messages: the list, not empty, null keys left out; tools: what the template gets as tools, or None. A row that came
    tokenised has no messages (None) but token_ids, int32 [n], and loss_mask, bool [n].
    """

    source: str
    line: int
    messages: list[dict] | None
    tools: list[dict] | None = None
    token_ids: np.ndarray | None = None
    loss_mask: np.ndarray | None = None


def form_of(row: Row) -> str:
    """The form that the row's keys make. Raises: BadLine naming the keys found and the forms accepted."""
    for form, keys in FORMS.items():
        if all(key in row.value for key in keys):
            return form
    expected = f"one of the forms {'; '.join(FORMS)}"
    raise row.bad("unknown row form", expected=expected, got=shown(row.value), fix=_MESSAGES_FIX)


def conversation_of(row: Row, form: str) -> Conversation:
    """The row read as `form`, the form of its file. Raises: BadLine."""
    missing = [key for key in FORMS[form] if key not in row.value]
    if missing:
        found = next((one for one, keys in FORMS.items() if all(key in row.value for key in keys)), shown(row.value))
        expected, fix = f"{form}, as in the first row of this file", "put rows of another form into a file of their own"
        raise row.bad("row form differs from the file's", expected=expected, got=found, fix=fix)
    if form == "input_ids + loss_mask":
        token_ids, loss_mask = _tokens(row)
        return Conversation(row.source, row.line, None, None, token_ids, loss_mask)
    if form == "prompt + response":
        messages = [{"role": role, "content": row.value[key]} for role, key in (("user", "prompt"), ("assistant", "response"))]
        for key in FORMS[form]:
            if not isinstance(row.value[key], str):
                got, fix = type(row.value[key]).__name__, "write a chat of several turns as messages"
                raise row.bad("prompt or response no text", expected=f"text as '{key}'", got=got, fix=fix)
    else:
        messages = row.value[form]
        if not isinstance(messages, list) or not messages:
            got = "an empty list" if messages == [] else type(messages).__name__
            expected = f"at least one message in the list '{form}'"
            raise row.bad("messages empty or no list", expected=expected, got=got, fix=_MESSAGES_FIX)
    messages = [_message(message, number, row, form) for number, message in enumerate(messages, start=1)]
    return Conversation(row.source, row.line, _system(row, messages) + messages, _tools(row))


def _message(message: object, number: int, row: Row, form: str) -> dict:
    """The message with role and content under these names, null keys left out. Raises: BadLine naming the message."""
    reason, fix = "broken message", "give every message a role and its text"
    if not isinstance(message, dict):
        got = type(message).__name__
        raise row.bad(reason, expected=f"message {number} to be an object", got=got, fix=fix)
    nulls = {key for key, value in message.items() if value is None}
    message = {key: value for key, value in message.items() if key not in nulls}
    names = ("from", "value") if form == "conversations" and "role" not in message else ("role", "content")
    calls, reasoning = message.get("tool_calls", []), message.get("reasoning_content", "")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise row.bad(reason, expected=f"a list of objects as 'tool_calls' of message {number}", got=_kind(calls), fix=fix)
    if not isinstance(reasoning, str):
        raise row.bad(reason, expected=f"text as 'reasoning_content' of message {number}", got=_kind(reasoning), fix=fix)
    role = message.get(names[0])
    if form == "conversations" and isinstance(role, str):
        role = ALIASES.get(role, role)
    silent = role == "assistant" and names[1] not in message and bool(calls or reasoning)
    for name in names[: 1 if silent else 2]:
        if not isinstance(message.get(name), str):
            got = type(message[name]).__name__ if name in message else "null" if name in nulls else shown(message)
            raise row.bad(reason, expected=f"text as '{name}' of message {number}", got=got, fix=fix)
    if role not in ROLES:
        expected = f"one of {', '.join(ROLES)} as the role of message {number}"
        raise row.bad("unknown role", expected=expected, got=repr(role[:40]), fix="rename the role")
    _check_text(message, f"message {number}", row)
    content = {"content": message[names[1]]} if names[1] in message else {}
    return {"role": role, **content} | {key: value for key, value in message.items() if key not in names}


def _system(row: Row, messages: list[dict]) -> list[dict]:
    """The row's `system` as a message to stand before the others; none for none. Raises: BadLine."""
    text, fix = row.value.get("system"), "write the system message in one place, as text"
    if text is None or text == "":
        return []
    if not isinstance(text, str):
        raise row.bad("broken system message", expected="text as 'system'", got=_kind(text), fix=fix)
    if messages[0]["role"] == "system":
        got = "both the key 'system' and a first message of that role"
        raise row.bad("two system messages", expected="one system message", got=got, fix=fix)
    _check_text(text, "'system'", row)
    return [{"role": "system", "content": text}]


def _tools(row: Row) -> list[dict] | None:
    """What the template gets as tools; None for none. Raises: BadLine."""
    tools = row.value.get("tools")
    expected, fix = "a list of JSON schemas as 'tools'", "write tools as in transformers' apply_chat_template"
    if isinstance(tools, str) and tools.strip():  # tables keep schemas as text: their keys differ from row to row
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise row.bad("broken tools", expected=expected, got=f"text that is no JSON: {error}", fix=fix) from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise row.bad("broken tools", expected=expected, got=_kind(tools), fix=fix)
    _check_text(tools, "the tools", row)
    return tools


def _tokens(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and loss mask, checked as far as it goes without a tokenizer. Raises: BadLine."""
    ids, mask = row.value["input_ids"], row.value["loss_mask"]
    reason, fix = "broken input_ids or loss_mask", "write both as flat lists of one length, loss_mask 1 where the target wrote"
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        got = (
            next((_kind(token) for token in ids if type(token) is not int), _kind(ids)) if isinstance(ids, list) else _kind(ids)
        )
        raise row.bad(reason, expected="a list of whole numbers as 'input_ids'", got=got, fix=fix)
    if not 0 <= min(ids) <= max(ids) < 2**31:
        raise row.bad(reason, expected="token ids from 0 to 2^31 - 1", got="one out of this range", fix=fix)
    if not isinstance(mask, list) or not all(type(one) in (int, bool) and one in (0, 1) for one in mask):
        got = "other values" if isinstance(mask, list) else _kind(mask)
        raise row.bad(reason, expected="a list of 0 and 1 as 'loss_mask'", got=got, fix=fix)
    if len(ids) != len(mask):
        got = f"{len(ids)} and {len(mask)}"
        raise row.bad(reason, expected="input_ids and loss_mask of one length", got=got, fix=fix)
    return np.array(ids, np.int32), np.array(mask, bool)


def _check_text(value: object, what: str, row: Row) -> None:
    """Raises: BadLine if text in `value` is no Unicode, or if it is nested deeper than MAX_DEPTH."""
    left = [(value, 0)]
    while left:
        value, depth = left.pop()
        if depth > MAX_DEPTH:
            got, fix = "more", "flatten it, or leave out what the template does not read"
            raise row.bad("nested too deep", expected=f"at most {MAX_DEPTH} levels in {what}", got=got, fix=fix)
        if isinstance(value, dict):
            left += [(part, depth + 1) for item in value.items() for part in item]
        elif isinstance(value, (list, tuple)):
            left += [(part, depth + 1) for part in value]
        elif isinstance(value, str):
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                # JSON can spell half of a surrogate pair; no tokenizer takes it.
                expected, got = f"Unicode text in {what}", f"half a surrogate pair at character {error.start + 1}"
                raise row.bad("invalid Unicode", expected=expected, got=got, fix="mend the \\u escapes") from error


def _kind(value: object) -> str:
    return "an empty list" if value == [] else type(value).__name__
