"""Attention under a `Visibility`: compiled flex attention on CUDA, dense attention elsewhere; one predicate for both.

Which body runs is chosen by the device when the model is built, never by a failure. On CUDA the block mask is built
analytically from the visibility's intervals: no Q×KV boolean ever exists there.

Called by model/target.py, model/decode.py, engine/step.py, engine/audit.py, ops/device.py and export.py.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from graphcap.model.blocks import Visibility

TILE = 128  # the sparse block of flex attention; torch 2.11 to 2.13 are wrong for lengths that it does not divide


def attention_for(device: torch.device, *, caller_is_compiled: bool = False):
    """The attention body of a device: an object with `mask(visibility, num_queries)` and `__call__(q, k, v, mask, scale)`."""
    return FlexAttention(caller_is_compiled=caller_is_compiled) if device.type == "cuda" else DenseAttention()


class DenseAttention:
    """Scaled dot product attention under a boolean mask; for devices without flex attention."""

    def mask(self, visibility: Visibility, num_queries: int) -> Tensor:
        """bool [num_queries, num_keys]."""
        num_draft = num_queries if visibility.group > 1 else 0
        device = visibility.low_R.device
        query = torch.arange(num_queries, device=device)[:, None]
        key = torch.arange(visibility.num_context + num_draft, device=device)[None, :]
        return visibility.predicate()(None, None, query, key)

    def __call__(self, q_HQC: Tensor, k_GSC: Tensor, v_GSC: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention output [H, Q, C]. q: [H, Q, C]; k, v: [G, S, C] with G key heads that divide H.

        mask: bool [Q, S], or None where nothing is hidden.
        """
        gqa = q_HQC.shape[0] != k_GSC.shape[0]
        return F.scaled_dot_product_attention(
            q_HQC[None], k_GSC[None], v_GSC[None], attn_mask=mask, scale=scale, enable_gqa=gqa
        )[0]


class FlexAttention:
    """Block-sparse attention by torch's flex attention, which must be compiled: by itself here, or with its caller."""

    def __init__(self, *, caller_is_compiled: bool) -> None:
        """caller_is_compiled: this is only called from a function under torch.compile, which fuses around it."""
        from torch.nn.attention.flex_attention import flex_attention

        self.flex = flex_attention if caller_is_compiled else compiled_flex()

    def mask(self, visibility: Visibility, num_queries: int):
        """BlockMask of num_queries × num_keys from the visibility's intervals. Capture: safe, no host read."""
        return block_mask(visibility, num_queries)

    def __call__(self, q_HQC: Tensor, k_GSC: Tensor, v_GSC: Tensor, mask, scale: float) -> Tensor:
        """Attention output [H, Q, C]. q: [H, Q, C]; k, v: [G, S, C] with G key heads that divide H."""
        gqa = q_HQC.shape[0] != k_GSC.shape[0]
        return self.flex(q_HQC[None], k_GSC[None], v_GSC[None], block_mask=mask, scale=scale, enable_gqa=gqa)[0]


@functools.cache
def compiled_flex():
    """The one flex attention of this process that is compiled by itself: static shapes, whole graph.

    With `fullgraph` a recompile limit that is reached raises; it cannot end in dense attention.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def tiles(visibility: Visibility, num_queries: int) -> tuple[Tensor, Tensor]:
    """Which TILE × TILE tiles hold any visible pair and which hold nothing else: two bool tensors [query tiles, key tiles].

    A query tile t holds the groups ⌊TILE·t/K⌋ … ⌊(TILE·t+TILE-1)/K⌋; K need not divide TILE. A context tile is full only if
    it is full for all of them. Draft tiles are a band along the diagonal and never counted as full.
    """
    group, num_context, device = visibility.group, visibility.num_context, visibility.low_R.device
    first_token = torch.arange(0, num_queries, TILE, device=device)
    first, last = first_token // group, (first_token + TILE - 1) // group
    most = (TILE - 1) // group + 2
    rows = torch.minimum(first[:, None] + torch.arange(most, device=device), last[:, None])  # [query tiles, groups of a tile]
    low, high = visibility.low_R[rows][..., None], visibility.high_R[rows][..., None]

    tile_low = torch.arange(0, num_context, TILE, device=device)
    tile_high = tile_low + TILE
    any_context = ((low < tile_high) & (high > tile_low) & (high > low)).any(1)
    full_context = ((low <= tile_low) & (high >= tile_high)).all(1)
    if group == 1:
        return any_context, full_context
    draft_low = torch.arange(0, num_queries, TILE, device=device)
    any_draft = (first[:, None] * group < draft_low + TILE) & ((last[:, None] + 1) * group > draft_low)
    return torch.cat((any_context, any_draft), 1), torch.cat((full_context, torch.zeros_like(any_draft)), 1)


def block_mask(visibility: Visibility, num_queries: int):
    """The flex attention BlockMask of a visibility. num_queries and the context length must be multiples of TILE."""
    from torch.nn.attention.flex_attention import BlockMask

    num_keys = visibility.num_context + (num_queries if visibility.group > 1 else 0)
    assert num_queries % TILE == 0 and visibility.num_context % TILE == 0, f"{num_queries} queries, {num_keys} keys"
    some, full = tiles(visibility, num_queries)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~full),
        *_ordered(full),
        BLOCK_SIZE=TILE,
        mask_mod=visibility.predicate(),
        seq_lengths=(num_queries, num_keys),
    )


def _ordered(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and indices of the True tiles of each query tile, those first: int32 [1, 1, q] and [1, 1, q, k]."""
    count = tile.sum(-1, dtype=torch.int32)
    order = torch.argsort(tile.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], order[None, None]
