"""Attention under a `Visibility`: our Triton kernels on CUDA, dense attention elsewhere; one visibility for both.

Which body runs is chosen by the device when the model is built, never by a failure. On CUDA the kernels walk over the
visibility's intervals (kernels/attention.py): no Q×KV boolean ever exists there.

Called by model/target.py, model/decode.py, engine/step.py, engine/audit.py, ops/device.py and export.py.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from graphcap import kernels
from graphcap.model.blocks import Visibility

if TYPE_CHECKING:  # needs triton
    from graphcap.kernels.walks import Walks

TILE = 128  # rows and draft tokens come in multiples of it: whole tiles for every kernel
Pair = tuple[Tensor, Tensor]


def attention_for(device: torch.device):
    """The attention body of a device: `mask(visibility, num_queries)` and `__call__(q, context, blocks, mask, scale)`.

    q: [H, Q, C]. context: keys and values [G, T, C], with G key heads that divide H. blocks: keys and values [G, Q, C] of the
    queries' own tokens, or None where a visibility has no draft keys. Gives the attention output [H, Q, C].
    """
    return IntervalAttention() if kernels.serve(device) else DenseAttention()


def joined(context: Pair, blocks: Pair | None) -> Pair:
    """Keys and values [G, S, C] of the context and, behind them, of the blocks."""
    return context if blocks is None else tuple(torch.cat(two, dim=1) for two in zip(context, blocks, strict=True))


class DenseAttention:
    """Scaled dot product attention under a boolean mask; for devices without our kernels, and for unhidden keys."""

    def mask(self, visibility: Visibility, num_queries: int) -> Tensor:
        """bool [num_queries, num_keys]."""
        num_draft = num_queries if visibility.group > 1 else 0
        device = visibility.low_R.device
        query = torch.arange(num_queries, device=device)[:, None]
        key = torch.arange(visibility.num_context + num_draft, device=device)[None, :]
        return visibility.predicate()(None, None, query, key)

    def __call__(self, q_HQC: Tensor, context: Pair, blocks: Pair | None, mask: Tensor | None, scale: float) -> Tensor:
        """mask: bool [Q, T + Q], [Q, T] without blocks, or None where nothing is hidden."""
        k_GSC, v_GSC = joined(context, blocks)
        gqa = q_HQC.shape[0] != k_GSC.shape[0]
        return F.scaled_dot_product_attention(
            q_HQC[None], k_GSC[None], v_GSC[None], attn_mask=mask, scale=scale, enable_gqa=gqa
        )[0]


class IntervalAttention:
    """Attention over the intervals of a visibility, by Triton kernels."""

    def __init__(self) -> None:
        from graphcap.kernels.attention import interval_attention
        from graphcap.kernels.walks import Walks

        self.kernels, self.walks = interval_attention, Walks

    def mask(self, visibility: Visibility, num_queries: int) -> "Walks":
        """How the kernels walk: of one forward. num_queries and the context's length must be multiples of TILE."""
        assert num_queries % TILE == 0 and visibility.num_context % TILE == 0, (
            f"{num_queries} queries, {visibility.num_context} context tokens: not whole tiles of {TILE}"
        )
        return self.walks(
            visibility.low_R,
            visibility.high_R,
            group=visibility.group,
            num_queries=num_queries,
            num_keys=visibility.num_context,
        )

    def __call__(self, q_HQC: Tensor, context: Pair, blocks: Pair | None, mask: "Walks", scale: float) -> Tensor:
        width, more = context[1].shape[-1], q_HQC.shape[-1] - context[1].shape[-1]
        if more:  # values narrower than queries: as wide with zeros
            context, blocks = (
                (k, F.pad(v, (0, more))) if k is not None else None for k, v in (context, blocks or (None, None))
            )
        out_HQC = self.kernels(q_HQC, context, blocks, mask, scale)
        return out_HQC[..., :width] if more else out_HQC
