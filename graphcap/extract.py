"""`graphcap extract`: the target's features of every document of a recipe, on disk; `extract --check`: whether they are whole.

The target's forward runs over the rows of the plan's first epoch and of the evaluation, at the buckets' shapes, as training
runs it: what training would have computed in that epoch is what it reads later, bit for bit. Documents that the folder has
already are left out, so the same command goes on where it was stopped, and adds what has come to the data.

Calls: cli.py, train.py (for features.missing = "compute").
"""

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from graphcap.build import configure_drafter
from graphcap.config import Recipe
from graphcap.data.features import INDEX, FeatureStore, Kind, check_store, needed_bytes
from graphcap.data.loader import arrange_with
from graphcap.data.packing import Row
from graphcap.engine import Engine
from graphcap.engine.guard import torchs_cache_folder, use_deterministic_math
from graphcap.engine.memory import gib
from graphcap.engine.offline import FeatureStep
from graphcap.errors import ConfigError, closing
from graphcap.layout import frame_of, lay_out, memory_of, room_bytes
from graphcap.model.ends import TargetFiles, check_identity, load_skeleton
from graphcap.model.identity import Identity, identity_of
from graphcap.model.loading import device_and_dtype, dtype_name, load_model, load_tokenizer
from graphcap.model.target import Target
from graphcap.offline import missing_of, needed_rows
from graphcap.ops import caches, checkpoint
from graphcap.ops.features import FeatureFolder, check_kind
from graphcap.room import digits_apart, limit_name
from graphcap.versions import made_by


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who wants features. say: called with each line for people. note: called before everything that is launched, or None."""

    say: Callable[[str], None]
    note: Callable[..., None] | None
    asked_to_stop: Callable[[], bool]  # called after each row
    elsewhere: str  # what to type for another folder


@dataclasses.dataclass(frozen=True)
class Work:
    """What is to be computed: rows with the ids of the documents in them that are missing, and where documents are."""

    rows: list[tuple[Row, bool, list[int]]]
    documents: dict[bool, dict]  # by whether held out, then by id
    buckets: tuple

    @property
    def num_documents(self) -> int:
        return sum(len(absent) for _, _, absent in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(len(self.documents[held_out][number].token_ids) for _, held_out, absent in self.rows for number in absent)


def extract(recipe: Recipe, out: str, *, continued: dict | None, eager: bool, caller: Caller) -> bool:
    """Write the features that the folder `out` lacks of the recipe's documents. False: stopped on request before the last.

    continued: the position of a run that goes on, whose plan lies in its folder, or None. eager: on a GPU, too, launch the
    forward from Python. Raises: GraphcapError for what the user must mend, before the target is loaded where that can be told
    before.
    """
    say = caller.say
    use_deterministic_math()
    device, dtype = device_and_dtype(recipe.run.device, recipe.target.dtype)
    if device.type == "cuda":
        caches.use(made_by(), say, unless=torchs_cache_folder())
    threads = continued["threads"] if continued is not None else recipe.run.threads
    if threads:
        torch.set_num_threads(threads)
    where = {"revision": recipe.target.revision, "trust_remote_code": recipe.target.trust_remote_code}
    tokenizer = load_tokenizer(recipe.target.path, **where)
    skeleton = load_skeleton(recipe.target.path, **where)
    config, _ = configure_drafter(recipe, skeleton, tokenizer)
    layout = lay_out(recipe, tokenizer, frame_of(skeleton, config), continued, say, note=_phases(caller.note))
    folder = FeatureFolder(Path(out))
    with closing(folder):
        for line in folder.reopen():
            say(line)
        store = FeatureStore(out) if (folder.folder / INDEX).is_file() else None
        hidden_size = skeleton.config.get_text_config().hidden_size
        unnamed = {"name": recipe.target.path, "commit": "", "fingerprint": ""}  # of a target that is not loaded yet
        kind = Kind(store.kind.target if store else unnamed, config.target_layer_ids, hidden_size, dtype_name(dtype))
        if store is not None:
            check_kind(store.kind, kind, folder.folder)
            files = TargetFiles(recipe.target.path, revision=recipe.target.revision)
            check_identity(Identity(**store.kind.target), skeleton, files, folder.folder)
        rows = needed_rows(layout.schedule, layout.evaluation)
        documents = {False: layout.documents, True: layout.evaluation.documents}
        work = Work(missing_of(store, rows, documents[False], documents[True]), documents, layout.shapes.buckets)
        _check_room(work, kind, folder.folder, recipe.features.shard_bytes, caller)
        if not work.rows:
            say(f"complete  {out} lists every document of the recipe; graphcap extract --check {out} reads their bytes")
            return True
        sizes = memory_of(recipe, skeleton, config, dtype, stored=False)
        _check_memory(sizes.extraction_bytes(layout.shapes.buckets[0]), recipe, device)
        target = Target(load_model(recipe.target.path, dtype=dtype, device=device, **where), config.target_layer_ids)
        identity = identity_of(target.model, recipe.target.path)
        say(f"target    {identity}, {dtype_name(dtype)} on {device.type}")
        kind = dataclasses.replace(kind, target=dataclasses.asdict(identity))
        with closing(folder.writer(kind, shard_bytes=recipe.features.shard_bytes)) as writer:
            num_written = _write(work, target, writer, eager=eager, caller=caller)
        del target
        gc.collect()  # a target and its hooks hold each other, and training in this process may need the memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
    complete = num_written == work.num_documents
    say(f"extracted {num_written:,} {'' if complete else f'of {work.num_documents:,} '}documents to {out}")
    return complete


def _phases(note):
    """`note` for phases that launch nothing."""
    return lambda phase: note(phase, bucket="") if note is not None else None


def _check_memory(needed: int, recipe: Recipe, device: torch.device) -> None:
    """Raises: ConfigError if the target's forward over the longest row needs more memory than there is."""
    limit_bytes = room_bytes(recipe, device)
    if limit_bytes is not None and needed > limit_bytes:
        digits, own = digits_apart(limit_bytes, needed), bool(recipe.shapes.memory_gib)
        larger = f"shapes.memory_gib={math.ceil(100 * needed / 2**30) / 100:.2f}" if own else "a GPU with more memory"
        raise ConfigError(
            "target",
            "of the recipe",
            expected=f"at most {gib(limit_bytes, digits)} ({limit_name(recipe)})",
            got=gib(needed, digits),
            fix=f"use {larger}, or shorter rows (shapes.row_length)",
        )


def _check_room(work: Work, kind: Kind, folder: Path, shard_bytes: int, caller: Caller) -> None:
    """Say what the features will take, before anything large is loaded. Raises: CheckpointError if the disk has less."""
    size = needed_bytes(kind, num_documents=work.num_documents, num_tokens=work.num_tokens, shard_bytes=shard_bytes)
    free_bytes, layers = checkpoint.disk_free_bytes(folder), len(kind.target_layer_ids)
    caller.say(
        f"features  {work.num_tokens:,} tokens x {layers} layers x {kind.hidden_size:,} x {kind.host_dtype.itemsize} bytes: "
        f"{size:,} bytes on disk for {work.num_documents:,} documents; {free_bytes:,} are free"
    )
    checkpoint.check_room(folder, size, fix=f"free space, give fewer documents, or another disk with {caller.elsewhere}")


def _write(work: Work, target: Target, writer, *, eager: bool, caller: Caller) -> int:
    """Compute the rows and append their missing documents, to the end or until a stop is asked for; returns how many."""
    step = FeatureStep(target, largest=max(bucket.length for bucket in work.buckets))
    engine = Engine(step, work.buckets, note=caller.note)
    begin, num_bytes, num_written = time.monotonic(), 0, 0
    with closing(engine), tqdm(total=work.num_tokens, unit=" tokens", unit_scale=True, disable=None) as bar:
        engine.prepare(eager=eager, say=caller.say)
        for (row, held_out, absent), features_TF in _computed(engine, step, work):
            place, wanted = 0, set(absent)
            for number in row.document_ids:
                token_ids = work.documents[held_out][number].token_ids
                part_TF = features_TF[place : place + len(token_ids)]
                place += len(token_ids)
                if number in wanted:
                    writer.add(number, held_out, token_ids, part_TF)
                    num_bytes, num_written = num_bytes + part_TF.nbytes, num_written + 1
                    bar.update(len(token_ids))
            if caller.asked_to_stop():
                break
    took_s = max(time.monotonic() - begin, 1e-9)
    caller.say(f"wrote     {num_bytes / 1e9:.2f} GB in {took_s:.0f} s, {num_bytes / 1e6 / took_s:,.0f} MB/s with warm-up")
    return num_written


def _computed(engine: Engine, step: FeatureStep, work: Work) -> Iterator[tuple[tuple, np.ndarray]]:
    """Every row of the work with its features, one row behind the device, which computes the next one meanwhile."""
    under_way = None
    for number, (row, held_out, absent) in enumerate(work.rows):
        arrays = arrange_with(row, work.documents[held_out], lambda document: np.zeros(0, np.int64)).arrays()
        engine.fill(row.bucket, {name: arrays[name] for name in ("token_ids", "position")})
        engine.micro_step(row.bucket)
        step.send(number, len(arrays["token_ids"]))
        if under_way is not None:
            yield under_way[0], step.received(*under_way[1:])
        under_way = (row, held_out, absent), number, len(arrays["token_ids"])
    if under_way is not None:
        yield under_way[0], step.received(*under_way[1:])


def check(folder: str) -> list[str]:
    """What a folder of features holds, a line each, after every byte of it was read.

    Raises: DataError naming each shard that is missing, cut off or changed, and the documents that are damaged in it.
    """
    begin = time.monotonic()
    check_store(Path(folder))
    store = FeatureStore(Path(folder))
    kind, size = store.kind, sum(shard.bytes for shard in store.shards)
    target = kind.target
    return [
        f"features  {store.num_documents:,} documents, {store.num_tokens:,} tokens, {kind.dtype}, layers "
        f"{list(kind.target_layer_ids)} x {kind.hidden_size:,} of {target['name']}, fingerprint {target['fingerprint']}",
        f"shards    {len(store.shards)}, {size:,} bytes, every SHA-256 right  ({time.monotonic() - begin:.0f} s)",
    ]
