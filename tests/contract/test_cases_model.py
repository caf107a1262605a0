"""Cases from real reports that concern the mathematics and the update: 3, 4, 5, 6 and what of 9 needs no GPU."""

import json
import random

import numpy as np
import pytest
import torch

from graphcap.engine.optimizer import FlatState, Hyper, apply_update
from graphcap.errors import ConfigError
from graphcap.model.attention import DenseAttention
from graphcap.model.blocks import decay, default_gamma, make_blocks
from graphcap.model.loss import head_loss
from graphcap.model.target import Target
from graphcap.ops.export import config_document, read_config
from tests.toys import (
    HIDDEN,
    MASK_ID,
    VOCAB,
    TableTarget,
    drafter_config,
    fresh_seed,
    make_engine,
    make_step,
    padded,
    random_drafter,
    random_row,
    run_update,
    tagged_model,
    tiny_model,
    tiny_target,
)


class Forward:
    """Outputs and losses of a row's blocks, from features that a test may change or differentiate."""

    def __init__(self, target, drafter, arrays, *, length: int, num_anchors: int, gamma: float | None = None) -> None:
        self.target, self.drafter = target, drafter
        self.tensors = padded(arrays, length, num_anchors)
        block_size = drafter.config.block_size
        decay_J = torch.tensor(decay(block_size, gamma or default_gamma(block_size)))
        self.blocks = make_blocks(*self.tensors, decay_J=decay_J, mask_token_id=drafter.config.mask_token_id)
        self.features = torch.empty(length, target.num_features)
        target.features(self.tensors[0], self.tensors[1], self.features)

    def outputs(self, features: torch.Tensor) -> torch.Tensor:
        """[N, K-1, D]."""
        mask = DenseAttention().mask(self.blocks.visibility, self.blocks.position_Q.numel())
        hidden = self.drafter(
            self.target.embed(self.blocks.token_ids_U),
            self.blocks.position_Q,
            self.drafter.context(features, self.tensors[1]),
            lambda q, *keys: DenseAttention()(q, *keys, mask, self.drafter.scale),
        )
        return hidden.unflatten(0, (-1, self.drafter.config.block_size - 1))

    def losses(self, features: torch.Tensor) -> torch.Tensor:
        """Loss of each anchor slot's block, [N]."""
        return torch.stack([self.loss(part, block)[0] for block, part in enumerate(self.outputs(features))])

    def loss(self, hidden_JD: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of a block, and its gradient in the block's hidden states."""
        labels, weights = self.blocks.label_NJ[block], self.blocks.weight_NJ[block]
        settings = {"chunk_tokens": 64, "with_gradient": True}
        loss_sum, _, gradient_JD = head_loss(hidden_JD, self.target.head_VD, labels, weights, **settings)
        return loss_sum, gradient_JD


@pytest.fixture
def packed():
    """One row of 128: document P of 61 tokens, Q of 67; anchors in both, two of them at the end of P."""
    seed = fresh_seed()
    row = random_row([61, 67], random.Random(seed))
    row["supervised"][55:] = 1
    row["anchors"] = np.array([0, 5, 30, 58, 59, 61, 62, 80, 100, 126], np.int32)
    changed = row | {"token_ids": row["token_ids"].copy()}
    changed["token_ids"][:61] = (changed["token_ids"][:61] + np.random.default_rng(seed).integers(1, MASK_ID, 61)) % MASK_ID
    return seed, row, changed


def test_case_3_a_packed_document_does_not_feel_its_neighbour(packed):
    seed, row, changed = packed
    target, drafter = tiny_target(seed), random_drafter(seed)
    left, right = (Forward(target, drafter, arrays, length=128, num_anchors=16) for arrays in (row, changed))
    of_q = torch.tensor([*(row["anchors"] >= 61), *[False] * 6])
    assert not torch.equal(left.features[:61], right.features[:61])  # P is another document now
    assert torch.equal(left.features[61:], right.features[61:])
    with torch.no_grad():
        assert torch.equal(left.outputs(left.features)[of_q], right.outputs(right.features)[of_q])
        assert torch.equal(left.losses(left.features)[of_q], right.losses(right.features)[of_q])
        assert not torch.equal(left.losses(left.features)[~of_q], right.losses(right.features)[~of_q])  # must fail


def test_case_3_a_mixture_of_experts_feels_its_neighbour_by_rounding_alone(packed):
    seed, row, changed = packed
    target, drafter = tiny_target(seed, family="mixtral"), random_drafter(seed)
    left, right = (Forward(target, drafter, arrays, length=128, num_anchors=16) for arrays in (row, changed))
    scale = left.features[61:].norm()
    assert (left.features[61:] - right.features[61:]).norm() < 1e-5 * scale  # an expert's tokens are another batch now
    assert (left.features[:61] - right.features[:61]).norm() > 0.1 * scale  # must fail


def test_case_3_the_loss_of_q_has_no_gradient_in_the_features_of_p(packed):
    seed, row, _ = packed
    forward = Forward(tiny_target(seed), random_drafter(seed), row, length=128, num_anchors=16)
    features = forward.features.clone().requires_grad_()
    of_q = np.nonzero(row["anchors"] >= 61)[0].tolist()
    hidden = forward.outputs(features)[of_q]
    upstream = torch.stack([forward.loss(part, block)[1] for block, part in zip(of_q, hidden, strict=True)])
    (gradient,) = torch.autograd.grad(hidden, features, upstream)
    assert not gradient[:61].any()
    assert gradient[61:126].abs().sum(1).all()  # must fail: Q's own context before its last anchor
    assert not gradient[126:].any()


def test_case_3_the_engines_sums_for_q_do_not_change_by_a_bit(packed):
    seed, row, changed = packed
    step = make_step(tiny_target(seed), random_drafter(seed))
    engine, (bucket,) = make_engine(step, (128, 16))
    sums = []
    for arrays in (row, changed):
        engine.fill(bucket, arrays | {"anchors": arrays["anchors"][arrays["anchors"] >= 61]})
        step.state.sums.zero_()
        engine.micro_step(bucket)
        sums.append(step.state.sums.clone())
    assert torch.equal(*sums) and sums[0].any()
    engine.fill(bucket, changed)  # must fail: with P's anchors
    engine.micro_step(bucket)
    assert not torch.equal(step.state.sums - sums[0], sums[0])


def test_case_3_positions_restart_at_q_and_no_label_crosses_token_61(packed):
    seed, row, _ = packed
    blocks = Forward(TableTarget(seed), random_drafter(seed), row, length=128, num_anchors=16).blocks
    anchors = row["anchors"].tolist()
    first_of_q = anchors.index(61)
    assert blocks.position_Q.view(-1, 4)[first_of_q].tolist() == [0, 1, 2, 3]
    assert (blocks.weight_NJ[anchors.index(58)] > 0).tolist() == [True, True, False]
    assert (blocks.weight_NJ[anchors.index(59)] > 0).tolist() == [True, False, False]
    seen = blocks.visibility.predicate()(None, None, torch.arange(64)[:, None], torch.arange(128)[None])
    for slot, anchor in enumerate(anchors):
        keys = seen[4 * slot].nonzero()[:, 0].tolist()
        assert keys == list(range(0 if anchor < 61 else 61, anchor))


@pytest.fixture
def overlapping():
    """64 tokens whose id is their position, blocks of 16 at 10, 14 and 18."""
    seed = fresh_seed()
    target = TableTarget(seed, vocab=65)
    drafter = random_drafter(seed, block_size=16, vocab_size=65, mask_token_id=64)
    arrays = {
        "token_ids": np.arange(64, dtype=np.int32),
        "position": np.arange(64, dtype=np.int32),
        "supervised": np.ones(64, np.int32),
        "anchors": np.array([10, 14, 18], np.int32),
    }
    return target, drafter, arrays


def test_case_4_a_block_does_not_feel_features_at_or_behind_its_anchor(overlapping):
    target, drafter, arrays = overlapping
    forward = Forward(target, drafter, arrays, length=64, num_anchors=3)
    with torch.no_grad():
        before = forward.outputs(forward.features)
        for block, anchor in enumerate((10, 14, 18)):
            noisy = forward.features.clone()
            noisy[anchor:] = torch.randn_like(noisy[anchor:])
            assert torch.equal(forward.outputs(noisy)[block], before[block])
            noisy[anchor - 1] += 1  # must fail: the last token before the anchor
            assert not torch.equal(forward.outputs(noisy)[block], before[block])


def test_case_4_slot_k_is_labelled_with_the_token_k_behind_the_anchor(overlapping):
    blocks = Forward(*overlapping, length=64, num_anchors=3).blocks
    assert blocks.label_NJ.tolist() == [[anchor + k for k in range(1, 16)] for anchor in (10, 14, 18)]
    assert blocks.weight_NJ.shape == (3, 15)  # slot 0 carries no loss: it has no place among the labels


def test_case_4_a_blocks_loss_is_the_same_among_one_or_three_anchors(overlapping):
    target, drafter, arrays = overlapping
    with torch.no_grad():
        three = Forward(target, drafter, arrays, length=64, num_anchors=3)
        losses = three.losses(three.features)
        for block, anchor in enumerate((10, 14, 18)):
            one = Forward(target, drafter, arrays | {"anchors": np.array([anchor], np.int32)}, length=64, num_anchors=1)
            torch.testing.assert_close(one.losses(one.features)[0], losses[block], rtol=1e-5, atol=1e-6)
            assert abs(losses[block] - losses[block - 1]) > 1e-3  # must fail: another block's loss


def test_case_5_target_layer_ids_are_0_based_outputs_of_decoder_layers():
    def tapped(ids) -> list[float]:
        target = Target(tagged_model(), ids)
        out = torch.full((3, target.num_features), float("nan"))
        target.features(torch.tensor([5, 6, 7]), torch.arange(3), out)
        values = out.view(3, len(ids), HIDDEN)
        assert (values == values[:1, :, :1]).all()
        return values[0, :, 0].tolist()

    assert tapped((0, 2)) == [1, 7]
    assert tapped((3,)) == [15]  # the last layer's output before the final norm
    with torch.no_grad():
        states = tagged_model()(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
    assert [states[i][0, 0, 0].item() for i in (1, 3)] == [1, 7]  # the convention that counts the embedding as 0
    assert [states[i][0, 0, 0].item() for i in (0, 2)] == [0, 3]  # what an id off by one would give


@pytest.mark.parametrize("ids", [(), (2, 2), (-1, 1), (0, 4), (0, 1, 2, 3, 4)])
def test_case_5_lists_of_layers_that_mean_nothing_are_refused(ids):
    with pytest.raises(ConfigError, match="target_layer_ids"):
        drafter_config(target_layer_ids=ids, num_target_layers=4)


def test_case_5_the_exported_config_holds_the_list_and_says_its_convention(tmp_path):
    config = drafter_config(target_layer_ids=(0, 2))
    document = config_document(config, torch.bfloat16)
    assert document["dflash_config"]["target_layer_ids"] == [0, 2] and "0-based" in json.dumps(document["dflash_config"])
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert read_config(tmp_path) == config


def test_case_5_rows_in_shuffled_order_have_the_features_of_each_alone():
    seed = fresh_seed()
    target = Target(tiny_model("llama", seed), (0, 2))
    rows = [torch.randint(0, VOCAB, (length,)) for length in (9, 21, 14)]

    def features(token_ids, position):
        out = torch.empty(len(token_ids), target.num_features)
        target.features(token_ids, position, out)
        return out

    order = random.sample(range(3), 3)
    together = features(torch.cat([rows[i] for i in order]), torch.cat([torch.arange(len(rows[i])) for i in order]))
    for i, part in zip(order, together.split([len(rows[i]) for i in order])):
        torch.testing.assert_close(part, features(rows[i], torch.arange(len(rows[i]))), rtol=1e-4, atol=1e-4)


CASE_6 = Hyper(
    learning_rate=1e-4,
    warmup_fraction=0.0,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.0,
    max_grad_norm=1.0,
    num_updates=10**9,
)


def norm_weight_state() -> FlatState:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(1))
    return FlatState(module, num_statistics=2, dtype=torch.bfloat16, device=torch.device("cpu"))


def constant_updates(state: FlatState, count: int) -> None:
    for _ in range(count):
        state.accumulate((torch.full((1,), 0.5, dtype=torch.bfloat16),))
        apply_update(state, torch.tensor(1.0), CASE_6)


def test_case_6_bfloat16_norm_weights_move_because_their_masters_are_float32():
    state = norm_weight_state()
    constant_updates(state, 100)
    assert state.master[0].item() == pytest.approx(0.990, abs=1e-4)
    assert state.parameters[0].item() == 0.98828125
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))  # must fail: pure bfloat16 stays where it is
    optimizer = torch.optim.Adam([weight], lr=1e-4)
    for _ in range(100):
        weight.grad = torch.full((1,), 0.5, dtype=torch.bfloat16)
        optimizer.step()
    assert weight.item() == 1.0


def test_case_6_a_run_killed_at_update_50_goes_on_bit_for_bit():
    whole = norm_weight_state()
    constant_updates(whole, 50)
    saved = {name: tensor.clone() for name, tensor in whole.tensors().items()}
    constant_updates(whole, 50)
    resumed = norm_weight_state()
    resumed.load(saved)
    constant_updates(resumed, 50)
    assert all(torch.equal(tensor, resumed.tensors()[name]) for name, tensor in whole.tensors().items())
    assert torch.equal(whole.weights, resumed.weights) and whole.counter == 100
    constant_updates(resumed, 1)  # must fail: one update more
    assert not torch.equal(whole.master, resumed.master)


def case_9_run(seed: int, *, resume_at: int | None) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """20 updates of 4 micro steps, one row of them without a supervised token; perhaps a resume into a new engine."""
    rng = random.Random(seed)
    rows = [random_row([20, 12], rng, num_anchors=4) for _ in range(80)]
    rows[30] = rows[30] | {"supervised": np.zeros(32, np.int32), "anchors": np.zeros(0, np.int32)}
    step = make_step(TableTarget(seed), random_drafter(seed), num_updates=20)
    engine, (bucket,) = make_engine(step, (32, 5))
    read = []
    for update in range(20):
        if update == resume_at:
            saved = {name: tensor.clone() for name, tensor in step.state.tensors().items()}
            before = step.ring.clone()
            step = make_step(TableTarget(seed), random_drafter(seed + 1), num_updates=20)
            engine, (bucket,) = make_engine(step, (32, 5))
            step.state.load(saved)
            step.ring.copy_(before)
        read.append(run_update(engine, [(bucket, row) for row in rows[4 * update : 4 * update + 4]]))
    return read, step.state.master.clone(), step.ring[:20].clone()


def test_case_9_accumulated_updates_repeat_bit_for_bit_through_a_resume():
    seed = fresh_seed()
    first, second = case_9_run(seed, resume_at=None), case_9_run(seed, resume_at=11)
    assert all(torch.equal(left, right) for left, right in zip(first[0], second[0], strict=True))
    assert torch.equal(first[1], second[1]) and torch.equal(first[2], second[2])
    assert torch.isfinite(first[2]).all() and not first[2][:, 4:6].any()  # neither empty nor skipped
    assert len({read.sum().item() for read in first[0]}) == 20  # sums read earlier did not change with later updates
    assert not torch.equal(first[1], case_9_run(seed + 1, resume_at=None)[1])  # must fail: another seed
