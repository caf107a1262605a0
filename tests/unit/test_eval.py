"""Replies are equal, tied or different; prompts end where supervision begins."""

import json
from collections import Counter

import pytest
import torch

from graphcap.data.prompts import counted
from graphcap.errors import DataError
from graphcap.eval import TIE, Prompts, compare, load_prompts, measure, tie_of
from graphcap.model.decode import Reply
from graphcap.model.sampling import Sampling
from graphcap.ops.report import acceptance, side_by_side, table
from tests.targets import CHATML, byte_tokenizer
from tests.toys import fitted, random_drafter


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


def chat(*texts: str, first: int = 0) -> dict:
    """A row of turns by user and assistant; first: 1 if the assistant begins."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[(n + first) % 2], "content": text} for n, text in enumerate(texts)]}


def read_prompts(path, rows: list, **changes) -> tuple[list[str], Counter]:
    """The prompts of these rows as text, and what was passed over; the template shows an empty thought in the last turn."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    tokenizer, dropped = byte_tokenizer(), Counter()
    thought = "{{ '<|im_start|>' + message['role'] + '\n' + ('(-)' if loop.last and message['role'] == 'assistant' else '')"
    settings = {"count": 9, "on_bad_line": "skip", "max_length": 100} | changes
    try:
        tokenizer.chat_template = CHATML.replace("{{ '<|im_start|>' + message['role'] + '\n'", thought, 1)
        found = load_prompts([str(path)], tokenizer, dropped=dropped, **settings)
    finally:
        tokenizer.chat_template = CHATML
    return [tokenizer.decode(ids) for ids in found], dropped


def test_every_prompt_is_what_the_template_asks_with_and_what_is_passed_over_is_counted(tmp_path):
    asked = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    rows = [chat("hi"), chat("hi", "ho"), chat("hi", "ho", "and", "so"), chat("ho", "hi", first=1), "{", chat("x" * 200), "[]"]
    prompts, dropped = read_prompts(tmp_path / "a.jsonl", rows)
    assert prompts == [asked] * 3, "no thought of the template's, however many turns follow"
    assert sum(dropped.values()) == 4
    assert "1 longer than the target's positions" in counted(dropped)
    assert "1 in which the assistant speaks first" in counted(dropped)
    with pytest.raises(DataError, match="line 2'.*at most 100 tokens.*got [1-9]"):
        read_prompts(tmp_path / "a.jsonl", [rows[1], rows[5]], on_bad_line="error")
    with pytest.raises(DataError, match=r"got none \(1 in which the assistant speaks first\)"):
        read_prompts(tmp_path / "a.jsonl", rows[3:4])


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
    assert "3 held-out prompts" in shown and "after training" not in shown, "nothing says that this run trained it"
    stranger = {**result, "survival": [0.0], "prompts_from": "prompts of a.jsonl", "not_used": "conversations not used: 2 x"}
    shown = table(stranger)
    assert "3 prompts of a.jsonl" in shown and "not used: 2 x" in shown and "held-out prompts" not in shown
    assert "training was too short" not in shown and "losses above" not in shown
    shown = table({**stranger, "before": some})
    assert "drafter after training" in shown and "training was too short" in shown


def measured(drafter, *, temperature: float, plain=None, seed: int = 0):
    """A measurement of two prompts in two passes, and how many replies it decoded."""
    toy, decoded = fitted(), []
    prompts = Prompts(
        token_ids=toy.prompts[:2],
        stop_ids=set(),
        max_new_tokens=12,
        passes=2,
        sampling=Sampling(temperature=temperature, rule="sampled"),
        seed=seed,
    )
    found = measure(toy.target, drafter, prompts, before=None, say=lambda line: None, note=decoded.append, plain=plain)
    return found, len(decoded)


def test_a_second_drafter_is_compared_with_the_plain_decoding_that_the_first_made():
    toy = fitted()
    first, decoded = measured(toy.drafter, temperature=0.0)
    assert decoded == 8 and first.result["equal"] == 2
    useless = random_drafter(1, target_layer_ids=(0, 1, 3), block_size=5).double()
    second, decoded = measured(useless, temperature=0.0, plain=first.plain)
    assert decoded == 4 and second.plain is first.plain and second.result["equal"] == 2
    assert second.result["plain_s_per_token"] == first.result["plain_s_per_token"]
    assert sorted(first.plain.looked_up) == [4, 5], "prompt lookup drafts as much as the drafter it stands beside"
    assert first.result["after"]["tau"] > second.result["after"]["tau"]


def test_above_temperature_0_a_seed_repeats_the_replies_and_equality_is_not_claimed():
    toy = fitted()
    texts = []
    for seed in (0, 0, 1):
        found, _ = measured(toy.drafter, temperature=1.5, seed=seed)
        assert not {"equal", "ties", "differences"} & set(found.result)
        shown = table({**found.result, "weights": "x"})
        assert f"temperature 1.5, rule sampled, seed {seed}" in shown and "equal to" not in shown
        texts.append([reply.token_ids for reply in found.drafted])
    assert texts[0] == texts[1] != texts[2]


def test_several_folders_stand_in_one_table_with_what_they_are_compared_with():
    toy = fitted()
    first, _ = measured(toy.drafter, temperature=0.0)
    sampled, _ = measured(toy.drafter, temperature=1.5)
    rows = [("a", first, 0), ("b", first, 0), ("c", sampled, 1)]
    shown = side_by_side([{**found.result, "folder": name, "baseline": number} for name, found, number in rows])
    lines = shown.splitlines()
    names = [line.split("  ")[0] for line in lines[1:]]
    compared = ["prompt lookup, blocks of 4", "plain decoding"]
    assert names == ["a", "b", *compared, "c", *compared]
    assert lines[1].endswith("2 of 2") and lines[5].endswith("–")
    speed = first.result["speculative_s_per_token"] / first.result["plain_s_per_token"]
    assert f" {first.result['after']['tau']:.2f} " in lines[1] and f" {speed:.2f} " in lines[1]
