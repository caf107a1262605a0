"""SIGKILL at every point of a save in the background: the checkpoint before or the new one is chosen, whole.

As in test_kill_in_save.py: a helper process, this file run as a program, loads torch once and forks a child for every
save. The thread of the child reports each call that changes the disk before it makes it, and waits; meanwhile the
child's main thread has spoilt the state, as training does. The test kills at an event, never after a sleep.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphcap.errors import CheckpointError
from graphcap.ops import checkpoint
from graphcap.ops.saver import Saver

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("mkdir", "fsync", "rename", "rmdir", "chmod")
OLD, NEW = 70, 90


def content(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    weights_D = torch.randn(50, generator=torch.Generator().manual_seed(seed))
    return {"model.safetensors": {"w_D": weights_D}, "state.safetensors": {"m_D": weights_D * 2, "seed": torch.tensor(seed)}}


def save(folder: Path) -> None:
    """The checkpoint of update 10 from a thread, while the state goes on changing."""
    tensors = content(NEW)
    with Saver(folder, keep=1) as saver:
        saver.reserve(tensors)
        saver.begin(10, tensors=tensors, documents={"state.json": {"seed": NEW}}, score=None)
        for named in tensors.values():
            for tensor in named.values():
                tensor.fill_(-1)
        os.write(1, b"event spoilt\n")


def save_manifest_first(folder: Path) -> None:
    """A flaw that the drill must find: what says "complete" is there too early."""

    def flawed(folder: Path, update: int, *, tensors: dict, documents: dict, score: float | None, keep: int) -> Path:
        final = folder / f"update-{update:08d}"
        final.mkdir()
        text = checkpoint._sealed({"version": 1, "update": update, "score": score, "files": {}})
        checkpoint._write_synced(final / "manifest.json", text)
        checkpoint.write_tensors(final / "model.safetensors", tensors["model.safetensors"])
        return final

    checkpoint.save = flawed
    save(folder)


# The helper and its children.


def announced(call, name: str):
    def announce(*args, **kwargs):
        os.write(1, f"event {name}\n".encode())
        assert os.read(0, 100) == b"go\n"
        return call(*args, **kwargs)

    return announce


def helper() -> None:
    while order := os.read(0, 1000).decode().split():
        action, folder = order
        pid = os.fork()
        if pid == 0:
            os.write(1, f"child {os.getpid()}\n".encode())  # by the child, so that it comes before its events
            for name in CALLS:
                setattr(os, name, announced(getattr(os, name), name))
            code = 1
            try:
                globals()[action](Path(folder))
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

    def run(self, action: str, folder: Path, *, kill_at: int | None) -> list[str]:
        """Run `action`, kill it as it is about to make call number kill_at (None: never); the calls seen.

        The thread gets no leave for a call before the main thread has spoilt the state.
        """
        self.process.stdin.write(f"{action} {folder}".encode())
        word, pid = self.process.stdout.readline().split()
        assert word == b"child"
        seen, waiting, spoilt = [], False, False
        while True:
            word, value = self.process.stdout.readline().split()
            if word == b"ended":
                expected = 0 if kill_at is None else -signal.SIGKILL
                assert int(value) == expected, f"the child ended with {int(value)}, not {expected}, after {seen}"
                return seen
            if value == b"spoilt":
                spoilt = True
            else:
                seen.append(value.decode())
                waiting = True
            if waiting and spoilt:
                waiting = False
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


def seed_of(path: Path) -> int:
    """Which save a checkpoint is of, after loading all of it and comparing every bit."""
    seed = checkpoint.load_document(path, "state.json")["seed"]
    for name, tensors in content(seed).items():
        loaded = checkpoint.load_tensors(path, name)
        assert all(torch.equal(loaded[key], tensors[key]) for key in tensors)
    return seed


def drill(killer, action: str, place: Path):
    """Kill `action` before each of its calls in turn; yields (the calls made, the folder as the kill left it)."""
    calls, number = [], 0
    while number == 0 or number <= len(calls):
        folder = place / str(number)
        checkpoint.save(folder, 5, tensors=content(OLD), documents={"state.json": {"seed": OLD}}, score=None, keep=1)
        seen = killer.run(action, folder, kill_at=number - 1 if number else None)
        calls = calls or seen
        assert seen == calls[: number or None]
        if number:
            yield seen, folder
        else:
            assert seed_of(folder / "update-00000010") == NEW
        number += 1


def test_killed_before_every_call_the_checkpoint_before_or_the_new_one_is_chosen(killer, tmp_path):
    found = []
    for calls, folder in drill(killer, "save", tmp_path):
        path, reasons = checkpoint.newest(folder)
        found.append(seed_of(path))
        assert all(line.endswith("a save that did not finish") for line in reasons), (calls, reasons)
        assert not any(checkpoint.verify(path) for path in folder.glob("update-*")), "no half under a checkpoint's name"
    assert set(CALLS) == set(calls)
    switch = found.index(NEW)
    assert switch > 8 and found == [OLD] * switch + [NEW] * (len(found) - switch), found


def test_must_fail_a_manifest_written_first_makes_a_half_checkpoint_the_newest(killer, tmp_path):
    with pytest.raises(CheckpointError, match="no state.json among its files"):
        for _, folder in drill(killer, "save_manifest_first", tmp_path):
            seed_of(checkpoint.newest(folder)[0])


if __name__ == "__main__":
    helper()
