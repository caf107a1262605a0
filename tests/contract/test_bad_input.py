"""Targets and drafters that cannot be used: exit code 2, the one form of message, and nothing on disk changed."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphcap.cli import main
from graphcap.ops.export import CONFIG, WEIGHTS, config_document, weight_tensors
from tests.targets import NUM_ROWS, byte_tokenizer, save_chats, save_recipe, save_target
from tests.toys import HIDDEN, random_drafter


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a good target, drafter, chats and recipe, for all tests to read."""
    place = tmp_path_factory.mktemp("good")
    target = save_target(place / "target")
    save_recipe(
        place / "r.toml", target, save_chats(place / "a.jsonl"), save_chats(place / "b.jsonl", num_chats=3), out=place / "out"
    )
    sizes = {"num_layers": 1, "vocab_size": NUM_ROWS, "mask_token_id": byte_tokenizer().mask_token_id}
    drafter = random_drafter(1, **sizes, target_layer_ids=(1, 2))
    (place / "drafter").mkdir()
    save_file(weight_tensors(drafter), place / "drafter" / WEIGHTS)
    (place / "drafter" / CONFIG).write_text(json.dumps(config_document(drafter.config, torch.float32)))
    (place / "link.jsonl").symlink_to("a.jsonl")
    os.mkfifo(place / "pipe.jsonl")
    return place


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(place: Path, tmp_path: Path, overrides: list[str], words: list[str], capsys) -> None:
    """`graphcap train` with these overrides says all the words in the one form; files stay as they are, and no run begins."""
    before = files_of(tmp_path), files_of(place)
    assert main(["train", "--here", str(place / "r.toml"), *overrides, f"run.out={tmp_path / 'new' / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphcap: ") and "Traceback" not in error
    assert "expected " in error and ", got " in error and ". Fix: " in error, error
    assert [word for word in words if word not in error] == [], error
    assert not (tmp_path / "new").exists() and (files_of(tmp_path), files_of(place)) == before


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.on_end=echo 'x"], ["'run.on_end'", "close its quotes"]),
        (["drafter.mask_token=<nowhere>"], ["'drafter.mask_token'", "'<nowhere>'"]),
        (["drafter.mask_token=<|im_end|>"], ["'drafter.mask_token'", "a.jsonl line 1", "no text contains"]),
        (["drafter.target_layer_ids=1,1"], ["'drafter.target_layer_ids'", "[1, 1]", "none twice"]),
        (["drafter.target_layer_ids=2,1"], ["'drafter.target_layer_ids'", "rising"]),
        (["drafter.target_layer_ids=-1,1"], ["'drafter.target_layer_ids'", "0-based"]),
        (["drafter.target_layer_ids=0,4"], ["target_layer_ids", "[0, 4]", "0 to 3"]),
        (["drafter.num_tapped_layers=5"], ["'drafter.num_tapped_layers'", "4 layers"]),
        (["drafter.block_size=256"], ["block", "256", "128"]),
        (["drafter.num_kv_heads=3"], ["num_kv_heads", "divisor of num_heads (4)"]),
        (["drafter.head_dim=7"], ["head_dim", "even"]),
        (["shapes.memory_gib=0.05"], ["bucket '", "at most 0.05 GiB (shapes.memory_gib)"]),
        (["shapes.row_length=100"], ["'shapes.row_length'", "multiple of 128"]),
        (["data.held_out={place}/../{place.name}/a.jsonl"], ["'data.held_out'", "not trained on", "{place}/a.jsonl"]),
        (["data.held_out={place}/link.jsonl"], ["'data.held_out'", "not trained on", "{place}/link.jsonl"]),
        (["data.train={place}/pipe.jsonl"], ["'data.train'", "pipe.jsonl", "a pipe or a device", "write them into a file"]),
        (["data.held_out=/dev/zero"], ["'data.held_out'", "/dev/zero", "a pipe or a device"]),
        (["data.max_length=8"], ["max_length = 8", "a.jsonl line 1"]),
        (["target.path=no-owner/no-such-model"], ["'target.path'", "neither a folder nor a cached Hub name", "hf download"]),
        (["target.path=nowhere"], ["'target.path'", "'nowhere'"]),
        (["drafter.init=nowhere"], ["drafter folder 'nowhere'", CONFIG]),
        (["drafter.init={place}/drafter", "drafter.num_layers=2"], ["'drafter.num_layers'", "expected 1, as in", "got 2"]),
        (
            ["drafter.init={place}/drafter", "drafter.target_layer_ids=0,2"],
            ["expected 1,2, as in", "set drafter.target_layer_ids=1,2."],
        ),
        (["drafter.init={place}/drafter", "drafter.num_tapped_layers=3"], ["'drafter.num_tapped_layers'", "expected 2, as"]),
        (["drafter.init={place}/drafter", "drafter.mask_token=<|im_start|>"], ["'drafter.mask_token'", "got <|im_start|>"]),
        (
            [
                "drafter.init={place}/drafter",
                "drafter.num_heads=2",
                "drafter.intermediate_size=96",
                "drafter.mask_token=<|mask|>",
            ],
            ["'drafter.intermediate_size, drafter.num_heads'", "expected 64; 4, as in", "got 96; 2"],
        ),
    ],
    ids=lambda value: value[-1] if value[0].count("=") else "",
)
def test_a_recipe_that_does_not_fit_its_target_is_refused(overrides, words, place, tmp_path, capsys):
    overrides, words = ([text.format(place=place) for text in texts] for texts in (overrides, words))
    assert_refused(place, tmp_path, overrides, words, capsys)


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def remote_code(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config |= {"model_type": "stranger", "auto_map": {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}}
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / "c.py").write_text("raise SystemExit('foreign code ran')")
    (folder / "m.py").write_text("raise SystemExit('foreign code ran')")


def unknown_model(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"model_type": "stranger"}))


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def of_kind(kind: str, **sizes):
    """Put a model of another kind in the target's place."""

    def put(folder: Path) -> None:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=NUM_ROWS, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder)

    put.__name__ = kind
    return put


def truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def lacking(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def misshapen(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"intermediate_size": 96}))


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": 5}')


def broken_config(folder: Path) -> None:
    (folder / CONFIG).write_text('{"model_type": ')


def config(**changes):
    """Change keys of the target's config.json."""

    def change(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | changes))

    return change


def sharded(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')


ODD_ROPE = {"rope_type": "nope", "rope_theta": 1.0}
QUANTISED = ["'target.path'", "whose weights are quantised", "not supported"]


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("hurt", "words"),
    [
        (no_template, ["chat template", "chat_template.jinja"]),
        (remote_code, ["'target.path'", "target.trust_remote_code=true"]),
        (unknown_model, ["'target.path'", "stranger"]),
        (pickled, ["'target.path'", "a pickle, pytorch_model.bin", "never does", "save_pretrained('FOLDER')"]),
        (of_kind("GPT2", n_layer=2, n_embd=32, n_head=4, n_inner=64), ["'gpt2'", "rotary positions"]),
        (of_kind("Mamba", hidden_size=32, num_hidden_layers=2, state_size=4), ["'mamba'", "rotary positions"]),
        (truncated, ["'target.path'", "safetensors"]),
        (broken_config, ["'target.path'", CONFIG]),
        (lacking, ["'target.path'", "lack model.layers.2.mlp.up_proj.weight"]),
        (misshapen, ["'target.path'", "other sizes than its config.json"]),
        (broken_tokenizer, ["'target.path'", "tokenizer's files cannot be read"]),
        (no_tokenizer, ["'target.path'"]),
        (sharded, ["'target.path'", "cannot be used"]),
        (config(quantization_config={"quant_method": "fp8"}), QUANTISED),
        (config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), QUANTISED),
        (config(hidden_size="abc"), ["'target.path'", "config cannot be read", "hidden_size"]),
        (config(dtype="float99"), ["'target.path'", "config cannot be read", "float99"]),
        (config(hidden_act="xyz"), ["'target.path'", "cannot be used", "xyz"]),
        (config(rope_parameters=ODD_ROPE), ["'target.path'", "cannot be used", "nope"]),
        (config(num_attention_heads=0), ["'target.path'", "config cannot be read"]),
        (config(num_key_value_heads=0), ["'target.path'", "num_key_value_heads = 0"]),
        (config(vocab_size=-1), ["'target.path'", "vocab_size = -1"]),
        (config(vocab_size=65), ["'target.path'", "rows of the target's embedding, 0 to 64", "a.jsonl line 1"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_target_folder_that_cannot_be_used_is_refused(hurt, words, place, tmp_path, capsys):
    target = tmp_path / "target"
    shutil.copytree(place / "target", target)
    hurt(target)
    assert_refused(place, tmp_path, [f"target.path={target}"], words, capsys)


def document(**changes):
    """Change keys of config.json; `dflash_config` is merged, and None takes a key out."""

    def change(folder: Path) -> None:
        keys = json.loads((folder / CONFIG).read_text())
        for name, value in changes.items():
            own = name == "dflash_config"
            merged = {k: v for k, v in (keys[name] | value).items() if v is not None} if own else value
            keys[name] = merged
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in keys.items() if v is not None}))

    return change


def weights(change):
    """Change the tensors of model.safetensors."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)

    return write


def prefixed(tensors: dict) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


NORM = "layers.0.self_attn.q_norm.weight"
OTHER_THETA = {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
BOUNDARY = {"target_layer_ids_convention": "boundary slots"}
DRAFTERS = {
    "no target_layer_ids": (document(dflash_config={"target_layer_ids": None}), ["dflash_config.target_layer_ids"]),
    "no mask token": (document(dflash_config={"mask_token_id": None}), ["dflash_config.mask_token_id"]),
    "no block size": (document(block_size=None, dflash_config={"block_size": None}), ["one block_size", "none"]),
    "a dtype that is none": (document(dtype="floaty"), ["float32 or bfloat16 or float16 as dtype", "floaty"]),
    "two block sizes": (document(block_size=8), ["one block_size", "4 and 8"]),
    "layers of another convention": (document(dflash_config=BOUNDARY), ["decoder layers", "boundary slots"]),
    "a layer the target lacks": (document(dflash_config={"target_layer_ids": [1, 4]}), ["[1, 4]", "0 to 3"]),
    "a layer twice": (document(dflash_config={"target_layer_ids": [1, 1]}), ["[1, 1]", "none twice"]),
    "mask token out of range": (document(dflash_config={"mask_token_id": NUM_ROWS}), ["mask_token_id", str(NUM_ROWS)]),
    "other hidden size": (document(hidden_size=64), ["hidden_size 64 instead of 32"]),
    "other vocabulary": (document(vocab_size=500), ["vocab_size 500 instead of 288"]),
    "other target depth": (document(num_target_layers=6), ["num_target_layers 6 instead of 4"]),
    "other rotary base": (document(**OTHER_THETA), ["rope_theta 500.0 instead of 10000.0"]),
    "no rotary base": (document(rope_theta=None, rope_parameters=None), ["rope_theta"]),
    "scaled rotary positions": (document(rope_scaling={"rope_type": "yarn", "factor": 4.0}), ["rope_scaling", "yarn"]),
    "rotary positions scaled as of old": (document(rope_scaling={"type": "yarn", "factor": 4.0}), ["rope_scaling", "yarn"]),
    "another order of slots": (document(dflash_config={"shift_label": True}), ["dflash_config.shift_label = True"]),
    "weights in int8": (
        weights(lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.int8)})),
        [f"{NORM} in int8"],
    ),
    "partial rotary positions": (document(partial_rotary_factor=0.25), ["partial_rotary_factor", "0.25"]),
    "sliding layers": (document(layer_types=["sliding_attention"]), ["layer_types", "sliding_attention"]),
    "causal blocks": (document(is_causal=True), ["is_causal"]),
    "biases": (document(attention_bias=True), ["attention_bias"]),
    "no head size": (document(head_dim=None), ["head_dim"]),
    "other head size": (document(head_dim=16), ["q_proj", "instead of"]),
    "broken JSON": (broken_config, [CONFIG]),
    "a transposed tensor": (
        weights(lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].T})),
        ["fc.weight", f"[{2 * HIDDEN}, {HIDDEN}] instead of [{HIDDEN}, {2 * HIDDEN}]"],
    ),
    "no norm weights": (weights(lambda tensors: tensors.pop(NORM)), [f"{NORM} missing"]),
    "an embedding beside them": (
        weights(lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(2, 2)})),
        ["embed_tokens.weight unexpected"],
    ),
    "names with a prefix": (weights(prefixed), ["fc.weight missing"]),
    "a tensor that is not finite": (weights(lambda tensors: tensors[NORM].fill_(torch.nan)), [f"{NORM} not finite"]),
    "pickled weights": (pickled, [WEIGHTS, "pickled weights are refused"]),
    "half a file": (truncated, [f"a whole {WEIGHTS}"]),
}


@pytest.mark.parametrize("fault", DRAFTERS)
def test_a_drafter_folder_that_does_not_fit_is_refused(fault, place, tmp_path, capsys):
    hurt, words = DRAFTERS[fault]
    drafter = tmp_path / "drafter"
    shutil.copytree(place / "drafter", drafter)
    hurt(drafter)
    assert_refused(place, tmp_path, [f"drafter.init={drafter}"], [*words, "drafter folder"], capsys)
    prompts = str(place / "b.jsonl")
    assert main(["eval", str(drafter), "--target", str(place / "target"), "--prompts", prompts]) == 2
    error = capsys.readouterr().err
    assert error.startswith("graphcap: ") and ". Fix: " in error and "Traceback" not in error, error


def test_the_good_target_and_drafter_are_taken(place, tmp_path, monkeypatch, capsys):
    """The twin of every test above: with nothing hurt the same command trains."""
    monkeypatch.chdir(tmp_path)
    drafter = [f"drafter.init={place / 'drafter'}", "drafter.mask_token=<|mask|>", "drafter.target_layer_ids=1,2"]
    assert main(["train", "--here", str(place / "r.toml"), *drafter, f"run.out={tmp_path}"]) == 0, capsys.readouterr().err
