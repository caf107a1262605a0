"""Where compiled kernels are kept between runs: one folder for each torch and GPU, checked before it is used.

Inductor and Triton share caches among all programs of a user, and a file that a kill or a full disk cut short ends every
later start with an error that names no remedy. So graphcap has a folder of its own, made for this torch and GPU alone; it is
looked through before the first compile, and a damaged one is replaced, which costs one slower start. A folder that the user
has named is looked through too, and left as it is.

Calls: build.py, before anything compiles. Loads no torch.
"""

import atexit
import fcntl
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
STAMP = "made_by.json"


def use(made_by: dict[str, str], say, *, unless: str = "") -> None:
    """Set both variables to folders that can be used, where the user has set none. say: called with what was amiss.

    made_by: versions of torch and triton, and the GPU: another of these has other kernels. unless: the folder that torch
    itself writes into the environment, as if a user had, when it finds nothing there.
    """
    for variable, name in VARIABLES.items():
        own, chosen = folder(made_by) / name, os.environ.get(variable, "")
        if chosen in (unless, str(own)):
            chosen = ""
        wanted = Path(chosen or own)  # one that the user has chosen is looked at, never emptied
        os.environ[variable] = str(wanted)
        refused = _refusal(wanted)
        if refused:
            passing = tempfile.mkdtemp(prefix=f"graphcap-{name}-")
            atexit.register(shutil.rmtree, passing, ignore_errors=True)
            os.environ[variable] = passing
            say(f"caches    {wanted} cannot be written ({refused}); kernels are compiled anew, into {passing}")
            continue
        amiss = (not chosen and _other_version(wanted, made_by)) or next(damage(wanted), "")
        if amiss and chosen:
            say(f"caches    {wanted} ({variable}): {amiss}; if compiling fails, empty that folder")
        elif amiss and _alone(wanted):
            _replace(wanted)
            say(f"caches    {wanted}: {amiss}; replaced, so this start compiles every kernel")
        elif amiss:
            say(f"caches    {wanted}: {amiss}; left, another run is using it and may be writing that file now")
        if not chosen:
            _write_stamp(wanted, made_by)
            _hold(wanted)


_held: list = []  # locks of this process on the caches it uses, until it ends


def _lock_of(cache: Path) -> Path:
    return cache.with_name(f".{cache.name}.lock")


def _alone(cache: Path) -> bool:
    """Whether no other process uses the cache."""
    with open(_lock_of(cache), "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _hold(cache: Path) -> None:
    """Tell other processes, until this one ends, that the cache is in use."""
    file = open(_lock_of(cache), "a", encoding="utf-8")  # noqa: SIM115 - held as long as the process lives
    fcntl.flock(file, fcntl.LOCK_SH)
    _held.append(file)


def folder(made_by: dict[str, str]) -> Path:
    """~/.cache/graphcap/<torch>-<gpu>, or below XDG_CACHE_HOME."""
    return _root() / re.sub(r"[^\w.+-]+", "_", f"{made_by['torch']}-{made_by['gpu']}")


def documents_folder() -> Path | None:
    """~/.cache/graphcap/documents, or below XDG_CACHE_HOME: tokens of large texts (data/tokencache.py), for any GPU.

    None for a user without a home, as containers with a bare user number have.
    """
    try:
        return _root() / "documents"
    except RuntimeError:
        return None


def _root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphcap"


def damage(cache: Path) -> Iterator[str]:
    """What is wrong with files of a cache, one line each: cut short, empty, or no JSON. Reads no more than it must."""
    for path in sorted(cache.rglob("*")):
        why = _cut_short(path) if path.is_file() and not path.is_symlink() else ""
        if why:
            yield f"{path.relative_to(cache)} {why}"


def _cut_short(path: Path) -> str:
    """Why a file cannot be whole, or nothing."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:  # another run has just renamed it
        return ""
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return "is no JSON"
    elif path.suffix in (".so", ".cubin"):
        with open(path, "rb") as file:
            needed = _elf_bytes(file.read(64))
        if size < needed:
            return f"has {size} bytes of {needed}"
    elif path.suffix == ".py" and size == 0:
        return "is empty"
    elif path.suffix == "" and path.parent.parent.parent.name == "fxgraph":  # a pickle, which ends with a full stop
        with open(path, "rb") as file:
            file.seek(max(0, size - 1))
            if file.read() != b".":
                return "is cut short"
    return ""


def _elf_bytes(head: bytes) -> int:
    """How many bytes an ELF file has at least, from its header; more than any file if this is none."""
    if len(head) < 64 or head[:4] != b"\x7fELF" or head[4] != 2:
        return 1 << 62
    (sections_at,) = struct.unpack_from("<Q", head, 40)
    entry_size, count = struct.unpack_from("<HH", head, 58)
    return sections_at + entry_size * count


def _refusal(wanted: Path) -> str:
    """Why a folder cannot be written, or nothing."""
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _other_version(cache: Path, made_by: dict[str, str]) -> str:
    """How the cache's stamp differs, or nothing."""
    try:
        stamp = json.loads((cache / STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return ""
    changed = [f"{name} {stamp.get(name)} -> {value}" for name, value in made_by.items() if stamp.get(name) != value]
    return f"made by another version ({', '.join(changed)})" if changed else ""


def _write_stamp(cache: Path, made_by: dict[str, str]) -> None:
    beside = cache / f".{STAMP}.{os.getpid()}"
    beside.write_text(json.dumps(made_by), encoding="utf-8")
    beside.replace(cache / STAMP)


def _replace(cache: Path) -> None:
    """An empty folder in its place. Renamed first: another run that starts now finds the old one or an empty one."""
    aside = Path(tempfile.mkdtemp(prefix=f".{cache.name}-", dir=cache.parent))
    cache.rename(aside / cache.name)
    cache.mkdir()
    shutil.rmtree(aside, ignore_errors=True)
