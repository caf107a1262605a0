"""What a training run is made of: target, data, plan, drafter, engine, each loaded or made and said in one line.

Nothing is written before all of it stands, so that a recipe that cannot run leaves nothing behind.
Called by train.py, extract.py, shapes.py and preview.py.
"""

import dataclasses
import os
import time
from pathlib import Path

import torch

from graphcap.config import Recipe
from graphcap.data.documents import DocumentList, DocumentsById
from graphcap.data.features import FeatureStore
from graphcap.data.packing import Schedule
from graphcap.data.planner import Shapes
from graphcap.data.prefetch import RowReader
from graphcap.engine import Engine
from graphcap.engine.evaluation import Evaluation
from graphcap.engine.guard import torchs_cache_folder, use_deterministic_math
from graphcap.engine.marks import Marks
from graphcap.engine.memory import Sizes
from graphcap.engine.offline import StoredStep
from graphcap.engine.optimizer import ALIGNMENT_BYTES, Hyper
from graphcap.engine.step import DrafterStep
from graphcap.errors import CaptureError, ConfigError
from graphcap.layout import Layout, frame_of, lay_out, memory_of, room_bytes
from graphcap.model import blocks
from graphcap.model.drafter import Drafter, DrafterConfig, tapped_layers
from graphcap.model.ends import TargetEnds, load_skeleton
from graphcap.model.identity import Identity, identity_of
from graphcap.model.loading import (
    device_and_dtype,
    dtype_name,
    find_mask_token,
    load_config,
    load_model,
    load_tokenizer,
    rope_theta,
)
from graphcap.model.loss import default_chunk
from graphcap.model.target import Target
from graphcap.offline import check_complete, missing_of, needed_rows, open_store
from graphcap.ops import caches, checkpoint
from graphcap.ops.blackbox import GPU_AT, Recorder
from graphcap.ops.export import check_fits, read_config, read_drafter, read_target
from graphcap.room import Room
from graphcap.versions import made_by, untested


@dataclasses.dataclass
class TrainingRun:
    """Everything a run is made of. `documents` by id; `position` is the number of updates made."""

    recipe: Recipe
    folder: Path
    tokenizer: object
    target: Target | TargetEnds
    drafter: Drafter
    documents: DocumentsById
    held_out: DocumentList
    prompts: list[list[int]]  # of held-out conversations, to decode at the end
    evaluation: Evaluation
    shapes: Shapes
    schedule: Schedule
    memory: Sizes  # what its memory depends on
    reader: RowReader  # of rows, and of their features where those are stored
    engine: Engine
    identity: Identity  # of the target
    revisions: dict[str, str]  # commits of the data sets that came from the Hub
    settings: dict[str, str]  # the deterministic settings in force, for env.json
    recorder: Recorder
    position: int = 0


def build(recipe: Recipe, *, continued: dict | None, say, recorder: Recorder) -> TrainingRun:
    """Load target and data, plan the rows, make the drafter and allocate every buffer; writes nothing.

    continued: the position (state.json) of the checkpoint that the run goes on from, or None. say: called with each line
    for people. recorder: this process's flight recorder. Raises: GraphcapError for what the user must mend.
    """
    settings = use_deterministic_math()
    device, dtype = device_and_dtype(recipe.run.device, recipe.target.dtype)
    if device.type == "cuda":
        caches.use(made_by(), say, unless=torchs_cache_folder())
    _set_threads(recipe, continued, say)
    _check_same_machine(device, dtype, continued)
    recorder.device(_gpu_name() if device.type == "cuda" else "CPU")
    recorder.note("load data")
    if device.type == "cuda" and (warning := untested(torch.__version__)):
        say(f"versions  {warning}")
    where = {"revision": recipe.target.revision, "trust_remote_code": recipe.target.trust_remote_code}
    if continued is None:
        _check_disk(recipe, load_config(recipe.target.path, **where), dtype)
    tokenizer, skeleton = load_tokenizer(recipe.target.path, **where), load_skeleton(recipe.target.path, **where)
    drafter_config, mask_name = configure_drafter(recipe, skeleton, tokenizer)
    frame, millions = frame_of(skeleton, drafter_config), _millions(skeleton)
    layout = lay_out(recipe, tokenizer, frame, continued, say, note=recorder.note)
    memory = memory_of(recipe, skeleton, drafter_config, dtype, stored=bool(recipe.features.path))
    room = Room(recipe, layout.documents.in_order, frame, memory, room_bytes(recipe, device))
    room.check(layout.shapes, fixed=continued is not None)

    recorder.note("load target")
    begin = time.monotonic()
    store, target, identity = _target(recipe, skeleton, drafter_config, layout, device=device, dtype=dtype, say=say)
    _check_same_target(identity, recipe, continued, say)
    taps, place = list(drafter_config.target_layer_ids), f"{dtype_name(dtype)} on {device.type}"
    if store is not None:
        place = f"only embedding and head loaded, {place}"
    elif not target.is_lean:
        place = f"rows by transformers' layers, {place}"
    say(
        f"target    {recipe.target.path}: {millions} M parameters, {place}, layers {taps} tapped, "
        f"MASK is {mask_name}, fingerprint {identity.fingerprint}{_at_commit(identity)}  ({time.monotonic() - begin:.0f} s)"
    )
    drafter = make_drafter(recipe, drafter_config)
    step = make_step(recipe, target, drafter, num_updates=layout.schedule.num_updates, stored=store is not None)
    num_layers, block_size = drafter_config.num_layers, drafter_config.block_size
    say(f"drafter   {_millions(drafter)} M parameters, layers: {num_layers}, block: {block_size} tokens")
    return TrainingRun(
        recipe=recipe,
        folder=recipe.folder,
        tokenizer=tokenizer,
        target=target,
        drafter=drafter,
        **vars(layout),
        memory=memory,
        reader=RowReader(
            layout.documents,
            store,
            seed=recipe.run.seed,
            density=recipe.shapes.anchor_density,
            num_threads=recipe.features.threads,
        ),
        engine=Engine(step, layout.shapes.buckets, note=recorder.note, marks=_marks(recorder, device, say)),
        identity=identity,
        settings=settings,
        recorder=recorder,
    )


def _target(
    recipe: Recipe, skeleton, config: DrafterConfig, layout: Layout, *, device: torch.device, dtype: torch.dtype, say
) -> tuple[FeatureStore | None, Target | TargetEnds, Identity]:
    """The whole target, or the store of its features with its embedding and head; and which target it is."""
    if not recipe.features.path:
        where = {"revision": recipe.target.revision, "trust_remote_code": recipe.target.trust_remote_code}
        model = load_model(recipe.target.path, dtype=dtype, device=device, **where)
        return None, Target(model, config.target_layer_ids), identity_of(model, recipe.target.path)
    store, target, identity = open_store(recipe, skeleton, config, dtype=dtype, device=device, say=say)
    needed = needed_rows(layout.schedule, layout.evaluation)
    check_complete(store, missing_of(store, needed, layout.documents, layout.evaluation.documents))
    return store, target, identity


def make_step(recipe: Recipe, target: Target | TargetEnds, drafter: Drafter, *, num_updates: int, stored: bool = False):
    """The step that trains `drafter`. stored: features come from the host, not from the target."""
    drafter.checkpointing = recipe.drafter.checkpointing
    block_size = drafter.config.block_size
    return (StoredStep if stored else DrafterStep)(
        target,
        drafter,
        decay=blocks.decay(block_size, recipe.loss.gamma or blocks.default_gamma(block_size)),
        hyper=_hyper(recipe, num_updates),
        chunk_tokens=recipe.loss.chunk_tokens or default_chunk(drafter.config.vocab_size, target.head_VD.element_size()),
    )


def _marks(recorder: Recorder, device: torch.device, say) -> Marks | None:
    """On a GPU it writes the launches that it has finished into the flight record itself, where it can."""
    if device.type != "cuda":
        return None
    recorder.gpu_bytes = torch.cuda.memory_reserved
    try:
        return Marks(recorder.memory, GPU_AT, device)
    except CaptureError as error:
        say(f"records   a fault inside a replay will not be pinned to its update: {error}")
        return None


def _gpu_name() -> str:
    """The GPU as the machine counts them, where CUDA_VISIBLE_DEVICES says so, else as torch does."""
    place, visible = torch.cuda.current_device(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return f"GPU {visible[place].strip() if place < len(visible) and visible[place].strip() else place}"


def _set_threads(recipe: Recipe, continued: dict | None, say) -> None:
    """The recipe's CPU threads; a continued run keeps the number it began with, since sums depend on it."""
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    if continued is not None and continued["threads"] != torch.get_num_threads():
        say(f"threads   {continued['threads']}, as this run began with (here {torch.get_num_threads()})")
        torch.set_num_threads(continued["threads"])


def _check_same_machine(device: torch.device, dtype: torch.dtype, continued: dict | None) -> None:
    """A run goes on on the kind of device and in the dtype it began with; `auto` may have meant another one there."""
    if continued is None:
        return
    began, now = f"{continued['dtype']} on {continued['device']}", f"{dtype_name(dtype)} on {device.type}"
    if began != now:
        raise ConfigError(
            "run",
            "device and dtype",
            expected=f"{began}, as it began",
            got=now,
            cause="other arithmetic gives other updates",
            fix="continue it there, or start a new run with run.name=OTHER",
        )


def _check_same_target(identity: Identity, recipe: Recipe, continued: dict | None, say) -> None:
    """A run goes on with the target it began with; a drafter to start from may be another target's, and that is said."""
    if continued is not None and "target" in continued and continued["target"]["fingerprint"] != identity.fingerprint:
        raise ConfigError(
            "recipe key",
            "target.path",
            expected=f"the target that the run began with ({Identity(**continued['target'])})",
            got=str(identity),
            fix="put it back or name its commit with target.revision, or start a new run with run.name=OTHER",
        )
    began = read_target(checkpoint.weights_of(recipe.drafter.init)) if recipe.drafter.init else None
    if began is not None and began.fingerprint != identity.fingerprint:
        say(f"warm start {recipe.drafter.init} was trained for another target: {began}; this one is {identity}")


def _check_disk(recipe: Recipe, target_config, dtype: torch.dtype) -> None:
    """Whether the run's checkpoints will fit, from the target's config alone: before anything large is loaded."""
    text = target_config.get_text_config()
    if recipe.drafter.init:
        config = read_config(checkpoint.weights_of(recipe.drafter.init))
    else:
        config = _sized(recipe, text, vocab_size=text.vocab_size, mask_token_id=0)
    with torch.device("meta"):
        parameters = list(Drafter(config).parameters())
    padded = sum(parameter.numel() + ALIGNMENT_BYTES // 4 for parameter in parameters)
    one = padded * (dtype.itemsize + 3 * 4) + len(parameters) * 2 * checkpoint.HEADER_BYTES_PER_TENSOR
    checkpoint.check_room(recipe.folder, (recipe.checkpoint.keep + 2) * one)


def configure_drafter(recipe: Recipe, model, tokenizer) -> tuple[DrafterConfig, str]:
    """The drafter's sizes: the recipe's where it names them, else the target's; and what the MASK token is, in words."""
    text, wanted = model.config.get_text_config(), recipe.drafter
    if wanted.init:
        return _configured_as(recipe, model, tokenizer), f"the token of {wanted.init}"
    embeddings = model.get_input_embeddings().weight.shape[0]
    mask_token_id, mask_name = find_mask_token(tokenizer, embeddings, name=wanted.mask_token)
    config = _sized(recipe, text, vocab_size=embeddings, mask_token_id=mask_token_id)
    return config, f"{mask_name} (id {mask_token_id})"


def _sized(recipe: Recipe, text, *, vocab_size: int, mask_token_id: int) -> DrafterConfig:
    """The recipe's sizes, and those of the target's text config where it names none.

    Raises: ConfigError for a target without rotary positions, or whose config lacks a size.
    """
    wanted, theta = recipe.drafter, rope_theta(text)
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "max_position_embeddings")
    wrong = [f"{name} {size}" for name in sizes if type(size := getattr(text, name, None)) is not int or size < 1]
    if wrong:
        raise ConfigError(
            "target",
            text.model_type,
            expected="a causal language model whose config has its sizes as whole numbers above 0",
            got=", ".join(wrong),
            fix="mend its config.json, or use another target",
        )
    num_layers, heads = text.num_hidden_layers, wanted.num_heads or text.num_attention_heads
    head_dim = wanted.head_dim or getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return DrafterConfig(
        hidden_size=text.hidden_size,
        num_layers=wanted.num_layers,
        num_heads=heads,
        num_kv_heads=wanted.num_kv_heads or getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=wanted.intermediate_size or text.intermediate_size,
        vocab_size=vocab_size,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or getattr(text, "layer_norm_eps", None) or 1e-6,
        rope_theta=theta,
        max_position_embeddings=text.max_position_embeddings,
        block_size=wanted.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=wanted.target_layer_ids or tuple(tapped_layers(num_layers, wanted.num_tapped_layers)),
        num_target_layers=num_layers,
    )


def _configured_as(recipe: Recipe, model, tokenizer) -> DrafterConfig:
    """The config of `drafter.init`, if it fits the target and whatever the recipe itself says of the drafter.

    Raises: ConfigError naming every key that differs; CheckpointError for another target's drafter.
    """
    wanted, loaded = recipe.drafter, read_config(checkpoint.weights_of(recipe.drafter.init))
    check_fits(loaded, model.config, folder=wanted.init)
    names = ("num_layers", "block_size", "target_layer_ids", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    if not wanted.target_layer_ids:
        names += ("num_tapped_layers",)
    there = {name: getattr(loaded, name, len(loaded.target_layer_ids)) for name in names}
    own = {name: getattr(wanted, name) for name in names}
    set_to = {
        name: _listed(there[name]) for name in names if own[name] and own[name] != there[name]
    }  # 0: as the drafter has it
    if wanted.mask_token:
        own["mask_token"], there["mask_token"] = wanted.mask_token, f"token {loaded.mask_token_id}"
        if find_mask_token(tokenizer, loaded.vocab_size, name=wanted.mask_token)[0] != loaded.mask_token_id:
            set_to["mask_token"] = ""
    if set_to:
        raise ConfigError(
            "recipe key",
            ", ".join(f"drafter.{name}" for name in set_to),
            expected=f"{'; '.join(_listed(there[name]) for name in set_to)}, as in {wanted.init}",
            got="; ".join(_listed(own[name]) for name in set_to),
            fix="set " + " ".join(f"drafter.{name}={value}" for name, value in set_to.items()),
        )
    return loaded


def _listed(value) -> str:
    """A recipe's value as an override spells it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def make_drafter(recipe: Recipe, drafter_config: DrafterConfig) -> Drafter:
    """A drafter as it is before training: from the seed, or from `drafter.init`, a run's or a drafter's folder."""
    if recipe.drafter.init:
        folder = checkpoint.weights_of(recipe.drafter.init)
        return read_drafter(folder, dtype=torch.float32, device=torch.device("cpu")).requires_grad_(True)
    drafter = Drafter(drafter_config)
    drafter.initialize(recipe.run.seed)
    return drafter


def _hyper(recipe: Recipe, num_updates: int) -> Hyper:
    section = recipe.optimizer
    names = ("learning_rate", "warmup_fraction", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
    return Hyper(num_updates=num_updates, **{name: getattr(section, name) for name in names})


def _at_commit(identity: Identity) -> str:
    return f", commit {identity.commit[:12]}" if identity.commit else ""


def _millions(module) -> str:
    return f"{sum(p.numel() for p in module.parameters()) / 1e6:.2f}"
