"""The lean layers against transformers' own, for every form of decoder that they know."""

import copy

import pytest
import torch

from graphcap.model.target import Target
from tests.toys import HIDDEN, VOCAB, fresh_seed, relative, tiny_model

WINDOW = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
FORMS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with scaled angles": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", WINDOW),
    "qwen3": ("qwen3", {}),
    "qwen3 with windows": ("qwen3", WINDOW),
}


def features(model, token_ids: torch.Tensor, position: torch.Tensor, *, by_transformers: bool = False) -> torch.Tensor:
    target = Target(copy.deepcopy(model), (0, 2, 3))
    if by_transformers:
        target._lean = None
    else:
        assert target._lean is not None
    out = torch.full((len(token_ids), 3 * HIDDEN), float("nan"))
    target.features(token_ids, position, out)
    return out


@pytest.mark.parametrize("form", FORMS)
def test_lean_layers_give_transformers_features(form):
    fresh_seed()
    family, changes = FORMS[form]
    model = tiny_model(family, 1, **changes)
    token_ids = torch.randint(0, VOCAB, (96,), dtype=torch.int32)
    position = torch.cat((torch.arange(60), torch.arange(30), torch.zeros(6, dtype=torch.int64))).int()
    ours = features(model, token_ids, position)
    theirs = features(model, token_ids, position, by_transformers=True)
    assert relative(ours - theirs, theirs) < 1e-5
    model.get_decoder().layers[1].self_attn.k_proj.weight[3, 5] += 0.5  # must fail
    assert relative(ours - features(model, token_ids, position, by_transformers=True), theirs) > 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_that_were_laid_together_are_the_models_and_as_before(family):
    model = tiny_model(family, 2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    target = Target(model, (0, 1))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    first = model.get_decoder().layers[0]
    q, k = first.self_attn.q_proj.weight, first.self_attn.k_proj.weight
    assert q.data_ptr() + q.nbytes == k.data_ptr() and target._lean.layers[0] is first


def test_a_decoder_that_only_looks_plain_runs_through_transformers():
    model = tiny_model("llama", 3)
    norm = model.get_decoder().layers[1].input_layernorm
    plain = norm.forward
    norm.forward = lambda x: plain(x) * 1.5
    assert Target(model, (0, 2))._lean is None
    assert Target(tiny_model("gemma3", 3), (0, 2))._lean is None
    model = tiny_model("llama", 3)
    model.get_decoder().layers[2].mlp.act_fn = torch.nn.GELU()
    assert Target(model, (0, 2))._lean is None
    model = tiny_model("llama", 3, attention_bias=True)
    model.get_decoder().layers[0].self_attn.k_proj.bias = None
    assert not Target(model, (0, 2)).is_lean


def test_a_norm_that_is_one_percent_off_in_one_layer_is_noticed_in_16_bits_too():
    model = tiny_model("llama", 3).bfloat16()
    assert Target(copy.deepcopy(model), (0, 2)).is_lean
    norm = model.get_decoder().layers[1].post_attention_layernorm
    norm.forward = lambda x, plain=type(norm).forward: plain(norm, x) * 1.01
    assert not Target(model, (0, 2)).is_lean


def test_hooks_of_others_run_and_a_second_target_on_a_model_moves_no_weight():
    model, ran = tiny_model("qwen3", 4), []
    first = Target(model, (0, 2))
    place = model.get_decoder().layers[0].self_attn.q_proj.weight.data_ptr()
    second = Target(model, (0, 2))
    assert first.is_lean and second.is_lean and place == model.get_decoder().layers[0].self_attn.q_proj.weight.data_ptr()
    model.get_decoder().layers[1].register_forward_hook(lambda *_: ran.append(1))
    target = Target(model, (0, 2))
    ran.clear()
    target.features(torch.arange(8), torch.arange(8), torch.empty(8, 2 * HIDDEN))
    assert not target.is_lean and ran


def test_a_window_that_llamas_config_names_is_none_of_llamas_attention():
    model = tiny_model("llama", 5)
    model.config.sliding_window = 8
    token_ids, position = torch.randint(0, VOCAB, (40,), dtype=torch.int32), torch.arange(40, dtype=torch.int32)
    ours = features(model, token_ids, position)
    assert relative(ours - features(model, token_ids, position, by_transformers=True), ours) < 1e-5
