"""`graphcap export`, `export --check` and `train --dry-run`, through the command line, on a run of three updates."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphcap import cli
from graphcap.build import make_drafter
from graphcap.config import load_recipe
from graphcap.ops import checkpoint
from graphcap.ops.export import CONFIG, WEIGHTS

SMALL = (
    *("optimizer.max_updates=3", "optimizer.rows_per_update=1", "eval.every=1", "checkpoint.every=1", "checkpoint.keep=3"),
    *("eval.documents=2", "eval.prompts=2", "eval.passes=1", "eval.max_new_tokens=8", "shapes.row_length=256"),
    *("shapes.max_buckets=1", "run.threads=1"),
)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[str]:
    """The tiny recipe with overrides that make it a matter of seconds."""
    short = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = Path("graphcap/assets/tiny/conversations/train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    short.write_text("".join(lines[:40]), encoding="utf-8")
    return ["runs/tiny.toml", *SMALL, f"data.train={short}"]


@pytest.fixture(scope="module")
def run(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    assert cli.main(["train", *small, f"run.out={out}", "run.name=a", "--here"]) == 0
    return out / "a"


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def refused(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert cli.main(list(arguments)) == 2
    return capsys.readouterr().err


def test_an_export_has_the_best_checkpoints_weights_and_names_its_target_without_a_path(run, tmp_path, capsys):
    out = tmp_path / "drafter"
    assert cli.main(["export", str(run), str(out)]) == 0
    best = checkpoint.best(run / "checkpoints")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drafter"]
    assert sorted(path.name for path in out.iterdir()) == ["README.md", CONFIG, WEIGHTS]
    kept, written = load_file(best / WEIGHTS), load_file(out / WEIGHTS)
    assert kept.keys() == written.keys() and all(torch.equal(tensor, written[name]) for name, tensor in kept.items())
    document = json.loads((out / CONFIG).read_text())
    assert document == json.loads((best / CONFIG).read_text()) and document["target"]["name"] == "tiny"
    card = (out / "README.md").read_text()
    assert "Drafts blocks of 8 tokens for tiny, fingerprint" in card and "acceptance length" in card
    assert str(run.parent) not in card + (out / CONFIG).read_text()
    capsys.readouterr()
    for folder in (out, run):
        assert cli.main(["export", "--check", str(folder), "--target", "graphcap/assets/tiny"]) == 0
        assert "whole and sound" in capsys.readouterr().out


def test_an_export_in_bfloat16_is_the_rounded_one_and_decodes(run, tmp_path, capsys):
    out = tmp_path / "drafter"
    assert cli.main(["export", str(run / "checkpoints/update-00000001"), str(out), "--dtype", "bfloat16"]) == 0
    assert "acceptance length" not in (out / "README.md").read_text()  # the result is of other weights
    kept, written = load_file(run / "checkpoints/update-00000001" / WEIGHTS), load_file(out / WEIGHTS)
    assert all(torch.equal(tensor.bfloat16(), written[name]) for name, tensor in kept.items())
    prompts = ["--prompts", "graphcap/assets/tiny/conversations/held_out.jsonl", "--num-prompts", "1", "--passes", "1"]
    capsys.readouterr()
    assert cli.main(["eval", str(out), "--target", "graphcap/assets/tiny", *prompts, "--max-new-tokens", "4", "--eager"]) == 0
    shown = capsys.readouterr().out
    assert "1 of 1" in shown and "1 prompts of held_out.jsonl" in shown
    assert "weights  " in shown and "ready to export" not in shown, "only a run's checkpoint can be exported"


def test_a_run_to_start_from_stands_for_its_best_checkpoint(small, run):
    recipe = load_recipe(small[0], [*small[1:], f"drafter.init={run}"])
    best = load_file(checkpoint.best(run / "checkpoints") / WEIGHTS)
    begun = make_drafter(recipe, None).state_dict()
    assert begun.keys() == best.keys() and all(torch.equal(tensor, best[name]) for name, tensor in begun.items())


def change_result(run: Path, **changes) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | changes))


def test_a_card_says_how_it_was_measured_and_does_without_what_was_not(copied, tmp_path, capsys):
    def card(number: int) -> str:
        assert cli.main(["export", str(copied), str(tmp_path / f"x{number}")]) == 0, capsys.readouterr().err
        return (tmp_path / f"x{number}" / "README.md").read_text()

    assert "held-out prompts at temperature 0 in float32" in card(0)
    change_result(copied, temperature=0.7, rule="sampled", seed=3)
    assert "held-out prompts at temperature 0.7, rule sampled, seed 3 in float32" in card(1)
    nothing = dict.fromkeys(("tau", "low", "high", "mean")) | {"verifications": 0}
    change_result(copied, after=nothing, prompt_lookup=nothing)  # every reply ended with its first token
    assert "acceptance length – tokens a verification" in card(2)
    for number, broken in enumerate(("{", "[1]", '{"weights": 5}', "\ud800".encode("utf-8", "surrogatepass")), start=3):
        (copied / "result.json").write_bytes(broken if isinstance(broken, bytes) else broken.encode())
        assert "Measured" not in card(number)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_export_into_the_empty_folder_that_one_stands_in(run, tmp_path, monkeypatch):
    source = run.resolve()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["export", str(source), "."]) == 0
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["README.md", CONFIG, WEIGHTS]


@pytest.mark.parametrize("fault", ["no room", "full disk"])
def test_an_export_that_fails_leaves_nothing_not_even_a_folder(run, tmp_path, monkeypatch, capsys, fault):
    def full(path, text):
        raise OSError(28, "No space left on device")

    if fault == "no room":
        monkeypatch.setattr(checkpoint, "disk_free_bytes", lambda folder: 1000)
    else:
        monkeypatch.setattr(checkpoint, "write_text", full)
    said = refused(capsys, "export", str(run), str(tmp_path / "new" / "deep" / "x"))
    assert f"'{tmp_path / 'new' / 'deep' / 'x'}'" in said and "export to another disk" in said and "keep" not in said, said
    assert list(tmp_path.iterdir()) == []


def test_the_targets_revision_and_code_belong_to_a_target(run, capsys):
    for verb in (["eval", str(run)], ["export", "--check", str(run)]):
        with pytest.raises(SystemExit):
            cli.main([*verb, "--revision", "main"])
        assert "belong to --target" in capsys.readouterr().err


def test_a_late_folders_fault_is_found_before_the_first_is_decoded(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("graphcap.eval.measure", None)  # calling it would be a TypeError
    out, prompts = tmp_path / "bad", ["--prompts", "graphcap/assets/tiny/conversations/held_out.jsonl"]
    assert cli.main(["export", str(run), str(out)]) == 0
    document = json.loads((out / CONFIG).read_text())
    (out / CONFIG).write_text(json.dumps(document | {"num_target_layers": 40}))
    target = ["--target", "graphcap/assets/tiny", "--revision", "main"]
    assert "num_target_layers 40 instead of 12" in refused(capsys, "eval", str(run), str(out), *target, *prompts)
    (out / CONFIG).write_text(json.dumps(document))
    tensors = load_file(out / WEIGHTS)
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, out / WEIGHTS)
    assert "fc.weight missing" in refused(capsys, "eval", str(run), str(out), *target, *prompts)


def test_nothing_that_is_there_is_overwritten_and_an_incomplete_checkpoint_is_refused(copied, tmp_path, capsys):
    out = tmp_path / "kept"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert "expected a folder that does not exist yet" in refused(capsys, "export", str(copied), str(out))
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    newest = copied / "checkpoints/update-00000003"
    with open(newest / WEIGHTS, "r+b") as file:
        file.truncate(1000)
    assert "expected a complete one, got model.safetensors" in refused(capsys, "export", str(newest), str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    for path in (copied / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    assert "expected a run with a complete checkpoint" in refused(capsys, "export", str(copied), str(tmp_path / "x"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "run"]


@pytest.mark.parametrize("damage", ["nan", "zeros", "tensor", "target"])
def test_a_check_names_what_is_wrong(run, tmp_path, capsys, damage):
    out = tmp_path / "drafter"
    assert cli.main(["export", str(run), str(out)]) == 0
    tensors, document = load_file(out / WEIGHTS), json.loads((out / CONFIG).read_text())
    says = {"nan": "fc.weight not finite", "zeros": "norm.weight is all zeros", "tensor": "fc.weight missing"}
    says["target"] = "got one of tiny, fingerprint 0000000000000000"
    if damage == "nan":
        tensors["fc.weight"][3, 4] = float("nan")
    elif damage == "zeros":
        tensors["norm.weight"].zero_()
    elif damage == "tensor":
        del tensors["fc.weight"]
    document["target"]["fingerprint"] = "0" * 16 if damage == "target" else document["target"]["fingerprint"]
    save_file(tensors, out / WEIGHTS)
    (out / CONFIG).write_text(json.dumps(document))
    assert says[damage] in refused(capsys, "export", "--check", str(out), "--target", "graphcap/assets/tiny")


def test_a_resume_with_another_target_is_refused_and_a_warm_start_says_so(small, copied, tmp_path, capsys):
    other = Path(shutil.copytree("graphcap/assets/tiny", tmp_path / "other", ignore=shutil.ignore_patterns("conversations")))
    weights = load_file(other / WEIGHTS)
    name = next(name for name in weights if "layers.0.mlp" in name)
    weights[name] = weights[name] * 1.5
    save_file(weights, other / WEIGHTS, metadata={"format": "pt"})
    state = json.loads((copied / "checkpoints/update-00000003/state.json").read_text())
    assert state["target"]["name"] == "tiny" and len(state["target"]["fingerprint"]) == 16
    started = [f"drafter.init={copied / 'checkpoints/update-00000003'}", f"run.out={tmp_path}", "run.name=b"]
    target = f"target.path={other}"
    assert cli.main(["train", *small, *started, target, "--dry-run"]) == 0
    assert "was trained for another target: tiny, fingerprint" in capsys.readouterr().out
    measured = ["eval", str(copied), "--num-prompts", "1", "--max-new-tokens", "2", "--passes", "1"]
    assert cli.main([*measured, "--target", str(other)]) == 0
    assert "trained for tiny, fingerprint" in capsys.readouterr().out
    assert cli.main(measured) == 0
    assert "trained for" not in capsys.readouterr().out
    recipe = (copied / "config.toml").read_text().replace('path = "graphcap/assets/tiny"', f'path = "{tmp_path}/swapped"')
    recipe = recipe.replace('name = "a"', 'name = "run"').replace(str(copied.parent), str(tmp_path))
    (copied / "config.toml").write_text(recipe.replace("max_updates = 3", "max_updates = 4"))
    (tmp_path / "swapped").symlink_to(other)
    again = tmp_path / "again.toml"
    again.write_text((copied / "config.toml").read_text())
    said = refused(capsys, "train", str(again), f"run.out={tmp_path}", "--here")
    assert "expected the target that the run began with (tiny, fingerprint" in said, said


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_begins_nothing(copied, tmp_path, capsys):
    again = tmp_path / "again.toml"
    again.write_text(
        (copied / "config.toml").read_text().replace('name = "a"', 'name = "run"').replace("max_updates = 3", "max_updates = 4")
    )
    for path in (copied / "checkpoints").iterdir():
        (path / WEIGHTS).write_bytes(b"")
    before = sorted(str(path) for path in (copied / "checkpoints").rglob("*"))
    said = refused(capsys, "train", str(again), f"run.out={tmp_path}", "--here")
    assert "expected a complete one to go on from, got update-00000003: model.safetensors" in said, said
    assert sorted(str(path) for path in (copied / "checkpoints").rglob("*")) == before


def test_a_dry_run_says_what_the_run_needs_and_leaves_no_file(small, tmp_path, capsys):
    assert cli.main(["train", *small, f"run.out={tmp_path}", "--dry-run"]) == 0
    said = capsys.readouterr().out
    for part in (
        "rows_per_update = 1",
        "plan      buckets 256/48",
        "memory    target",
        "disk      5 checkpoints",
        "time      3 updates",
    ):
        assert part in said, part
    assert list(tmp_path.iterdir()) == []
    assert "⟦" not in said
    assert cli.main(["train", *small, f"run.out={tmp_path}", "--dry-run", "--show", "2"]) == 0
    shown = capsys.readouterr().out.split("supervised in ")[1:]
    assert len(shown) == 2 and "line 1, between the marks" in shown[0]
    assert all("⟦" in text and "<|im_end|>⟧" in text for text in shown), shown


def test_a_disk_without_room_is_found_before_the_target_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(checkpoint, "disk_free_bytes", lambda folder: 10**6)
    monkeypatch.setattr("graphcap.build.load_model", None)  # calling it would be a TypeError
    assert "bytes free, got 1,000,000 bytes" in refused(capsys, "train", "runs/tiny.toml", f"run.out={tmp_path}", "--dry-run")
