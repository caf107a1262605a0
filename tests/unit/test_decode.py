"""Speculative decoding commits plain greedy decoding's tokens; its bookkeeping is that of a naive walk."""

import random
from types import SimpleNamespace

import pytest
import torch

from graphcap.model.attention import joined
from graphcap.model.decode import (
    DrafterCache,
    cut,
    decode_plain,
    decode_speculative,
    draft_logits,
    prompt_lookup_committed,
    walk,
)
from tests.toys import MASK_ID, VOCAB, fitted, fresh_seed, random_drafter, tiny_target

BLOCK = 4
LIMIT = 24


class Recital:
    """A drafter that recites a known text with some tokens changed, and notes what decoding shows it."""

    def __init__(self, target, text: list[int], wrong: set[int], block_size: int = BLOCK) -> None:
        """text: prompt, reply and what would follow. wrong: places of the text that it drafts wrongly."""
        self.target, self.text, self.wrong, self.scale = target, text, wrong, 1.0
        self.config = SimpleNamespace(block_size=block_size, mask_token_id=MASK_ID)
        self.starts: list[int] = []

    def token(self, place: int) -> int:
        return (self.text[place] + 1) % VOCAB if place in self.wrong else self.text[place]

    def context(self, features_SF, position_S):
        return [(position_S.double()[None, :, None], features_SF[None])]

    def __call__(self, embeddings_UD, position_K, context, attend):
        """Hidden states of the MASKs, whose largest logit is the token: rows of the head, which all have the same length."""
        start = int(position_K[0])
        ((positions, features),) = context
        assert position_K.tolist() == list(range(start, start + self.config.block_size))
        assert positions[0, :, 0].tolist() == list(range(start)), "the drafter's cache is the verified text, once and in order"
        expected = self.target.embed(torch.tensor([self.text[start], MASK_ID]))
        assert torch.equal(embeddings_UD, expected), "the block begins with the last committed token"
        self.check_features(features[0], start)
        self.starts.append(start)
        return self.target.head_VD[[self.token(int(p)) for p in position_K[1:]]]

    def check_features(self, features_SF, start: int) -> None:
        out = features_SF.new_empty(start, self.target.num_features)
        self.target.features(torch.tensor(self.text[:start]), torch.arange(start), out)
        torch.testing.assert_close(features_SF, out, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def target():
    return tiny_target(fresh_seed(), dtype=torch.float64)


@pytest.fixture(params=[0.0, 0.3, 0.7, 1.0])
def recited(request, target):
    """A prompt, its long plain reply, and a drafter that is right with the given probability."""
    rng = random.Random(fresh_seed())
    prompt = [rng.randrange(MASK_ID) for _ in range(rng.randint(1, 9))]
    text = prompt + decode_plain(target, prompt, max_new_tokens=LIMIT + 2 * BLOCK, stop_ids=set()).token_ids
    wrong = {place for place in range(len(text)) if rng.random() >= request.param}
    return prompt, text[len(prompt) :], Recital(target, text, wrong)


def naive_bookkeeping(prompt, reply, drafter, *, length: int):
    """Accepted and committed tokens of every verification of the first `length` tokens, from the text alone."""
    accepted, committed, starts, done = [], [], [], 1
    while done < length:
        here = len(prompt) + done - 1
        starts.append(here)
        matches = 0
        while matches < BLOCK - 1 and here + matches + 1 not in drafter.wrong:
            matches += 1
        accepted.append(matches + 1)
        committed.append(min(matches + 1, length - done))
        done += committed[-1]
    return accepted, committed, starts


def naive_length(reply: list[int], limit: int, stop_ids: set[int]) -> int:
    for place, token in enumerate(reply[:limit]):
        if token in stop_ids:
            return place + 1
    return limit


@pytest.mark.parametrize("limit", [1, 2, 7, LIMIT])
def test_speculative_decoding_commits_plain_greedy_tokens_and_counts_them_as_a_naive_walk_does(target, recited, limit):
    prompt, reply, drafter = recited
    spoken = decode_speculative(target, drafter, prompt, max_new_tokens=limit, stop_ids=set())
    accepted, committed, starts = naive_bookkeeping(prompt, reply, drafter, length=limit)
    assert spoken.token_ids == reply[:limit]
    assert (spoken.accepted, spoken.committed, drafter.starts) == (accepted, committed, starts)
    assert 1 + sum(spoken.committed) == limit and all(1 <= a <= BLOCK for a in spoken.accepted)


def test_a_stop_token_inside_an_accepted_block_ends_the_reply_there(target, recited):
    prompt, reply, drafter = recited
    for place in range(0, LIMIT, 3):
        stop_ids = {reply[place], VOCAB + 5}
        length = naive_length(reply, LIMIT, stop_ids)
        drafter.starts.clear()
        plain = decode_plain(target, prompt, max_new_tokens=LIMIT, stop_ids=stop_ids)
        spoken = decode_speculative(target, drafter, prompt, max_new_tokens=LIMIT, stop_ids=stop_ids)
        assert plain.token_ids == spoken.token_ids == reply[:length]
        assert (spoken.accepted, spoken.committed) == naive_bookkeeping(prompt, reply, drafter, length=length)[:2]


def test_a_perfect_drafter_commits_whole_blocks_and_a_useless_one_single_tokens(target):
    seed = fresh_seed()
    prompt = [seed % MASK_ID, 5]
    text = prompt + decode_plain(target, prompt, max_new_tokens=40, stop_ids=set()).token_ids
    perfect, useless = Recital(target, text, set()), Recital(target, text, set(range(len(text))))
    limits = {"max_new_tokens": 1 + 4 * BLOCK, "stop_ids": set()}
    assert decode_speculative(target, perfect, prompt, **limits).committed == [BLOCK] * 4
    assert decode_speculative(target, useless, prompt, **limits).committed == [1] * 4 * BLOCK


@pytest.mark.parametrize("block_size", [2, 4, 7])
def test_an_untrained_drafter_changes_no_token_of_any_target(block_size):
    seed = fresh_seed()
    target = tiny_target(seed, family=random.choice(["llama", "qwen3", "gemma3"]), dtype=torch.float64)
    drafter = random_drafter(seed, block_size=block_size).double()
    for _ in range(3):
        prompt = [random.randrange(MASK_ID) for _ in range(random.randint(1, 20))]
        plain = decode_plain(target, prompt, max_new_tokens=20, stop_ids={3})
        spoken = decode_speculative(target, drafter, prompt, max_new_tokens=20, stop_ids={3})
        assert spoken.token_ids == plain.token_ids
        assert sum(spoken.committed) + 1 == len(plain.token_ids) and len(plain.gaps) == len(plain.token_ids)


def test_a_fitted_drafter_changes_no_token_and_saves_verifications():
    toy = fitted()
    visits = 0
    for prompt, reply in zip(toy.prompts, toy.replies):
        spoken = decode_speculative(toy.target, toy.drafter, prompt, max_new_tokens=len(reply), stop_ids=set())
        assert spoken.token_ids == reply
        visits += len(spoken.committed)
    assert visits < 0.8 * sum(len(reply) - 1 for reply in toy.replies)


def test_plain_decoding_is_the_argmax_of_a_whole_forward_at_every_token(target):
    seed = fresh_seed()
    prompt = [seed % MASK_ID, 1, 2]
    reply = decode_plain(target, prompt, max_new_tokens=12, stop_ids=set())
    for place, token in enumerate(reply.token_ids):
        logits = target.model(torch.tensor([prompt + reply.token_ids[:place]]), use_cache=False, attend=naive_causal).logits[
            0, -1
        ]
        top = logits.topk(2).values
        assert token == int(logits.argmax()) and reply.gaps[place] == pytest.approx(float(top[0] - top[1]), abs=1e-5)


def naive_causal(layer, q, k, v, scale, window):
    k, v = (part.repeat_interleave(q.shape[0] // k.shape[0], 0) for part in (k, v))
    score = (q @ k.transpose(1, 2)) * scale
    hidden = torch.ones(score.shape[1:], dtype=torch.bool).triu(1)
    return score.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def test_a_draft_is_what_the_training_forward_would_predict_at_this_anchor():
    """`draft` and the training step see the same block: context before the anchor, the anchor's token, MASKs."""
    seed = fresh_seed()
    target, drafter = tiny_target(seed, dtype=torch.float64), random_drafter(seed).double()
    ids = torch.randint(0, MASK_ID, (20,))
    features = torch.empty(20, target.num_features, dtype=torch.float64)
    target.features(ids, torch.arange(20), features)
    cache = DrafterCache(32)
    with torch.no_grad():
        for start, end in ((0, 9), (9, 10), (10, 14)):
            cache.append(drafter, features[start:end])
        ours = draft_logits(drafter, target, cache, int(ids[14])).argmax(-1)
        hidden = drafter(
            target.embed(torch.tensor([int(ids[14]), MASK_ID])),
            torch.arange(14, 14 + BLOCK),
            drafter.context(features[:14], torch.arange(14)),
            lambda q, *keys: naive_everything(q, *joined(*keys), drafter.scale),
        )
    assert ours.tolist() == (hidden @ target.head_VD.T).argmax(-1).tolist()


def naive_everything(q, k, v, scale):
    k, v = (part.repeat_interleave(q.shape[0] // k.shape[0], 0) for part in (k, v))
    return ((q @ k.transpose(1, 2)) * scale).softmax(-1) @ v


def test_a_cut_ends_with_the_first_stop_token_or_the_room():
    assert cut([1, 2, 3, 4], stop_ids=set(), room=9) == [1, 2, 3, 4]
    assert cut([1, 2, 3, 4], stop_ids={3, 1000}, room=9) == [1, 2, 3]
    assert cut([1, 2, 3, 4], stop_ids={4}, room=2) == [1, 2]
    assert cut([3, 3], stop_ids={3}, room=2) == [3]


def naive_lookup(text: list[int], num_drafts: int) -> list[int]:
    """Drafts after the longest suffix of at most 3 tokens that stood in the text before; the latest such place."""
    for size in (3, 2, 1):
        places = (
            [i for i in range(len(text) - size) if text[i : i + size] == text[len(text) - size :]] if size < len(text) else []
        )
        if places:
            return text[places[-1] + size :][:num_drafts]
    return []


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_prompt_lookup_commits_what_a_naive_lookup_would(block_size):
    rng = random.Random(fresh_seed())
    for vocab in (2, 4, 30):
        prompt, reply = [rng.randrange(vocab) for _ in range(6)], [rng.randrange(vocab) for _ in range(40)]
        expected, done = [], 1
        while done < len(reply):
            drafts = naive_lookup(prompt + reply[:done], block_size - 1)
            matches = 0
            while matches < len(drafts) and done + matches < len(reply) and drafts[matches] == reply[done + matches]:
                matches += 1
            expected.append(min(matches + 1, len(reply) - done))
            done += expected[-1]
        assert prompt_lookup_committed(prompt, reply, block_size=block_size) == expected
        assert sum(expected) == len(reply) - 1


def test_a_walk_takes_the_steps_that_decoding_would(target, recited):
    """The walk's matches come from the blocks of every anchor; decoding sees only the blocks it visits."""
    prompt, reply, drafter = recited
    matches = {}
    for anchor in range(len(prompt), len(prompt) + LIMIT - 1):
        drafted = [drafter.token(anchor + k) for k in range(1, BLOCK)]
        right = [draft == token for draft, token in zip(drafted, drafter.text[anchor + 1 :])]
        matches[anchor] = [*right, False].index(False)
    spoken = decode_speculative(target, drafter, prompt, max_new_tokens=LIMIT, stop_ids=set())
    assert walk(matches, len(prompt), len(prompt) + LIMIT - 1) == spoken.committed
    assert walk({0: 2, 3: 0, 4: 5}, 0, 6) == [3, 1, 2] and walk({}, 4, 4) == []
