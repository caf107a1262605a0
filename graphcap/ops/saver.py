"""Saving without stopping: the state is copied to host memory between two replays, and a thread writes the copy.

The training loop pays for the copy alone: on CUDA the stream of the replays is held for it and the host not at all. What
makes the files is checkpoint.save, so a folder has the bytes that a blocking save would have written, and a kill at any
point leaves what checkpoint.save promises. Not its job: what is saved and when. Called by train.

The thread calls CUDA only to ask whether the copy has arrived: it launches nothing, compiles nothing, allocates nothing
there and uses no stream. It is not a daemon: a process that ends, by an exception too, first completes the save under
way (a dead daemon would leave half of one). It cannot wait for ever for a device that hangs; see COPY_LIMIT_S.
"""

import copy
import math
import mmap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from graphcap.errors import CheckpointError, GraphcapError
from graphcap.ops import checkpoint

ALIGNMENT_BYTES = 128  # of each tensor's start in the host memory
POLL_S = 0.005  # between two looks whether the copy has arrived; Event.synchronize would spin on a core, without end
COPY_LIMIT_S = 600.0  # for the copy and all replays queued before it; after that the device hangs
EXIT_LIMIT_S = 30.0  # the same once the main thread has ended and queues nothing more
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
SYSTEM = Path("/")  # where proc and sys lie

Files = dict[str, dict[str, Tensor]]


class Saver:
    """Writes checkpoints into `folder` in a thread while training goes on; one at a time.

    All methods are the main thread's. The error of a save that failed is raised by whatever is called first of check,
    begin, wait and close, once, with type and traceback as it was raised in the thread; older checkpoints are intact then.
    """

    def __init__(self, folder: Path, *, keep: int, on_saved: Callable[[int], None] | None = None) -> None:
        """folder, keep: as checkpoint.save takes them. on_saved: called in the thread with the update of a complete save."""
        self.folder, self.keep, self._on_saved = Path(folder), keep, on_saved
        self._last_saved: int | None = None
        self._save: _Save | None = None  # the one under way, or the last one that ended well
        self._memory: mmap.mmap | None = None
        self._pinned = False
        self._host: Files = {}
        self._arrivals: list[torch.cuda.Event] = []  # of the copies made last, one a device

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close. An exception on its way is never hidden: the error of the save, if any, becomes a note on it."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:
            error.add_note(f"The save that was under way failed too: {failure}")

    @property
    def last_saved(self) -> int | None:
        """Update of the newest complete save of this object; None before the first."""
        return self._last_saved

    def reserve(self, tensors: Files) -> None:
        """Get host memory for copies of these tensors and touch all of it, so that no later save waits for memory.

        tensors: {file name: {tensor name: tensor}}, any dtype and device; pinned if one of them is on CUDA.
        Raises: CheckpointError, naming both sizes, where the memory cannot be had.
        """
        assert self._memory is None, "reserve comes once"
        size_bytes = max(sum(_room(tensor) for _, _, tensor in _walk(tensors)), 1)
        # checkpoint.save copies file by file, whatever it is given.
        most_bytes = size_bytes + max((sum(t.nbytes for t in file.values()) for file in tensors.values()), default=0)
        available_bytes = _available_bytes()
        if available_bytes < most_bytes:
            raise _refused(most_bytes, f"{available_bytes:,} bytes")
        try:
            # Not torch's pinned allocator, which rounds up to a power of two: up to twice the memory.
            self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _refused(most_bytes, str(error)) from error
        whole = torch.frombuffer(self._memory, dtype=torch.uint8).zero_()
        if any(tensor.is_cuda for _, _, tensor in _walk(tensors)):
            self._memory.madvise(mmap.MADV_DONTFORK)  # a fork could part these pages from those the device writes to
            code = int(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), size_bytes, PORTABLE))
            if code:
                self._memory = None
                raise _refused(most_bytes, f"error {code} of cudaHostRegister")
            self._pinned = True
        self._host = _places(tensors, self._memory)

    def begin(self, update: int, *, tensors: Files, documents: dict[str, dict], score: float | None) -> None:
        """Copy everything and begin to write it as checkpoint `update`; waits only for the save before it.

        tensors: those given to reserve, or others of the same names, dtypes, shapes and devices; documents, score: as
        checkpoint.save takes them. On CUDA the copies are queued on the current stream, so they hold what work queued
        before this call leaves, whatever is queued on that stream after it; on the CPU everything may change at once.
        Raises: the error of the save before, and then begins nothing. Capture: not safe.
        """
        self.wait()
        assert _layout(tensors) == _layout(self._host) != [], "tensors are not those that memory was reserved for"
        self._copy(tensors)
        save = _Save(update, copy.deepcopy(documents), score)
        save.thread = threading.Thread(target=self._write, args=(save,), name=f"checkpoint-{update}", daemon=False)
        try:
            self._save = save
            save.thread.start()
        except BaseException:  # no thread to be had, or Ctrl-C at any point of the start
            if save.turn.acquire(blocking=False):
                self._save = None  # it has not begun and never will
            raise

    def check(self) -> None:
        """Raise the error of a save that failed and was not told yet; waits for nothing."""
        if self._save is not None and not self._save.thread.is_alive():
            self.wait()

    def wait(self) -> Path | None:
        """Wait for the save under way. The folder of the save begun last; None if there was none. Raises: its error.

        Ctrl-C ends the waiting, not the save.
        """
        if self._save is None:
            return None
        self._save.thread.join()
        error = self._save.error
        if error is not None:
            self._save = None
            raise error
        return self._save.path

    def close(self) -> None:
        """Wait for the save under way and give the host memory back. A second time does nothing. Raises: as wait.

        In a `finally` it would put its error in the place of the one on its way, which then is only its context; there
        `with Saver(...) as saver:` is the form that hides neither.
        """
        try:
            self.wait()
        finally:
            if self._save is None or not self._save.thread.is_alive():  # not where Ctrl-C ended the waiting
                self._give_back()

    def _copy(self, tensors: Files) -> None:
        """Copy `tensors` to their places, on CUDA behind all work of the current stream of each device."""
        devices = {tensor.device for _, _, tensor in _walk(tensors) if tensor.is_cuda}
        self._arrivals = []
        try:
            for file, name, tensor in _walk(tensors):
                self._host[file][name].copy_(tensor.detach(), non_blocking=True)
        finally:  # an interrupted one too may still be writing
            for device in devices:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                self._arrivals.append(event)

    def _write(self, save: "_Save") -> None:
        """The thread."""
        if not save.turn.acquire(blocking=False):
            return
        try:
            _await(self._arrivals, save.update)
            save.path = checkpoint.save(
                self.folder,
                save.update,
                tensors=self._host,
                documents=save.documents,
                score=save.score,
                keep=self.keep,
            )
            self._last_saved = save.update
            if self._on_saved is not None:
                self._on_saved(save.update)
        except BaseException as error:  # told by the main thread, whatever it is
            save.error = error

    def _give_back(self) -> None:
        if self._memory is None or not all(_arrived(event) for event in self._arrivals):
            return  # a device that hangs may still write: the memory stays until the process ends
        if self._pinned:
            start = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
            torch.cuda.cudart().cudaHostUnregister(start)  # refuses only where CUDA is dead, which others tell
        self._memory, self._pinned, self._host = None, False, {}


@dataclass
class _Save:
    """One save. turn: who takes it first decides, the thread to write or the main thread that it will not."""

    update: int
    documents: dict[str, dict]
    score: float | None

    def __post_init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.turn = threading.Lock()
        self.path: Path | None = None
        self.error: BaseException | None = None


def _walk(tensors: Files) -> list[tuple[str, str, Tensor]]:
    return [(file, name, tensor) for file, named in tensors.items() for name, tensor in named.items()]


def _layout(tensors: Files) -> list[tuple]:
    return [(file, name, tensor.dtype, tensor.shape) for file, name, tensor in _walk(tensors)]


def _room(tensor: Tensor) -> int:
    return math.ceil(tensor.nbytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _places(tensors: Files, memory: mmap.mmap) -> Files:
    """A contiguous tensor in `memory` for each of `tensors`; each has a storage of its own, so that none seems shared."""
    host: Files = {file: {} for file in tensors}
    start = 0
    for file, name, tensor in _walk(tensors):
        place = torch.empty(0, dtype=tensor.dtype)
        if tensor.nbytes:
            raw = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=start)
            place = raw.view(tensor.dtype)
        host[file][name] = place.view(tensor.shape)
        start += _room(tensor)
    return host


def _arrived(event: torch.cuda.Event) -> bool:
    with torch.cuda.device(event.device):  # a new thread's device is 0, where this process may have nothing
        return event.query()


def _await(arrivals: list[torch.cuda.Event], update: int) -> None:
    """Wait until all copies have arrived. Raises: GraphcapError if the device does not come to that."""
    deadline = time.monotonic() + COPY_LIMIT_S
    while not all(_arrived(event) for event in arrivals):
        now = time.monotonic()
        if not threading.main_thread().is_alive():
            deadline = min(deadline, now + EXIT_LIMIT_S)
        if now > deadline:
            raise GraphcapError(
                "copy of the state",
                f"update {update}",
                expected="its arrival from the device in time",
                got="nothing",
                cause="the device hangs, or what it does before the copy waits for another process",
                fix="give the same command again: it continues from the newest complete checkpoint",
            )
        time.sleep(POLL_S)


def _refused(needed_bytes: int, got: str) -> CheckpointError:
    return CheckpointError(
        "host memory",
        "copies of the state",
        expected=f"{needed_bytes:,} bytes free",
        got=got,
        cause="a save copies weights and optimizer state to host memory, and each file once more while it is written",
        fix="end other programs, or give the machine, container or job more memory",
    )


def _available_bytes() -> int:
    """Host memory this process can still have: the machine's, or what its container or job leaves it if that is less."""
    meminfo = dict(line.split(":", 1) for line in (SYSTEM / "proc/meminfo").read_text().splitlines())
    left_bytes = [int(meminfo["MemAvailable"].split()[0]) * 1024]
    for group in _memory_groups():
        try:
            two = (group / "memory.max").exists()  # version 2 of control groups, else 1
            limit = (group / ("memory.max" if two else "memory.limit_in_bytes")).read_text().strip()
            used = (group / ("memory.current" if two else "memory.usage_in_bytes")).read_text()
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # the root of version 2 has no limit, and a group may be hidden from its own processes
        cached = sum(int(stat.get(f"{'' if two else 'total_'}{age}_file", 0)) for age in ("active", "inactive"))
        if limit != "max":
            left_bytes.append(int(limit) - int(used) + cached)  # cached files give way
    return max(min(left_bytes), 0)


def _memory_groups() -> list[Path]:
    """Folders of the control groups that may limit this process's memory, those above it included."""
    mounts = {"": SYSTEM / "sys/fs/cgroup", "memory": SYSTEM / "sys/fs/cgroup/memory"}
    groups = list(mounts.values())  # a container sees its own group here
    try:
        lines = (SYSTEM / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount = mounts.get("memory" if "memory" in controllers.split(",") else controllers)
        if mount is not None:
            parts = Path(path).parts[1:]
            groups += [mount.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return groups
