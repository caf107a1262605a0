"""The update against torch.optim.AdamW in float64, the learning rate against its formula, and skipping."""

import dataclasses
import functools
import math

import pytest
import torch
from torch import nn

from graphcap.engine.optimizer import ALIGNMENT_BYTES, FlatState, Hyper, apply_update, learning_rate
from tests.toys import fresh_seed, relative

HYPER = Hyper(
    learning_rate=1e-2,
    warmup_fraction=0.2,
    beta1=0.9,
    beta2=0.95,
    eps=1e-6,
    weight_decay=0.1,
    max_grad_norm=1.0,
    num_updates=30,
)
SHAPES = [(5, 7), (33,), (4, 8), (1,)]


def make_module(dtype=torch.float32) -> nn.Module:
    module = nn.Module()
    for number, shape in enumerate(SHAPES):
        module.register_parameter(f"w{number}", nn.Parameter(torch.randn(shape, dtype=dtype)))
    return module


def make_state(module: nn.Module, *, dtype=torch.float32, num_statistics: int = 3) -> FlatState:
    return FlatState(module, num_statistics=num_statistics, dtype=dtype, device=torch.device("cpu"))


def formula(update: int, hyper: Hyper) -> float:
    """Learning rate of the update-th update, counted from 1."""
    warmup = max(1, round(hyper.warmup_fraction * hyper.num_updates))
    if update <= warmup:
        return hyper.learning_rate * update / warmup
    done = (update - warmup) / (hyper.num_updates - warmup)
    return hyper.learning_rate * (1 + math.cos(math.pi * done)) / 2


def snapshot(state: FlatState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in (state.tensors() | {"weights": state.weights}).items()}


def fill(state: FlatState, gradients: list[torch.Tensor], weight_sum: float) -> None:
    """Two micro steps that sum to weight_sum · gradients."""
    share = torch.rand(()).item()
    for part in (share, 1 - share):
        state.accumulate(tuple(g * weight_sum * part for g in gradients))


def reference_run(parameters: list[torch.Tensor], all_gradients, hyper: Hyper, *, clip: bool = True, late: int = 0):
    """The parameters after torch's AdamW in float64, and the norm of each mean gradient."""
    parameters = [nn.Parameter(p.double()) for p in parameters]
    optimizer = torch.optim.AdamW(
        parameters, lr=0.0, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps, weight_decay=hyper.weight_decay
    )
    norms = []
    for number, gradients in enumerate(all_gradients):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.double()
        norms.append(nn.utils.clip_grad_norm_(parameters, hyper.max_grad_norm if clip else math.inf).item())
        optimizer.param_groups[0]["lr"] = formula(number + 1 - late, hyper)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters]), norms


def test_thirty_updates_are_torchs_adamw_in_float64_with_clip_and_schedule():
    fresh_seed()
    module = make_module()
    start = [p.detach().clone() for p in module.parameters()]
    # Norms on both sides of the clip; from the first on, since Adam forgets the scale of gradients that are all alike.
    all_gradients = [[torch.randn(s) * 10 ** (-2 + 2 * torch.rand(()).item()) for s in SHAPES] for _ in range(30)]
    state, norms, rates = make_state(module), [], []
    for gradients in all_gradients:
        weight_sum = 1 + 50 * torch.rand(())
        fill(state, gradients, weight_sum.item())
        applied = apply_update(state, weight_sum, HYPER)
        norms.append(applied["grad_norm"].item())
        rates.append(applied["learning_rate"].item())
        assert not state.sums.any() and applied["empty"] == applied["skipped"] == 0
    ours = torch.cat([view.flatten() for view in state.master_views])
    expected, expected_norms = reference_run(start, all_gradients, HYPER)
    origin = torch.cat([p.flatten() for p in start])
    assert relative(ours - expected, expected - origin) < 2e-5
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert rates == pytest.approx([formula(update, HYPER) for update in range(1, 31)], rel=1e-6, abs=1e-12)
    assert min(norms) < HYPER.max_grad_norm < max(norms)
    for wrong in (
        reference_run(start, all_gradients, HYPER, clip=False),
        reference_run(start, all_gradients, HYPER, late=1),
        reference_run(start, all_gradients, dataclasses.replace(HYPER, weight_decay=0.0)),
        reference_run(start, all_gradients, dataclasses.replace(HYPER, eps=1e-3)),
    ):  # must fail
        assert relative(ours - wrong[0], expected - origin) > 1e-3


def test_the_update_does_not_depend_on_the_weight_sums_scale():
    fresh_seed()
    gradients = [torch.randn(s) for s in SHAPES]
    results = []
    for weight_sum in (1.0, 1024.0):
        torch.manual_seed(1)
        state = make_state(make_module())
        state.accumulate(tuple(g * weight_sum for g in gradients))
        apply_update(state, torch.tensor(weight_sum), HYPER)
        results.append(state.master.clone())
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("num_updates", [1, 2, 3, 10, 100, 1377])
@pytest.mark.parametrize("warmup_fraction", [0.0, 0.04, 0.5])
def test_the_learning_rate_rises_from_the_first_update_and_falls_to_zero_at_the_last(num_updates, warmup_fraction):
    hyper = dataclasses.replace(HYPER, num_updates=num_updates, warmup_fraction=warmup_fraction)
    rates = [learning_rate(torch.tensor(counter), hyper).item() for counter in range(num_updates)]
    assert rates == pytest.approx([formula(counter + 1, hyper) for counter in range(num_updates)], rel=1e-6, abs=1e-12)
    warmup = max(1, round(warmup_fraction * num_updates))
    assert rates[0] == pytest.approx(hyper.learning_rate / warmup) and max(rates) == pytest.approx(hyper.learning_rate)
    assert num_updates == warmup or rates[-1] == pytest.approx(0, abs=1e-9)
    assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup - 1 :] == sorted(rates[warmup - 1 :], reverse=True)
    assert learning_rate(torch.tensor(num_updates + 5), hyper).item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kind", ["nan", "inf", "empty"])
def test_what_cannot_be_applied_leaves_every_bit_and_moves_the_counter(kind):
    fresh_seed()
    state = make_state(make_module())
    fill(state, [torch.randn(s) for s in SHAPES], 2.0)
    apply_update(state, torch.tensor(2.0), HYPER)
    before = snapshot(state)
    fill(state, [torch.randn(s) for s in SHAPES], 2.0)
    weight_sum = torch.tensor(0.0 if kind == "empty" else 2.0)
    if kind != "empty":
        state.gradient_views[2][1, 3] = float(kind)
    applied = apply_update(state, weight_sum, HYPER)
    after = snapshot(state)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["counter"]
    assert after["counter"] == before["counter"] + 1 == 2 and after["adam_step"] == 1
    assert (applied["empty"], applied["skipped"]) == ((1, 0) if kind == "empty" else (0, 1))
    assert applied["learning_rate"].item() == pytest.approx(formula(2, HYPER))
    assert not state.sums.any()  # nothing of the bad update is left for the next
    fill(state, [torch.randn(s) for s in SHAPES], 2.0)  # must fail: a good update moves everything
    apply_update(state, torch.tensor(2.0), HYPER)
    assert not any(torch.equal(after[name], now) for name, now in snapshot(state).items())


def test_an_empty_update_without_any_gradient_is_counted_as_empty():
    state = make_state(make_module())
    before = snapshot(state)
    applied = apply_update(state, torch.tensor(0.0), HYPER)
    assert (applied["empty"], applied["skipped"]) == (1, 0)
    assert all(torch.isfinite(tensor).all() for tensor in snapshot(state).values())
    assert torch.equal(before["master"], state.master)


def test_every_view_starts_at_a_multiple_of_128_bytes_and_backs_its_parameter():
    fresh_seed()
    module = make_module()
    start = [p.detach().clone() for p in module.parameters()]
    state = make_state(module)
    for parameter, master, gradient, value in zip(
        module.parameters(), state.master_views, state.gradient_views, start, strict=True
    ):
        for view, flat in ((parameter, state.weights), (master, state.master), (gradient, state.gradients)):
            assert (view.data_ptr() - flat.data_ptr()) % ALIGNMENT_BYTES == 0
            assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert torch.equal(parameter, value) and torch.equal(master, value)
    owned = torch.zeros_like(state.master, dtype=torch.bool)
    for view in state.master_views:
        start_at = (view.data_ptr() - state.master.data_ptr()) // 4
        assert not owned[start_at : start_at + view.numel()].any(), "two parameters share an element"
        owned[start_at : start_at + view.numel()] = True
    for _ in range(3):
        fill(state, [torch.randn(s) for s in SHAPES], 1.0)
        apply_update(state, torch.tensor(1.0), HYPER)
    assert not state.master[~owned].any() and not state.weights[~owned].any() and (~owned).any()
    assert ALIGNMENT_BYTES == 128


def test_gradients_and_statistics_lie_in_one_tensor_for_one_reduction():
    state = make_state(make_module(), num_statistics=3)
    state.sums.copy_(torch.arange(state.sums.numel()))
    assert state.statistics.tolist() == [state.sums.numel() - n for n in (3, 2, 1)]
    assert torch.equal(torch.cat((state.gradients, state.statistics)), state.sums)


def test_bfloat16_gradients_add_up_in_float32():
    fresh_seed()
    state = make_state(make_module(), dtype=torch.bfloat16)
    gradients = [[torch.randn(s).bfloat16() for s in SHAPES] for _ in range(50)]
    for one in gradients:
        state.accumulate(tuple(one))
    exact = torch.cat([sum(one[number].double() for one in gradients).flatten() for number in range(len(SHAPES))])
    ours = torch.cat([view.flatten() for view in state.gradient_views])
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
    rounded = torch.cat([functools.reduce(torch.add, [one[n] for one in gradients]).flatten() for n in range(len(SHAPES))])
    assert relative(rounded - exact, exact) > 1e-3  # must fail: a sum in bfloat16


def test_a_loaded_state_goes_on_bit_for_bit_without_moving():
    seed = fresh_seed()
    all_gradients = [[torch.randn(s) for s in SHAPES] for _ in range(12)]

    def run(state: FlatState, which) -> None:
        for gradients in which:
            state.accumulate(tuple(gradients))
            apply_update(state, torch.tensor(1.0), HYPER)

    torch.manual_seed(seed)
    whole = make_state(make_module(), dtype=torch.bfloat16)
    run(whole, all_gradients[:6])
    saved = {name: tensor.clone() for name, tensor in whole.tensors().items()}
    run(whole, all_gradients[6:])

    resumed = make_state(make_module(), dtype=torch.bfloat16)  # another start
    resumed.sums.fill_(float("nan"))
    addresses = [t.data_ptr() for t in (*resumed.tensors().values(), resumed.weights, resumed.sums, *resumed.parameters)]
    resumed.load(saved)
    assert addresses == [
        t.data_ptr() for t in (*resumed.tensors().values(), resumed.weights, resumed.sums, *resumed.parameters)
    ]
    run(resumed, all_gradients[6:])
    assert all(
        torch.equal(left, right) for left, right in zip(snapshot(whole).values(), snapshot(resumed).values(), strict=True)
    )
    saved["exp_avg_sq"][3] *= 1.5  # must fail: one element of one moment
    resumed.load(saved)
    run(resumed, all_gradients[6:])
    assert not torch.equal(whole.master, resumed.master)


def test_a_state_of_another_shape_or_dtype_is_not_loaded():
    state = make_state(make_module())
    for change in ({"master": state.master[:-1].clone()}, {"exp_avg": state.exp_avg.bfloat16()}):
        with pytest.raises(AssertionError, match=next(iter(change))):
            state.load(state.tensors() | change)


def test_moments_and_masters_are_float32_for_bfloat16_weights():
    state = make_state(make_module(), dtype=torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in state.tensors().items()} == {
        "master": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
        "adam_step": torch.float32,
        "counter": torch.int64,
    }
    assert state.weights.dtype == torch.bfloat16 and state.sums.dtype == torch.float32


def test_a_new_beginning_is_the_start_bit_for_bit_without_moving():
    fresh_seed()
    state = make_state(make_module())
    start, addresses = (
        snapshot(state),
        [tensor.data_ptr() for tensor in (*state.tensors().values(), state.weights, state.sums)],
    )
    fill(state, [torch.randn(s) for s in SHAPES], 1.0)
    apply_update(state, torch.tensor(1.0), HYPER)
    fill(state, [torch.randn(s) for s in SHAPES], 1.0)
    assert not torch.equal(state.master, start["master"])
    state.begin()
    assert all(torch.equal(start[name], now) for name, now in snapshot(state).items()) and not state.sums.any()
    assert addresses == [tensor.data_ptr() for tensor in (*state.tensors().values(), state.weights, state.sums)]
