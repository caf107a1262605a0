"""How much of an epoch fixed shapes waste: plans for three sets of documents beside what others do with them.

    python tools/bench_plan.py [--documents 1000000] [--sets lognormal,humps,pareto] [--speculators CLONE]

Nothing is trained; times are predicted by one cost model for all (graphcap/data/costs.py, sizes of an 8 B target with a
drafter of five layers unless --costs names a JSON file). Every way gets the same documents and the same anchors: 0.1667
per supervised token, the supervised share of a document uniform in 0.3 … 0.95. Documents over the row's length are cut
there, as data.on_long = "truncate" does. The sets:

    lognormal  median 735, sigma 0.7; rows of 4,096
    humps      half the documents around 200, half around 6,000, each log-normal with sigma 0.15; rows of 8,192
    pareto     100 times a Pareto of exponent 1.3; rows of 32,768

Ways: `padded`: batches of 4 shuffled documents, padded to the longest and to the most anchors. `powers`: buckets of the
row's length, its half, quarter … with slots for the mean number of anchors, and one that holds every document; packed as
ours. `one`: the best single bucket. `multipack`: the sampler of speculators, imported from a clone of it, rank 0 of 8;
slots for the fullest of its rows. `ours`: the plan of at most six buckets. Prints a table, and one JSON document last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from graphcap.data import search
from graphcap.data.costs import ASSUMED, Costs
from graphcap.data.forecast import forecast, imbalance
from graphcap.data.packing import PACKING_VERSION, Schedule
from graphcap.data.planner import TILE_TOKENS, Bucket, Shapes, plan

BLOCK_SIZE, DENSITY, WINDOW, MAX_BUCKETS = 16, 0.1667, 4096, 6
UNIT = TILE_TOKENS // BLOCK_SIZE
ROWS_PER_UPDATE = 24  # whole rows for each of 1, 2, 3, 4, 6, 8, 12 or 24 ranks
ROW_LENGTH = {"lognormal": 4096, "humps": 8192, "pareto": 32768}
MULTIPACK = Path("src/speculators/train/distributed_batch_sampler.py")


def documents(name: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(lengths, anchor counts) of a set, int64 [n] each."""
    draw = np.random.default_rng(seed)
    if name == "lognormal":
        lengths = 735 * np.exp(draw.normal(0, 0.7, count))
    elif name == "humps":
        lengths = draw.choice([200.0, 6000.0], count) * np.exp(draw.normal(0, 0.15, count))
    else:
        lengths = 100 * (1 + draw.pareto(1.3, count))
    lengths = np.clip(np.rint(lengths), 16, ROW_LENGTH[name]).astype(np.int64)
    supervised = np.maximum(2, (lengths * draw.uniform(0.3, 0.95, count)).astype(np.int64))
    return lengths, np.minimum(supervised - 1, np.ceil(DENSITY * supervised)).astype(np.int64)


def shapes_of(buckets: tuple[Bucket, ...], costs: Costs) -> Shapes:
    """Buckets that no planner chose, as shapes."""
    return Shapes(tuple(sorted(buckets, reverse=True)), BLOCK_SIZE, DENSITY, WINDOW, PACKING_VERSION, "", {}, costs=costs)


def planned(lengths: np.ndarray, anchors: np.ndarray, name: str, costs: Costs, *, max_buckets: int) -> Shapes:
    """Our plan."""
    settings = {"block_size": BLOCK_SIZE, "anchor_density": DENSITY, "window": WINDOW, "row_length": ROW_LENGTH[name]}
    return plan(lengths, anchors, **settings, max_buckets=max_buckets, costs=costs)


def powers(lengths: np.ndarray, anchors: np.ndarray, name: str, costs: Costs) -> Shapes:
    """Powers of two, with slots for the mean, and one bucket more for the documents with many anchors."""
    lasts = [ROW_LENGTH[name] >> part for part in range(MAX_BUCKETS - 1)]
    means = [Bucket(n, search.round_up(-(-int(anchors.sum()) * n // int(lengths.sum())), UNIT)) for n in lasts]
    return shapes_of((Bucket(lasts[0], search.round_up(int(anchors.max()), UNIT)), *means), costs)


def of_schedule(shapes: Shapes, lengths: np.ndarray, anchors: np.ndarray, seed: int) -> dict:
    """The figures of packed rows, and the seconds that packing an epoch took."""
    ids = np.arange(len(lengths))
    schedule = Schedule(shapes, ids, lengths, anchors, seed=seed, epochs=1, rows_per_update=ROWS_PER_UPDATE)
    begin = time.process_time()
    schedule.epoch_rows(0)
    seconds = time.process_time() - begin
    figures = asdict(forecast(schedule, lengths, anchors, epoch=0))
    return figures | {
        "buckets": [bucket.name for bucket in shapes.buckets],
        "pack_cpu_s": seconds,
        "imbalance": {ranks: imbalance(schedule, ranks, epoch=0) for ranks in (2, 3, 8)},
    }


def of_batches(lengths: np.ndarray, anchors: np.ndarray, costs: Costs, seed: int) -> dict:
    """Batches of 4 in shuffled order, padded to the longest document and the most anchors in each."""
    order = np.random.default_rng(seed).permutation(len(lengths))[: len(lengths) // 4 * 4].reshape(-1, 4)
    tokens, slots = 4 * lengths[order].max(axis=1), 4 * anchors[order].max(axis=1)
    return _plain(lengths[order.ravel()], anchors[order.ravel()], tokens, slots, costs) | {"shapes": len(np.unique(tokens))}


def of_multipack(clone: Path, lengths: np.ndarray, anchors: np.ndarray, name: str, costs: Costs, seed: int) -> dict:
    """Rows that speculators' own sampler makes for rank 0 of 8: its ranks take turns, so an eighth stands for all."""
    spec = importlib.util.spec_from_file_location("multipack", clone / MULTIPACK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    begin = time.process_time()
    rows = list(module.MultipackDistributedBatchSamplerV2(ROW_LENGTH[name], lengths, 8, 0, seed=seed))
    seconds = time.process_time() - begin
    used, starts = np.concatenate(rows), np.cumsum([0, *(len(row) for row in rows)])[:-1]
    most = search.round_up(int(np.add.reduceat(anchors[used], starts).max()), UNIT)
    tokens, slots = np.full(len(rows), ROW_LENGTH[name]), np.full(len(rows), most)
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    figures = _plain(lengths[used], anchors[used], tokens, slots, costs)
    return figures | {"pack_cpu_s": seconds, "documents": len(used), "commit": commit, "shapes": 1}


def _plain(lengths: np.ndarray, anchors: np.ndarray, tokens: np.ndarray, slots: np.ndarray, costs: Costs) -> dict:
    """The figures of micro steps with so many tokens and slots, int64 [m] each. Attention is each document's own."""
    attention, bound = costs.attention(lengths), costs.bound(lengths, anchors, BLOCK_SIZE)
    total = int(costs.bucket(tokens, slots, BLOCK_SIZE).sum()) + attention
    return {
        "rows_ps": total,
        "bound_ps": bound,
        "over": total / bound - 1,
        "linear_over": (total - attention) / (bound - attention) - 1,
        "token_fill": int(lengths.sum()) / int(tokens.sum()),
        "anchor_fill": int(anchors.sum()) / int(slots.sum()),
    }


def least_over(lengths: np.ndarray, anchors: np.ndarray, name: str, costs: Costs, seed: int) -> float:
    """What no plan of six buckets undercuts, as `linear_over`: documents over half a row never share one with each other.

    So there are as many rows as such documents, each in a bucket that holds it. The shorter ones are counted as free.
    Choosing the six buckets is a p-median problem; its Lagrangian relaxation bounds it from below whatever the
    multipliers. Anchors and slots are both rounded down to 2 units, which can only make it smaller. From 20,000 documents.
    """
    chosen = np.random.default_rng(seed).permutation(len(lengths))[:20_000]
    lengths, anchors = lengths[chosen], anchors[chosen]
    alone = lengths > ROW_LENGTH[name] // 2
    if not alone.any():
        return 0.0
    step = 2 * UNIT
    sizes = np.stack(
        [-(-lengths[alone] // TILE_TOKENS) * TILE_TOKENS, -(-anchors[alone] // UNIT) * UNIT // step * step], axis=1
    )
    kinds, counts = np.unique(sizes, axis=0, return_counts=True)
    grid = np.stack(np.meshgrid(*(np.unique(column) for column in sizes.T), indexing="ij"), axis=-1).reshape(-1, 2)
    each = costs.bucket(grid[:, 0], grid[:, 1], BLOCK_SIZE) / 1e9
    holds = (grid[:, None] >= kinds).all(axis=2)
    price = np.where(holds, each[:, None], np.inf).min(axis=0) * 1.1
    best, best_price, stride, failed = 0.0, price, 0.05, 0
    for _ in range(250):
        saved = np.where(holds, np.minimum(0.0, each[:, None] - price), 0.0) * counts
        gains = saved.sum(axis=1)
        opened = np.argsort(gains)[:MAX_BUCKETS]
        value = float(price @ counts) + float(gains[opened].sum())
        if value > best:
            best, best_price, failed = value, price, 0
        elif (failed := failed + 1) > 6:
            price, stride, failed = best_price, stride / 1.6, 0
        slope = (1 - (saved[opened] < 0).sum(axis=0)) * counts
        price = price + stride * best / max(1.0, float(slope @ slope)) * slope
    whole = replace(costs, pair_ps=0).bound(lengths, anchors, BLOCK_SIZE) / 1e9
    return max(0.0, best / whole - 1)


def measure(name: str, options: argparse.Namespace, costs: Costs) -> dict:
    """All ways on one set."""
    lengths, anchors = documents(name, options.documents, options.seed)
    begin, cpu = time.perf_counter(), time.process_time()
    ours = planned(lengths, anchors, name, costs, max_buckets=MAX_BUCKETS)
    planning = {"plan_s": time.perf_counter() - begin, "plan_cpu_s": time.process_time() - cpu}
    result = {"ours": of_schedule(ours, lengths, anchors, options.seed) | planning}
    result["ours"]["peak_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result["one"] = of_schedule(planned(lengths, anchors, name, costs, max_buckets=1), lengths, anchors, options.seed)
    result["powers"] = of_schedule(powers(lengths, anchors, name, costs), lengths, anchors, options.seed)
    result["padded"] = of_batches(lengths, anchors, costs, options.seed)
    if options.speculators:
        result["multipack"] = of_multipack(options.speculators, lengths, anchors, name, costs, options.seed)
    least = least_over(lengths, anchors, name, costs, options.seed)
    return {"set": name, "documents": len(lengths), "tokens": int(lengths.sum()), "least_linear_over": least, "ways": result}


def table(results: list[dict]) -> str:
    """One line a way: predicted time over the bound, fills, and for packed rows the rest."""
    lines = [f"{'set':<10} {'way':<10} {'over':>8} {'linear':>8}  tokens   slots buckets    corr.  2, 3, 8 ranks"]
    for one in results:
        for way, figures in one["ways"].items():
            rest = ""
            if "imbalance" in figures:
                ranks = ", ".join(f"{ratio:.4f}" for ratio in figures["imbalance"].values())
                rest = f"{len(figures['buckets']):>7} {figures['correlation']:>8.4f}  {ranks}"
            fills = f"{figures['token_fill']:>7.4f} {figures['anchor_fill']:>7.4f}"
            lines.append(f"{one['set']:<10} {way:<10} {figures['over']:>8.2%} {figures['linear_over']:>8.2%} {fills} {rest}")
        ours = one["ways"]["ours"]
        lines += [
            f"  {one['documents']:,} documents; planned in {ours['plan_s']:.1f} s ({ours['plan_cpu_s']:.1f} s of CPU), an "
            f"epoch packed in {ours['pack_cpu_s']:.1f} s of CPU; peak {ours['peak_rss_bytes'] / 2**20:.0f} MiB",
            f"  buckets {', '.join(ours['buckets'])}; no {MAX_BUCKETS} get under {one['least_linear_over']:.2%} (linear)",
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents of each set")
    parser.add_argument("--sets", default="lognormal,humps,pareto", help="which, by comma")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--costs", type=Path, help="a shapes file whose costs are used")
    parser.add_argument("--speculators", type=Path, metavar="CLONE", help="a clone of vllm-project/speculators to run beside")
    options = parser.parse_args()
    if options.speculators and not (options.speculators / MULTIPACK).is_file():
        parser.error(f"--speculators {options.speculators}: expected a clone with {MULTIPACK}; git clone it, or leave it out")
    names = options.sets.split(",")
    if unknown := set(names) - set(ROW_LENGTH):
        parser.error(f"--sets {', '.join(unknown)}: expected some of {', '.join(ROW_LENGTH)}")
    costs = Shapes.load(options.costs).costs if options.costs else ASSUMED
    results = [measure(name, options, costs) for name in names]
    print(table(results))
    print(json.dumps({"costs": costs.to_json(), "rows_per_update": ROWS_PER_UPDATE, "seed": options.seed, "sets": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
