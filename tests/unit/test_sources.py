"""Every container and row form gives the same documents; what cannot be read is named with what to do."""

import gzip
import json
import pickle
import sys
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from graphcap.data.conversations import load_documents, read_conversations
from graphcap.data.sample import PLAIN_MARKS, TERMINAL_MARKS, supervised_text
from graphcap.errors import DataError
from graphcap.eval import load_prompts
from graphcap.model.loading import load_tokenizer

TINY = Path(__file__).resolve().parents[2] / "graphcap" / "assets" / "tiny"
CHATS = [json.loads(line)["messages"] for line in (TINY / "conversations" / "held_out.jsonl").read_text().splitlines()[:20]]
CHATS[3] = [*CHATS[3][:1], {"role": "assistant", "content": "naïve 🦩 \u2028 日本"}]
NAMES = {"user": "human", "assistant": "gpt"}
SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY), revision="main", trust_remote_code=False)


@pytest.fixture(scope="module")
def expected(tokenizer, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("plain") / "a.jsonl", [{"messages": chat} for chat in CHATS])
    return load(path, tokenizer).documents


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
        return str(path)
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def load(paths, tokenizer, on_bad_line="error"):
    return load_documents(paths, tokenizer, max_length=512, on_long="error", on_bad_line=on_bad_line)


def rows_of(form: str, expected) -> list[dict]:
    if form == "input_ids + loss_mask":
        return [{"input_ids": d.token_ids.tolist(), "loss_mask": d.loss_mask.astype(int).tolist()} for d in expected]
    if form == "prompt + response":
        return [{"prompt": chat[0]["content"], "response": chat[1]["content"], "id": 1} for chat in CHATS]
    if form == "from and value":
        return [{"conversations": [{"from": NAMES[m["role"]], "value": m["content"]} for m in chat]} for chat in CHATS]
    return [{"conversations" if form == "role and content" else "messages": chat} for chat in CHATS]


FORMS = ["messages", "from and value", "role and content", "prompt + response", "input_ids + loss_mask"]
STORED = {"from and value": "conversations", "role and content": "conversations"}


def same(got, expected) -> bool:
    """Byte for byte: dtype, token ids and loss mask of every document."""
    pairs = zip(got, expected, strict=True)
    return all(a.tobytes() == b.tobytes() and a.dtype == b.dtype for x, y in pairs for a, b in zip(parts(x), parts(y)))


def parts(document):
    return document.token_ids, document.loss_mask


@pytest.mark.parametrize("container", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_every_container_gives_the_same_documents(tmp_path, tokenizer, expected, form, container):
    assert len(expected) == 20 and all(0 < d.loss_mask.sum() < len(d.loss_mask) for d in expected)
    path = write(tmp_path / f"b.{container}", rows_of(form, expected))
    got = load([path], tokenizer)
    assert same(got.documents, expected)
    assert [d.line for d in got.documents] == list(range(1, 21))
    assert got.summary() == f"20 conversations: 20 kept, 0 dropped; {STORED.get(form, form)} in b.{container}"
    # The twin that must fail: one word and one bit of a mask.
    word = rows_of(form, expected)
    text = json.dumps(word[3])
    word[3] = json.loads(
        text.replace("na\\u00efve", "nave") if form != FORMS[-1] else text.replace("[", "[7, ").replace("[7, 0", "[0, 0")
    )
    assert not same(load([write(tmp_path / f"c.{container}", word)], tokenizer).documents, expected)


def test_prompts_are_the_same_from_text_and_from_token_ids(tmp_path, tokenizer, expected):
    text = write(tmp_path / "a.jsonl", rows_of("messages", expected))
    ids = write(tmp_path / "b.jsonl", rows_of("input_ids + loss_mask", expected))
    ones = [
        load_prompts([path], tokenizer, count=20, on_bad_line="error", max_length=400, dropped=Counter())
        for path in (text, ids)
    ]
    assert ones[0] == ones[1] and len(ones[0]) == 20
    assert ones[0][0] == expected[0].token_ids[: int(np.argmax(expected[0].loss_mask))].tolist()


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}]
TOOL_CHAT = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": None, "reasoning_content": "hmm", "tool_calls": CALLS},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '(' + m.reasoning_content + ')' }}{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_tools_reasoning_and_calls_reach_the_template(tmp_path, container):
    tokenizer = load_tokenizer(str(TINY), revision="main", trust_remote_code=False)
    tokenizer.chat_template = TOOL_TEMPLATE
    # In a table the second row's other argument becomes a null key of the first, and must not be seen.
    other = [{"type": "function", "function": {"name": "weather", "arguments": {"zip": "50667"}}}]
    rows = [{"messages": TOOL_CHAT, "tools": TOOLS}, {"messages": [*TOOL_CHAT[:1], TOOL_CHAT[1] | {"tool_calls": other}]}]
    path = write(tmp_path / f"t.{container}", rows)
    first, second = load([path], tokenizer).documents
    schema, calls = json.dumps(TOOLS), json.dumps(CALLS, ensure_ascii=False)
    assert supervised_text(first, tokenizer, marks=PLAIN_MARKS) == (
        f"{schema}<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n⟦(hmm){calls}<|im_end|>⟧\n"
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n⟦It rains.<|im_end|>⟧\n"
    )
    assert supervised_text(second, tokenizer, marks=TERMINAL_MARKS).startswith("<|im_start|>user\n?")
    as_text = write(tmp_path / "text.jsonl", [rows[0] | {"tools": schema}])
    assert same(load([as_text], tokenizer).documents, [first])


def test_supervised_text_cannot_steer_a_terminal(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "a\x1b[2Jb"}, {"role": "assistant", "content": "c\x9b1m🦩\td"}]
    (document,) = load([write(tmp_path / "a.jsonl", [{"messages": chat}])], tokenizer).documents
    text = supervised_text(document, tokenizer, marks=("<", ">"))
    assert "user\na\\x1b[2Jb<|im_end|>" in text and "<c\\x9b1m🦩\td<|im_end|>>" in text


IDS = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
BAD_ROWS = [
    ({"text": "hi", "label": 3}, "unknown row form", "the keys text, label"),
    ({"conversations": [{"from": "alien", "value": "hi"}]}, "unknown role", "'alien'"),
    ({"conversations": [{"from": "human", "content": "hi"}]}, "broken message", "'value' of message 1"),
    ({"prompt": ["hi"], "response": "x"}, "prompt or response no text", "text as 'prompt', got list"),
    ({"messages": [{"role": "user", "content": None, "tool_calls": CALLS}]}, "broken message", "got null"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": "f()"}]}, "broken message", "'tool_calls'"),
    ({"messages": CHATS[0], "tools": "{"}, "broken tools", "no JSON"),
    ({"messages": CHATS[0], "tools": ["f"]}, "broken tools", "JSON schemas"),
    ({"messages": CHATS[0], "tools": [{"\ud83d": 1}]}, "invalid Unicode", "in the tools"),
    ({"messages": [CHATS[0][0] | {"x": json.loads("[" * 70 + "]" * 70)}]}, "nested too deep", "at most 64 levels in message 1"),
    (IDS | {"loss_mask": [0, 1, 1]}, "broken input_ids or loss_mask", "got 4 and 3"),
    (IDS | {"loss_mask": [0, 2, 1, 1]}, "broken input_ids or loss_mask", "0 and 1"),
    (IDS | {"input_ids": [1, 2.0, 3, 4]}, "broken input_ids or loss_mask", "got float"),
    (IDS | {"input_ids": [1, True, 3, 4]}, "broken input_ids or loss_mask", "got bool"),
    (IDS | {"input_ids": [1, -1, 3, 4]}, "broken input_ids or loss_mask", "from 0 to"),
    (IDS | {"input_ids": [1, 10**30, 3, 4]}, "broken input_ids or loss_mask", "from 0 to"),
    (IDS | {"input_ids": [1, 2048, 3, 4]}, "token id outside the vocabulary", "below 2048"),
    (IDS | {"loss_mask": [1, 1, 1, 1]}, "supervised from its first token on", "4 of 4 tokens"),
    (IDS | {"loss_mask": [1, 0, 1, 1]}, "supervised from its first token on", "3 of 4 tokens"),
]


@pytest.mark.parametrize("row, reason, said", BAD_ROWS)
def test_a_row_that_cannot_be_used_is_named_or_counted(tmp_path, tokenizer, row, reason, said):
    good = next((g for g in ({"messages": CHATS[0]}, IDS, {"prompt": "a", "response": "b"}) if g.keys() & row.keys()), None)
    good = {"conversations": CHATS[0]} if "conversations" in row else good or {"messages": CHATS[0]}
    first, second = write(tmp_path / "a.jsonl", [row, good]), write(tmp_path / "b.jsonl", [good])
    with pytest.raises(DataError) as caught:
        load([second, first], tokenizer)
    assert f"'{first} line 1'" in str(caught.value) and said in str(caught.value) and ". Fix: " in str(caught.value)
    documents = load([second, first], tokenizer, "skip")
    assert documents.dropped == {reason: 1} and len(documents.documents) == 2


def test_a_mask_of_zeros_is_counted_and_a_second_form_in_a_file_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "z.jsonl", [IDS, IDS | {"loss_mask": [0, 0, 0, 0]}, {"prompt": "a", "response": "b"}])
    with pytest.raises(
        DataError, match=r"z.jsonl line 3'.*input_ids \+ loss_mask, as in the first row.*got prompt \+ response"
    ):
        load([path], tokenizer)
    assert load([path], tokenizer, "skip").dropped == {"no supervised token": 1, "row form differs from the file's": 1}
    both = write(tmp_path / "m.jsonl", [{"messages": CHATS[0], "prompt": "a", "response": "b"}])
    assert load([both], tokenizer).origins[0].form == "messages"


def damaged(tmp_path) -> dict[str, tuple[Path, str]]:
    cut = tmp_path / "cut.jsonl.gz"
    packed = gzip.compress("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS).encode())
    cut.write_bytes(packed[: len(packed) // 2])
    files = {"plain.jsonl.gz": b'{"messages": []}\n', "a.pkl": b"x", "p.jsonl": pickle.dumps([1]), "w.pt": b"PK\3\4"}
    files |= {"z.jsonl": b"\x28\xb5\x2f\xfd", "a.jsonl.bz2": b"BZh9", "a.jsonl.xz": b"\xfd7zXZ"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    said = {"plain.jsonl.gz": "Not a gzipped file", "a.pkl": "pickle.load", "p.jsonl": "pickle.load", "w.pt": "torch.load"}
    said |= {"z.jsonl": "zstd -d", "a.jsonl.bz2": "bunzip2", "a.jsonl.xz": "unxz"}
    places = {name: (tmp_path / name, word) for name, word in said.items()}
    missing, folder = tmp_path / "none.parquet", tmp_path
    return places | {
        "cut": (cut, "behind line"),
        "none": (missing, "no such file"),
        "folder": (folder, "a folder of [0-9] files|a folder of other"),
    }


@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
def test_a_file_that_is_missing_damaged_or_a_pickle_is_an_error_always(tmp_path, tokenizer, on_bad_line):
    for name, (path, said) in damaged(tmp_path).items():
        with pytest.raises(DataError, match=said) as caught:
            load([path], tokenizer, on_bad_line)
        assert f"'{path}'" in str(caught.value) and caught.value.exit_code == 2, name


@pytest.mark.parametrize("hurt", ["text", "short", "columns"])
def test_parquet_that_is_none_or_damaged_or_has_other_columns(tmp_path, tokenizer, hurt):
    path = tmp_path / "h.parquet"
    write(path, [{"text": "a", "url": "b"}] if hurt == "columns" else [{"messages": chat} for chat in CHATS])
    whole = path.read_bytes()
    path.write_bytes({"text": b"hello" * 9, "short": whole[: len(whole) // 2], "columns": whole}[hurt])
    with pytest.raises(DataError, match="the keys text, url" if hurt == "columns" else "whole parquet file"):
        load([path], tokenizer, "skip")


def test_a_row_of_a_table_that_is_no_utf8_is_named_or_counted(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    prompts = pyarrow.array([b"hi", b"h\xff", b"ho"]).view(pyarrow.string())
    path = tmp_path / "u.parquet"
    parquet.write_table(pyarrow.table({"prompt": prompts, "response": ["four"] * 3}), path)
    with pytest.raises(DataError, match=r"u.parquet row 2'.*0xff"):
        load([path], tokenizer)
    documents = load([path], tokenizer, "skip")
    assert documents.dropped == {"invalid UTF-8": 1} and [d.line for d in documents.documents] == [1, 3]
    assert "first u.parquet row 2" in documents.summary()


def test_missing_packages_are_named_with_what_to_type(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path, said in ((tmp_path / "a.parquet", "pip install pyarrow"), ("hf:me/chats", "pip install datasets")):
        with pytest.raises(DataError, match=said):
            load([path], tokenizer)


class FakeDataset:
    """What graphcap asks of a data set: its columns, a choice of them, its rows."""

    def __init__(self, rows):
        self.rows, self.column_names = rows, list(dict.fromkeys(key for row in rows for key in row))

    def select_columns(self, names):
        return FakeDataset([{name: row.get(name) for name in names} for row in self.rows])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


def test_a_data_set_of_the_hub_gives_the_same_documents_and_its_commit(tokenizer, expected, monkeypatch):
    asked = []

    def load_dataset(name, *, split, revision):
        asked.append((name, split, revision))
        if split == "none":
            raise ValueError("Unknown split \"none\".\nShould be one of ['train'].")
        return FakeDataset([{"messages": chat, "picture": object()} for chat in CHATS])

    api = types.SimpleNamespace(dataset_info=lambda name, revision: types.SimpleNamespace(sha=SHA))
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    got = load(["hf:me/chats:test"], tokenizer)
    assert same(got.documents, expected) and [one.revision for one in got.origins] == [SHA]
    assert (
        got.summary().endswith(f"messages in hf:me/chats:test at {SHA}") and got.documents[4].place == "hf:me/chats:test row 5"
    )
    api.dataset_info = None  # a commit that is named is not asked for: it may be cached, and the network away
    assert same(load([f"hf:me/chats@{SHA}"], tokenizer).documents, expected)
    assert asked == [("me/chats", "test", SHA), ("me/chats", "train", SHA)]
    with pytest.raises(DataError, match=r"split none of.*Unknown split .none.\. Should[^.]*\. Fix: check"):
        load([f"hf:me/chats@{SHA}:none"], tokenizer)
    with pytest.raises(DataError, match="hf:OWNER/NAME"):
        load(["hf:chats"], tokenizer)


def test_offline_a_data_set_that_is_not_cached_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="'hf:me/chats'.*offline, name a cached commit"):
        load(["hf:me/chats"], tokenizer, "skip")


def test_reading_a_table_or_an_archive_is_streaming(tmp_path, expected):
    for container in ("jsonl.gz", "parquet"):
        path = write(
            tmp_path / f"s.{container}", [*rows_of("messages", expected), {"messages": [{"role": "x", "content": ""}]}]
        )
        stream = read_conversations([path], on_bad_line="error", dropped=Counter())
        assert [next(stream).line for _ in range(20)] == list(range(1, 21))
        with pytest.raises(DataError, match=r"(line|row) 21'"):
            next(stream)
