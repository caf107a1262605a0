"""Broken input of every kind ends as documents or as a DataError that can be printed, never as another exception."""

import gzip
import json
import random
import secrets
from collections import Counter
from pathlib import Path

from graphcap.data.conversations import Document, load_documents
from graphcap.errors import DataError
from graphcap.eval import load_prompts
from graphcap.model.loading import load_tokenizer

TINY = Path(__file__).resolve().parents[2] / "graphcap" / "assets" / "tiny"
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ (m.reasoning_content or '') + (m.content or '') }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

VALID = [
    {"messages": [{"role": "user", "content": "hi 🦩"}, {"role": "assistant", "content": "four"}], "tools": CALLS},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": CALLS}]},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "reasoning_content": "hm", "content": "x"}]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "four"}]},
    {"prompt": "hi", "response": "four"},
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
]


def odd_value(draw: random.Random):
    """A value of a wrong type, too large, too deep, or text that is no Unicode."""
    deep, depth = [], draw.choice([3, 70, 400])
    for _ in range(depth):
        deep = draw.choice([[deep], {"a": deep}])
    odd = [None, True, -1, 0, 2**31, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", " ", "\ud83d", "\x00", [], {}, [[]]]
    return draw.choice([*odd, ["x"], {"role": "user"}, {"\udc00": 1}, "assistant", "human", "[", "{%", "{{ x }}", deep])


def mutated_row(draw: random.Random, row: dict) -> dict:
    """One to three places of a row changed: a value replaced, a key or an item left out, doubled, renamed or nested."""
    row = json.loads(json.dumps(row))
    for _ in range(draw.randint(1, 3)):
        places, left = [], [row]
        while left:
            value = left.pop()
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            places += [(value, key) for key in keys]
            left += [value[key] for key in keys if isinstance(value[key], (dict, list)) and len(places) < 99]
        if not places:
            break
        inside, key = draw.choice(places)
        what = draw.randrange(5)
        if what == 0:
            del inside[key]
        elif what == 1:
            inside[key] = [inside[key]]
        elif what == 2 and isinstance(inside, dict):
            inside[draw.choice(["role", "content", "value", "messages", "tools", "tool_calls", "\ud800"])] = inside[key]
        else:
            inside[key] = odd_value(draw)
    return row


def mutated_bytes(draw: random.Random, raw: bytes) -> bytes:
    """Flipped, cut, doubled or foreign bytes; brackets without end; a number without end."""
    hurt = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(hurt) + 1)
        what = draw.randrange(6)
        if what == 0 and at < len(hurt):
            hurt[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            del hurt[at : at + draw.randrange(30)]
        elif what == 2:
            hurt[at:at] = draw.randbytes(draw.randint(1, 5))
        elif what == 3:
            hurt[at:at] = draw.choice([b"\xff", b"\x00", b"\n", b"\\ud83d", b"\xed\xa0\xbd", b"1e999", b"NaN", b"\xef\xbb\xbf"])
        elif what == 4:
            hurt[at:at] = draw.choice([b"[", b'{"a":']) * draw.choice([2, 200, 20_000])
        else:
            hurt[at:at] = b"9" * draw.choice([20, 5_000])
    return bytes(hurt)


def test_every_result_is_documents_or_a_data_error_that_can_be_printed(tmp_path):
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    tokenizer = load_tokenizer(str(TINY), revision="main", trust_remote_code=False)
    tokenizer.chat_template = TEMPLATE
    ends = {"documents": 0, "error": 0}
    for number in range(1_000):
        row = draw.choice(VALID)
        if number % 2:
            row = mutated_row(draw, row)
        raw = json.dumps(row, ensure_ascii="\\ud" in json.dumps(row) or draw.random() < 0.5).encode() + b"\n"
        raw = raw if number % 2 else mutated_bytes(draw, raw)
        packed = number % 50 == 0
        path = tmp_path / ("f.jsonl.gz" if packed else "f.jsonl")
        path.write_bytes(mutated_bytes(draw, gzip.compress(raw)) if packed else raw)
        on_bad_line = draw.choice(["error", "skip"])
        try:
            loaded = load_documents([path], tokenizer, max_length=64, on_long="truncate", on_bad_line=on_bad_line)
            assert loaded.documents and all(isinstance(document, Document) for document in loaded.documents)
            assert all(0 < d.loss_mask.sum() < len(d.loss_mask) and not d.loss_mask[0] for d in loaded.documents)
            said, end = loaded.summary(), "documents"
        except DataError as error:
            said, end = str(error), "error"
        except Exception as error:
            raise AssertionError(f"seed {seed}, input {number}: {path.read_bytes()[:300]!r}") from error
        said.encode("utf-8")
        ends[end] += 1
        if number % 4 == 0:
            try:
                assert all(
                    load_prompts([str(path)], tokenizer, count=2, on_bad_line=on_bad_line, max_length=400, dropped=Counter())
                )
            except DataError as error:
                str(error).encode("utf-8")
            except Exception as error:
                raise AssertionError(f"seed {seed}, prompts of input {number}: {path.read_bytes()[:300]!r}") from error
    assert min(ends.values()) > 50, f"seed {seed}: {ends}"
