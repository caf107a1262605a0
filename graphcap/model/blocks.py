"""Anchors and blocks of a row: what a drafter reads, what it must predict, and which keys each query may see.

A block with anchor `a` covers the tokens `a … a+K-1` of its document. Slot 0 holds the real token, slots 1 … K-1 hold MASK
and predict the token at their own position. Everything here is a pure function of device tensors with fixed shapes.

Calls: engine/step.py for training, model/target.py for the target's own row mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

UNUSED = -1  # in an anchor slot: no block here


@dataclass(frozen=True)
class Visibility:
    """Which keys each query may see: an interval of the context, and the keys of its own group.

    Queries come in groups of `group` (a block of K draft tokens; 1 for the target's own row). Keys are the T context tokens
    and behind them, where there are any, the draft tokens in the order of the queries. Group r sees the context keys
    `low_R[r] <= key < high_R[r]` and all draft keys of its own group. The kernels walk over these
    intervals, and dense attention asks the predicate.
    """

    low_R: Tensor  # int64 [R]
    high_R: Tensor  # int64 [R]
    group: int
    num_context: int  # T

    def predicate(self):
        """The function (batch, head, query, key) -> bool that says whether `query` may see `key`; ints or int tensors."""
        low_R, high_R, group, num_context = self.low_R, self.high_R, self.group, self.num_context

        def allows(batch, head, query, key):
            row = query // group
            context = (key < num_context) & (key >= low_R[row]) & (key < high_R[row])
            own = (key >= num_context) & ((key - num_context) // group == row)
            return context | own

        return allows


@dataclass(frozen=True)
class Blocks:
    """The blocks of one row. N anchor slots, K tokens a block, J = K-1 predicted slots."""

    keep_N: Tensor  # bool [N]: the slot is used
    token_ids_U: Tensor  # int64 [N + 1]: the anchors' tokens, and MASK, which stands behind each of them K-1 times
    position_Q: Tensor  # int64 [N·K]: position in the document
    label_NJ: Tensor  # int64 [N, K-1]: the token to predict, 0 where there is none
    weight_NJ: Tensor  # float32 [N, K-1]: loss weight, 0 where there is nothing to learn
    visibility: Visibility


def document_start(position_T: Tensor) -> Tensor:
    """Index in the row of the first token of each token's document: int64 [T]. Padding (position 0) is its own document."""
    return torch.arange(position_T.numel(), device=position_T.device) - position_T.long()


def row_visibility(position_T: Tensor, *, window: int | None = None) -> Visibility:
    """Causal attention inside each document of a row; with `window`, over the last `window` tokens only.

    position_T: int [T], restarting at 0 with each document. Capture: safe.
    """
    index_T = torch.arange(position_T.numel(), device=position_T.device)
    low_T = document_start(position_T)
    if window is not None:
        low_T = torch.maximum(low_T, index_T - (window - 1))
    return Visibility(low_T, index_T + 1, group=1, num_context=position_T.numel())


def decay(block_size: int, gamma: float) -> list[float]:
    """Loss weights exp(-(k-1)/gamma) of slots k = 1 … K-1. Source: DFlash paper, equation 4."""
    import math

    return [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]


def default_gamma(block_size: int) -> float:
    """7, 5, 4 for blocks of 16, 10, 8; between and beyond the nearest two are continued in a line, at least 1.

    Source: DFlash paper, appendix A.1, for 16, 10 and 8.
    """
    slope, base = (1 / 2, 8) if block_size < 10 else (1 / 3, 10)
    return max(1.0, (4 if base == 8 else 5) + slope * (block_size - base))


def make_blocks(
    token_ids_T: Tensor, position_T: Tensor, supervised_T: Tensor, anchor_N: Tensor, *, decay_J: Tensor, mask_token_id: int
) -> Blocks:
    """The blocks of a row at its anchors.

    token_ids_T, position_T, supervised_T: int [T] (supervised 0 or 1). anchor_N: int [N], index in the row, UNUSED in unused
    slots. decay_J: float32 [K-1]. A label has weight only if its token is in the anchor's document and supervised; a block
    may run past the end of its document. The context of a block is its document strictly before the anchor.
    Capture: safe; no host read, shapes depend on the bucket only.
    Source: anchor rule of SpecForge a6b6b02; context and labels of z-lab/dflash 44947fb.
    """
    num_tokens, block_size = token_ids_T.numel(), decay_J.numel() + 1
    keep_N = anchor_N != UNUSED
    anchor_N = anchor_N.long().clamp(min=0)
    start_T = document_start(position_T)
    start_N = start_T[anchor_N]

    slot_K = torch.arange(block_size, device=anchor_N.device)
    place_NK = anchor_N[:, None] + slot_K
    inside_NK = place_NK < num_tokens
    place_NK = place_NK.clamp(max=num_tokens - 1)
    learned_NK = inside_NK & (start_T[place_NK] == start_N[:, None]) & (supervised_T[place_NK] != 0) & keep_N[:, None]

    first_N = token_ids_T[anchor_N].long()
    position_NK = position_T[anchor_N].long()[:, None] + slot_K
    low_N = torch.where(keep_N, start_N, 0)
    high_N = torch.where(keep_N, anchor_N, 0)
    return Blocks(
        keep_N=keep_N,
        token_ids_U=torch.cat((first_N, first_N.new_full((1,), mask_token_id))),
        position_Q=position_NK.flatten(),
        label_NJ=torch.where(learned_NK, token_ids_T[place_NK].long(), 0)[:, 1:],
        weight_NJ=(learned_NK.float()[:, 1:] * decay_J),
        visibility=Visibility(low_N, high_N, group=block_size, num_context=num_tokens),
    )


def leading_matches(correct_NJ: Tensor) -> Tensor:
    """How many slots from the first on are right, int64 [N]. correct_NJ: bool [N, K-1]."""
    return correct_NJ.long().cumprod(dim=1).sum(dim=1)
