"""The drafter: a small stack of decoder layers that reads the target's features and drafts a block at once.

Parameter names and shapes are those of z-lab's DFlash, so that a state dict is the export. The drafter owns no embedding
and no head; it borrows the target's. The context's keys and values of every layer depend on the features only, so they
are made once, by `context`: training makes them for a row, decoding keeps them in a cache.

Calls: engine/step.py, model/decode.py. Source: z-lab/dflash 44947fb, dflash/model.py.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphcap.errors import ConfigError
from graphcap.model.fused import RMSNorm, gate, heads_rotated, in_blocks, linear, rotary_table


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Sizes and conventions of a drafter. `target_layer_ids`: id i is the output of decoder layer i, 0-based."""

    hidden_size: int  # D
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # C
    intermediate_size: int
    vocab_size: int  # V
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int  # K
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int

    def __post_init__(self) -> None:
        ids, num_layers = self.target_layer_ids, self.num_target_layers
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
            raise ConfigError(
                "drafter key",
                "target_layer_ids",
                expected=f"rising layer numbers from 0 to {num_layers - 1}, none twice",
                got=str(list(ids)),
                cause="id i means the output of decoder layer i of the target, counted from 0",
                fix="list each tapped layer once, for example "
                + ",".join(map(str, tapped_layers(num_layers, min(5, num_layers)))),
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                "drafter key",
                "mask_token_id",
                expected=f"a row of the target's embedding, 0 to {self.vocab_size - 1}",
                got=str(self.mask_token_id),
                fix="name an unused token with drafter.mask_token",
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "drafter key",
                "num_kv_heads",
                expected=f"a divisor of num_heads ({self.num_heads})",
                got=str(self.num_kv_heads),
                fix="set drafter.num_heads and drafter.num_kv_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(
                "drafter key", "head_dim", expected="an even number", got=str(self.head_dim), fix="set drafter.head_dim"
            )


def tapped_layers(num_target_layers: int, num_tapped: int) -> list[int]:
    """Evenly spaced layers from 1 to L-3: round(1 + i·(L-4)/(n-1)); the middle one if n is 1.

    Raises: ConfigError if the target is too shallow for `num_tapped` different layers.
    Source: z-lab/dflash 44947fb, build_target_layer_ids.
    """
    if num_tapped == 1:
        return [num_target_layers // 2]
    ids = [round(1 + i * (num_target_layers - 4) / (num_tapped - 1)) for i in range(num_tapped)]
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_target_layers:
        if num_tapped <= num_target_layers:  # too shallow to leave both ends out; z-lab's loop norms the last layer's output
            last = min(num_target_layers, max(num_tapped, num_target_layers - 1))
            return list(range(last - num_tapped, last))
        raise ConfigError(
            "recipe key",
            "drafter.num_tapped_layers",
            expected=f"at most the target's {num_target_layers} layers",
            got=str(num_tapped),
            fix="set drafter.num_tapped_layers or drafter.target_layer_ids",
        )
    return ids


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and from the block, by the same projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def projected(self, x_SD: Tensor) -> Tensor:
        """Queries, keys and values side by side, [S, (H + 2G) · C]."""
        return linear(x_SD, self.q_proj.weight, self.k_proj.weight, self.v_proj.weight)

    def forward(self, joined_QR: Tensor, table: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], attend) -> Tensor:
        """joined_QR: from `projected`.

        attend(q_HQC, context, block) -> [H, Q, C]; context and block: keys and values [G, S, C] and [G, Q, C].
        """
        q_HQC, *block = heads_rotated(joined_QR, self.q_norm, self.k_norm, table, self.k_proj.out_features // self.head_dim)
        out_HQC = attend(q_HQC, context, tuple(block))
        return linear(rearrange(out_HQC, "h q c -> q (h c)"), self.o_proj.weight)

    def heads(self, x: Tensor) -> Tensor:
        """[S, heads · C] as [heads, S, C]."""
        return rearrange(x, "s (h c) -> h s c", c=self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(gate(linear(x, self.gate_proj.weight, self.up_proj.weight)), self.down_proj.weight)


class Layer(nn.Module):
    """Pre-norm attention and MLP with residuals, over block states only.

    The stream comes and goes as two summands, which the next norm adds in its own pass.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x_QD: Tensor,
        added_QD: Tensor | None,
        table: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        attend,
        block_size: int,
        *,
        first: bool = False,
        last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """first: x is not yet laid out `in_blocks`, [N + 1, D]: normed and projected before it is, a K-th of the work.

        last: behind its attention a block's first token serves nothing, and is left out: [N·(K-1), D].
        """
        if first:
            joined_QR = in_blocks(self.self_attn.projected(self.input_layernorm(x_QD)), block_size)
            x_QD = in_blocks(x_QD, block_size)
        else:
            x_QD, normed_QD = self.input_layernorm.after(x_QD, added_QD)
            joined_QR = self.self_attn.projected(normed_QD)
        attended_QD = self.self_attn(joined_QR, table, context, attend)
        skipped_of = block_size if last else 0
        x_QD, normed_QD = self.post_attention_layernorm.after(x_QD, attended_QD, skipped_of=skipped_of)
        return x_QD, self.mlp(normed_QD)


class Drafter(nn.Module):
    """features → context keys and values; blocks' embeddings → final hidden states that the target's head turns into logits."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpointing = False  # keep only each layer's input, and run the layer again in the backward
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)

    def initialize(self, seed: int) -> None:
        """Normal(0, 0.02) matrices and norms of one, drawn on the CPU in float32: the same start on every device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)

    def context(self, features_SF: Tensor, position_S: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [G, S, C] of every layer for the features [S, L·D] of context tokens at `position_S`."""
        fused_SD = self.hidden_norm(linear(features_SF, self.fc.weight))
        table = self.table(position_S, fused_SD.dtype)
        attentions = [layer.self_attn for layer in self.layers]
        weights = [projection.weight for one in attentions for projection in (one.k_proj, one.v_proj)]
        parts = linear(fused_SD, *weights).chunk(len(weights), dim=1)  # one matmul for all layers
        return [
            (one.k_norm.rotated(one.heads(k), table), one.heads(v))
            for one, k, v in zip(attentions, parts[::2], parts[1::2], strict=True)
        ]

    def forward(self, embeddings_UD: Tensor, position_Q: Tensor, context: list[tuple[Tensor, Tensor]], attend) -> Tensor:
        """Final hidden states [N·(K-1), D] of all MASKs of N blocks; a block is a first token of its own and K-1 MASKs.

        embeddings_UD: [N + 1, D], of the first tokens and, last, of MASK. position_Q: int [Q], the document positions of the
        blocks' tokens. context: of every layer, from `context`. attend(q_HQC, context, block) -> [H, Q, C]: attention over the
        keys and values of both. Capture: safe.
        """
        table = self.table(position_Q, embeddings_UD.dtype)
        x_QD, added_QD, last = embeddings_UD, None, len(self.layers) - 1
        for number, (layer, keys_values) in enumerate(zip(self.layers, context, strict=True)):
            place = {"first": number == 0, "last": number == last}
            if self.checkpointing:
                x_QD = x_QD if added_QD is None else x_QD + added_QD  # one tensor to keep, not two
                inputs = x_QD, None, table, keys_values, attend, self.config.block_size
                x_QD, added_QD = checkpoint(layer, *inputs, **place, use_reentrant=False, preserve_rng_state=False)
            else:
                x_QD, added_QD = layer(x_QD, added_QD, table, keys_values, attend, self.config.block_size, **place)
        return self.norm.after(x_QD, added_QD)[1]

    def table(self, position_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotary_table(position_S, head_dim=self.config.head_dim, theta=self.config.rope_theta, dtype=dtype)

    @property
    def scale(self) -> float:
        return self.config.head_dim**-0.5
