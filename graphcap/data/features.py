"""Features on disk: what a target's tapped layers gave for each document, in shards, read by document.

A store is a folder:
    index.json                what the features are of, and every shard with its size and SHA-256; a hash of itself
    shard-00000.safetensors   `features` [tokens, L·D], documents laid end to end, and one entry a document in COLUMNS
    .shard-00000….damaged     a mark: a reader found that shard damaged; the next writer computes it again
A shard says in its header what index.json says of it, so that a lost index can be written anew (ops/reindex.py).
Nothing is read without being checked: sizes and columns when the store is opened, a CRC-32 with every document, all
bytes with `check_store`. bfloat16 is uint16 here, its bits: numpy has no such type. Safe to read from several threads.

Written by ops/features.py. Called by data/prefetch.py, extract.py and offline.py. Loads no torch.
"""

import contextlib
import hashlib
import json
import os
import shlex
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphcap.errors import DataError

VERSION, INDEX, FORMAT = 1, "index.json", "graphcap features 1"
HEADER_BYTES = 1024  # of a shard: safetensors lets the header be padded, so it can be written last
CHUNK_BYTES = 1 << 18  # read and checked while it is in the cache
DTYPES = {"float32": ("F32", np.dtype("<f4")), "bfloat16": ("BF16", np.dtype("<u2"))}  # safetensors' name, ours
# One entry a document, behind the features. digest: of its token ids. crc32: of its features.
COLUMNS = {
    "document_id": ("I64", np.dtype("<i8")),
    "digest": ("U64", np.dtype("<u8")),
    "num_tokens": ("I32", np.dtype("<i4")),
    "crc32": ("U32", np.dtype("<u4")),
    "held_out": ("U8", np.dtype("u1")),
}
COLUMN_BYTES = sum(dtype.itemsize for _, dtype in COLUMNS.values())


@dataclass(frozen=True)
class Kind:
    """What features are of. target: name, commit and fingerprint. dtype: a key of DTYPES."""

    target: dict[str, str]
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str

    @property
    def num_features(self) -> int:
        """F = L·D."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's features."""
        return self.num_features * self.host_dtype.itemsize

    @property
    def host_dtype(self) -> np.dtype:
        return DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Shard:
    """A finished shard as index.json lists it. first, last: words for the documents that were written first and last."""

    name: str
    bytes: int
    sha256: str
    num_documents: int
    num_tokens: int
    columns_crc32: int
    first: str
    last: str


def document_name(document_id: int, held_out: bool) -> str:
    """ "train 17" or "held_out 3": ids count apart in the two sets."""
    return f"{'held_out' if held_out else 'train'} {document_id}"


def digest_of(token_ids: np.ndarray) -> int:
    """64 bits of a hash of token ids, int32 [n]."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(token_ids, "<i4"), digest_size=8).digest(), "little")


def needed_bytes(kind: Kind, *, num_documents: int, num_tokens: int, shard_bytes: int) -> int:
    """Bytes on disk of a store of so much, in shards of about `shard_bytes`."""
    data = num_tokens * kind.token_bytes + num_documents * COLUMN_BYTES
    return data + min(num_documents, 1 + data // shard_bytes) * (HEADER_BYTES + 300) + 500


def shard_header(kind: Kind, *, num_tokens: int, columns: bytes) -> bytes:
    """The first HEADER_BYTES of a shard: safetensors' header, padded with spaces. columns: its bytes, column by column.

    The metadata have the kind, which only ops/reindex.py reads; left out where the target's name is too long for it.
    """
    said = json.dumps(vars(kind), ensure_ascii=False)
    metadata = {"format": FORMAT, "kind": said, "crc32": str(zlib.crc32(columns, zlib.crc32(said.encode())))}
    text = _header_text(metadata, kind, num_documents=len(columns) // COLUMN_BYTES, num_tokens=num_tokens)
    if len(text) > HEADER_BYTES - 8:
        text = _header_text({"format": FORMAT}, kind, num_documents=len(columns) // COLUMN_BYTES, num_tokens=num_tokens)
    assert len(text) <= HEADER_BYTES - 8, f"a header of {len(text)} bytes"
    return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)


def _header_text(metadata: dict[str, str], kind: Kind, *, num_documents: int, num_tokens: int) -> bytes:
    tensors, end = {"__metadata__": metadata}, 0
    sized = {"features": (DTYPES[kind.dtype], [num_tokens, kind.num_features])}
    sized |= {name: (column, [num_documents]) for name, column in COLUMNS.items()}
    for name, ((code, dtype), shape) in sized.items():
        begin, end = end, end + dtype.itemsize * int(np.prod(shape))
        tensors[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    return json.dumps(tensors, ensure_ascii=False).encode()


def index_text(kind: Kind, shards: list[Shard]) -> str:
    """index.json, with a hash of itself."""
    # Without an indent, which has an encoder in Python: the text is written anew with every shard.
    document = {"version": VERSION, **vars(kind), "shards": [vars(shard) for shard in shards]}
    text = json.dumps(document, ensure_ascii=False)
    return f'{text[:-1]}, "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"}}\n'


def read_index(folder: Path) -> tuple[Kind, list[Shard]]:
    """What a store holds, by its index.json. Raises: DataError if it cannot be read; IndexLost if it is missing or damaged."""
    path = Path(folder) / INDEX
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
        version = document.pop("version")
        shards = [Shard(**shard) for shard in document.pop("shards")]
        del document["sha256"]
        kind = kind_from(document)
    except FileNotFoundError as error:
        raise _lost(folder, f"no {INDEX}") if has_shards(folder) else _unreadable(folder, f"no {INDEX}") from error
    except OSError as error:
        raise _unreadable(folder, error.strerror or str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _lost(folder, f"a damaged one ({type(error).__name__}: {error})") from error
    if version != VERSION and _hash_holds(text):
        raise _unreadable(folder, f"one of version {version}")
    if version != VERSION or index_text(kind, shards) != text:
        raise _lost(folder, "a changed one: its hash differs")
    return kind, shards


def kind_from(document: dict) -> Kind:
    """The kind whose fields a JSON document has. Raises: TypeError, KeyError where it has not."""
    return Kind(**{**document, "target_layer_ids": tuple(document["target_layer_ids"])})


def has_shards(folder: Path) -> bool:
    """Whether there is any file with a shard's name."""
    return any(Path(folder).glob("shard-*.safetensors"))


def _hash_holds(text: str) -> bool:
    """Whether an index.json of any version is as it was written."""
    whole, _, stated = text.rpartition(', "sha256": "')
    return hashlib.sha256(f"{whole}}}".encode()).hexdigest() == stated[:64]


def shard_fault(folder: Path, kind: Kind, shard: Shard) -> str:
    """'' where the shard is there in full, its columns right, and not marked; else what is wrong, in words.

    Raises: DataError if the file system refuses to read it.
    """
    try:
        _columns(folder, kind, 0, shard)
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return error.got
    return ""


def mark_name(name: str) -> str:
    """Of the file that marks a shard as damaged."""
    return f".{name}.damaged"


def _mark(folder: Path, shard: Shard, fault: str) -> bool:
    """Mark the shard that the index lists, and no later one of its name. False: this folder cannot be written to."""
    try:
        (folder / mark_name(shard.name)).write_text(f"{shard.sha256} {fault}\n", encoding="utf-8")
    except OSError:
        return False
    return True


def _marked(folder: Path, shard: Shard) -> str:
    """'' or why the shard is marked, in words."""
    try:
        sha256, _, fault = (folder / mark_name(shard.name)).read_text(encoding="utf-8", errors="replace").partition(" ")
    except OSError:
        return ""
    return f"damage found before: {fault.strip()}" if sha256 == shard.sha256 else ""


def _size_fault(folder: Path, shard: Shard) -> str:
    """'' where the shard's file is there in full, by its size; else what is wrong, in words. Raises: OSError."""
    try:
        size_bytes = (folder / shard.name).stat().st_size
    except FileNotFoundError:
        return "no such file"
    return "" if size_bytes == shard.bytes else f"{size_bytes:,} of {shard.bytes:,} bytes"


class FeatureStore:
    """A store opened for reading. Ids are looked up in sorted columns, 36 bytes a document."""

    def __init__(self, folder: Path) -> None:
        """Raises: DataError naming the shard that is missing, cut off or damaged in its columns."""
        self.folder = Path(folder)
        self.kind, self.shards = read_index(folder)
        parts = [_columns(self.folder, self.kind, number, shard) for number, shard in enumerate(self.shards)]
        every = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else _no_columns()
        order = np.argsort(every["key"], kind="stable")
        self._table = {name: column[order] for name, column in every.items()}

    @property
    def num_documents(self) -> int:
        return len(self._table["key"])

    @property
    def num_tokens(self) -> int:
        return int(self._table["num_tokens"].sum())

    def has(self, document_id: int, held_out: bool, token_ids: np.ndarray) -> bool:
        """Whether the document is here. Raises: DataError if it is with other token ids, int32 [n]."""
        place = self._place(document_id, held_out)
        if place is None:
            return False
        if self._table["digest"][place] != digest_of(token_ids):
            raise DataError(
                "features",
                self.folder,
                expected=f"features of the tokens that document {document_name(document_id, held_out)} has",
                got="features of other tokens",
                cause="the data files, their order or the tokenizer have changed since they were extracted",
                fix="put the data back, or extract into another folder",
            )
        return True

    def read(self, document_id: int, held_out: bool, out_TF: np.ndarray) -> None:
        """Read a document's features into out_TF, [tokens, F] of `kind.host_dtype`, contiguous, and check them.

        Raises: DataError naming shard and document if they are not there in full or not what was written.
        """
        place = self._place(document_id, held_out)
        name = document_name(document_id, held_out)
        if place is None:
            raise DataError(
                "features", self.folder, expected=f"document {name}", got="none", fix="extract again: it adds what is missing"
            )
        row = {column: values[place] for column, values in self._table.items()}
        assert out_TF.shape == (row["num_tokens"], self.kind.num_features) and out_TF.dtype == self.kind.host_dtype
        shard = self.shards[row["shard"]]
        try:
            crc32 = _read_into(self.folder / shard.name, int(row["offset"]), memoryview(out_TF).cast("B"))
        except OSError as error:
            raise _damaged(self.folder, shard, f"{error.strerror or error} at document {name}", seen=False) from error
        if crc32 != row["crc32"]:
            fault = f"other bytes for document {name}: its CRC-32 differs"
            raise _damaged(self.folder, shard, fault, seen=_mark(self.folder, shard, fault))

    def _place(self, document_id: int, held_out: bool) -> int | None:
        key = 2 * document_id + held_out
        place = int(np.searchsorted(self._table["key"], key))
        return place if place < self.num_documents and self._table["key"][place] == key else None


def check_store(folder: Path) -> None:
    """Read every byte, and mark what is damaged, so that the next writer computes it again.

    Raises: DataError naming every shard that is missing, cut off or changed, and its damaged documents.
    """
    folder, wrong, unread, seen = Path(folder), [], [], True
    kind, shards = read_index(folder)
    for shard in shards:
        try:
            fault = _fault_within(folder, kind, shard)
        except OSError as error:  # it may pass: nothing is marked
            unread.append(f"{shard.name} ({error.strerror or error})")
            continue
        if fault:
            wrong.append(f"{shard.name} ({fault})")
            seen &= bool(_size_fault(folder, shard)) or _mark(folder, shard, fault)
        else:
            _unmark(folder, shard)
    if wrong or unread:
        told = [f"{what}: {'; '.join(names)}" for what, names in (("damaged", wrong), ("not read", unread)) if names]
        raise DataError(
            "features",
            folder,
            expected=f"{len(shards)} shards as they were written",
            got="; ".join(told),
            fix=_repair(folder, "" if seen else "these files") if wrong else "check again once the disk gives them",
        )


def _fault_within(folder: Path, kind: Kind, shard: Shard) -> str:
    """'' where every byte of a shard is as it was written; else its damaged documents or what is wrong, in words.

    Raises: OSError where it cannot be read.
    """
    path = folder / shard.name
    try:
        if fault := _size_fault(folder, shard):
            return f"{fault}, of {_extent(shard)}"
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256:
                return ""
        found = damaged_documents(folder, kind, shard)
    except DataError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return f"its columns, of {_extent(shard)}"
    return ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "") or "outside its documents"


def damaged_documents(folder: Path, kind: Kind, shard: Shard) -> list[str]:
    """Names of a shard's documents whose features have another CRC-32. Raises: DataError for damaged columns; OSError."""
    columns, found = _read_columns(folder, kind, 0, shard), []
    for key, num_tokens, offset, crc32 in zip(*(columns[name] for name in ("key", "num_tokens", "offset", "crc32"))):
        if _read_into(folder / shard.name, int(offset), memoryview(bytearray(int(num_tokens) * kind.token_bytes))) != crc32:
            found.append(document_name(int(key) // 2, bool(key % 2)))
    return found


def _columns(folder: Path, kind: Kind, number: int, shard: Shard) -> dict[str, np.ndarray]:
    """The shard's columns, and where in it each document begins. Raises: DataError where it is damaged or marked."""
    try:
        fault = _size_fault(folder, shard) or _marked(folder, shard)
    except OSError as error:
        raise _damaged(folder, shard, error.strerror or str(error), seen=False) from error
    if fault:
        raise _damaged(folder, shard, fault)
    return _read_columns(folder, kind, number, shard)


def _read_columns(folder: Path, kind: Kind, number: int, shard: Shard) -> dict[str, np.ndarray]:
    packed = bytearray(shard.num_documents * COLUMN_BYTES)
    try:
        crc32 = _read_into(folder / shard.name, shard.bytes - len(packed), memoryview(packed))
    except OSError as error:
        raise _damaged(folder, shard, error.strerror or str(error), seen=False) from error
    if crc32 != shard.columns_crc32:
        raise _damaged(folder, shard, "other bytes in its columns: their CRC-32 differs")
    columns = split_columns(packed, num_documents=shard.num_documents)
    ends = np.cumsum(columns["num_tokens"], dtype=np.int64)
    return {
        "key": 2 * columns["document_id"] + columns["held_out"],
        "digest": columns["digest"],
        "num_tokens": columns["num_tokens"],
        "crc32": columns["crc32"],
        "shard": np.full(shard.num_documents, number, np.int32),
        "offset": HEADER_BYTES + (ends - columns["num_tokens"]) * kind.token_bytes,
    }


def split_columns(packed: bytes, *, num_documents: int) -> dict[str, np.ndarray]:
    """A shard's columns, each [num_documents], of their bytes."""
    columns, begin = {}, 0
    for name, (_, dtype) in COLUMNS.items():
        columns[name] = np.frombuffer(packed, dtype, num_documents, begin)
        begin += columns[name].nbytes
    return columns


def _damaged(folder: Path, shard: Shard, got: str, *, seen: bool = True) -> DataError:
    """seen: whether a writer sees it too, without reading every byte."""
    name = folder / shard.name
    return DataError(
        "features",
        name,
        expected=f"its {_extent(shard)}, unchanged",
        got=got,
        fix=_repair(folder, "" if seen else shlex.quote(str(name))),
    )


class IndexLost(DataError):
    """An index.json that a writer makes anew from the shards."""


def _lost(folder: Path, got: str) -> IndexLost:
    return IndexLost(
        "features",
        folder,
        expected=f"an {INDEX} as it was written",
        got=got,
        fix=f"graphcap extract RECIPE --out {shlex.quote(str(folder))} writes it anew from the shards, and so does train with "
        "features.missing=compute",
    )


def _repair(folder: Path, first_remove: str) -> str:
    again = f"graphcap extract RECIPE --out {shlex.quote(str(folder))} computes what is damaged anew, and so does train with "
    return (f"remove {first_remove}, then " if first_remove else "") + again + "features.missing=compute"


def _extent(shard: Shard) -> str:
    return f"{shard.num_documents:,} documents, {shard.first} written first and {shard.last} last"


def _unmark(folder: Path, shard: Shard) -> None:
    with contextlib.suppress(OSError):
        (folder / mark_name(shard.name)).unlink()


def _no_columns() -> dict[str, np.ndarray]:
    names = ("key", "digest", "num_tokens", "crc32", "shard", "offset")
    return {name: np.zeros(0, np.int64) for name in names}


def _read_into(path: Path, offset: int, out: memoryview) -> int:
    """Fill `out` from the file's bytes at `offset`; returns their CRC-32. Raises: OSError, also where the file ends before."""
    crc32 = 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for begin in range(0, len(out), CHUNK_BYTES):
            part = out[begin : begin + CHUNK_BYTES]
            done = 0
            while done < len(part):
                count = os.preadv(descriptor, [part[done:]], offset + begin + done)
                if count == 0:
                    raise OSError(None, "the file ends too early")
                done += count
            crc32 = zlib.crc32(part, crc32)
    finally:
        os.close(descriptor)
    return crc32


def _unreadable(folder: Path, got: str) -> DataError:
    return DataError(
        "features",
        folder,
        expected=f"a folder that graphcap extract wrote, with an {INDEX} of version {VERSION}",
        got=got,
        fix="give such a folder, or write one: graphcap extract RECIPE --out FOLDER",
    )
