"""Anchors, rows and the schedule: chosen by hash, every document once an epoch, the same on every machine.

Oracle: loops over Python's own integers, without NumPy.
"""

import math
import os
import random
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graphcap.data.conversations import Document
from graphcap.data.costs import ASSUMED
from graphcap.data.loader import arrange, arrange_with
from graphcap.data.packing import (
    PACKING_VERSION,
    Row,
    Schedule,
    anchor_candidates,
    choose_anchors,
    num_anchors_of,
)
from graphcap.data.planner import Bucket, Shapes, plan
from graphcap.errors import DataError, ShapeError

ROOT = Path(__file__).resolve().parents[2]
DENSITY = 0.1667
MASK64 = 2**64 - 1


def naive_mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def naive_hash(*keys: int) -> int:
    state = 0
    for key in keys:
        state = naive_mix((state + 0x9E3779B97F4A7C15 + key) & MASK64)
    return state


def naive_candidates(mask: list[bool]) -> list[int]:
    return [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


def naive_anchors(document: Document, *, seed: int, epoch: int, density: float) -> list[int]:
    mask = document.loss_mask.tolist()
    candidates = naive_candidates(mask)
    count = min(len(candidates), math.ceil(density * sum(mask)))
    ranked = sorted(candidates, key=lambda p: naive_hash(seed, 1, epoch, document.id, p))
    return sorted(ranked[:count])


def make_document(draw: random.Random, number: int, *, length: int = 0) -> Document:
    length = length or draw.randint(2, 200)
    mask = [draw.random() < 0.7 for _ in range(length)]
    mask[-2:] = [True, True]
    ids = np.array([draw.randrange(1000) for _ in range(length)], dtype=np.int32)
    return Document(number, ids, np.array(mask), "a.jsonl", number + 1)


def make_documents(draw: random.Random, count: int) -> dict[int, Document]:
    """Ids with gaps, as after dropping."""
    numbers = sorted(draw.sample(range(count * 3), count))
    return {number: make_document(draw, number) for number in numbers}


def sizes(documents: dict[int, Document]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    lengths = np.array([len(one.token_ids) for one in documents.values()])
    counts = np.array([num_anchors_of(one.loss_mask, density=DENSITY) for one in documents.values()])
    return np.array(list(documents)), lengths, counts


def make_schedule(documents: dict[int, Document], **changes) -> Schedule:
    ids, lengths, counts = sizes(documents)
    shapes = plan(lengths, counts, block_size=16, anchor_density=DENSITY, row_length=512, max_buckets=3, window=64)
    return Schedule(shapes, ids, lengths, counts, **{"seed": 3, "epochs": 3, "rows_per_update": 4, **changes})


def test_candidates_and_counts_equal_the_naive_loop():
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    for _ in range(300):
        mask = [draw.random() < draw.choice([0.05, 0.5, 0.95]) for _ in range(draw.randint(0, 80))]
        expected = naive_candidates(mask)
        assert anchor_candidates(np.array(mask, dtype=bool)).tolist() == expected, f"seed {seed}: {mask}"
        density = draw.choice([0.01, 0.1667, 0.5, 1.0, 3.0])
        count = min(len(expected), math.ceil(density * sum(mask)))
        assert num_anchors_of(np.array(mask, dtype=bool), density=density) == count, f"seed {seed}: {mask}"


def test_anchors_equal_the_naive_choice_and_a_changed_draw_does_not():
    seed = secrets.randbits(64)
    draw = random.Random(seed)
    differences = 0
    for number in range(60):
        one = make_document(draw, number, length=draw.randint(40, 200))
        epoch = draw.randrange(10)
        chosen = choose_anchors(one, seed=seed, epoch=epoch, density=DENSITY)
        assert chosen.dtype == np.int32 and np.all(np.diff(chosen) > 0)
        assert chosen.tolist() == naive_anchors(one, seed=seed, epoch=epoch, density=DENSITY), f"seed {seed}, {number}"
        # Must-fail twins: every key of the draw matters.
        twins = [(one, seed + 1, epoch), (one, seed, epoch + 1), (replace(one, id=one.id + 1), seed, epoch)]
        differences += sum(chosen.tolist() != naive_anchors(other, seed=s, epoch=e, density=DENSITY) for other, s, e in twins)
    assert differences > 0.9 * 180, f"seed {seed}: {differences} of 180 changed draws differ"


def test_anchors_are_spread_evenly_over_candidates():
    one = Document(5, np.zeros(101, np.int32), np.ones(101, bool), "a", 1)
    counts = np.zeros(100)
    for epoch in range(2000):
        counts[choose_anchors(one, seed=1, epoch=epoch, density=0.1)] += 1
    assert counts.sum() == 2000 * 11 and abs(counts - 220).max() < 6 * math.sqrt(220)


def test_anchors_do_not_depend_on_bucket_row_or_company():
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    documents = make_documents(draw, 12)
    numbers = list(documents)
    found: dict[int, list[int]] = {}
    for _ in range(20):
        company = tuple(draw.sample(numbers, draw.randint(1, 6)))
        bucket = Bucket(draw.choice([2048, 4096]), draw.choice([512, 1024]))
        row = arrange(Row(bucket, company), documents, seed=seed, epoch=2, density=DENSITY)
        for place, number in enumerate(company):
            start = int(np.flatnonzero(row.document == place)[0])
            own = [int(p) - start for p in row.anchors if row.document[p] == place]
            assert found.setdefault(number, own) == own, f"seed {seed}: document {number} in {company}"
            assert own == naive_anchors(documents[number], seed=seed, epoch=2, density=DENSITY), f"seed {seed}"


def naive_row(documents: list[Document], anchors_of) -> dict[str, list[int]]:
    arrays = {name: [] for name in ("token_ids", "document", "position", "supervised", "anchors")}
    for place, one in enumerate(documents):
        start = len(arrays["token_ids"])
        for position in range(len(one.token_ids)):
            arrays["token_ids"].append(int(one.token_ids[position]))
            arrays["document"].append(place)
            arrays["position"].append(position)
            arrays["supervised"].append(int(one.loss_mask[position]))
        arrays["anchors"] += [start + int(p) for p in anchors_of(one)]
    return arrays


def test_row_arrays_equal_the_naive_loop_and_one_changed_element_does_not():
    seed = secrets.randbits(32)
    draw = random.Random(seed)
    for _ in range(40):
        documents = make_documents(draw, draw.randint(1, 8))
        row = Row(Bucket(2048, 2048), tuple(draw.sample(list(documents), len(documents))))
        chunk = lambda one: anchor_candidates(one.loss_mask)[::3]  # noqa: E731
        arranged = arrange_with(row, documents, chunk)
        expected = naive_row([documents[number] for number in row.document_ids], chunk)
        for name, values in expected.items():
            array = getattr(arranged, name)
            assert array.dtype == np.int32 and array.tolist() == values, f"seed {seed}: {name}"
            values[draw.randrange(len(values))] += 1
            assert array.tolist() != values, f"seed {seed}: {name}"
        assert arranged.document_ids == row.document_ids and arranged.bucket == row.bucket
        assert set(arranged.arrays()) == {"token_ids", "position", "supervised", "anchors"}


def test_row_over_its_bucket_is_a_shape_error_naming_it():
    draw = random.Random(0)
    documents = {1: make_document(draw, 1, length=100), 2: make_document(draw, 2, length=100)}
    with pytest.raises(ShapeError, match="bucket '128/64'.*128 tokens.*200 tokens"):
        arrange(Row(Bucket(128, 64), (1, 2)), documents, seed=0, epoch=0, density=DENSITY)
    with pytest.raises(ShapeError, match="bucket '256/8'.*8 anchors"):
        arrange(Row(Bucket(256, 8), (1, 2)), documents, seed=0, epoch=0, density=DENSITY)
    empty = arrange_with(Row(Bucket(256, 8), (1, 2)), documents, lambda one: np.zeros(0, np.int32))
    assert empty.anchors.shape == (0,) and empty.anchors.dtype == np.int32


def test_every_document_once_an_epoch_in_the_cheapest_bucket_that_holds_its_row():
    seed = secrets.randbits(32)
    documents = make_documents(random.Random(seed), 300)
    schedule = make_schedule(documents, seed=seed)
    buckets = schedule.shapes.buckets

    def cost(bucket: Bucket) -> int:
        draft_tokens = bucket.num_anchors * 16
        return ASSUMED.micro_step_ps + ASSUMED.token_ps * bucket.length + ASSUMED.draft_token_ps * draft_tokens

    seen: dict[int, list[int]] = {}
    for place, update in enumerate(schedule.updates()):
        assert update.index == place and 1 <= len(update.rows) <= 4
        for row in update.rows:
            seen.setdefault(update.epoch, []).extend(row.document_ids)
            tokens = sum(len(documents[number].token_ids) for number in row.document_ids)
            anchors = sum(num_anchors_of(documents[number].loss_mask, density=DENSITY) for number in row.document_ids)
            holding = [bucket for bucket in buckets if tokens <= bucket.length and anchors <= bucket.num_anchors]
            assert row.bucket == min(holding, key=cost), f"seed {seed}: {row}"
            squares = sum(len(documents[number].token_ids) ** 2 for number in row.document_ids)
            assert row.cost_ps == cost(row.bucket) + ASSUMED.pair_ps * squares, f"seed {seed}: {row}"
            arrange(row, documents, seed=seed, epoch=update.epoch, density=DENSITY)  # raises if it does not fit
    assert list(seen) == [0, 1, 2]
    assert all(sorted(numbers) == sorted(documents) for numbers in seen.values()), f"seed {seed}"
    assert seen[0] != seen[1] != seen[2], "every epoch has its own order"
    assert place + 1 == schedule.num_updates == sum(-(-rows // 4) for rows in schedule.rows_per_epoch)


def test_windows_are_packed_apart_and_long_documents_are_not_all_first():
    documents = make_documents(random.Random(1), 640)
    schedule = make_schedule(documents)
    rows = [row for update in schedule.updates() if update.epoch == 0 for row in update.rows]
    ranked = sorted(documents, key=lambda number: naive_hash(3, 2, 0, number))
    window_of = {number: place // 64 for place, number in enumerate(ranked)}
    assert all(len({window_of[number] for number in row.document_ids}) == 1 for row in rows)
    # Rows of eight windows make updates together; a few that fill no update wait for the next eight.
    parts = [window_of[row.document_ids[0]] // 8 for row in rows]
    assert set(parts) == {0, 1} and parts[parts.index(1) :].count(0) < 4
    firsts = [max(len(documents[number].token_ids) for number in row.document_ids) for row in rows[: len(rows) // 2]]
    assert firsts != sorted(firsts, reverse=True)


def test_one_document_a_row_where_asked():
    seed = secrets.randbits(32)
    documents = make_documents(random.Random(seed), 200)
    ids, lengths, counts = sizes(documents)
    settings = {"block_size": 16, "anchor_density": DENSITY, "row_length": 0, "max_buckets": 2, "window": 64}
    shapes = plan(lengths, counts, **settings, rows="single", costs=replace(ASSUMED, bucket_ps=0))
    schedule = Schedule(shapes, ids, lengths, counts, seed=seed, epochs=1, rows_per_update=4)
    rows = [row for update in schedule.updates() for row in update.rows]
    assert sorted(row.document_ids for row in rows) == [(number,) for number in sorted(documents)], f"seed {seed}"
    assert {row.bucket for row in rows} == set(shapes.buckets) and len(shapes.buckets) == 2, f"seed {seed}"
    for row in rows:
        arrange(row, documents, seed=seed, epoch=0, density=DENSITY)  # raises if it does not fit


def test_a_resume_on_another_number_of_ranks_has_the_same_documents_anchors_and_updates():
    seed = secrets.randbits(32)
    documents = make_documents(random.Random(seed), 200)

    def visited(start: int, worlds: list[int]) -> list[tuple]:
        """What each update from `start` on trains on, gathered over its ranks; the number of ranks changes as it goes."""
        updates = []
        for update in make_schedule(documents, seed=seed).updates(start):
            world_size = worlds[update.index % len(worlds)]
            rows = [row for rank in range(world_size) for row in update.rows_of(rank, world_size)]
            rows.sort(key=lambda row: row.document_ids)
            arranged = [arrange(row, documents, seed=seed, epoch=update.epoch, density=DENSITY) for row in rows]
            updates.append((update.index, [(one.document_ids, one.anchors.tolist()) for one in arranged]))
        return updates

    whole = visited(0, [1])
    assert visited(0, [8]) == whole and visited(0, [3, 1, 2]) == whole, f"seed {seed}"
    middle = len(whole) // 2
    assert visited(middle, [5]) == whole[middle:] and len(whole) == make_schedule(documents, seed=seed).num_updates
    assert visited(middle + 1, [5]) != whole[middle:], "must fail: an update left out"


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_share_the_rows_of_every_update(world_size):
    schedule = make_schedule(make_documents(random.Random(2), 100))
    for update in schedule.updates():
        shares = [update.rows_of(rank, world_size) for rank in range(world_size)]
        shared = sorted(row.document_ids for share in shares for row in share)
        assert shared == sorted(row.document_ids for row in update.rows)


def test_a_resumed_schedule_is_the_same_list_and_more_epochs_change_nothing_done():
    documents = make_documents(random.Random(4), 120)
    whole = list(make_schedule(documents).updates())
    for start in (0, 1, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 5):
        assert list(make_schedule(documents).updates(start)) == whole[start:], f"start {start}"
    assert list(make_schedule(documents, epochs=5).updates())[: len(whole)] == whole
    short = make_schedule(documents, max_updates=7)
    assert short.num_updates == 7 and list(short.updates()) == whole[:7] and list(short.updates(5)) == whole[5:7]
    many = make_schedule(documents, max_updates=10_000)
    assert many.num_updates == len(whole) and list(many.updates()) == whole


def test_hash_of_an_epoch_follows_every_input():
    documents = make_documents(random.Random(6), 150)
    schedule = make_schedule(documents)
    hashes = [schedule.epoch_hash(epoch) for epoch in range(3)]
    assert len(set(hashes)) == 3 and all(len(value) == 64 for value in hashes)
    assert [make_schedule(documents).epoch_hash(epoch) for epoch in (2, 0, 1)] == [hashes[2], hashes[0], hashes[1]]
    for changed in ({"seed": 4}, {"rows_per_update": 5}):
        assert make_schedule(documents, **changed).epoch_hash(0) != hashes[0]
    fewer = dict(list(documents.items())[1:])
    assert make_schedule(fewer).epoch_hash(0) != hashes[0]


def test_order_in_which_documents_are_given_does_not_matter():
    documents = make_documents(random.Random(7), 150)
    shuffled = dict(random.Random(8).sample(list(documents.items()), len(documents)))
    ids, lengths, counts = sizes(documents)
    shapes = plan(lengths, counts, block_size=16, anchor_density=DENSITY, row_length=512, max_buckets=3, window=64)
    one, other = (Schedule(shapes, *sizes(group), seed=1, epochs=1, rows_per_update=2) for group in (documents, shuffled))
    assert one.epoch_hash(0) == other.epoch_hash(0)


STORED = """
import numpy as np
from graphcap.data.packing import Schedule, choose_anchors
from graphcap.data.planner import Bucket, Shapes
from graphcap.data.conversations import Document
lengths = np.arange(2, 202); counts = np.maximum(1, lengths // 9); ids = np.arange(200) * 7
shapes = Shapes((Bucket(512, 64), Bucket(256, 32)), 16, 0.1667, 50, 2, "", {})
schedule = Schedule(shapes, ids, lengths, counts, seed=2**63 + 5, epochs=2, rows_per_update=3)
one = Document(9, np.zeros(40, np.int32), np.ones(40, bool), "a", 1)
print(schedule.epoch_hash(1)[:16], choose_anchors(one, seed=11, epoch=2, density=0.1667).tolist())
"""


def test_another_process_makes_the_same_schedule_and_it_never_changes_unnoticed():
    """The stored values hold on every machine; who changes them raises PACKING_VERSION."""
    printed = subprocess.run(
        [sys.executable, "-c", STORED],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "12345"},
    ).stdout.strip()
    assert (PACKING_VERSION, printed) == (2, "e4fdd7acefff733d [1, 14, 16, 20, 24, 34, 36]")


def test_document_that_fits_no_bucket_is_named():
    shapes = Shapes((Bucket(256, 32),), 16, 0.1667, 50, 2, "", {})
    with pytest.raises(DataError, match="document '8': expected at most 256 tokens and 32 anchors, got 300.*256/32"):
        Schedule(shapes, [7, 8], [200, 300], [5, 5], seed=0, epochs=1, rows_per_update=1)
    with pytest.raises(DataError, match="document '7'.*got 200 tokens and 33 anchors"):
        Schedule(shapes, [7, 8], [200, 200], [33, 5], seed=0, epochs=1, rows_per_update=1)
