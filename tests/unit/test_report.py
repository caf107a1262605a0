"""Acceptance lengths: pooled and mean, their bootstrap interval, survival and repetition, against naive sums."""

import math
import random

import numpy as np
import pytest

from graphcap.ops.report import acceptance, distinct_4grams, survival
from tests.toys import fresh_seed


def random_replies(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randint(1, 8) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def test_tau_is_pooled_over_replies_and_the_mean_is_of_their_own_means():
    rng = random.Random(fresh_seed())
    replies = random_replies(rng, 20)
    result = acceptance(replies)
    assert result["tau"] == pytest.approx(sum(map(sum, replies)) / sum(map(len, replies)))
    assert result["mean"] == pytest.approx(sum(sum(r) / len(r) for r in replies) / len(replies))
    assert result["verifications"] == sum(map(len, replies))
    # a long reply weighs more in tau than in the mean of means
    assert acceptance([[1] * 99, [7]]) | {"low": 0, "high": 0} == {
        "tau": 1.06,
        "mean": 4.0,
        "low": 0,
        "high": 0,
        "verifications": 100,
    }


def test_the_interval_holds_tau_and_narrows_with_more_replies():
    rng = random.Random(fresh_seed())
    few, many = acceptance(random_replies(rng, 10)), acceptance(random_replies(rng, 1000))
    for result in (few, many):
        assert result["low"] <= result["tau"] <= result["high"]
    assert many["high"] - many["low"] < 0.5 * (few["high"] - few["low"])
    same = acceptance([[3, 3]] * 10)
    assert same["low"] == same["tau"] == same["high"] == 3


def test_the_interval_covers_the_truth_about_95_times_in_100():
    """Replies of one verification each: the bootstrap's interval is then nearly that of a normal mean."""
    rng = np.random.default_rng(fresh_seed())
    steps = rng.integers(1, 8, (150, 60))
    inside = sum(result["low"] <= 4 <= result["high"] for result in (acceptance([[int(s)] for s in one]) for one in steps))
    assert 126 <= inside <= 150  # a 95 % interval: 142.5 expected, with six standard deviations of room below
    spread = np.mean([1.96 * one.std() / math.sqrt(60) for one in steps])
    one = acceptance([[int(s)] for s in steps[0]])
    assert (one["high"] - one["low"]) / 2 == pytest.approx(spread, rel=0.35)


def test_the_same_replies_give_the_same_interval_every_time():
    replies = random_replies(random.Random(fresh_seed()), 10)
    assert acceptance(replies) == acceptance(replies)


def test_replies_without_a_verification_count_in_nothing():
    assert acceptance([[], [2, 4], []]) == acceptance([[2, 4]])
    empty = acceptance([[], []])
    assert empty["verifications"] == 0 and all(math.isnan(empty[name]) for name in ("tau", "low", "high", "mean"))


def test_survival_is_the_share_of_verifications_that_kept_k_drafts():
    rng = random.Random(fresh_seed())
    accepted = [[rng.randint(1, 5) for _ in range(rng.randint(0, 9))] for _ in range(12)] + [[3]]
    every = [a for reply in accepted for a in reply]
    assert survival(accepted, 5) == pytest.approx([sum(a - 1 >= k for a in every) / len(every) for k in (1, 2, 3, 4)])
    assert all(math.isnan(share) for share in survival([[]], 3))


def test_distinct_4grams_are_counted_within_each_reply():
    rng = random.Random(fresh_seed())
    replies = [[rng.randrange(2) for _ in range(rng.randint(0, 30))] for _ in range(10)]
    total = sum(max(0, len(r) - 3) for r in replies)
    distinct = sum(len({str(r[i : i + 4]) for i in range(len(r) - 3)}) for r in replies)
    assert distinct_4grams(replies) == pytest.approx(distinct / total)
    assert distinct_4grams([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]) == 1  # the same text twice is no repetition of itself
    assert distinct_4grams([[7] * 11]) == 1 / 8 and math.isnan(distinct_4grams([[1, 2, 3]]))


def test_a_table_without_verifications_shows_dashes_and_survives_json():
    import json

    from graphcap.ops.checkpoint import finite
    from graphcap.ops.report import table

    nothing = acceptance([[], []])
    result = {
        "prompts": 2,
        "max_new_tokens": 1,
        "dtype": "float32",
        "device": "cpu",
        "passes": 1,
        "before": nothing,
        "after": nothing,
        "prompt_lookup": nothing,
        "walked_estimate": None,
        "equal": 2,
        "ties": [],
        "differences": [],
        "plain_s_per_token": 0.001,
        "speculative_s_per_token": 0.001,
        "distinct_4grams": float("nan"),
        "survival": [float("nan")],
        "verify_cost": 0.0,
        "draft_cost": 0.0,
        "weights": "checkpoints/update-00000002",
        "checkpoint": "checkpoints/update-00000002",
    }
    again = json.loads(json.dumps(finite(result), allow_nan=False))
    assert table(again) == table(result)
    assert "–" in table(result) and "nothing was drafted" in table(result)


def test_a_reply_is_shown_as_committed_runs_and_refused_drafts():
    from graphcap.model.decode import Reply
    from graphcap.ops.report import NORMAL, SHADES, STRUCK, reply_text, runs_of

    names = {0: b"a", 1: b"b\n", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"c", 5: b"\x1b[2J"}

    def decode(ids):
        return b"".join(names[i] for i in ids).decode(errors="replace")

    reply = Reply(token_ids=[0, 1, 4, 2, 3, 5], committed=[3, 2], rejected=[[4, 1], []], accepted=[3, 3])
    runs = runs_of(reply, decode)
    assert runs == [("a", ""), ("b\nc", "cb\n"), ("é\x1b[2J", "")], "a character that two runs share is in the later one"
    assert reply_text(runs, terminal=False) == "|a||b\nc|~cb\n~|é\\x1b[2J|"
    first, second = SHADES
    assert reply_text(runs, terminal=True) == (
        f"{first}a{NORMAL}{second}b{NORMAL}\n{second}c{NORMAL}{STRUCK}cb{NORMAL}\n{STRUCK}{NORMAL}{first}é\\x1b[2J{NORMAL}"
    )


def test_what_could_steer_a_terminal_or_turn_the_writing_is_written_out():
    from graphcap.data.sample import harmless

    kept = "a\n\tb é 日 👩\u200d🔬 \u200c \u00a0"
    assert harmless(kept) == kept
    for code in (0, 7, 0x1B, 0x7F, 0x9B, 0xAD, 0x61C, 0x200B, 0x200E, 0x200F, 0x2028, 0x202A, 0x202C, 0x202E, 0x2066, 0x2069):
        shown = harmless(f"a{chr(code)}b")
        assert shown.isprintable() and shown.isascii() and shown.startswith("a\\"), (code, shown)
    assert harmless("\ud800") == "\\ud800"
