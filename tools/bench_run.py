"""What a run adds to its steps: the loader, the flight recorder, saving. The steps alone: tools/bench_step.py.

    python tools/bench_run.py loader smol:1024:128 --updates 10000     # the GPU's idle time with the real loader, and memory
    python tools/bench_run.py features q0.6b:4096:512 --updates 500    # the same with features from disk, in the page cache
    python tools/bench_run.py recorder smol:1024:128                   # what the flight recorder costs
    python tools/bench_run.py saver q8b:4096:512                       # how long training waits for a checkpoint

Prints a line and, as the last one, one JSON document.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_step import BLOCK_SIZE, NUM_TAPPED, SIZES, environment, make_step, timed_ms

from graphcap.config import Features
from graphcap.data.conversations import Document
from graphcap.data.features import FeatureStore, Kind, check_store
from graphcap.data.packing import Schedule, num_anchors_of
from graphcap.data.planner import plan
from graphcap.data.prefetch import RowReader
from graphcap.engine import Bucket, Engine
from graphcap.engine.guard import use_deterministic_math
from graphcap.engine.marks import Marks
from graphcap.engine.metrics import gaps_of
from graphcap.engine.offline import StoredStep
from graphcap.engine.slots import as_numpy
from graphcap.engine.step import DrafterStep
from graphcap.ops import blackbox
from graphcap.ops.export import WEIGHTS, weight_tensors
from graphcap.ops.faults import TRACEBACK, Deadline
from graphcap.ops.features import FeatureFolder
from graphcap.ops.saver import Saver
from graphcap.train import STATE


def saver(case: str, updates: int) -> dict:
    """How long training waits for one checkpoint: from its begin until it is on disk, against the same steps without it."""
    size, length, num_anchors = case.split(":")
    bucket = Bucket(int(length), int(num_anchors))
    step = make_step(size, bucket.length)
    engine = Engine(step, (bucket,))
    engine.prepare(eager=False)
    engine.fill(bucket, step.example(bucket))
    tensors = {WEIGHTS: weight_tensors(step.drafter), STATE: step.state.tensors()}

    def once() -> None:
        engine.micro_step(bucket)
        engine.update()

    with tempfile.TemporaryDirectory(dir=".") as folder, Saver(Path(folder), keep=1) as saving:
        begin = time.perf_counter()
        saving.reserve(tensors)
        reserve_s = time.perf_counter() - begin
        for _ in range(updates):
            once()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(updates):
            once()
        torch.cuda.synchronize()
        plain_s = (time.perf_counter() - begin) / updates
        begin, num_updates = time.perf_counter(), 0
        saving.begin(1, tensors=tensors, documents={}, score=None)
        begin_s = time.perf_counter() - begin
        while saving.last_saved is None:
            saving.check()
            once()
            num_updates += 1
        torch.cuda.synchronize()
        whole_s = time.perf_counter() - begin
    engine.close()
    result = {
        "case": f"saver {case}",
        "bytes": sum(tensor.nbytes for named in tensors.values() for tensor in named.values()),
        "reserve_s": reserve_s,
        "begin_s": begin_s,
        "update_ms": 1e3 * plain_s,
        "updates_until_saved": num_updates,
        "seconds_until_saved": whole_s,
        "waited_s": whole_s - num_updates * plain_s,
    }
    print(
        f"{case}: {result['bytes'] / 2**30:.1f} GiB saved within {whole_s:.1f} s and {num_updates} updates; training waited "
        f"{result['waited_s']:.2f} s, its host {begin_s:.3f} s; memory reserved in {reserve_s:.1f} s",
        flush=True,
    )
    return result


def loader(case: str, updates: int) -> dict:
    """The GPU's idle share over `updates` updates fed by schedule and loader, by events, then over 500 by a profiler.

    Documents are random, log-normal lengths of median 300; every update is one row. The flight recorder and the deadline are
    on, as in training. Memory is read before and after.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        record = blackbox.Recorder(Path(folder), rank=0, gpu_bytes=torch.cuda.memory_reserved)
        deadline = Deadline(Path(folder) / TRACEBACK, 300.0)
        record.watch(deadline)
        try:
            return _fed(case, updates, {"note": record.note, "marks": _marks(record)}, None)
        finally:
            deadline.close()


def features(case: str, updates: int) -> dict:
    """The same with features that are read from a store of random ones; its folder has just been written and read."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        return _fed(case, updates, {}, Path(folder) / "store")


def _marks(record: blackbox.Recorder) -> Marks:
    return Marks(record.memory, blackbox.GPU_AT, torch.device("cuda"))


def _stored(folder: Path, documents: dict[int, Document], size: str) -> FeatureStore:
    """A store of random features of the documents."""
    hidden, draw = SIZES[size][0], np.random.default_rng(0)
    kind = Kind({"name": "random", "commit": "", "fingerprint": ""}, tuple(range(NUM_TAPPED)), hidden, "bfloat16")
    some_TF = as_numpy(torch.from_numpy(draw.standard_normal((8192, kind.num_features), np.float32)).bfloat16())
    place = FeatureFolder(folder)
    writer = place.writer(kind, shard_bytes=1 << 30)
    for number, document in documents.items():
        writer.add(number, False, document.token_ids, some_TF[: len(document.token_ids)])
    writer.close()
    place.close()
    store = FeatureStore(folder)
    check_store(folder)  # and so everything is in the page cache
    return store


def _fed(case: str, updates: int, watched: dict, folder: Path | None) -> dict:
    """What `loader` and `features` measure. folder: for a store of features, or None."""
    size, length, num_anchors = case.split(":")
    draw, bucket = np.random.default_rng(0), Bucket(int(length), int(num_anchors))
    count = 4000 if folder is None else 1000
    lengths = np.clip(np.exp(draw.normal(np.log(300), 0.6, count)), 32, bucket.length).astype(int)
    vocabulary = SIZES[size][5]
    documents = {
        number: Document(number, draw.integers(0, vocabulary, n).astype(np.int32), draw.random(n) < 0.8, "random", number)
        for number, n in enumerate(lengths)
    }
    density = 0.9 * bucket.num_anchors / (0.8 * bucket.length)
    anchors = np.array([num_anchors_of(document.loss_mask, density=density) for document in documents.values()])
    shapes = plan(
        lengths, anchors, block_size=BLOCK_SIZE, anchor_density=density, row_length=bucket.length, max_buckets=1, window=1000
    )
    shapes = dataclasses.replace(shapes, buckets=(bucket,))
    schedule = Schedule(shapes, np.arange(count), lengths, anchors, seed=0, epochs=1000, rows_per_update=1)
    store, kind = (None, DrafterStep) if folder is None else (_stored(folder, documents, size), StoredStep)
    engine = Engine(make_step(size, bucket.length, kind=kind), (bucket,), **watched)
    engine.prepare(eager=False)
    remaining, ahead = itertools.tee(schedule.updates())
    reader = RowReader(documents, store, seed=0, density=density, num_threads=Features().threads)
    rows = reader.rows((one.epoch, row) for one in ahead for row in one.rows)

    def update() -> None:
        for row in next(remaining).rows:
            engine.fill(row.bucket, next(rows))
            engine.micro_step(row.bucket)
        engine.update()

    for _ in range(50):
        update()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    engine.idle_share()
    begin = time.perf_counter()
    for _ in range(updates):
        update()
    share, ms = engine.idle_share(), 1e3 * (time.perf_counter() - begin) / updates
    after = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    whole, inside = gaps_of(update, times=500), gaps_of(lambda: (engine.micro_step(bucket), engine.update()), times=20)
    engine.close()
    rows.close()
    result = {
        "case": f"{'loader' if store is None else 'features'} {case}",
        "updates": updates,
        "ms": ms,
        "idle_by_events": share,
        "profiled_500": {"without_kernel": whole.share, "ms": whole.total_ms, "nodes": whole.num_nodes},
        "profiled_replays": {"without_kernel": inside.share, "ms": inside.total_ms, "nodes": inside.num_nodes},
        "idle_by_profiler": (whole.without_kernel_ms - inside.without_kernel_ms) / whole.total_ms,
        "reserved_bytes": [before[0], after[0]],
        "allocated_bytes": [before[1], after[1]],
    }
    print(
        f"{case}: {updates} updates of {ms:.2f} ms, idle {share:.2%} by events, {result['idle_by_profiler']:.2%} by "
        f"profiler over 500; reserved {before[0]} -> {after[0]}, allocated {before[1]} -> {after[1]}",
        flush=True,
    )
    return result


def recorder(case: str, updates: int) -> dict:
    """What the flight recorder costs a replayed step: the same step with and without it, by turns."""
    size, length, num_anchors = case.split(":")
    bucket, engines = Bucket(int(length), int(num_anchors)), {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        record = blackbox.Recorder(Path(folder), rank=0, gpu_bytes=torch.cuda.memory_reserved)
        deadline = Deadline(Path(folder) / TRACEBACK, 300.0)
        record.watch(deadline)
        for name, watched in (("without", {}), ("with", {"note": record.note, "marks": _marks(record)})):
            engine = engines[name] = Engine(make_step(size, bucket.length), (bucket,), **watched)
            engine.prepare(eager=False)
            engine.fill(bucket, engine.step.example(bucket))
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(10):
            for name, engine in engines.items():
                taken[name].append(timed_ms(lambda engine=engine: (engine.micro_step(bucket), engine.update()), updates)[0])
        for engine in engines.values():
            engine.close()
        deadline.close()
    ms = {name: statistics.median(values) for name, values in taken.items()}
    result = {"case": f"recorder {case}", **ms, "cost": ms["with"] / ms["without"] - 1, "all_ms": taken}
    print(f"{case}: {ms['without']:.3f} ms without, {ms['with']:.3f} ms with the recorder: {result['cost']:+.2%}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loader", "features", "recorder", "saver"))
    parser.add_argument("case", help="SIZE:LENGTH:ANCHORS, as tools/bench_step.py takes it")
    parser.add_argument("--updates", type=int, default=50, help="timed updates")
    options = parser.parse_args()
    settings = use_deterministic_math()
    measure = {"loader": loader, "features": features, "recorder": recorder, "saver": saver}[options.what]
    print(json.dumps(environment(settings) | {"results": [measure(options.case, options.updates)]}))


if __name__ == "__main__":
    main()
