"""Do the kernels learn what plain float32 operations learn? Held-out losses of both after the same updates, over a few seeds.

    python tools/compare_learning.py runs/tiny.toml
    python tools/compare_learning.py RECIPE optimizer.max_updates=500 shapes.row_length=2048

Each run is `graphcap train --here RECIPE` in a process of its own: once as it is, once with every kernel of graphcap switched
off (graphcap/kernels: written_out), target and drafter in float32. Prints the losses, both means, their difference in pooled
standard deviations and, as the last line, one JSON document. Exit code 1 if the means differ by more than two of them, or by
0.5 %.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from graphcap.ops.progress import read_metrics

ROOT = Path(__file__).resolve().parents[1]
MOST_DEVIATIONS, MOST_SHARE = 2.0, 0.005
PLAIN = """
import sys
from graphcap import cli
from graphcap.kernels import written_out
with written_out():
    sys.exit(cli.main(sys.argv[1:]))
"""


def train(way: str, seed: int, folder: Path, recipe: str, changes: list[str]) -> float:
    """Held-out loss at the end of one run. way: "kernels" or "plain". Raises: SystemExit with the run's last words."""
    out = folder / f"{way}_{seed}"
    words = ["train", "--here", recipe, f"run.out={out}", f"run.seed={seed}", *changes]
    if way == "plain":
        command = [sys.executable, "-c", PLAIN, *words, "target.dtype=float32"]
    else:
        command = [sys.executable, "-m", "graphcap", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{way}, seed {seed}, ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    (metrics,) = out.glob("*/metrics.jsonl")
    return [line for line in read_metrics(metrics) if line["kind"] == "eval"][-1]["loss"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("changes", nargs="*", help="recipe keys of both ways, as graphcap train takes them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: at least 2, for a standard deviation")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU: without one no kernel runs, and both ways are the same")
    losses = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        jobs = {
            (way, seed): pool.submit(train, way, seed, Path(folder), options.recipe, options.changes)
            for way in ("kernels", "plain")
            for seed in range(options.seeds)
        }
        for (way, seed), job in jobs.items():
            losses.setdefault(way, []).append(job.result())
            print(f"{way:<8} seed {seed}: held-out loss {losses[way][-1]:.4f}", flush=True)
    means = {way: statistics.mean(found) for way, found in losses.items()}
    pooled = statistics.mean(statistics.variance(found) for found in losses.values()) ** 0.5
    difference = means["kernels"] - means["plain"]
    if not all(map(math.isfinite, means.values())):
        raise SystemExit(f"held-out losses are not finite: {losses}")
    share = difference / means["plain"]
    deviations = difference / pooled if pooled else (math.inf if difference else 0.0)
    print(f"means {means['kernels']:.4f} and {means['plain']:.4f}: {share:+.2%}, {deviations:+.2f} pooled standard deviations")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = {"losses": losses, "difference": difference, "share": share, "pooled_deviation": pooled}
    print(json.dumps({"gpu": where, "torch": torch.__version__, "recipe": options.recipe, "changes": options.changes, **found}))
    return int(abs(deviations) > MOST_DEVIATIONS or abs(share) > MOST_SHARE)


if __name__ == "__main__":
    raise SystemExit(main())
