"""Files of conversations → documents: every line is kept or counted, and every error names file and line."""

import json
import random
import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from graphcap.data import conversations
from graphcap.data.conversations import load_documents, read_conversations
from graphcap.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "four"}]}


def dumped(messages) -> bytes:
    return json.dumps({"messages": messages}).encode()


BAD_LINES = {
    b'{"messages": [{"role": "user", "content": "broken"': ("broken JSON", "one JSON object"),
    b'{"messages": [{"role": "user", "content": "\xff"}]}': ("invalid UTF-8", "byte 0xff"),
    b'{"text": "hi", "id\\ud83d": 3}': ("row form differs from the file's", "the keys text, 'id\\ud83d'"),
    b"[1, 2]": ("not a JSON object", "got list"),
    b'{"conversations": [], "id": 3}': ("row form differs from the file's", "expected messages, as in the first row"),
    dumped([]): ("messages empty or no list", "an empty list"),
    dumped({"role": "user"}): ("messages empty or no list", "got dict"),
    dumped(["hi"]): ("broken message", "message 1 to be an object"),
    dumped([GOOD["messages"][0], {"role": "assistant"}]): ("broken message", "'content' of message 2"),
    dumped([{"role": "user", "content": None}]): ("broken message", "got null"),
    dumped([{"from": "human", "value": "hi"}]): ("broken message", "the keys from, value"),
    dumped([{"role": "human", "content": "hi"}]): ("unknown role", "'human'"),
    b'{"messages": [{"role": "user", "content": "\\ud83d"}]}': ("invalid Unicode", "surrogate"),
}


class WordTokenizer:
    """One token a character, ChatML-like: \\x01 role \\x02 content \\x03 \\n. Stands in for a real tokenizer here."""

    chat_template = "(built in)"

    def apply_chat_template(self, messages, *, tools, tokenize, add_generation_prompt=False, return_dict=False):
        text = "".join(f"\x01{message['role'][0]}\x02{message['content']}\x03\n" for message in messages)
        text += "\x01a\x02" * add_generation_prompt
        return [ord(c) for c in text] if tokenize else text

    def __call__(self, texts, *, add_special_tokens, return_attention_mask):
        assert not add_special_tokens and not return_attention_mask
        return {"input_ids": [[ord(c) for c in text] for text in texts]}


def write(path, lines: list[bytes]) -> str:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


def load(paths, *, max_length=1000, on_long="error", on_bad_line="error"):
    return load_documents(paths, WordTokenizer(), max_length=max_length, on_long=on_long, on_bad_line=on_bad_line)


@pytest.mark.parametrize("raw", BAD_LINES)
def test_bad_line_names_file_and_line_or_is_counted(tmp_path, raw):
    reason, said = BAD_LINES[raw]
    path = write(tmp_path / "chats.jsonl", [json.dumps(GOOD).encode(), b"", raw, json.dumps(GOOD).encode()])
    with pytest.raises(DataError) as caught:
        list(read_conversations([path], on_bad_line="error", dropped=Counter()))
    assert f"'{path} line 3'" in str(caught.value) and said in str(caught.value) and "Fix: " in str(caught.value)
    dropped = Counter()
    read = list(read_conversations([path], on_bad_line="skip", dropped=dropped))
    assert [one.line for one in read] == [1, 4] and dropped == {reason: 1}
    documents = load([path], on_bad_line="skip")
    assert [(one.id, one.line) for one in documents.documents] == [(0, 1), (1, 4)]
    assert documents.num_read == 3 and f"1 {reason}, first chats.jsonl line 3" in documents.summary()


@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
def test_missing_file_and_folder_are_errors_always(tmp_path, on_bad_line):
    for path, said in ((tmp_path / "none.jsonl", "no such file"), (tmp_path, "an empty folder")):
        with pytest.raises(DataError, match=said):
            list(read_conversations([path], on_bad_line=on_bad_line, dropped=Counter()))


def test_byte_order_mark_crlf_blank_lines_and_unicode_separators_are_read(tmp_path):
    chat = {"messages": [{"role": "user", "content": "a\u2028b\x85c"}, {"role": "assistant", "content": "日本 🙂"}]}
    raw = json.dumps(chat, ensure_ascii=False).encode()
    path = tmp_path / "dos.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + raw + b"\r\n  \r\n" + raw)
    read = list(read_conversations(path, on_bad_line="error", dropped=Counter()))
    assert [one.line for one in read] == [1, 3] and all(one.messages == chat["messages"] for one in read)
    assert all(one.source == str(path) for one in read)


def test_reading_is_streaming(tmp_path):
    path = write(tmp_path / "late.jsonl", [json.dumps(GOOD).encode(), b"{broken"])
    stream = read_conversations([path], on_bad_line="error", dropped=Counter())
    assert next(stream).line == 1
    with pytest.raises(DataError, match="line 2"):
        next(stream)


def test_every_conversation_is_kept_or_counted_and_ids_are_places(tmp_path):
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    max_length = 40
    lines, expected, expected_ids, usable = [], Counter(), [], 0
    for _ in range(300):
        kind = draw.choice(["good", "bad", "long prompt", "empty", "long answer"])
        user, assistant = {
            "good": ("hi", "x" * draw.randint(1, 9)),
            "bad": ("", ""),
            "long prompt": ("y" * 60, "ok"),
            "empty": ("hi", ""),
            "long answer": ("hi", "z" * 60),
        }[kind]
        chat = dumped([{"role": "user", "content": user}, {"role": "assistant", "content": assistant}])
        lines.append(chat[:-4] if kind == "bad" else chat)
        if kind == "bad":
            expected["broken JSON"] += 1
            continue
        if kind == "long prompt":
            expected["no supervised token after truncation"] += 1
        elif kind == "empty":
            expected["no supervised token"] += 1
        else:
            expected_ids.append(usable)
        usable += 1
    half = len(lines) // 2
    paths = [write(tmp_path / "a.jsonl", lines[:half]), write(tmp_path / "b.jsonl", lines[half:])]
    documents = load(paths, max_length=max_length, on_long="truncate", on_bad_line="skip")
    assert [one.id for one in documents.documents] == expected_ids, f"seed {seed}"
    assert documents.dropped == dict(expected) and documents.num_read == len(lines), f"seed {seed}"
    assert all(len(one.token_ids) <= max_length for one in documents.documents)
    assert documents.num_truncated == sum(b"zzz" in line for line in lines if line.endswith(b"]}")), f"seed {seed}"
    assert documents.num_tokens == sum(len(one.token_ids) for one in documents.documents)
    assert documents.num_supervised_tokens == sum(one.loss_mask.sum() for one in documents.documents)
    assert all(one.token_ids.dtype == np.int32 and one.loss_mask.dtype == np.bool_ for one in documents.documents)


def test_long_document_stops_is_cut_or_dropped_as_asked(tmp_path):
    long = dumped([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "four" * 9}])
    path = write(tmp_path / "c.jsonl", [json.dumps(GOOD).encode(), long])
    with pytest.raises(DataError, match=r"c.jsonl line 2'.*max_length = 30.*on_long"):
        load([path], max_length=30)
    cut = load([path], max_length=30, on_long="truncate")
    assert [len(one.token_ids) for one in cut.documents] == [16, 30] and cut.num_truncated == 1
    assert "2 conversations: 2 kept (1 truncated), 0 dropped; messages in c.jsonl" == cut.summary()
    left = load([path], max_length=30, on_long="drop")
    assert left.dropped == {"longer than max_length": 1} and len(left.documents) == 1


def test_single_supervised_token_has_no_anchor_and_is_dropped_after_truncation(tmp_path):
    path = write(tmp_path / "d.jsonl", [json.dumps(GOOD).encode()] * 2)
    start = 10  # of the answer, in WordTokenizer's rendering of GOOD
    with pytest.raises(DataError, match="2 no two neighbouring supervised tokens after truncation"):
        load([path], max_length=start + 1, on_long="truncate")
    assert load([path], max_length=start + 2, on_long="truncate").num_supervised_tokens == 4


def test_nothing_left_names_max_length_and_the_reasons(tmp_path):
    path = write(tmp_path / "e.jsonl", [b""])
    with pytest.raises(DataError, match="0 supervised tokens within max_length = 77.*0 conversations: 0 kept"):
        load([path], max_length=77)
    with pytest.raises(DataError, match="Fix: write conversations into them"):
        load([path], max_length=77)
    table = write(tmp_path / "e.csv", [b"prompt,response", b"a,b"])
    with pytest.raises(DataError, match=r"e.csv line 1.*has to become .jsonl, .jsonl.gz, .parquet, or hf:"):
        load([table], max_length=77)


def test_summary_counts_with_thousands_and_orders_reasons():
    documents = conversations.Documents([], {"b": 1, "a": 2_000}, 2_001, {"a": "f.jsonl line 4"})
    assert documents.summary() == "2,001 conversations: 0 kept, 2,001 dropped (2,000 a, first f.jsonl line 4; 1 b)"


def test_data_loads_neither_torch_nor_transformers():
    code = "import sys, graphcap.data; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'jinja2')))"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0


SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ROWS = [{"messages": SAID}, {"conversations": SHAREGPT}, {"prompt": "a", "response": "b"}]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: next(iter(row)))
def test_the_rows_system_text_stands_before_its_messages(tmp_path, row):
    def messages(value: dict):
        path = write(tmp_path / "a.jsonl", [json.dumps(value).encode()])
        return next(read_conversations([path], on_bad_line="error", dropped=Counter())).messages

    assert messages(row) == messages(row | {"system": ""}) == messages(row | {"system": None}) == SAID
    assert messages(row | {"system": "In French."}) == [{"role": "system", "content": "In French."}, *SAID]
    for broken, reason in ((5, "text as 'system'"), ("\ud800", "Unicode text in 'system'")):
        with pytest.raises(DataError, match=reason):
            messages(row | {"system": broken})
    with pytest.raises(DataError, match="one system message"):
        messages({"messages": [{"role": "system", "content": "x"}, *SAID], "system": "y"})
