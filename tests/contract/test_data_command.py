"""Prepared folders and kept tokens through the command line: said in the lines about the data, and only where asked for."""

import pwd
from pathlib import Path

import pytest

from graphcap import cli
from graphcap.data import tokencache

CHATS = Path(__file__).resolve().parents[2] / "graphcap" / "assets" / "tiny" / "conversations" / "train.jsonl"


def test_a_prepared_folder_is_named_and_its_tokens_are_kept_where_the_recipe_says(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokencache, "KEPT_FROM_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    (tmp_path / "prepared").mkdir()
    lines = CHATS.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "prepared" / "tiny_train.jsonl").write_text("".join(lines[:30]), encoding="utf-8")
    command = ["train", "runs/tiny.toml", f"data.train={tmp_path}/prepared", f"run.out={tmp_path}/out", "run.threads=1"]
    said = []
    for _ in range(2):
        assert (
            cli.main([*command, "optimizer.max_updates=1", "shapes.row_length=256", "shapes.max_buckets=1", "--dry-run"]) == 0
        )
        said.append(capsys.readouterr().out)
    assert all(
        "train     30 conversations: 30 kept, 0 dropped; messages in prepared (tiny_train.jsonl, as" in one for one in said
    )
    kept = tmp_path / "caches" / "graphcap" / "documents"
    assert f"train     30 documents are kept for the next run, in {kept}" in said[0] and "held_out  " in said[0]
    assert "train     30 documents of less than a minute ago are used again" in said[1] and "are kept" not in said[1]
    assert len([one for one in kept.iterdir() if one.is_dir()]) == 2 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", ["", "elsewhere"])
def test_the_recipe_says_where_tokens_are_kept_or_that_they_are_not(tmp_path, capsys, monkeypatch, where):
    monkeypatch.setattr(tokencache, "KEPT_FROM_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    cache = f"{tmp_path}/{where}" if where else ""
    (tmp_path / "out").mkdir()
    few = tmp_path / "out" / "few.jsonl"
    few.write_text("".join(CHATS.read_text(encoding="utf-8").splitlines(keepends=True)[:20]), encoding="utf-8")
    # A mask token that stands in the text ends the command right behind the loading.
    refused = ["train", "runs/tiny.toml", f"data.cache={cache}", "drafter.mask_token=<|im_end|>", f"data.train={few}"]
    assert cli.main([*refused, f"run.out={tmp_path}/out", "--dry-run"]) == 2
    assert "no text contains" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(filter(None, ["out", where]))


@pytest.mark.parametrize("cache", ["auto", ""])
def test_a_user_without_a_home_is_told_that_tokens_are_not_kept(tmp_path, capsys, monkeypatch, cache):
    monkeypatch.setattr(tokencache, "KEPT_FROM_BYTES", 1)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # the user's number stands in no list
    few = tmp_path / "few.jsonl"
    few.write_text("".join(CHATS.read_text(encoding="utf-8").splitlines(keepends=True)[:20]), encoding="utf-8")
    refused = ["train", "runs/tiny.toml", f"data.cache={cache}", "drafter.mask_token=<|im_end|>", f"data.train={few}"]
    assert cli.main([*refused, f"run.out={tmp_path}/out", "--dry-run"]) == 2
    said = capsys.readouterr()
    assert "no text contains" in said.err
    assert ("no home folder: tokens of large texts are not kept" in said.out) == (cache == "auto")
