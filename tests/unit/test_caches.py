"""Kernel caches: a folder for this torch and GPU; an unwritable, damaged or foreign one is named and replaced."""

import fcntl
import json
import os
import random
import shutil
import struct
import sys
import sysconfig
from pathlib import Path

import pytest

from graphcap.ops import caches

MADE_BY = {"torch": "2.11.0+cu130", "triton": "3.6.0", "gpu": "NVIDIA H200"}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(caches, "_held", [])
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in (*caches.VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def used(made_by: dict = MADE_BY) -> tuple[Path, list[str]]:
    """The Triton folder that is used, and what was said."""
    said: list[str] = []
    for variable in caches.VARIABLES:
        os.environ.pop(variable, None)
    [file.close() for file in caches._held]  # as if every use were a process of its own
    caches._held.clear()
    caches.use(made_by, said.append)
    return Path(os.environ["TRITON_CACHE_DIR"]), said


def shared_library() -> Path:
    folder = Path(sysconfig.get_config_var("DESTSHARED") or sys.prefix)
    return next(path for path in sorted(folder.rglob("*.so")) if path.stat().st_size > 1000)


def fill(cache: Path) -> list[Path]:
    """Whole files of each kind that is looked at."""
    kernel, graph = cache / "ABCD", cache / "fxgraph" / "ab" / "abcd"
    kernel.mkdir(parents=True)
    graph.mkdir(parents=True)
    shutil.copy(shared_library(), kernel / "launcher.so")
    shutil.copy(shared_library(), kernel / "kernel.cubin")
    (kernel / "kernel.json").write_text(json.dumps({"hash": "x" * 200}))
    (graph / "entry").write_bytes(b"\x80\x05" + bytes(random.randrange(256) for _ in range(500)) + b"]q.")
    return [kernel / "launcher.so", kernel / "kernel.cubin", kernel / "kernel.json", graph / "entry"]


def test_caches_of_each_torch_and_gpu_have_a_folder_of_their_own_below_the_users(home):
    folder, said = used()
    assert folder == home / ".cache/graphcap/2.11.0+cu130-NVIDIA_H200/triton" and folder.is_dir() and not said
    assert used({**MADE_BY, "gpu": "NVIDIA A100"})[0] != folder


def test_whole_files_are_kept_and_a_folder_that_the_user_chose_is_used(home, monkeypatch):
    folder, _ = used()
    files = fill(folder)
    assert used() == (folder, []) and all(file.exists() for file in files)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "mine"))
    caches.use(MADE_BY, print)
    assert os.environ["TRITON_CACHE_DIR"] == str(home / "mine")


def test_a_folder_that_torch_wrote_into_the_environment_is_no_choice_of_the_users(home, monkeypatch):
    for torchs, expected in (
        ("/tmp/torchinductor_me", home / ".cache/graphcap/2.11.0+cu130-NVIDIA_H200/inductor"),
        ("", home / "x"),
    ):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", torchs or str(home / "x"))
        caches.use(MADE_BY, print, unless=torchs)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(expected)


def test_a_folder_that_the_user_chose_is_looked_at_and_never_emptied(home, monkeypatch):
    mine = home / "mine"
    (mine / "pkg").mkdir(parents=True)
    (mine / "thesis.tex").write_text("years of work")
    (mine / "broken.json").write_text("{")
    for variable in caches.VARIABLES:
        monkeypatch.setenv(variable, str(mine))
    said: list[str] = []
    caches.use(MADE_BY, said.append)
    assert sorted(path.name for path in mine.iterdir()) == ["broken.json", "pkg", "thesis.tex"]
    assert len(said) == 2 and "broken.json is no JSON" in said[0] and "replaced" not in said[0]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("part", [0.0, 0.5, 0.98])
def test_must_fail_a_file_cut_short_is_named_and_the_cache_replaced(home, number, part):
    folder, _ = used()
    file = fill(folder)[number]
    data = file.read_bytes()
    kept = int(len(data) * part)
    file.write_bytes(data[: kept - (data[kept - 1 : kept] == b".")])
    again, said = used()
    assert again == folder and len(said) == 1 and file.name in said[0] and "replaced" in said[0], said
    assert [path.name for path in folder.iterdir()] == [caches.STAMP]
    assert used()[1] == [] and not [path for path in folder.parent.iterdir() if path.name.startswith(".") and path.is_dir()]


def test_a_cache_of_another_version_in_the_same_place_is_replaced_and_says_which(home):
    folder, _ = used()
    fill(folder)
    _, said = used({**MADE_BY, "triton": "3.7.0"})
    assert len(said) == 2 and "triton 3.6.0 -> 3.7.0" in said[0] and [path.name for path in folder.iterdir()] == [caches.STAMP]


def test_a_folder_that_cannot_be_written_is_named_and_another_one_used(home):
    (home / ".cache").mkdir()
    (home / ".cache" / "graphcap").write_text("a file in its place")
    folder, said = used()
    assert len(said) == 2 and "cannot be written" in said[0] and str(home / ".cache" / "graphcap") in said[0]
    assert folder.is_dir() and home not in folder.parents
    folder.rmdir()
    Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rmdir()


def test_the_size_of_an_elf_file_comes_from_its_header():
    data = shared_library().read_bytes()
    assert len(data) // 2 < caches._elf_bytes(data[:64]) <= len(data)
    assert caches._elf_bytes(b"") == caches._elf_bytes(b"\x7fELF" + bytes(60)) == 1 << 62
    moved = data[:40] + struct.pack("<Q", len(data) + 1) + data[48:64]
    assert caches._elf_bytes(moved) > len(data)


def test_a_cache_that_another_run_uses_is_left_as_it_is(home):
    folder, _ = used()
    file = fill(folder)[2]
    file.write_text("{")
    with open(caches._lock_of(folder), "a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        again, said = used()
        assert again == folder and file.exists() and "another run is using it" in said[0]
    assert "replaced" in used()[1][0] and not file.exists()
