"""A path → its source, also where it is a folder that SpecForge or speculators prepared; what was found is said.

* speculators' prepare_data: an Arrow folder of `datasets` (state.json names its files) with input_ids and loss_mask.
* SpecForge's prepare_data: one NAME_train.jsonl of conversations (and NAME_test.jsonl, which is not trained on).
* SpecForge's cache of tokenised conversations: Arrow files that it names KEY.pkl, of input_ids and loss_mask [1, n].
* safetensors, one file a sample, with input_ids and loss_mask.
* SpecForge's features (rows_A-B/data_N.ckpt, .ckpt.gz) and old ones of speculators (data_N.pt) are pickles: refused.

Token ids and masks are taken as they stand there, whatever the rule that made them; features are not read here.
Source: sgl-project/SpecForge a6b6b02 and vllm-project/speculators c05b95b, what their scripts write.
Called by conversations.py.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from graphcap.data.foreign import ARROW_STREAM
from graphcap.data.sources import (
    BadLine,
    Meter,
    Row,
    Source,
    columns_of,
    file_rows,
    missing_package,
    open_source,
    without_nulls,
)
from graphcap.errors import DataError

EXPECTED = "a file of conversations, or a folder that SpecForge or speculators prepared"
OWN_MASKS = "with its own token ids and loss masks"
_SLICE_ROWS = 64  # decoded at once
_PICKLES = ("*.ckpt", "*.ckpt.gz", "data_*.pt")


def open_path(path: str | Path) -> Source:
    """Resolve a path as open_source does, or as a prepared folder. Raises: DataError, also for a folder of other things."""
    if str(path).startswith("hf:") or not Path(path).is_dir():
        return open_source(path)
    folder, path = Path(path), str(path)
    if (folder / "state.json").exists():
        return _arrow(path, _listed(folder), f"an Arrow folder as speculators prepares it, {OWN_MASKS}{_features(folder)}")
    if (folder / "dataset_dict.json").exists():
        raise _refused(path, "a folder of several splits", "name the folder of one of them, FOLDER/train for example")
    if pickles := _found(folder, _PICKLES):
        raise _pickled(folder, pickles)
    if cached := [file for file in _found(folder, ("*.pkl",)) if _head(file) == ARROW_STREAM]:
        if len({re.sub(r"_\d+_of_\d+$", "", file.stem) for file in cached}) > 1:
            names = ", ".join(file.name for file in cached[:3])
            raise _refused(path, f"several prepared sets: {names}", "leave one of them in the folder")
        return _arrow(path, cached, f"Arrow files as SpecForge caches them, {OWN_MASKS}")
    if samples := _found(folder, ("*.safetensors",)):
        meter = Meter()
        rows = _safetensors(path, samples, meter)
        kind = f"safetensors, one a sample, {OWN_MASKS}; features are not read"
        return Source(path, "", rows, _name(path), tuple(samples), kind, meter)
    return _jsonl(folder)


def _jsonl(folder: Path) -> Source:
    """The one file of conversations in a folder."""
    files = _found(folder, ("*.jsonl",))
    chosen = [file for file in files if file.stem.endswith("_train")] or files
    if len(chosen) != 1:
        names = [file.name for file in chosen or sorted(folder.iterdir())]
        got = f"a folder of {len(chosen)} files of conversations" if chosen else "a folder of other things"
        raise DataError(
            "data file",
            folder,
            expected=EXPECTED,
            got=got if names else "an empty folder",
            cause=f"in it: {', '.join(names[:4])}{f' and {len(names) - 4:,} more' if len(names) > 4 else ''}" if names else "",
            fix="name the files themselves" if chosen else "give the path of a file, or of a folder with such files",
        )
    meter, name = Meter(), str(chosen[0])
    kind = f"{chosen[0].name}, as SpecForge prepares it" if name.endswith("_train.jsonl") else chosen[0].name
    return Source(str(folder), "", file_rows(name, meter), name, (chosen[0],), kind, meter)


def _arrow(path: str, files: list[Path], kind: str) -> Source:
    meter = Meter()
    return Source(path, "", _arrow_rows(path, files, meter), _name(path), tuple(files), kind, meter)


def _arrow_rows(path: str, files: list[Path], meter: Meter) -> Iterator[Row | BadLine]:
    """Rows of Arrow streams, numbered through all files."""
    try:
        import pyarrow
    except ImportError as error:
        raise missing_package("data file", path, "pyarrow", str(error)) from error
    number = 0
    for file in files:
        try:
            with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                columns = columns_of(stream.schema.names, path)
                for batch in stream:
                    batch = batch.select(columns)
                    meter.num_bytes += batch.nbytes
                    for start in range(0, batch.num_rows, _SLICE_ROWS):
                        for value in batch.slice(start, _SLICE_ROWS).to_pylist():
                            number += 1
                            yield Row(_name(path), number, _flat(without_nulls(value)))
        except (pyarrow.ArrowException, OSError) as error:
            raise _damaged(file, number, error) from error


def _safetensors(path: str, files: list[Path], meter: Meter) -> Iterator[Row | BadLine]:
    from safetensors import SafetensorError, safe_open

    for number, file in enumerate(files, start=1):
        try:
            with safe_open(file, "numpy") as opened:
                keys = set(opened.keys())
                value = {key: opened.get_tensor(key).reshape(-1) for key in ("input_ids", "loss_mask") if key in keys}
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(file, number - 1, error) from error
        if len(value) < 2:
            raise DataError(
                "data file",
                file,
                expected="tensors input_ids and loss_mask",
                got=", ".join(sorted(keys)) or "none",
                cause="speculators keeps hidden states apart from the tokens and their loss mask"
                if "token_ids" in keys
                else "",
                fix="name the folder above it, the one with state.json"
                if "token_ids" in keys
                else "add them, or name the text",
            )
        meter.num_bytes += sum(one.nbytes for one in value.values())
        yield Row(_name(path), number, {key: one.tolist() for key, one in value.items()})


def _flat(value: dict) -> dict:
    """Token ids and masks of one sample that stand in a batch of one, [1, n], as [n]."""
    for key in ("input_ids", "loss_mask"):
        if isinstance(value.get(key), list) and len(value[key]) == 1 and isinstance(value[key][0], list):
            value[key] = value[key][0]
    return value


def _listed(folder: Path) -> list[Path]:
    """The files that state.json names, in its order. Raises: DataError if it is damaged or one is missing."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        files = [folder / Path(entry["filename"]).name for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder / "state.json", 0, error) from error
    absent = [file for file in files if not file.is_file()]
    if absent or not files:
        got = f"no {absent[0].name}" if absent else "none"
        raise DataError(
            "data file", folder, expected="the files that state.json names", got=got, fix="copy or prepare the folder again"
        )
    return files


def _found(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Files of the folder and of its rows_A-B/, by name and number."""
    places = [folder, *(one for one in folder.glob("rows_*") if one.is_dir())]
    found = {file for place in places for pattern in patterns for file in place.glob(pattern)}
    return sorted(found, key=lambda file: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(file))])


def _features(folder: Path) -> str:
    """What is to be said of hidden states beside the tokens."""
    return "; features in hidden_states/ are not read" if (folder / "hidden_states").is_dir() else ""


def _head(file: Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(len(ARROW_STREAM))


def _name(path: str) -> str:
    """What rows call their source: a slash at its end tells a folder, which has rows and not lines."""
    return path.rstrip("/") + "/"


def _pickled(folder: Path, files: list[Path]) -> DataError:
    """The refusal, with a command that writes the tokens of all of them as JSONL and runs no code of theirs."""
    pattern = "data_*.pt" if files[0].suffix == ".pt" else "*.ckpt*"
    program = (
        "import glob, gzip, json, torch; "
        f"names = sorted(glob.glob('**/{pattern}', recursive=True), key=lambda name: (len(name), name)); "
        "opened = lambda name: gzip.open(name) if name.endswith('.gz') else open(name, 'rb'); "
        "[print(json.dumps({key: rows[key].flatten().tolist() for key in ('input_ids', 'loss_mask')})) "
        "for name in names for rows in [torch.load(opened(name), map_location='cpu', weights_only=True)]]"
    )
    return DataError(
        "data file",
        folder,
        expected=EXPECTED,
        got=f"pickles of torch, {files[0].name} the first",
        cause="loading a pickle may run whatever code it holds, so graphcap never does",
        fix="train on the conversations they were made from, or write out the tokens with "
        f'`(cd {shlex.quote(str(folder))} && python -c "{program}") > tokens.jsonl`',
    )


def _refused(path: str, got: str, fix: str) -> DataError:
    return DataError("data file", path, expected=EXPECTED, got=got, fix=fix)


def _damaged(file: Path, number: int, error: Exception) -> DataError:
    return DataError(
        "data file",
        file,
        expected="a whole file",
        got=f"an error behind row {number}",
        cause=" ".join(str(error).split())[:200].rstrip("."),
        fix="copy or prepare it again",
    )
