"""Training from stored features: the store is opened and compared with recipe, target and documents before a run begins.

Which documents a run needs features of is said here too, once for the run and for `graphcap extract`.
Calls: build.py, extract.py.
"""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from graphcap.config import Recipe
from graphcap.data.conversations import Document
from graphcap.data.features import FeatureStore, Kind, document_name
from graphcap.data.packing import Row, Schedule
from graphcap.engine.evaluation import Evaluation
from graphcap.errors import DataError
from graphcap.model.drafter import DrafterConfig
from graphcap.model.ends import TargetEnds, TargetFiles, check_identity
from graphcap.model.identity import Identity
from graphcap.model.loading import dtype_name
from graphcap.ops.features import check_kind


def open_store(recipe: Recipe, skeleton, config: DrafterConfig, *, dtype: torch.dtype, device: torch.device, say):
    """The recipe's store, the target's embedding and head on `device`, and the target's identity, which the store names.

    skeleton: from model/ends.load_skeleton; the drafter's `config` says what is tapped. Raises: DataError for a damaged
    store; ConfigError naming what differs between it and the recipe or the target's files.
    """
    folder = Path(recipe.features.path)
    store = FeatureStore(folder)
    identity = Identity(**store.kind.target)
    hidden_size = skeleton.config.get_text_config().hidden_size
    check_kind(store.kind, Kind(store.kind.target, config.target_layer_ids, hidden_size, dtype_name(dtype)), folder)
    files = TargetFiles(recipe.target.path, revision=recipe.target.revision)
    compared = check_identity(identity, skeleton, files, folder)
    target = TargetEnds(skeleton, files, config.target_layer_ids, dtype=dtype, device=device)
    say(
        f"features  {folder}: {store.num_documents:,} documents, {store.num_tokens:,} tokens of {identity}"
        + ("" if compared else "; the target's files are not laid out as it is loaded, so they were not compared with it")
    )
    return store, target, identity


def needed_rows(schedule: Schedule, evaluation: Evaluation) -> Iterator[tuple[Row, bool]]:
    """Rows that have every document of the run once, each with whether it is held out: epoch 0's, then the evaluation's."""
    for update in itertools.takewhile(lambda update: update.epoch == 0, schedule.updates()):
        yield from ((row, False) for row in update.rows)
    yield from ((row, True) for row in evaluation.rows)


def missing_of(
    store: FeatureStore | None,
    rows: Iterator[tuple[Row, bool]],
    train: Mapping[int, Document],
    held_out: Mapping[int, Document],
) -> list[tuple[Row, bool, list[int]]]:
    """The rows of which the store (or none yet) lacks documents, and those documents' ids.

    Raises: DataError if it has features of other tokens under a document's id.
    """
    found = []
    for row, is_held_out in rows:
        documents = held_out if is_held_out else train
        absent = [
            number
            for number in row.document_ids
            if store is None or not store.has(number, is_held_out, documents[number].token_ids)
        ]
        if absent:
            found.append((row, is_held_out, absent))
    return found


def check_complete(store: FeatureStore, missing: list[tuple[Row, bool, list[int]]]) -> None:
    """Raises: DataError if documents of the run are not in the store."""
    if missing:
        _, held_out, absent = missing[0]
        count = sum(len(absent) for _, _, absent in missing)
        raise DataError(
            "features",
            store.folder,
            expected="features of every document of the run",
            got=f"{count:,} documents without, first {document_name(absent[0], held_out)}",
            fix=f"graphcap extract RECIPE --out {store.folder} adds them, and so does features.missing=compute",
        )
