"""What is said of a plan that the memory cannot hold, by who sets the limit and whether the rows may still change."""

import re

import numpy as np
import pytest

from graphcap.config import build_recipe
from graphcap.data.costs import ASSUMED
from graphcap.data.documents import COLUMNS, DocumentList
from graphcap.engine.memory import Sizes
from graphcap.errors import ConfigError
from graphcap.layout import Frame, shapes_of
from graphcap.room import Room
from tests.toys import drafter_config, fresh_seed


def a_room(num_bytes: int | None = None, stored: bool = False, **overrides) -> Room:
    """Of a toy drafter and 200 documents of up to 300 tokens."""
    seed = fresh_seed()
    numbers = np.zeros(200, COLUMNS)
    numbers["id"] = numbers["line"] = np.arange(200)
    numbers["length"] = np.append(np.random.default_rng(seed).integers(20, 300, 199), 300)
    numbers["supervised"] = numbers["candidates"] = numbers["length"] // 2
    config = drafter_config(block_size=8)
    sizes = Sizes(
        drafter=config,
        num_parameters=1000,
        target_bytes=5000 if stored else 10**7,
        target_intermediate=0 if stored else 10**5,
        itemsize=2,
        chunk_tokens=100,
        stored=stored,
    )
    words = [f"{name}={value}" for name, value in overrides.items()]
    recipe = build_recipe({"target": {"path": "T"}, "data": {"train": ["a.jsonl"]}}, words, source="r", needed=("train",))
    documents = DocumentList(numbers, np.zeros(0, np.int32), np.zeros(0, bool), ["a.jsonl"])
    return Room(recipe, documents, Frame(config, ASSUMED), sizes, num_bytes)


def refusal(room: Room, *, fixed: bool = False, missing: int = 1) -> str:
    """What is said where so many bytes of what the plan needs are missing."""
    shapes = shapes_of(room.recipe, room.documents, room.frame)
    needed = room.sizes.needed_bytes(*shapes.buckets)
    for enough in (None, needed):
        Room(room.recipe, room.documents, room.frame, room.sizes, enough).check(shapes, fixed=fixed)
    with pytest.raises(ConfigError) as told:
        Room(room.recipe, room.documents, room.frame, room.sizes, needed - missing).check(shapes, fixed=fixed)
    return str(told.value)


def test_the_limit_bears_its_name():
    on_gpu, own = refusal(a_room()), refusal(a_room(**{"shapes.memory_gib": "1"}))
    assert "(free on the GPU)" in on_gpu and "a GPU with more memory" in on_gpu and "memory_gib" not in on_gpu
    assert "(shapes.memory_gib)" in own and "shapes.memory_gib=" in own and "GPU" not in own


def test_sizes_a_byte_apart_read_differently():
    limit, got = re.search(r"at most ([\d.]+) GiB .*?, got ([\d.]+) GiB", refusal(a_room())).groups()
    assert float(limit) < float(got)


def test_a_run_that_goes_on_is_not_told_to_change_its_rows():
    told = refusal(a_room(), fixed=True)
    assert "a run that goes on keeps its rows" in told
    assert not any(key in told for key in ("row_length", "max_length", "features.path"))


def test_stored_features_are_advised_where_they_would_fit_and_never_to_a_run_that_has_them():
    online, stored = a_room(**{"shapes.row_length": 384}), a_room(stored=True, **{"shapes.row_length": 384})
    assert "stored features (features.path)" in refusal(online)  # their one target layer is wide
    assert "features.path" not in refusal(stored)


def test_a_plan_from_a_file_is_to_be_planned_again(tmp_path):
    room = a_room()
    file = tmp_path / "a.json"
    file.write_text(shapes_of(room.recipe, room.documents, room.frame).to_json())
    named = a_room(**{"shapes.plan": file})
    again = Room(named.recipe, room.documents, room.frame, room.sizes, None)
    assert re.search(r"use shapes\.plan=auto shapes\.row_length=\d+", refusal(again))
