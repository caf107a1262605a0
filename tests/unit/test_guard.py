"""The door refuses compiles in every thread, the census finds a tensor that moved, and torch has every name we use."""

import importlib
import random
import threading

import pytest
import torch

from graphcap.engine.guard import TORCH_NAMES, Census, Door, bits_of, check_same_bits, explained
from graphcap.errors import CaptureError


def compiled(function):
    return torch.compile(function, backend="eager", dynamic=False, fullgraph=True)


@pytest.fixture
def door():
    torch._dynamo.reset()
    one = Door()
    yield one
    one.remove()
    torch._dynamo.config.fail_on_recompile_limit_hit = False
    torch._dynamo.reset()


def in_thread(function, name: str = "stranger") -> list[Exception]:
    errors = []

    def body():
        try:
            function()
        except Exception as error:  # noqa: BLE001 - what is raised is what the test looks at
            errors.append(error)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join(60)
    return errors


@pytest.mark.parametrize("name", [name for name, _ in TORCH_NAMES])
def test_torch_has_every_private_or_changing_name_the_engine_uses(name):
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        for part in parts[size:]:
            thing = getattr(thing, part)
        return
    raise AssertionError(f"no module of {name} can be imported")


def test_compiles_before_the_door_shuts_are_counted_and_warmed_up_functions_still_run_after(door):
    double = compiled(lambda x: x * 2)
    double(torch.ones(3))
    assert door.counts.before == 1
    door.close()
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert door.counts.refused == 0


def test_a_new_compile_and_a_recompile_are_refused_once_the_door_is_shut(door):
    double = compiled(lambda x: x * 2)
    double(torch.ones(3))
    door.close()
    with pytest.raises(Exception, match="no compile once training has begun"):
        compiled(lambda x: x + 1)(torch.ones(3))
    with pytest.raises(Exception, match="no compile once training has begun"):
        double(torch.ones(4))


def test_the_door_is_shut_in_another_thread_and_in_a_backward_too(door):
    door.close()
    errors = in_thread(lambda: compiled(lambda x: x + 1)(torch.ones(3)))
    assert errors and "no compile once training has begun" in str(errors[0]) and "stranger" in str(errors[0])

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return compiled(lambda g: g * 3)(gradient)

    x = torch.ones(3, requires_grad=True)
    errors = in_thread(lambda: Late.apply(x).sum().backward())
    assert errors and x.grad is None


def test_a_compile_still_running_when_the_door_shuts_is_named_by_its_thread(door):
    inside, go = threading.Event(), threading.Event()

    def backend(module, inputs):
        inside.set()
        go.wait(60)
        return module.forward

    slow = torch.compile(lambda x: x + 1, backend=backend)
    thread = threading.Thread(target=lambda: slow(torch.ones(3)), name="slow compiler")
    thread.start()
    assert inside.wait(60)
    with pytest.raises(CaptureError, match="slow compiler"):
        door.close()
    assert not door.shut
    go.set()
    thread.join(60)
    door.close()
    assert door.shut


def test_unfused_flex_attention_is_an_error_that_names_the_bucket_as_long_as_there_is_a_door(door):
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 1, 16, 16)
    for _ in range(2):
        with pytest.raises(CaptureError, match="512/80.*flex attention called without torch.compile"):
            with explained("512/80"):
                flex_attention(q, q, q)
        door.close()
    door.remove()
    with pytest.warns(UserWarning, match="without torch.compile"):
        flex_attention(q, q, q)
    Door.__init__(door)


def test_a_recompile_limit_that_is_reached_is_an_error_that_names_the_bucket(door):
    with torch._dynamo.config.patch(recompile_limit=1):
        double = compiled(lambda x: x * 2)
        double(torch.ones(3))
        with pytest.raises(CaptureError, match="512/80.*recompile limit"):
            with explained("512/80"):
                double(torch.ones(4))


def test_memory_that_does_not_suffice_is_told_with_what_was_asked_and_which_bucket_to_drop():
    with pytest.raises(CaptureError, match=r"'16384/2048'.*2\.50 GiB asked for.*largest bucket is 12288/1536") as told:
        with explained("16384/2048", "12288/1536"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 1 GiB")
    assert "drafter.checkpointing=true" in str(told.value)


def test_other_errors_of_a_warm_up_pass_unchanged():
    with pytest.raises(UserWarning, match="something else"):
        with explained("512/80"):
            raise UserWarning("something else")


def test_of_two_compiles_that_overlap_none_is_taken_for_running_after_both_have_ended(door):
    from torch._dynamo.callback import CallbackTrigger, callback_handler

    inside, go = threading.Event(), threading.Event()

    def long():
        with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "0/0"):
            inside.set()
            go.wait(60)

    thread = threading.Thread(target=long)
    thread.start()
    assert inside.wait(60)
    with callback_handler.install_callbacks(CallbackTrigger.DYNAMO, "1/0"):
        go.set()
        thread.join(60)
        with pytest.raises(CaptureError, match="still running"):
            door.close()
    door.close()
    assert door.shut


def test_an_open_door_lets_compiles_through_again(door):
    door.close()
    door.open()
    assert torch.equal(compiled(lambda x: x - 1)(torch.ones(2)), torch.zeros(2))


def test_the_census_finds_a_tensor_that_moved_or_vanished_and_accepts_one_copied_in_place():
    tensors = {"master": torch.zeros(8), "counter": torch.zeros(())}
    census = Census(tensors)
    tensors["master"].copy_(torch.ones(8))
    census.check(tensors)
    with pytest.raises(CaptureError, match="master.*another address"):
        census.check({**tensors, "master": torch.zeros(8)})
    with pytest.raises(CaptureError, match="counter.*nothing"):
        census.check({"master": tensors["master"]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_of_bits_sees_one_flipped_bit_a_swap_and_nan_for_zero(dtype):
    for size in (1, 7, 2048, 30_001):
        tensor = torch.randint(0, 2, (size,)).to(dtype)
        base = bits_of(tensor)
        assert base == bits_of(tensor.clone())
        place = random.randrange(size)
        flipped = tensor.clone()
        flipped.view(torch.uint8)[place * tensor.element_size()] ^= 1
        assert bits_of(flipped) != base, f"size {size}, place {place}"
        other = (place + 1) % size
        if tensor[place] != tensor[other]:
            swapped = tensor.clone()
            swapped[[place, other]] = tensor[[other, place]]
            assert bits_of(swapped) != base
    far = torch.arange(3 * 4096, dtype=torch.int32)
    swapped = far.clone()
    swapped[[2, 2 * 4096]] = far[[2 * 4096, 2]]  # words apart
    assert bits_of(swapped) != bits_of(far)
    assert bits_of(torch.tensor(float("nan"))) != bits_of(torch.tensor(0.0))
    assert bits_of(torch.tensor(0.0)) != bits_of(torch.tensor(-0.0))


def test_the_audit_of_bits_accepts_equal_and_names_bucket_and_tensor_that_differ():
    left = {"sums": bits_of(torch.tensor([1.0, float("nan")])), "counter": bits_of(torch.tensor(3))}
    check_same_bits("512/80", left, dict(left))
    with pytest.raises(CaptureError, match="512/80.*sums"):
        check_same_bits("512/80", left, {**left, "sums": bits_of(torch.tensor([1.0 + 2**-23, float("nan")]))})
