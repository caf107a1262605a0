"""`graphcap train`: start reading here. `train` is the whole run, `_loop` the training loop.

The loop asks the schedule for an update, fills a slot with each of its rows, launches a micro step on it, and ends the
update. What a run is made of is made in build.py; what it leaves behind is its folder (ops/runfolder.py).
"""

import dataclasses
import itertools
import math
import shlex
import time
from pathlib import Path

import torch

from graphcap.build import TrainingRun, build, make_drafter
from graphcap.config import Recipe
from graphcap.data.packing import Update
from graphcap.engine.metrics import Fetch
from graphcap.engine.step import RING
from graphcap.errors import CheckpointError, TrainingError, closing
from graphcap.eval import Prompts, at_dtype, measure, stop_ids_of
from graphcap.extract import Caller, extract
from graphcap.model.loading import dtype_name
from graphcap.model.sampling import Sampling
from graphcap.ops import checkpoint, report, runfolder
from graphcap.ops.export import CONFIG, WEIGHTS, config_document, read_drafter, weight_tensors
from graphcap.ops.progress import MetricsLog, Progress, quiet_libraries, read_metrics
from graphcap.ops.rank import FEATURES, Rank
from graphcap.ops.saver import Saver
from graphcap.versions import environment

STATE = "state.safetensors"
POSITION = "state.json"
FAILED_SAVES = 3  # in a row that end a run: for so long its checkpoints grow old


def train(recipe: Recipe, *, rank: Rank, eager: bool = False, say=print) -> int:
    """Train a drafter, decode with it and print the table. Continues from the newest complete checkpoint, if there is one.

    rank: this process's place in the run, with its flight recorder. eager: launch the same step from Python instead of
    replaying graphs. say: called with each line for people.
    Returns the exit code: 0 finished, 3 stopped on request. Raises: GraphcapError for what the user must mend.
    """
    recorder = rank.recorder
    newest, passed_over = checkpoint.newest(recipe.folder / "checkpoints")
    for line in passed_over:
        say(f"not used  {line}")
    damaged = [line for line in passed_over if not line.startswith(".")]  # a save that never finished is no loss
    if newest is None and damaged:
        raise CheckpointError(
            "checkpoints",
            recipe.folder / "checkpoints",
            expected="a complete one to go on from",
            got=damaged[0],
            cause="a start from the beginning would overwrite what is left of them",
            fix="put back a copy, or move the folder away to begin anew",
        )
    continued = checkpoint.load_document(newest, POSITION) if newest else None
    if continued is not None:
        recorder.saved(continued["update"])
    if recipe.features.path and recipe.features.missing == "compute":
        recorder.note("extract")
        caller = Caller(say, _extracting(recorder), rank.stop_asked, elsewhere="features.path=FOLDER")
        if not extract(recipe, recipe.features.path, continued=continued, eager=eager, caller=caller):
            say("stopped   before training; the same command goes on")
            recorder.note("stopped")
            return 3
    run = build(recipe, continued=continued, say=say, recorder=recorder)
    if continued is not None:
        check_position(run, newest, continued)
    runfolder.create(
        recipe, shapes_json=run.shapes.to_json(), environment=environment(run.settings) | {"data_revisions": run.revisions}
    )
    quiet_libraries(recipe.folder / "libraries.log")
    with closing(run.engine):
        complete = _train(run, rank, newest, continued, eager=eager, say=say)
    if not complete:
        say(f"stopped   after update {run.position} of {run.schedule.num_updates}; the same command goes on")
        recorder.note("stopped")
        return 3
    try:
        result = conclude(run, eager=eager, say=say, note=recorder.note)
    except torch.OutOfMemoryError:
        if run.reader.store is None:
            raise
        say("the target does not fit in this device's memory, so nothing is decoded; the checkpoints are complete")
        say(f"on one that holds it: graphcap eval {shlex.quote(str(recipe.folder))}")
        recorder.note("finished")
        return 0
    say(f"\n{report.table(result, recipe.folder)}\n")
    say(
        f"decode with other settings: graphcap eval {shlex.quote(str(recipe.folder))} --prompts FILE.jsonl --max-new-tokens 256"
    )
    recorder.note("finished")
    return 0


def _extracting(recorder):
    """For an engine that computes features before the run begins: two phases, by whether there are features to keep."""
    phases = {"step": FEATURES, "replay": FEATURES}
    return lambda phase, *, bucket, launch=0: recorder.note(phases.get(phase, "extract"), bucket=bucket)


def _train(run: TrainingRun, rank: Rank, newest: Path | None, continued: dict | None, *, eager: bool, say) -> bool:
    """Warm up and capture, take up the state, run the loop, and say what the engine did. False: stopped on request."""
    recipe, recorder = run.recipe, rank.recorder
    run.engine.prepare(eager=eager, say=say)
    if continued is not None:
        recorder.note("load state")
        resume(run, newest, continued, say)
    with Saver(run.folder / "checkpoints", keep=recipe.checkpoint.keep, on_saved=recorder.saved) as saver:
        recorder.note("reserve")
        saver.reserve(tensors_of(run))
        rank.hurries(True)
        complete = _loop(run, rank, saver, say=say)
        rank.hurries(False)
        recorder.note("save")
    for line in run.engine.summary():
        say(f"engine    {line}")
    return complete


def _loop(run: TrainingRun, rank: Rank, saver: Saver, *, say) -> bool:
    """The training loop: fill, micro step, update, until the schedule ends. False: stopped on request, and saved."""
    recipe, engine, schedule, recorder = run.recipe, run.engine, run.schedule, rank.recorder
    say(f"training  {schedule.num_updates - run.position} updates")
    record = Record(run, rank, saver, say)
    updates, ahead = itertools.tee(schedule.updates(run.position))
    rows = run.reader.rows((update.epoch, row) for update in ahead for row in update.rows_of(rank=0))
    with closing(record), closing(rows):
        if record.owes_evaluation() and not record.evaluate():
            return False
        for update in updates:
            recorder.note("fill", update=update.index + 1)
            for row in update.rows_of(rank=0):
                engine.fill(row.bucket, next(rows))
                engine.micro_step(row.bucket)
            engine.update()
            run.position = update.index + 1
            recorder.finished(run.position)
            record.after(update)
            last = run.position == schedule.num_updates
            if (run.position % recipe.eval.every == 0 or last) and not record.evaluate():
                record.save(final=True)
                return False
            stop = rank.stop_asked() and not last
            if run.position % recipe.checkpoint.every == 0 or last or stop:
                record.save(final=last or stop)
            if stop:
                return False
        return True


class Record:
    """What the loop leaves behind: metrics lines, the bar, checkpoints. Metrics wait on the device until fetched."""

    def __init__(self, run: TrainingRun, rank: Rank, saver: Saver, say) -> None:
        self.run, self.rank, self.recorder, self.saver, self.pending = run, rank, rank.recorder, saver, []
        self.metrics = MetricsLog(run.folder / "metrics.jsonl")
        self.metrics.cut(run.position)
        found = sum(line["kind"] == "train" for line in read_metrics(run.folder / "metrics.jsonl"))
        if found != run.position:
            say(f"metrics   {found} of the {run.position} lines before this checkpoint are left; the others were lost")
        self.every = min(run.recipe.progress.every, RING)
        total, start = run.schedule.num_updates, run.position
        self.progress = Progress(total, start=start) if rank.draws else None
        self.say, self.bar = (self.progress.say if rank.draws else say), {"total": total, "start": start}
        self.skipped_in_a_row, self.diverged = 0, None
        self.failed_saves, self.last_saved = 0, saver.last_saved
        self.fetched: tuple[list[Update], Fetch, float] | None = None  # updates, their metrics, seconds they took
        self.walked: tuple[int, float] | None = None
        self.begin = self.last_fetch = time.monotonic()

    def after(self, update: Update) -> None:
        """Note an update. Every `progress.every` of them metrics set out for the host; their lines follow on arrival.

        Raises: the error of the third save in a row that failed; TrainingError if gradients have not been finite for long.
        """
        self._tolerate(self.saver.check)
        self.pending.append(update)
        if self.fetched is not None and self.fetched[1].ready():
            self._write()
        if self.diverged is not None:
            self.flush()
        if len(self.pending) >= self.every:
            self._fetch()

    def flush(self) -> None:
        """Write a line for every update made so far. Raises: TrainingError if gradients have not been finite for long."""
        self._write()
        self._fetch()
        self._write()
        if self.diverged is not None:
            error, self.diverged = self.diverged, None
            self._save(final=False)  # the state before these updates
            raise error

    def _fetch(self) -> None:
        self._write()
        if self.pending:
            first, count, now = self.pending[0].index, len(self.pending), time.monotonic()
            self.fetched = self.pending, Fetch(self.run.engine.step.ring, first, count), now - self.last_fetch
            self.pending, self.last_fetch = [], now

    def _write(self) -> None:
        if self.fetched is None:
            return
        (updates, fetch, took_s), self.fetched = self.fetched, None
        names = self.run.engine.step.metric_names
        counts = [self._counts(update) for update in updates]
        clock = {
            "time_s": time.monotonic() - self.begin,
            "tokens_per_s": sum(count["tokens"] for count in counts) / max(took_s, 1e-9),
        }
        for update, row, count in zip(updates, fetch.rows(), counts, strict=True):
            line = {"kind": "train", "update": update.index + 1, "epoch": update.epoch, **count, **_named(names, row), **clock}
            self._append(line)
            self._check_finite(line)
        shown = {**line, **self.bar}
        self.recorder.show(shown)
        if self.progress is not None:
            self.progress.update(shown)

    def owes_evaluation(self) -> bool:
        """Whether a stop came before the evaluation that belongs to the update the run goes on from."""
        position, recipe = self.run.position, self.run.recipe
        if not position or position % recipe.eval.every:
            return False
        lines = read_metrics(self.run.folder / "metrics.jsonl")
        return not any(line["kind"] == "eval" and line["update"] == position for line in lines)

    def evaluate(self) -> bool:
        """Evaluate on the held-out documents; write and say the result. False: a stop was asked for before it was complete."""
        self.recorder.note("eval")
        self.flush()
        begin, update = time.monotonic(), self.run.position
        complete = self.run.reader.with_features
        result = self.run.evaluation.run(self.run.engine, asked_to_stop=self.rank.stop_asked, complete=complete)
        if result is None:
            return False
        self.walked = (update, result["walked_estimate"])
        self._append({"kind": "eval", "update": update, **result, "eval_s": time.monotonic() - begin})
        self.say(
            f"update {update:>6}  held-out loss {result['loss']:.3f}  block_match {result['block_match']:.2f}  "
            f"walked estimate {result['walked_estimate']:.2f}"
        )
        self.last_fetch = time.monotonic()
        return True

    def save(self, *, final: bool) -> None:
        """Begin a checkpoint of the current update; its score is the walked estimate if one was made at this update.

        final: no later one could make up for it. Raises: as `after`.
        """
        self.flush()
        self._save(final=final)

    def _append(self, line: dict) -> None:
        before = self.metrics.refusal
        self.metrics.append(line)
        if self.metrics.refusal and not before:
            self.say(f"metrics   lines wait in memory until there is room: {self.metrics.refusal}. Training goes on.")

    def _save(self, *, final: bool) -> None:
        score = self.walked[1] if self.walked and self.walked[0] == self.run.position else None
        self.rank.hurries(False)  # a save before this one may still be under way, on a slow disk
        self.recorder.note("save")
        self._tolerate(self.saver.wait)
        if final:
            self.metrics.sync()
        if final or self._tolerate(self.metrics.sync):  # a checkpoint is never ahead of its lines
            self.saver.begin(self.run.position, tensors=tensors_of(self.run), documents=_documents(self.run), score=score)
        self.rank.hurries(True)
        self.run.engine.pause()
        self.last_fetch = time.monotonic()

    def _tolerate(self, tells) -> bool:
        """Call `tells`, which raises the error of a save: training goes on without it, but not for long. False: it did."""
        if self.saver.last_saved != self.last_saved:
            self.failed_saves, self.last_saved = 0, self.saver.last_saved
        try:
            tells()
        except CheckpointError as error:
            self.failed_saves += 1
            if self.failed_saves == FAILED_SAVES:
                raise
            self.say(f"not saved {error} Training goes on; {self.failed_saves} in a row, {FAILED_SAVES} end it.")
            return False
        return True

    def close(self) -> None:
        if self.progress is not None:
            self.progress.close()
        self.metrics.close()

    def _check_finite(self, line: dict) -> None:
        """Note, for `flush`, that optimizer.max_skipped updates in a row had gradients that were not finite."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if line["skipped"] else 0
        if self.skipped_in_a_row < self.run.recipe.optimizer.max_skipped:
            return
        state = self.run.engine.step.state
        bad = [name for name, norm in zip(state.names, state.norms_P.tolist(), strict=True) if not math.isfinite(norm)]
        self.diverged = TrainingError(
            "gradients of update",
            line["update"],
            expected="finite numbers",
            got=f"nan or inf, as in the {self.skipped_in_a_row - 1} updates before",
            cause=f"in {len(bad)} of {len(state.names)} tensors, first {', '.join(bad[:3]) or 'none of the last update'}; "
            "parameters are as they were before these updates",
            fix="start a new run from the last checkpoint (drafter.init) with a lower optimizer.learning_rate, look for "
            "features that are not finite in the target's dtype, or raise optimizer.max_skipped",
        )

    def _counts(self, update: Update) -> dict[str, int]:
        num_tokens, num_supervised = self.run.documents.num_tokens([n for row in update.rows for n in row.document_ids])
        return {
            "rows": len(update.rows),
            "bucket": update.rows[-1].bucket.name,
            "tokens": num_tokens,
            "supervised_tokens": num_supervised,
        }


def _named(names: list[str], row: list[float]) -> dict:
    """A row of the metrics ring under the names of metrics.jsonl."""
    values = dict(zip(names, row, strict=True))
    shares = [values.pop(name) for name in names if name.startswith("match_share_")]
    whole = {name: int(values[name]) for name in ("empty", "skipped", "anchors")}
    return {**values, **whole, "match_share": shares}


def tensors_of(run: TrainingRun) -> dict[str, dict[str, torch.Tensor]]:
    """Everything a checkpoint holds, by file and name; the tensors themselves."""
    return {WEIGHTS: weight_tensors(run.drafter), STATE: run.engine.step.state.tensors()}


def _documents(run: TrainingRun) -> dict[str, dict]:
    """What a checkpoint holds beside tensors: the drafter's config, ready to export, and the position in the schedule."""
    head = run.target.head_VD
    epochs_begun = next(run.schedule.updates(run.position - 1)).epoch + 1
    state = {
        "update": run.position,
        "threads": torch.get_num_threads(),
        "device": head.device.type,
        "dtype": dtype_name(head.dtype),
        "target": dataclasses.asdict(run.identity),
        "torch": torch.__version__,
        "fingerprint": run.shapes.fingerprint,
        "schedule": [run.schedule.epoch_hash(epoch) for epoch in range(epochs_begun)],
        "num_updates": run.schedule.num_updates,
    }
    return {CONFIG: config_document(run.drafter.config, head.dtype, run.identity), POSITION: state}


def check_position(run: TrainingRun, folder: Path, continued: dict) -> None:
    """The data and the schedule are those of the checkpoint, for every epoch it has begun.

    Raises: CheckpointError if the checkpoint was made from other data or another schedule.
    """
    hashes = [run.schedule.epoch_hash(epoch) for epoch in range(len(continued["schedule"]))]
    if continued["fingerprint"] != run.shapes.fingerprint or continued["schedule"] != hashes:
        raise CheckpointError(
            "checkpoint",
            folder,
            expected="the data and schedule it was made with",
            got="other data or another schedule",
            fix="put the data files back, or start a new run with run.name=OTHER",
        )


def resume(run: TrainingRun, folder: Path, continued: dict, say) -> None:
    """Continue from a complete checkpoint: state is copied in place, the position is the next update."""
    run.position = continued["update"]
    run.recorder.saved(run.position)
    run.engine.step.state.load(checkpoint.load_tensors(folder, STATE))
    run.engine.check_addresses()
    say(f"resume    {folder.name}: {run.position} of {run.schedule.num_updates} updates are done")
    if continued["num_updates"] != run.schedule.num_updates:
        say(
            f"schedule  grown from {continued['num_updates']} to {run.schedule.num_updates} updates: "
            "the learning rate goes on along the longer curve"
        )


def conclude(run: TrainingRun, *, eager: bool, say, note) -> dict:
    """Decode the held-out prompts with the best checkpoint and write result.json. eager: without graphs, too."""
    recipe, folder = run.recipe, run.folder
    newest, _ = checkpoint.newest(folder / "checkpoints")
    weights = checkpoint.best(folder / "checkpoints") or newest
    if run.reader.store is not None:
        say("loading the whole target, which training did without, to decode with it")
    target = at_dtype(run.target, recipe)
    device, dtype = target.head_VD.device, target.head_VD.dtype
    drafter = read_drafter(weights, dtype=dtype, device=device)
    untrained = make_drafter(recipe, drafter.config).to(device=device, dtype=dtype)
    prompts = Prompts(
        token_ids=run.prompts,
        stop_ids=stop_ids_of(target.model, run.tokenizer),
        max_new_tokens=recipe.eval.max_new_tokens,
        passes=recipe.eval.passes,
        sampling=Sampling(temperature=recipe.eval.temperature, rule=recipe.eval.rule),
        seed=recipe.run.seed,
        eager=eager,
    )
    result = measure(target, drafter, prompts, before=untrained, say=say, note=note).result
    result |= {
        "walked_estimate": checkpoint.read_manifest(weights)["score"],
        "weights": f"checkpoints/{weights.name}",
        "checkpoint": f"checkpoints/{newest.name}",
        "schedule": runfolder.schedule_keys(recipe),
    }
    checkpoint.write_json(folder / runfolder.RESULT, result)
    return result
