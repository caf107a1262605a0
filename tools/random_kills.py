"""A run whose rank is killed again and again, against the same run undisturbed: same weights, same history.

    python tools/random_kills.py runs/tiny.toml --every 20 --minutes 5 optimizer.max_updates=300 checkpoint.every=10
    python tools/random_kills.py runs/tiny.toml --instants 100 optimizer.max_updates=30 checkpoint.every=1

Both run under their supervisors, one after the other. The first is killed (SIGKILL to its rank) after random times of
--every seconds in the mean until --minutes have passed, and restarted by its supervisor each time; then it is left alone.
With --instants everything of a run, supervisor included, is killed at a random instant, so many times; the same folder goes on
until it has finished, then another begins. After each kill every JSON file, every line of metrics and every checkpoint that a
command would accept must be whole.

Prints what was killed where, the verdict, and as the last line one JSON document; exit code 1 if anything differs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from compare_runs import differing_metrics, differing_tensors

from graphcap.ops import blackbox, checkpoint, status
from graphcap.ops.progress import read_metrics

FILES = ("model.safetensors", "state.safetensors")


def start(recipe: str, overrides: list[str], out: Path, name: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "graphcap", "train", recipe, *overrides, f"run.out={out}", f"run.name={name}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def kill_at_random(process: subprocess.Popen, folder: Path, *, every_s: float, minutes: float, seed: int) -> list[dict]:
    """Kill the run's rank until the time is over or the run has ended; where each kill found it."""
    draw, kills, end = random.Random(seed), [], time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        wait_s = draw.uniform(0.2, 1.8) * every_s
        try:
            process.wait(timeout=wait_s)
            break
        except subprocess.TimeoutExpired:
            pass
        for flight in blackbox.flights(folder):
            if flight.alive:
                os.kill(flight.pid, signal.SIGKILL)
                kills.append({"phase": flight.at.phase, "update": flight.at.update, "saved": flight.saved})
                print(f"killed at update {flight.at.update}, {flight.at.phase}, saved {flight.saved}", flush=True)
    return kills


def killed_at_instants(recipe: str, overrides: list[str], out: Path, *, count: int, seed: int) -> list[str]:
    """Kill `count` runs at random instants of their life; what was left half-written, if anything."""
    draw, found, number, finished = random.Random(seed), [], 0, 0
    for kill in range(count):
        folder = out / f"run-{number}"
        process = start(recipe, overrides, out, folder.name)
        try:
            code = process.wait(timeout=draw.uniform(0.5, 12.0))
            if code:
                found.append(f"{folder.name}: a start ended with exit code {code}: {process.stderr.read()[-300:]}")
            number, finished = number + 1, finished + 1
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks get SIGTERM when it is gone, most of them SIGKILL here
            for flight in blackbox.flights(folder):
                if flight.alive and draw.random() < 0.7:
                    os.kill(flight.pid, signal.SIGKILL)
            process.wait()
        while any(flight.alive for flight in blackbox.flights(folder)):
            time.sleep(0.02)
        amiss = half_written(folder) if folder.exists() else []
        newest = checkpoint.newest(folder / "checkpoints")[0]
        print(
            f"{kill + 1} of {count}: {folder.name}, newest {newest.name if newest else 'none'}; {amiss or 'whole'}", flush=True
        )
        found += amiss
    print(f"{count} starts, {finished} of them ended by themselves, {number} runs finished")
    return found


def half_written(folder: Path) -> list[str]:
    """Files that a command would read and that are not whole."""
    found = []
    for path in [path for path in folder.rglob("*.json") if ".partial" not in str(path)]:
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            found.append(f"{path} is no JSON")
    if (folder / "metrics.jsonl").exists():
        read_metrics(folder / "metrics.jsonl")
    if checkpoint.newest(folder / "checkpoints", hashes=False)[0] != checkpoint.newest(folder / "checkpoints")[0]:
        found.append(f"{folder}: a checkpoint of the right sizes has other bytes")
    status.status_of(folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--every", type=float, default=20, metavar="SECONDS", help="mean time between kills")
    parser.add_argument("--minutes", type=float, default=5, help="for how long")
    parser.add_argument("--instants", type=int, default=0, metavar="N", help="kill N runs at random instants instead")
    parser.add_argument("--seed", type=int, default=0, help="of the times")
    parser.add_argument("--out", type=Path, default=Path("runs/out/random_kills"), help="folder for both runs")
    options = parser.parse_intermixed_args()
    folders = {name: options.out / name for name in ("disturbed", "undisturbed")}
    for name, folder in folders.items():
        if folder.exists():
            parser.error(f"{folder} exists: remove it or give another --out")
    if options.instants:
        amiss = killed_at_instants(options.recipe, options.overrides, options.out, count=options.instants, seed=options.seed)
        print(json.dumps({"kills": options.instants, "half_written": amiss}))
        return 1 if amiss else 0
    begin = time.monotonic()
    process = start(options.recipe, [*options.overrides, "run.max_restarts=1000"], options.out, "disturbed")
    kills = kill_at_random(process, folders["disturbed"], every_s=options.every, minutes=options.minutes, seed=options.seed)
    errors = process.communicate()[1]
    seconds = time.monotonic() - begin
    if process.returncode:
        print(f"the disturbed run ended with exit code {process.returncode}:\n{errors}")
        return 1
    undisturbed = start(options.recipe, options.overrides, options.out, "undisturbed")
    if undisturbed.wait():
        print(f"the undisturbed run ended with exit code {undisturbed.returncode}:\n{undisturbed.stderr.read()}")
        return 1
    left, right = (checkpoint.newest(folder / "checkpoints")[0] for folder in folders.values())
    found = [f"{name}: {line}" for name in FILES for line in differing_tensors(left, right, name)[1]]
    found += [f"metrics.jsonl: {line}" for line in differing_metrics(*folders.values())[1]]
    updates = [line["update"] for line in read_metrics(folders["disturbed"] / "metrics.jsonl") if line["kind"] == "train"]
    if updates != list(range(1, len(updates) + 1)):
        found.append(f"the updates of the history are not 1 to {len(updates)}, each once")
    verdict = "; ".join(found) or "bit-equal: weights, moments and history; every update once"
    print(f"{len(kills)} kills in {seconds:.0f} s, {len(updates)} updates: {verdict}")
    print(json.dumps({"kills": kills, "seconds": seconds, "updates": len(updates), "differences": found}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
