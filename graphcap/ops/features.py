"""Writing features: shards that are complete or not there, in a folder that one process writes and many may read.

A shard is written under a hidden name, synced, and renamed; then index.json is replaced by one that lists it. So whatever
kills the writer, the index lists whole shards only, and the next writer goes on behind them. `reopen` brings the folder
into that state: it removes what a dead writer left, and the shards that are damaged, as far as that can be seen without
reading every byte: missing, cut off, other bytes in their columns, or marked by whoever has read them. An index that is lost
is written anew.

The format is data/features.py's. Called by extract.py and tools/bench_features.py. Loads no torch.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import zlib
from pathlib import Path

import numpy as np

from graphcap.data.features import (
    COLUMNS,
    HEADER_BYTES,
    INDEX,
    IndexLost,
    Kind,
    Shard,
    digest_of,
    document_name,
    has_shards,
    index_text,
    read_index,
    shard_fault,
    shard_header,
)
from graphcap.errors import ConfigError, DataError
from graphcap.ops import checkpoint, reindex

SHARD = re.compile(r"shard-(\d{5,})\.safetensors")
MARK = re.compile(r"\.shard-\d{5,}\.safetensors\.damaged")
PARTIAL = re.compile(r"\.(shard-\d{5,}\.safetensors|index\.json\.\d+)\.partial")
OURS = re.compile("|".join(pattern.pattern for pattern in (SHARD, MARK, PARTIAL)))


class FeatureFolder:
    """A store's folder that is this process's own to write until `close`."""

    def __init__(self, folder: Path) -> None:
        """Make or take the folder. Raises: ConfigError where it holds something else, or another process writes it."""
        self.folder = Path(folder)
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise self._taken("a file")
            self.folder.mkdir(parents=True, exist_ok=True)
            self._take()
        except OSError as error:
            raise self._taken(f"one that cannot be made or written: {error.strerror or error}") from error

    def _take(self) -> None:
        others = [name for name in os.listdir(self.folder) if not (name == ".lock" or OURS.fullmatch(name))]
        if others and INDEX not in others:
            raise self._taken(f"one without {INDEX} that holds {min(others)}")
        self._lock = open(self.folder / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - it stays open as long as the folder
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise self._taken("one that another process writes") from error

    def reopen(self) -> list[str]:
        """Bring the folder into the state that a finished writer leaves; returns a line for each thing that was mended.

        Raises: DataError if index.json is lost and the shards do not hold what it said; ConfigError if there are shards that it
        does not list.
        """
        for name in os.listdir(self.folder):
            if PARTIAL.fullmatch(name):
                (self.folder / name).unlink()
        if not (self.folder / INDEX).is_file() and not has_shards(self.folder):
            return []
        try:
            kind, shards = read_index(self.folder)
        except IndexLost as lost:
            return self._write_anew(lost)
        faults = {shard.name: fault for shard in shards if (fault := shard_fault(self.folder, kind, shard))}
        kept = [shard for shard in shards if shard.name not in faults]
        following = _following(shards)
        for name in sorted(set(filter(SHARD.fullmatch, os.listdir(self.folder))) - {shard.name for shard in kept}):
            if name not in faults and name != following:  # at most the one shard that a dead writer had not listed yet
                raise self._taken(f"one with {name}, which its {INDEX} does not list")
            (self.folder / name).unlink()
        if faults:  # behind the files: one that the index did not list any more would look like somebody else's
            self._write_index(kind, kept)
        self._unmark()
        return [_given_up(name, fault) for name, fault in faults.items()]

    def _write_anew(self, lost: IndexLost) -> list[str]:
        """Write the index that the shards give, without those that are damaged. Returns lines as `reopen`."""
        names = sorted(filter(SHARD.fullmatch, os.listdir(self.folder)))
        found = [reindex.read_back(self.folder, name) for name in names]
        faults = {name: one for name, one in zip(names, found) if isinstance(one, str)}
        kinds = [one for one in found if not isinstance(one, str)]
        for kind, shard in kinds[1:]:
            check_kind(kind, kinds[0][0], self.folder / shard.name)
        for name in faults:
            (self.folder / name).unlink()
        if kinds:
            self._write_index(kinds[0][0], [shard for _, shard in kinds])
        else:
            (self.folder / INDEX).unlink(missing_ok=True)
        self._unmark()
        told = f"index     {lost.got}; {INDEX} is written anew from {len(kinds)} shards, every byte of them read"
        return [told, *(_given_up(name, fault) for name, fault in faults.items())]

    def _unmark(self) -> None:
        """Take away the marks of shards that are no longer there, or were read and are right."""
        for name in filter(MARK.fullmatch, os.listdir(self.folder)):
            (self.folder / name).unlink()

    def writer(self, kind: Kind, *, shard_bytes: int) -> "FeatureWriter":
        """A writer behind the shards that are there. Raises: ConfigError if they are features of another kind."""
        shards: list[Shard] = []
        if (self.folder / INDEX).is_file():
            there, shards = read_index(self.folder)
            check_kind(there, kind, self.folder)
        else:
            self._write_index(kind, [])
        return FeatureWriter(self, kind, shards, shard_bytes=shard_bytes)

    def _write_index(self, kind: Kind, shards: list[Shard]) -> None:
        checkpoint.write_text(self.folder / INDEX, index_text(kind, shards))

    def close(self) -> None:
        """Let others write. A folder that nothing was written into goes."""
        if os.listdir(self.folder) == [".lock"]:
            (self.folder / ".lock").unlink()
            self.folder.rmdir()
        self._lock.close()

    def _taken(self, got: str) -> ConfigError:
        return ConfigError(
            "features",
            self.folder,
            expected="a folder of features that nobody else writes, or none yet",
            got=got,
            fix="choose another folder",
        )


class FeatureWriter:
    """Appends documents to a store. What was added is in the index once a shard is full, and after `close`."""

    def __init__(self, folder: FeatureFolder, kind: Kind, shards: list[Shard], *, shard_bytes: int) -> None:
        """shard_bytes: a shard is finished once it has so many bytes of features."""
        self.kind, self.shards, self._folder, self._shard_bytes = kind, shards, folder, shard_bytes
        self._file = None
        self._rows: list[tuple[int, int, int, int, bool]] = []  # of the shard under way, as in COLUMNS
        self._end = HEADER_BYTES
        self._sealed: Shard | None = None  # complete, but not in the index yet

    def add(self, document_id: int, held_out: bool, token_ids: np.ndarray, features_TF: np.ndarray) -> None:
        """Append a document. token_ids: int32 [T]. features_TF: [T, F] of `kind.host_dtype`.

        Raises: DataError naming folder and shard where the file system refuses.
        """
        assert features_TF.shape == (len(token_ids), self.kind.num_features) and features_TF.dtype == self.kind.host_dtype
        with self._refusals_told():
            if self._file is None:
                self._file = open(self._partial, "wb", buffering=0)  # noqa: SIM115 - closed with the shard
            packed = memoryview(np.ascontiguousarray(features_TF)).cast("B")
            self._write(packed, self._end)
            self._rows.append((document_id, digest_of(token_ids), len(token_ids), zlib.crc32(packed), held_out))
            self._end += len(packed)
            if self._end - HEADER_BYTES >= self._shard_bytes:
                self._finish()

    def close(self) -> None:
        """Finish the shard under way, also after an error: what was computed is kept. Raises: as `add`."""
        with self._refusals_told():
            if self._rows:
                self._finish()
            elif self._file is not None:
                self._file.close()
                self._partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _refusals_told(self):
        try:
            yield
        except OSError as error:
            folder, name = self._folder.folder, _following(self.shards)
            raise DataError(
                "features",
                folder,
                expected=f"a file system that takes {name}",
                got=error.strerror or str(error),
                cause=f"{checkpoint.disk_free_bytes(folder):,} bytes are free; the shards before it are intact",
                fix="free space or mend the folder's rights, then give the same command again: it computes what is missing",
            ) from error

    @property
    def _partial(self) -> Path:
        return self._folder.folder / f".{_following(self.shards)}.partial"

    def _write(self, data, offset: int) -> None:
        data = memoryview(data)
        done = 0
        while done < len(data):
            done += os.pwrite(self._file.fileno(), data[done:], offset + done)

    def _finish(self) -> None:
        """Put the shard under way in the index. Wherever it is interrupted, a second call goes on."""
        if self._sealed is None:
            self._sealed = self._seal()
        if self._partial.exists():
            os.rename(self._partial, self._folder.folder / self._sealed.name)
        checkpoint.sync(self._folder.folder)
        self._folder._write_index(self.kind, [*self.shards, self._sealed])
        self._rows = []  # first: with it `close` has nothing left to finish
        self._file.close()
        self.shards.append(self._sealed)
        self._file, self._end, self._sealed = None, HEADER_BYTES, None

    def _seal(self) -> Shard:
        """Complete the hidden file."""
        columns = [np.array(values, dtype) for values, (_, dtype) in zip(zip(*self._rows), COLUMNS.values(), strict=True)]
        packed = b"".join(column.tobytes() for column in columns)
        num_tokens = int(columns[2].sum())
        self._write(shard_header(self.kind, num_tokens=num_tokens, columns=packed), 0)
        end = HEADER_BYTES + num_tokens * self.kind.token_bytes  # not self._end: an interrupted `add` may not have raised it
        self._file.truncate(end)  # half of a document whose writing failed lies behind: on a full disk, the only room there is
        self._write(packed, end)
        os.fsync(self._file.fileno())
        with open(self._partial, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        first, last = (document_name(row[0], row[4]) for row in (self._rows[0], self._rows[-1]))
        name, size = _following(self.shards), end + len(packed)
        return Shard(name, size, sha256, len(self._rows), num_tokens, zlib.crc32(packed), first, last)


def check_kind(there: Kind, wanted: Kind, folder: Path) -> None:
    """Raises: ConfigError naming whatever differs between the features in a folder and those that are wanted."""
    same_target = there.target["fingerprint"] == wanted.target["fingerprint"]
    names = ("target_layer_ids", "hidden_size", "dtype") + (() if same_target else ("target",))
    wrong = [name for name in names if getattr(there, name) != getattr(wanted, name)]
    if wrong:
        raise ConfigError(
            "features",
            folder,
            expected=", ".join(f"{name} {_shown(getattr(wanted, name))}" for name in wrong),
            got=", ".join(f"{name} {_shown(getattr(there, name))}" for name in wrong),
            fix="set the recipe's target and drafter keys as they were for these features, or extract into another folder",
        )


def _given_up(name: str, fault: str) -> str:
    return f"given up  {name}: {fault}; its documents are computed again"


def _shown(value) -> str:
    if isinstance(value, dict):
        return f"{value['name']} (fingerprint {value['fingerprint']})"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _following(shards: list[Shard]) -> str:
    """The name of the next shard: no number is given twice while its shard is listed."""
    number = 1 + max((int(SHARD.fullmatch(shard.name)[1]) for shard in shards), default=-1)
    return f"shard-{number:05d}.safetensors"
