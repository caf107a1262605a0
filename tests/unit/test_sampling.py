"""Decoding above temperature 0 has plain sampling's distribution, and the walk is decoding's on the target that comes along.

The tiny target in float32, and a small drafter fitted to some of its replies. GRAPHCAP_TEST_FULL=1 takes 20 prefixes and
200 prompts instead of a few.
"""

import functools
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import graphcap
from graphcap.data.conversations import Document
from graphcap.data.prompts import load_prompts
from graphcap.engine.evaluation import Evaluation
from graphcap.eval import stop_ids_of
from graphcap.model.decode import EagerSteps, decode_plain, decode_speculative, draft_logits, walk
from graphcap.model.drafter import Drafter
from graphcap.model.loading import load_model, load_tokenizer
from graphcap.model.sampling import GREEDY, Sampling, choose, draw, generator_of, probabilities, propose, uniforms, verify
from graphcap.model.target import Target
from tests.toys import drafter_config, fit, fresh_seed, make_engine, make_step, random_drafter, tiny_target
from tests.unit.test_evaluation import document_of, matches_of

FULL = os.environ.get("GRAPHCAP_TEST_FULL") == "1"
TINY = Path(graphcap.__file__).parent / "assets" / "tiny"
BLOCK, TEMPERATURE, DRAWS = 4, 2.0, 10_000  # at 1 the tiny target says one thing nearly always
LIMIT = 64 if FULL else 12


class Tiny:
    """The tiny target, held-out prompts, its greedy replies to them, and a drafter fitted to the first of these."""

    def __init__(self) -> None:
        model = load_model(str(TINY), revision="main", dtype=torch.float32, device="cpu", trust_remote_code=False)
        tokenizer = load_tokenizer(str(TINY), revision="main", trust_remote_code=False)
        held_out = (str(TINY / "conversations" / "held_out.jsonl"),)
        self.target, self.stop_ids = Target(model, (1, 5, 9)), stop_ids_of(model, tokenizer)
        reading = {"on_bad_line": "error", "max_length": 512, "dropped": Counter()}
        self.prompts = load_prompts(held_out, tokenizer, count=200 if FULL else 20, **reading)
        limits = {"max_new_tokens": LIMIT, "stop_ids": self.stop_ids}
        self.replies = [decode_plain(self.target, prompt, **limits).token_ids for prompt in self.prompts]
        sizes = {"hidden_size": 160, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
        sizes |= {"intermediate_size": 160, "vocab_size": 2048, "mask_token_id": 3, "num_target_layers": 12}
        self.drafter = Drafter(drafter_config(**sizes, block_size=BLOCK, target_layer_ids=(1, 5, 9)))
        self.drafter.initialize(0)
        fit(self.target, self.drafter, list(zip(self.prompts, self.replies))[:20], num_updates=60 if FULL else 16)


@functools.cache
def tiny() -> Tiny:
    return Tiny()


# --- the distribution of the first two committed tokens


def chi_square(seen: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom; the cells of expectation under 5 are one."""
    large = expected >= 5
    statistic = ((seen - expected)[large] ** 2 / expected[large]).sum()
    rest = expected[~large].sum()
    cells = int(large.sum()) - 1
    if rest >= 5:
        statistic, cells = statistic + (seen[~large].sum() - rest) ** 2 / rest, cells + 1
    return float(statistic), cells


def survival(statistic: float, freedom: int) -> float:
    """P(chi-square of so many degrees of freedom > statistic)."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


class Prefix:
    """What two verifications behind a prompt and its first reply tokens may look at, each computed once by the model."""

    def __init__(self, made: Tiny, number: int) -> None:
        text = made.prompts[number] + made.replies[number][: 1 + number % 3]
        self.steps = EagerSteps(made.target, made.drafter, max_length=len(text) + 2 * BLOCK)
        self.steps.prefill(text[:-1])
        self.draft_JV, self.block = self.behind(text[-1])
        self.own_KV = self.target_logits([text[-1], *self.block])
        self.p_V = probabilities(self.own_KV[:1], TEMPERATURE)[0]
        self.common = torch.nonzero(DRAWS * self.p_V >= 5)[:, 0].tolist()  # no cell of another first token counts 5
        after = {token: self.target_logits([text[-1], token]) for token in self.common}
        self.after_V = {token: logits[1] for token, logits in after.items()}
        _, features = made.target.extend(torch.tensor(text[-1:]), self.steps.cache)
        self.steps.drafter_cache.append(made.drafter, features)
        self.next_JV = {token: self.behind(token)[0] for token in self.common}

    def behind(self, token: int) -> tuple[torch.Tensor, list[int]]:
        with torch.no_grad():
            logits = draft_logits(self.steps.drafter, self.steps.target, self.steps.drafter_cache, token)
        return logits, logits.argmax(-1).tolist()

    def target_logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.steps.target.extend(torch.tensor(token_ids), self.steps.cache)[0]

    def expected(self) -> torch.Tensor:
        """Expected counts of every pair of a common first token and a second, the rest last: [C·V + 1]."""
        pairs = [self.p_V[a] * probabilities(self.after_V[a][None], TEMPERATURE)[0] for a in self.common]
        cells = DRAWS * torch.cat(pairs)
        return torch.cat((cells, (DRAWS - cells.sum())[None]))

    def sampled(self, sampling: Sampling, seed: int, drafting: Sampling) -> torch.Tensor:
        """Counts of DRAWS times the first two committed tokens: one verification, and another if that gave one token."""
        generator = torch.Generator().manual_seed(seed)
        drafted = propose(self.draft_JV, drafting, uniforms(generator, DRAWS, BLOCK - 1))
        first, second = torch.full((DRAWS,), -1), torch.full((DRAWS,), -1)
        rare = ~torch.isin(drafted[:, 0], torch.tensor(self.common))  # what stands behind these goes into one cell
        for token in [*self.common, None]:  # what the target says behind the block's first draft depends on it
            who = torch.nonzero(rare if token is None else drafted[:, 0] == token)[:, 0]
            rows = [self.own_KV[0], *[self.after_V.get(token, self.own_KV[0])] * (BLOCK - 1)]  # from the third on unseen
            uniform = uniforms(generator, len(who), BLOCK)
            tokens, kept = verify(drafted[who], self.draft_JV, torch.stack(rows), sampling, uniform)
            first[who] = tokens[:, 0]
            second[who] = torch.where(kept > 0, tokens[:, 1], -1)
        for token in self.common:
            who = torch.nonzero((first == token) & (second < 0))[:, 0]
            drafted = propose(self.next_JV[token], drafting, uniforms(generator, len(who), BLOCK - 1))
            rows = self.after_V[token].expand(BLOCK, -1)
            second[who] = verify(drafted, self.next_JV[token], rows, sampling, uniforms(generator, len(who), BLOCK))[0][:, 0]
        return self.counted(first, second)

    def counted(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        place = torch.full((len(self.p_V),), -1)
        place[self.common] = torch.arange(len(self.common))
        size = len(self.common) * len(self.p_V)
        cell = torch.where(place[first] >= 0, place[first] * len(self.p_V) + second, size)
        return torch.bincount(cell, minlength=size + 1).double()


@functools.cache
def prefixes() -> list[Prefix]:
    return [Prefix(tiny(), number) for number in range(20 if FULL else 4)]


def p_value(sampling: Sampling, seed: int, drafting: Sampling) -> float:
    results = [
        chi_square(prefix.sampled(sampling, 1000 * seed + number, drafting), prefix.expected())
        for number, prefix in enumerate(prefixes())
    ]
    p = survival(sum(statistic for statistic, _ in results), sum(freedom for _, freedom in results))
    print(f"{sampling.rule}, seed {seed}: p = {p:.3g} of {sum(f for _, f in results)} degrees of freedom")
    return p


@pytest.mark.parametrize("rule", ["match", "sampled"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_first_two_committed_tokens_have_plain_samplings_joint_distribution(rule, seed):
    sampling = Sampling(temperature=TEMPERATURE, rule=rule)
    assert p_value(sampling, seed, sampling) > 0.001


def test_greedy_proposals_kept_by_the_ratio_would_be_noticed():
    assert p_value(Sampling(temperature=TEMPERATURE, rule="sampled"), 1, GREEDY) < 1e-6


def test_the_steps_draw_the_first_token_of_a_verification_as_plain_sampling_does():
    """The steps themselves, with their own uniform numbers, on a drafter far from the target."""
    seed = 11  # a p-value of fresh draws is under any bound now and then
    target, drafter = tiny_target(seed), random_drafter(seed, sharpness=3.0)
    steps = EagerSteps(target, drafter, max_length=16, sampling=Sampling(temperature=2.0, rule="sampled"))
    steps.generator = generator_of(seed, 0)
    steps.prefill([5, 9, 2])
    expected = 800 * probabilities(target.extend(torch.tensor([7]), steps.cache)[0], 2.0)[0]
    seen = torch.zeros(len(expected), dtype=torch.float64)
    for _ in range(800):
        seen[steps.speculative(7).tokens[0]] += 1
        steps.cache.length = steps.drafter_cache.length = 3
    assert survival(*chi_square(seen, expected)) > 0.001


# --- the functions


def test_the_survival_function_is_that_of_known_quantiles():
    for statistic, freedom in ((3.841459, 1), (18.307038, 10), (124.342113, 100)):
        assert survival(statistic, freedom) == pytest.approx(0.05, abs=1e-6)


def test_a_draw_is_the_inverse_of_the_running_sum_and_never_a_token_of_weight_0():
    seed = fresh_seed()
    weights = torch.randint(0, 3, (6, 9), generator=torch.Generator().manual_seed(seed))
    weights[:, 4] += 1
    uniform = torch.rand(50, 6, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 2.0**-53
    got = draw(weights, uniform)
    for n, k in np.ndindex(50, 6):
        total, token = 0, -1
        while total <= int(uniform[n, k] * int(weights[k].sum())):
            token += 1
            total += int(weights[k, token])
        assert got[n, k] == token and weights[k, token] > 0
    huge = torch.tensor([[0, 2**52, 0]])
    assert draw(huge, torch.tensor([[0.0], [1 - 2.0**-53]], dtype=torch.float64)).tolist() == [[1], [1]]


def test_a_verification_is_a_naive_loop_over_the_block():
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(BLOCK, 7, generator=generator) * 0.7
    own[torch.arange(BLOCK), torch.randint(0, 7, (BLOCK,), generator=generator)] += 2  # so that some drafts are kept
    proposed = own[:-1] + 0.3 * torch.randn(BLOCK - 1, 7, generator=generator)
    p, q = (own.double() / 0.7).softmax(-1), (proposed.double() / 0.7).softmax(-1)
    seen = Counter()
    for rule in ("match", "sampled"):
        sampling = Sampling(temperature=0.7, rule=rule)
        drafted = propose(proposed, sampling, uniforms(generator, 200, BLOCK - 1))
        uniform = uniforms(generator, 200, BLOCK)
        tokens, kept = verify(drafted, proposed, own, sampling, uniform)
        for n in range(200):
            expected = naive_verification(rule, drafted[n].tolist(), p, q, uniform[n].tolist())
            assert tokens[n, : int(kept[n]) + 1].tolist() == expected
            seen[rule, len(expected)] += 1
    assert all(seen[rule, length] for rule in ("match", "sampled") for length in range(1, BLOCK + 1)), seen


def naive_verification(rule, drafted, p, q, uniform) -> list[int]:
    def inverse(shares, u):
        return int((shares.cumsum(0) / shares.sum() <= u).sum())

    committed = []
    for k in range(BLOCK):
        if rule == "match":
            committed.append(inverse(p[k], uniform[k]))
            if k == BLOCK - 1 or committed[k] != drafted[k]:
                return committed
        elif k < BLOCK - 1 and uniform[k] < p[k, drafted[k]] / q[k, drafted[k]]:
            committed.append(drafted[k])
        else:
            left = (p[k] - q[k]).clamp_min(0) if k < BLOCK - 1 else p[k]
            return [*committed, inverse(left, uniform[BLOCK - 1])]


def test_a_drafter_that_is_the_target_is_never_refused():
    logits = torch.randn(BLOCK, 50, generator=torch.Generator().manual_seed(fresh_seed()))
    sampling = Sampling(temperature=1.3, rule="sampled")
    drafted = propose(logits[:-1], sampling, torch.rand(500, BLOCK - 1, dtype=torch.float64))
    assert (verify(drafted, logits[:-1], logits, sampling, torch.rand(500, BLOCK, dtype=torch.float64))[1] == BLOCK - 1).all()


def test_temperature_0_is_the_most_likely_token_whatever_the_uniform_numbers():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(fresh_seed()))
    assert torch.equal(choose(logits, GREEDY, torch.rand(4, 3)), logits.argmax(-1).expand(4, 3))


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_a_tiny_temperature_is_greedy_and_no_garbage(temperature):
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(fresh_seed())) * 9 - 30
    logits[0, :2], logits[0, 2:] = 7.0, 6.9  # two that are the largest share what there is
    p = probabilities(logits, temperature)
    assert torch.equal(p[0, :2], torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert torch.equal(p[1:], torch.nn.functional.one_hot(logits[1:].argmax(dim=-1), 50).double())


def test_a_reply_repeats_with_its_seed_and_changes_with_seed_and_prompt():
    first = [uniforms(generator_of(*key), 2, 8) for key in ((0, 1), (0, 1), (1, 1), (0, 2), (1, 0))]
    assert torch.equal(first[0], first[1])
    assert len({tuple(part.flatten().tolist()) for part in first}) == 4


# --- the walk


def test_the_walked_estimate_is_decodings_list_of_accepted_lengths_on_held_out_prompts():
    made = tiny()
    documents: list[Document] = []
    decoded = []
    for prompt, reply in zip(made.prompts, made.replies, strict=True):
        if len(reply) > 1:  # a reply of one token needs no verification
            limits = {"max_new_tokens": LIMIT, "stop_ids": made.stop_ids}
            decoded.append(decode_speculative(made.target, made.drafter, prompt, **limits))
            documents.append(document_of(len(documents), prompt, reply))
    engine, buckets = make_engine(make_step(made.target, made.drafter), (512, 256))
    evaluation = Evaluation(documents, tuple(buckets), rows="packed")
    found = matches_of(engine, evaluation)
    steps = []
    for document, spoken in zip(documents, decoded, strict=True):
        first, last = int(np.argmax(document.loss_mask)), len(document.token_ids) - 1
        walked = walk(found[document.id], first, last)
        assert walked == spoken.committed, document.id
        assert spoken.accepted[:-1] == walked[:-1] and spoken.accepted[-1] >= walked[-1]  # the last is cut, see `walk`
        steps += walked
    assert evaluation.run(engine)["walked_estimate"] == sum(steps) / len(steps) > 1.1
