"""`graphcap shapes`: the buckets that a run over some documents would capture, how full their rows are, what they cost.

Plans as training plans, so the file it writes is what `shapes.plan = "auto"` would find. With `measure` the costs are those
of this machine: a few micro steps are captured and timed first. Trains nothing.

Called by cli.py.
"""

import contextlib
import gc
import json
import math
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from graphcap.build import configure_drafter, make_drafter, make_step
from graphcap.config import Recipe
from graphcap.data.conversations import Documents
from graphcap.data.costs import PS_PER_MS, PS_PER_S, Costs, Fit
from graphcap.data.forecast import Forecast, forecast
from graphcap.data.packing import Schedule, choose_anchors
from graphcap.data.planner import TILE_TOKENS, Bucket, Shapes
from graphcap.data.sample import PLAIN_MARKS, supervised_text
from graphcap.engine import Engine
from graphcap.engine.guard import torchs_cache_folder, use_deterministic_math
from graphcap.engine.memory import Sizes, gib
from graphcap.engine.timing import NUM_DOCUMENTS, median_ms, samples
from graphcap.errors import ConfigError, DataError, GraphcapError
from graphcap.layout import ONE_IS_BEST, Frame, frame_of, load_data, memory_of, one_is_best, room_bytes, schedule_of, shapes_of
from graphcap.model.ends import load_skeleton
from graphcap.model.loading import device_and_dtype, load_model, load_tokenizer
from graphcap.model.target import Target
from graphcap.ops import caches, checkpoint, drawing
from graphcap.room import Room
from graphcap.versions import made_by

SAMPLED_DOCUMENTS = 512  # of which the share of supervised tokens that blocks cover is counted
TIMED_STEPS = {"cuda": 10, "cpu": 3}
_TRIED_BYTES = 1 << 16  # a shapes file has less; a picture about as much


@dataclass(frozen=True)
class Wanted:
    """What the verb was asked for besides a plan. out, picture: files to write, or "". show: documents to print."""

    out: str = ""
    picture: str = ""
    measure: bool = False
    show: int = 0
    as_json: bool = False


def shapes(recipe: Recipe, wanted: Wanted, say) -> None:
    """Plan, say what came of it, and write what was asked for. say: called with each line for people.

    Raises: GraphcapError for what the user must mend; nothing is written then.
    """
    tell = _silent if wanted.as_json else say
    device, dtype = device_and_dtype(recipe.run.device, recipe.target.dtype)
    if wanted.out:
        _check_out(wanted.out)
    if wanted.picture:
        drawing.check_picture(wanted.picture)
        _check_place(f"--picture {wanted.picture}", wanted.picture)
    where = {"revision": recipe.target.revision, "trust_remote_code": recipe.target.trust_remote_code}
    tokenizer, skeleton = load_tokenizer(recipe.target.path, **where), load_skeleton(recipe.target.path, **where)
    config, _ = configure_drafter(recipe, skeleton, tokenizer)
    loaded = load_data(recipe, tokenizer, config, tell, note=_silent, names=("train",))["train"]
    frame = frame_of(skeleton, config)
    sizes = memory_of(recipe, skeleton, config, dtype, stored=bool(recipe.features.path))
    planned = shapes_of(recipe, loaded.documents, frame)
    if wanted.measure:
        frame = replace(frame, costs=measured_costs(recipe, frame, planned.buckets[0], device=device, dtype=dtype, say=tell))
        planned = shapes_of(recipe, loaded.documents, frame)
    schedule = schedule_of(recipe, loaded.documents, planned)
    Room(recipe, loaded.documents, frame, sizes, room_bytes(recipe, device)).check(planned, fixed=False)
    told = report(recipe, loaded, sizes, schedule, measured=wanted.measure)
    if wanted.as_json:
        say(json.dumps(told | {"shapes": json.loads(planned.to_json())}))
    else:
        for line in (*lines(told), "", *drawn(loaded, told)):
            say(line)
    for document in loaded.documents[: wanted.show]:
        text = supervised_text(document, tokenizer, marks=PLAIN_MARKS)
        tell(f"\nsupervised in {document.place}, between the marks:\n{text}\n")
    if wanted.out:
        with _writing(wanted.out):
            checkpoint.write_text(wanted.out, planned.to_json())
        tell(f'written   {wanted.out}; a recipe of the same data and settings uses it with shapes.plan = "{wanted.out}"')
    if wanted.picture:
        with _writing(wanted.picture):
            drawing.picture(wanted.picture, loaded.documents.lengths, marks(told))


def measured_costs(recipe: Recipe, frame: Frame, largest: Bucket, *, device, dtype, say) -> Costs:
    """The costs of micro steps on this machine, fitted to a few of them, target included. largest: of a plan without them."""
    use_deterministic_math()
    if device.type == "cuda":
        caches.use(made_by(), say, unless=torchs_cache_folder())
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    where = {"revision": recipe.target.revision, "trust_remote_code": recipe.target.trust_remote_code}
    target = Target(load_model(recipe.target.path, dtype=dtype, device=device, **where), frame.config.target_layer_ids)
    step = make_step(recipe, target, make_drafter(recipe, frame.config), num_updates=1)
    engine = Engine(step, trial_buckets(largest, frame.config.block_size))
    engine.prepare(eager=False, say=say)
    times = TIMED_STEPS[device.type]
    say(f"measuring {len(engine.slots)} buckets, {times} micro steps of each of {len(NUM_DOCUMENTS)} kinds of rows")
    found = samples(engine, times=times)
    update_ms = median_ms(engine.update, times, device)
    start = engine.start_up
    bucket_s = (start.total_s - max(start.warm_up_s.values(), default=0.0)) / len(engine.slots)  # one builds kernels for all
    fit = Fit.of(found, block_size=frame.config.block_size)
    costs = fit.costs(anchors_per_token=largest.num_anchors / largest.length, update_ms=update_ms, bucket_s=bucket_s)
    engine.close()
    for one in found:
        error = fit.ms(one) / one.ms - 1
        say(f"measured  {one.length}/{one.num_anchors}: {one.ms:.2f} ms a micro step, {error:+.1%} as fitted")
    del engine, step, target
    gc.collect()
    return costs


def trial_buckets(largest: Bucket, block_size: int) -> tuple[Bucket, ...]:
    """Buckets that tell tokens, draft tokens and the constant apart: the largest, half its slots, and its halves to a tile."""
    unit = TILE_TOKENS // math.gcd(TILE_TOKENS, block_size)
    bucket, found = largest, {replace(largest, num_anchors=_half(largest.num_anchors, unit)), largest}
    while bucket.length > TILE_TOKENS:
        bucket = Bucket(_half(bucket.length, TILE_TOKENS), _half(bucket.num_anchors, unit))
        found.add(bucket)
    return tuple(sorted(found, reverse=True))


def _half(number: int, unit: int) -> int:
    return int(max(unit, -(-number // 2 // unit) * unit))


def report(recipe: Recipe, loaded: Documents, sizes: Sizes, schedule: Schedule, *, measured: bool) -> dict:
    """What a plan makes of the documents in its first epoch: numbers by name, times in seconds, memory in bytes."""
    documents, planned = loaded.documents, schedule.shapes
    lengths, anchors = documents.lengths, documents.num_anchors(recipe.shapes.anchor_density)
    found: Forecast = forecast(schedule, lengths, anchors, epoch=0)
    num_rows = sum(found.rows_of_bucket)
    return {
        "documents": len(documents),
        "dropped": dict(loaded.dropped),
        "tokens": int(lengths.sum()),
        "supervised_tokens": int(documents.supervised.sum()),
        "anchors": int(anchors.sum()),
        "covered_share": covered_share(recipe, documents, block_size=planned.block_size),
        "rows": num_rows,
        "updates": -(-num_rows // schedule.rows_per_update),
        "rows_per_update": schedule.rows_per_update,
        "token_fill": found.token_fill,
        "anchor_fill": found.anchor_fill,
        "epoch_s": (found.rows_ps + found.updates_ps) / PS_PER_S,
        "predicted": "as measured here" if measured else "at an H200's assumed rates (--measure times this machine)",
        "over_bound": found.over,
        "padding_share": (found.rows_ps - num_rows * planned.costs.micro_step_ps - found.bound_ps) / found.rows_ps,
        "correlation": found.correlation,
        "one_bucket_is_best": one_is_best(recipe, planned),
        "held_bytes": sizes.held_bytes(),
        "needed_bytes": sizes.needed_bytes(*planned.buckets),
        "buckets": [
            {
                "length": bucket.length,
                "num_anchors": bucket.num_anchors,
                "rows": rows,
                "micro_step_ms": planned.costs.bucket(bucket.length, bucket.num_anchors, planned.block_size) / PS_PER_MS,
                "needed_bytes": sizes.needed_bytes(bucket),
            }
            for bucket, rows in zip(planned.buckets, found.rows_of_bucket, strict=True)
        ],
    }


def covered_share(recipe: Recipe, documents, *, block_size: int) -> float:
    """The share of supervised tokens that are a label of some block in the first epoch, counted on a sample."""
    covered = total = 0
    for place in np.unique(np.linspace(0, len(documents) - 1, SAMPLED_DOCUMENTS).astype(int)).tolist():
        document = documents[place]
        chosen = choose_anchors(document, seed=recipe.run.seed, epoch=0, density=recipe.shapes.anchor_density)
        labels = np.zeros(len(document.loss_mask) + block_size, dtype=bool)
        for anchor in chosen.tolist():
            labels[anchor + 1 : anchor + block_size] = True
        covered += int((labels[: len(document.loss_mask)] & document.loss_mask).sum())
        total += int(document.loss_mask.sum())
    return covered / max(1, total)


def lines(told: dict) -> list[str]:
    """The report as a table for people."""
    rows, documents = told["rows"], told["documents"]
    each, held = told["anchors"] / documents, gib(told["held_bytes"])
    updates = "updates" if told["updates"] > 1 else "update"
    found = [
        f"documents {documents:,} of {told['tokens']:,} tokens, {told['supervised_tokens']:,} of them supervised",
        f"rows      {rows:,} an epoch, {documents / rows:.1f} documents each; {each:.1f} anchors a document",
        f"fill      {told['token_fill']:.1%} of tokens, {told['anchor_fill']:.1%} of anchor slots",
        f"blocks    cover {told['covered_share']:.1%} of the supervised tokens in an epoch",
        f"epoch     {told['updates']:,} {updates} of at most {told['rows_per_update']} rows, "
        f"{_duration(told['epoch_s'])} {told['predicted']}; padding is {told['padding_share']:.1%} of it",
        f"memory    {gib(told['needed_bytes'])} predicted, {held} of it for target, drafter and optimizer",
        *([f"buckets   {ONE_IS_BEST}"] if told["one_bucket_is_best"] else []),
        "",
        f"{'bucket':>14}{'rows':>12}{'share':>8}{'micro step':>14}{'memory alone':>15}",
    ]
    for one in told["buckets"]:
        name, share = f"{one['length']}/{one['num_anchors']}", one["rows"] / rows
        size = gib(one["needed_bytes"])
        found.append(f"{name:>14}{one['rows']:>12,}{share:>8.1%}{one['micro_step_ms']:>11.2f} ms{size:>15}")
    return found


def drawn(loaded: Documents, told: dict) -> list[str]:
    """The histogram of the documents' lengths, buckets drawn in."""
    width = min(100, shutil.get_terminal_size().columns)
    return ["documents by tokens, and the buckets", *drawing.histogram(loaded.documents.lengths, marks(told), width=width)]


def marks(told: dict) -> dict[int, list[str]]:
    """A text for each bucket, by its length."""
    found: dict[int, list[str]] = {}
    for one in told["buckets"]:
        text = f" bucket {one['length']}/{one['num_anchors']}: {one['rows'] / told['rows']:.1%} of the rows"
        found.setdefault(one["length"], []).append(text)
    return found


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds / 60:,.1f} minutes" if seconds >= 90 else f"{seconds:.1f} s"


def _check_out(out: str) -> None:
    """Only a shapes file is written over. Raises: ConfigError naming the path."""
    _check_place(f"--out {out}", out)
    if not Path(out).exists():
        return
    try:
        Shapes.load(out)
    except DataError as error:
        raise ConfigError(
            "option", f"--out {out}", expected="a new file, or a shapes file", got="another file", fix="give another path"
        ) from error


def _check_place(option: str, path: str) -> None:
    """Try, before any work, whether a file can be written there; leaves nothing. Raises: ConfigError naming the option."""
    above = next(folder for folder in Path(path).absolute().parents if folder.exists())
    fix = "give another path"
    if Path(path).is_dir():
        raise ConfigError("option", option, expected="a file", got="a folder", fix="name a file in it")
    if not above.is_dir():
        raise ConfigError("option", option, expected="a path below folders", got=f"{above}, a file", fix=fix)
    try:
        with tempfile.TemporaryFile(dir=above) as tried:
            tried.write(bytes(_TRIED_BYTES))
            tried.flush()
    except OSError as error:
        got = (error.strerror or str(error)).lower()
        expected = f"a place that takes a file of {_TRIED_BYTES // 1024} KiB"
        raise ConfigError(
            "option", option, expected=expected, got=f"{got} in {above}", fix=f"free space, mend the rights, or {fix}"
        ) from error


@contextlib.contextmanager
def _writing(path: str):
    """Make the folder of a file that is written within. Raises: GraphcapError naming the file that was not written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise GraphcapError(
            "file",
            path,
            expected="a file system that takes it",
            got=(error.strerror or str(error)).lower(),
            fix="free space or mend the rights, then give the same command again",
        ) from error


def _silent(*_) -> None:
    """Nobody is told."""
