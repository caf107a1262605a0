"""Targets of three families through the command line: two updates on a CPU, and what the drafter's config.json says."""

import json

import pytest
import torch
import transformers

from graphcap.build import _sized
from graphcap.cli import main
from graphcap.config import Recipe
from graphcap.errors import ConfigError
from graphcap.model.loading import load_model
from graphcap.model.target import Target
from tests.targets import save_chats, save_recipe, save_target
from tests.toys import fresh_seed

CHANGES = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 77000.0}},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "gemma3": {
        "tie_word_embeddings": True,  # as the published ones: the embedding is scaled, the head is not
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 250000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 9000.0},
        },
    },
}
THETA = {"llama": 77000.0, "qwen3": 1e6, "gemma3": 250000.0}


@pytest.mark.parametrize("family", CHANGES)
def test_two_updates_end_with_equal_tokens_and_the_targets_sizes_in_the_config(family, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    target = save_target(tmp_path / "target", family=family, seed=fresh_seed(), head_dim=16, **CHANGES[family])
    chats, held_out = save_chats(tmp_path / "a.jsonl"), save_chats(tmp_path / "b.jsonl", num_chats=3)
    recipe = save_recipe(tmp_path / "r.toml", target, chats, held_out, out=tmp_path / "out")
    assert main(["train", "--here", str(recipe)]) == 0, capsys.readouterr().err
    torch.set_num_threads(threads)
    result = json.loads((tmp_path / "out" / "r" / "result.json").read_text())
    assert result["equal"] == result["prompts"] == 2 and result["differences"] == [], result
    (config,) = (tmp_path / "out" / "r" / "checkpoints").glob("*/config.json")
    written = json.loads(config.read_text())
    expected = {
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": THETA[family],
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA[family]},
        "num_target_layers": 4,
        "layer_types": ["full_attention"],  # the drafter's own: a target's sliding layers are not the drafter's
        "sliding_window": None,
    }
    assert {name: written[name] for name in expected} == expected
    assert written["dflash_config"]["target_layer_ids"] == [1, 2]


def test_a_target_without_grouped_heads_or_rms_norm_says_its_heads_and_epsilon_otherwise():
    text = transformers.GPTNeoXConfig(num_hidden_layers=12, num_attention_heads=4, hidden_size=32, layer_norm_eps=3e-5)
    config = _sized(Recipe(), text, vocab_size=99, mask_token_id=1)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 4, 8, 3e-5)
    text.num_hidden_layers = -1
    with pytest.raises(ConfigError, match="num_hidden_layers -1"):
        _sized(Recipe(), text, vocab_size=99, mask_token_id=1)


@pytest.mark.parametrize("family", CHANGES)
def test_the_drafter_is_given_what_the_first_layer_gets(family, tmp_path):
    """Gemma 3 scales its embeddings by √D inside the embedding module, which is what z-lab's code calls too."""
    folder = save_target(tmp_path / "t", family=family, seed=fresh_seed())
    model = load_model(str(folder), revision="main", dtype=torch.float32, device=torch.device("cpu"), trust_remote_code=False)
    entered = []
    model.get_decoder().layers[0].register_forward_pre_hook(lambda module, arguments: entered.append(arguments[0][0]))
    ids = torch.randint(200, (9,))
    with torch.no_grad():
        model(ids[None])
        embedded = Target(model, (0, 2)).embed(ids)
    assert torch.equal(embedded, entered[0])
    rows = model.get_input_embeddings().weight[ids]
    assert torch.equal(embedded, rows * (32**0.5 if family == "gemma3" else 1.0))
