"""`graphcap train --dry-run`: what a run would be, and what it would need, without a run's folder or an update.

The tokens of large texts are kept for the run that follows.

Calls: cli.py.
"""

import dataclasses
import itertools
import sys
import tempfile
import time
from pathlib import Path

import torch

from graphcap import config as recipes
from graphcap.build import TrainingRun, build
from graphcap.config import Recipe
from graphcap.data.conversations import Document
from graphcap.data.sample import PLAIN_MARKS, TERMINAL_MARKS, supervised_text
from graphcap.ops import blackbox, checkpoint
from graphcap.train import tensors_of

WRITTEN = ("config.toml", "shapes.json", "env.json", "metrics.jsonl", "run.log", "rank-0/", "checkpoints/", "result.json")


def preview(recipe: Recipe, *, show: int, say) -> None:
    """Load, plan and allocate as a run does, and say what came of it. show: so many documents with what is supervised.

    Raises: GraphcapError for everything that would end the run before its first update.
    """
    say("recipe, with every default:\n")
    say(recipes.to_toml(recipe))
    with tempfile.TemporaryDirectory(prefix="graphcap-") as folder:  # a flight record is never of this run's folder
        recorder = blackbox.Recorder(Path(folder), rank=0)
        if recipe.features.path and recipe.features.missing == "compute":
            say(f"features  what {recipe.features.path} lacks would be computed first; here the target is loaded instead")
            recipe = dataclasses.replace(recipe, features=dataclasses.replace(recipe.features, path=""))
        run = build(recipe, continued=None, say=say, recorder=recorder)
        for line in (*_memory(run), *_disk(run), *_time(run)):
            say(line)
    for document in itertools.islice(run.documents.values(), show):
        say(f"\nsupervised in {document.place}, between the marks:\n{_marked(document, run.tokenizer)}\n")
    say(f"writes    {recipe.folder}/: {', '.join(WRITTEN)}")
    say("nothing was trained, and no run's folder was written")


def _marked(document: Document, tokenizer) -> str:
    return supervised_text(document, tokenizer, marks=TERMINAL_MARKS if sys.stdout.isatty() else PLAIN_MARKS)


def _memory(run: TrainingRun) -> list[str]:
    """What is allocated for the whole run, and what it needs in all, as counted for a GPU."""
    state = run.engine.step.state
    held = {
        "target": sum(parameter.nbytes for parameter in run.target.model.parameters()),
        "drafter and optimizer": state.weights.nbytes + state.sums.nbytes + sum(t.nbytes for t in state.tensors().values()),
        "slots": sum(slot.flat.nbytes for slot in run.engine.slots.values()),
    }
    sizes = ", ".join(f"{name} {_size(size)}" for name, size in held.items())
    device = run.target.head_VD.device
    free = f"; {_size(torch.cuda.mem_get_info(device)[0])} are left" if device.type == "cuda" else ""
    needed = _size(run.memory.needed_bytes(*run.shapes.buckets))
    return [f"memory    {sizes} on {device.type}; with a row's activations and logits {needed} on a GPU{free}"]


def _disk(run: TrainingRun) -> list[str]:
    one = checkpoint.needed_bytes(tensors_of(run))
    most = run.recipe.checkpoint.keep + 2
    checkpoint.check_room(run.folder, most * one)
    return [f"disk      {most} checkpoints of {_size(one)} at most; there is room for them"]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _time(run: TrainingRun) -> list[str]:
    """On a CPU one update is tried and forgotten; on a GPU that would mean to capture every bucket."""
    updates = run.schedule.num_updates
    if run.target.head_VD.device.type == "cuda":
        return [f"time      {updates:,} updates; how long one takes is known once it is captured"]
    engine, bucket = run.engine, run.shapes.buckets[0]
    engine.fill(bucket, engine.step.example(bucket))
    engine.micro_step(bucket)  # the first one allocates
    begin = time.perf_counter()
    engine.micro_step(bucket)
    row_s = time.perf_counter() - begin
    rows = run.schedule.rows_per_update
    row = f"{row_s:.2f} s for a row of {bucket.name} here"
    minutes = updates * rows * row_s / 60
    return [
        f"time      {updates:,} updates of {rows} rows, {row}: {minutes:.0f} minutes at most, evaluation and decoding apart"
    ]
