"""Fixed-shape decoding takes the steps of decoding launched from Python, token for token."""

import random

import pytest
import torch

from graphcap.engine.decoding import FixedSteps
from graphcap.model.decode import EagerSteps, decode_plain, decode_speculative
from graphcap.model.sampling import Sampling, generator_of
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


@pytest.mark.parametrize("rule", ["match", "sampled"])
def test_fixed_shapes_sample_the_same_tokens_from_the_same_uniform_numbers(rule):
    toy = fitted()
    sampling = Sampling(temperature=0.8, rule=rule)
    eager = EagerSteps(toy.target, toy.drafter, max_length=96, sampling=sampling)
    fixed = FixedSteps(toy.target, toy.drafter, max_length=96, sampling=sampling)
    accepted, texts = [], set()
    for number, prompt in enumerate(toy.prompts):

        def reply(steps, way, *who, seed=4, prompt=prompt, number=number):
            steps.generator = generator_of(seed, number)
            return way(*who, prompt, max_new_tokens=LIMIT, stop_ids={3}, steps=steps)

        plain = [reply(steps, decode_plain, toy.target).token_ids for steps in (eager, fixed)]
        spoken = [reply(steps, decode_speculative, toy.target, toy.drafter) for steps in (eager, fixed)]
        assert plain[0] == plain[1]
        assert spoken[0].token_ids == spoken[1].token_ids and spoken[0].accepted == spoken[1].accepted
        assert spoken[0].rejected == spoken[1].rejected
        assert all(
            len(refused) == toy.drafter.config.block_size - kept
            for kept, refused in zip(spoken[0].accepted, spoken[0].rejected)
        )
        accepted += spoken[0].accepted
        texts |= {tuple(reply(eager, decode_plain, toy.target, seed=seed).token_ids) for seed in (4, 5)}
    assert max(accepted) > 1 and len(texts) > len(toy.prompts), "nothing was kept, or nothing was drawn"


def test_a_step_that_keeps_one_rejected_token_would_be_noticed():
    toy = fitted()
    steps = FixedSteps(toy.target, toy.drafter, max_length=96)
    verify = steps._verify_step
    steps._verify = lambda: (verify(), steps.length.add_(1))
    prompt = toy.prompts[0]
    limits = {"max_new_tokens": LIMIT, "stop_ids": set()}
    eager = decode_speculative(toy.target, toy.drafter, prompt, **limits)
    assert decode_speculative(toy.target, toy.drafter, prompt, steps=steps, **limits).token_ids != eager.token_ids
