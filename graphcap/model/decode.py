"""Decoding one sequence: plain, speculative with a drafter, and prompt lookup as the baseline without a model.

Speculative decoding is exact: at temperature 0 it commits plain decoding's tokens, above it tokens of plain sampling's
distribution (sampling.py). This file knows no graph. Called by eval.py, engine/decoding.py and engine/evaluation.py.
Source: z-lab/dflash 44947fb, dflash_generate, for the order of steps.
"""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from graphcap.model.attention import DenseAttention
from graphcap.model.blocks import leading_matches
from graphcap.model.drafter import Drafter
from graphcap.model.sampling import GREEDY, Sampling, choose, propose, uniforms, verify
from graphcap.model.target import KeyValueCache, Target


@dataclass
class Reply:
    """One decoded reply. The first token comes from the prompt's own forward and belongs to no verification."""

    token_ids: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)  # tokens each verification added, cut at the stop token and limit
    accepted: list[int] = field(default_factory=list)  # leading matches + 1 of each verification, not cut
    rejected: list[list[int]] = field(default_factory=list)  # drafts each verification refused
    gaps: list[float] = field(default_factory=list)  # largest minus second largest logit of each token, plain decoding only
    prefill_s: float = 0.0
    decode_s: float = 0.0  # all tokens after the first
    draft_s: float = 0.0  # of decode_s, the drafter's part


class Verification(NamedTuple):
    """What a speculative step gave. tokens: K, of which the first `matches` + 1 are committed."""

    tokens: list[int]
    matches: int
    drafted: list[int]
    draft_s: float


class DrafterCache:
    """Keys and values of the context in every drafter layer, up to `max_length` tokens."""

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self.layers: list[tuple[Tensor, Tensor]] = []

    def append(self, drafter: Drafter, features_SF: Tensor) -> None:
        """Add the context of the next S tokens. features_SF: [S, L·D]."""
        start, end = self.length, self.length + features_SF.shape[0]
        position_S = torch.arange(start, end, device=features_SF.device)
        new = drafter.context(features_SF, position_S)
        if not self.layers:
            self.layers = [
                tuple(part.new_empty(part.shape[0], self.max_length, part.shape[2]) for part in pair) for pair in new
            ]
        for kept, added in zip(self.layers, new, strict=True):
            kept[0][:, start:end] = added[0]
            kept[1][:, start:end] = added[1]
        self.length = end

    def context(self) -> list[tuple[Tensor, Tensor]]:
        return [(k[:, : self.length], v[:, : self.length]) for k, v in self.layers]


def draft_logits(drafter: Drafter, target: Target, cache: DrafterCache, token_id: int) -> Tensor:
    """The drafter's logits of the K-1 tokens after `token_id`, which stands right behind the cached context: [K-1, V]."""
    config, device = drafter.config, target.head_VD.device
    embeddings_UD = target.embed(torch.tensor([token_id, config.mask_token_id], device=device))
    position_K = torch.arange(cache.length, cache.length + config.block_size, device=device)
    attend = DenseAttention()  # under no mask: every query of the block sees the whole context and the whole block
    context = cache.context()
    hidden_JD = drafter(embeddings_UD, position_K, context, lambda q, *keys: attend(q, *keys, None, drafter.scale))
    return hidden_JD @ target.head_VD.T


class EagerSteps:
    """The steps of decoding one sequence, launched from Python: the prompt's forward, a plain step, a speculative step.

    engine/decoding.py has the same three as replayed graphs.
    """

    def __init__(self, target: Target, drafter: Drafter | None, *, max_length: int, sampling: Sampling = GREEDY) -> None:
        """drafter: None if only plain steps are taken. max_length: tokens of the longest prompt, its reply and one block."""
        self.target, self.drafter, self.device, self.sampling = target, drafter, target.head_VD.device, sampling
        self.cache, self.drafter_cache = KeyValueCache(max_length), DrafterCache(max_length)
        self.generator: torch.Generator | None = (
            None  # of a reply's uniform numbers; set before its prefill above temperature 0
        )

    @torch.no_grad()
    def prefill(self, prompt_ids: list[int]) -> tuple[int, float]:
        """The reply's first token, and how far the largest logit is above the second. Whatever was cached is forgotten."""
        self.cache.length = self.drafter_cache.length = 0
        logits, features = self.target.extend(torch.tensor(prompt_ids, device=self.device), self.cache, last_only=True)
        self.cache.length = len(prompt_ids)
        if self.drafter is not None:
            self.drafter_cache.append(self.drafter, features)
        return int(choose(logits, self.sampling, self._uniforms(1, 1))), lead_of(logits).item()

    @torch.no_grad()
    def plain(self, token_id: int) -> tuple[int, float]:
        """The token after `token_id`, and the largest logit's lead over the second."""
        logits, _ = self.target.extend(torch.tensor([token_id], device=self.device), self.cache)
        self.cache.length += 1
        return int(choose(logits, self.sampling, self._uniforms(1, 1))), lead_of(logits).item()

    @torch.no_grad()
    def speculative(self, token_id: int) -> Verification:
        """One draft and verification behind `token_id`, which stands right behind the cached tokens."""
        begin, block_size = time.perf_counter(), self.drafter.config.block_size
        verify_1K, draft_1K = self._uniforms(2, block_size).split(1)
        proposal = draft_logits(self.drafter, self.target, self.drafter_cache, token_id)
        drafted = propose(proposal, self.sampling, draft_1K[:, :-1])
        proposed = drafted[0].tolist()
        draft_s = time.perf_counter() - begin
        block = torch.cat((torch.tensor([token_id], device=self.device), drafted[0]))
        logits, features = self.target.extend(block, self.cache)
        tokens, kept = verify(drafted, proposal, logits, self.sampling, verify_1K)
        matches = int(kept)
        self.cache.length += matches + 1
        self.drafter_cache.append(self.drafter, features[: matches + 1])
        return Verification(tokens[0].tolist(), matches, proposed, draft_s)

    def _uniforms(self, rows: int, columns: int) -> Tensor:
        """The next uniform numbers of this reply; at temperature 0 nobody reads them."""
        if self.sampling.temperature == 0:
            return torch.zeros(rows, columns, dtype=torch.float64, device=self.device)
        assert self.generator is not None, "steps need a generator above temperature 0"
        return uniforms(self.generator, rows, columns).to(self.device)


def lead_of(logits_SV: Tensor) -> Tensor:
    """How far the last row's largest logit is above the second largest, []."""
    top = logits_SV[-1].topk(2).values
    return top[0] - top[1]


def decode_plain(target: Target, prompt_ids: list[int], *, max_new_tokens: int, stop_ids: set[int], steps=None) -> Reply:
    """Decoding without a drafter, one token a forward.

    steps: greedy EagerSteps by default; others take the same steps another way, or above temperature 0, and then with the
    reply's generator in `steps.generator`.
    """
    steps = steps or EagerSteps(target, None, max_length=len(prompt_ids) + max_new_tokens + 1)
    reply, begin = Reply(), time.perf_counter()
    token_id, gap = steps.prefill(prompt_ids)
    reply.token_ids, reply.gaps = [token_id], [gap]
    reply.prefill_s, begin = time.perf_counter() - begin, time.perf_counter()
    while len(reply.token_ids) < max_new_tokens and reply.token_ids[-1] not in stop_ids:
        token_id, gap = steps.plain(reply.token_ids[-1])
        reply.token_ids.append(token_id)
        reply.gaps.append(gap)
    reply.decode_s = time.perf_counter() - begin
    return reply


def decode_speculative(
    target: Target,
    drafter: Drafter,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    stop_ids: set[int],
    steps=None,
) -> Reply:
    """Speculative decoding: draft a block, verify it in one target forward, keep the leading drafts and one token more.

    steps: as for `decode_plain`.
    """
    steps = steps or EagerSteps(target, drafter, max_length=len(prompt_ids) + max_new_tokens + drafter.config.block_size + 1)
    reply, begin = Reply(), time.perf_counter()
    reply.token_ids = [steps.prefill(prompt_ids)[0]]
    reply.prefill_s, begin = time.perf_counter() - begin, time.perf_counter()
    while len(reply.token_ids) < max_new_tokens and reply.token_ids[-1] not in stop_ids:
        step = steps.speculative(reply.token_ids[-1])
        kept = cut(step.tokens[: step.matches + 1], stop_ids=stop_ids, room=max_new_tokens - len(reply.token_ids))
        reply.token_ids += kept
        reply.accepted.append(step.matches + 1)
        reply.committed.append(len(kept))
        reply.rejected.append(step.drafted[step.matches :])
        reply.draft_s += step.draft_s
    reply.decode_s = time.perf_counter() - begin
    return reply


def cut(token_ids: list[int], *, stop_ids: set[int], room: int) -> list[int]:
    """Up to and including the first stop token, at most `room` tokens."""
    for place, token_id in enumerate(token_ids[:room]):
        if token_id in stop_ids:
            return token_ids[: place + 1]
    return token_ids[:room]


def prompt_lookup_committed(prompt_ids: list[int], reply_ids: list[int], *, block_size: int, longest: int = 3) -> list[int]:
    """What prompt lookup would commit at each verification of this reply, with drafts as long as the drafter's.

    The draft is what followed the most recent earlier occurrence of the longest suffix of up to `longest` tokens.
    """
    committed, place = [], 1  # the first token of the reply comes with the prompt's forward
    while place < len(reply_ids):
        text = prompt_ids + reply_ids[:place]
        drafted = _looked_up(text, longest)[: block_size - 1]
        equal = [draft == token for draft, token in zip(drafted, reply_ids[place:])]
        matches = int(leading_matches(torch.tensor([equal], dtype=torch.bool)))
        step = min(matches + 1, len(reply_ids) - place)
        committed.append(step)
        place += step
    return committed


def _looked_up(text: list[int], longest: int) -> list[int]:
    for size in range(min(longest, len(text) - 1), 0, -1):
        suffix = text[-size:]
        for first in range(len(text) - size - 1, -1, -1):
            if text[first : first + size] == suffix:
                return text[first + size :]
    return []


def walk(matches: dict[int, int], first: int, last: int) -> list[int]:
    """Tokens a decode would commit at each verification of a document that the target wrote itself.

    matches: leading matches of the block at each anchor. first: the reply's first token, which comes with the prompt.
    last: the reply's last token. The next anchor stands matches + 1 further on. The last block is cut where the reply ends,
    as decoding cuts `Reply.committed` at the stop token or the limit; these two lists are therefore equal, while the last
    entry of `Reply.accepted` may be larger.
    """
    committed, anchor = [], first
    while anchor < last:
        step = min(matches[anchor] + 1, last - anchor)
        committed.append(step)
        anchor += step
    return committed
