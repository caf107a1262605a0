"""Checkpoints come back bit for bit, every kind of damage is seen, and pruning deletes nothing that is still wanted."""

import json
import os
import random
import resource
import shutil
import signal
import stat

import pytest
import torch

from graphcap.errors import CheckpointError
from graphcap.ops import checkpoint

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8)


def random_tensors() -> dict[str, torch.Tensor]:
    """Every bit pattern of every dtype, nan payloads included; 0-d, empty, strided and overlapping tensors too."""
    raw = {str(dtype): torch.randint(0, 256, (64,), dtype=torch.uint8).view(dtype) for dtype in DTYPES}
    flat = torch.randn(60)
    return raw | {
        "bool": torch.rand(7) > 0.5,
        "scalar": torch.randn((), dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "view": flat[4:24],
        "overlapping": flat[10:40],
        "strided": flat.view(6, 10).t(),
        "expanded": torch.randn(1).expand(5),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }


def bits(tensor: torch.Tensor) -> tuple:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), raw.numpy().tobytes()


def save(folder, update, score=None, keep=2, **documents):
    tensors = {"model.safetensors": {"w_D": torch.randn(50)}, "state.safetensors": {"m_D": torch.randn(50)}}
    documents = {"state.json": {"update": update, **documents}}
    return checkpoint.save(folder, update, tensors=tensors, documents=documents, score=score, keep=keep)


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_tensors_and_documents_come_back_bit_for_bit(tmp_path):
    tensors = random_tensors()
    document = {"seed": random.getrandbits(63), "text": "ä\n", "list": (1, 2.5, None), "float": random.random()}
    path = checkpoint.save(
        tmp_path / "a" / "checkpoints",
        120,
        tensors={"model.safetensors": tensors},
        documents={"state.json": document},
        score=1.5,
        keep=1,
    )
    assert path.name == "update-00000120" and names(path.parent) == [path.name] and checkpoint.verify(path) == ""
    loaded = checkpoint.load_tensors(path, "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name in tensors:
        assert bits(loaded[name]) == bits(tensors[name]), name
    assert checkpoint.load_document(path, "state.json") == document | {"list": [1, 2.5, None]}
    manifest = checkpoint.read_manifest(path)
    assert (manifest["version"], manifest["update"], manifest["score"]) == (1, 120, 1.5)
    assert manifest["files"]["model.safetensors"]["bytes"] == (path / "model.safetensors").stat().st_size
    loaded["view"][0] += 1  # must fail: the comparison sees a single changed element
    assert bits(loaded["view"]) != bits(tensors["view"])


def test_every_file_is_readable_by_whoever_may_read_the_folder(tmp_path):
    path = save(tmp_path, 1)
    modes = {stat.S_IMODE((path / name).stat().st_mode) for name in names(path)}
    assert modes == {stat.S_IMODE(path.stat().st_mode) & 0o666}


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
def test_a_changed_byte_a_lost_end_and_a_lost_file_are_seen(tmp_path, name):
    path = save(tmp_path / "whole", 7, score=0.5)
    data = (path / name).read_bytes()

    def reason(change) -> str:
        shutil.rmtree(tmp_path / "hurt", ignore_errors=True)
        shutil.copytree(path, tmp_path / "hurt")
        change(tmp_path / "hurt" / name)
        return checkpoint.verify(tmp_path / "hurt")

    assert reason(lambda file: file.write_bytes(data)) == ""
    for _ in range(40):
        place, flip = random.randrange(len(data)), random.randrange(1, 256)
        changed = data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
        assert name in reason(lambda file: file.write_bytes(changed)), f"byte {place} xor {flip}"
        size = random.randrange(len(data))
        why = reason(lambda file: file.write_bytes(data[:size]))
        assert name in why and (name == "manifest.json" or why == f"{name} has {size} of {len(data)} bytes")
    assert reason(lambda file: file.write_bytes(data + b"x")) != ""
    assert reason(os.unlink) == f"no {name}"


def test_loading_from_a_damaged_checkpoint_is_refused_and_names_the_file(tmp_path):
    path = save(tmp_path, 7)
    with pytest.raises(CheckpointError, match="no other.safetensors among its files"):
        checkpoint.load_tensors(path, "other.safetensors")
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    checkpoint.load_tensors(path, "state.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors: hash differs.*Fix: "):
        checkpoint.load_tensors(path, "model.safetensors")
    (path / "state.json").unlink()
    for refused in (lambda: checkpoint.load_tensors(path, "state.safetensors"), lambda: checkpoint.read_manifest(path)):
        with pytest.raises(CheckpointError, match="got no state.json"):
            refused()
    assert checkpoint.verify(tmp_path / "missing") == "no such folder"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"version": 1}',
        '{"version": 1, "sha256": "", "score": NaN}',
        "\ud800",
    ],
)
def test_a_manifest_of_any_content_gives_a_reason_not_a_crash(tmp_path, text):
    path = save(tmp_path, 7)
    (path / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    assert checkpoint.verify(path).startswith("manifest.json")
    assert checkpoint.newest(tmp_path)[0] is None and checkpoint.best(tmp_path) is None


def test_a_manifest_of_another_version_is_passed_over_with_the_version_named(tmp_path):
    path = save(tmp_path, 7)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
    assert "version 1" in checkpoint.verify(path)


def test_newest_passes_over_what_is_damaged_and_says_why(tmp_path):
    good = [save(tmp_path, update, keep=9) for update in (5, 10, 15)]
    assert checkpoint.newest(tmp_path) == (good[2], [])
    file = good[2] / "state.safetensors"
    size = file.stat().st_size
    os.truncate(file, size // 2)
    (good[1] / "manifest.json").unlink()
    (tmp_path / ".update-00000020.partial").mkdir()
    (tmp_path / ".update-00000004.partial").mkdir()
    (tmp_path / "update-00000030.txt").touch()
    assert checkpoint.newest(tmp_path) == (
        good[0],
        [
            f"update-00000015: state.safetensors has {size // 2} of {size} bytes",
            "update-00000010: no manifest.json",
            ".update-00000020.partial: a save that did not finish",
        ],
    )
    assert checkpoint.newest(tmp_path / "missing") == (None, [])
    (good[0] / "state.json").unlink()
    assert checkpoint.newest(tmp_path)[0] is None and len(checkpoint.newest(tmp_path)[1]) == 5


def test_newest_orders_by_number_not_by_text(tmp_path):
    save(tmp_path, 99_999_999)
    assert save(tmp_path, 100_000_000) == checkpoint.newest(tmp_path)[0]


def test_best_is_the_highest_score_among_complete_ones_and_of_equals_the_newest(tmp_path):
    assert checkpoint.best(tmp_path / "missing") is None
    save(tmp_path, 1, score=None, keep=9)
    save(tmp_path, 2, score=float("nan"), keep=9)
    assert checkpoint.best(tmp_path) is None
    scores = {3: -2.0, 4: 3.5, 5: 3.5, 6: 1.0}
    paths = {update: save(tmp_path, update, score=score, keep=9) for update, score in scores.items()}
    assert checkpoint.best(tmp_path) == paths[5]
    data = bytearray((paths[5] / "state.safetensors").read_bytes())
    data[-1] ^= 1
    (paths[5] / "state.safetensors").write_bytes(data)
    assert checkpoint.best(tmp_path) == paths[4]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_pruning_keeps_the_newest_and_the_best_against_a_naive_list(tmp_path, keep):
    scores = []
    for update in range(1, 13):
        scores.append((random.choice([None, random.randrange(4) * 0.5]), update))
        save(tmp_path, update, score=scores[-1][0], keep=keep)
        scored = [pair for pair in scores if pair[0] is not None]
        wanted = {pair[1] for pair in scores[-keep:]} | ({max(scored)[1]} if scored else set())
        assert names(tmp_path) == [f"update-{n:08d}" for n in sorted(wanted)]
        scores = [pair for pair in scores if pair[1] in wanted]


def test_pruning_never_deletes_the_checkpoint_just_saved_nor_a_damaged_newer_one(tmp_path):
    newer = [save(tmp_path, update, keep=9) for update in (20, 30, 40)]
    (newer[2] / "manifest.json").unlink()
    old = save(tmp_path, 2, keep=9)
    (old / "manifest.json").unlink()
    save(tmp_path, 10, keep=1)
    assert names(tmp_path) == ["update-00000010", "update-00000030", "update-00000040"]
    assert save(tmp_path, 40) == newer[2] and checkpoint.verify(newer[2]) == ""


def test_saving_the_same_content_again_leaves_the_checkpoint_and_other_content_replaces_it(tmp_path):
    tensors = {"model.safetensors": {"w_D": torch.randn(50)}}
    first = checkpoint.save(tmp_path, 5, tensors=tensors, documents={}, score=1.0, keep=2)
    inode = first.stat().st_ino
    assert checkpoint.save(tmp_path, 5, tensors=tensors, documents={}, score=1.0, keep=2).stat().st_ino == inode
    tensors["model.safetensors"]["w_D"][7] += 1
    again = checkpoint.save(tmp_path, 5, tensors=tensors, documents={}, score=1.0, keep=2)
    assert again == first and again.stat().st_ino != inode and names(tmp_path) == ["update-00000005"]
    assert torch.equal(checkpoint.load_tensors(again, "model.safetensors")["w_D"], tensors["model.safetensors"]["w_D"])
    checkpoint.save(tmp_path, 5, tensors=tensors, documents={}, score=2.0, keep=2)
    assert checkpoint.read_manifest(again)["score"] == 2.0


def test_a_replacement_that_died_between_its_renames_is_found_and_cleared_up(tmp_path):
    old = save(tmp_path, 5, side="old")
    old.rename(tmp_path / "update-00000005.old")
    assert checkpoint.newest(tmp_path) == (tmp_path / "update-00000005.old", [])
    save(tmp_path, 6, keep=2)
    assert names(tmp_path) == ["update-00000005", "update-00000006"]
    assert checkpoint.load_document(old, "state.json")["side"] == "old"
    shutil.copytree(old, tmp_path / "update-00000005.old")  # died later: the new one stands beside it
    os.truncate(old / "state.safetensors", 5)  # and was damaged since
    save(tmp_path, 7, keep=9)
    assert names(tmp_path) == [f"update-0000000{n}" for n in (5, 6, 7)] and checkpoint.verify(old) == ""


def in_child(action) -> int:
    """Run `action` in a fork, whose limits are its own; the exit code, 99 for an exception that got out."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("limit_bytes", [0, 100, 3000, 20_000])
def test_a_refused_write_leaves_nothing_half_and_the_older_ones_intact(tmp_path, limit_bytes):
    old = save(tmp_path, 1)
    tensors = {"a.safetensors": {"w": torch.randn(500)}, "b.safetensors": {"w": torch.randn(9000)}}

    def fill_up():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path, 2, tensors=tensors, documents={"s.json": {"a": "b" * 50}}, score=None, keep=1)
        text = str(caught.value)
        assert str(tmp_path) in text and "too large" in text
        assert f"{checkpoint.needed_bytes(tensors) + 63:,} bytes" in text
        assert "bytes are free" in text and "Fix: free space" in text

    assert in_child(fill_up) == 0
    assert names(tmp_path) == [old.name] and checkpoint.verify(old) == ""
    new = checkpoint.save(tmp_path, 2, tensors=tensors, documents={}, score=None, keep=1)
    assert names(tmp_path) == [new.name]


def test_room_is_computed_from_the_tensors_and_compared_with_the_disk(tmp_path):
    tensors = {"a.safetensors": random_tensors(), "b.safetensors": {"w": torch.randn(1000)}}
    path = checkpoint.save(tmp_path / "c", 1, tensors=tensors, documents={}, score=None, keep=1)
    written = sum((path / name).stat().st_size for name in tensors)
    needed = checkpoint.needed_bytes(tensors)
    assert written <= needed <= written + 512 * 20
    checkpoint.check_room(tmp_path / "not" / "there", needed)
    with pytest.raises(CheckpointError, match=r"expected 1,152,921,504,606,846,976 bytes free, got [\d,]+ bytes"):
        checkpoint.check_room(tmp_path / "not" / "there", 1 << 60)
    assert not (tmp_path / "not").exists()


def test_a_save_that_cannot_fit_is_refused_before_a_byte_is_written(tmp_path):
    old = save(tmp_path, 1)
    huge = {"a.safetensors": {"w": torch.empty(1, dtype=torch.uint8).expand(1 << 60)}}
    with pytest.raises(CheckpointError, match="bytes free"):
        checkpoint.save(tmp_path, 2, tensors=huge, documents={}, score=None, keep=1)
    assert names(tmp_path) == [old.name]


@pytest.mark.parametrize("document", [{"loss": float("nan")}, {"best": float("-inf")}, {"ranks": {0: 1}}])
def test_a_document_that_json_would_change_is_our_bug_and_stops_before_anything_is_written(tmp_path, document):
    with pytest.raises((AssertionError, ValueError)):
        save(tmp_path / "c", 1, **document)
    assert not (tmp_path / "c").exists()


def test_written_json_and_text_are_whole_and_leave_no_other_file(tmp_path):
    checkpoint.write_json(tmp_path / "result.json", {"b": float("inf"), "a": (1, {"c": float("nan")}), "ü": 2.5})
    written = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert written == {"a": [1, {"c": None}], "b": None, "ü": 2.5}
    checkpoint.write_text(tmp_path / "config.toml", "a = 1\r\n")
    assert (tmp_path / "config.toml").read_bytes() == b"a = 1\r\n" and names(tmp_path) == ["config.toml", "result.json"]


def test_a_refused_write_of_text_leaves_the_old_text(tmp_path):
    checkpoint.write_text(tmp_path / "end.json", "old")

    def fill_up():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2, 2))
        with pytest.raises(OSError):
            checkpoint.write_text(tmp_path / "end.json", "newer")

    assert in_child(fill_up) == 0
    assert (tmp_path / "end.json").read_text() == "old" and names(tmp_path) == ["end.json"]
