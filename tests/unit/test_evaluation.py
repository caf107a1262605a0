"""Held-out evaluation: its walk commits what real decoding commits; loss and matches are naive sums."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from graphcap.data.conversations import Document
from graphcap.engine.evaluation import Evaluation, fitting
from graphcap.errors import DataError, ShapeError
from graphcap.model.blocks import decay, default_gamma, leading_matches
from graphcap.model.decode import decode_plain, decode_speculative, walk
from tests.toys import (
    MASK_ID,
    TableTarget,
    fitted,
    fresh_seed,
    make_engine,
    make_step,
    naive_drafter,
    naive_labels,
    naive_visible,
    random_drafter,
)

BLOCK = 4


def document_of(number: int, prompt: list[int], reply: list[int]) -> Document:
    mask = np.array([False] * len(prompt) + [True] * len(reply))
    return Document(number, np.array(prompt + reply, np.int32), mask, "toy", number + 1)


def matches_of(engine, evaluation: Evaluation) -> dict[int, dict[int, int]]:
    """Leading matches at every anchor of every document, pass by pass."""
    found: dict[int, dict[int, int]] = {}
    for one in evaluation.passes:
        engine.fill(one.row.bucket, one.arrays)
        _, correct = engine.evaluate(one.row.bucket)
        for (number, position), count in zip(one.anchors, leading_matches(correct).tolist()):
            assert position not in found.setdefault(number, {}), "an anchor is evaluated twice"
            found[number][position] = count
    return found


@pytest.fixture(scope="module")
def spoken():
    """The fitted toy, its greedy replies with a stop token, and what decoding with the drafter committed."""
    toy = fitted()
    stop_ids = {toy.replies[0][7], toy.replies[1][-3]}
    plain = [decode_plain(toy.target, p, max_new_tokens=18, stop_ids=stop_ids).token_ids for p in toy.prompts]
    kept = [n for n, reply in enumerate(plain) if len(reply) > 1]  # a reply of one token needs no verification
    committed = [
        decode_speculative(toy.target, toy.drafter, toy.prompts[n], max_new_tokens=18, stop_ids=stop_ids).committed
        for n in kept
    ]
    documents = [document_of(number, toy.prompts[n], plain[n]) for number, n in enumerate(kept)]
    return toy, documents, committed


@pytest.mark.parametrize("sizes", [[(64, 9)], [(128, 128)], [(32, 5), (96, 9)]])
def test_the_walked_estimate_is_what_decoding_with_the_drafter_committed(spoken, sizes):
    toy, documents, committed = spoken
    engine, buckets = make_engine(make_step(toy.target, toy.drafter), *sizes)
    evaluation = Evaluation(documents, tuple(buckets), rows="packed")
    found = matches_of(engine, evaluation)
    for document, steps in zip(documents, committed, strict=True):
        first, last = int(np.argmax(document.loss_mask)), len(document.token_ids) - 1
        assert walk(found[document.id], first, last) == steps
    result = evaluation.run(engine)
    assert result["walked_estimate"] == sum(map(sum, committed)) / sum(map(len, committed))
    assert result["documents"] == len(documents)
    assert any(step > 1 for steps in committed for step in steps), "a drafter that never matches shows nothing"
    assert len(evaluation.passes) > 1 or sizes == [(128, 128)]
    wrong = {number: {p: m + (p % 3 == 0) for p, m in one.items()} for number, one in found.items()}  # must fail
    assert any(
        walk(wrong[d.id], int(np.argmax(d.loss_mask)), len(d.token_ids) - 1) != steps for d, steps in zip(documents, committed)
    )


def test_with_single_rows_every_held_out_document_has_its_own_and_the_result_is_the_same():
    seed = fresh_seed()
    rng = random.Random(seed)
    replies = [[rng.randrange(MASK_ID) for _ in range(rng.randint(2, 12))] for _ in range(5)]
    documents = [document_of(number, [1, 2], reply) for number, reply in enumerate(replies)]
    engine, buckets = make_engine(make_step(TableTarget(seed), random_drafter(seed)), (64, 9))
    packed, single = (Evaluation(documents, tuple(buckets), rows=rows) for rows in ("packed", "single"))
    assert [row.document_ids for row in single.rows] == [(0,), (1,), (2,), (3,), (4,)] and len(packed.rows) < 5
    assert single.run(engine) == pytest.approx(packed.run(engine), rel=1e-4)


def naive_statistics(target: TableTarget, drafter, document: Document):
    """Loss sum, weight sum, blocks and leading matches over every anchor of one document, in float64."""
    tokens, mask = document.token_ids.tolist(), document.loss_mask.tolist()
    position, total = list(range(len(tokens))), np.zeros(4)
    weights = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    for anchor in range(len(tokens) - 1):
        if not (mask[anchor] and mask[anchor + 1]):
            continue
        label, weight = naive_labels(tokens, position, mask, [anchor], BLOCK, default_gamma(BLOCK))
        embeddings = target.embed(torch.tensor([tokens[anchor]] + [MASK_ID] * (BLOCK - 1))).double()
        hidden = naive_drafter(
            weights,
            drafter.config,
            target.features_VF[tokens].double(),
            torch.tensor(position),
            embeddings,
            torch.arange(anchor, anchor + BLOCK),
            naive_visible(position, [anchor], BLOCK),
        )[1:]
        logits = hidden @ target.head_VD.double().T
        right = (logits.argmax(1) == label[0]) & (weight[0] > 0)
        loss = F.cross_entropy(logits, label[0], reduction="none") @ weight[0]
        total += [loss.item(), weight.sum().item(), 1, right.long().cumprod(0).sum().item()]
    return total


def test_loss_and_block_match_are_naive_sums_over_every_supervised_position():
    seed = fresh_seed()
    rng = random.Random(seed)
    target, drafter = TableTarget(seed), random_drafter(seed)
    documents = []
    for number in range(4):
        length = rng.randint(5, 20)
        mask = np.array([rng.random() < 0.8 for _ in range(length - 2)] + [True, True])
        documents.append(Document(number, np.array([rng.randrange(MASK_ID) for _ in range(length)], np.int32), mask, "toy", 1))
    engine, buckets = make_engine(make_step(target, drafter), (48, 7))
    before = engine.step.state.sums.clone()
    result = Evaluation(documents, tuple(buckets), rows="packed").run(engine)
    of_each = [naive_statistics(target, drafter, document) for document in documents]
    expected = sum(of_each)
    assert result["loss"] == pytest.approx(expected[0] / expected[1], rel=1e-4)
    assert result["block_match"] == pytest.approx(1 + expected[3] / expected[2], rel=1e-6)
    assert torch.equal(engine.step.state.sums, before), "evaluation leaves nothing behind for the next update"
    fewer = [expected - one for one in of_each]  # must fail: one left out; a document's mean can be that of all, not each one's
    assert any(result["loss"] != pytest.approx(one[0] / one[1], rel=1e-4) for one in fewer)


def test_every_supervised_span_is_walked_on_its_own():
    """Two replies in one document: the walk begins anew at each, and a lone supervised token asks for nothing."""
    seed = fresh_seed()
    mask = np.array([0, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1], bool)
    document = Document(0, np.arange(11, dtype=np.int32), mask, "toy", 1)
    engine, buckets = make_engine(make_step(TableTarget(seed), random_drafter(seed)), (16, 16))
    evaluation = Evaluation([document], tuple(buckets), rows="packed")
    found = matches_of(engine, evaluation)[0]
    assert sorted(found) == [1, 2, 7, 8, 9]
    steps = walk(found, 1, 3) + walk(found, 7, 10)
    assert evaluation.run(engine)["walked_estimate"] == sum(steps) / len(steps)


def test_evaluation_gives_the_same_numbers_every_time_and_after_training_others():
    seed = fresh_seed()
    target, drafter = TableTarget(seed), random_drafter(seed)
    document = document_of(0, [1, 2], [random.randrange(MASK_ID) for _ in range(12)])
    step = make_step(target, drafter)
    engine, buckets = make_engine(step, (16, 4))
    evaluation = Evaluation([document], tuple(buckets), rows="packed")
    first = evaluation.run(engine)
    assert evaluation.run(engine) == first
    engine.fill(buckets[0], evaluation.passes[0].arrays)
    engine.micro_step(buckets[0])
    engine.update()
    assert evaluation.run(engine)["loss"] != first["loss"]
    assert decay(BLOCK, default_gamma(BLOCK)) == pytest.approx(step.decay_J.tolist())


def test_a_held_out_document_longer_than_every_bucket_is_refused_by_name():
    long = document_of(7, [1], list(range(40)))
    _, buckets = make_engine(make_step(TableTarget(1), random_drafter(1)), (32, 8))
    with pytest.raises(ShapeError, match="32/8.*41 tokens.*documents 7"):
        Evaluation([long], tuple(buckets), rows="packed")


def test_only_held_out_documents_that_fit_the_largest_bucket_are_evaluated():
    documents = [document_of(number, [1], list(range(length - 1))) for number, length in enumerate((40, 32, 10, 33, 5))]
    _, buckets = make_engine(make_step(TableTarget(1), random_drafter(1)), (16, 4), (32, 8))
    assert [d.id for d in fitting(documents, buckets, count=9)] == [1, 2, 4]
    assert [d.id for d in fitting(documents, buckets, count=2)] == [1, 2]
    with pytest.raises(DataError, match="at most 32 tokens"):
        fitting(documents[:1], buckets, count=2)
