"""The door: quick and light help, every key described, bad input refused in one form with nothing written."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphcap import config
from graphcap.cli import main
from graphcap.ops import blackbox, checkpoint, ending, runfolder

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "runs" / "tiny.toml")


def command(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "graphcap", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        env={**__import__("os").environ, "PYTHONPATH": str(ROOT)},
    )


def test_help_answers_faster_than_torch_could_be_imported_and_does_not_import_it():
    code = "import sys, graphcap.cli as cli\ntry: cli.main(['--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    begin = time.perf_counter()
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    help_s = time.perf_counter() - begin
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    torch_s = time.perf_counter() - begin
    assert shown.stdout.strip().endswith("False")
    assert help_s < torch_s / 2, f"help took {help_s:.2f} s, importing torch {torch_s:.2f} s"


@pytest.mark.parametrize("verb", ["train", "eval", "export", "extract", "status", "doctor"])
def test_help_of_every_verb_has_an_example(verb, capsys):
    try:
        main([verb, "--help"])
    except SystemExit as end:
        assert end.code == 0
    assert f"example:\n  graphcap {verb}" in capsys.readouterr().out


def test_help_of_a_recipe_prints_every_key_with_type_default_and_a_line(capsys):
    assert main(["train", TINY, "--help"]) == 0
    shown = capsys.readouterr().out
    for section in dataclasses.fields(config.Recipe):
        for field in dataclasses.fields(section.type):
            assert re.search(
                rf"\n  {section.name}\.{field.name}: .*(default|required).*\n      {re.escape(field.metadata['doc'])}", shown
            )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs/none.toml"], ["recipe 'runs/none.toml'", "no such file"]),
        (["."], ["recipe '.'", "a folder"]),
        ([TINY, "optimizer.epoch=2"], ["'epoch'", "did you mean 'epochs'"]),
        ([TINY, "optimiser.epochs=2"], ["'optimiser'", "did you mean 'optimizer'"]),
        ([TINY, "optimizer.epochs=two"], ["'optimizer.epochs'", "whole number", "'two'"]),
        ([TINY, "optimizer.epochs=0"], ["at least 1", "got 0"]),
        ([TINY, "optimizer.learning_rate=nan"], ["'optimizer.learning_rate'", "finite"]),
        ([TINY, "run.device=cudo"], ["one of auto, cpu, cuda", "did you mean 'cuda'"]),
        ([TINY, "epochs=2"], ["section.key=value"]),
        ([TINY, "drafter.target_layer_ids=2,2"], ["rising", "[2, 2]"]),
        ([TINY, "run.name=../x"], ["plain folder name"]),
        ([TINY, "run.name=" + "x" * 300], ["plain folder name"]),
        ([TINY, "run.name=a\0b"], ["plain folder name"]),
        ([TINY, "data.train=a.jsonl", "data.held_out=a.jsonl"], ["'data.held_out'", "not trained on"]),
        ([TINY, "run.threads=100000"], ["at most 1023"]),
        ([TINY, "run.seed=36893488147419103232"], ["below 2^63"]),
        ([TINY, "target.path="], ["'target.path'", "got nothing"]),
        ([TINY, f"target.path={ROOT}", "target.revision=nope"], ["'target.revision'", "'nope'", "leave it out"]),
        ([TINY, f"run.out={TINY}", "--dry-run"], ["tiny.toml'", "got a file", "choose another run.name or run.out"]),
        ([TINY, "checkpoint.every=30", "eval.every=20"], ["multiple or a divisor"]),
    ],
)
def test_bad_input_is_refused_in_the_one_form_and_writes_nothing(arguments, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("graphcap: ") and "expected " in shown.err and ", got " in shown.err and ". Fix: " in shown.err
    assert all(word in shown.err for word in words), shown.err
    assert not list(tmp_path.iterdir()) and "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("target.path=nowhere", ["'target.path'", "nowhere"]),
        ("data.train=nothing.jsonl", ["nothing.jsonl"]),
        ("drafter.mask_token=<nope>", ["'drafter.mask_token'", "<nope>"]),
        ("drafter.mask_token=<|im_end|>", ["'drafter.mask_token'", "no text contains"]),
        ("drafter.target_layer_ids=0,12", ["target_layer_ids", "0 to 11"]),
        ("drafter.num_tapped_layers=13", ["num_tapped_layers", "12 layers"]),
    ],
)
def test_bad_input_that_only_loading_can_find_writes_nothing(override, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["train", "--here", TINY, override, f"run.out={tmp_path}", "run.device=cpu"]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert ". Fix: " in error and not list(tmp_path.iterdir())


def test_bad_input_that_a_rank_finds_is_told_by_its_supervisor_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)]
    try:
        assert main(["train", TINY, "data.train=nothing.jsonl", f"run.out={tmp_path}", "run.device=cpu"]) == 2
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), handlers):
            signal.signal(number, handler)
    error = capsys.readouterr().err
    assert error.startswith("graphcap: ") and "nothing.jsonl" in error and ". Fix: " in error, error
    assert not list(tmp_path.iterdir()) and not blackbox.memory_folder(tmp_path / "tiny").exists()


def test_the_folder_of_something_else_and_a_changed_recipe_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    assert main(["train", TINY, f"run.out={tmp_path}"]) == 2
    assert "a folder with other files" in capsys.readouterr().err
    recipe = config.load_recipe(TINY, [f"run.out={tmp_path}", "run.name=other"])
    checkpoint.save(recipe.folder / "checkpoints", 1, tensors={}, documents={"state.json": {}}, score=None, keep=1)
    (recipe.folder / "config.toml").write_text(config.to_toml(recipe))
    assert main(["train", TINY, f"run.out={tmp_path}", "run.name=other", "optimizer.learning_rate=0.1", "run.seed=5"]) == 2
    error = capsys.readouterr().err
    assert "optimizer.learning_rate" in error and "run.seed" in error


def test_recipes_and_overrides_survive_being_written_and_read(tmp_path):
    recipe = config.load_recipe(
        TINY, ['run.note=with "quotes" and \\ and é', "optimizer.epochs=3", "drafter.target_layer_ids=1,3"]
    )
    (tmp_path / "again.toml").write_text(config.to_toml(recipe), encoding="utf-8")
    assert config.load_recipe(tmp_path / "again.toml") == recipe
    assert recipe.drafter.target_layer_ids == (1, 3) and recipe.optimizer.epochs == 3


def test_a_list_may_be_given_as_a_recipe_writes_it():
    for text in ("a.jsonl, b.jsonl", '["a.jsonl", "b.jsonl"]', "['a.jsonl',b.jsonl]"):
        assert config.load_recipe(TINY, [f"data.train={text}"]).data.train == ("a.jsonl", "b.jsonl")


def test_grow_keys_may_grow_and_free_keys_may_change_but_same_keys_may_not():
    old = config.load_recipe(TINY)
    config.check_resume(old, config.load_recipe(TINY, ["optimizer.epochs=9", "checkpoint.keep=5"]))
    for override in ("optimizer.epochs=1", "run.seed=1", "drafter.block_size=16"):
        with pytest.raises(config.ConfigError):
            config.check_resume(old, config.load_recipe(TINY, [override]))


def test_a_recipe_with_a_byte_order_mark_and_windows_lines_is_read(tmp_path):
    text = Path(TINY).read_text(encoding="utf-8").replace("\n", "\r\n")
    (tmp_path / "tiny.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert config.load_recipe(tmp_path / "tiny.toml") == config.load_recipe(TINY)


def test_a_reader_that_goes_away_and_a_terminal_without_unicode_end_nothing(tmp_path):
    code = "import sys\nfrom graphcap import cli\nfor n in range(3): cli._say('τ · …')\nsys.stderr.write('through')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for more, command_line in (
        ({"PYTHONIOENCODING": "ascii"}, f'{sys.executable} -c \'from graphcap.cli import main; main(["train", "x.toml"])\''),
        ({}, f'{sys.executable} -c "{code}" | true'),
    ):
        done = subprocess.run(
            ["bash", "-c", command_line], cwd=tmp_path, env=environment | more, capture_output=True, text=True, timeout=60
        )
        assert "Traceback" not in done.stderr and ("through" in done.stderr or "graphcap: recipe" in done.stderr), done.stderr


def test_a_refusal_of_the_file_system_is_told_in_the_one_form(capsys, monkeypatch):
    from graphcap import cli

    def full(options):
        raise OSError(28, "No space left on device", "runs/out/x/metrics.jsonl")

    monkeypatch.setattr(cli, "_train", full)
    assert main(["train", TINY]) == 1
    error = capsys.readouterr().err
    assert "file 'runs/out/x/metrics.jsonl'" in error and "No space left" in error and ". Fix: free space" in error


def test_a_ctrl_c_says_what_goes_on_and_is_known_inside_what_python_3_11_raises_for_it(capsys, monkeypatch):
    from graphcap import cli

    def interrupted(options):
        raise KeyboardInterrupt

    def while_a_class_was_made(options):
        try:
            interrupted(options)
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__ on 'x'") from error

    for stopped in (interrupted, while_a_class_was_made):
        monkeypatch.setattr(cli, "_train", stopped)
        said = []
        for more in ([], ["--dry-run"]):
            assert main(["train", TINY, *more]) == 3
            said.append(capsys.readouterr().err)
        assert said == [
            "graphcap: stopped on request; the same command continues from the newest checkpoint\n",
            "graphcap: stopped on request\n",
        ]


def test_memory_that_is_not_there_is_told_in_the_one_form(capsys, monkeypatch):
    import torch

    from graphcap import cli

    asked = [
        (lambda: torch.empty(2**45, dtype=torch.uint8), "none for 35184372088832 bytes more."),
        (lambda: [0] * 2**59, "none."),
    ]
    for allocate, got in asked:
        monkeypatch.setattr(cli, "_train", lambda options, allocate=allocate: allocate())
        assert main(["train", TINY]) == 1
        error = capsys.readouterr().err
        expected = "memory 'of this process': expected room for the models and the largest row, got"
        assert f"{expected} {got} Fix: set shapes.row_length lower" in error
    monkeypatch.setattr(cli, "_train", lambda options: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):  # must fail: any other RuntimeError is our bug and keeps its traceback
        main(["train", TINY])


def test_status_of_a_runs_folder_loads_no_torch(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    code = "import sys, graphcap.cli as cli\ncode = cli.main(['status', sys.argv[1]])\nprint(code, 'torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code, str(run)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.splitlines() == ["unknown · no record of how it was started or ended", "0 False"]


def test_a_start_that_died_before_its_run_began_can_be_given_again(tmp_path):
    recipe = config.load_recipe(TINY, [f"run.out={tmp_path}"])
    recipe.folder.mkdir()
    claim = runfolder.Claim(recipe, "graphcap train x")
    (recipe.folder / "rank-0").mkdir()
    (recipe.folder / "rank-0" / "stderr").write_text("killed")
    claim.close()
    checkpoint.write_json(recipe.folder / "end.json", {"verdict": "dead"})
    assert runfolder.finished_result(recipe) is None
    (recipe.folder / "start.json").unlink()
    with pytest.raises(config.ConfigError, match="other files"):  # must fail: a folder of something else
        runfolder.finished_result(recipe)


def test_a_refused_start_takes_only_its_own_files_and_puts_the_end_before_it_back(tmp_path):
    recipe = config.load_recipe(TINY, [f"run.out={tmp_path}"])
    recipe.folder.mkdir()
    (recipe.folder / ".git").mkdir()
    claim = runfolder.Claim(recipe, "graphcap train x")
    claim.leave_nothing()
    claim.close()
    assert [path.name for path in recipe.folder.iterdir()] == [".git"]
    (recipe.folder / "config.toml").write_text("")
    claim = runfolder.Claim(recipe, "graphcap train x")
    assert not claim.leave_nothing()  # a run that had begun: its end has to be written
    claim.close()
    checkpoint.write_json(recipe.folder / "end.json", ending.of_exit(recipe.folder, code=-11, command="graphcap train x"))
    ranks = recipe.folder / "rank-0"
    ranks.mkdir()
    for name in ("flight.bin", "stdout", "stderr"):
        (ranks / name).write_text(f"{name} of the start that died")
    before = {path: path.read_bytes() for path in recipe.folder.rglob("*") if path.is_file()}
    claim = runfolder.Claim(recipe, "graphcap train y")
    assert not (recipe.folder / "end.json").exists() and runfolder.is_claimed(recipe.folder)
    assert not (ranks / "flight.bin").exists(), "an earlier start's record is not taken for this one's"
    assert "before    dead · rank 0 · SIGSEGV" in (recipe.folder / "run.log").read_text()
    for name in ("flight.bin", "traceback.txt", "stdout", "stderr"):
        (ranks / name).write_text("of the refused one")
    assert claim.leave_nothing()
    claim.close()
    assert {path: path.read_bytes() for path in recipe.folder.rglob("*") if path.is_file()} == before
    assert not runfolder.is_claimed(recipe.folder)


def test_one_of_several_ranks_is_refused_before_it_writes_what_the_others_write(tmp_path, monkeypatch, capsys):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(TINY), f"run.out={tmp_path}"]) == 2
    assert "variable 'WORLD_SIZE': expected 1, got 2" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
