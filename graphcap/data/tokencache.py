"""Documents kept on disk from one run to the next: made once for the same texts, tokenizer and rules, and checked when used.

A kept set is a folder named by its key, a hash of all that its documents depend on: the contents of the files (all of
them: 4 GB take about 3 s to hash, and no time of day or name vouches for contents), the tokenizer and chat template, the
versions that render and encode, the rules. It holds the columns of documents.py and `index.json`, written last and with a
hash of itself. It is written under a hidden name, synced, and renamed into place; whoever finds it there checks sizes and
CRCs first and makes a damaged one anew. Nothing else is ever changed in it, and a process that has mapped one keeps it even
if it is replaced.

Called by conversations.py; knows not which folder a user's caches have.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from graphcap.data.documents import COLUMNS, LOSS_MASK, NUMBERS, TOKEN_IDS, Columns, DocumentList
from graphcap.data.encoder import tokenizer_form
from graphcap.data.sources import Source
from graphcap.data.tokenising import VERSION, Rules
from graphcap.errors import DataError

FORMAT = 2
INDEX = "index.json"
KEPT_FROM_BYTES = 1 << 24  # smaller texts are tokenised in seconds
_UNUSED_S = 30 * 24 * 3600  # after which a set goes when another one is made
_BYTES_A_TOKEN = 3  # of text, at the least, as files of many languages go
_KEPT = re.compile("[0-9a-f]{32}")
_ASIDE = re.compile(r"\.[0-9a-f]{32}\.(partial.*|old)")
_PACKAGES = ("transformers", "tokenizers", "jinja2")


@dataclass(frozen=True)
class Key:
    """Which kept set the documents are. text_bytes: of the files, unpacked, about; of the Hub nothing is known."""

    name: str
    text_bytes: int
    token_dtype: str


def key_of(sources: Sequence[Source], tokenizer, rules: Rules) -> Key | None:
    """The key of what these sources become; None where it is not worth it, or where something cannot be named for sure.

    Raises: DataError if a file cannot be read.
    """
    form = tokenizer_form(tokenizer)
    sizes = [source.size_bytes() for source in sources]
    if not form or None in sizes or sum(sizes) < KEPT_FROM_BYTES:
        return None
    template = json.dumps(tokenizer.chat_template)
    made_of = {
        "format": FORMAT,
        "tokenising": VERSION,
        "sources": [source.fingerprint() for source in sources],
        "tokenizer": [type(tokenizer).__name__, form, template, dict(tokenizer.special_tokens_map)],
        "day": time.strftime("%Y-%m-%d") if "strftime_now" in template else "",
        "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
        "rules": asdict(rules),
    }
    name = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]
    most = max(len(tokenizer), *tokenizer.get_vocab().values())
    text_bytes = sum(size for source, size in zip(sources, sizes) if not source.revision)
    return Key(name, text_bytes, "uint16" if most < 1 << 16 else "int32")


@contextlib.contextmanager
def alone(folder: Path, key: Key, say) -> Iterator[None]:
    """Hold the key, so that of several processes one makes the set and the others use it. Raises: DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / f".{key.name}.lock", "a", encoding="utf-8")
    except OSError as error:
        raise _cannot_write(folder, error) from error
    with file:
        locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is tokenising the same texts; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a network file system without locks: two may then do the same work, and the second one's stands
            locked = False
        for left in folder.glob(f".{key.name}.partial-*") if locked else ():  # by a process that died
            shutil.rmtree(left, ignore_errors=True)
        yield


def find(folder: Path, key: Key, names: Sequence[str], say) -> tuple[DocumentList, dict] | None:
    """The kept set of this key and its index; None if there is none, or a damaged one, which is said."""
    kept = folder / key.name
    if not kept.exists():
        return None
    try:
        text = (kept / INDEX).read_text(encoding="utf-8")
        index = json.loads(text)
        del index["sha256"]
        if _index_text(index) != text:
            raise ValueError(f"{INDEX} differs from its hash")
        for name, expected in index["files"].items():
            found = {"bytes": (kept / name).stat().st_size, "crc32": _crc32(kept / name)}
            if found != expected:
                raise ValueError(f"{name} has {found}, not {expected}")
        columns = _mapped(kept, index["token_dtype"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"kept documents in {kept} are damaged ({' '.join(str(error).split())[:120]}); tokenised anew")
        return None
    with contextlib.suppress(OSError):  # only for its age
        os.utime(kept / INDEX)
    return DocumentList(*columns, names), index


class Making:
    """A set that is being made. Until `finish` nothing of it can be found; `discard` takes it away."""

    def __init__(self, folder: Path, key: Key) -> None:
        """Raises: DataError if the disk has no room for it or refuses."""
        self._folder, self._key, self._aside = folder, key, folder / f".{key.name}.partial-{secrets.token_hex(4)}"
        needed = key.text_bytes // _BYTES_A_TOKEN * (np.dtype(key.token_dtype).itemsize + 1)
        try:
            _remove_unused(folder)
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise _no_room(folder, f"{needed / 2**30:.1f} GiB for tokens", f"{free / 2**30:.1f} GiB free")
            self._aside.mkdir()
            self.columns = Columns(self._aside, np.dtype(key.token_dtype))
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def finish(self, index: dict, names: Sequence[str]) -> DocumentList:
        """Put the set in its place, whole. index: what else is to be known of it. Raises: OSError."""
        self.columns.close()
        self.columns.numbers().tofile(self._aside / NUMBERS)
        files = (TOKEN_IDS, LOSS_MASK, NUMBERS)
        checks = {name: {"bytes": (self._aside / name).stat().st_size, "crc32": _crc32(self._aside / name)} for name in files}
        whole = index | {"format": FORMAT, "token_dtype": self._key.token_dtype, "made": time.time(), "files": checks}
        (self._aside / INDEX).write_text(_index_text(whole), encoding="utf-8")
        for path in (*(self._aside / name for name in (*files, INDEX)), self._aside):
            _sync(path)
        kept = self._folder / self._key.name
        if kept.exists():  # damaged; a process that has mapped it keeps it
            old = self._folder / f".{self._key.name}.old"
            shutil.rmtree(old, ignore_errors=True)
            kept.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        self._aside.rename(kept)
        _sync(self._folder)
        return DocumentList(*_mapped(kept, self._key.token_dtype), names)

    def discard(self) -> None:
        """Take away what was written."""
        self.columns.discard()
        shutil.rmtree(self._aside, ignore_errors=True)

    def failed(self, error: OSError) -> DataError:
        """The refusal of the file system in our words."""
        return _cannot_write(self._folder, error)


def _index_text(index: dict) -> str:
    """index.json, with a hash of itself."""
    return json.dumps(index | {"sha256": hashlib.sha256(json.dumps(index).encode()).hexdigest()})


def _mapped(kept: Path, token_dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = np.fromfile(kept / NUMBERS, COLUMNS)
    return numbers, np.memmap(kept / TOKEN_IDS, token_dtype, "r"), np.memmap(kept / LOSS_MASK, bool, "r")


def _crc32(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unused(folder: Path) -> None:
    """Sets that no run has used for long, and what processes that died long ago left behind; nothing that is not ours.

    A lock stays, empty as it is: another process may be about to take it.
    """
    for path in folder.iterdir():
        known = path / INDEX if _KEPT.fullmatch(path.name) else path if _ASIDE.fullmatch(path.name) else None
        with contextlib.suppress(OSError):  # another process removes it too
            if known is not None and time.time() - known.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(path)


def _no_room(folder: Path, expected: str, got: str) -> DataError:
    fix = "make room, name a folder on another disk with data.cache, or keep nothing: data.cache="
    return DataError("folder for tokenised texts", folder, expected=expected, got=got, fix=fix)


def _cannot_write(folder: Path, error: OSError) -> DataError:
    return _no_room(folder, "a folder that can be written", (error.strerror or str(error)).lower())
