"""SIGKILL before, inside and after a save, then the same command: the run ends as if nothing had happened."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

ASSETS = Path(__file__).parents[2] / "graphcap" / "assets" / "tiny"
SETTINGS = (
    "optimizer.max_updates=6",
    "optimizer.rows_per_update=2",
    "eval.every=2",
    "checkpoint.every=2",
    "eval.documents=2",
    "eval.prompts=1",
    "eval.max_new_tokens=4",
    "eval.passes=1",
    "shapes.row_length=256",
    "shapes.max_buckets=2",
    "drafter.block_size=8",
    "drafter.num_layers=1",
    "progress.every=3",
    "run.threads=1",
    "run.device=cpu",
)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> Path:
    """Two small files of the tiny target's own conversations. Imports what every forked child needs, once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM  # noqa: F401

    import graphcap.train  # noqa: F401

    folder = tmp_path_factory.mktemp("conversations")
    for name, count in (("train", 24), ("held_out", 4)):
        lines = (ASSETS / "conversations" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def undisturbed(conversations, tmp_path_factory) -> Path:
    """The folder of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("undisturbed")
    run_in_child(conversations, out, pause=None)
    return out / "run"


def run_in_child(
    conversations: Path, out: Path, *, pause: tuple[int, str] | None, threads: int = 1, more: tuple[str, ...] = ()
) -> None:
    """`graphcap train` in a forked child. pause: (update, phase) of the save at which the child is killed."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_child, args=(conversations, out, pause, there, threads, more))
    child.start()
    there.close()
    if pause is not None:
        assert here.poll(90), f"the child never reached {pause}"
        assert here.recv() == pause
        os.kill(child.pid, signal.SIGKILL)
    child.join(90)
    assert child.exitcode == (0 if pause is None else -signal.SIGKILL), f"exit code {child.exitcode}"


def _child(conversations: Path, out: Path, pause: tuple[int, str] | None, pipe, threads: int, more: tuple[str, ...]) -> None:
    import torch

    from graphcap.cli import main
    from graphcap.ops import checkpoint

    torch.set_num_threads(threads)
    save, put_in_place = checkpoint.save, checkpoint._put_in_place

    def reached(update: int, phase: str) -> None:
        if (update, phase) == pause:
            pipe.send(pause)
            signal.pause()

    def watched_save(folder, update, **rest):
        def watched_put(partial, final):
            reached(update, "inside")
            put_in_place(partial, final)

        checkpoint._put_in_place = watched_put
        reached(update, "before")
        path = save(folder, update, **rest)
        reached(update, "after")
        return path

    checkpoint.save = watched_save
    data = [f"data.train={conversations}/train.jsonl", f"data.held_out={conversations}/held_out.jsonl", f"target.path={ASSETS}"]
    recipe = out / "run.toml"
    recipe.write_text("", encoding="utf-8")
    os._exit(main(["train", "--here", str(recipe), *SETTINGS, *data, f"run.out={out}", *more]))


def state_of(run: Path) -> dict:
    from graphcap.ops.checkpoint import load_tensors

    newest = run / "checkpoints" / "update-00000006"
    return {**load_tensors(newest, "model.safetensors"), **load_tensors(newest, "state.safetensors")}


def lines_of(run: Path) -> list[dict]:
    from graphcap.ops.progress import read_metrics, without_clock

    return [without_clock(line) for line in read_metrics(run / "metrics.jsonl")]


@pytest.mark.parametrize("pauses", [[(2, "before")], [(4, "after")], [(2, "inside"), (4, "inside"), (6, "inside")]])
def test_killed_around_a_save_the_run_ends_bit_equal_with_each_update_once(conversations, undisturbed, tmp_path, pauses):
    import torch

    for pause in pauses:
        run_in_child(conversations, tmp_path, pause=pause)
    run_in_child(conversations, tmp_path, pause=None)
    expected, got = state_of(undisturbed), state_of(tmp_path / "run")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert lines_of(tmp_path / "run") == lines_of(undisturbed)
    assert [line["update"] for line in lines_of(undisturbed) if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*")), "a dead save was left behind"


def test_the_comparison_notices_another_seed(conversations, undisturbed, tmp_path):
    import torch

    run_in_child(conversations, tmp_path, pause=None, more=("run.seed=1",))
    expected, got = state_of(undisturbed), state_of(tmp_path / "run")
    assert not torch.equal(expected["master"], got["master"])
    assert lines_of(tmp_path / "run") != lines_of(undisturbed)


def test_a_finished_run_grows_by_more_updates_and_a_later_epoch(conversations, tmp_path):
    run_in_child(conversations, tmp_path, pause=None, more=("optimizer.max_updates=2", "optimizer.epochs=1"))
    run_in_child(conversations, tmp_path, pause=None, more=("optimizer.max_updates=6", "optimizer.epochs=3"))
    assert [line["update"] for line in lines_of(tmp_path / "run") if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_run_continues_with_the_threads_it_began_with(conversations, undisturbed, tmp_path):
    import torch

    run_in_child(conversations, tmp_path, pause=(4, "after"))
    state = tmp_path / "run" / "checkpoints" / "update-00000004" / "state.json"
    assert json.loads(state.read_text())["threads"] == 1
    run_in_child(conversations, tmp_path, pause=None, threads=2)
    assert torch.equal(state_of(undisturbed)["master"], state_of(tmp_path / "run")["master"])


def test_a_second_run_in_the_same_folder_is_refused_while_the_first_trains(conversations, undisturbed, tmp_path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    first = context.Process(target=_child, args=(conversations, tmp_path, (2, "before"), there, 1, ()))
    first.start()
    there.close()
    assert here.poll(90) and here.recv() == (2, "before")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    second = context.Process(target=_child, args=(conversations, tmp_path, None, there, 1, ()))
    second.start()
    second.join(90)
    assert second.exitcode == 2 and (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    os.kill(first.pid, signal.SIGKILL)  # a dead run holds nothing
    first.join(90)
    run_in_child(conversations, tmp_path, pause=None)
    assert lines_of(tmp_path / "run") == lines_of(undisturbed)


def test_lost_metrics_lines_are_said(conversations, tmp_path, capfd):
    run_in_child(conversations, tmp_path, pause=(4, "after"))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    run_in_child(conversations, tmp_path, pause=None)
    assert "0 of the 4 lines before this checkpoint are left" in capfd.readouterr().out


def test_the_newest_two_and_the_best_checkpoint_are_kept(undisturbed):
    from graphcap.ops import checkpoint

    kept = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    best = checkpoint.best(undisturbed / "checkpoints").name
    assert set(kept) == {"update-00000004", "update-00000006", best}
