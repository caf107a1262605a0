"""A slot is rewritten to its last element by every fill, never moves, and refuses what does not fit, by name."""

import random

import numpy as np
import pytest
import torch

from graphcap.engine.slots import Buffer, Slot
from graphcap.errors import ShapeError
from tests.toys import fresh_seed

BUFFERS = (
    Buffer("tokens", 16, pad_value=0),
    Buffer("places", 5, pad_value=-1),
    Buffer("states", 7, pad_value=0.5, dtype=torch.float32, trailing=(3, 2)),
)
NUMPY = {torch.int32: np.int32, torch.float32: np.float32}
GARBAGE = 123_456_789


def make_slot() -> Slot:
    return Slot("16/5", BUFFERS, torch.device("cpu"))


def random_arrays(rng: random.Random) -> dict[str, np.ndarray]:
    arrays = {}
    for buffer in BUFFERS:
        shape = (rng.randint(0, buffer.length), *buffer.trailing)
        arrays[buffer.name] = np.array([rng.randrange(100) for _ in range(int(np.prod(shape)))], NUMPY[buffer.dtype]).reshape(
            shape
        )
    return arrays


def addresses(slot: Slot) -> list[int]:
    return [slot[buffer.name].data_ptr() for buffer in BUFFERS]


def test_every_fill_rewrites_the_whole_tail_of_a_poisoned_slot():
    rng, slot = random.Random(fresh_seed()), make_slot()
    for _ in range(20):
        for buffer in BUFFERS:
            slot[buffer.name].fill_(GARBAGE)
        arrays = random_arrays(rng)
        slot.fill(arrays)
        for buffer in BUFFERS:
            tail = [np.full(buffer.trailing, buffer.pad_value, NUMPY[buffer.dtype])] * (
                buffer.length - len(arrays[buffer.name])
            )
            assert slot[buffer.name].tolist() == [part.tolist() for part in [*arrays[buffer.name], *tail]]
            assert not (slot[buffer.name] == GARBAGE).any()


def test_a_short_row_leaves_nothing_of_the_long_row_before():
    slot, states = make_slot(), np.zeros((0, 3, 2), np.float32)
    slot.fill({"tokens": np.full(16, 7, np.int32), "places": np.full(5, 7, np.int32), "states": states})
    slot.fill({"tokens": np.full(3, 8, np.int32), "places": np.zeros(0, np.int32), "states": states})
    assert slot["tokens"].tolist() == [8] * 3 + [0] * 13 and slot["places"].tolist() == [-1] * 5


def test_a_filled_slot_does_not_change_with_the_arrays_it_came_from():
    slot, arrays = make_slot(), random_arrays(random.Random(fresh_seed()))
    slot.fill(arrays)
    before = [slot[buffer.name].clone() for buffer in BUFFERS]
    for array in arrays.values():
        array += 1
    assert all(torch.equal(slot[buffer.name], kept) for buffer, kept in zip(BUFFERS, before))


def test_no_address_ever_changes_and_every_buffer_is_aligned():
    rng, slot = random.Random(fresh_seed()), make_slot()
    before = addresses(slot)
    for _ in range(3):
        slot.fill(random_arrays(rng))
    assert addresses(slot) == before
    assert all((address - before[0]) % 128 == 0 for address in before)
    for buffer in BUFFERS:
        assert slot[buffer.name].dtype == buffer.dtype and slot[buffer.name].shape == (buffer.length, *buffer.trailing)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("tokens", None),
        ("tokens", np.zeros(17, np.int32)),  # too long
        ("tokens", np.zeros(16, np.int64)),
        ("tokens", np.zeros(4, np.float32)),
        ("tokens", np.zeros((4, 4), np.int32)),
        ("places", np.zeros(6, np.int32)),
        ("places", np.zeros((), np.int32)),
        ("states", np.zeros((4, 2, 3), np.float32)),
        ("states", np.zeros((8, 3, 2), np.float32)),
        ("states", np.zeros((4, 3, 2), np.float64)),
        ("extra", np.zeros(1, np.int32)),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_the_buffers_name_and_nothing_is_written(name, array):
    slot, arrays = make_slot(), random_arrays(random.Random(fresh_seed()))
    slot.fill(arrays)
    before = [slot[buffer.name].clone() for buffer in BUFFERS]
    wrong = {key: value + 1 for key, value in arrays.items()} | {name: array}
    if array is None:
        del wrong[name]
    with pytest.raises(ShapeError, match=f"buffer '{name}'.*16/5"):
        slot.fill(wrong)
    assert all(torch.equal(slot[buffer.name], kept) for buffer, kept in zip(BUFFERS, before))
