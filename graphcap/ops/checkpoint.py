"""Checkpoints: folders that are either complete or never chosen, whatever kills the process that writes them.

A checkpoint is `checkpoints/update-<n>/`: safetensors files, JSON documents and, written last, `manifest.json` with
size and SHA-256 of every file. It is written under a hidden name, synced, and renamed into place. Names in the folder:
    update-00000120            a checkpoint
    .update-00000120.partial   a save under way or dead, or a deletion: never chosen, removed by the next save
    update-00000120.old        a complete one that a save of the same update replaces: counts until the new one stands
Not its job: what goes into the files and when (the trainer's). One process writes, any number may read. It reads only
safetensors and JSON and never unpickles. Called by train, eval and ops; loads torch only to save and load tensors.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from graphcap.errors import CheckpointError

if TYPE_CHECKING:
    import torch

VERSION = 1
MANIFEST = "manifest.json"
COMPLETE_NAME = re.compile(r"update-(\d{8,})(\.old)?")
PARTIAL_NAME = re.compile(r"\.update-(\d{8,})(\.old)?\.partial")
ROOM = "free space, lower checkpoint.keep, or write to another disk with run.out=FOLDER"
HEADER_BYTES_PER_TENSOR = 512  # a safetensors header names dtype, shape and offsets: about 100 bytes, and the name


def save(
    folder: Path,
    update: int,
    *,
    tensors: dict[str, dict[str, "torch.Tensor"]],
    documents: dict[str, dict],
    score: float | None,
    keep: int,
) -> Path:
    """Write checkpoint `update` into `folder` and delete those no longer kept: the `keep` newest and the best stay.

    tensors: {file name: {tensor name: tensor}}, any dtype and device, copied to the CPU file by file; they must not
    change until this returns. documents: {file name: JSON object}. score: higher is better; nan and inf count as none.
    Killed at any point, the folder holds every complete checkpoint it held before, or the new one besides, or the new
    one for an old one of the same update. A complete checkpoint of the same content is left as it is.
    Raises: CheckpointError (disk full, or another refusal of the file system); older checkpoints are intact then.
    """
    assert update >= 0 and keep >= 1, f"update counts from 0 and keep from 1, not {update} and {keep}"
    texts = {name: _exact_json(document, name) for name, document in documents.items()}
    for name in (*tensors, *texts):
        assert Path(name).name == name and name != MANIFEST, f"not a plain file name: {name}"
    folder = Path(folder)
    final = folder / f"update-{update:08d}"
    size_bytes = needed_bytes(tensors) + sum(len(text.encode()) for text in texts.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear_unfinished(folder)
        check_room(folder, size_bytes)
        partial = folder / f".{final.name}.partial"
        manifest = _write_partial(partial, update, tensors, texts, score)
        if _inspect(final, hashes=False)[0] == manifest and not verify(final):
            _remove(partial)
        else:
            _put_in_place(partial, final)
        _prune(folder, keep=keep, just_saved=final)
    except OSError as error:
        raise CheckpointError(
            "checkpoint",
            final,
            expected=f"room for {size_bytes:,} bytes, written and synced",
            got=str(error),
            cause=f"{disk_free_bytes(folder):,} bytes are free in {folder}; older checkpoints are intact",
            fix="free space or mend the folder's rights, then give the same command again",
        ) from error
    return final


def verify(path: Path) -> str:
    """'' where checkpoint `path` is complete, all sizes and hashes right; else why not, in words. Reads every byte."""
    return _inspect(Path(path), hashes=True)[1]


def newest(folder: Path, *, hashes: bool = True) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of `folder`, and one line with the reason for each newer one that was passed over.

    hashes: read every byte; without, files of the right sizes are believed, which takes no time. (None, reasons) where none
    is complete, (None, []) where there is no folder. Writes nothing; any rank may call it.
    """
    partials = [(int(match[1]), name) for name in _names(folder) if (match := PARTIAL_NAME.fullmatch(name))]
    unfinished = [(update, f"{name}: a save that did not finish") for update, name in sorted(partials, reverse=True)]
    damaged = []
    for update, path in _listed(folder):
        why = _inspect(path, hashes=hashes)[1]
        if not why:
            return path, damaged + [line for partial_update, line in unfinished if partial_update > update]
        damaged.append(f"{path.name}: {why}")
    return None, damaged + [line for _, line in unfinished]


def best(folder: Path) -> Path | None:
    """The complete checkpoint of the highest score, the newest of equal ones; None where none has a score."""
    return next((path for path in _by_score(folder) if not verify(path)), None)


def weights_of(folder: str | Path) -> Path:
    """The best complete checkpoint of a run's folder, the newest where none has a score; any other folder itself."""
    kept = Path(folder) / "checkpoints"
    return best(kept) or newest(kept)[0] or Path(folder)


def read_manifest(path: Path) -> dict:
    """The manifest of checkpoint `path`: version, update, score (or None), files {name: {bytes, sha256}}.

    Raises: CheckpointError where the manifest or any file of it is missing or has another size.
    """
    manifest, why = _inspect(Path(path), hashes=False)
    if why:
        raise _incomplete(Path(path), why)
    return manifest


def load_tensors(path: Path, name: str) -> dict[str, "torch.Tensor"]:
    """The tensors of file `name` of checkpoint `path`, on the CPU, bit for bit as saved. Raises: as load_document."""
    from safetensors.torch import load_file

    return load_file(_checked_file(Path(path), name))


def load_document(path: Path, name: str) -> dict:
    """The JSON object of file `name` of checkpoint `path`. Raises: as read_manifest, and where the hash differs."""
    return json.loads(_checked_file(Path(path), name).read_text(encoding="utf-8"))


def needed_bytes(tensors: dict[str, dict[str, "torch.Tensor"]]) -> int:
    """Disk that one checkpoint of these tensors takes, in bytes, rounded up. At most keep + 2 exist during a save."""
    named = [item for file_tensors in tensors.values() for item in file_tensors.items()]
    return sum(tensor.nbytes + HEADER_BYTES_PER_TENSOR + len(name.encode()) for name, tensor in named)


def check_room(folder: Path, needed_bytes: int, *, fix: str = ROOM) -> None:
    """Raise CheckpointError, naming both, where the disk of `folder` (there or not yet) has not needed_bytes free."""
    free_bytes = disk_free_bytes(folder)
    if free_bytes < needed_bytes:
        raise CheckpointError(
            "folder",
            folder,
            expected=f"{needed_bytes:,} bytes free",
            got=f"{free_bytes:,} bytes",
            fix=fix,
        )


def finite(value):
    """`value` with every float that JSON cannot hold (nan, inf) as None, through dicts, lists and tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def write_json(path: Path, document) -> None:
    """Write `document` to `path` as JSON, sorted keys, whole or not at all; nan and inf become null."""
    write_text(path, _json(finite(document)))


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8 so that a reader, or a kill at any point, finds the old file or the new one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """The same for bytes. Raises: OSError; then nothing is left beside the old file."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")  # two processes may write the same file
    try:
        _write_synced(beside, data)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _write_partial(partial: Path, update: int, tensors: dict, texts: dict[str, str], score: float | None) -> dict:
    """Write every file, synced, and last the manifest into the new folder `partial`; where that fails, none stays."""
    partial.mkdir()
    try:
        for name, text in texts.items():
            _write_synced(partial / name, text)
        for name, file_tensors in tensors.items():
            write_tensors(partial / name, file_tensors)
        files = [partial / name for name in (*texts, *tensors)]
        entries = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}
        score = None if score is None else finite(float(score))
        manifest = {"version": VERSION, "update": update, "score": score, "files": entries}
        _write_synced(partial / MANIFEST, _sealed(manifest))
        sync(partial)
    except BaseException:
        _remove(partial)
        raise
    return manifest


def write_tensors(path: Path, tensors: dict[str, "torch.Tensor"]) -> None:
    """Write a safetensors file, synced, of tensors of any device; half of one stays where that is cut off. Raises: OSError."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Copies, because safetensors refuses tensors that share memory, and ours are views of flat buffers.
    packed = torch.contiguous_format
    copies = {name: tensor.detach().to("cpu", copy=True, memory_format=packed) for name, tensor in tensors.items()}
    try:
        save_file(copies, path)
    except SafetensorError as error:  # its way to say what the operating system said
        raise OSError(str(error)) from error
    os.chmod(path, path.parent.stat().st_mode & 0o666)  # save_file makes files that only their owner may read
    sync(path)


def _put_in_place(partial: Path, final: Path) -> None:
    """Rename the finished `partial` to `final`; an old `final` counts, as `.old`, until the new one stands."""
    aside = final.with_name(final.name + ".old")
    if final.exists():
        final.rename(aside)
    partial.rename(final)
    sync(final.parent)
    if aside.exists():
        _delete(aside)


def _clear_unfinished(folder: Path) -> None:
    """Bring the folder into the state that a finished save leaves, from wherever a dead one left it."""
    for name in _names(folder):
        if PARTIAL_NAME.fullmatch(name):
            _remove(folder / name)
    for aside in [path for _, path in _listed(folder) if path.suffix == ".old"]:
        final = aside.with_suffix("")
        worse = final if verify(final) else aside
        if worse.exists():
            _delete(worse)
        if worse is final:
            aside.rename(final)
    sync(folder)


def _prune(folder: Path, *, keep: int, just_saved: Path) -> None:
    """Delete all but the just saved, the `keep` newest complete, the best, and damaged ones that are newer."""
    # Complete by manifest and sizes: to read every byte of all checkpoints would cost more than the save.
    listed = [path for _, path in _listed(folder)]
    complete = [path for path in listed if not _inspect(path, hashes=False)[1]]
    older = listed[listed.index(just_saved) + 1 :]
    for path in {*complete[keep:], *older} - {*complete[:keep], *_by_score(folder)[:1], just_saved}:
        _delete(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint; one rename ends its being one, so that a kill leaves no half of it under its name."""
    _remove(path.rename(path.with_name(f".{path.name}.partial")))


def _remove(hidden: Path) -> None:
    """Remove a hidden folder. What a reader on a network file system still holds open stays until the next save."""
    shutil.rmtree(hidden, ignore_errors=True)


def _write_synced(path: Path, content: str | bytes) -> None:
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """fsync a file, or a folder: the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():  # some file systems sync no folder
            raise
    finally:
        os.close(descriptor)


def disk_free_bytes(folder: Path) -> int:
    """Bytes free on the disk of `folder`, which need not be there yet."""
    folder = Path(folder).absolute()
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.is_dir())).free


def _names(folder: Path) -> list[str]:
    return os.listdir(folder) if Path(folder).is_dir() else []


def _listed(folder: Path) -> list[tuple[int, Path]]:
    """(update, path) of whatever has a checkpoint's name, newest first, `update-<n>` before `update-<n>.old`."""
    matches = [match for name in _names(folder) if (match := COMPLETE_NAME.fullmatch(name))]
    matches.sort(key=lambda match: (int(match[1]), match[2] is None), reverse=True)
    return [(int(match[1]), Path(folder) / match[0]) for match in matches]


def _by_score(folder: Path) -> list[Path]:
    """Checkpoints that have a score and are complete by size, best first, newest first among equals."""
    found = [(path, _inspect(path, hashes=False)[0]) for _, path in _listed(folder)]
    scored = [(manifest["score"], path) for path, manifest in found if manifest and manifest["score"] is not None]
    return [path for _, path in sorted(scored, key=lambda pair: -pair[0])]  # a stable sort: the newest stays first


def _inspect(path: Path, *, hashes: bool) -> tuple[dict | None, str]:
    """(manifest, '') where every file of `path` is there in full, else (None, why not). hashes: contents too."""
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
            return None, f"{MANIFEST} is not of version {VERSION}, the one this graphcap reads"
        del manifest["sha256"]
        if _sealed(manifest) != text:
            return None, f"{MANIFEST}: hash differs"
    except (FileNotFoundError, NotADirectoryError):
        return None, f"no {MANIFEST}" if path.is_dir() else "no such folder"
    except (OSError, ValueError, KeyError) as error:
        return None, f"{MANIFEST} cannot be read: {error}"
    try:
        for name, entry in manifest["files"].items():
            size_bytes = (path / name).stat().st_size
            if size_bytes != entry["bytes"]:
                return None, f"{name} has {size_bytes} of {entry['bytes']} bytes"
            if hashes and _sha256(path / name) != entry["sha256"]:
                return None, f"{name}: hash differs"
    except FileNotFoundError:
        return None, f"no {name}"
    except OSError as error:
        return None, f"{name} cannot be read: {error}"
    return manifest, ""


def _checked_file(path: Path, name: str) -> Path:
    """Path of file `name` after its hash and the presence of all others were checked."""
    files = read_manifest(path)["files"]
    if name not in files:
        raise _incomplete(path, f"no {name} among its files {', '.join(sorted(files))}")
    if _sha256(path / name) != files[name]["sha256"]:
        raise _incomplete(path, f"{name}: hash differs")
    return path / name


def _incomplete(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "checkpoint",
        path,
        expected="a complete checkpoint",
        got=why,
        fix=f"use another one of {path.parent}, or copy this one again from where it came",
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(manifest: dict) -> str:
    """The manifest's text with a hash of itself in it, so that a changed score or update is damage too."""
    return _json({**manifest, "sha256": hashlib.sha256(_json(manifest).encode()).hexdigest()})


def _json(document) -> str:
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _exact_json(document: dict, name: str) -> str:
    """A checkpoint's document comes back as it went in (tuples as lists), so nothing is replaced by null here."""
    text = _json(document)
    assert json.loads(text) == finite(document), f"{name}: JSON cannot hold it exactly; are all keys text?"
    return text
