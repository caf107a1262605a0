"""SIGKILL at every point of a save: the folder holds the old checkpoint or the new one, whole, and needs no hand.

The test talks to a helper process, this file run as a program, which loads torch once and forks a child for every save.
The child reports each call that changes the disk before it makes it, and waits; so the test kills at an event, never
after a sleep.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphcap.errors import CheckpointError
from graphcap.ops import checkpoint

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir", "chmod")


def content(seed: int) -> dict:
    """What a save of `seed` writes."""
    generator = torch.Generator().manual_seed(seed)
    weights_D = torch.randn(50, generator=generator)
    state = {"m_D": weights_D * 2, "seed": torch.tensor(seed)}
    files = {"model.safetensors": {"w_D": weights_D}, "state.safetensors": state}
    return {"tensors": files, "documents": {"state.json": {"seed": seed}}}  # the seed is the score too


def save(folder: Path, update: int, seed: int, keep: int) -> None:
    checkpoint.save(folder, update, **content(seed), score=float(seed), keep=keep)


def save_aside_under_a_hidden_name(folder: Path, update: int, seed: int, keep: int) -> None:
    """A flaw that the drill must find: between two renames nobody knows the old one under its other name."""

    def put_in_place(partial: Path, final: Path) -> None:
        final.rename(final.with_name(f".{final.name}.old.partial"))
        partial.rename(final)

    checkpoint._put_in_place = put_in_place
    save(folder, update, seed, keep)


def save_manifest_first(folder: Path, update: int, seed: int, keep: int) -> None:
    """Another: files are written under the final name, and what says "complete" is there too early."""
    final = Path(folder) / f"update-{update:08d}"
    final.mkdir(parents=True)
    text = checkpoint._sealed({"version": 1, "update": update, "score": None, "files": {}})
    checkpoint._write_synced(final / "manifest.json", text)
    checkpoint.write_tensors(final / "model.safetensors", content(seed)["tensors"]["model.safetensors"])


def write_text(folder: Path, update: int, seed: int, keep: int) -> None:
    checkpoint.write_text(folder / "end.json", str(seed) * 1000)


# The helper and its children.


def announced(call, name: str):
    def announce(*args, **kwargs):
        os.write(1, f"event {name}\n".encode())
        assert os.read(0, 100) == b"go\n"
        return call(*args, **kwargs)

    return announce


def helper() -> None:
    while order := os.read(0, 1000).decode().split():
        action, folder, update, seed, keep = order
        pid = os.fork()
        if pid == 0:
            os.write(1, f"child {os.getpid()}\n".encode())  # by the child, so that it comes before its events
            for name in CALLS:
                setattr(os, name, announced(getattr(os, name), name))
            code = 1
            try:
                globals()[action](Path(folder), int(update), int(seed), int(keep))
                code = 0
            finally:
                os._exit(code)
        os.write(1, f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())


class Helper:
    """The test's end of the pipes."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def run(self, action: str, folder: Path, update: int, seed: int, keep: int, *, kill_at: int | None) -> list[str]:
        """Run `action`, kill it as it is about to make call number kill_at (None: never); the calls seen."""
        self.process.stdin.write(f"{action} {folder} {update} {seed} {keep}".encode())
        word, pid = self.process.stdout.readline().split()
        assert word == b"child"
        seen = []
        while True:
            word, value = self.process.stdout.readline().split()
            if word == b"ended":
                expected = 0 if kill_at is None else -signal.SIGKILL
                assert int(value) == expected, f"the child ended with {int(value)}, not {expected}, after {seen}"
                return seen
            seen.append(value.decode())
            if kill_at is not None and len(seen) > kill_at:
                os.kill(int(pid), signal.SIGKILL)
            else:
                self.process.stdin.write(b"go\n")


@pytest.fixture(scope="module")
def killer():
    made = Helper()
    yield made
    made.process.stdin.close()
    assert made.process.wait(timeout=30) == 0


def seed_of(path: Path | None) -> int | None:
    """Which save a checkpoint is of, after loading all of it and comparing every bit."""
    if path is None:
        return None
    seed = checkpoint.load_document(path, "state.json")["seed"]
    for name, tensors in content(seed)["tensors"].items():
        loaded = checkpoint.load_tensors(path, name)
        assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
    return seed


def prepare(folder: Path, saves: list[tuple[int, int]]) -> Path:
    """A folder with these (update, seed) saved, to copy from: copying syncs nothing, so it is fast."""
    folder.mkdir()
    for update, seed in saves:
        save(folder, update, seed, keep=9)
    return folder


def copied(source: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)


def drill(killer, action: str, source: Path, update: int, seed: int, keep: int):
    """Kill `action` before each of its calls in turn; yields (the calls made, the folder as the kill left it)."""
    folder = source.with_name("checkpoints")
    copied(source, folder)
    calls = killer.run(action, folder, update, seed, keep, kill_at=None)
    for kill_at in range(len(calls)):
        copied(source, folder)
        seen = killer.run(action, folder, update, seed, keep, kill_at=kill_at)
        assert len(seen) == kill_at + 1
        yield seen, folder


@pytest.mark.parametrize(
    "keep, before, update",
    [
        pytest.param(1, [(5, 70)], 10, id="the next update, which prunes the only other"),
        pytest.param(2, [(3, 99), (4, 71), (5, 70)], 10, id="the next update, with a best one to keep"),
        pytest.param(1, [(5, 70)], 5, id="the same update again"),
        pytest.param(1, [], 5, id="the first one"),
    ],
)
def test_killed_before_every_call_the_old_or_the_new_stands_and_the_next_save_clears_up(killer, tmp_path, keep, before, update):
    source, new = prepare(tmp_path / "source", before), 90
    old, best = (before[-1][1], max(seed for _, seed in before)) if before else (None, None)
    found = []
    for calls, folder in drill(killer, "save", source, update, new, keep):
        path, reasons = checkpoint.newest(folder)
        found.append(seed_of(path))
        assert found[-1] in (old, new) and seed_of(checkpoint.best(folder)) in (best, new), calls
        assert all(line.endswith("a save that did not finish") for line in reasons), reasons
        assert not any(checkpoint.verify(path) for path in folder.glob("update-*")), "no half under a checkpoint's name"
        save(folder, update, new, keep)
        left = {f"update-{n:08d}" for n in (3, 5, 10)} if keep == 2 else {f"update-{update:08d}"}
        assert {path.name for path in folder.iterdir()} == left, calls
        assert checkpoint.newest(folder) == (folder / f"update-{update:08d}", []), calls
        assert seed_of(checkpoint.newest(folder)[0]) == new
    assert {"mkdir", "fsync", "rename", "chmod"} <= set(calls) and ("rmdir" in calls or not before)
    switch = found.index(new)
    assert switch > 10 and found == [old] * switch + [new] * (len(found) - switch), found


def test_a_second_kill_while_clearing_up_after_the_first_loses_nothing(killer, tmp_path):
    """A replacement is killed where names change; the next save, which clears up first, is killed at every call."""
    source = prepare(tmp_path / "source", [(5, 70)])
    for number, (first_calls, folder) in enumerate(drill(killer, "save", source, 5, 90, 1)):
        if first_calls[-1] not in ("rename", "rmdir"):
            continue
        place = tmp_path / f"again-{number}"
        place.mkdir()
        left = folder.rename(place / "source")
        standing = seed_of(checkpoint.newest(left)[0])
        for calls, again in drill(killer, "save", left, 6, 91, 1):
            assert seed_of(checkpoint.newest(again)[0]) in (standing, 91), (first_calls, calls)


def test_must_fail_an_old_one_renamed_to_a_hidden_name_is_lost_for_a_moment(killer, tmp_path):
    source = prepare(tmp_path / "source", [(5, 70)])
    states = drill(killer, "save_aside_under_a_hidden_name", source, 5, 90, 1)
    found = [seed_of(checkpoint.newest(folder)[0]) for _, folder in states]
    assert found[0] == 70 and None in found


def test_must_fail_a_manifest_written_first_makes_a_half_checkpoint_the_newest(killer, tmp_path):
    source = prepare(tmp_path / "source", [(5, 70)])
    with pytest.raises(CheckpointError, match="no state.json among its files"):
        for _, folder in drill(killer, "save_manifest_first", source, 10, 90, 1):
            seed_of(checkpoint.newest(folder)[0])


def test_a_text_file_is_the_old_or_the_new_one_whenever_its_writer_is_killed(killer, tmp_path):
    checkpoint.write_text(tmp_path / "end.json", "7" * 1000)
    assert killer.run("write_text", tmp_path, 0, 8, 1, kill_at=None) == ["fsync", "replace", "fsync"]
    for kill_at, seen in enumerate("778"):
        checkpoint.write_text(tmp_path / "end.json", "7" * 1000)
        killer.run("write_text", tmp_path, 0, 8, 1, kill_at=kill_at)
        assert (tmp_path / "end.json").read_text() == seen * 1000


if __name__ == "__main__":
    helper()
