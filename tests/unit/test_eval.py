"""Replies are equal, tied or different; prompts end where supervision begins."""

import numpy as np
import torch

from graphcap.data.conversations import Document
from graphcap.eval import TIE, compare, prompts_of, tie_of
from graphcap.model.decode import Reply
from graphcap.ops.report import acceptance, table


def replies(*token_ids, gap=1.0):
    return [Reply(token_ids=list(ids), gaps=[gap] * len(ids)) for ids in token_ids]


def test_a_difference_is_a_tie_only_if_the_two_largest_logits_are_that_close():
    equal = compare(replies([1, 2], [3]), replies([1, 2], [3]), tie=TIE)
    assert (equal["equal"], equal["ties"], equal["differences"]) == (2, [], [])
    tied = compare(replies([1, 2, 3], gap=TIE / 2), replies([1, 5, 3]), tie=TIE)
    assert tied["equal"] == 0 and len(tied["ties"]) == 1 and "token 1" in tied["ties"][0] and not tied["differences"]
    different = compare(replies([1, 2, 3], gap=2 * TIE), replies([1, 5, 3]), tie=TIE)
    assert len(different["differences"]) == 1 and not different["ties"]
    shorter = compare(replies([1, 2, 3]), replies([1, 2]), tie=TIE)
    assert "token 2" in shorter["differences"][0]


def test_a_tie_is_1e_4_in_float32_and_wider_in_bfloat16():
    assert tie_of(torch.float32) == 1e-4 and tie_of(torch.bfloat16) == 0.25


def test_prompts_end_where_supervision_begins():
    mask = np.array([0, 0, 0, 1, 1, 0, 1], bool)
    document = Document(id=0, token_ids=np.arange(7, dtype=np.int32), loss_mask=mask, source="x", line=1)
    assert prompts_of([document, document], count=1) == [[0, 1, 2]]


def test_ties_and_differences_are_printed_in_the_table():
    some = acceptance([[2, 3]])
    result = {
        "prompts": 3,
        "max_new_tokens": 8,
        "dtype": "float32",
        "device": "cpu",
        "passes": 1,
        "after": some,
        "prompt_lookup": some,
        "walked_estimate": 2.0,
        "equal": 1,
        "ties": ["prompt 0, token 1: …"],
        "differences": ["prompt 2, token 4: …"],
        "tie_below": TIE,
        "plain_s_per_token": 0.002,
        "speculative_s_per_token": 0.001,
        "distinct_4grams": 0.9,
        "survival": [0.5],
        "verify_cost": 1.5,
        "draft_cost": 0.2,
        "weights": "checkpoints/x",
    }
    shown = table(result)
    assert "1 of 3, 1 a tie of the two largest logits (within 1e-04), 1 DIFFERENT" in shown
    assert "prompt 0, token 1" in shown and "prompt 2, token 4" in shown and "0.50 × plain" in shown
