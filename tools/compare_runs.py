"""Are two runs the same bits? Compares the newest checkpoints and every metric but the clock's.

    python tools/compare_runs.py runs/out/A runs/out/B

Prints one line a tensor file and one for the metrics; exit code 1 if anything differs.
"""

import argparse
import sys
from pathlib import Path

import torch

from graphcap.ops import checkpoint
from graphcap.ops.progress import read_metrics, without_clock

FILES = ("model.safetensors", "state.safetensors")


def differing_tensors(left: Path, right: Path, name: str) -> tuple[int, list[str]]:
    """How many tensors a file of two checkpoints has, and the names of those that differ, with the largest difference."""
    a, b = checkpoint.load_tensors(left, name), checkpoint.load_tensors(right, name)
    found = [f"{key} only in one" for key in sorted(a.keys() ^ b.keys())]
    for key in sorted(a.keys() & b.keys()):
        if a[key].shape != b[key].shape or not torch.equal(a[key], b[key]):
            gap = (a[key].double() - b[key].double()).abs().max().item() if a[key].shape == b[key].shape else "another shape"
            found.append(f"{key} by {gap}")
    return len(a), found


def differing_metrics(left: Path, right: Path) -> tuple[int, list[str]]:
    """How many lines the metrics of the first run have, and how those of the second differ, but for the clock."""
    lines = [[without_clock(line) for line in read_metrics(run / "metrics.jsonl")] for run in (left, right)]
    found = [f"update {a.get('update')}" for a, b in zip(*lines) if a != b][:5]
    if len(lines[0]) != len(lines[1]):
        found.append(f"{len(lines[0])} and {len(lines[1])} lines")
    return len(lines[0]), found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2, type=Path)
    left, right = parser.parse_args().runs
    newest = [checkpoint.newest(run / "checkpoints")[0] for run in (left, right)]
    if None in newest or newest[0].name != newest[1].name:
        print(f"the newest checkpoints are {newest[0]} and {newest[1]}: train both runs to the same update")
        return 1
    failed = False
    for name in FILES:
        count, found = differing_tensors(*newest, name)
        print(f"{newest[0].name} {name}: {count} tensors, {'bit-equal' if not found else 'DIFFERENT: ' + '; '.join(found)}")
        failed |= bool(found)
    count, found = differing_metrics(left, right)
    print(f"metrics.jsonl: {count} lines, {'equal' if not found else 'DIFFERENT: ' + '; '.join(found)}")
    return int(failed or bool(found))


if __name__ == "__main__":
    sys.exit(main())
