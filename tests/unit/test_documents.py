"""Documents as columns and as a kept set: the same as a list in memory, however many processes made them, or made anew.

Oracle: the documents of the same file read row by row in this process, and plain loops over them.
"""

import contextlib
import gzip
import json
import math
import os
import random
import resource
import secrets
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from graphcap.data import conversations, documents, reading, tokencache, workers
from graphcap.data.conversations import load_documents
from graphcap.data.documents import DocumentList
from graphcap.data.packing import num_anchors_of
from graphcap.data.reading import Means
from graphcap.data.sources import Row, Source
from graphcap.errors import DataError, GraphcapError
from graphcap.model.loading import load_tokenizer

TINY = Path(__file__).resolve().parents[2] / "graphcap" / "assets" / "tiny"
CHATS = [json.loads(line) for line in (TINY / "conversations" / "held_out.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(TINY), revision="main", trust_remote_code=False)


@pytest.fixture
def kept_from_the_first_byte(monkeypatch):
    monkeypatch.setattr(tokencache, "KEPT_FROM_BYTES", 1)


def mixed(path: Path, draw: random.Random, *, num_rows: int = 300) -> str:
    """A file with good rows, long ones, rows without an answer, broken lines and blank ones."""
    lines = []
    for _ in range(num_rows):
        kind = draw.choice(["good"] * 6 + ["silent", "broken", "blank", "form", "long"])
        chat = json.dumps(draw.choice(CHATS))
        if kind == "long":
            answer = {"role": "assistant", "content": "word " * 900}
            chat = json.dumps({"messages": [{"role": "user", "content": "?"}, answer]})
        silent = json.dumps({"messages": [{"role": "user", "content": "nothing"}]})
        lines.append(
            {"good": chat, "long": chat, "silent": silent, "broken": chat[:-9], "blank": " ", "form": '{"a": 1}'}[kind]
        )
    data = "\n".join([json.dumps(CHATS[0]), *lines, ""]).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def load(paths, tokenizer, means=None, *, on_bad_line="skip", max_length=512):
    return load_documents(paths, tokenizer, max_length=max_length, on_long="truncate", on_bad_line=on_bad_line, means=means)


def facts(loaded) -> list:
    """All that may be known of a result."""
    rows = [(d.id, d.place, d.token_ids.tobytes(), d.loss_mask.tobytes(), d.token_ids.dtype) for d in loaded.documents]
    counts = loaded.dropped, loaded.num_read, loaded.first_places, loaded.num_truncated, loaded.origins, loaded.summary()
    return [rows, *counts]


def test_columns_answer_as_loops_over_documents_do(tmp_path, tokenizer):
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    loaded = load([mixed(tmp_path / "a.jsonl", draw), mixed(tmp_path / "b.jsonl.gz", draw)], tokenizer)
    whole = list(loaded.documents)
    assert len(loaded.documents) == len(whole) > 100 and loaded.num_truncated > 0
    assert loaded.documents.ids.tolist() == [one.id for one in whole] == sorted({one.id for one in whole})
    assert loaded.documents.lengths.tolist() == [len(one.token_ids) for one in whole]
    assert loaded.documents.supervised.tolist() == [int(one.loss_mask.sum()) for one in whole]
    for density in (0.1667, 1.0, 0.01, draw.random()):
        counts = loaded.documents.num_anchors(density).tolist()
        assert counts == [num_anchors_of(one.loss_mask, density=density) for one in whole], f"seed {seed}"
    by_id = loaded.documents.by_id()
    assert list(by_id) == loaded.documents.ids.tolist() and len(by_id) == len(whole)
    some = draw.sample(whole, 20)
    counts = sum(len(one.token_ids) for one in some), sum(int(one.loss_mask.sum()) for one in some)
    assert by_id.num_tokens([one.id for one in some]) == counts
    assert all(by_id[one.id].token_ids.tobytes() == one.token_ids.tobytes() for one in draw.sample(whole, 20))
    missing = next(number for number in range(10_000) if number not in {one.id for one in whole})
    with pytest.raises(KeyError):
        by_id[missing]
    assert loaded.documents[-1].id == whole[-1].id and [one.id for one in loaded.documents[3:9:2]] == [
        one.id for one in whole[3:9:2]
    ]
    for token in draw.sample(range(2048), 30):
        first = next((one.id for one in whole if token in one.token_ids), None)
        found = loaded.documents.first_where(lambda token_ids: token_ids == token)
        assert (found.id if found else None) == first, f"seed {seed}, token {token}"


def test_a_column_longer_than_memory_allows_lies_in_a_file_that_no_one_sees(tmp_path, tokenizer, monkeypatch):
    path = mixed(tmp_path / "a.jsonl", random.Random(1))
    expected = facts(load([path], tokenizer))
    monkeypatch.setattr(documents, "_IN_MEMORY_BYTES", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    loaded = load([path], tokenizer)
    assert isinstance(loaded.documents._token_ids, np.memmap) and facts(loaded) == expected
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("num_workers", [1, 3])
def test_processes_and_kept_sets_give_the_same_documents(
    tmp_path, tokenizer, monkeypatch, kept_from_the_first_byte, num_workers
):
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    paths = [mixed(tmp_path / "a.jsonl", draw), mixed(tmp_path / "b.jsonl.gz", draw)]
    expected = facts(load(paths, tokenizer))
    monkeypatch.setattr(reading, "_ALONE_TOKENS", 100)
    monkeypatch.setattr(reading, "_BATCH_ROWS", 7)
    said = []
    means = Means(tmp_path / "cache", num_workers, said.append)
    assert facts(load(paths, tokenizer, means)) == expected, f"seed {seed}"
    assert len(said) == 1 and "are kept for the next run" in said[0]
    monkeypatch.setattr(conversations, "read", None)  # nothing is read again
    again = load(paths, tokenizer, means)
    assert facts(again) == expected and "used again" in said[1] and isinstance(again.documents._token_ids, np.memmap)
    assert again.documents._token_ids.dtype == np.uint16
    # Elsewhere and at another time: contents count.
    moved = shutil.copy(paths[0], tmp_path / "moved.jsonl")
    os.utime(moved, (1, 1))
    other = load([moved, paths[1]], tokenizer, means)
    assert [d.token_ids.tobytes() for d in other.documents] == [row[2] for row in expected[0]]
    assert other.documents[0].place == f"{moved} line 1" and other.origins[0].path == str(moved)


def test_an_error_in_a_process_is_the_one_a_single_process_raises_first(tmp_path, tokenizer, monkeypatch):
    path = mixed(tmp_path / "a.jsonl", random.Random(3))
    cut = tmp_path / "cut.jsonl.gz"
    packed = gzip.compress(Path(path).read_bytes())
    cut.write_bytes(packed[: len(packed) * 3 // 4])
    for file, rule in ((path, "error"), (cut, "skip")):
        with pytest.raises(DataError) as alone:
            load([file], tokenizer, on_bad_line=rule)
        with monkeypatch.context() as patch:
            patch.setattr(reading, "_ALONE_TOKENS", 1)
            patch.setattr(reading, "_BATCH_ROWS", 8)
            with pytest.raises(DataError) as spread:
                load([file], tokenizer, Means(None, 2, print), on_bad_line=rule)
        assert str(spread.value) == str(alone.value) and type(spread.value) is type(alone.value)


def test_a_process_that_is_killed_is_an_error_with_its_signal(tmp_path, tokenizer, monkeypatch):
    path = mixed(tmp_path / "a.jsonl", random.Random(3))
    monkeypatch.setattr(reading, "_ALONE_TOKENS", 1)
    started, ask = [], workers._Worker.ask

    def killed_at_the_third(self, message):
        started.append(self.process.pid)
        if len(started) == 3:
            os.kill(self.process.pid, signal.SIGKILL)
        return ask(self, message)

    monkeypatch.setattr(workers._Worker, "ask", killed_at_the_third)
    with pytest.raises(GraphcapError, match="worker that tokenises.*signal 9.*memory limit.*Fix: ") as caught:
        load([path], tokenizer, Means(None, 2, print))
    assert not isinstance(caught.value, DataError)
    for pid in set(started):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_cannot_be_started_is_said_and_the_others_end(
    tmp_path, tokenizer, monkeypatch, kept_from_the_first_byte
):
    path, cache = mixed(tmp_path / "a.jsonl", random.Random(3)), tmp_path / "cache"
    monkeypatch.setattr(reading, "_ALONE_TOKENS", 1)
    started, start = [], workers.subprocess.Popen

    def refused_at_the_third(*args, **kind):
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(start(*args, **kind))
        return started[-1]

    monkeypatch.setattr(workers.subprocess, "Popen", refused_at_the_third)
    with pytest.raises(GraphcapError, match="'3 of 4': .*resource temporarily unavailable.*fewer workers"):
        load([path], tokenizer, Means(cache, 4, print))
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    assert [one for one in cache.iterdir() if one.is_dir()] == []


CHANGES = {
    "a word of the text": lambda path, tokenizer, kind: path.write_bytes(path.read_bytes().replace(b"the", b"teh", 1)),
    "the rules": lambda path, tokenizer, kind: kind.update(max_length=100),
    "the template": lambda path, tokenizer, kind: setattr(
        tokenizer, "chat_template", "{# the same text #}" + tokenizer.chat_template
    ),
    "a token": lambda path, tokenizer, kind: tokenizer.add_tokens("function"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_set_made_of_anything_else_is_not_used(tmp_path, kept_from_the_first_byte, change):
    tokenizer = load_tokenizer(str(TINY), revision="main", trust_remote_code=False)
    path, kind, said = tmp_path / "a.jsonl", {"max_length": 512}, []
    means = Means(tmp_path / "cache", 1, said.append)
    mixed(path, random.Random(5))
    load([path], tokenizer, means, **kind)
    CHANGES[change](path, tokenizer, kind)
    assert facts(load([path], tokenizer, means, **kind)) == facts(load([path], tokenizer, **kind))
    assert len(said) == 2 and all("are kept" in line for line in said)
    assert len([one for one in (tmp_path / "cache").iterdir() if one.is_dir()]) == 2


DAMAGE = {
    "a bit": lambda kept, name: (kept / name).write_bytes(flipped((kept / name).read_bytes())),
    "cut short": lambda kept, name: os.truncate(kept / name, (kept / name).stat().st_size // 2),
    "missing": lambda kept, name: (kept / name).unlink(),
}


def flipped(data: bytes) -> bytes:
    at = secrets.randbelow(len(data))
    return data[:at] + bytes([data[at] ^ 1 << secrets.randbelow(8)]) + data[at + 1 :]


@pytest.mark.parametrize("name", [documents.TOKEN_IDS, documents.LOSS_MASK, documents.NUMBERS, tokencache.INDEX])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_set_is_said_and_made_anew(tmp_path, tokenizer, kept_from_the_first_byte, name, damage):
    path, said = mixed(tmp_path / "a.jsonl", random.Random(7), num_rows=40), []
    means = Means(tmp_path / "cache", 1, said.append)
    expected = facts(load([path], tokenizer, means))
    in_use = load([path], tokenizer, means)
    (kept,) = [one for one in (tmp_path / "cache").iterdir() if one.is_dir()]
    if damage != "missing":  # a process that has mapped a file keeps it only if it is replaced, not written to
        shutil.copytree(kept, tmp_path / "copy")
        shutil.rmtree(kept)
        shutil.copytree(tmp_path / "copy", kept)
    DAMAGE[damage](kept, name)
    assert facts(load([path], tokenizer, means)) == expected
    assert any("are damaged" in line and "tokenised anew" in line for line in said)
    assert facts(load([path], tokenizer, means)) == expected and "used again" in said[-1]
    assert facts(in_use) == expected


def test_what_was_not_finished_is_never_found(tmp_path, tokenizer, monkeypatch, kept_from_the_first_byte):
    path = mixed(tmp_path / "a.jsonl", random.Random(7), num_rows=40)
    means, expected = Means(tmp_path / "cache", 1, print), facts(load([path], tokenizer))
    for step in ("_sync", "_crc32"):
        with monkeypatch.context() as patch:
            patch.setattr(tokencache, step, lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(DataError, match="no space left on device.*data.cache"):
                load([path], tokenizer, means)
        assert [one for one in (tmp_path / "cache").iterdir() if one.is_dir()] == []
    (tmp_path / "cache" / f".{'0' * 32}.partial-0").mkdir()
    assert facts(load([path], tokenizer, means)) == expected
    grown = Path(path)

    def growing(*args):
        grown.write_bytes(grown.read_bytes() + b"\n")
        return read(*args)

    read = conversations.read
    with monkeypatch.context() as patch:
        patch.setattr(conversations, "read", growing)
        grown.write_bytes(grown.read_bytes() + b"\n")
        with pytest.raises(DataError, match="stays as it is while it is read"):
            load([path], tokenizer, means)
    assert len([one for one in (tmp_path / "cache").iterdir() if one.is_dir() and one.name[0] != "."]) == 1


def test_a_disk_that_fills_up_is_said_and_nothing_is_left(tmp_path, tokenizer, monkeypatch, kept_from_the_first_byte):
    path, cache = mixed(tmp_path / "a.jsonl", random.Random(7)), tmp_path / "cache"

    def filling(*args):  # what is still in a buffer meets the limit when the file is closed
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        taken = read(*args)
        patch.callback(signal.signal, signal.SIGXFSZ, signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
        patch.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        return taken

    read = conversations.read
    monkeypatch.setattr(conversations, "read", filling)
    with contextlib.ExitStack() as patch, pytest.raises(DataError, match="a folder that can be written.*file too large"):
        load([path], tokenizer, Means(cache, 1, print))
    assert [one for one in cache.iterdir() if one.is_dir()] == []


def test_only_sets_that_no_run_has_used_for_long_are_removed(tmp_path, tokenizer, kept_from_the_first_byte):
    cache, long_ago = tmp_path / "cache", 1_000_000_000
    theirs = [
        "thesis/x.txt",
        "chats.jsonl",
        f"{'a' * 32}/x.txt",
        f".{'b' * 32}.lock",
        f"{'c' * 31}/index.json",
        ".d.partial-0/x",
    ]
    unused = [f"{'e' * 32}/index.json", f".{'e' * 32}.partial-0/token_ids.bin", f".{'f' * 32}.old/index.json"]
    used = [f"{'1' * 32}/index.json", f".{'1' * 32}.partial-0/token_ids.bin"]
    for name in theirs + unused + used:
        path = cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        if name not in used:
            os.utime(path, (long_ago, long_ago))
            os.utime(path.parent, (long_ago, long_ago))
    load([mixed(tmp_path / "a.jsonl", random.Random(7), num_rows=40)], tokenizer, Means(cache, 1, print))
    assert all((cache / name).exists() for name in theirs + used)
    assert not any((cache / name).parent.exists() for name in unused)


def test_two_processes_without_file_locks_do_not_disturb_each_other(tmp_path, tokenizer, monkeypatch, kept_from_the_first_byte):
    path, cache, read = mixed(tmp_path / "a.jsonl", random.Random(7), num_rows=40), tmp_path / "cache", conversations.read
    expected, others = facts(load([path], tokenizer)), []

    def read_with_another(*args):
        read_so_far = read(*args)
        monkeypatch.setattr(conversations, "read", read)
        others.append(load([path], tokenizer, Means(cache, 1, print)))  # from its start to its end
        return read_so_far

    def died(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokencache.fcntl, "flock", lambda *args: (_ for _ in ()).throw(OSError(37, "No locks available")))
        monkeypatch.setattr(conversations, "read", read_with_another)
        assert facts(load([path], tokenizer, Means(cache, 1, print))) == expected == facts(others[0])
        patch.setattr(conversations, "read", died)
        patch.setattr(tokencache.Making, "discard", lambda making: making.columns.close())
        Path(path).write_bytes(Path(path).read_bytes() + b"\n")
        with pytest.raises(KeyboardInterrupt):
            load([path], tokenizer, Means(cache, 1, print))
    assert len(list(cache.glob(".*.partial-*"))) == 1
    load([path], tokenizer, Means(cache, 1, print))  # with the lock held, nobody else can be at it
    assert list(cache.glob(".*.partial-*")) == []


def test_a_data_set_of_the_hub_is_kept_however_little_room_there_is_for_a_large_one(tmp_path, tokenizer, monkeypatch):
    row = Row("hf:a/b", 1, CHATS[0])
    monkeypatch.setattr(conversations, "open_path", lambda path: Source(path, "c" * 40, iter([row]), path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1 << 24))
    said = []
    assert len(load(["hf:a/b"], tokenizer, Means(tmp_path / "cache", 1, said.append)).documents) == 1
    assert len(said) == 1 and "kept for the next run" in said[0]


def test_a_text_that_changes_while_another_process_is_waited_for_is_not_kept(
    tmp_path, tokenizer, monkeypatch, kept_from_the_first_byte
):
    path, cache, alone = tmp_path / "a.jsonl", tmp_path / "cache", tokencache.alone
    mixed(path, random.Random(7), num_rows=40)
    first = path.read_bytes()

    def waiting(*args):
        path.write_bytes(first + first)
        return alone(*args)

    with monkeypatch.context() as patch, pytest.raises(DataError, match="stays as it is while it is read"):
        patch.setattr(tokencache, "alone", waiting)
        load([path], tokenizer, Means(cache, 1, print))
    path.write_bytes(first)
    assert facts(load([path], tokenizer, Means(cache, 1, print))) == facts(load([path], tokenizer))


def test_room_is_looked_at_first_and_small_or_unnamed_texts_are_not_kept(tmp_path, tokenizer, monkeypatch):
    path, cache = mixed(tmp_path / "a.jsonl", random.Random(7), num_rows=40), tmp_path / "cache"
    load([path], tokenizer, Means(cache, 1, print))
    assert not cache.exists()
    monkeypatch.setattr(tokencache, "KEPT_FROM_BYTES", 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=1000))
    with pytest.raises(DataError, match=r"0\.0 GiB for tokens.*data\.cache=") as caught:
        load([path], tokenizer, Means(cache, 1, print))
    assert caught.value.exit_code == 2 and [one for one in cache.iterdir() if one.is_dir()] == []
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(DataError, match="a folder that can be written.*data.cache"):
        load([path], tokenizer, Means(blocked, 1, print))
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    writer = os.fork()
    if not writer:
        pipe.write_bytes(Path(path).read_bytes())
        os._exit(0)
    monkeypatch.undo()
    assert len(load([pipe], tokenizer, Means(cache, 1, print)).documents) > 10
    os.waitpid(writer, 0)


def test_a_list_of_documents_holds_none_of_them(tmp_path, tokenizer):
    loaded = load([mixed(tmp_path / "a.jsonl", random.Random(2))], tokenizer)
    assert isinstance(loaded.documents, DocumentList) and loaded.documents[0] is not loaded.documents[0]
    assert loaded.num_tokens == sum(len(one.token_ids) for one in loaded.documents)
    assert math.isclose(loaded.num_supervised_tokens, sum(one.loss_mask.sum() for one in loaded.documents))
