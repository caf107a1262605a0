"""A drafter's folder comes back bit for bit, and each known damage is refused by the name of what is wrong."""

import json
import math
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from graphcap.errors import CheckpointError, UserError
from graphcap.model.identity import Identity
from graphcap.ops.export import CONFIG, WEIGHTS, config_document, read_config, read_drafter, read_target, weight_tensors
from tests.toys import drafter_config, fresh_seed, random_drafter

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    drafter = random_drafter(fresh_seed())
    save_file({name: tensor.contiguous() for name, tensor in weight_tensors(drafter).items()}, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(config_document(drafter.config, torch.float32)))
    return tmp_path, drafter


def read(path):
    return read_drafter(path, dtype=torch.float32, device=CPU)


def damage_config(path, change) -> None:
    document = json.loads((path / CONFIG).read_text())
    change(document)
    (path / CONFIG).write_text(json.dumps(document))


def test_a_drafter_comes_back_bit_for_bit_and_frozen(folder):
    path, drafter = folder
    loaded = read(path)
    assert loaded.config == drafter.config
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    tensors = load_file(path / WEIGHTS)
    tensors["norm.weight"][3] += 1e-3  # must fail: one element
    save_file(tensors, path / WEIGHTS)
    assert not torch.equal(read(path).norm.weight, drafter.norm.weight)


def test_a_bfloat16_export_is_the_rounded_drafter_and_says_so(tmp_path):
    drafter = random_drafter(fresh_seed()).bfloat16()
    document = config_document(drafter.config, torch.bfloat16)
    save_file(weight_tensors(drafter), tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(document))
    assert document["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / WEIGHTS).values()} == {torch.bfloat16}
    loaded = read_drafter(tmp_path, dtype=torch.bfloat16, device=CPU)
    assert all(torch.equal(tensor, drafter.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_the_export_holds_no_embedding_head_or_rotary_table(folder):
    names = set(load_file(folder[0] / WEIGHTS))
    assert not [name for name in names if any(word in name for word in ("embed", "lm_head", "rotary", "inv_freq", "model."))]


def test_the_config_has_the_keys_that_each_consumer_needs():
    config = drafter_config(rope_theta=1e6, block_size=16)
    document = config_document(config, torch.bfloat16)
    assert document["architectures"] == ["DFlashDraftModel"] and document["model_type"] == "qwen3"
    assert document["block_size"] == document["dflash_config"]["block_size"] == 16
    assert document["dflash_config"]["mask_token_id"] == config.mask_token_id
    assert document["dflash_config"]["target_layer_ids"] == list(config.target_layer_ids)
    # z-lab's MLX loader reads theta at the top level, transformers 5 in rope_parameters
    assert document["rope_theta"] == document["rope_parameters"]["rope_theta"] == 1e6
    assert {"head_dim", "max_position_embeddings", "num_target_layers", "layer_types"} <= set(document)
    assert document["is_causal"] is False and document["tie_word_embeddings"] is False


@pytest.mark.parametrize("where", ["top", "inside"])
def test_a_block_size_at_either_place_is_read(folder, where):
    path, drafter = folder
    damage_config(path, lambda d: d.pop("block_size") if where == "inside" else d["dflash_config"].pop("block_size"))
    assert read_config(path).block_size == drafter.config.block_size


def test_the_theta_of_rope_parameters_wins_over_a_class_default(folder):
    path, _ = folder
    damage_config(path, lambda d: d.update(rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 5e6}))
    assert read_config(path).rope_theta == 5e6


DAMAGES = {
    "block_size": [
        lambda d: (d.pop("block_size"), d["dflash_config"].pop("block_size")),
        lambda d: d.update(block_size=5),
    ],
    "target_layer_ids": [lambda d: d["dflash_config"].pop("target_layer_ids"), lambda d: d.pop("dflash_config")],
    "mask_token_id": [lambda d: d["dflash_config"].pop("mask_token_id")],
    "sliding_attention": [lambda d: d.update(layer_types=["sliding_attention", "full_attention"])],
    "head_dim": [lambda d: d.pop("head_dim")],
    "num_target_layers": [lambda d: d.pop("num_target_layers")],
    "hidden_size": [lambda d: d.pop("hidden_size")],
}


@pytest.mark.parametrize(("key", "number"), [(key, n) for key, changes in DAMAGES.items() for n in range(len(changes))])
def test_a_damaged_config_is_refused_by_the_name_of_the_key(folder, key, number):
    path, _ = folder
    damage_config(path, DAMAGES[key][number])
    with pytest.raises(CheckpointError, match=key):
        read(path)


UNSERVABLE = {
    "rope_theta": lambda d: (d.pop("rope_theta"), d.pop("rope_parameters")),
    "partial_rotary_factor": lambda d: d.update(partial_rotary_factor=0.25),
    "partial_rotary_factor inside": lambda d: d["rope_parameters"].update(partial_rotary_factor=0.25),
    "mrope_section": lambda d: d["rope_parameters"].update(mrope_section=[1, 1, 2]),
    "rope_scaling": lambda d: d.update(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "rope_scaling of old": lambda d: d.update(rope_scaling={"type": "yarn", "factor": 4.0}, rope_parameters=None),
    "rope_scaling of old beside the default": lambda d: d.update(rope_scaling={"type": "linear", "factor": 4.0}),
    "use_sliding_window": lambda d: (d.pop("layer_types"), d.update(use_sliding_window=True, sliding_window=64)),
    "layer_types": lambda d: d.update(layer_types=["full_attention"] * 3),
    "quantization_config": lambda d: d.update(quantization_config={"quant_method": "fp8"}),
    "dflash_config.use_swa": lambda d: d["dflash_config"].update(use_swa=True, swa_window_size=64),
    "dflash_config.swa_window_size": lambda d: d["dflash_config"].update(swa_window_size=64),
    "dflash_config.causal": lambda d: d["dflash_config"].update(causal=True),
    "dflash_config.sample_from_anchor": lambda d: d["dflash_config"].update(sample_from_anchor=True),
    "dflash_config.shift_label": lambda d: d["dflash_config"].update(shift_label=True),
    "dflash_config.projector_type": lambda d: d["dflash_config"].update(projector_type="domino", shift_label=False),
    "dflash_config.use_aux_hidden_state": lambda d: d["dflash_config"].update(use_aux_hidden_state="no"),
    "dflash_config.markov_rank": lambda d: d["dflash_config"].update(markov_rank=256),
    "block_size": lambda d: (d.update(block_size=1), d["dflash_config"].update(block_size=1)),
    "rope_type": lambda d: d["rope_parameters"].update(rope_type="yarn", factor=4.0),
    "attention_bias": lambda d: d.update(attention_bias=True),
    "is_causal": lambda d: d.update(is_causal=True),
    "hidden_act": lambda d: d.update(hidden_act="gelu"),
}


@pytest.mark.parametrize("key", UNSERVABLE)
def test_a_config_that_this_drafter_cannot_compute_is_refused_by_the_name_of_the_key(folder, key):
    path, _ = folder
    damage_config(path, UNSERVABLE[key])
    with pytest.raises(CheckpointError, match=key.split()[0]):
        read(path)


def test_keys_of_other_trainers_that_change_nothing_are_taken(folder):
    path, drafter = folder
    off = {"use_swa": False, "swa_window_size": 2048, "causal": False, "shift_label": False, "markov_rank": 0, "selector": None}
    named = {"projector_type": "dflash", "mask_token": "<|mask|>", "use_aux_hidden_state": True, "num_target_layers": 4}
    damage_config(path, lambda d: d["dflash_config"].update(off | named))
    damage_config(path, lambda d: d.update(rope_scaling={"type": "default"}, use_sliding_window=False, sliding_window=4096))
    assert read_config(path) == drafter.config


@pytest.mark.parametrize("ids", [[], [2, 2], [0, 4], [-1, 1]])
def test_a_config_with_layers_that_mean_nothing_is_refused(folder, ids):
    path, _ = folder
    damage_config(path, lambda d: d["dflash_config"].update(target_layer_ids=ids))
    with pytest.raises(UserError, match="target_layer_ids"):
        read(path)


def test_a_config_that_is_no_json_or_missing_is_refused(folder):
    path, _ = folder
    (path / CONFIG).write_text("{")
    with pytest.raises(CheckpointError, match="config.json"):
        read(path)
    (path / CONFIG).unlink()
    with pytest.raises(CheckpointError, match="config.json"):
        read(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "layers.1.self_attn.k_norm.weight missing"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(2)}), "lm_head.weight unexpected"),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 32)}), r"fc.weight \[32, 32\] instead of \[32, 64\]"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "bfloat16, float16, got fc.weight in int8"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "fc.weight in float8_e4m3fn"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].double()}), "fc.weight in float64"),
        (
            lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}),
            "norm.weight missing; model.norm.weight unexpected",
        ),
    ],
)
def test_missing_unexpected_and_misshapen_tensors_are_listed_by_name(folder, change, text):
    path, _ = folder
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)
    with pytest.raises(CheckpointError, match=text):
        read(path)


def test_a_folder_without_safetensors_is_refused_and_pickles_are_not_read(folder):
    path, _ = folder
    (path / WEIGHTS).rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="model.safetensors"):
        read(path)


def test_a_truncated_weights_file_is_refused_by_name(folder):
    path, _ = folder
    data = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        read(path)


def test_a_drafter_of_another_target_is_refused_by_every_size_that_differs():
    from graphcap.ops.export import check_fits
    from tests.toys import tiny_model

    config = drafter_config()
    check_fits(config, tiny_model("llama", 1).config, folder="here")
    with pytest.raises(CheckpointError, match="here.*hidden_size 32 instead of 64.*num_target_layers 4 instead of 5"):
        check_fits(config, tiny_model("llama", 1, hidden_size=64, num_hidden_layers=5).config, folder="here")


@pytest.mark.parametrize("damage", ["[]", '{"dflash_config": 3}', '{"block_size": "8", "dflash_config": {}}'])
def test_a_config_of_the_wrong_kind_is_refused_in_the_one_form(folder, damage):
    path, _ = folder
    (path / CONFIG).write_text(damage)
    with pytest.raises(CheckpointError, match="drafter folder"):
        read(path)


def test_a_config_with_any_value_in_any_place_is_a_config_or_refused(tmp_path):
    draw = random.Random(fresh_seed())
    values = [None, 0, -1, 3, 2.5, math.inf, math.nan, "x", "", [], [1], ["a"], [None], [[1]], {}, {"a": 1}, True, 10**30]
    good = json.dumps(config_document(drafter_config(), torch.float32))
    refused = 0
    for _ in range(500):
        document = json.loads(good)
        places = [document, document, document["dflash_config"], document["rope_parameters"]]
        for _ in range(draw.randint(1, 2)):
            keys = draw.choice(places)
            keys[draw.choice(list(keys))] = draw.choice(values)
        (tmp_path / CONFIG).write_text(json.dumps(draw.choice([document] * 9 + values)))
        try:
            config = read_config(tmp_path)
        except CheckpointError as error:
            refused += 1
            assert CONFIG in str(error) or "computes something else" in str(error), error
        else:  # no size is anything but a whole number above 0
            assert all(type(size) is int and size > 0 for size in (config.hidden_size, config.head_dim, config.num_kv_heads))
    assert 100 < refused < 500


OWN = {"name": "x", "commit": "", "fingerprint": "ab"}


@pytest.mark.parametrize("other", [None, "Qwen/Qwen3-8B", ["a"], {}, {"name": "x"}, OWN | {"commit": 5}, OWN | {"size": "8B"}])
def test_a_target_that_is_not_three_texts_is_somebody_elses_key(folder, other):
    path, _ = folder
    damage_config(path, lambda d: d.update(target=OWN))
    assert read_target(path) == Identity(**OWN)
    damage_config(path, lambda d: d.update(target=other))
    assert read_target(path) is None
