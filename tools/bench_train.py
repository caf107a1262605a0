"""A whole training run over random tokens: tokens, anchors and supervised draft tokens a second, idle time, predicted epoch.

    python tools/bench_train.py                                        # SmolLM2-135M's shape, 20,000 documents, one epoch
    python tools/bench_train.py --features                             # the same with features from disk, extracted first
    python tools/bench_train.py --size toy --documents 60 --max-length 512 --row-length 512 --tokens-per-update 1024   # a CPU

The target has random weights: speed does not depend on what tokens mean. Lengths are log-normal, median 735, sigma 0.7, cut at
--max-length; every token but the first is supervised. `graphcap shapes --measure` plans, `graphcap train` runs as ever,
supervisor, loader, metrics and checkpoint included; rates are those between the metrics that come in after its first tenth
and the last. What is being done goes to stderr; prints a table and, as the last line, one JSON document.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from bench_epoch import make_step as with_target
from bench_step import make_step as without_target

from graphcap.data.planner import Bucket
from graphcap.engine import Engine
from graphcap.engine.guard import use_deterministic_math
from graphcap.engine.timing import median_ms
from graphcap.ops.progress import read_metrics

BEGAN = time.monotonic()
ROOT = Path(__file__).resolve().parents[1]
HIDDEN = {"smol": (576, 9, 3, 1536, 49152, 30), "toy": (32, 4, 2, 64, 2048, 8)}  # heads, key heads, MLP, vocabulary, layers
MEDIAN, SIGMA, BLOCK_SIZE = 735, 0.7, 16
KNOWN = 16, 2000  # token ids that the tiny tokenizer knows and that mark nothing


def make_target(folder: Path, size: str) -> Path:
    """A Llama with random weights, and the tiny target's tokenizer, which no document needs."""
    import transformers

    hidden, heads, key_heads, mlp, vocabulary, layers = HIDDEN[size]
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocabulary, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": key_heads, "max_position_embeddings": 8192}
    sizes["tie_word_embeddings"] = True
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16).save_pretrained(folder)
    for pattern in ("*token*", "*.jinja"):
        for path in (ROOT / "graphcap/assets/tiny").glob(pattern):
            shutil.copy(path, folder)
    return folder


def write_documents(path: Path, count: int, max_length: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.normal(np.log(MEDIAN), SIGMA, count)).astype(int).clip(16, max_length)
    with path.open("w") as file:
        for length in lengths:
            ids = draw.integers(*KNOWN, length).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] + [1] * int(length - 1)}) + "\n")


def write_recipe(folder: Path, options) -> Path:
    sections = {
        "target": {"path": str(folder / "target")},
        "data": {
            "train": str(folder / "train.jsonl"),
            "held_out": str(folder / "held.jsonl"),
            "max_length": options.max_length,
        },
        "drafter": {"block_size": BLOCK_SIZE},
        "shapes": {"row_length": options.row_length, "anchor_density": options.anchor_density},
        "optimizer": {"epochs": 1, "tokens_per_update": options.tokens_per_update},
        "eval": {"every": 10**6, "documents": 8, "prompts": 1, "max_new_tokens": 4, "passes": 1},
        "checkpoint": {"every": 10**6},
        "run": {"out": str(folder / "out")},
    }
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for name, keys in sections.items()
    ]
    path = folder / "bench.toml"
    path.write_text("\n".join(lines))
    return path


def graphcap(*words: str) -> str:
    """What the command printed. Raises: SystemExit with its last words if it fails."""
    print(f"{time.monotonic() - BEGAN:>6.1f} s  graphcap {words[0]}", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-m", "graphcap", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"graphcap {words[0]} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def rates(lines: list[dict]) -> dict:
    """Tokens, anchors and draft tokens a second between two fetches, and how long an epoch takes at that pace.

    Updates that came in with one fetch share its time; a fetch's own updates happened before it.
    """
    updates = [line for line in lines if line["kind"] == "train"]
    ends = [
        number
        for number, line in enumerate(updates)
        if number + 1 == len(updates) or updates[number + 1]["time_s"] > line["time_s"]
    ]
    first = next((end for end in ends if end >= len(updates) // 10), ends[0])
    if first == ends[-1]:
        raise SystemExit(f"{len(updates)} updates came in at once: give more --documents")
    counted, took_s = updates[first + 1 :], updates[-1]["time_s"] - updates[first]["time_s"]
    total = {name: sum(line[name] for line in updates) for name in ("tokens", "anchors")}
    found = {name: sum(line[name] for line in counted) for name in ("tokens", "anchors")}
    return {
        "updates": len(updates),
        "tokens_per_s": found["tokens"] / took_s,
        "anchors_per_s": found["anchors"] / took_s,
        "draft_tokens_per_s": found["anchors"] * (BLOCK_SIZE - 1) / took_s,
        "anchors_per_token": found["anchors"] / found["tokens"],
        "epoch_s": took_s * total["tokens"] / found["tokens"],
    }


def bench(folder: Path, options) -> dict:
    make_target(folder / "target", options.size)
    write_documents(folder / "train.jsonl", options.documents, options.max_length, 0)
    write_documents(folder / "held.jsonl", 8, options.max_length, 1)
    recipe, plan = write_recipe(folder, options), folder / "plan.json"
    planned = json.loads(graphcap("shapes", str(recipe), "--measure", "--json", "--out", str(plan)).splitlines()[-1])
    words = ["train", str(recipe), f"shapes.plan={plan}", "progress.every=1"]
    if options.features:
        graphcap("extract", str(recipe), "--out", str(folder / "features"), f"shapes.plan={plan}")
        words.append(f"features.path={folder / 'features'}")
    said = graphcap(*words)
    idle = re.search(r"GPU idle ([0-9.]+)% between replays", said)
    found = rates(read_metrics(folder / "out" / "bench" / "metrics.jsonl"))
    found |= {
        "predicted_epoch_s": planned["epoch_s"],
        "buckets": [f"{one['length']}/{one['num_anchors']}" for one in planned["buckets"]],
    }
    print(f"{time.monotonic() - BEGAN:>6.1f} s  trained", file=sys.stderr, flush=True)
    found |= {"idle_share": float(idle[1]) / 100 if idle else None, "features": options.features}
    if torch.cuda.is_available() and not options.features:
        found["shares"] = shares(options.size, planned["buckets"][0], options.tokens_per_update)
    return found


def shares(size: str, largest: dict, tokens_per_update: int) -> dict[str, float]:
    """Of an update's time, what target, drafter and update take: full rows of the largest bucket, with and without target."""
    bucket, times = Bucket(largest["length"], largest["num_anchors"]), 10
    use_deterministic_math()
    ms, device = {}, torch.device("cuda")
    for name, step in (("both", with_target(size, device)), ("drafter", without_target(size, bucket.length))):
        engine = Engine(step, (bucket,))
        engine.prepare(eager=False)
        engine.fill(bucket, step.example(bucket, num_documents=bucket.length // MEDIAN, full=True))
        ms[name] = median_ms(lambda engine=engine: engine.micro_step(bucket), times, device)
        ms["update"] = median_ms(engine.update, times, device)
        engine.close()
    rows = max(1, round(tokens_per_update / bucket.length))
    parts = {"target": rows * (ms["both"] - ms["drafter"]), "drafter": rows * ms["drafter"], "update": ms["update"]}
    return {name: part / sum(parts.values()) for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--size", default="smol", choices=HIDDEN, help="of the target")
    parser.add_argument("--max-length", type=int, default=4096, help="of a document")
    parser.add_argument("--row-length", type=int, default=8192)
    parser.add_argument("--anchor-density", type=float, default=0.266, help="anchors a supervised token")
    parser.add_argument("--tokens-per-update", type=int, default=32_768)
    parser.add_argument("--features", action="store_true", help="from disk, extracted first")
    options = parser.parse_args()
    if min(options.documents, options.max_length, options.row_length, options.tokens_per_update) < 1:
        parser.error("--documents, --max-length, --row-length and --tokens-per-update: at least 1")
    if options.size != "toy" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here: give --size toy, as the help shows")
    with tempfile.TemporaryDirectory() as folder:
        found = bench(Path(folder), options)
    idle = "not measured" if found["idle_share"] is None else f"{found['idle_share']:.1%}"
    print(f"buckets                 {', '.join(found['buckets'])}, {found['updates']} updates")
    print(f"tokens a second         {found['tokens_per_s']:,.0f}")
    print(f"anchors a second        {found['anchors_per_s']:,.0f} ({found['anchors_per_token']:.3f} a token)")
    print(f"draft tokens a second   {found['draft_tokens_per_s']:,.0f}")
    print(
        f"epoch                   {found['epoch_s']:.1f} s, predicted {found['predicted_epoch_s'] / found['epoch_s'] - 1:+.1%}"
    )
    print(f"GPU idle                {idle}")
    if "shares" in found:
        print(f"time of an update       {', '.join(f'{name} {share:.0%}' for name, share in found['shares'].items())}")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(json.dumps({"gpu": where, "torch": torch.__version__, "size": options.size, "documents": options.documents, **found}))


if __name__ == "__main__":
    main()
