"""The layers of a target over one row, without transformers' many small kernels: the drafter's own functions between matmuls.

Only for models of a form that we know, and only after a comparison with transformers' own forward on a short row. Matmuls that
share their input become one: their weights are laid under each other, once, in the memory that the model then uses too.

Calls: model/target.py. Source of the layers: transformers 5, models/llama, qwen2, qwen3, mistral.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from graphcap.model.fused import after_norm, gate, linear, normed_rotated

KNOWN = ("llama", "mistral", "qwen2", "qwen3")  # model types
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"})


def is_known(decoder: nn.Module) -> bool:
    """Whether every layer has the modules of a plain pre-norm decoder, and no other."""
    if decoder.config.model_type not in KNOWN:
        return False
    rotated = 2 * decoder.rotary_emb.inv_freq.numel()
    return all(_is_plain(layer) and layer.self_attn.head_dim == rotated for layer in decoder.layers)


def _is_plain(layer: nn.Module) -> bool:
    if set(dict(layer.named_children())) != LAYER:
        return False
    attention, mlp = set(dict(layer.self_attn.named_children())), set(dict(layer.mlp.named_children()))
    silu = mlp == MLP and isinstance(layer.mlp.act_fn, nn.SiLU | _silu_of_transformers())
    linears = all(type(one) is nn.Linear for part in (layer.self_attn, layer.mlp) for one in part.children() if _is_matmul(one))
    return attention in ATTENTION and silu and linears


def _is_matmul(module: nn.Module) -> bool:
    return getattr(module, "weight", None) is not None and module.weight.dim() == 2


def _silu_of_transformers() -> type:
    from transformers.activations import ACT2FN

    return type(ACT2FN["silu"])


class LeanLayers:
    """Embedding and layers of a decoder; every tensor is the decoder's own."""

    def __init__(self, decoder: nn.Module, num_layers: int) -> None:
        """decoder: `is_known`. Its weights move: q, k and v under each other, gate and up too; no more memory than one layer's.

        num_layers: how many of the layers a row runs through.
        """
        self.embedding, self.rotary = decoder.embed_tokens, decoder.rotary_emb
        self.layers = [decoder.layers[number] for number in range(num_layers)]
        for layer in self.layers:
            _lay_together(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
            _lay_together(layer.mlp.gate_proj, layer.mlp.up_proj)

    @torch.no_grad()
    def features(self, token_ids_T: Tensor, position_T: Tensor, attend, taps: dict[int, Tensor]) -> None:
        """Run one row; the output of each layer in `taps` is written into its tensor [T, D]. Capture: safe.

        attend(layer, q_HTC, k_GTC, v_GTC, scale, window) -> [H, T, C], as in model/target.py.
        """
        x_TD, added_TD = self.embedding(token_ids_T), None
        table = tuple(part[0].contiguous() for part in self.rotary(x_TD, position_T[None]))
        for number, layer in enumerate(self.layers):
            x_TD, normed_TD = _after(layer.input_layernorm, x_TD, added_TD)
            attended_TD = _attention(layer.self_attn, normed_TD, table, attend)
            x_TD, normed_TD = _after(layer.post_attention_layernorm, x_TD, attended_TD)
            added_TD = _mlp(layer.mlp, normed_TD)
            if number in taps:
                torch.add(x_TD, added_TD, out=taps[number])


def _after(norm: nn.Module, x_TD: Tensor, added_TD: Tensor | None) -> tuple[Tensor, Tensor]:
    return after_norm(x_TD, added_TD, norm.weight, norm.variance_epsilon)


def _attention(module: nn.Module, x_TD: Tensor, table: tuple[Tensor, Tensor], attend) -> Tensor:
    joined = _matmul(x_TD, module.q_proj, module.k_proj, module.v_proj)
    parts = joined.split([one.out_features for one in (module.q_proj, module.k_proj, module.v_proj)], dim=1)
    q_HTC, k_GTC, v_GTC = (rearrange(part, "t (h c) -> h t c", c=module.head_dim) for part in parts)
    norms = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    q_HTC, k_GTC = (
        normed_rotated(part, table, *((norm.weight, norm.variance_epsilon) if norm is not None else (None, 0.0)))
        for part, norm in zip((q_HTC, k_GTC), norms)
    )
    window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    out_HTC = attend(module.layer_idx, q_HTC, k_GTC, v_GTC, module.scaling, window)
    return _matmul(rearrange(out_HTC, "h t c -> t (h c)"), module.o_proj)


def _mlp(module: nn.Module, x_TD: Tensor) -> Tensor:
    return _matmul(gate(_matmul(x_TD, module.gate_proj, module.up_proj)), module.down_proj)


def _matmul(x_TD: Tensor, *linears: nn.Linear) -> Tensor:
    out = linear(x_TD, *(one.weight for one in linears))
    if linears[0].bias is None:
        return out
    return out + torch.cat([one.bias for one in linears])


def _lay_together(*linears: nn.Linear) -> None:
    """Let the weights stand under each other in one tensor. The values stay."""
    together = torch.cat([one.weight.detach() for one in linears])
    for one, part in zip(linears, together.split([one.out_features for one in linears])):
        one.weight.data = part
