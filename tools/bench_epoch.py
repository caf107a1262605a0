"""Epochs of plans, predicted and measured: the rows of each plan, replayed with random tokens, target in the step.

    python tools/bench_epoch.py                                     # SmolLM2's shape, three sets, 4,000 documents of each
    python tools/bench_epoch.py --size q0.6b --sets humps --documents 2000

Costs are measured first, on a few micro steps of one bucket and its halves; plans are made with them, capture left out (a
bucket costs nothing), so that replay time alone is compared. Sets and ways are those of tools/bench_plan.py, and two more:
`single`, one document a row with as many lengths as `singles`, whose lengths are powers of two. Of `padded` nearly each batch
would be a graph of its own, so a few over all lengths are timed, and its predicted epoch is scaled by what they took beside
their own prediction. All rows are made before the clock starts. Prints a table, and one JSON document last.
"""

import argparse
import dataclasses
import json
import time

import numpy as np
import torch
from bench_plan import (
    BLOCK_SIZE,
    DENSITY,
    MAX_BUCKETS,
    ROW_LENGTH,
    UNIT,
    WINDOW,
    documents,
    of_batches,
    planned,
    powers,
    shapes_of,
)

from graphcap.data import search
from graphcap.data.costs import PS_PER_MS, PS_PER_S, Costs, Fit
from graphcap.data.packing import Schedule
from graphcap.data.planner import Bucket, Shapes, plan
from graphcap.engine import Engine
from graphcap.engine.guard import use_deterministic_math
from graphcap.engine.optimizer import Hyper
from graphcap.engine.step import DrafterStep
from graphcap.engine.timing import median_ms, samples
from graphcap.model.attention import TILE
from graphcap.model.blocks import decay, default_gamma
from graphcap.model.drafter import Drafter, DrafterConfig, tapped_layers
from graphcap.model.loss import default_chunk
from graphcap.model.target import Target
from graphcap.shapes import trial_buckets

SIZES = {  # hidden, query heads, key heads, head size, MLP, vocabulary, target layers
    "smol": (576, 9, 3, 64, 1536, 49152, 30),
    "q0.6b": (1024, 16, 8, 128, 3072, 151936, 28),
    "toy": (32, 4, 2, 8, 64, 512, 6),  # for a CPU
}
ROWS_PER_UPDATE = 8
NUM_BATCHES = 8  # padded ones that are measured
WAYS = "ours,one,powers,single,singles,padded"


def make_step(size: str, device: torch.device) -> DrafterStep:
    """A step with a target of random weights in it."""
    import transformers

    hidden, heads, kv_heads, head_dim, mlp, vocabulary, num_layers = SIZES[size]
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocabulary, "head_dim": head_dim}
    sizes |= {"max_position_embeddings": max(ROW_LENGTH.values())}
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": num_layers}
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **shape, tie_word_embeddings=True))
    taps = tuple(tapped_layers(num_layers, 5))
    target = Target(model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).requires_grad_(False).eval(), taps)
    config = DrafterConfig(
        **sizes,
        num_layers=5,
        num_heads=heads,
        num_kv_heads=kv_heads,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        block_size=BLOCK_SIZE,
        mask_token_id=vocabulary - 1,
        target_layer_ids=taps,
        num_target_layers=num_layers,
    )
    drafter = Drafter(config)
    drafter.initialize(0)
    rates = {"learning_rate": 6e-4, "warmup_fraction": 0.04, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    hyper = Hyper(**rates, max_grad_norm=1.0, num_updates=100_000)
    return DrafterStep(
        target,
        drafter,
        decay=decay(BLOCK_SIZE, default_gamma(BLOCK_SIZE)),
        hyper=hyper,
        chunk_tokens=default_chunk(vocabulary, 2),
    )


def measured_costs(step: DrafterStep, largest: Bucket, times: int) -> Costs:
    fit, update_ms = measured_fit(step, largest, times)
    return fit.costs(anchors_per_token=largest.num_anchors / largest.length, update_ms=update_ms)


def measured_fit(step: DrafterStep, largest: Bucket, times: int) -> tuple[Fit, float]:
    """The fit, and the median of an update, ms."""
    engine = Engine(step, trial_buckets(largest, BLOCK_SIZE))
    engine.prepare(eager=False, say=lambda line: print(line, flush=True))
    found, update_ms = samples(engine, times=times), median_ms(engine.update, times, step.device)
    engine.close()
    fit = Fit.of(found, block_size=BLOCK_SIZE)
    for one in found:
        print(f"  {one.length}/{one.num_anchors} pairs {one.pairs}: {one.ms:.3f} ms, {fit.ms(one) / one.ms - 1:+.1%} as fitted")
    return fit, update_ms


def ways(name: str, lengths: np.ndarray, anchors: np.ndarray, costs: Costs) -> dict[str, Shapes]:
    """The plans that are replayed."""
    settings = {"block_size": BLOCK_SIZE, "anchor_density": DENSITY, "window": WINDOW, "row_length": ROW_LENGTH[name]}
    single = plan(lengths, anchors, **settings, max_buckets=MAX_BUCKETS, costs=costs, rows="single")
    halves = [ROW_LENGTH[name] >> part for part in range(len(single.buckets))]
    slots = [search.round_up(int(anchors[lengths <= length].max(initial=1)), UNIT) for length in halves]
    return {
        "ours": planned(lengths, anchors, name, costs, max_buckets=MAX_BUCKETS),
        "one": planned(lengths, anchors, name, costs, max_buckets=1),
        "powers": powers(lengths, anchors, name, costs),
        "single": single,
        "singles": dataclasses.replace(shapes_of(tuple(map(Bucket, halves, slots)), costs), rows="single"),
    }


def rows_of(schedule: Schedule, lengths: np.ndarray, anchors: np.ndarray, vocabulary: int) -> list[tuple]:
    """(bucket, arrays) of every row of the first epoch, with random tokens and anchors."""
    draw, made = np.random.default_rng(0), []
    for update in schedule.updates():
        for row in update.rows:
            parts, starts = lengths[list(row.document_ids)], np.cumsum([0, *lengths[list(row.document_ids)]])
            chosen = [
                start + np.sort(draw.choice(n - 1, count, replace=False))
                for n, start, count in zip(parts, starts, anchors[list(row.document_ids)])
            ]
            arrays = {
                "token_ids": draw.integers(0, vocabulary - 1, starts[-1]),
                "position": np.concatenate([np.arange(n) for n in parts]),
                "supervised": np.ones(starts[-1]),
                "anchors": np.concatenate(chosen),
            }
            made.append((row.bucket, {key: array.astype(np.int32) for key, array in arrays.items()}))
    return made


def epoch_s(engine: Engine, rows: list[tuple]) -> float:
    """Seconds of an epoch's micro steps and updates."""
    for bucket in dict.fromkeys(bucket for bucket, _ in rows):
        engine.micro_step(bucket)
    wait(engine.step.device)
    begin = time.perf_counter()
    for number, (bucket, arrays) in enumerate(rows, start=1):
        engine.fill(bucket, arrays)
        engine.micro_step(bucket)
        if number % ROWS_PER_UPDATE == 0 or number == len(rows):
            engine.update()
    wait(engine.step.device)
    return time.perf_counter() - begin


def padded_ratio(step: DrafterStep, lengths: np.ndarray, anchors: np.ndarray, costs: Costs, times: int) -> float:
    """Measured over predicted time of NUM_BATCHES of the batches of 4 that of_batches pads, spread over their lengths."""
    order = np.random.default_rng(0).permutation(len(lengths))[: len(lengths) // 4 * 4].reshape(-1, 4)
    order = order[np.argsort(lengths[order].max(axis=1))]
    batches, predicted = order[np.linspace(0, len(order) - 1, NUM_BATCHES + 2).astype(int)[1:-1]], 0
    rows = {}
    for batch in batches:
        longest, most = int(lengths[batch].max()), int(anchors[batch].max())
        bucket = Bucket(search.round_up(4 * longest, TILE), search.round_up(4 * most, UNIT))
        position = np.zeros(bucket.length, np.int64)
        for place, number in enumerate(lengths[batch]):
            position[place * longest : place * longest + number] = np.arange(number)
        drawn = [
            np.linspace(0, lengths[one] - 2, anchors[one]).astype(int) + place * longest for place, one in enumerate(batch)
        ]
        filled = {"token_ids": np.ones(bucket.length), "position": position, "supervised": np.ones(bucket.length)}
        rows[bucket] = {key: array.astype(np.int32) for key, array in (filled | {"anchors": np.concatenate(drawn)}).items()}
        predicted += costs.bucket(4 * longest, 4 * most, BLOCK_SIZE) + costs.attention(lengths[batch])
    engine, measured_ms = Engine(step, tuple(sorted(rows, reverse=True))), 0.0
    engine.prepare(eager=False, say=lambda line: print(line, flush=True))
    for bucket, arrays in rows.items():
        engine.fill(bucket, arrays)
        measured_ms += median_ms(lambda bucket=bucket: engine.micro_step(bucket), times, step.device)
    engine.close()
    return measured_ms * PS_PER_MS / predicted


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, step: DrafterStep, options, costs: Costs) -> dict:
    """Every way on one set; the buckets of all ways are captured in one engine."""
    lengths, anchors = documents(name, options.documents, 0)
    vocabulary, found = SIZES[options.size][5], {}
    plans = {way: shapes for way, shapes in ways(name, lengths, anchors, costs).items() if way in options.ways.split(",")}
    buckets = sorted({bucket for shapes in plans.values() for bucket in shapes.buckets}, reverse=True)
    engine = Engine(step, tuple(buckets))
    engine.prepare(eager=False, say=lambda line: print(line, flush=True))
    for way, shapes in plans.items():
        schedule = Schedule(
            shapes, np.arange(len(lengths)), lengths, anchors, seed=0, epochs=1, rows_per_update=ROWS_PER_UPDATE
        )
        rows = rows_of(schedule, lengths, anchors, vocabulary)
        predicted = int(schedule.epoch_rows(0).cost_ps.sum()) + -(-len(rows) // ROWS_PER_UPDATE) * costs.update_ps
        measured_s = epoch_s(engine, rows)
        names = [bucket.name for bucket in shapes.buckets]
        found[way] = {"measured_s": measured_s, "predicted_s": predicted / PS_PER_S, "rows": len(rows), "buckets": names}
    engine.close()
    padded = of_batches(lengths, anchors, costs, 0)
    if "padded" in options.ways.split(","):
        predicted_s = padded["rows_ps"] / PS_PER_S
        measured_s = predicted_s * padded_ratio(step, lengths, anchors, costs, options.times)
        found["padded"] = {"predicted_s": predicted_s, "measured_s": measured_s, "buckets": f"{NUM_BATCHES} batches measured"}
    first = next(iter(found))
    for way, figures in found.items():
        own, error = figures["measured_s"], f"{figures['predicted_s'] / figures['measured_s'] - 1:+.1%}"
        ratio = own / found[first]["measured_s"]
        print(f"{name:<10} {way:<8} {own:>8.2f} s {error:>10} {ratio:>6.2f} × {first}  {figures['buckets']}", flush=True)
    return {"set": name, "documents": len(lengths), "tokens": int(lengths.sum()), "ways": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="smol", choices=SIZES)
    parser.add_argument("--sets", default="lognormal,humps,pareto", help="which, by comma")
    parser.add_argument("--documents", type=int, default=4000, help="of each set")
    parser.add_argument("--ways", default=WAYS, help="which, by comma")
    parser.add_argument("--times", type=int, default=10, help="replays that a measured cost is the median of")
    parser.add_argument("--row-length", type=int, help="cut rows and documents to so many tokens: for a CPU, or a small GPU")
    options = parser.parse_args()
    for flag, given, known in (("--sets", options.sets, ROW_LENGTH), ("--ways", options.ways, WAYS.split(","))):
        unknown = [one for one in given.split(",") if one not in known]
        if unknown:
            parser.error(f"{flag}: {', '.join(unknown)}: expected some of {', '.join(known)}")
    if min(options.documents, options.times) < 1:
        parser.error("--documents and --times: at least 1")
    if options.size != "toy" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here: give --size toy")
    for name in options.sets.split(","):
        ROW_LENGTH[name] = min(ROW_LENGTH[name], options.row_length or ROW_LENGTH[name])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_deterministic_math()
    step, results = make_step(options.size, device), []
    for name in options.sets.split(","):
        lengths, anchors = documents(name, options.documents, 0)
        slots = search.round_up(-(-int(anchors.sum()) * ROW_LENGTH[name] // int(lengths.sum())), UNIT)
        costs = measured_costs(step, Bucket(ROW_LENGTH[name], slots), options.times)
        print(f"{name:<10} costs {json.dumps(costs.to_json())}", flush=True)
        results.append(measure(name, step, options, costs))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"gpu": where, "torch": torch.__version__, "size": options.size, "results": results}))


if __name__ == "__main__":
    main()
