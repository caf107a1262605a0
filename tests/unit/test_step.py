"""The whole step on the CPU: its gradients against one float64 formula, splits, poison, learning, and its metrics."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from graphcap.data.planner import Bucket
from graphcap.engine.step import RING
from graphcap.errors import ShapeError
from graphcap.model.blocks import default_gamma
from tests.toys import (
    MASK_ID,
    VOCAB,
    TableTarget,
    fresh_seed,
    make_engine,
    make_step,
    naive_drafter,
    naive_labels,
    naive_visible,
    padded,
    random_drafter,
    random_lengths,
    random_row,
    relative,
    run_update,
    tiny_target,
)

LENGTH, SLOTS, BLOCK = 64, 8, 4


def random_rows(seed: int, count: int, *, length: int = LENGTH, num_anchors: int = SLOTS - 1) -> list[dict[str, np.ndarray]]:
    rng = random.Random(seed)
    return [random_row(random_lengths(length, rng), rng, num_anchors=num_anchors) for _ in range(count)]


def joined(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Rows laid end to end as one row of more documents."""
    starts = np.cumsum([0] + [len(row["token_ids"]) for row in rows])
    arrays = {name: np.concatenate([row[name] for row in rows]) for name in ("token_ids", "position", "supervised")}
    arrays["anchors"] = np.concatenate([row["anchors"] + start for row, start in zip(rows, starts)]).astype(np.int32)
    return arrays


def naive_step(target, drafter, arrays: dict[str, np.ndarray], *, gamma: float, mask_id: int = MASK_ID):
    """Gradient of every parameter and the statistics of one row, in float64 and in one piece."""
    tokens, position, supervised, anchors = padded(arrays, LENGTH, SLOTS)
    block_size = drafter.config.block_size
    label, weight = naive_labels(tokens.tolist(), position.tolist(), supervised.tolist(), anchors.tolist(), block_size, gamma)
    features = torch.empty(LENGTH, target.num_features)
    target.features(tokens, position, features)
    block_tokens = torch.full((SLOTS, block_size), mask_id)
    block_tokens[:, 0] = tokens[anchors.clamp(min=0)]
    places = position[anchors.clamp(min=0)][:, None] + torch.arange(block_size)
    weights = {name: tensor.detach().double().requires_grad_() for name, tensor in drafter.named_parameters()}
    hidden = naive_drafter(
        weights,
        drafter.config,
        features.double(),
        position,
        target.embed(block_tokens.flatten()).double(),
        places.flatten(),
        naive_visible(position.tolist(), anchors.tolist(), block_size),
    ).unflatten(0, (SLOTS, block_size))[:, 1:]
    logits = hidden @ target.head_VD.double().T
    loss = (F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="none") * weight.flatten()).sum()
    right = (logits.argmax(-1) == label) & (weight > 0)
    statistics = [
        loss.item(),
        weight.sum().item(),
        (weight[:, 0] > 0).sum().item(),
        right.long().cumprod(1).sum().item(),
    ]
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return torch.cat([g.flatten() for g in gradients]), statistics + right.sum(0).tolist()


def gradients_of(step) -> torch.Tensor:
    return torch.cat([view.flatten() for view in step.state.gradient_views]).clone()


def test_a_micro_step_is_the_float64_gradient_of_the_whole_formula():
    seed = fresh_seed()
    target, drafter = tiny_target(seed), random_drafter(seed)
    step = make_step(target, drafter, chunk_tokens=5)
    engine, (bucket,) = make_engine(step, (LENGTH, SLOTS))
    (row,) = random_rows(seed, 1)
    engine.fill(bucket, row)
    engine.micro_step(bucket)
    ours, gamma = gradients_of(step), default_gamma(BLOCK)
    expected, statistics = naive_step(target, drafter, row, gamma=gamma)
    assert relative(ours - expected, expected) < 1e-4
    assert step.state.statistics.tolist() == pytest.approx(statistics, rel=1e-4)
    shifted = row | {"token_ids": np.roll(row["token_ids"], 1)}
    for wrong in (
        naive_step(target, drafter, row, gamma=gamma + 1),
        naive_step(target, drafter, row, gamma=gamma, mask_id=0),
        naive_step(target, drafter, shifted, gamma=gamma),
        naive_step(target, drafter, row | {"anchors": row["anchors"][1:]}, gamma=gamma),
    ):  # must fail
        assert relative(ours - wrong[0], expected) > 1e-3


def test_the_block_reads_the_targets_embedding_of_the_mask_token():
    seed = fresh_seed()
    target = TableTarget(seed)
    engine, (bucket,) = make_engine(make_step(target, random_drafter(seed)), (LENGTH, SLOTS))
    (row,) = random_rows(seed, 1)

    def loss() -> float:
        engine.fill(bucket, row)
        return engine.evaluate(bucket)[0][0].item()

    before = loss()
    for token_id in set(range(VOCAB)) - {MASK_ID, *row["token_ids"].tolist()}:
        target.embedding_VD[token_id] += 1.0
    assert loss() == before
    target.embedding_VD[MASK_ID] += 1.0
    assert loss() != before


def accumulated(step, engine, rows) -> torch.Tensor:
    step.state.sums.zero_()
    for bucket, row in rows:
        engine.fill(bucket, row)
        engine.micro_step(bucket)
    return step.state.sums.clone()


def test_the_same_documents_have_the_same_gradient_however_they_are_split_over_rows():
    seed = fresh_seed()
    step = make_step(tiny_target(seed), random_drafter(seed, sharpness=0.5))
    engine, (small, medium, large) = make_engine(step, (LENGTH, SLOTS), (LENGTH * 2, 2 * SLOTS + 3), (LENGTH * 3, 3 * SLOTS))
    a, b, c = rows = random_rows(seed, 3)
    apart = accumulated(step, engine, [(small, row) for row in rows])
    assert apart[step.state.gradients.numel() + 1] > 0
    for split in ([(large, joined(rows))], [(small, c), (medium, joined([b, a]))], [(large, joined([c, b, a]))]):
        assert relative(accumulated(step, engine, split) - apart, apart) <= 1e-6
    means = [accumulated(step, engine, [(small, row)]) for row in rows]
    size = step.state.gradients.numel()
    exact = apart[:size] / apart[size + 1]
    mean_of_means = sum(one[:size] / one[size + 1] for one in means) / 3  # must fail: a normaliser local to the row
    left_out = accumulated(step, engine, [(small, a), (small, b)])  # must fail: one row left out
    assert relative(mean_of_means - exact, exact) > 1e-4
    assert relative(left_out[:size] / left_out[size + 1] - exact, exact) > 1e-3


def trained(seed: int, plan: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Masters before and after 50 updates of two rows: apart, as one row, or each divided by its own weight."""
    rows = random_rows(seed, 6, num_anchors=4)
    step = make_step(TableTarget(seed), random_drafter(seed, sharpness=0.5), num_updates=50, learning_rate=1e-3, eps=1e-6)
    start, state = step.state.master.clone(), step.state
    engine, (small, large) = make_engine(step, (LENGTH, SLOTS), (LENGTH * 2, SLOTS))
    for update in range(50):
        pair = [rows[update % 6], rows[(update + 1) % 6]]
        if plan == "together":
            run_update(engine, [(large, joined(pair))])
        elif plan == "apart":
            run_update(engine, [(small, row) for row in pair])
        else:
            sums = []
            for row in pair:
                sums.append(accumulated(step, engine, [(small, row)]))
            means = [one[: state.gradients.numel()] / one[state.gradients.numel() + 1] for one in sums]
            state.sums.copy_(sum(sums))
            state.gradients.copy_(sum(means) / 2 * state.statistics[1])
            engine.update()
    return start, state.master.clone()


def test_the_same_documents_give_the_same_training_however_they_are_split_over_rows():
    seed = fresh_seed()
    start, apart = trained(seed, "apart")
    assert relative(trained(seed, "together")[1] - apart, apart - start) <= 1e-5
    assert relative(trained(seed, "local")[1] - apart, apart - start) > 1e-3  # must fail: a normaliser local to the row


def test_nothing_left_in_tails_features_or_slots_changes_a_bit():
    seed = fresh_seed()
    target, drafter = tiny_target(seed), random_drafter(seed)
    step = make_step(target, drafter)
    engine, (bucket,) = make_engine(step, (LENGTH, SLOTS))
    row, other = random_rows(seed, 2)
    short = {name: array[: 3 if name == "anchors" else 40] for name, array in row.items()}
    short["anchors"] = short["anchors"][short["anchors"] < 38]
    clean = accumulated(step, engine, [(bucket, short)])
    other["anchors"] = np.sort(np.random.default_rng(seed).choice(60, SLOTS, replace=False)).astype(np.int32)
    engine.fill(bucket, {name: np.resize(array, SLOTS if name == "anchors" else LENGTH) for name, array in other.items()})
    target.features = poisoned(target.features)
    assert torch.equal(accumulated(step, engine, [(bucket, short)]), clean)
    assert torch.isfinite(clean).all() and clean.any()
    short["token_ids"] = short["token_ids"].copy()
    short["token_ids"][: short["anchors"][-1] + 1] += 1  # must fail: the row itself is another
    assert not torch.equal(accumulated(step, engine, [(bucket, short)]), clean)


def poisoned(features):
    """The same function on a buffer of NaN: whatever it leaves unwritten shows."""

    def write(token_ids_T, position_T, out_TF):
        features(token_ids_T, position_T, out_TF.fill_(float("nan")))

    return write


def test_a_row_without_anchors_adds_nothing_and_alone_makes_an_empty_update():
    seed = fresh_seed()
    step = make_step(TableTarget(seed), random_drafter(seed))
    engine, (bucket,) = make_engine(step, (LENGTH, SLOTS))
    row, silent = random_rows(seed, 2)
    silent = silent | {"anchors": np.zeros(0, np.int32), "supervised": np.zeros_like(silent["supervised"])}
    alone = accumulated(step, engine, [(bucket, row)])
    assert torch.equal(accumulated(step, engine, [(bucket, silent), (bucket, row), (bucket, silent)]), alone)
    step.state.sums.zero_()
    before = step.state.master.clone()
    run_update(engine, [(bucket, silent)])
    names = step.metric_names
    assert torch.equal(step.state.master, before)
    assert (step.ring[0, names.index("empty")], step.ring[0, names.index("skipped")]) == (1, 0)
    run_update(engine, [(bucket, row)])  # must fail: a row with anchors moves it
    assert not torch.equal(step.state.master, before) and torch.isfinite(step.state.master).all()


def test_micro_steps_add_up_and_an_update_starts_from_zero():
    seed = fresh_seed()
    step = make_step(TableTarget(seed), random_drafter(seed))
    engine, (bucket,) = make_engine(step, (LENGTH, SLOTS))
    first, second = random_rows(seed, 2)
    one, two = accumulated(step, engine, [(bucket, first)]), accumulated(step, engine, [(bucket, second)])
    both = accumulated(step, engine, [(bucket, first), (bucket, second)])
    torch.testing.assert_close(both, one + two, rtol=1e-5, atol=1e-5)
    engine.update()
    assert not step.state.sums.any()


def test_the_metrics_of_every_update_are_the_naive_means_of_its_rows():
    seed = fresh_seed()
    step = make_step(TableTarget(seed), random_drafter(seed, sharpness=0.7), num_updates=10, learning_rate=1e-9)
    engine, (bucket,) = make_engine(step, (LENGTH, SLOTS))
    gamma, names = default_gamma(BLOCK), step.metric_names
    for update in range(3):
        rows = random_rows(seed + update, 1 + update)
        naive = [naive_step(step.target, step.drafter, row, gamma=gamma) for row in rows]
        total = np.sum([statistics for _, statistics in naive], axis=0)
        norm = (sum(gradient for gradient, _ in naive) / total[1]).norm().item()
        run_update(engine, [(bucket, row) for row in rows])
        expected = {
            "loss": total[0] / total[1],
            "block_match": 1 + total[3] / total[2],
            "learning_rate": None,
            "grad_norm": norm,
            "empty": 0,
            "skipped": 0,
            "anchors": total[2],
        } | {f"match_share_{k}": total[3 + k] / total[2] for k in range(1, BLOCK)}
        assert list(expected) == names
        found = dict(zip(names, step.ring[update].tolist(), strict=True))
        assert found.pop("learning_rate") == pytest.approx(1e-9 * [1, 0.9698463, 0.8830222][update], rel=1e-5)
        expected.pop("learning_rate")
        assert found == pytest.approx(expected, rel=2e-4)
        assert {**expected, "loss": expected["loss"] * 1.01} != pytest.approx(found, rel=2e-4)  # must fail
    assert not step.ring[3:].any() and step.state.counter == 3


def test_the_ring_of_metrics_starts_again_at_its_end():
    seed = fresh_seed()
    step = make_step(TableTarget(seed), random_drafter(seed))
    engine, (bucket,) = make_engine(step, (LENGTH, SLOTS))
    step.state.counter.fill_(RING - 1)
    for _ in range(2):
        run_update(engine, [(bucket, row) for row in random_rows(seed, 1)])
    anchors = step.ring[:, step.metric_names.index("anchors")]
    assert anchors[RING - 1] > 0 and anchors[0] > 0 and anchors[1] == 0


def test_a_row_for_no_bucket_is_refused_naming_the_nearest():
    engine, _ = make_engine(make_step(TableTarget(1), random_drafter(1)), (64, 8), (256, 16))
    (row,) = random_rows(1, 1)
    with pytest.raises(ShapeError, match="96/8.*nearest.*64/8"):
        engine.fill(Bucket(96, 8), row)


def test_one_row_is_learned_by_heart():
    seed = fresh_seed()
    step = make_step(tiny_target(seed), random_drafter(seed, sharpness=0.5), num_updates=200, learning_rate=1e-2)
    engine, (bucket,) = make_engine(step, (LENGTH, SLOTS))
    (row,) = random_rows(seed, 1)
    for _ in range(200):
        run_update(engine, [(bucket, row)])
    losses = step.ring[:200, 0].tolist()
    assert losses[0] > 2 and losses[-1] < 0.05


class Shuffled(TableTarget):
    """The same features, handed to the wrong tokens, others every time."""

    def features(self, token_ids_T, position_T, out_TF):
        super().features(token_ids_T[torch.randperm(token_ids_T.numel())], position_T, out_TF)


KINDS = 12  # first tokens of a riddle


def riddles(rng: random.Random) -> dict[str, np.ndarray]:
    """Documents of 4 tokens: a first one that decides the last two, and a random anchor. Only the features tell."""
    documents = []
    for _ in range(LENGTH // 4):
        first = rng.randrange(KINDS)
        documents.append([first, rng.randrange(20, 60), KINDS + (5 * first + 3) % KINDS, 2 * KINDS + (7 * first + 1) % KINDS])
    return {
        "token_ids": np.array(documents, np.int32).flatten(),
        "position": np.tile(np.arange(4, dtype=np.int32), LENGTH // 4),
        "supervised": np.ones(LENGTH, np.int32),
        "anchors": np.arange(1, LENGTH, 4, dtype=np.int32),
    }


def final_loss(target, seed: int) -> float:
    step = make_step(target, random_drafter(seed, sharpness=0.5, block_size=3), num_updates=150, learning_rate=5e-3)
    engine, (bucket,) = make_engine(step, (LENGTH, LENGTH // 4))
    rng = random.Random(seed)
    for _ in range(150):
        run_update(engine, [(bucket, riddles(rng))])
    return step.ring[140:150, 0].mean().item()


def test_it_learns_from_the_features_and_not_without_them():
    seed = fresh_seed()
    knowing, shuffled = final_loss(TableTarget(seed), seed), final_loss(Shuffled(seed), seed)
    blind = final_loss(TableTarget(seed, features_VF=torch.zeros(VOCAB, 64)), seed)
    assert knowing < 0.3 < 0.85 * math.log(KINDS) < min(shuffled, blind)
    assert shuffled > 0.9 * blind


def test_gradient_checkpointing_changes_no_bit_of_loss_and_gradients():
    seed = fresh_seed()
    sums = []
    for checkpointing in (False, True):
        step = make_step(tiny_target(seed), random_drafter(seed))
        step.drafter.checkpointing = checkpointing
        engine, (bucket,) = make_engine(step, (128, 16))
        engine.fill(bucket, step.example(bucket) | {"token_ids": step.example(bucket)["token_ids"] % VOCAB})
        engine.micro_step(bucket)
        sums.append(step.state.sums.clone())
    assert torch.equal(*sums), f"seed {seed}"
    assert sums[0].abs().sum() > 0
