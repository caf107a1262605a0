"""Lengths → buckets: sizes the kernels can use, room for every document, and a file that refuses other inputs."""

import dataclasses
import functools
import itertools
import json
import secrets
from types import SimpleNamespace

import numpy as np
import pytest

from graphcap.data import search
from graphcap.data.costs import ASSUMED, Costs
from graphcap.data.forecast import forecast, imbalance
from graphcap.data.packing import PACKING_VERSION, Schedule, num_anchors_of
from graphcap.data.planner import Bucket, Shapes, fingerprint, fitted, lengthened, plan
from graphcap.errors import ConfigError, DataError

FREE = dataclasses.replace(ASSUMED, bucket_ps=0)  # so that buckets pay for themselves on few documents too


def random_data(draw: np.random.Generator, count: int, *, median: int = 300) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.clip(np.exp(draw.normal(np.log(median), 0.8, count)), 8, 4000).astype(np.int64)
    return lengths, np.maximum(1, np.ceil(lengths * draw.uniform(0.05, 0.16, count))).astype(np.int64)


def planned(lengths, anchor_counts, **changes) -> Shapes:
    settings = {"block_size": 16, "anchor_density": 0.1667, "row_length": 0, "max_buckets": 3, "window": 512, "costs": FREE}
    return plan(lengths, anchor_counts, **{**settings, **changes})


@functools.cache
def a_plan() -> Shapes:
    shapes = planned(*random_data(np.random.default_rng(0), 300))
    assert len(shapes.buckets) > 1
    return shapes


@pytest.mark.parametrize("block_size", [4, 8, 10, 16, 128])
def test_sizes_are_whole_tiles_largest_first_and_hold_every_document(block_size):
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    for most in (1, 2, 3):
        lengths, anchor_counts = random_data(draw, int(draw.integers(1, 150)))
        shapes = planned(lengths, anchor_counts, block_size=block_size, max_buckets=most)
        assert 1 <= len(shapes.buckets) <= most, f"seed {seed}"
        assert list(shapes.buckets) == sorted(set(shapes.buckets), reverse=True), f"seed {seed}"
        for bucket in shapes.buckets:
            assert bucket.length % 128 == 0 and bucket.num_anchors * block_size % 128 == 0, f"seed {seed}: {bucket}"
            assert bucket.num_anchors <= shapes.buckets[0].num_anchors, f"seed {seed}: {shapes.buckets}"
        assert lengths.max() <= shapes.buckets[0].length and anchor_counts.max() <= shapes.buckets[0].num_anchors
        total = int(lengths.sum())
        expected = next(n for n in range(128, 10_000, 128) if n >= max(lengths.max(), min(2048, total)))
        assert shapes.buckets[0].length == expected, f"seed {seed}"


def test_both_capacities_fill_close_to_full():
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    lengths, anchor_counts = random_data(draw, 1000, median=200)
    shapes = planned(lengths, anchor_counts)
    schedule = Schedule(shapes, np.arange(1000), lengths, anchor_counts, seed=seed, epochs=1, rows_per_update=4)
    buckets = [row.bucket for update in schedule.updates() for row in update.rows]
    assert lengths.sum() / sum(bucket.length for bucket in buckets) > 0.95, f"seed {seed}"
    assert anchor_counts.sum() / sum(bucket.num_anchors for bucket in buckets) > 0.93, f"seed {seed}"


def test_a_few_documents_with_many_anchors_do_not_size_every_row():
    lengths, anchor_counts = np.full(1000, 256), np.full(1000, 16)
    lengths[::100], anchor_counts[::100] = 2048, 2000
    one, two = (planned(lengths, anchor_counts, max_buckets=count) for count in (1, 2))
    assert one.buckets == (Bucket(2048, 2000),)
    assert two.buckets[0] == Bucket(2048, 2000) and len(two.buckets) == 2 and two.buckets[1].num_anchors <= 512
    schedule = Schedule(two, np.arange(1000), lengths, anchor_counts, seed=0, epochs=1, rows_per_update=1)
    used = [update.rows[0].bucket for update in schedule.updates()]
    assert used.count(two.buckets[0]) == 10 and used.count(two.buckets[1]) >= 100


def test_one_bucket_is_planned_where_one_is_best_and_a_second_has_to_pay_for_itself():
    even = np.full(128, 256), np.full(128, 32)  # eight documents fill a row to its last token and slot
    assert planned(*even, row_length=2048).buckets == (Bucket(2048, 256),)
    uneven = np.full(150, 256), np.full(150, 16)
    uneven[0][::50], uneven[1][::50] = 2048, 1000
    one, two = (planned(*uneven, max_buckets=count) for count in (1, 2))
    saved = epoch_ps(one, *uneven) - epoch_ps(two, *uneven)
    assert len(two.buckets) == 2 and saved > 0
    for share, epochs, pays in ((0.3, 1, True), (2, 1, False), (2, 100, True)):
        priced = dataclasses.replace(ASSUMED, bucket_ps=int(saved * share))  # a capture, beside what two save in an epoch
        found = planned(*uneven, max_buckets=2, costs=priced, epochs=epochs).buckets
        assert found == (two.buckets if pays else one.buckets)


def epoch_ps(shapes: Shapes, lengths: np.ndarray, anchor_counts: np.ndarray) -> int:
    schedule = Schedule(shapes, np.arange(len(lengths)), lengths, anchor_counts, seed=0, epochs=1, rows_per_update=8)
    return int(schedule.epoch_rows(0).cost_ps.sum())


@pytest.mark.parametrize("name, over, slots", [("lognormal", 0.06, 0.94), ("humps", 0.2, 0.82), ("pareto", 0.1, 0.93)])
def test_small_sets_waste_little_and_ranks_have_as_much_to_do(name, over, slots):
    """The sets of tools/bench_plan.py with few documents: windows and rows are small, so the margins are wide."""
    from tools.bench_plan import ROW_LENGTH, documents

    seed = secrets.randbits(32)
    length = min(ROW_LENGTH[name], 2048 if name == "pareto" else 8192)
    lengths, anchor_counts = (np.minimum(one, most) for one, most in zip(documents(name, 2000, seed), (length, length // 8)))
    shapes = planned(lengths, anchor_counts, row_length=length, max_buckets=4 if name == "humps" else 3)
    schedule = Schedule(shapes, np.arange(2000), lengths, anchor_counts, seed=seed, epochs=1, rows_per_update=24)
    found = forecast(schedule, lengths, anchor_counts, epoch=0)
    assert found.linear_over < over and found.anchor_fill > slots, f"seed {seed}: {shapes.buckets} {found}"
    assert found.token_fill > (0.86 if name == "humps" else 0.97) and abs(found.correlation) < 0.3, f"seed {seed}: {found}"
    rows = [row for update in schedule.updates() for row in update.rows]
    assert sum(row.cost_ps for row in rows) == found.rows_ps and sum(found.rows_of_bucket) == len(rows)
    whole = len(rows) // 24 * 24  # a last update of a few rows leaves ranks with none, which weighs much among a dozen updates
    updates = SimpleNamespace(rows_per_update=24, epoch_rows=lambda epoch: SimpleNamespace(cost_ps=costs[:whole]))
    costs = schedule.epoch_rows(0).cost_ps
    for world_size in (2, 3, 8):
        assert imbalance(updates, world_size, epoch=0) < 1.1, f"seed {seed}: {world_size} ranks"


def brute_force(lengths: np.ndarray, anchor_counts: np.ndarray, count: int) -> int:
    """Least cost of one document a row over every choice of `count` lengths, by a loop over documents."""
    top = -(-int(lengths.max()) // 128) * 128
    best = None
    for others in itertools.combinations(range(128, top, 128), count - 1):
        ends, total = [*others, top], 0
        homes = [next(end for end in ends if end >= length) for length in lengths.tolist()]
        for end in ends:
            inside = [int(a) for a, home in zip(anchor_counts, homes) if home == end]
            most = max(inside, default=0) if end < top else int(anchor_counts.max())
            total += len(inside) * FREE.bucket(end, max(8, -(-most // 8) * 8), 16)
        best = total if best is None else min(best, total)
    return best


def test_one_document_a_row_has_the_lengths_that_cost_least_and_no_others_do():
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    worse = 0
    for _ in range(12):
        count = int(draw.integers(1, 5))
        lengths = draw.integers(1, 9 * 128, int(draw.integers(5, 40)))
        lengths[0] = 8 * 128 + 1  # nine lengths to choose from
        anchor_counts = np.maximum(1, (lengths * draw.uniform(0.02, 0.16, len(lengths))).astype(np.int64))
        problem = dict(tile=128, unit=8, window=64, max_buckets=count, epochs=1, costs=FREE, block_size=16)
        largest = Bucket(9 * 128, search.round_up(int(anchor_counts.max()), 8))
        posed = search.Problem(lengths, anchor_counts, largest=largest, **problem)
        tiles = -(-lengths // 128)
        ends = np.unique(tiles)
        counts, most = np.bincount(tiles)[ends], np.array([anchor_counts[tiles == end].max() for end in ends])
        for k, (total, lasts) in enumerate(search.fewest_padded(ends * 128, counts, most, posed), 1):
            assert total == brute_force(lengths, anchor_counts, k), f"seed {seed}"
            assert len(lasts) == k and lasts == sorted(set(lasts)), f"seed {seed}"
            worse += k > 1 and total != brute_force(lengths, anchor_counts, k - 1)  # must fail: one length fewer
        dear = dataclasses.replace(posed, costs=Costs(**{name: value << 16 for name, value in FREE.to_json().items()}))
        for k, (total, lasts) in enumerate(search.fewest_padded(ends * 128, counts << 20, most, dear), 1):
            assert abs(total - (brute_force(lengths, anchor_counts, k) << 36)) < total >> 20, f"seed {seed}"  # beyond 2^63
            assert len(lasts) == k and lasts == sorted(set(lasts)), f"seed {seed}"
        buckets = planned(lengths, anchor_counts, rows="single", max_buckets=count).buckets
        assert buckets[0] == largest and len(buckets) <= count, f"seed {seed}"
        assert epoch_ps(planned(lengths, anchor_counts, rows="single", max_buckets=count), lengths, anchor_counts) <= (
            brute_force(lengths, anchor_counts, min(count, len(ends))) + FREE.attention(lengths)
        ), f"seed {seed}"
    assert worse, f"seed {seed}: one length fewer cost as much every time"


def test_document_that_does_not_fit_is_named_with_the_nearest_bucket():
    told = r"document 'a.jsonl line 18': expected .* 256 tokens.*got 300 .*256/\d+.*row_length=384 "
    with pytest.raises(DataError, match=told):
        plan(
            np.array([100, 300]),
            np.array([5, 5]),
            block_size=16,
            anchor_density=0.2,
            row_length=256,
            max_buckets=2,
            window=8,
            name_of=["a.jsonl line 5", "a.jsonl line 18"].__getitem__,
        )
    with pytest.raises(DataError, match="document '1'"):
        planned(np.array([100, 300]), np.array([5, 5]), row_length=256)


def test_row_length_is_taken_or_refused():
    lengths, anchor_counts = np.array([100, 120]), np.array([5, 5])
    assert planned(lengths, anchor_counts, row_length=1024).buckets[0].length == 1024
    with pytest.raises(ConfigError, match="shapes.row_length.*write 1024"):
        planned(lengths, anchor_counts, row_length=1000)
    with pytest.raises(DataError, match="at least one document"):
        planned(np.array([], dtype=int), np.array([], dtype=int))


def test_file_reads_back_equal_and_stays_small(tmp_path):
    shapes, path = a_plan(), tmp_path / "shapes.json"
    path.write_text(shapes.to_json())
    assert Shapes.load(path) == shapes and Shapes.from_json(shapes.to_json()) == shapes
    assert path.stat().st_size < 64 * 1024 and shapes.packing_version == PACKING_VERSION


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("window"),
        lambda fields: fields.update(extra=1),
        lambda fields: fields.update(buckets=[]),
        lambda fields: fields.update(buckets=fields["buckets"][::-1]),
        lambda fields: fields["buckets"][0].update(length=1000),
        lambda fields: fields["buckets"][0].update(num_anchors=3),
        lambda fields: fields["buckets"][0].update(rows=1),
        lambda fields: fields["buckets"][-1].update(num_anchors=8192),
        lambda fields: fields.update(block_size="16"),
        lambda fields: fields.update(block_size=True),
        lambda fields: fields.update(anchor_density=-0.5),
        lambda fields: fields.update(anchor_density=float("nan")),
        lambda fields: fields.update(histogram=[]),
        lambda fields: fields.update(rows="both"),
        lambda fields: fields.update(packing_version=PACKING_VERSION - 1),
        lambda fields: fields.update(costs={}),
        lambda fields: fields["costs"].update(token_ps=0),
        lambda fields: fields["costs"].update(token_ps=2**61),
        lambda fields: fields["costs"].update(pair_ps=2**40),
        lambda fields: fields["costs"].update(pair_ps=0.5),
    ],
)
def test_damaged_file_is_refused_by_name(tmp_path, change):
    path = tmp_path / "shapes.json"
    fields = json.loads(a_plan().to_json())
    change(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(DataError, match="shapes.json.*Fix: "):
        Shapes.load(path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b" " * 70_000])
def test_file_that_is_no_shapes_file_is_refused(tmp_path, content):
    path = tmp_path / "shapes.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match="shapes.json"):
        Shapes.load(path)
    with pytest.raises(DataError, match="none.json"):
        Shapes.load(tmp_path / "none.json")


def test_check_passes_for_its_inputs_and_refuses_each_change():
    seed = secrets.randbits(32)
    draw = np.random.default_rng(seed)
    lengths, anchor_counts = random_data(draw, 300)
    shapes = planned(lengths, anchor_counts)
    settings = {"block_size": 16, "anchor_density": 0.1667, "window": 512}
    shapes.check(lengths, anchor_counts, **settings)
    shapes.check(lengths.astype(np.int32), anchor_counts.tolist(), **settings)
    for other in ("block_size", "anchor_density", "window"):
        with pytest.raises(DataError, match=other):
            shapes.check(lengths, anchor_counts, **{**settings, other: settings[other] * 2})
    with pytest.raises(DataError, match="'rows'"):
        shapes.check(lengths, anchor_counts, **settings, rows="single")
    for numbers in (lengths, anchor_counts):
        place = int(draw.integers(300))
        numbers[place] += 1
        with pytest.raises(DataError, match="fingerprint"):
            shapes.check(lengths, anchor_counts, **settings)
        numbers[place] -= 1
    shapes.check(lengths, anchor_counts, **settings)
    with pytest.raises(DataError, match="packing_version"):
        dataclasses.replace(shapes, packing_version=PACKING_VERSION + 1).check(lengths, anchor_counts, **settings)


def test_fingerprint_never_changes_unnoticed():
    """A stored shapes file stays valid from one version of graphcap to the next while the packing version stands."""
    value = fingerprint(np.array([3, 5]), np.array([1, 2]), block_size=16, anchor_density=0.5, window=8)
    assert (PACKING_VERSION, value[:16]) == (2, "1f4b6d3e9624cfe6")


def test_the_committed_plan_of_the_tiny_recipe_is_what_planning_it_gives_here():
    from pathlib import Path

    import torch
    from transformers import AutoTokenizer

    from graphcap.build import configure_drafter
    from graphcap.config import load_recipe
    from graphcap.data.conversations import load_documents
    from graphcap.layout import costs_of
    from graphcap.model.loading import load_model

    root = Path(__file__).parents[2]
    recipe = load_recipe(root / "runs" / "tiny.toml")
    tokenizer = AutoTokenizer.from_pretrained(root / recipe.target.path)
    paths = [root / path for path in recipe.data.train]
    documents = load_documents(paths, tokenizer, max_length=512, on_long="error", on_bad_line="error").documents
    wanted = recipe.shapes
    model = load_model(
        root / recipe.target.path, dtype=torch.float32, device=torch.device("cpu"), revision="", trust_remote_code=False
    )
    config, _ = configure_drafter(recipe, model, tokenizer)
    planned = plan(
        np.array([len(document.token_ids) for document in documents]),
        np.array([num_anchors_of(document.loss_mask, density=wanted.anchor_density) for document in documents]),
        block_size=recipe.drafter.block_size,
        anchor_density=wanted.anchor_density,
        row_length=wanted.row_length,
        max_buckets=wanted.max_buckets,
        window=wanted.window,
        rows=wanted.rows,
        costs=costs_of(model, config),
        epochs=recipe.optimizer.epochs,
    )
    assert planned == Shapes.load(root / "shapes" / "tiny.json")


def test_rows_are_lengthened_while_the_constant_counts_and_updates_and_documents_allow():
    lengths = np.random.default_rng(secrets.randbits(32)).integers(10, 1025, 4000)
    anchors = np.maximum(1, lengths // 8)
    costly = dataclasses.replace(ASSUMED, micro_step_ps=10**12)  # a second, whatever the row
    free = dataclasses.replace(ASSUMED, micro_step_ps=0)

    def length(costs=costly, most_length=1 << 20, lengths=lengths):
        inputs = {"block_size": 16, "costs": costs, "most_length": most_length}
        return lengthened(lengths, anchors[: len(lengths)], **inputs)

    assert length(free) == 2048 and length(most_length=4096) == 4096
    longest = length()
    assert longest * 64 <= lengths.sum() < longest * 128 and longest % 128 == 0
    assert length(lengths=lengths[:100]) == 2048


def test_rows_fit_documents_that_are_nearly_as_long_as_each_other():
    rng = np.random.default_rng(secrets.randbits(32))
    settings = {"block_size": 16, "costs": ASSUMED, "window": 4096}

    def epoch_ps(lengths, length):
        anchors = np.maximum(1, lengths // 6)
        how = {"anchor_density": 1 / 6, "max_buckets": 1, "row_length": length}
        (bucket,) = plan(lengths, anchors, **how, **settings).buckets
        return len(lengths) / (bucket.length // lengths.max()) * ASSUMED.bucket(bucket.length, bucket.num_anchors, 16)

    alike = rng.integers(700, 721, 210)
    found = fitted(2048, alike, np.maximum(1, alike // 6), most_length=4096, **settings)
    assert found == 2176, "three of at most 720"
    assert epoch_ps(alike, found) < 0.75 * epoch_ps(alike, 2048)
    assert fitted(2048, alike, np.maximum(1, alike // 6), most_length=2048, **settings) == 1536, "two, and no longer row"
    mixed = rng.integers(20, 1025, 2000)
    assert fitted(2048, mixed, np.maximum(1, mixed // 6), most_length=1 << 20, **settings) == 2048
