"""Captured decoding: a plain step and a speculative step at fixed shapes, replayed instead of launched from Python.

The caches are as long as the longest sequence; which keys count follows from a length that lives on the device, so one
graph serves every step of every prompt. A rejected draft stays in the caches behind the length, unseen, until it is
overwritten. The prompt's forward has the prompt's shape and is launched from Python. Above temperature 0 the graphs read
uniform numbers that the host writes before each replay, in the order in which the eager steps draw them.

Called by eval.py. The same three steps, launched from Python, are model/decode.EagerSteps.
"""

import functools

import torch
from einops import rearrange
from torch import Tensor

from graphcap.engine.capture import Capturer
from graphcap.model.attention import joined
from graphcap.model.decode import Verification, lead_of
from graphcap.model.drafter import Drafter
from graphcap.model.sampling import GREEDY, Sampling, choose, propose, uniforms, verify
from graphcap.model.target import KeyValueCache, Target


class FixedCache:
    """A view of a KeyValueCache for N tokens at positions that live on the device; attends over the whole buffers."""

    def __init__(self, cache: KeyValueCache, position_N: Tensor) -> None:
        self.cache, self.position_N = cache, position_N
        key_S = torch.arange(cache.max_length, device=position_N.device)
        self.distance_NS = position_N[:, None] - key_S

    def positions(self, token_ids_N: Tensor) -> Tensor:
        return self.position_N

    def __call__(self, layer: int, q_HNC: Tensor, k_GNC: Tensor, v_GNC: Tensor, scale: float, window: int | None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.index_copy_(1, self.position_N, k_GNC)
        values.index_copy_(1, self.position_N, v_GNC)
        mask = self.distance_NS >= 0
        if window is not None:
            mask = mask & (self.distance_NS < window)
        return masked_attention(q_HNC, keys, values, mask, scale)


def masked_attention(q_HNC: Tensor, k_GSC: Tensor, v_GSC: Tensor, mask_NS: Tensor, scale: float) -> Tensor:
    """Dense attention of a few queries over fixed buffers, [H, N, C], written out: torch's own would copy the key heads."""
    q_GRC = rearrange(q_HNC, "(g r) n c -> g (r n) c", g=k_GSC.shape[0])
    scores_GRS = torch.bmm(q_GRC, k_GSC.transpose(1, 2)).float() * scale
    hidden_RS = (~mask_NS).repeat(q_GRC.shape[1] // mask_NS.shape[0], 1)
    weights_GRS = scores_GRS.masked_fill_(hidden_RS, float("-inf")).softmax(dim=-1).to(v_GSC.dtype)
    return rearrange(torch.bmm(weights_GRS, v_GSC), "g (r n) c -> (g r) n c", n=mask_NS.shape[0])


class FixedSteps:
    """The steps of decoding at fixed shapes. Captured on a GPU; elsewhere the same functions run as they are."""

    def __init__(self, target: Target, drafter: Drafter, *, max_length: int, sampling: Sampling = GREEDY) -> None:
        """max_length: tokens of the longest prompt, its reply and one block."""
        self.sampling, self.generator = sampling, torch.Generator()  # each reply's own is set before its prefill
        self.target, self.drafter, device = target, drafter, target.head_VD.device
        self.max_length, self.block_size = max_length, drafter.config.block_size
        self.cache = KeyValueCache(max_length)
        self.context: list[tuple[Tensor, Tensor]] = []
        self.length = torch.zeros((), dtype=torch.int64, device=device)  # tokens whose keys count
        self.token_1 = torch.zeros(1, dtype=torch.int64, device=device)  # the token behind them
        self.block_K = torch.full((self.block_size,), drafter.config.mask_token_id, device=device)
        self.plain_result = torch.zeros(2, dtype=torch.float64, device=device)  # token, lead over the second largest
        self.block_result = torch.zeros(2 * self.block_size, dtype=torch.int64, device=device)  # tokens, drafts, kept drafts
        shape = (self.block_size - 1, target.head_VD.shape[0])  # the draft's graph writes it, the verification's reads it
        self.draft_logits_JV = torch.zeros(shape, dtype=target.head_VD.dtype, device=device)
        self.uniform_2K = torch.zeros(2, self.block_size, dtype=torch.float64, device=device)  # for verifying, for drafting
        self.offset_K = torch.arange(self.block_size, device=device)
        self.prefill([0, 0])  # allocates the caches
        self._capturer, self._plain, self._draft, self._verify = None, self._plain_step, self._draft_step, self._verify_step
        if device.type == "cuda":
            self._capture(device)

    def _capture(self, device: torch.device) -> None:
        self._capturer = Capturer(device)

        def from_the_start(function) -> None:
            self.length.zero_()
            function()

        for name in ("_plain", "_draft", "_verify"):
            function = getattr(self, name)
            self._capturer.warm_up(functools.partial(from_the_start, function))
            setattr(self, name, self._capturer.capture(name.strip("_"), function).replay)

    def close(self) -> None:
        """Destroy the graphs."""
        if self._capturer is not None:
            self._capturer.close()

    @torch.no_grad()
    def prefill(self, prompt_ids: list[int]) -> tuple[int, float]:
        """The reply's first token, and how far the largest logit is above the second."""
        self.cache.length = 0
        token_ids = torch.tensor(prompt_ids, device=self.length.device)
        logits, features = self.target.extend(token_ids, self.cache, last_only=True)
        new = self.drafter.context(features, torch.arange(len(prompt_ids), device=token_ids.device))
        if not self.context:
            self.context = [
                tuple(part.new_zeros(part.shape[0], self.max_length, part.shape[2]) for part in pair) for pair in new
            ]
            for buffers in (self.cache.keys, self.cache.values):  # what no step has written must still be finite
                for buffer in buffers.values():
                    buffer[:, len(prompt_ids) :] = 0
        for kept, added in zip(self.context, new, strict=True):
            kept[0][:, : len(prompt_ids)] = added[0]
            kept[1][:, : len(prompt_ids)] = added[1]
        self.length.fill_(len(prompt_ids))
        self._write_uniforms(1, 1)
        self.token_1.copy_(choose(logits, self.sampling, self.uniform_2K[:1, :1])[0])
        return int(self.token_1), lead_of(logits).item()

    def _write_uniforms(self, rows: int, columns: int) -> None:
        """The next uniform numbers of this reply into their buffer; at temperature 0 nobody reads it."""
        if self.sampling.temperature > 0:
            self.uniform_2K[:rows, :columns] = uniforms(self.generator, rows, columns)

    def plain(self, token_id: int) -> tuple[int, float]:
        """The next token and the largest logit's lead; `token_id` is the one the step before returned."""
        self._write_uniforms(1, 1)
        self._plain()
        token, lead = self.plain_result.tolist()
        return int(token), lead

    def speculative(self, token_id: int) -> Verification:
        """One draft and verification; `token_id` is the one the step before returned.

        It is on the device already. Launches two graphs and waits for them; on a CPU draft_s is 0.
        """
        self._write_uniforms(2, self.block_size)
        timed = self._capturer is not None
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if timed else []
        if timed:
            events[0].record()
        self._draft()
        if timed:
            events[1].record()
        self._verify()
        *tokens, matches = self.block_result.tolist()
        draft_s = events[0].elapsed_time(events[1]) / 1e3 if timed else 0.0
        return Verification(tokens[: self.block_size], matches, tokens[self.block_size :], draft_s)

    @torch.no_grad()
    def _plain_step(self) -> None:
        logits, _ = self.target.extend(self.token_1, FixedCache(self.cache, self.length[None]))
        self.token_1.copy_(choose(logits, self.sampling, self.uniform_2K[:1, :1])[0])
        self.plain_result.copy_(torch.stack((self.token_1[0].double(), lead_of(logits).double())))
        self.length.add_(1)

    @torch.no_grad()
    def _draft_step(self) -> None:
        self.block_K[:1] = self.token_1
        self.block_K[1:] = self.drafter.config.mask_token_id
        key = torch.arange(self.max_length + self.block_size, device=self.length.device)
        mask_KS = ((key < self.length) | (key >= self.max_length)).expand(self.block_size, -1)
        hidden_JD = self.drafter(
            self.target.embed(self.block_K[:2]),
            self.length + self.offset_K,
            self.context,
            lambda q, *keys: masked_attention(q, *joined(*keys), mask_KS, self.drafter.scale),
        )
        logits_JV = hidden_JD @ self.target.head_VD.T
        self.block_K[1:] = propose(logits_JV, self.sampling, self.uniform_2K[1:, :-1])[0]
        if self.sampling.draws_drafts:
            self.draft_logits_JV.copy_(logits_JV)

    @torch.no_grad()
    def _verify_step(self) -> None:
        position_K = self.length + self.offset_K
        logits, features = self.target.extend(self.block_K, FixedCache(self.cache, position_K))
        tokens, matches = verify(self.block_K[None, 1:], self.draft_logits_JV, logits, self.sampling, self.uniform_2K[:1])
        for kept, added in zip(self.context, self.drafter.context(features, position_K), strict=True):
            kept[0].index_copy_(1, position_K, added[0])
            kept[1].index_copy_(1, position_K, added[1])
        self.block_result.copy_(torch.cat((tokens[0], self.block_K[1:], matches)))
        self.token_1.copy_(tokens[0, matches])
        self.length.add_(matches[0] + 1)
