"""`graphcap shapes`: a plan, its report and its file, from a recipe or from files; and what is refused."""

import contextlib
import json
import random
import re
import resource

import numpy as np
import pytest

from graphcap.cli import main
from graphcap.data.planner import Shapes
from graphcap.errors import DataError
from graphcap.model.loading import no_target
from graphcap.ops import drawing
from tests.toys import fresh_seed

TINY = "graphcap/assets/tiny"


@pytest.fixture
def chats(tmp_path):
    """60 conversations of various lengths."""
    fresh_seed()
    path = tmp_path / "chats.jsonl"
    lines = []
    for number in range(60):
        words = " ".join(random.choice(["the", "value", "function", "returns", "list"]) for _ in range(random.randint(3, 150)))
        turns = [{"role": "user", "content": f"Explain {number}."}, {"role": "assistant", "content": words}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


def planned(capsys, *words) -> dict:
    assert main(["shapes", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_file_is_what_training_plans_and_training_takes_it(chats, tmp_path, capsys):
    out = tmp_path / "plans" / "chats.json"
    told = planned(capsys, chats, "--target", TINY, "drafter.block_size=8", "shapes.row_length=256", "--out", out)
    shapes = Shapes.load(out)
    assert json.loads(shapes.to_json()) == told["shapes"] and told["documents"] == 60
    assert sum(one["rows"] for one in told["buckets"]) == told["rows"]
    words = [f"target.path={TINY}", "drafter.block_size=8", "shapes.row_length=256", "drafter.num_layers=1"]
    words += [f"run.out={tmp_path}", "run.device=cpu"]
    recipe = tmp_path / "recipe.toml"
    held = tmp_path / "held.jsonl"
    held.write_text("".join(chats.read_text().splitlines(keepends=True)[:3]))
    recipe.write_text(f'[data]\ntrain = ["{chats}"]\nheld_out = ["{held}"]\n')
    lines = {}
    for plan in ("auto", str(out)):
        assert main(["train", str(recipe), *words, f"shapes.plan={plan}", "--dry-run"]) == 0
        lines[plan] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("plan ")]
    names = ", ".join(bucket.name for bucket in shapes.buckets)
    assert all(names in line[-1] for line in lines.values())


def test_single_rows_fewer_buckets_and_a_shorter_limit_are_planned_as_asked(chats, capsys):
    words = (chats, "--target", TINY, "data.on_long=truncate")
    single = planned(capsys, *words, "--rows", "single", "--buckets", "2")
    assert single["shapes"]["rows"] == "single" and single["rows"] == 60 and len(single["buckets"]) <= 2
    short = planned(capsys, *words, "--max-length", "32")
    assert short["shapes"]["histogram"]["longest"] == 32


def test_measured_costs_are_of_this_machine_and_stand_in_the_file(chats, capsys):
    words = (chats, "--target", TINY, "drafter.block_size=8", "drafter.num_layers=1", "shapes.row_length=256")
    assumed, measured = planned(capsys, *words), planned(capsys, *words, "--measure")
    assert measured["shapes"]["costs"] != assumed["shapes"]["costs"]
    assert measured["predicted"] != assumed["predicted"]


def test_the_lengths_are_drawn_with_the_buckets_and_show_prints_supervised_text(chats, tmp_path, capsys):
    assert main(["shapes", str(chats), "--target", TINY, "--show", "1"]) == 0
    out = capsys.readouterr().out
    assert "█" in out and "┄ bucket" in out and "% of the rows" in out
    assert "supervised in" in out and "Explain 0." in out
    pytest.importorskip("matplotlib", reason="the picture needs the extra `plot`")
    picture = tmp_path / "lengths.png"
    assert main(["shapes", str(chats), "--target", TINY, "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{chats}"], "option '--target'"),
        (["runs/tiny.toml", "shapes.plan=a.json"], "leave it out"),
        (["{chats}", "runs/tiny.toml"], "one recipe, or files of conversations"),
        (["{chats}", "--target", TINY, "--out", "{chats}"], "a new file, or a shapes file"),
        (["{chats}", "--target", TINY, "shapes.memory_gib=0.05"], "(shapes.memory_gib)"),
        (["{chats}.missing", "--target", TINY], "no such file"),
        (["{chats}", "--target", TINY, "shapes.max_bucket=3"], "max_buckets"),
    ],
)
def test_what_cannot_be_planned_is_refused_and_nothing_is_written(chats, tmp_path, capsys, words, told):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*")}
    assert main(["shapes", *(word.format(chats=chats) for word in words)]) == 2
    error = capsys.readouterr().err
    assert told in error and "Fix: " in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*")} == before


@contextlib.contextmanager
def files_end_at(num_bytes: int):
    """A disk that takes no more of a file than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(folder) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_file_that_is_cut_off_leaves_the_old_one_and_nothing_else(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs the extra `plot`")
    path, lengths = tmp_path / "d.png", np.array([20, 300, 70])
    drawing.picture(path, lengths, {384: [" bucket"]})
    before = files(tmp_path)
    assert before[path].startswith(b"\x89PNG")
    with files_end_at(1000), pytest.raises(OSError):
        drawing.picture(path, lengths, {384: [" bucket"]})
    assert files(tmp_path) == before


def test_a_disk_that_gives_out_while_writing_is_named_with_the_file_and_no_checkpoint(chats, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("graphcap.shapes._TRIED_BYTES", 10)  # it was not full when it was tried
    out = tmp_path / "new" / "a.json"
    with files_end_at(100):
        assert main(["shapes", str(chats), "--target", TINY, "data.cache=", "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert f"file '{out}'" in error and "file too large" in error and "same command again" in error
    assert "checkpoint" not in error
    assert list(files(tmp_path)) == [chats]


@pytest.mark.parametrize("option", ["--out", "--picture"])
def test_where_nothing_can_be_written_is_told_before_the_work(chats, tmp_path, capsys, option):
    if option == "--picture":
        pytest.importorskip("matplotlib", reason="the picture needs the extra `plot`")
    (tmp_path / "d.png").mkdir()
    (tmp_path / "file").write_text("")
    for path, told in (
        (tmp_path / "d.png", "got a folder"),
        (tmp_path / "file" / "d.png", "expected a path below folders"),
        ("/proc/d.png", "in /proc"),
    ):
        assert main(["shapes", str(chats), "--target", TINY, option, str(path)]) == 2
        said = capsys.readouterr()
        assert f"option '{option} {path}'" in said.err and told in said.err and said.out == ""
    with files_end_at(1000):
        assert main(["shapes", str(chats), "--target", TINY, option, str(tmp_path / "new" / "d.png")]) == 2
    said = capsys.readouterr()
    assert "file too large" in said.err and said.out == "" and not (tmp_path / "new").exists()


def test_a_picture_is_drawn_below_new_folders_and_refused_by_what_is_wrong_with_its_name(chats, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the picture needs the extra `plot`")
    words = ["shapes", str(chats), "--target", TINY, "--picture"]
    assert main([*words, str(tmp_path / "a" / "b" / "d.svg")]) == 0
    assert b"<svg" in (tmp_path / "a" / "b" / "d.svg").read_bytes()
    for name, told in (("d.gif", "got '.gif'"), ("d", "got no ending")):
        assert main([*words, str(tmp_path / name)]) == 2
        assert f"a name ending in .png, .svg, .pdf, {told}" in capsys.readouterr().err


def refused(capsys, *words) -> str:
    assert main(["shapes", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.fixture
def long_chats(tmp_path):
    """40 conversations, the longest of 400 tokens and more."""
    fresh_seed()
    turns = [
        [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": "list " * random.choice([9, 90, 399, n])}]
        for n in range(1, 40)
    ]
    turns.append([{"role": "user", "content": "Say all."}, {"role": "assistant", "content": "value " * 400}])
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    return path


def test_every_way_out_of_too_little_memory_is_one(long_chats, capsys):
    words = (long_chats, "--target", TINY, "run.device=cpu", "data.cache=")
    whole, rows = planned(capsys, *words), planned(capsys, *words, "shapes.row_length=512")
    assert whole["needed_bytes"] > rows["needed_bytes"] > rows["held_bytes"]
    shortest = f"{rows['buckets'][0]['length']}/{rows['buckets'][0]['num_anchors']}"
    least_gib, seen = rows["needed_bytes"] / 2**30, set()
    for room_gib in (whole["needed_bytes"] / 2**30 - 1e-4, least_gib + 0.01, least_gib - 0.001, least_gib - 0.02, 0.15):
        error = refused(capsys, *words, f"shapes.memory_gib={room_gib}")
        assert "(shapes.memory_gib)" in error and "GPU" not in error
        assert f"the shortest row that it fits, {shortest}, needs " in error
        assert ("which is too much" in error) == (room_gib < least_gib) == ("shapes.row_length=512 " in error)
        for way in error.split("Fix: use ")[1].strip().rstrip(".").split(", or "):
            if "features.path" not in way:
                planned(capsys, *words, f"shapes.memory_gib={room_gib}", *way.split())
                seen |= {word.split("=")[0] for word in way.split()}
    keys = {"shapes.row_length", "shapes.memory_gib", "data.max_length", "data.on_long", "drafter.checkpointing"}
    assert seen == keys


def test_sizes_that_differ_read_differently_and_what_holds_them_is_named(long_chats, capsys):
    words = (long_chats, "--target", TINY, "run.device=cpu", "data.cache=")
    whole = planned(capsys, *words)
    error = refused(capsys, *words, f"shapes.memory_gib={(whole['needed_bytes'] - 2000) / 2**30}")
    limit, got = re.search(r"at most ([\d.]+) GiB .*?, got ([\d.]+) GiB", error).groups()
    assert float(limit) < float(got)
    error = refused(capsys, *words, f"shapes.memory_gib={whole['held_bytes'] / 2**30 + 0.01}")
    assert "alone" not in error and "GPU" not in error
    error = refused(capsys, *words, f"shapes.memory_gib={whole['held_bytes'] / 2**30 - 0.01}")
    assert "target, drafter and optimizer alone take" in error and "a smaller target" in error
    error = refused(capsys, *words, "shapes.memory_gib=0.05", "features.path=/nowhere")
    assert "(features.path)" not in error


def test_one_bucket_that_is_best_is_said_in_the_table_and_in_json(chats, capsys):
    words = (chats, "--target", TINY, "data.cache=", "shapes.row_length=2048")
    one = planned(capsys, *words)
    assert len(one["buckets"]) == 1 and one["one_bucket_is_best"] is True
    asked = planned(capsys, *words, "--buckets", "1")
    assert len(asked["buckets"]) == 1 and asked["one_bucket_is_best"] is False
    sentence = "buckets   one is best, a second would not pay for itself"
    for more, said in ((), True), (("--buckets", "1"), False):
        assert main(["shapes", *map(str, words), *more]) == 0
        assert (sentence in capsys.readouterr().out) == said


def test_a_document_that_fits_no_row_is_named_by_its_file_and_line(chats, capsys):
    lines = chats.read_text().splitlines(keepends=True)
    turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "list " * 200}]
    chats.write_text("".join([*lines[:7], json.dumps({"messages": turns}) + "\n"]))
    error = refused(capsys, chats, "--target", TINY, "data.cache=", "shapes.row_length=128", "data.max_length=999")
    assert f"document '{chats} line " in error
    length = re.search(r"shapes\.row_length=(\d+)", error)[1]
    assert planned(capsys, chats, "--target", TINY, "data.cache=", f"shapes.row_length={length}")["documents"] == 8


def test_training_refuses_keys_that_the_plan_contradicts(chats, tmp_path, capsys):
    out = tmp_path / "a.json"
    words = ["drafter.num_layers=1", "drafter.block_size=8", "run.device=cpu", "data.cache=", f"run.out={tmp_path}"]
    planned(capsys, chats, "--target", TINY, *words, "shapes.row_length=256", "--out", out)
    held = tmp_path / "held.jsonl"
    held.write_text("".join(chats.read_text().splitlines(keepends=True)[:3]))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[target]\npath = "{TINY}"\n[data]\ntrain = ["{chats}"]\nheld_out = ["{held}"]\n')
    words += [f"shapes.plan={out}"]
    assert main(["train", str(recipe), "--dry-run", *words, "shapes.row_length=256"]) == 0
    assert main(["train", str(recipe), "--dry-run", *words, "shapes.row_length=128"]) == 2
    assert "'shapes.row_length': expected 256, or 0, got 128" in capsys.readouterr().err


def test_what_stands_behind_a_path_is_said_in_whole_words(chats, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    assert "it has no config.json." in refused(capsys, chats, "--target", tmp_path / "model")
    said = "Couldn't instantiate the backend tokenizer from one of: \n(1) a file, \n(2) another."
    assert "one of: (1) a file, (2) another. Fix: " in str(no_target("NAME", ValueError(said)))
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(DataError, match="window, .*, got no keys. Fix: "):
        Shapes.load(tmp_path / "empty.json")
    (tmp_path / "broken.jsonl").write_text('{"messages": "a\tb"}\n')
    assert "got Invalid control character at character 16" in refused(capsys, tmp_path / "broken.jsonl", "--target", TINY)
