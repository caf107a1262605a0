"""`graphcap train`: start reading here. `train` is the whole run, `_loop` the training loop.

The loop asks the schedule for an update, fills a slot with each of its rows, launches a micro step on it, and ends the
update. What a run is made of is made in build.py; what it leaves behind is its folder (ops/runfolder.py).
"""

import time
from pathlib import Path

import numpy as np
import torch

from graphcap.build import TrainingRun, build, make_drafter
from graphcap.config import Recipe
from graphcap.data.loader import arrange
from graphcap.data.packing import Update
from graphcap.engine.evaluation import Evaluation, fitting
from graphcap.engine.metrics import Fetch
from graphcap.engine.step import RING
from graphcap.errors import CheckpointError
from graphcap.eval import as_decoded, load_prompts, measure, stop_ids_of
from graphcap.ops import checkpoint, report, runfolder
from graphcap.ops.export import CONFIG, WEIGHTS, config_document, read_drafter, weight_tensors
from graphcap.ops.progress import MetricsLog, Progress, quiet_libraries
from graphcap.versions import environment

STATE = "state.safetensors"
POSITION = "state.json"


def train(recipe: Recipe, *, eager: bool = False, say=print) -> int:
    """Train a drafter, decode with it and print the table. Continues from the newest complete checkpoint, if there is one.

    eager: launch the same step from Python instead of replaying graphs. say: called with each line for people.
    Returns the exit code. Raises: GraphcapError for what the user must mend.
    """
    newest, passed_over = checkpoint.newest(recipe.folder / "checkpoints")
    for line in passed_over:
        say(f"not used  {line}")
    run = build(recipe, threads=checkpoint.load_document(newest, POSITION)["threads"] if newest else None, say=say)
    if newest is None:
        checkpoint.check_room(recipe.folder, (recipe.checkpoint.keep + 2) * checkpoint.needed_bytes(_tensors(run)))
    run.engine.prepare(eager=eager, say=say)
    if newest is not None:
        resume(run, newest, say)
    runfolder.create(recipe, shapes_json=run.shapes.to_json(), environment=environment(run.settings))
    quiet_libraries(recipe.folder / "libraries.log")
    try:
        _loop(run, say=say)
    finally:
        run.engine.close()
    result = conclude(run, say=say)
    say(f"\n{report.table(result)}\n")
    say(f"decode with other settings: graphcap eval {recipe.folder} --prompts FILE.jsonl --max-new-tokens 256")
    return 0


def _loop(run: TrainingRun, *, say) -> None:
    """The training loop: fill, micro step, update, until the schedule ends."""
    recipe, engine, schedule = run.recipe, run.engine, run.schedule
    evaluation = Evaluation(fitting(run.held_out, run.shapes.buckets, count=recipe.eval.documents), run.shapes.buckets)
    record = Record(run)
    say(f"training  {schedule.num_updates - run.position} updates")
    try:
        for update in schedule.updates(run.position):
            for row in update.rows_of(rank=0):
                engine.fill(row.bucket, _arrays(run, row, update.epoch))
                engine.micro_step(row.bucket)
            engine.update()
            run.position = update.index + 1
            record.after(update)
            last = run.position == schedule.num_updates
            if run.position % recipe.eval.every == 0 or last:
                record.evaluated(evaluation.run(engine))
            if run.position % recipe.checkpoint.every == 0 or last:
                record.save()
    finally:
        record.close()


def _arrays(run: TrainingRun, row, epoch: int) -> dict[str, np.ndarray]:
    density = run.recipe.shapes.anchor_density
    return arrange(row, run.documents, seed=run.recipe.run.seed, epoch=epoch, density=density).arrays()


class Record:
    """What the loop leaves behind: metrics lines, the bar, checkpoints. Metrics wait on the device until fetched."""

    def __init__(self, run: TrainingRun) -> None:
        self.run, self.pending = run, []
        self.metrics = MetricsLog(run.folder / "metrics.jsonl")
        self.metrics.cut(run.position)
        self.every = min(run.recipe.progress.every, RING)
        self.progress = Progress(run.schedule.num_updates, start=run.position)
        self.fetched: tuple[list[Update], Fetch] | None = None
        self.walked: tuple[int, float] | None = None
        self.begin = self.last_line = time.monotonic()

    def after(self, update: Update) -> None:
        """Note an update. Every `progress.every` of them metrics set out for the host; their lines follow on arrival."""
        self.pending.append(update)
        if self.fetched is not None and self.fetched[1].ready():
            self._write()
        if len(self.pending) >= self.every:
            self._fetch()

    def flush(self) -> None:
        """Write a line for every update made so far."""
        self._write()
        self._fetch()
        self._write()

    def _fetch(self) -> None:
        self._write()
        if self.pending:
            first, count = self.pending[0].index, len(self.pending)
            self.fetched, self.pending = (self.pending, Fetch(self.run.engine.step.ring, first, count)), []

    def _write(self) -> None:
        if self.fetched is None:
            return
        (updates, fetch), self.fetched = self.fetched, None
        now, names = time.monotonic(), self.run.engine.step.metric_names
        counts = [self._counts(update) for update in updates]
        clock = {
            "time_s": now - self.begin,
            "tokens_per_s": sum(count["tokens"] for count in counts) / max(now - self.last_line, 1e-9),
        }
        for update, row, count in zip(updates, fetch.rows(), counts, strict=True):
            line = {"kind": "train", "update": update.index + 1, "epoch": update.epoch, **count, **_named(names, row), **clock}
            self.metrics.append(line)
            self.progress.update(line)
        self.last_line = now

    def evaluated(self, result: dict) -> None:
        """Write and say an evaluation's result."""
        self.flush()
        update = self.run.position
        self.walked = (update, result["walked_estimate"])
        self.metrics.append({"kind": "eval", "update": update, **result, "eval_s": time.monotonic() - self.last_line})
        self.progress.say(
            f"update {update:>6}  held-out loss {result['loss']:.3f}  block_match {result['block_match']:.2f}  "
            f"walked estimate {result['walked_estimate']:.2f}"
        )
        self.last_line = time.monotonic()

    def save(self) -> None:
        """Save a checkpoint of the current update; its score is the walked estimate if one was made at this update."""
        self.flush()
        self.metrics.sync()
        score = self.walked[1] if self.walked and self.walked[0] == self.run.position else None
        save(self.run, score)
        self.last_line = time.monotonic()

    def close(self) -> None:
        self.progress.close()
        self.metrics.close()

    def _counts(self, update: Update) -> dict[str, int]:
        documents = [self.run.documents[number] for row in update.rows for number in row.document_ids]
        return {
            "rows": len(update.rows),
            "tokens": sum(len(document.token_ids) for document in documents),
            "supervised_tokens": int(sum(document.loss_mask.sum() for document in documents)),
        }


def _named(names: list[str], row: list[float]) -> dict:
    """A row of the metrics ring under the names of metrics.jsonl."""
    values = dict(zip(names, row, strict=True))
    shares = [values.pop(name) for name in names if name.startswith("match_share_")]
    whole = {name: int(values[name]) for name in ("empty", "skipped", "anchors")}
    return {**values, **whole, "match_share": shares}


def _tensors(run: TrainingRun) -> dict[str, dict[str, torch.Tensor]]:
    return {WEIGHTS: weight_tensors(run.drafter), STATE: run.engine.step.state.tensors()}


def save(run: TrainingRun, score: float | None) -> Path:
    """Write a checkpoint: weights ready to export, optimizer state, and the position in the schedule."""
    state = {
        "update": run.position,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "fingerprint": run.shapes.fingerprint,
        "schedule": _epoch_hashes(run),
    }
    dtype = run.target.head_VD.dtype
    return checkpoint.save(
        run.folder / "checkpoints",
        run.position,
        tensors=_tensors(run),
        score=score,
        keep=run.recipe.checkpoint.keep,
        documents={CONFIG: config_document(run.drafter.config, dtype), POSITION: state},
    )


def _epoch_hashes(run: TrainingRun) -> list[str]:
    """The schedule's hash of every epoch begun so far; compared at resume."""
    epochs = next((update.epoch + 1 for update in run.schedule.updates(run.position)), run.recipe.optimizer.epochs)
    return [run.schedule.epoch_hash(epoch) for epoch in range(epochs)]


def resume(run: TrainingRun, folder: Path, say) -> None:
    """Continue from a complete checkpoint: state is copied in place, the position is the next update.

    Raises: CheckpointError if the checkpoint was made from other data or another schedule.
    """
    state = checkpoint.load_document(folder, POSITION)
    run.position = state["update"]
    if state["fingerprint"] != run.shapes.fingerprint or state["schedule"] != _epoch_hashes(run)[: len(state["schedule"])]:
        raise CheckpointError(
            "checkpoint",
            folder,
            expected="the data and schedule it was made with",
            got="other data or another schedule",
            fix="put the data files back, or start a new run with run.name=OTHER",
        )
    run.engine.step.state.load(checkpoint.load_tensors(folder, STATE))
    run.engine.check_addresses()
    say(f"resume    {folder.name}: {run.position} of {run.schedule.num_updates} updates are done")


def conclude(run: TrainingRun, *, say) -> dict:
    """Decode the held-out prompts with the best checkpoint and write result.json."""
    recipe, folder = run.recipe, run.folder
    weights = checkpoint.best(folder / "checkpoints")
    newest, _ = checkpoint.newest(folder / "checkpoints")
    device, dtype = run.target.head_VD.device, as_decoded(run.target, recipe.eval.dtype)
    drafter = read_drafter(weights, dtype=dtype, device=device)
    untrained = make_drafter(recipe, drafter.config).to(device=device, dtype=dtype)
    prompts = load_prompts(
        recipe.data.held_out,
        run.tokenizer,
        count=recipe.eval.prompts,
        max_new_tokens=recipe.eval.max_new_tokens,
        stop_ids=stop_ids_of(run.target.model, run.tokenizer),
    )
    result = measure(run.target, drafter, prompts, passes=recipe.eval.passes, before=untrained, say=say)
    result |= {
        "walked_estimate": checkpoint.read_manifest(weights)["score"],
        "weights": str(weights),
        "checkpoint": str(newest),
        "schedule": runfolder.schedule_keys(recipe),
    }
    checkpoint.write_json(folder / runfolder.RESULT, result)
    return result
