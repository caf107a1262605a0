"""Documents as columns: one row of numbers for each, and all token ids and loss masks end to end, in memory or on disk.

Plans are made from the columns alone; a document's tokens are read when it is asked for. Knows no text and no tokenizer.
Called by conversations.py, reading.py, tokenising.py, tokencache.py and layout.py.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphcap.data.sources import place

# One document. start: of its tokens in the column of token ids; candidates: anchor candidates; source: number of its path.
COLUMNS = np.dtype(
    [(name, "<i8") for name in ("id", "line", "start")]
    + [(name, "<i4") for name in ("length", "supervised", "candidates", "source")]
)
TOKEN_IDS, LOSS_MASK, NUMBERS = "token_ids.bin", "loss_mask.bin", "documents.bin"
_IN_MEMORY_BYTES = 1 << 26  # of a column that no folder was named for; a longer one lies in a file without a name
_SCANNED_TOKENS = 1 << 22  # looked through at once


@dataclass(frozen=True)
class Document:
    """One tokenised conversation. id: 0-based place among the usable conversations read, kept or not.

    token_ids: int32 [n]. loss_mask: bool [n], true where the assistant wrote the token. source, line: where it stood (in a
    table, line is the row).
    """

    id: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    source: str
    line: int

    @property
    def place(self) -> str:
        """Where it stood, in words."""
        return place(self.source, self.line)


@dataclass(frozen=True)
class Batch:
    """Documents on their way into the columns. numbers: COLUMNS [n], without `start`; the rest end to end, int32 and bool."""

    numbers: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray


class DocumentList(Sequence):
    """Documents in the order they were read, ids rising. Indexing reads one, a slice gives a list."""

    def __init__(self, numbers: np.ndarray, token_ids: np.ndarray, loss_mask: np.ndarray, sources: Sequence[str]) -> None:
        """numbers: COLUMNS [n]; token_ids: int32 or uint16 [t]; loss_mask: bool [t]; sources: the paths, by number."""
        self._numbers, self._token_ids, self._loss_mask, self._sources = numbers, token_ids, loss_mask, tuple(sources)

    @property
    def ids(self) -> np.ndarray:
        """int64 [n]: the id of each document, rising."""
        return np.ascontiguousarray(self._numbers["id"])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each document."""
        return self._numbers["length"].astype(np.int64)

    @property
    def supervised(self) -> np.ndarray:
        """int64 [n]: supervised tokens of each document."""
        return self._numbers["supervised"].astype(np.int64)

    def num_anchors(self, density: float) -> np.ndarray:
        """int64 [n]: packing.num_anchors_of of each document. density: anchors per supervised token."""
        return np.minimum(self._numbers["candidates"], np.ceil(density * self.supervised)).astype(np.int64)

    def first_where(self, wanted: Callable[[np.ndarray], np.ndarray]) -> Document | None:
        """The first document with a token for which `wanted`, token ids → bools, is true, or None. Reads all tokens."""
        for start in range(0, len(self._token_ids), _SCANNED_TOKENS):
            found = np.flatnonzero(wanted(self._token_ids[start : start + _SCANNED_TOKENS]))
            if len(found):
                return self[int(np.searchsorted(self._numbers["start"], start + found[0], side="right")) - 1]
        return None

    def place_of(self, index: int) -> str:
        """Where a document stood, in words, without reading its tokens."""
        return place(self._sources[self._numbers["source"][index]], int(self._numbers["line"][index]))

    def by_id(self) -> "DocumentsById":
        """The same documents by their ids."""
        return DocumentsById(self)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        row = self._numbers[index]
        part = slice(int(row["start"]), int(row["start"]) + int(row["length"]))
        token_ids, loss_mask = np.array(self._token_ids[part], np.int32), np.array(self._loss_mask[part])
        return Document(int(row["id"]), token_ids, loss_mask, self._sources[row["source"]], int(row["line"]))


class DocumentsById(Mapping):
    """Documents by their ids, in their order. Looking one up reads it."""

    def __init__(self, documents: DocumentList) -> None:
        self._documents, self._ids = documents, documents.ids

    def __getitem__(self, document_id: int) -> Document:
        place = int(np.searchsorted(self._ids, document_id))
        if place == len(self._ids) or self._ids[place] != document_id:
            raise KeyError(document_id)
        return self._documents[place]

    @property
    def in_order(self) -> DocumentList:
        """The same documents by their places."""
        return self._documents

    def num_tokens(self, document_ids: Sequence[int]) -> tuple[int, int]:
        """Tokens of these documents, which are all here, and supervised ones among them, without reading any."""
        numbers = self._documents._numbers[np.searchsorted(self._ids, document_ids)]
        return int(numbers["length"].sum(dtype=np.int64)), int(numbers["supervised"].sum(dtype=np.int64))

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __len__(self) -> int:
        return len(self._ids)


class Columns:
    """Columns that are being written. folder: where the files go; None: memory, or files that no one else can see."""

    def __init__(self, folder: Path | None, token_dtype: np.dtype) -> None:
        self._folder, self._token_dtype = folder, np.dtype(token_dtype)
        self._numbers: list[np.ndarray] = []
        self._num_tokens = 0
        self._files = {name: self._file(name) for name in (TOKEN_IDS, LOSS_MASK)}

    def append(self, batch: Batch) -> None:
        """Put documents behind those that are there. Raises: OSError if the disk takes no more."""
        numbers = batch.numbers
        numbers["start"] = self._num_tokens + np.cumsum(numbers["length"]) - numbers["length"]
        self._numbers.append(numbers)
        self._num_tokens += len(batch.token_ids)
        self._files[TOKEN_IDS].write(batch.token_ids.astype(self._token_dtype).tobytes())
        self._files[LOSS_MASK].write(batch.loss_mask.tobytes())

    def numbers(self) -> np.ndarray:
        """COLUMNS [n] of all documents so far."""
        return np.concatenate([np.empty(0, COLUMNS), *self._numbers])

    def documents(self, sources: Sequence[str]) -> DocumentList:
        """What was written, from where it lies now. Columns of a folder are opened with tokencache.py."""
        assert self._folder is None, "the files of a folder are read from there"
        read = [self._read(self._files[name], dtype) for name, dtype in ((TOKEN_IDS, self._token_dtype), (LOSS_MASK, bool))]
        return DocumentList(self.numbers(), *read, sources)

    def close(self) -> None:
        """Close the files of a folder; a second time does nothing. Raises: OSError if the disk takes no more."""
        for file in self._files.values():
            file.close()

    def discard(self) -> None:
        """Close the files of a folder, though the disk may not take what was not yet written."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _file(self, name: str):
        if self._folder is None:
            return tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)
        return open(self._folder / name, "wb", buffering=1 << 20)

    @staticmethod
    def _read(file, dtype) -> np.ndarray:
        file.flush()
        size = file.tell() // np.dtype(dtype).itemsize
        if getattr(file, "_rolled", False):
            return np.memmap(file, dtype, "r", shape=(size,))  # it stays, without a name, as long as the array does
        file.seek(0)
        return np.frombuffer(file.read(), dtype)
