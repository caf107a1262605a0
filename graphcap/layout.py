"""Documents and the rows that are made of them: what is known of a run before its target is loaded.

Sizes come from the target's config alone, so data that cannot be used and a plan that does not fit are refused first.
Called by build.py, extract.py, room.py and shapes.py.
"""

import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from graphcap.config import Recipe
from graphcap.data.conversations import Documents, load_documents
from graphcap.data.costs import Costs, Sizes
from graphcap.data.documents import DocumentList, DocumentsById
from graphcap.data.packing import Schedule
from graphcap.data.planner import Shapes, fitted, lengthened, plan
from graphcap.data.prompts import load_prompts
from graphcap.data.reading import Means
from graphcap.engine import memory
from graphcap.engine.evaluation import Evaluation, fitting
from graphcap.errors import ConfigError
from graphcap.model.drafter import Drafter, DrafterConfig
from graphcap.model.loss import default_chunk
from graphcap.ops import caches

ROWS_OF_AN_UPDATE = 8  # or more, where rows are lengthened
ONE_IS_BEST = "one is best, a second would not pay for itself"
MOST_TEXT_WORKERS = 16  # processes that tokenise; each takes about 120 MB


@dataclass(frozen=True)
class Layout:
    """The documents of a run, training's by id, and the rows that it makes of them."""

    documents: DocumentsById
    held_out: DocumentList
    prompts: list[list[int]]  # of the held-out conversations
    evaluation: Evaluation
    shapes: Shapes
    schedule: Schedule
    revisions: dict[str, str]


@dataclass(frozen=True)
class Frame:
    """What a plan depends on beside the documents and the recipe: the same on every machine."""

    config: DrafterConfig
    costs: Costs


def frame_of(skeleton, config: DrafterConfig) -> Frame:
    """skeleton: of the target, from model/ends.load_skeleton."""
    return Frame(config, costs_of(skeleton, config))


def lay_out(recipe: Recipe, tokenizer, frame: Frame, continued: dict | None, say, *, note) -> Layout:
    """Load the documents and plan their rows. note: called with a phase now and then, for a long load is not silent.

    continued: as in build. Raises: GraphcapError for documents or a plan that cannot be used.
    """
    loaded = load_data(recipe, tokenizer, frame.config, say, note=note)
    held_out = loaded["held_out"].documents
    shapes = shapes_of(recipe, loaded["train"].documents, frame, continued)
    schedule = schedule_of(recipe, loaded["train"].documents, shapes)
    say(f"plan      {described(recipe, shapes, schedule)}")
    return Layout(
        documents=loaded["train"].documents.by_id(),
        held_out=held_out,
        prompts=load_prompts(
            recipe.data.held_out,
            tokenizer,
            count=recipe.eval.prompts,
            on_bad_line=recipe.data.on_bad_line,
            max_length=frame.config.max_position_embeddings - 1,
            dropped=Counter(),  # what the documents' line has said
        ),
        evaluation=Evaluation(fitting(held_out, shapes.buckets, count=recipe.eval.documents), shapes.buckets, rows=shapes.rows),
        shapes=shapes,
        schedule=schedule,
        revisions={origin.path: origin.revision for part in loaded.values() for origin in part.origins if origin.revision},
    )


def load_data(
    recipe: Recipe, tokenizer, config: DrafterConfig, say, *, note, names: tuple[str, ...] = ("train", "held_out")
) -> dict[str, Documents]:
    """The documents of these keys of [data]. Raises: DataError, ConfigError."""
    loaded = {}
    cache = Path(recipe.data.cache) if recipe.data.cache else None
    if recipe.data.cache == "auto":
        cache = caches.documents_folder()
        if cache is None:
            say("caches    no home folder: tokens of large texts are not kept; name a folder with data.cache")
    for name in names:
        begin = time.monotonic()

        def told(line: str, name: str = name) -> None:
            note("load data")
            say(f"{name:<9} {line}")

        workers = min(len(os.sched_getaffinity(0)), MOST_TEXT_WORKERS)
        loaded[name] = load_documents(
            getattr(recipe.data, name),
            tokenizer,
            max_length=recipe.data.max_length,
            on_long=recipe.data.on_long,
            on_bad_line=recipe.data.on_bad_line,
            means=Means(cache, workers, told),
        )
        _check_tokens(loaded[name].documents, config)
        say(f"{name:<9} {loaded[name].summary()}  ({time.monotonic() - begin:.0f} s)")
        num_long = int((loaded[name].documents.lengths > config.max_position_embeddings).sum())
        if num_long:
            positions = f"{config.max_position_embeddings:,} positions that the target was made for"
            say(f"{name:<9} {num_long:,} documents are longer than the {positions}; data.max_length limits them")
    return loaded


def _check_tokens(documents: DocumentList, config: DrafterConfig) -> None:
    """Raises: ConfigError if a document has MASK, or a token that the target's embedding has no row for."""
    mask, num_rows = config.mask_token_id, config.vocab_size
    used = documents.first_where(lambda token_ids: (token_ids == mask) | (token_ids >= num_rows))
    if used is None:
        return
    if used.token_ids.max() >= num_rows:
        raise ConfigError(
            "recipe key",
            "target.path",
            expected=f"a tokenizer whose tokens are rows of the target's embedding, 0 to {num_rows - 1}",
            got=f"token {used.token_ids.max()}, which stands in {used.place}",
            cause="tokens were added to the tokenizer and the embedding was not resized",
            fix="give the tokenizer that belongs to the target",
        )
    raise ConfigError(
        "recipe key",
        "drafter.mask_token",
        expected="a token that no text contains",
        got=f"token {mask}, which stands in {used.place}",
        fix="name an unused token with drafter.mask_token",
    )


def shapes_of(recipe: Recipe, documents: DocumentList, frame: Frame, continued: dict | None = None) -> Shapes:
    """The buckets for these documents: planned, from a file, or, for a run that goes on, those in its folder.

    Raises: DataError if a file was planned for other documents; ConfigError if the largest bucket holds no whole block.
    """
    wanted, block_size = recipe.shapes, frame.config.block_size
    lengths, anchors = documents.lengths, documents.num_anchors(wanted.anchor_density)
    inputs = {"block_size": block_size, "anchor_density": wanted.anchor_density, "window": wanted.window, "rows": wanted.rows}
    if continued is not None:
        shapes = Shapes.load(recipe.folder / "shapes.json")
        inputs["fix"] = "put the data files back, or start a new run with run.name=OTHER"
    elif wanted.plan == "auto":
        row_length = wanted.row_length or _row_length(recipe, lengths, anchors, frame)
        shapes = planned_for(recipe, frame, lengths, anchors, row_length=row_length, name_of=documents.place_of)
    else:
        shapes = Shapes.load(wanted.plan)
        _check_agreed(wanted, shapes)
    shapes.check(lengths, anchors, **inputs)
    largest = shapes.buckets[0].length
    if block_size > largest:
        raise ConfigError(
            "recipe key",
            "drafter.block_size",
            expected=f"at most the largest row, {largest} tokens",
            got=str(block_size),
            fix="set drafter.block_size lower, 16 for example, or shapes.row_length higher",
        )
    return shapes


def _check_agreed(wanted, shapes: Shapes) -> None:
    """Raises: ConfigError if a key of [shapes] asks for other buckets than the file of shapes.plan has."""
    length, count = shapes.buckets[0].length, len(shapes.buckets)
    wrong = None
    if wanted.row_length not in (0, length):
        wrong = "row_length", f"{length}, or 0", wanted.row_length
    elif count > wanted.max_buckets != type(wanted).max_buckets:  # the default is nobody's wish
        wrong = "max_buckets", f"{count} or more", wanted.max_buckets
    if wrong is not None:
        raise ConfigError(
            "recipe key",
            f"shapes.{wrong[0]}",
            expected=wrong[1],
            got=str(wrong[2]),
            cause=f"the plan {wanted.plan} was made with another",
            fix="leave the key out, or plan anew with shapes.plan=auto",
        )


def planned_for(recipe: Recipe, frame: Frame, lengths, anchors, *, row_length: int, name_of=str) -> Shapes:
    """The plan for documents of these lengths and anchor counts, int [n], in rows of this length; 0: the shortest."""
    wanted = recipe.shapes
    return plan(
        lengths,
        anchors,
        block_size=frame.config.block_size,
        anchor_density=wanted.anchor_density,
        row_length=row_length,
        max_buckets=wanted.max_buckets,
        window=wanted.window,
        name_of=name_of,
        rows=wanted.rows,
        costs=frame.costs,
        epochs=recipe.optimizer.epochs,
    )


def _row_length(recipe: Recipe, lengths, anchors, frame: Frame) -> int:
    """Tokens of the largest bucket where the recipe names none; 0: as short as the documents allow.

    Longer only where several documents share a row and the recipe leaves the number of rows to us, which keeps a few for ranks.
    """
    if recipe.shapes.rows == "single" or recipe.optimizer.rows_per_update:
        return 0
    most_length = recipe.optimizer.tokens_per_update // ROWS_OF_AN_UPDATE
    how = {"block_size": frame.config.block_size, "costs": frame.costs, "most_length": most_length}
    return fitted(lengthened(lengths, anchors, **how), lengths, anchors, window=recipe.shapes.window, **how)


def schedule_of(recipe: Recipe, documents: DocumentList, shapes: Shapes) -> Schedule:
    """Which rows every update has."""
    wanted = recipe.optimizer
    return Schedule(
        shapes,
        documents.ids,
        documents.lengths,
        documents.num_anchors(recipe.shapes.anchor_density),
        seed=recipe.run.seed,
        epochs=wanted.epochs,
        rows_per_update=wanted.rows_per_update or max(1, round(wanted.tokens_per_update / shapes.buckets[0].length)),
        max_updates=wanted.max_updates,
    )


def one_is_best(recipe: Recipe, shapes: Shapes) -> bool:
    """Whether planning could have taken more buckets than one, and did not."""
    return len(shapes.buckets) == 1 < recipe.shapes.max_buckets and recipe.shapes.plan == "auto"


def described(recipe: Recipe, shapes: Shapes, schedule: Schedule) -> str:
    """The plan in one line."""
    names = ", ".join(bucket.name for bucket in shapes.buckets) + " (tokens/anchors)"
    if one_is_best(recipe, shapes):
        names += f"; {ONE_IS_BEST}"
    epochs, updates, most = recipe.optimizer.epochs, schedule.num_updates, recipe.optimizer.max_updates
    until = "optimizer.max_updates" if updates == most else f"{epochs} epoch{'s' if epochs > 1 else ''}"
    rows = "1 row" if schedule.rows_per_update == 1 else f"{schedule.rows_per_update} rows"
    return f"buckets {names}, {rows} an update, {updates} updates: {until}"


def costs_of(skeleton, config: DrafterConfig) -> Costs:
    """Predicted times, from the sizes of target and drafter. Experts of a target count as if all ran on every token.

    The target counts where features are stored, too: a run from them has the rows that they were extracted in.
    """
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    keys_and_values = 2 * hidden * config.num_kv_heads * config.head_dim
    text, head = skeleton.config.get_text_config(), config.vocab_size * hidden
    tables = sum(table.numel() for table in _tables(skeleton))
    layers = sum(parameter.numel() for parameter in skeleton.parameters()) - tables
    ran = max(config.target_layer_ids) + 1
    own_head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Costs.assumed(
        Sizes(
            target=layers * ran // config.num_target_layers,
            context=len(config.target_layer_ids) * hidden * hidden + config.num_layers * keys_and_values,
            drafter=config.num_layers * (2 * hidden * heads + keys_and_values + 3 * hidden * config.intermediate_size),
            head=head,
            target_width=ran * text.num_attention_heads * own_head_dim,
            drafter_width=config.num_layers * heads,
            target_layers=ran,
            drafter_layers=config.num_layers,
        )
    )


def memory_of(recipe: Recipe, skeleton, config: DrafterConfig, dtype: torch.dtype, *, stored: bool) -> memory.Sizes:
    """What the run's memory depends on. stored: features come from disk, and the target is its embedding and head."""
    text = skeleton.config.get_text_config()
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in Drafter(config).parameters())
    loaded = _tables(skeleton) if stored else skeleton.parameters()
    return memory.Sizes(
        drafter=config,
        num_parameters=num_parameters,
        target_bytes=dtype.itemsize * sum(tensor.numel() for tensor in loaded),
        target_intermediate=0 if stored else text.intermediate_size,
        itemsize=dtype.itemsize,
        chunk_tokens=recipe.loss.chunk_tokens or default_chunk(config.vocab_size, dtype.itemsize),
        checkpointing=recipe.drafter.checkpointing,
        stored=stored,
    )


def room_bytes(recipe: Recipe, device: torch.device) -> int | None:
    """Memory that the recipe allows, else what is free on the GPU; None: nobody counts it."""
    if recipe.shapes.memory_gib:
        return round(recipe.shapes.memory_gib * 2**30)
    return torch.cuda.mem_get_info(device)[0] - memory.LEFT_FREE_BYTES if device.type == "cuda" else None


def _tables(skeleton) -> list[torch.Tensor]:
    """Embedding and head, once where they are tied."""
    modules = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    return list({id(module.weight): module.weight for module in modules}.values())
