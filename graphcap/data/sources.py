"""Paths → rows with their place, one at a time: JSONL, gzipped JSONL, parquet, and data sets of the Hub.

A path is a file (.jsonl, .jsonl.gz, .parquet; any other name is read as JSONL unless its first bytes say otherwise) or
`hf:OWNER/NAME[@REVISION][:SPLIT]`, a data set of the Hub (split train where none is named). What a row means is forms.py's.

Null keys. A table has every key in every row and cannot tell an absent one from a null one, so rows of parquet and of the
Hub lose their null keys at every depth. A null inside a tool call's arguments survives only in JSONL or as JSON text.
Called by conversations.py.
"""

import gzip
import hashlib
import json
import re
import shlex
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from graphcap.data.foreign import ACCEPTED, refuse_others
from graphcap.data.templates import BadConversation
from graphcap.errors import DataError

# Row forms by the keys they need, in the order of preference: text is tokenised afresh wherever a row has any.
FORMS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt + response": ("prompt", "response"),
    "input_ids + loss_mask": ("input_ids", "loss_mask"),
}
_COLUMNS = {key for keys in FORMS.values() for key in keys} | {"tools", "system"}  # of a table; all others stay unread

HUB_BYTES = 1 << 30  # a data set of the Hub is taken to be large: its commit tells what it is
PACKED = 4  # of text in a byte of gzip, about
_BATCH_ROWS = 64  # decoded at once from a parquet file
_HUB = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::(\S+))?", re.ASCII)


def place(source: str, line: int) -> str:
    """`source` and the 1-based line or row in it, in words."""
    table = source.startswith("hf:") or source.endswith((".parquet", "/"))
    return f"{source} {'row' if table else 'line'} {line}"


def short(source: str) -> str:
    """A file's name without its folders; a data set of the Hub whole."""
    return source if source.startswith("hf:") else Path(source).name + "/" * source.endswith("/")


def shown(keys: Iterable) -> str:
    """The first keys found in a row, safe to print whatever they are."""
    names = [str(key)[:40] for key in list(keys)[:12]]
    return "the keys " + (", ".join(name if name.isprintable() and name else repr(name) for name in names) or "none")


class BadLine(BadConversation):
    """A row that cannot be used, with its place."""

    def __init__(self, reason: str, source: str, line: int, *, expected: str, got: str, fix: str, cause: str = "") -> None:
        super().__init__(reason, "conversation", place(source, line), expected=expected, got=got, fix=fix, cause=cause)
        self.source, self.line = source, line


@dataclass(frozen=True)
class Row:
    """One row as it stood. source: the path as given; line: its 1-based line or row; value: its keys, null ones left out."""

    source: str
    line: int
    value: dict

    def bad(self, reason: str, *, expected: str, got: str, fix: str) -> BadLine:
        """The error that says why this row cannot be used. reason: the short, stable text that it is counted under."""
        return BadLine(reason, self.source, self.line, expected=expected, got=got, fix=fix)


@dataclass
class Meter:
    """Bytes of text read so far, unpacked."""

    num_bytes: int = 0


@dataclass(frozen=True)
class Source:
    """An opened path. path: as given; revision: the commit that a data set of the Hub was resolved to, else empty.

    rows: each row, or the error that says why it is none; to be read once. Raises: DataError if the file is damaged.
    name: what its rows call their source. files: all that is read for it, in order. kind: what a folder was found to be.
    meter: how much of it has been read.
    """

    path: str
    revision: str
    rows: Iterator[Row | BadLine]
    name: str
    files: tuple[Path, ...] = ()
    kind: str = ""
    meter: Meter = field(default_factory=Meter)

    def size_bytes(self) -> int | None:
        """Bytes of its text, about; None if it cannot be told, or if it may be read only once, as a pipe."""
        if self.revision:
            return HUB_BYTES
        if not all(file.is_file() for file in self.files):
            return None
        return sum(file.stat().st_size * (PACKED if file.suffix == ".gz" else 1) for file in self.files)

    def fingerprint(self) -> list[str]:
        """What its rows follow from: the commit, or the contents of the files. Raises: DataError if one cannot be read."""
        if self.revision:
            return [self.path, self.revision]
        marks = [self.kind]
        for file in self.files:
            with _opened(str(file)) as opened:
                contents = _read(str(file), lambda: hashlib.file_digest(opened, "sha256"))
            marks += [file.suffix, contents.hexdigest()]
        return marks


def open_source(path: str | Path) -> Source:
    """Resolve a path; a file is opened when its first row is asked for.

    Raises: DataError if an hf: path is none, cannot be resolved, or needs a package that is not installed.
    """
    path = str(path)
    if path.startswith("hf:"):
        revision, rows = _hub(path)
        return Source(path, revision, rows, path)
    meter = Meter()
    return Source(path, "", file_rows(path, meter), path, (Path(path),), "", meter)


def _opened(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise DataError(
            "data file",
            path,
            expected=f"a file of conversations ({ACCEPTED})",
            got=((error.strerror if isinstance(error, OSError) else "") or str(error)).lower(),
            cause="a relative path begins in the folder that graphcap runs in",
            fix="give the path of a file",
        ) from error


def file_rows(path: str, meter: Meter) -> Iterator[Row | BadLine]:
    """The rows of a file; it is opened when the first is asked for. Raises: DataError if it cannot be read."""
    with _opened(path) as file:
        head = _read(path, lambda: file.peek(16)[:16])
        refuse_others(path, head)
        if path.endswith(".parquet") or head.startswith(b"PAR1"):
            yield from _parquet(path, file, meter)
        elif path.endswith(".gz") or head.startswith(b"\x1f\x8b"):
            yield from _jsonl(path, gzip.GzipFile(fileobj=file), meter)
        else:
            yield from _jsonl(path, file, meter)


def _read(path: str, step, *, behind: int = 0):
    """What `step` reads. behind: lines already read. Raises: DataError where the disk or the archive gives out."""
    try:
        return step()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            "data file",
            path,
            expected="a file that can be read to its end",
            got=f"an error behind line {behind}",
            cause=f"{type(error).__name__}: {error}",
            fix="copy or download it again" + (f"; `gzip -t {shlex.quote(path)}` checks it" if path.endswith(".gz") else ""),
        ) from error


def _jsonl(path: str, file: BinaryIO, meter: Meter) -> Iterator[Row | BadLine]:
    """One row for each line that is not blank."""
    line = 0
    while raw := _read(path, file.readline, behind=line):
        line += 1
        meter.num_bytes += len(raw)
        # A byte order mark at the start is legal UTF-8 and common in files from Windows.
        raw = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
        if raw.strip():
            try:
                yield Row(path, line, _object(raw, path, line))
            except BadLine as error:
                yield error


def _object(raw: bytes, path: str, line: int) -> dict:
    """Parse one line; its null keys are left out. Raises: BadLine."""
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        got = f"byte 0x{raw[error.start]:02x} at place {error.start + 1}"
        raise BadLine("invalid UTF-8", path, line, expected="UTF-8", got=got, fix="save it in UTF-8") from error
    except (ValueError, RecursionError) as error:
        got = str(error)
        if isinstance(error, json.JSONDecodeError):
            got = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        array = _of_array(raw, path)
        fix = "mend or remove the line; each line is one whole conversation" + array
        fix += f"; a file of another kind has to become {ACCEPTED}" if line == 1 and not array else ""
        raise BadLine("broken JSON", path, line, expected="one JSON object", got=got, fix=fix) from error
    if not isinstance(row, dict):
        fix = 'write each line as {"messages": [{"role": …, "content": …}, …]}' + _of_array(raw, path)
        raise BadLine("not a JSON object", path, line, expected="a JSON object", got=type(row).__name__, fix=fix)
    return {key: value for key, value in row.items() if value is not None}


def _of_array(raw: bytes, path: str) -> str:
    """What to do about a line that begins a JSON array, or ""."""
    if raw.lstrip()[:1] != b"[":
        return ""
    return f"; of one JSON array make lines with `jq -c '.[]' {shlex.quote(path)} > {shlex.quote(Path(path).name + '.jsonl')}`"


def _parquet(path: str, file: BinaryIO, meter: Meter) -> Iterator[Row | BadLine]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_package("data file", path, "pyarrow", str(error)) from error
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = columns_of(table.schema_arrow.names, path)
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
            meter.num_bytes += batch.nbytes
            for offset in range(batch.num_rows):
                number += 1
                try:
                    (value,) = batch.slice(offset, 1).to_pylist()
                except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date that Python has not
                    reason = "invalid UTF-8" if isinstance(error, UnicodeDecodeError) else "unreadable row"
                    fix = "mend or remove the row"
                    yield BadLine(reason, path, number, expected="a row that Python can hold", got=str(error), fix=fix)
                    continue
                yield Row(path, number, without_nulls(value))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            "data file",
            path,
            expected="a whole parquet file",
            got=f"an error behind row {number}",
            cause=" ".join(str(error).split()).rstrip("."),
            fix="copy or download it again, or name it by what it is",
        ) from error


def _hub(path: str) -> tuple[str, Iterator[Row]]:
    """The resolved revision of an hf: path and its rows."""
    parts = _HUB.fullmatch(path)
    if parts is None:
        fix = "write for example hf:OWNER/NAME or hf:OWNER/NAME:train"
        raise DataError("data set", path, expected="hf:OWNER/NAME[@REVISION][:SPLIT]", got=path, fix=fix)
    name, revision, split = parts[1], parts[2] or "main", parts[3] or "train"
    try:
        import datasets
    except ImportError as error:
        raise missing_package("data set", path, "datasets", str(error)) from error
    try:
        # A commit needs no asking, so a data set that is cached is read without a network if its commit is named.
        if not re.fullmatch("[0-9a-f]{40}", revision):
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(name, revision=revision).sha
        # Not streamed: the rows lie in a mapped file of the cache, and a restart needs no network.
        dataset = datasets.load_dataset(name, split=split, revision=revision)
    except Exception as error:  # foreign code and the network: anything may come, and says why in its text
        raise DataError(
            "data set",
            path,
            expected=f"split {split} of a data set of the Hub",
            got=type(error).__name__,
            cause=" ".join(str(error).split())[:300].rstrip("."),
            fix="check its name, split and your network; offline, name a cached commit: hf:OWNER/NAME@COMMIT",
        ) from error
    return revision, _hub_rows(path, dataset.select_columns(columns_of(dataset.column_names, path)))


def _hub_rows(path: str, dataset) -> Iterator[Row]:
    for number in range(len(dataset)):
        try:
            value = dataset[number]
        except Exception as error:  # as above
            cause = " ".join(str(error).split())[:300].rstrip(".")
            fix = "remove its folder from the cache of datasets and run again"
            got = type(error).__name__
            raise DataError("data set", path, expected=f"row {number + 1}", got=got, cause=cause, fix=fix) from error
        yield Row(path, number + 1, without_nulls(value))


def columns_of(names: list[str], path: str) -> list[str]:
    """The columns of a table to read. Raises: DataError if they make no row form."""
    if not any(set(keys) <= set(names) for keys in FORMS.values()):
        raise DataError(
            "data set" if path.startswith("hf:") else "data file",
            path,
            expected=f"rows of one of the forms {'; '.join(FORMS)}",
            got=shown(names),
            fix="rename the columns, or write the conversations as messages",
        )
    return [name for name in names if name in _COLUMNS]


def without_nulls(value):
    """The same value with the null keys of its objects left out, at every depth."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return [without_nulls(inner) for inner in value]
    return value


def missing_package(thing: str, path: str, package: str, cause: str) -> DataError:
    got = "a Python without it"
    return DataError(thing, path, expected=f"the package {package}", got=got, cause=cause, fix=f"pip install {package}")
