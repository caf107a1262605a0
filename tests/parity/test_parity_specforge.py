"""graphcap's step against stored numbers of SpecForge's DFlash training module (tools/parity_specforge.py)."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from graphcap.model.blocks import UNUSED
from tools.parity_specforge import (
    BLOCK_SIZES,
    CLEARLY_WRONG,
    COMMIT,
    STORED_SEEDS,
    TOLERANCE,
    Case,
    compare_stored,
    largest_gradient,
    make_case,
    run_graphcap,
    twin_outcomes,
)

ENTRIES = Path(__file__).parent / "data" / "specforge.safetensors"


@functools.cache
def stored() -> tuple[dict, dict]:
    return json.loads(ENTRIES.with_suffix(".json").read_text(encoding="utf-8")), load_file(ENTRIES)


def reference(case: Case) -> tuple:
    document, tensors = stored()
    return document["cases"][str(case.seed)], tensors[str(case.seed)]


def test_the_stored_cases_are_the_tools_and_hold_what_the_comparison_is_about():
    document, tensors = stored()
    assert document["commit"] == COMMIT
    assert list(document["cases"]) == [str(seed) for seed in STORED_SEEDS]
    assert tensors.keys() == document["cases"].keys()
    cases = [make_case(seed) for seed in STORED_SEEDS]
    assert {case.config.block_size for case in cases} == set(BLOCK_SIZES)
    for case in cases:
        assert (case.anchors == UNUSED).any(), "no dropped slot"
        assert len(case.token_ids) > 1, "one document cannot show that documents are kept apart"
        last = np.array([len(ids) for ids in case.token_ids])[:, None]
        assert (case.anchors + case.config.block_size > last).any(), "no block runs past the end of its document"
        long = [mask for mask in case.supervised if len(mask) > 40]
        assert all((mask[np.flatnonzero(mask)[0] :] == 0).any() for mask in long), "no hole in a loss mask"


@pytest.mark.parametrize("seed", STORED_SEEDS)
def test_candidates_mask_loss_and_every_gradient_agree_with_specforge(seed):
    case = make_case(seed)
    found = compare_stored(run_graphcap(case), *reference(case))
    too_far = {name: value for name, value in found.items() if not value <= TOLERANCE}
    assert not too_far


def test_a_step_with_one_thing_changed_no_longer_agrees_with_specforge():
    case = make_case(STORED_SEEDS[2])
    for name, outcome in twin_outcomes(case):
        assert largest_gradient(compare_stored(outcome, *reference(case))) > CLEARLY_WRONG, name


def test_the_comparison_sees_one_flipped_pair_of_the_mask_and_one_lost_candidate():
    case = make_case(STORED_SEEDS[0])
    outcome = run_graphcap(case)
    outcome.mask[0, 0] ^= True
    outcome.candidates[-1].pop()
    found = compare_stored(outcome, *reference(case))
    assert (found["mask"], found["candidates"]) == (1.0, 1.0) and largest_gradient(found) <= TOLERANCE


def test_the_comparison_sees_one_changed_entry_of_a_gradient():
    case = make_case(STORED_SEEDS[1])
    outcome = run_graphcap(case)
    gradient = outcome.gradients["layers.1.self_attn.k_norm.weight"]
    gradient[3] += 1e-3 * gradient.norm()
    found = compare_stored(outcome, *reference(case))
    assert [name for name, value in found.items() if value > TOLERANCE and name.startswith("gradient")] == [
        "gradient layers.1.self_attn.k_norm.weight"
    ]
