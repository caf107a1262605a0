"""The layers of a target over one row, without transformers' many small kernels: the drafter's own functions between matmuls.

Only for models of a form that we know, and only after each layer has been compared with transformers' own. Matmuls that share
their input become one: their weights are laid under each other, once, in the memory that the model then uses too.

Called by model/target.py. Source of the layers: transformers 5, models/llama, mistral, qwen2, qwen3.
"""

import copy

import torch
from einops import rearrange
from torch import Tensor, nn

from graphcap.kernels import copy_rows_
from graphcap.model.attention import TILE
from graphcap.model.fused import after_norm, gate, linear, normed_rotated, stand_together

KNOWN = ("llama", "mistral", "qwen2", "qwen3")  # model types
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
PROJECTIONS, NORMS = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # matmuls of one input
TOLERANCE = 1e-3  # of what a layer adds, in float32


def is_known(decoder: nn.Module) -> bool:
    """Whether every layer has the modules of a plain pre-norm decoder, none other, and no hook that would not run."""
    if decoder.config.model_type not in KNOWN:
        return False
    rotated = 2 * decoder.rotary_emb.inv_freq.numel()
    return all(_is_plain(layer) and layer.self_attn.head_dim == rotated for layer in decoder.layers)


def _is_plain(layer: nn.Module) -> bool:
    if set(dict(layer.named_children())) != LAYER:
        return False
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    if set(attention) not in (PROJECTIONS, PROJECTIONS | NORMS) or set(mlp) != MLP:
        return False
    parts = attention | mlp
    linears = [module for name, module in parts.items() if name in PROJECTIONS | MLP - {"act_fn"}]
    return (
        isinstance(mlp["act_fn"], nn.SiLU | _silu_of_transformers())
        and all(type(one) is nn.Linear and not one.weight.is_inference() for one in linears)
        and all(len({parts[name].bias is None for name in names}) == 1 for names in TOGETHER)
        and not any(_hooks(module) for module in layer.modules())
    )


def _hooks(module: nn.Module) -> list:
    """Of others: our taps write only what transformers' layers are asked for."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return [hook for hook in hooks if not getattr(hook, "is_tap", False)]


def _silu_of_transformers() -> type:
    from transformers.activations import ACT2FN

    return type(ACT2FN["silu"])


@torch.no_grad()
def adds_the_same(layer: nn.Module, rotary: nn.Module, attend, position_T: Tensor) -> bool:
    """Whether a layer, in float32, adds to random states what transformers' own forward of it adds. position_T: [TILE].

    attend: of a row with these positions.
    """
    exact, generator = copy.deepcopy(layer).float(), torch.Generator(position_T.device).manual_seed(0)
    shape = TILE, layer.self_attn.q_proj.in_features
    x_TD = torch.randn(shape, generator=generator, device=position_T.device)
    table = rotary(x_TD, position_T[None])
    theirs = exact(x_TD[None], position_embeddings=table, attention_mask=None, use_cache=False, attend=attend)
    theirs_TD = (theirs[0] if isinstance(theirs, tuple) else theirs).view(shape) - x_TD
    out_TD = x_TD.clone()
    _layer_(exact, out_TD, _row_table(table), attend)
    return bool((out_TD - x_TD - theirs_TD).norm() <= TOLERANCE * theirs_TD.norm())


class LeanLayers:
    """Embedding and layers of a decoder; every tensor is the decoder's own. Hooks on its layers do not run."""

    def __init__(self, decoder: nn.Module, num_layers: int) -> None:
        """decoder: `is_known`. Its weights move: q, k and v under each other, gate and up too; no more memory than one layer's.

        num_layers: how many of the layers a row runs through.
        """
        self.embedding, self.rotary = decoder.embed_tokens, decoder.rotary_emb
        self.layers = [decoder.layers[number] for number in range(num_layers)]
        for layer in self.layers:
            for part, names in zip((layer.self_attn, layer.mlp), TOGETHER):
                _lay_together([getattr(part, name) for name in names])

    @torch.no_grad()
    def features(self, token_ids_T: Tensor, position_T: Tensor, attend, taps: dict[int, Tensor]) -> None:
        """Run one row; the output of each layer in `taps` is written into its tensor [T, D]. Capture: safe.

        attend(layer, q_HTC, k_GTC, v_GTC, scale, window) -> [H, T, C], as in model/target.py.
        """
        x_TD = self.embedding(token_ids_T)
        table = _row_table(self.rotary(x_TD, position_T[None]))
        for number, layer in enumerate(self.layers):
            _layer_(layer, x_TD, table, attend)
            if number in taps:
                copy_rows_(taps[number], x_TD)


def _row_table(table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tuple(part[0].contiguous() for part in table)


def _layer_(layer: nn.Module, x_TD: Tensor, table, attend) -> None:
    """The residual stream becomes what it is behind the layer: the last matmuls of attention and MLP add to it in place."""
    attention, mlp = layer.self_attn, layer.mlp
    _add_product_(x_TD, _attended(attention, _normed(layer.input_layernorm, x_TD), table, attend), attention.o_proj)
    gated_TI = gate(_matmul(_normed(layer.post_attention_layernorm, x_TD), mlp.gate_proj, mlp.up_proj))
    _add_product_(x_TD, gated_TI, mlp.down_proj)


def _normed(norm: nn.Module, x_TD: Tensor) -> Tensor:
    return after_norm(x_TD, None, norm.weight, norm.variance_epsilon)[1]


def _add_product_(x_TD: Tensor, input_TI: Tensor, projection: nn.Linear) -> None:
    """x += projection(input)."""
    x_TD.addmm_(input_TI, projection.weight.T)
    if projection.bias is not None:
        x_TD += projection.bias


def _attended(module: nn.Module, x_TD: Tensor, table: tuple[Tensor, Tensor], attend) -> Tensor:
    joined = _matmul(x_TD, module.q_proj, module.k_proj, module.v_proj)
    heads = rearrange(joined, "t (h c) -> h t c", c=module.head_dim)
    counts = [one.out_features // module.head_dim for one in (module.q_proj, module.k_proj, module.v_proj)]
    if getattr(module, "q_norm", None) is not None:
        q_HTC, k_GTC, v_GTC = heads.split(counts)
        q_HTC, k_GTC = (
            normed_rotated(part, table, norm.weight, norm.variance_epsilon)
            for part, norm in ((q_HTC, module.q_norm), (k_GTC, module.k_norm))
        )
    else:  # queries and keys side by side, in one pass
        both, v_GTC = heads.split([counts[0] + counts[1], counts[2]])
        q_HTC, k_GTC = normed_rotated(both, table, None, 0.0).split(counts[:2])
    out_HTC = attend(module.layer_idx, q_HTC, k_GTC, v_GTC, module.scaling, _window(module))
    return rearrange(out_HTC, "h t c -> t (h c)")


def _window(module: nn.Module) -> int | None:
    """Mistral's attention asks its config, the others have an attribute or know no window, whatever their config says."""
    if module.config.model_type == "mistral":
        return getattr(module.config, "sliding_window", None)
    return getattr(module, "sliding_window", None)


def _matmul(x_TD: Tensor, *linears: nn.Linear) -> Tensor:
    out = linear(x_TD, *(one.weight for one in linears))
    if linears[0].bias is None:
        return out
    return out + torch.cat([one.bias for one in linears])


def _lay_together(linears: list[nn.Linear]) -> None:
    """Let the weights stand under each other in one tensor, unless they do. The values stay."""
    if stand_together([one.weight for one in linears]):
        return
    together = torch.cat([one.weight.detach() for one in linears])
    for one, part in zip(linears, together.split([one.out_features for one in linears])):
        one.weight.data = part
