"""Predicted times: a fit finds the numbers that made the samples, and sums are what a loop over documents says."""

import json
import secrets
from dataclasses import replace

import numpy as np
import pytest

from graphcap.data.costs import ASSUMED, PS_PER_MS, Costs, Fit, Sample, Sizes

DENSITY = 2 / 16  # a draft token's pairs then weigh half of a token's


def made(draw: np.random.Generator, *, zero: str = "") -> tuple[Costs, list]:
    """Costs, and micro steps that took just so long."""
    names = {"micro_step_ps": 3e9, "token_ps": 4e7, "draft_token_ps": 2e7, "pair_ps": 1000}
    values = {name: int(draw.uniform(0.5, 2) * size) * (name != zero) for name, size in names.items()}
    costs = Costs(**values, update_ps=5 * PS_PER_MS, bucket_ps=0)
    samples = []
    for _ in range(30):
        length, num_anchors = int(draw.integers(1, 64)) * 128, int(draw.integers(1, 128)) * 8
        pairs, draft_pairs = int(draw.uniform(0.01, 1) * length**2), int(draw.uniform(0.01, 1) * length * num_anchors * 8)
        attention = (costs.pair_ps * pairs + costs.pair_ps * draft_pairs) // 2  # half of it the draft tokens' at DENSITY
        ms = (costs.bucket(length, num_anchors, 16) + attention) / PS_PER_MS
        samples.append(Sample(length, num_anchors, pairs, draft_pairs, ms))
    return costs, samples


def fitted(samples: list[Sample], **measured) -> Costs:
    return Fit.of(samples, block_size=16).costs(anchors_per_token=DENSITY, **measured)


def distance(one: Costs, other: Costs) -> float:
    """Largest relative difference of the four coefficients."""
    names = ("micro_step_ps", "token_ps", "draft_token_ps", "pair_ps")
    return max(abs(getattr(one, name) - getattr(other, name)) / max(1, getattr(other, name)) for name in names)


@pytest.mark.parametrize("zero", ["", "micro_step_ps", "draft_token_ps", "pair_ps"])
def test_a_fit_finds_the_costs_that_made_the_samples(zero):
    seed = secrets.randbits(32)
    costs, samples = made(np.random.default_rng(seed), zero=zero)
    found = fitted(samples, update_ms=5.0)
    fit = Fit.of(samples, block_size=16)
    assert all(abs(fit.ms(one) / one.ms - 1) < 1e-6 for one in samples), f"seed {seed}"
    assert distance(found, costs) < 1e-3 and found.update_ps == costs.update_ps, f"seed {seed}: {found} for {costs}"
    # Must fail: the same times for other buckets.
    twin = [replace(sample, length=sample.length + 1024) for sample in samples]
    assert distance(fitted(twin), costs) > 1e-3, f"seed {seed}"


def test_a_fit_of_noisy_times_predicts_them_and_is_never_negative():
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    costs, samples = made(draw, zero="pair_ps")
    noisy = [replace(sample, ms=sample.ms * draw.uniform(0.97, 1.03)) for sample in samples]
    found = fitted(noisy)
    assert min(found.to_json().values()) >= 0, f"seed {seed}"
    fit = Fit.of(noisy, block_size=16)
    assert all(abs(fit.ms(one) / one.ms - 1) < 0.15 for one in samples), f"seed {seed}"  # a short row's noise weighs little
    assert abs(sum(map(fit.ms, samples)) / sum(one.ms for one in samples) - 1) < 0.02, f"seed {seed}"


def test_sums_are_those_of_a_loop_and_json_reads_back():
    draw = np.random.default_rng(secrets.randbits(32))
    lengths, counts = draw.integers(1, 5000, 50), draw.integers(0, 500, 50)
    loop = sum(
        ASSUMED.token_ps * n + ASSUMED.draft_token_ps * 16 * a + ASSUMED.pair_ps * n * n
        for n, a in zip(lengths.tolist(), counts.tolist())
    )
    assert ASSUMED.bound(lengths, counts, 16) == loop
    assert Costs(**json.loads(json.dumps(ASSUMED.to_json()))) == ASSUMED


def test_assumed_costs_follow_the_sizes():
    sizes = {"target": 10**9, "context": 10**7, "drafter": 10**8, "head": 10**8, "target_width": 10**4, "drafter_width": 10**3}
    sizes |= {"target_layers": 20, "drafter_layers": 5}
    small = Costs.assumed(Sizes(**sizes))
    for name, cost in (
        ("target", "token_ps"),
        ("head", "draft_token_ps"),
        ("target_width", "pair_ps"),
        ("drafter_layers", "micro_step_ps"),
    ):
        large = Costs.assumed(Sizes(**{**sizes, name: 3 * sizes[name]}))
        changed = {key for key, value in large.to_json().items() if value != getattr(small, key)}
        assert changed == {cost} and getattr(large, cost) > getattr(small, cost)
