"""Choosing tokens: greedily, or above temperature 0 by one of two exact rules of speculative sampling.

`match`: the drafter proposes its most likely tokens; the target draws its own sample at every position; proposals are kept
while they equal it. `sampled`: token k is drawn from the drafter's distribution q of that slot and kept with probability
min(1, p/q), else one token is drawn from the normalised positive part of p - q. Under both the reply has exactly the
distribution of sampling from the target alone.

Every function is one of logits and uniform numbers in [0, 1), so decoding launched from Python and a replayed graph share
them, and N draws at the same logits cost one call. Capture: safe, all of them. Called by decode.py and engine/decoding.py.
Source: `match` as in z-lab/dflash 44947fb, dflash_generate; `sampled` as in Leviathan et al., arXiv 2211.17192.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcap.model.blocks import leading_matches

# Weights are whole numbers: their running sums are then the same on every device, and allowed under deterministic math.
WEIGHT_OF_1 = 2.0**52


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature: 0 is greedy, and then `rule` has no meaning. rule: match or sampled."""

    temperature: float
    rule: str

    @property
    def draws_drafts(self) -> bool:
        """Whether the drafter samples; otherwise it proposes its most likely tokens."""
        return self.temperature > 0 and self.rule == "sampled"


GREEDY = Sampling(temperature=0.0, rule="match")


def generator_of(seed: int, number: int) -> torch.Generator:
    """The generator of one reply's uniform numbers, on the CPU. number: of the prompt."""
    digest = hashlib.blake2b(f"decode {seed} {number}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


def uniforms(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    """float64 [rows, columns] in [0, 1), on the CPU."""
    return torch.rand(rows, columns, generator=generator, dtype=torch.float64)


def probabilities(logits_KV: Tensor, temperature: float) -> Tensor:
    """softmax(logits ÷ temperature) in float64, [K, V]; whatever the temperature above 0, no division overflows."""
    logits_KV = logits_KV.double()
    return ((logits_KV - logits_KV.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)


def draw(weights_KV: Tensor, uniform_NK: Tensor) -> Tensor:
    """N tokens from every row of whole-number weights, by the inverse of their running sum: int64 [N, K].

    weights_KV: int64, of which each row has one above 0. uniform_NK: float64.
    """
    sums_KV = weights_KV.cumsum(dim=-1)
    total_K1 = sums_KV[:, -1:]
    wanted_KN = torch.minimum((uniform_NK.T * total_K1).long(), total_K1 - 1)
    return torch.searchsorted(sums_KV, wanted_KN.contiguous(), right=True).T


def choose(logits_KV: Tensor, sampling: Sampling, uniform_NK: Tensor) -> Tensor:
    """The target's or the drafter's own token at K positions, N times: int64 [N, K]; at temperature 0 the most likely."""
    if sampling.temperature == 0:
        return logits_KV.argmax(dim=-1).expand(uniform_NK.shape)
    return draw(_weights(probabilities(logits_KV, sampling.temperature)), uniform_NK)


def propose(draft_logits_JV: Tensor, sampling: Sampling, uniform_NJ: Tensor) -> Tensor:
    """The drafter's J = K-1 tokens behind the block's first, N times: int64 [N, J]."""
    return choose(draft_logits_JV, sampling if sampling.draws_drafts else GREEDY, uniform_NJ)


def verify(
    drafted_NJ: Tensor, draft_logits_JV: Tensor, target_logits_KV: Tensor, sampling: Sampling, uniform_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """What a verification commits: tokens int64 [N, K], of which the first `kept` + 1 count, and kept drafts int64 [N].

    drafted_NJ: int64, what `propose` gave, by other uniforms than these. draft_logits_JV: what they were drawn from, read
    by the rule `sampled` alone. target_logits_KV: of the block [token, drafts]. Logits in any float dtype; uniform_NK: float64.
    """
    if sampling.draws_drafts:
        return _keep_by_ratio(drafted_NJ, draft_logits_JV, target_logits_KV, sampling.temperature, uniform_NK)
    own_NK = choose(target_logits_KV, sampling, uniform_NK)
    return own_NK, leading_matches(drafted_NJ == own_NK[:, :-1])


def _keep_by_ratio(
    drafted_NJ: Tensor, draft_logits_JV: Tensor, target_logits_KV: Tensor, temperature: float, uniform_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule `sampled`. uniform_NK: one for every draft's keeping; the last draws the token that ends the block."""
    p_KV, q_JV = probabilities(target_logits_KV, temperature), probabilities(draft_logits_JV, temperature)
    slot_K = torch.arange(p_KV.shape[0], device=p_KV.device)
    p_NJ, q_NJ = p_KV[slot_K[:-1], drafted_NJ], q_JV[slot_K[:-1], drafted_NJ]
    kept_N = leading_matches(uniform_NK[:, :-1] * q_NJ < p_NJ)
    left_KV = _weights(torch.cat(((p_KV[:-1] - q_JV).clamp_min(0), p_KV[-1:])))
    some_K1 = left_KV.sum(dim=-1, keepdim=True) > 0  # none where p = q, and then a draft is refused by rounding alone
    last_NK = draw(torch.where(some_K1, left_KV, _weights(p_KV)), uniform_NK[:, -1:].expand(-1, slot_K.numel()))
    drafted_NK = torch.cat((drafted_NJ, last_NK[:, -1:]), dim=1)
    return torch.where(slot_K < kept_N[:, None], drafted_NK, last_NK), kept_N


def _weights(share_KV: Tensor) -> Tensor:
    return (share_KV * WEIGHT_OF_1).round().long()
