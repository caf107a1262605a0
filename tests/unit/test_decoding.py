"""Fixed-shape decoding takes the steps of decoding launched from Python, token for token."""

import random

import pytest
import torch

from graphcap.engine.decoding import FixedSteps
from graphcap.model.decode import decode_plain, decode_speculative
from tests.toys import VOCAB, fitted, fresh_seed, random_drafter, tiny_target

LIMIT = 20


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_fixed_shapes_decode_the_same_tokens_and_accepted_lengths(family):
    seed = fresh_seed()
    rng = random.Random(seed)
    target, drafter = tiny_target(seed, family=family), random_drafter(seed, sharpness=3.0)
    steps = FixedSteps(target, drafter, max_length=64)
    for _ in range(3):  # one after the other on the same caches
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 20))]
        limits = {"max_new_tokens": LIMIT, "stop_ids": {rng.randrange(VOCAB)}}
        plain, fixed = decode_plain(target, prompt, **limits), decode_plain(target, prompt, steps=steps, **limits)
        assert fixed.token_ids == plain.token_ids, seed
        torch.testing.assert_close(torch.tensor(fixed.gaps), torch.tensor(plain.gaps), rtol=1e-4, atol=1e-5)
        drafted = decode_speculative(target, drafter, prompt, **limits)
        fixed = decode_speculative(target, drafter, prompt, steps=steps, **limits)
        assert (fixed.token_ids, fixed.accepted, fixed.committed) == (drafted.token_ids, drafted.accepted, drafted.committed), (
            seed
        )


def test_fixed_shapes_keep_a_good_drafters_accepted_lengths():
    toy = fitted()
    steps = FixedSteps(toy.target, toy.drafter, max_length=96)
    accepted = []
    for prompt in toy.prompts:
        limits = {"max_new_tokens": LIMIT, "stop_ids": set()}
        eager = decode_speculative(toy.target, toy.drafter, prompt, **limits)
        fixed = decode_speculative(toy.target, toy.drafter, prompt, steps=steps, **limits)
        assert fixed.accepted == eager.accepted and fixed.token_ids == eager.token_ids
        accepted += fixed.accepted
    assert max(accepted) > 1, "a drafter that is never right tests nothing"


def test_a_step_that_keeps_one_rejected_token_would_be_noticed():
    toy = fitted()
    steps = FixedSteps(toy.target, toy.drafter, max_length=96)
    verify = steps._verify_step
    steps._verify = lambda: (verify(), steps.length.add_(1))
    prompt = toy.prompts[0]
    limits = {"max_new_tokens": LIMIT, "stop_ids": set()}
    eager = decode_speculative(toy.target, toy.drafter, prompt, **limits)
    assert decode_speculative(toy.target, toy.drafter, prompt, steps=steps, **limits).token_ids != eager.token_ids
