"""The flight recorder: what a rank is doing, in memory that outlives it, whatever ends it.

Each rank maps one small file in the node's memory (/dev/shm, else the folder for temporary files) and writes there what it
begins: phase, update, bucket. Even after SIGKILL the file says what ran last. A GPU writes into the same file how many
launches it has finished, so that a fault inside a replay is pinned to its update. The supervisor, or the rank
itself where there is none, copies the file into the run's folder as `rank-<k>/flight.bin`.

Calls: build.py, ops/rank.py, ops/launch.py, ops/ending.py, ops/status.py. Loads no torch.
"""

import hashlib
import json
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphcap.ops.faults import Deadline

MAGIC, VERSION = b"graphcap", 2
HEADER = struct.Struct("<8sIIQQ16s")  # magic, version, rank, pid, the process's start in clock ticks, boot id
SAVED = struct.Struct("<q")
# entries, launches, update, finished, host bytes, gpu bytes, share of host memory in use, beat, phase, bucket
NOW = struct.Struct("<QQqqqqdd24s40s")
ENTRY = struct.Struct("<QQqd24s40s")  # number, launch (0: none), update, time, phase, bucket
RING = 64
HEADER_AT, DEVICE_AT, STOP_AT, SAVED_AT, NOW_AT, TEXT_AT, RING_AT, GPU_AT, SIZE = 0, 64, 128, 192, 256, 512, 8192, 16384, 20480
TEXT_SIZE = 3584  # each of the two texts: the newest metrics, the last error
FILE = "flight.bin"
MEMORY_EVERY_S = 1.0


def memory_folder(run_folder: Path) -> Path:
    """Where the ranks of a run on this node have their flight records while they live."""
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    name = hashlib.sha256(f"{Path(run_folder).resolve()} {_namespace()}".encode()).hexdigest()[:16]
    return root / f"graphcap-{os.getuid()}-{name}"


def _namespace() -> str:
    """This container: two that share /dev/shm may have the same paths."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


class Recorder:
    """The record of this process. Every call costs some microseconds and no system call but once a second."""

    def __init__(self, folder: Path, *, rank: int, gpu_bytes: Callable[[], int] | None = None) -> None:
        """folder: `memory_folder` of the run. gpu_bytes: asked once a second for the GPU memory in use."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}"
        self.path.unlink(missing_ok=True)  # a new file: whoever still maps the old one does not see this process in it
        with open(self.path, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE)  # refused here if there is no room; a page without one would be SIGBUS
            self.memory = mmap.mmap(file.fileno(), SIZE)
        self.gpu_bytes = gpu_bytes
        self._entries = self._launches = self._update = self._host_bytes = self._gpu_bytes = 0
        self._host_share = 0.0
        self._finished = 0
        self._phase = self._bucket = b""
        self._next_memory = 0.0
        self._deadline: Deadline | None = None
        self.saved(-1)
        self._lay(HEADER_AT, HEADER.pack(MAGIC, VERSION, rank, os.getpid(), process_start(os.getpid()), boot_id()))
        self.note("start-up")

    def watch(self, deadline: Deadline) -> None:
        """From here on every note puts the deadline off."""
        self._deadline = deadline

    def device(self, name: str) -> None:
        """What this rank computes on, in words: "GPU 0" or "CPU"."""
        data = name.encode()[:31]
        self.memory[DEVICE_AT : DEVICE_AT + 32] = data.ljust(32, b"\0")

    def note(self, phase: str, *, update: int | None = None, bucket: str = "", launch: int = 0) -> None:
        """The rank begins something. launch: its number, from 1, if a GPU says when it has finished it."""
        self._entries += 1
        self._launches = launch or self._launches
        self._update = self._update if update is None else update
        self._phase, self._bucket = phase.encode()[:24], bucket.encode()[:40]
        now = time.monotonic()
        if now >= self._next_memory:
            self._next_memory = now + MEMORY_EVERY_S
            self._host_bytes, self._host_share = host_bytes("self"), host_share()
            self._gpu_bytes = self.gpu_bytes() if self.gpu_bytes is not None else 0
        place = RING_AT + self._entries % RING * ENTRY.size
        self._lay(place, ENTRY.pack(self._entries, launch, self._update, now, self._phase, self._bucket))
        self._write_now(now)
        if self._deadline is not None:
            self._deadline.put_off(now)

    def finished(self, update: int) -> None:
        """All work of `update` has been handed out, or, on a CPU, done."""
        self._finished = update
        self._write_now(time.monotonic())

    def saved(self, update: int) -> None:
        """The checkpoint of `update` is complete. Any thread may say it."""
        self._lay(SAVED_AT, SAVED.pack(update))

    def show(self, record: dict) -> None:
        """The newest metrics, for the bar that the supervisor draws."""
        self._write_text(0, json.dumps(record, ensure_ascii=False))

    def error(self, text: str) -> None:
        """What ended this rank, in its own words; a text too long keeps its end."""
        data = text.encode(errors="replace")[-TEXT_SIZE // 2 :]
        self._write_text(1, json.dumps(data.decode(errors="ignore"), ensure_ascii=False))

    @property
    def phase(self) -> str:
        """What this rank began last."""
        return self._phase.decode()

    @property
    def stop_asked(self) -> bool:
        """Whether the supervisor has asked for a planned stop."""
        return self.memory[STOP_AT] != 0

    def _write_now(self, now: float) -> None:
        counts = self._entries, self._launches, self._update, self._finished, self._host_bytes, self._gpu_bytes
        self._lay(NOW_AT, NOW.pack(*counts, self._host_share, now, self._phase, self._bucket))

    def _lay(self, place: int, data: bytes) -> None:
        """Bytes over the old ones, all at once: `pack_into` zeroes its place first, and a reader in between would see a
        record that has been silent since the node booted."""
        self.memory[place : place + len(data)] = data

    def _write_text(self, number: int, text: str) -> None:
        data = text.encode()[: TEXT_SIZE - 4]
        place = TEXT_AT + number * TEXT_SIZE
        struct.pack_into("<I", self.memory, place, 0)  # a reader in between finds nothing rather than half of it
        self.memory[place + 4 : place + 4 + len(data)] = data
        struct.pack_into("<I", self.memory, place, len(data))


@dataclass(frozen=True)
class Entry:
    """One thing a rank began. launch: its number among those handed to the GPU, 0: none. time_s: monotonic clock."""

    number: int
    launch: int
    update: int
    time_s: float
    phase: str
    bucket: str


@dataclass(frozen=True)
class Flight:
    """A rank's record as read: what it last began, and how many launches its GPU says it has finished."""

    rank: int
    device: str
    pid: int
    pid_start: int
    boot: bytes
    launches: int
    update: int
    finished: int
    saved: int
    host_bytes: int
    gpu_bytes: int
    host_share: float
    beat_s: float
    phase: str
    bucket: str
    gpu_finished: int
    shown: dict | None
    error: str
    entries: tuple[Entry, ...]

    @property
    def alive(self) -> bool:
        """Whether this very process still runs on this node."""
        return self.boot == boot_id() and process_start(self.pid) == self.pid_start != 0

    @property
    def silent_s(self) -> float:
        """Seconds since the rank last began something, by a clock that nobody sets; only on the node it ran on."""
        return time.monotonic() - self.beat_s

    @property
    def at(self) -> Entry:
        """What ran when the record ended: the first launch that the GPU had not finished, else what the rank began last."""
        unfinished = (entry for entry in self.entries if entry.launch == self.gpu_finished + 1)
        return next(unfinished, self.entries[-1])


def read(path: Path) -> Flight | None:
    """The record in a file, of a live or dead rank; None where there is none, or not a whole one."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return None
    if len(data) != SIZE or data[:8] != MAGIC:
        return None
    _, version, rank, pid, pid_start, boot = HEADER.unpack_from(data, HEADER_AT)
    if version != VERSION:
        return None
    _, launches, update, finished, host, gpu, share, beat, phase, bucket = NOW.unpack_from(data, NOW_AT)
    found = [ENTRY.unpack_from(data, RING_AT + place * ENTRY.size) for place in range(RING)]
    entries = tuple(Entry(*entry[:4], _text(entry[4]), _text(entry[5])) for entry in sorted(found) if entry[0])
    if not entries:
        return None
    shown, error = _document(data, 0), _document(data, 1)
    (gpu_finished,) = struct.unpack_from("<q", data, GPU_AT)
    return Flight(
        rank=rank,
        device=_text(data[DEVICE_AT : DEVICE_AT + 32]),
        pid=pid,
        pid_start=pid_start,
        boot=boot,
        launches=launches,
        update=update,
        finished=finished,
        saved=SAVED.unpack_from(data, SAVED_AT)[0],
        host_bytes=host,
        gpu_bytes=gpu,
        host_share=share,
        beat_s=beat,
        phase=_text(phase),
        bucket=_text(bucket),
        gpu_finished=gpu_finished,
        shown=shown if isinstance(shown, dict) else None,
        error=error if isinstance(error, str) else "",
        entries=entries,
    )


def flights(run_folder: Path) -> list[Flight]:
    """The records of all ranks of a run: those in this node's memory, else the copies in the run's folder; by rank."""
    live = sorted(memory_folder(run_folder).glob("rank-*"))
    copies = sorted(Path(run_folder).glob(f"rank-*/{FILE}"))
    found = {flight.rank: flight for path in (*copies, *live) if (flight := read(path)) is not None}
    return [found[rank] for rank in sorted(found)]


def ask_to_stop(path: Path) -> None:
    """Ask the rank whose record is in `path` for a planned stop. Nothing where there is no record yet."""
    try:
        with open(path, "r+b") as file:
            file.seek(STOP_AT)
            file.write(b"\1")
    except FileNotFoundError:
        return


def copy_record(path: Path, to: Path) -> None:
    """Copy a record, whole or not at all."""
    beside = to.with_name(f".{to.name}.partial")
    beside.write_bytes(path.read_bytes())
    beside.replace(to)


def host_bytes(pid: int | str) -> int:
    """Resident memory of a process, in bytes."""
    with open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def host_share() -> float:
    """Share of the memory in use that this process may use: the node's, or its container's where that is fuller."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    share = 1 - int(fields["MemAvailable"].split()[0]) / int(fields["MemTotal"].split()[0])
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # no second version of control groups here
        return share
    cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # gives way before anything is killed
    return share if limit == "max" else max(share, (used - cached) / int(limit))


def process_start(pid: int) -> int:
    """When a process started, in clock ticks since the node booted; 0 if there is none. A zombie counts as none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def identity() -> dict:
    """This process, so that another can tell whether it still lives: pid, start and boot."""
    return {"pid": os.getpid(), "pid_start": process_start(os.getpid()), "boot": boot_id().hex()}


def lives(document: dict) -> bool:
    """Whether the process of an `identity` still runs on this node."""
    return document["boot"] == boot_id().hex() and process_start(document["pid"]) == document["pid_start"] != 0


def boot_id() -> bytes:
    """16 bytes that differ from boot to boot of this node."""
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def _document(data: bytes, number: int):
    place = TEXT_AT + number * TEXT_SIZE
    (size,) = struct.unpack_from("<I", data, place)
    try:
        return json.loads(data[place + 4 : place + 4 + size]) if 0 < size <= TEXT_SIZE - 4 else None
    except ValueError:  # read while it was being written
        return None


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
