"""`graphcap extract` and training from its folder, through the command line, on the tiny target."""

import errno
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graphcap import build, cli, config
from graphcap.data.features import HEADER_BYTES, INDEX, FeatureStore
from graphcap.ops import checkpoint, ending, rank
from graphcap.ops.features import FeatureFolder, FeatureWriter
from graphcap.ops.launch import Supervisor
from graphcap.ops.progress import read_metrics, without_clock

SMALL = (
    *("optimizer.max_updates=2", "optimizer.rows_per_update=2", "optimizer.epochs=1", "eval.every=1", "checkpoint.every=1"),
    *("eval.documents=3", "eval.prompts=1", "eval.passes=1", "eval.max_new_tokens=4", "shapes.row_length=256"),
    *("shapes.max_buckets=2", "run.threads=1", "run.device=cpu", "features.shard_bytes=10000000"),
)

# A rank that has its supervisor asked for a stop while it writes features, and goes on once that has come back to it.
STOPPED_RANK = """
import os, signal, sys, time
from graphcap import cli
from graphcap.ops.features import FeatureWriter
from graphcap.ops.rank import Rank

add, stop_asked, added = FeatureWriter.add, Rank.stop_asked, []

def adding(self, *arguments):
    add(self, *arguments)
    added.append(1)
    if len(added) == 3:
        os.kill(int(os.environ["GRAPHCAP_SUPERVISOR"]), signal.SIGTERM)

def once_asked(self):
    while len(added) >= 3 and not stop_asked(self):
        time.sleep(0.01)
    return stop_asked(self)

FeatureWriter.add, Rank.stop_asked = adding, once_asked
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The first conversations of the tiny target's own."""
    folder = tmp_path_factory.mktemp("data")
    lines = Path("graphcap/assets/tiny/conversations/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, count in (("short", 20), ("train", 40), ("held_out", 45)):
        (folder / f"{name}.jsonl").write_text("".join(lines[count - 5 if name == "held_out" else 0 : count]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def small(data) -> list[str]:
    return ["runs/tiny.toml", *SMALL, f"data.held_out={data}/held_out.jsonl", f"data.train={data}/train.jsonl"]


@pytest.fixture(scope="module")
def stored(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("features") / "store"
    assert cli.main(["extract", *small, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def online(small, tmp_path_factory) -> Path:
    """A run that computes its features."""
    out = tmp_path_factory.mktemp("online")
    assert cli.main(["train", "--here", *small, f"run.out={out}", "run.name=run"]) == 0
    return out / "run"


def trained(small, out: Path, *more: str) -> Path:
    assert cli.main(["train", "--here", *small, f"run.out={out}", "run.name=run", *more]) == 0
    return out / "run"


def refused(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert cli.main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphcap: ") and ". Fix: " in error and "Traceback" not in error
    return error


def state_of(run: Path) -> dict[str, torch.Tensor]:
    newest = run / "checkpoints" / "update-00000002"
    return {**load_file(newest / "model.safetensors"), **load_file(newest / "state.safetensors")}


def lines_of(run: Path) -> list[dict]:
    return [without_clock(line) for line in read_metrics(run / "metrics.jsonl")]


def same(left: Path, right: Path) -> bool:
    one, other = state_of(left), state_of(right)
    equal = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return equal and lines_of(left) == lines_of(right)


def with_one_element_changed(stored: Path, folder: Path) -> None:
    """The same store, but for one number of the first training document."""
    store, place = FeatureStore(stored), FeatureFolder(folder)
    writer = place.writer(store.kind, shard_bytes=1 << 30)
    for key, digest, num_tokens in zip(*(store._table[name].tolist() for name in ("key", "digest", "num_tokens"))):
        values = np.zeros((num_tokens, store.kind.num_features), store.kind.host_dtype)
        store.read(key // 2, bool(key % 2), values)
        if key == min(key for key in store._table["key"] if key % 2 == 0):
            values[0, 0] += 1.0
        writer.add(key // 2, bool(key % 2), np.zeros(num_tokens, np.int32), values)
        writer._rows[-1] = (*writer._rows[-1][:1], digest, *writer._rows[-1][2:])
    writer.close()
    place.close()


def test_training_from_features_is_bit_equal_to_computing_them_with_no_target_in_memory(
    small, stored, online, tmp_path, monkeypatch
):
    def no_target(*arguments, **keywords):
        raise AssertionError("training from features loads no target")

    monkeypatch.setattr(build, "load_model", no_target)
    monkeypatch.setattr(build, "Target", no_target)
    assert same(trained(small, tmp_path, f"features.path={stored}"), online)
    state = json.loads((tmp_path / "run/checkpoints/update-00000002/state.json").read_text())
    assert state == json.loads((online / "checkpoints/update-00000002/state.json").read_text())
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")] == []


def test_must_fail_one_changed_element_of_the_features_gives_another_run(small, stored, online, tmp_path):
    with_one_element_changed(stored, tmp_path / "changed")
    assert not same(trained(small, tmp_path, f"features.path={tmp_path / 'changed'}"), online)


def test_a_run_from_features_stops_on_request_and_goes_on_bit_equal(small, stored, online, tmp_path, monkeypatch):
    arguments = ["train", "--here", *small, f"run.out={tmp_path}", "run.name=run", f"features.path={stored}"]
    with monkeypatch.context() as patch:
        patch.setattr(rank.Rank, "stop_asked", lambda self: True)
        assert cli.main(arguments) == 3
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")] == []
    assert cli.main(arguments) == 0
    assert same(tmp_path / "run", online)


def test_what_is_missing_is_refused_or_computed_and_kept_and_the_same_command_goes_on(small, data, online, tmp_path, capsys):
    out, short = tmp_path / "store", [*small[:-1], f"data.train={data}/short.jsonl"]
    assert cli.main(["extract", *short, "--out", str(out)]) == 0
    before = FeatureStore(out)
    train = ["train", "--here", *small, f"run.out={tmp_path}", "run.name=run", f"features.path={out}"]
    assert "documents without, first train " in refused(capsys, *train)
    assert not (tmp_path / "run").exists()
    assert "none" not in refused(capsys, *train[:-1], f"features.path={tmp_path / 'nothing'}")
    assert cli.main([*train, "features.missing=compute"]) == 0
    after = FeatureStore(out)
    assert after.shards[: len(before.shards)] == before.shards and after.num_documents > before.num_documents
    assert lines_of(tmp_path / "run")[0]["loss"] == pytest.approx(lines_of(online)[0]["loss"], rel=1e-4)  # other rows
    capsys.readouterr()
    assert cli.main(["extract", *small, "--out", str(out)]) == 0
    assert f"lists every document of the recipe; graphcap extract --check {out} reads their bytes" in capsys.readouterr().out


def test_an_extract_that_is_interrupted_keeps_its_work_and_goes_on(small, stored, tmp_path, monkeypatch, capsys):
    command, added = ["extract", *small, "--out", str(tmp_path / "store")], []

    def interrupted(self, *arguments):
        if len(added) == 5:
            raise KeyboardInterrupt
        added.append(arguments)
        add(self, *arguments)

    add = FeatureWriter.add
    with monkeypatch.context() as patch:
        patch.setattr(FeatureWriter, "add", interrupted)
        assert cli.main(command) == 3
    assert "stopped on request; the same command continues" in capsys.readouterr().err
    kept = FeatureStore(tmp_path / "store")
    assert kept.num_documents == 5
    assert cli.main(command) == 0
    whole, again = FeatureStore(stored), FeatureStore(tmp_path / "store")
    assert again.shards[0] == kept.shards[0]
    for name in ("key", "digest", "crc32"):  # of the bits
        assert np.array_equal(whole._table[name], again._table[name])


@pytest.fixture
def heard():
    """SIGHUP as a terminal starts programs, not ignored as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGHUP, signal.SIGHUP), (signal.SIGUSR1,), (signal.SIGINT,)])
def test_a_signal_lets_extract_keep_its_work_and_go_on(numbers, heard, small, stored, tmp_path, monkeypatch, capsys):
    command, added, add = ["extract", *small, "--out", str(tmp_path / "store")], [], FeatureWriter.add

    def signalled(self, *arguments):
        add(self, *arguments)
        added.append(arguments)
        for number in numbers if len(added) == 5 else ():
            os.kill(os.getpid(), number)

    before = [signal.getsignal(number) for number in numbers]
    with monkeypatch.context() as patch:
        patch.setattr(FeatureWriter, "add", signalled)
        assert cli.main(command) == 3
    assert [signal.getsignal(number) for number in numbers] == before
    assert "graphcap: stopped on request; the same command continues with what is missing\n" in capsys.readouterr().err
    kept = FeatureStore(tmp_path / "store")
    assert 5 <= kept.num_documents == len(added) < FeatureStore(stored).num_documents
    assert cli.main(command) == 0
    whole, again = FeatureStore(stored), FeatureStore(tmp_path / "store")
    assert again.shards[0] == kept.shards[0]
    for name in ("key", "digest", "crc32"):  # of the bits
        assert np.array_equal(whole._table[name], again._table[name])


def test_a_run_that_is_stopped_while_it_computes_features_keeps_them_each_time(small, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    (tmp_path / "rank.py").write_text(STOPPED_RANK)
    store = tmp_path / "store"
    overrides = [*small[1:], f"run.out={tmp_path}", "run.name=run", f"features.path={store}", "features.missing=compute"]
    recipe, counts = config.load_recipe(small[0], overrides), [0]
    for _ in range(2):
        program, told = (sys.executable, str(tmp_path / "rank.py")), []
        supervisor = Supervisor(recipe, ["train", small[0], *overrides], told.append, program=program)
        assert supervisor.run() == 3, told
        counts.append(FeatureStore(store).num_documents)
        end = ending.read(recipe.folder, ending.END)
        assert ending.headline(end).startswith("stopped · on request (SIGTERM) · no checkpoint yet · continue: graphcap train ")
        assert "stopped   before training; the same command goes on" in told
    assert 3 <= counts[1] and counts[1] + 3 <= counts[2], counts


def test_features_of_other_taps_another_dtype_or_another_target_are_refused(small, stored, tmp_path, capsys):
    train = ["train", "--here", *small, f"run.out={tmp_path}/out", f"features.path={stored}"]
    error = refused(capsys, *train, "drafter.target_layer_ids=1,3,5,7,8")
    assert "[1, 3, 5, 7, 8]" in error and "[1, 3, 5, 7, 9]" in error
    assert "bfloat16" in refused(capsys, *train, "target.dtype=bfloat16")
    target = Path(shutil.copytree("graphcap/assets/tiny", tmp_path / "other", ignore=shutil.ignore_patterns("conversations")))
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    assert "fingerprint" in refused(capsys, *train, f"target.path={target}")
    assert not (tmp_path / "out").exists()


def test_damage_is_refused_before_training_or_ends_it_by_name_and_extract_mends_it(small, stored, online, tmp_path, capsys):
    store = Path(shutil.copytree(stored, tmp_path / "store"))
    train = ["train", "--here", *small, f"run.out={tmp_path}", "run.name=run", f"features.path={store}"]
    shard = FeatureStore(store).shards[0]
    whole = (store / shard.name).read_bytes()
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(whole[:-1])):
        damage(store / shard.name)
        for arguments in (train, ["extract", "--check", str(store)]):
            assert shard.name in (error := refused(capsys, *arguments)) and shard.first in error
        (store / shard.name).write_bytes(whole)
    assert not (tmp_path / "run").exists()
    flipped = bytearray(whole)
    flipped[HEADER_BYTES + 5] ^= 4
    (store / shard.name).write_bytes(flipped)
    error = refused(capsys, *train)
    assert shard.name in error and f"document {shard.first}:" in error
    assert f"{shard.name} ({shard.first})" in refused(capsys, "extract", "--check", str(store))
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")] == []
    assert f"graphcap extract RECIPE --out {store} computes" in error
    assert "damage found before" in refused(capsys, *train)
    assert cli.main(["extract", *small, "--out", str(store)]) == 0
    assert f"given up  {shard.name}: damage found before: " in capsys.readouterr().out
    assert cli.main(["extract", "--check", str(store)]) == 0
    assert "whole and sound" in capsys.readouterr().out
    assert cli.main(train) == 0 and same(tmp_path / "run", online)


def test_a_lost_index_is_refused_by_name_and_written_anew_by_extract_or_by_a_run_that_computes(
    small, stored, online, tmp_path, capsys
):
    store = Path(shutil.copytree(stored, tmp_path / "store"))
    train = ["train", "--here", *small, f"run.out={tmp_path}", "run.name=run", f"features.path={store}"]
    whole = (store / INDEX).read_text()
    (store / INDEX).write_text(whole.replace("0", "1", 1))
    for arguments in (train, ["extract", "--check", str(store)]):
        assert f"graphcap extract RECIPE --out {store} writes it anew" in refused(capsys, *arguments)
    assert cli.main(["extract", *small, "--out", str(store)]) == 0
    assert f"{INDEX} is written anew from {len(FeatureStore(store).shards)} shards" in capsys.readouterr().out
    assert (store / INDEX).read_text() == whole
    (store / INDEX).unlink()
    assert cli.main([*train, "features.missing=compute"]) == 0 and same(tmp_path / "run", online)


@pytest.mark.parametrize("place", [HEADER_BYTES + 5, -1])
def test_a_run_that_computes_what_is_missing_computes_what_is_damaged_too(place, small, stored, online, tmp_path, capsys):
    store = Path(shutil.copytree(stored, tmp_path / "store"))
    shard = FeatureStore(store).shards[0]
    flipped = bytearray((store / shard.name).read_bytes())
    flipped[place] ^= 4
    (store / shard.name).write_bytes(flipped)
    train = ["train", "--here", *small, f"run.out={tmp_path}", "run.name=run", f"features.path={store}"]
    train += ["features.missing=compute"]
    if place >= 0:
        assert "its CRC-32 differs" in refused(capsys, *train)
        end = ending.headline(ending.read(tmp_path / "run", ending.END))
        assert " · then continue: graphcap train " in end and f"graphcap extract RECIPE --out {store} computes" in end
    assert cli.main(train) == 0 and same(tmp_path / "run", online)
    assert cli.main(["extract", "--check", str(store)]) == 0


def test_a_disk_that_is_too_small_is_refused_before_the_target_is_loaded(small, tmp_path, capsys, monkeypatch):
    from graphcap import extract

    monkeypatch.setattr(checkpoint, "disk_free_bytes", lambda folder: 10**6)
    monkeypatch.setattr(extract, "load_model", lambda *arguments, **keywords: pytest.fail("the target was loaded"))
    error = refused(capsys, "extract", *small, "--out", str(tmp_path / "store"))
    assert "1,000,000 bytes" in error and "another disk with --out FOLDER" in error
    train = ["train", "--here", *small, f"run.out={tmp_path}/out", f"features.path={tmp_path}/store"]
    error = refused(capsys, *train, "features.missing=compute")
    assert "1,000,000 bytes" in error and "another disk with features.path=FOLDER" in error and "--out" not in error
    assert not list(tmp_path.iterdir())


def test_a_disk_that_gets_full_is_told_with_folder_and_shard_and_what_was_computed_stays(small, tmp_path, capsys, monkeypatch):
    out, written, pwrite = tmp_path / "store", [], os.pwrite

    def full(*arguments):
        if len(written) == 7:
            written.append(0)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(pwrite(*arguments))
        return written[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        error = refused(capsys, "extract", *small, "--out", str(out))
    assert f"features '{out}': expected a file system that takes shard-" in error and "No space left on device" in error
    assert "bytes are free" in error and "checkpoint" not in error and "it computes what is missing" in error
    assert FeatureStore(out).num_documents > 0
    assert cli.main(["extract", *small, "--out", str(out)]) == 0


@pytest.mark.parametrize("place", ["{file}/a", "/proc/aa"])
def test_a_folder_that_cannot_be_made_is_refused(place, small, data, capsys):
    out = place.format(file=data / "short.jsonl")
    error = refused(capsys, "extract", *small, "--out", out)
    assert f"features '{out}'" in error and "cannot be made" in error and "checkpoint" not in error


def test_the_predicted_bytes_are_said_first_and_lie_on_disk_within_two_percent(small, tmp_path, capsys):
    assert cli.main(["extract", *small, "--out", str(tmp_path / "store")]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if "bytes on disk" in line)
    assert said.index(line) < said.index("target    ")
    predicted = int(line.split(" bytes on disk")[0].split()[-1].replace(",", ""))
    on_disk = sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
    assert abs(predicted - on_disk) <= 0.02 * on_disk


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--check", "x", "runs/tiny.toml"],
        ["runs/tiny.toml"],
        ["runs/tiny.toml", "--out", "x", "--none"],
        ["--check", "x", "--out", "y"],
        ["--check", "x", "--eager"],
    ],
)
def test_a_command_line_without_recipe_or_folder_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["extract", *arguments])
    assert end.value.code == 2 and "graphcap extract" in capsys.readouterr().err


def test_a_dry_run_from_features_counts_the_two_ends_and_writes_nothing(small, stored, tmp_path, capsys):
    assert cli.main(["train", *small, "--dry-run", f"run.out={tmp_path}/out", f"features.path={stored}"]) == 0
    said = capsys.readouterr().out
    assert "only embedding and head loaded" in said and "target 1.2 MiB" in said and not (tmp_path / "out").exists()
    arguments = [f"run.out={tmp_path}/out", f"features.path={tmp_path}/none", "features.missing=compute"]
    assert cli.main(["train", *small, "--dry-run", *arguments]) == 0
    assert "would be computed first" in capsys.readouterr().out and not list(tmp_path.iterdir())
