"""The captured engine: replay is the eager step bit for bit, and every trap of captured training is sprung once."""

import functools
import gc
import random
import sys
import threading
import types

import numpy as np
import pytest
import torch

from graphcap.data.planner import Bucket
from graphcap.engine import Engine
from graphcap.engine.guard import bits_of
from graphcap.engine.optimizer import learning_rate
from graphcap.engine.step import DrafterStep
from graphcap.errors import CaptureError, ShapeError
from graphcap.model.target import Target
from tests.toys import make_step, random_drafter, tiny_model

pytestmark = pytest.mark.cuda
BUCKETS = (Bucket(512, 64), Bucket(256, 32), Bucket(256, 64), Bucket(128, 32))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def small_step(*, num_updates: int = 100, kind=DrafterStep, **hyper):
    """A step of DrafterStep's kind small enough to capture in seconds: toy target, heads of 32, two drafter layers."""
    model = tiny_model("qwen3", 0, head_dim=32).to(DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32)
    drafter = random_drafter(1, head_dim=32, num_layers=2, block_size=8)
    return make_step(Target(model, (0, 2)), drafter, num_updates=num_updates, kind=kind, **hyper)


@pytest.fixture(scope="module")
def engine():
    """One captured engine of four buckets; tests reset its state. The door is shut while it lives."""
    captured = Engine(small_step(), BUCKETS)
    captured.prepare(eager=False)
    yield captured
    captured.close()


@pytest.fixture(scope="module")
def eager(engine):
    """The same step launched from Python, sharing the captured engine's kernels and closed door."""
    twin = Engine(small_step(), BUCKETS)
    return twin


def random_row(bucket: Bucket, rng: np.random.Generator, vocabulary: int = 64) -> dict[str, np.ndarray]:
    """Two documents and padding, anchors in both, some slots unused."""
    length = bucket.length - int(rng.integers(0, 40))
    border = int(rng.integers(10, length - 10))
    anchors = np.sort(rng.choice(length - 1, min(bucket.num_anchors, length - 1) - int(rng.integers(0, 5)), replace=False))
    return {
        "token_ids": rng.integers(0, vocabulary, length).astype(np.int32),
        "position": np.concatenate((np.arange(border), np.arange(length - border))).astype(np.int32),
        "supervised": (rng.random(length) < 0.8).astype(np.int32),
        "anchors": anchors.astype(np.int32),
    }


def run(engine: Engine, seed: int, *, updates: int = 20, rows: int = 3) -> list[torch.Tensor]:
    """Train from the start on random rows of random buckets; every tensor of the state, copied."""
    rng = np.random.default_rng(seed)
    engine.step.reset()
    for _ in range(updates):
        for _ in range(rows):
            bucket = BUCKETS[rng.integers(len(BUCKETS))]
            engine.fill(bucket, random_row(bucket, rng))
            engine.micro_step(bucket)
        engine.update()
    torch.cuda.synchronize()
    return {name: tensor.clone() for name, tensor in engine.step.state_tensors().items()}


def same(left: dict, right: dict) -> bool:
    return all(bits_of(left[name]) == bits_of(right[name]) for name in left)


@pytest.mark.parametrize("rows", [1, 3])
def test_interleaved_buckets_replayed_equal_the_eager_step_bit_for_bit(engine, eager, rows):
    seed = random.SystemRandom().getrandbits(31)
    replayed, launched = run(engine, seed, rows=rows), run(eager, seed, rows=rows)
    assert same(replayed, launched), f"seed {seed}"
    assert not same(replayed, run(eager, seed + 1, rows=rows))  # must fail: other rows
    assert same(replayed, run(engine, seed, rows=rows))


def accumulate_four(engine: Engine, updates, *, unsupervised: int) -> list[torch.Tensor]:
    """Updates of four rows; row 2 of update `unsupervised` has no supervised token. The sums before every update, copied."""
    sums = []
    for update in updates:
        rng = np.random.default_rng([13, update])
        for number in range(4):
            bucket = BUCKETS[rng.integers(len(BUCKETS))]
            row = random_row(bucket, rng)
            if (update, number) == (unsupervised, 2):
                row["supervised"] = row["supervised"] * 0
            engine.fill(bucket, row)
            engine.micro_step(bucket)
        sums.append(engine.step.state.sums.clone())
        engine.update()
    return sums


def test_a_run_captured_again_after_a_resume_equals_the_eager_run_while_others_allocate_and_pin(engine, eager):
    eager.step.reset()
    expected, ring = accumulate_four(eager, range(20), unsupervised=7), eager.step.ring.clone()
    engine.step.reset()
    first = accumulate_four(engine, range(10), unsupervised=7)
    saved = {name: tensor.cpu() for name, tensor in engine.step.state.tensors().items()}
    bits = [bits_of(sums) for sums in first]

    step, stop, errors = small_step(), threading.Event(), []

    def disturb():
        while not stop.is_set():
            torch.empty(2**20, pin_memory=True)
            torch.empty(2**20, device=DEVICE).zero_()  # torch refuses CUDA's random numbers in any thread during a capture
            if len(errors) == 200:  # from 256 on torch refuses a function in words of its own
                continue
            try:
                torch.compile(lambda x: x * 7)(torch.ones(3, device=DEVICE))
            except Exception as error:  # noqa: BLE001 - whatever is raised is what the test looks at
                errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    again = Engine(step, BUCKETS)
    try:
        again.prepare(eager=False)
        step.state.load(saved)
        again.check_addresses()
        second = accumulate_four(again, range(10, 20), unsupervised=7)
    finally:
        stop.set()
        thread.join()
    assert errors and all("no compile once training has begun" in str(error) for error in errors)
    assert [bits_of(sums) for sums in first + second] == [bits_of(sums) for sums in expected]
    assert [bits_of(sums) for sums in first] == bits  # sums read earlier did not change on later replays
    assert same(step.state.tensors(), eager.step.state.tensors())
    assert torch.equal(torch.cat((engine.step.ring[:10], step.ring[10:20])), ring[:20])
    assert not same(step.state.tensors(), engine.step.state.tensors())  # must fail: ten updates fewer
    again.close()


def test_all_buckets_share_the_memory_of_the_largest(engine):
    first, *_, last = engine.start_up.pool_bytes.values()
    assert 0 < first <= last <= 1.10 * first


def test_a_host_that_is_late_shows_as_idle_time_and_changes_no_number(engine):
    import time

    expected = run(engine, 14, updates=3, rows=1)
    torch.cuda.synchronize()
    engine.idle_share()
    prompt = run(engine, 14, updates=3, rows=1), engine.idle_share()
    micro_step = engine.micro_step

    def late(bucket):
        torch.cuda.synchronize()
        time.sleep(0.02)  # the host, not a phase: what is measured is that it is late
        micro_step(bucket)

    engine.micro_step = late
    try:
        slow = run(engine, 14, updates=3, rows=1), engine.idle_share()
    finally:
        del engine.micro_step
    assert same(expected, prompt[0]) and same(expected, slow[0])
    assert slow[1] > 0.5 > prompt[1]


def test_the_summary_says_what_was_compiled_captured_replayed_and_lost(engine):
    run(engine, 15, updates=2)
    lines = "\n".join(engine.summary())
    assert "buckets 4, compiles" in lines and "graphs 9" in lines and "pool" in lines
    assert "GPU idle" in lines and "without a kernel" in lines and "nodes)" in lines


def test_every_input_field_changes_the_result(engine):
    bucket, rng = BUCKETS[0], np.random.default_rng(3)
    row = random_row(bucket, rng)

    def sums(arrays):
        engine.step.reset()
        engine.fill(bucket, arrays)
        engine.micro_step(bucket)
        return engine.step.state.sums.clone()

    base = sums(row)
    assert torch.equal(base, sums(row))
    changes = {
        "token_ids": (row["token_ids"] + 1) % 64,
        "position": np.arange(len(row["position"]), dtype=np.int32),
        "supervised": 1 - row["supervised"],
        "anchors": row["anchors"][1:],
    }
    for name, changed in changes.items():
        assert not torch.equal(base, sums({**row, name: changed})), name


def test_learning_rate_of_each_update_is_the_formulas_and_zero_leaves_parameters(engine):
    step = engine.step
    run(engine, 1, updates=4, rows=1)
    expected = [float(learning_rate(torch.tensor(update), step.hyper)) for update in range(4)]
    column = step.metric_names.index("learning_rate")
    assert step.ring[:4, column].tolist() == pytest.approx(expected, rel=1e-6)
    step.state.counter.fill_(step.hyper.num_updates - 1)  # the cosine has come down to zero
    before = step.state.master.clone()
    engine.micro_step(BUCKETS[0])
    engine.update()
    assert torch.equal(before, step.state.master)


def test_a_tensor_replaced_after_capture_is_found_and_one_loaded_in_place_is_not(engine):
    state = engine.step.state
    state.load({name: tensor.clone() for name, tensor in state.tensors().items()})
    engine.check_addresses()
    kept, state.exp_avg = state.exp_avg, state.exp_avg.clone()
    with pytest.raises(CaptureError, match="exp_avg"):
        engine.check_addresses()
    state.exp_avg = kept


def test_a_gradient_that_is_not_finite_leaves_the_state_and_the_next_update_works(engine):
    run(engine, 2, updates=2)
    state, bucket = engine.step.state, BUCKETS[1]
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    engine.fill(bucket, random_row(bucket, np.random.default_rng(0)))
    engine.micro_step(bucket)
    state.gradients[7] = float("nan")
    engine.update()
    after = state.tensors()
    assert all(torch.equal(before[name], after[name]) for name in ("master", "exp_avg", "exp_avg_sq", "adam_step"))
    assert int(after["counter"]) == int(before["counter"]) + 1
    assert engine.step.ring[int(before["counter"]), engine.step.metric_names.index("skipped")] == 1
    engine.micro_step(bucket)
    engine.update()
    assert torch.isfinite(state.master).all() and not torch.equal(before["master"], state.master)


def test_a_row_without_anchors_or_supervision_is_finite_and_empty(engine):
    engine.step.reset()
    row = random_row(BUCKETS[2], np.random.default_rng(5))
    for changed in ({"anchors": row["anchors"][:0]}, {"supervised": row["supervised"] * 0}):
        engine.fill(BUCKETS[2], {**row, **changed})
        before = engine.step.state.master.clone()
        engine.micro_step(BUCKETS[2])
        assert torch.isfinite(engine.step.state.sums).all()
        engine.update()
        assert torch.equal(before, engine.step.state.master)


def test_memory_stays_flat_over_two_thousand_replays(engine):
    run(engine, 3, updates=2)
    before = torch.cuda.memory_reserved()
    for _ in range(2000):
        engine.micro_step(BUCKETS[3])
    engine.update()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == before


def test_nothing_reads_memory_that_was_free_when_it_was_captured(engine):
    expected = run(engine, 4, updates=3)
    free = [torch.full((2**size,), float("nan"), device=DEVICE) for size in range(8, 24) for _ in range(2)]
    for place in range(3):
        engine.slots[BUCKETS[0]]._staging.device[place].fill_(255)
    assert same(expected, run(engine, 4, updates=3))
    del free


def test_a_pinned_buffer_refilled_at_once_does_not_change_the_row_before(engine):
    rng = np.random.default_rng(6)
    rows = [random_row(BUCKETS[0], rng) for _ in range(40)]

    def sums(slowly: bool):
        engine.step.reset()
        for row in rows:
            engine.fill(BUCKETS[0], row)
            engine.micro_step(BUCKETS[0])
            if slowly:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return engine.step.state.sums.clone()

    assert torch.equal(sums(True), sums(False))


def frames_of(engine: Engine) -> set[str]:
    """Files of every Python frame entered in any call while 50 updates are replayed."""
    seen = set()

    def note(frame, event, argument):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    row = random_row(BUCKETS[1], np.random.default_rng(7))
    sys.setprofile(note)
    try:
        for _ in range(50):
            engine.fill(BUCKETS[1], row)
            engine.micro_step(BUCKETS[1])
            engine.update()
    finally:
        sys.setprofile(None)
    return seen


def test_no_frame_of_dynamo_inductor_or_the_model_runs_on_the_hot_path(engine, eager):
    hot = ("torch/_dynamo", "torch/_inductor", "graphcap/model", "engine/step", "transformers/")
    assert not [file for file in frames_of(engine) if any(part in file for part in hot)]
    assert [file for file in frames_of(eager) if "graphcap/model" in file]  # must fail: the eager way shows them


def test_the_profiler_sees_graph_launches_and_copies_only(engine):
    from torch.profiler import ProfilerActivity, profile

    row = random_row(BUCKETS[1], np.random.default_rng(8))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            engine.fill(BUCKETS[1], row)
            engine.micro_step(BUCKETS[1])
            engine.update()
        torch.cuda.synchronize()
    calls = [event.name for event in profiler.events() if event.name.startswith(("cuda", "cu"))]
    assert calls.count("cudaGraphLaunch") == 6
    assert calls.count("cudaMemcpyAsync") <= 2 * 3  # staging: pinned memory, then the slot
    assert not [name for name in calls if any(word in name for word in ("LaunchKernel", "Malloc", "Free", "Memset"))], calls


def modules_held_by(thing) -> list[torch.nn.Module]:
    """Every model that is reachable from an object, not by way of classes and Python's modules."""
    seen, queue, found = set(), [thing], []
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (type, types.ModuleType)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.nn.Module):
            found.append(item)
        else:
            queue += gc.get_referents(item)
    return found


def test_a_replay_holds_no_model_and_runs_the_fused_attention_of_every_layer(engine):
    assert not [found for graph in engine._capturer.graphs for found in modules_held_by(graph)]
    graph = engine._capturer.graphs[0]
    graph.outputs = functools.partial(engine.step.micro, None), graph.outputs  # must fail: a graph that keeps its function
    assert modules_held_by(graph)
    graph.outputs = graph.outputs[1]
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.micro_step(BUCKETS[0])
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    forward, *backward = (names.count(f"{kernel}_kernel") for kernel in ("forward", "dq", "dkv"))
    assert forward == 2 + 3 and backward == [2, 2], names  # two drafter layers, three target layers
    assert not [name for name in names if "softmax" in name.lower()]


def test_a_compile_after_the_door_is_refused_in_any_thread_while_replays_go_on(engine):
    expected, errors = run(engine, 9, updates=3), []

    def compile_something():
        try:
            torch.compile(lambda x: x * 3 + 1)(torch.ones(5, device=DEVICE))
        except Exception as error:  # noqa: BLE001 - whatever is raised is what the test looks at
            errors.append(error)

    thread = threading.Thread(target=compile_something, name="stranger")
    thread.start()
    got = run(engine, 9, updates=3)
    thread.join()
    assert same(expected, got)
    assert errors and "no compile once training has begun" in str(errors[0]) and "stranger" in str(errors[0])
    assert engine.door.counts.refused >= 1


def test_replays_driven_from_three_threads_never_change_a_number(engine):
    rng, lock, bucket = np.random.default_rng(10), threading.Lock(), BUCKETS[3]
    row = random_row(bucket, rng)
    engine.step.reset()
    engine.fill(bucket, row)
    engine.micro_step(bucket)
    torch.cuda.synchronize()
    expected, wrong = engine.step.state.sums.clone(), []

    def drive():
        torch.cuda.set_stream(engine._capturer.stream)
        for _ in range(60):
            with lock:
                engine.step.state.sums.zero_()
                engine.fill(bucket, row)
                engine.micro_step(bucket)
                if not torch.equal(engine.step.state.sums, expected):
                    wrong.append(True)

    threads = [threading.Thread(target=drive) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong


def test_a_bucket_that_was_not_captured_is_an_error_that_names_the_nearest(engine):
    with pytest.raises(ShapeError, match="nearest bucket is 512/64"):
        engine.micro_step(Bucket(1024, 64))


def test_a_profiler_does_not_break_a_replay(engine):
    expected = run(engine, 11, updates=2)
    from torch.profiler import profile

    with profile():
        assert same(expected, run(engine, 11, updates=2))


def test_loading_and_pinning_in_another_thread_does_not_disturb_replays(engine):
    expected, stop = run(engine, 12, updates=5), threading.Event()

    def disturb():
        while not stop.is_set():
            torch.empty(2**20, pin_memory=True)
            torch.empty(2**20, device=DEVICE).normal_()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        assert same(expected, run(engine, 12, updates=5))
    finally:
        stop.set()
        thread.join()


def test_captured_decoding_takes_the_eager_steps_over_prompts_of_different_lengths(engine):
    from graphcap.engine.decoding import FixedSteps
    from graphcap.model.decode import decode_plain, decode_speculative

    model = tiny_model("qwen3", 5, head_dim=32).to(DEVICE)
    target, drafter = Target(model, (0, 2)), random_drafter(6, head_dim=32, num_layers=2, block_size=8).to(DEVICE)
    steps, rng = FixedSteps(target, drafter, max_length=96), random.Random(7)
    for length in (1, 17, 40):
        prompt = [rng.randrange(64) for _ in range(length)]
        limits = {"max_new_tokens": 32, "stop_ids": {3}}
        plain, fixed = decode_plain(target, prompt, **limits), decode_plain(target, prompt, steps=steps, **limits)
        assert fixed.token_ids == plain.token_ids
        eager = decode_speculative(target, drafter, prompt, **limits)
        fixed = decode_speculative(target, drafter, prompt, steps=steps, **limits)
        assert (fixed.token_ids, fixed.accepted) == (eager.token_ids, eager.accepted)
    steps.close()


@pytest.mark.parametrize("rule", ["match", "sampled"])
def test_captured_decoding_samples_what_the_eager_steps_sample(engine, rule):
    from graphcap.engine.decoding import FixedSteps
    from graphcap.model.decode import EagerSteps, decode_plain, decode_speculative
    from graphcap.model.sampling import Sampling, generator_of

    model = tiny_model("qwen3", 5, head_dim=32).to(DEVICE)
    target, drafter = Target(model, (0, 2)), random_drafter(6, head_dim=32, num_layers=2, block_size=8).to(DEVICE)
    settings = {"max_length": 96, "sampling": Sampling(temperature=2.0, rule=rule)}
    fixed, eager = FixedSteps(target, drafter, **settings), EagerSteps(target, drafter, **settings)
    for number, prompt in enumerate(([5], [7, 1, 30] * 6, [9, 2] * 20)):
        for way, who in ((decode_plain, (target,)), (decode_speculative, (target, drafter))):
            replies = []
            for steps in (fixed, eager):
                steps.generator = generator_of(1, number)
                replies.append(way(*who, prompt, max_new_tokens=32, stop_ids={3}, steps=steps))
            assert (replies[0].token_ids, replies[0].accepted) == (replies[1].token_ids, replies[1].accepted)
    fixed.close()
