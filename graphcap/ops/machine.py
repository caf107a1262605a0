"""What `graphcap doctor` finds out without a process on the GPU: Python and packages, room, caches, limits, the driver's word.

The table CHECKS, at the end, lists the checks in the order in which a newcomer needs them; their functions stand in the same
order, and the check "python headers" is `check_python_headers`. Nothing that a check writes stays on the disk.

Calls: doctor.py, device.py (Check, guarded and helpers). Loads no torch.
"""

import contextlib
import functools
import math
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from graphcap.ops import caches
from graphcap.versions import RAN_ON_GPU, untested

MIB, GIB = 2**20, 2**30
SHARED_MIB, LOCKED_MIB, MEMORY_GIB, DISK_GIB, OPEN_FILES = 32, 64, 8, 10, 4096
PROGRAM_S, BUSY_MIB = 10, 1024  # for a program that is asked; GPU memory in use that no driver keeps for itself
PYTHON, TORCH, (OLDEST, NEWEST) = "3.11", "2.11", ("5.17", "5.24")  # oldest ones; of transformers oldest and newest
NETWORK = re.compile(r"nfs\d?|lustre|cifs|smb\w*|gpfs|beegfs\w*|ceph|glusterfs|afs|9p|fuse\.(?!fuse-overlayfs$).*")
CACHES = tuple(caches.VARIABLES)
SMI = ("index", "uuid", "memory.used", "mig.mode.current")  # what nvidia-smi is asked


@dataclass(frozen=True)
class Check:
    """One line. state: ok, warn (training may work), fail (it will not), skip (nothing to look at)."""

    name: str
    state: str
    found: str
    needed: str
    fix: str


class NotChecked(Exception):
    """Why a check has nothing to look at on this machine; its line says skip."""


Found = tuple[str, ...]  # what a check gives: state and what was found; then a fix, where the one in its table does not fit


def guarded(probe: tuple[Callable[[], Found], str, str]) -> Check:
    """Make one check of a table. An exception in it is a failed check, which keeps no other from being made."""
    function, needed, fix = probe
    try:
        state, found, *other = function()
    except NotChecked as reason:
        state, found, other = "skip", f"{reason}: not checked", []
    except Exception as error:  # whatever it is, the other checks still tell something
        state, found, other = "fail", f"{type(error).__name__}: {str(error)[:300]}", []
    fix = "" if state in ("ok", "skip") else other[0] if other else fix
    return Check(name_of(function), state, " ".join(found.split()), needed, fix)


def name_of(function: Callable) -> str:
    return function.__name__.removeprefix("check_").replace("_", " ")


def output(command: list[str], *, seconds: float = PROGRAM_S) -> tuple[int, str]:
    """Exit code and output, errors included, of a program. Raises: TimeoutError; NotChecked if it is not installed."""
    if not shutil.which(command[0]):
        raise NotChecked(f"{Path(command[0]).name} is not installed")
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    child = subprocess.Popen(command, **streams, env={**os.environ, "LC_ALL": "C"}, start_new_session=True)
    try:
        text, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{Path(command[0]).name} gave no answer in {seconds:g} s") from None
    finally:
        ended(child)
    return child.returncode, text


def ended(child: subprocess.Popen) -> int | None:
    """Exit code; None: it had to be killed. One that SIGKILL does not end, because a driver holds it, is left behind."""
    child.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(1)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(1)
    return None


# Python, packages, and what Triton compiles kernels with


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version. Raises: ValueError if it does not begin with them."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if not numbers:
        raise ValueError(f"version '{version}' does not begin with two numbers")
    return int(numbers[1]), int(numbers[2])


def check_python() -> Found:
    version = platform.python_version()
    return "ok" if release(version) >= release(PYTHON) else "fail", version


def check_package() -> Found:
    """Another project's distribution is named graphcap, and its files would lie in the same folder as ours."""
    import graphcap

    with contextlib.suppress(metadata.PackageNotFoundError):
        return "fail", f"the distribution graphcap {metadata.version('graphcap')}, which is another project"
    if not graphcap.__file__ or Path(graphcap.__file__).resolve().parent != Path(__file__).resolve().parents[1]:
        return "fail", f"`import graphcap` finds {graphcap.__file__}"
    return "ok", f"graphcap {graphcap.__version__}, no other of that name"


def check_torch() -> Found:
    version = metadata.version("torch")
    said = untested(version)
    return "fail" if release(version) < release(TORCH) else "warn" if said else "ok", said or version


def check_transformers() -> Found:
    version = metadata.version("transformers")
    return "fail" if release(version) < release(OLDEST) else "warn" if release(version) > release(NEWEST) else "ok", version


def gpu_in_machine() -> bool:
    """Whether an NVIDIA GPU is here, whatever torch thinks of it. WSL has no such file; there torch alone tells."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version"))


def kernels_need() -> str:
    """State where something is missing that only kernels for a GPU need."""
    return "fail" if gpu_in_machine() else "warn"


def compiler() -> str | None:
    """The C compiler that Triton would take: $CC, gcc or clang. It does not look for `cc`."""
    return shutil.which(os.environ["CC"]) if "CC" in os.environ else shutil.which("gcc") or shutil.which("clang")


def check_compiler() -> Found:
    if found := compiler():
        return "ok", found
    if "CC" in os.environ:
        return kernels_need(), "CC names no program", "unset CC, or let it name gcc or clang"
    return (kernels_need(), "only cc", "export CC=cc") if shutil.which("cc") else (kernels_need(), "none")


def check_python_headers() -> Found:
    """Compiles and links what includes Python.h, as Triton does with the stub that launches a kernel."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian; Triton does the same
    include = sysconfig.get_path("include", scheme)
    if not Path(include, "Python.h").is_file():
        return kernels_need(), f"no Python.h in {include}"
    if not (found := compiler()):
        raise NotChecked("no compiler")
    with tempfile.TemporaryDirectory() as folder:
        source = ("-include", "Python.h", "-x", "c", "/dev/null")
        code, text = output([found, "-shared", "-fPIC", f"-I{include}", *source, "-o", f"{folder}/stub.so"])
    if code:
        return kernels_need(), next((part for part in text.splitlines() if "error" in part), text).strip()[:200]
    return "ok", f"{include}/Python.h"


# Room


def size(num_bytes: float) -> str:
    if num_bytes == math.inf:
        return "unlimited"
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def nearest(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists, symbolic links followed."""
    path = path.expanduser().resolve()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def check_disk() -> Found:
    place = nearest(Path("runs/out"))
    tempfile.TemporaryFile(dir=place).close()
    free = shutil.disk_usage(place).free
    return "ok" if free >= DISK_GIB * GIB else "warn", f"{size(free)} free where runs/out is"


def cgroup_room(limit: str, used: str, stat: str) -> float:
    """Bytes a control group has left, from the texts of its files; cache that can be given up counts as free."""
    if not limit.strip().isdecimal():
        return math.inf  # "max"
    idle = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.M)
    return int(limit) - int(used) + (int(idle[1]) if idle else 0)


def cgroup_rooms() -> Iterator[float]:
    """`cgroup_room` of each group this process is in that can be read."""
    for entry in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = entry.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        root = Path("/sys/fs/cgroup", controllers)
        for folder in (root / path.strip("/"), *(root / path.strip("/")).parents):
            with contextlib.suppress(OSError):  # a container may not see the groups it is in, only the root
                yield cgroup_room(*((folder / name).read_text() for name in (*names, "memory.stat")))


def check_memory() -> Found:
    if not Path("/proc/meminfo").exists():
        raise NotChecked("no /proc/meminfo")
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    free = min([int(available[1]) * 1024, *cgroup_rooms()])
    return "ok" if free >= MEMORY_GIB * GIB else "warn", f"{size(free)} free"


def cache_folders() -> list[Path]:
    """Where compiled kernels are kept: what the variables name, else the folder in which ops/caches.py makes one."""
    default = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/graphcap"
    return list(dict.fromkeys(Path(os.environ.get(name) or default) for name in CACHES))


def file_system(path: Path, mounts: str) -> tuple[str, list[str]]:
    """Type and options of the file system of an absolute path, from the text of /proc/mounts; later mounts cover earlier."""
    best = (0, "unknown", "")
    for point, kind, options in re.findall(r"^\S* (\S+) (\S+) (\S+)", mounts, re.M):
        place = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point))
        if path.is_relative_to(place) and len(place.parts) >= best[0]:
            best = (len(place.parts), kind, options)
    return best[1], best[2].split(",")


def check_caches() -> Found:
    mounts = Path("/proc/mounts").read_text() if Path("/proc/mounts").exists() else ""
    state, told = "ok", []
    for folder in cache_folders():
        place = nearest(folder)
        kind, options = file_system(place, mounts)
        try:
            tempfile.TemporaryFile(dir=place).close()
            fault = "noexec" if "noexec" in options else ""
        except OSError as error:
            fault = error.strerror or type(error).__name__
        slow = " over a network" if NETWORK.fullmatch(kind) else ""
        state = "fail" if fault or state == "fail" else "warn" if slow or state == "warn" else "ok"
        told.append(f"{folder} ({kind}{slow}{', ' if fault else ''}{fault})")
    return state, ", ".join(told)


# What the GPU's driver says, and what several GPUs need


@functools.cache
def gpus() -> list[dict[str, str]]:
    """What nvidia-smi answers to SMI. Raises: NotChecked without a GPU, ValueError where the driver answers an error."""
    text = output(["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"])[1]
    if "no devices" in text.lower():
        raise NotChecked("no GPU")
    rows = [[field.strip() for field in entry.split(",")] for entry in text.splitlines() if entry.strip()]
    if not rows or any(len(row) != len(SMI) for row in rows):
        raise ValueError(f"nvidia-smi answers: {' '.join(text.split())[:200] or 'nothing'}")
    return [dict(zip(SMI, row)) for row in rows]


def check_others() -> Found:
    """In a container the processes of others may be invisible; the memory they use is not."""
    rows = gpus()
    apps = output(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"])[1]
    owners, told = [entry.split(",")[0].strip() for entry in apps.splitlines() if "," in entry], []
    for row in rows:
        used, count = row["memory.used"], owners.count(row["uuid"])
        if count or (used.isdecimal() and int(used) >= BUSY_MIB):
            told.append(f"GPU {row['index']}: {used} MiB in use, processes seen: {count}")
    return "warn" if told else "ok", "; ".join(told) or "no other process on a GPU"


def check_mig() -> Found:
    split = [row["index"] for row in gpus() if row["mig.mode.current"] == "Enabled"]
    return "warn" if split else "ok", f"on for GPU {', '.join(split)}" if split else "off"


def last_xid(log: str) -> str:
    """The last error of a GPU in a kernel log, without host and process; "" if there is none."""
    found = re.findall(r"NVRM: Xid \(([^)]*)\): (\d+)(.*)", log)
    if not found:
        return ""
    place, number, rest = found[-1]
    rest = re.sub(r",? ?\b(pid|name)=('[^']*'|[^,]*)", "", rest).strip(" ,")
    return f"Xid {number} of {place}" + (f": {rest[:120]}" if rest else "")


def check_xid() -> Found:
    for command in (["dmesg"], ["journalctl", "-k", "-b", "-q", "--no-pager"]):
        with contextlib.suppress(NotChecked):
            code, text = output(command)
            if code == 0 and text.strip():
                last = last_xid(text)
                return "warn" if last else "ok", last or "none in the kernel's log"
    raise NotChecked("the kernel's log is not readable here (on the host: sudo dmesg | grep -i xid)")


def check_shared_memory() -> Found:
    if not Path("/dev/shm").is_dir():
        raise NotChecked("no /dev/shm")
    free = shutil.disk_usage("/dev/shm").free
    return "ok" if free >= SHARED_MIB * MIB else "warn", f"{size(free)} free in /dev/shm"


def check_limits() -> Found:
    """Limits of this process. Without locked memory NCCL cannot use InfiniBand."""
    kinds = (resource.RLIMIT_MEMLOCK, resource.RLIMIT_CORE)
    limits = (*resource.getrlimit(resource.RLIMIT_NOFILE), *(resource.getrlimit(kind)[0] for kind in kinds))
    files, hard, locked, core = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    fixes = []
    if files < OPEN_FILES:
        enough = hard >= OPEN_FILES
        fixes.append(f"ulimit -n {OPEN_FILES}" if enough else f"docker run --ulimit nofile={OPEN_FILES}, or limits.conf")
    if locked < LOCKED_MIB * MIB:
        fixes.append("docker run --ulimit memlock=-1, or `* - memlock unlimited` in limits.conf")
    told = f"open files {files}, locked memory {size(locked)}, core {size(core)}"
    return "warn" if fixes else "ok", told, "; ".join(fixes)


HEADERS = f"apt install python{sysconfig.get_python_version()}-dev libc6-dev (or dnf install python3-devel)"
# Each: the check, what is needed, and what to type where it is not there.
CHECKS = (
    (check_python, f"Python {PYTHON} or newer", "uv venv --python 3.12, and install graphcap-engine there"),
    (check_package, "graphcap-engine alone", "pip uninstall graphcap, then install graphcap-engine anew"),
    (check_torch, f"torch {TORCH} or newer, tried: {', '.join(RAN_ON_GPU)}", f"pip install 'torch=={RAN_ON_GPU[-1]}.*'"),
    (check_transformers, f"transformers {OLDEST} to {NEWEST}", f"pip install 'transformers=={NEWEST}.*'"),
    (check_compiler, "gcc or clang, which Triton calls", "apt install gcc (or dnf install gcc)"),
    (check_python_headers, "Python.h and C's headers", HEADERS),
    (check_disk, f"{DISK_GIB} GiB free in a writable folder", "free space, or run where there is some: cd FOLDER"),
    (check_memory, f"{MEMORY_GIB} GiB free", "end other programs, or give the container more: docker run --memory"),
    (check_caches, "a writable local folder", f"export {' '.join(f'{name}=/tmp/graphcap' for name in CACHES)}"),
    (check_others, "GPUs of one's own", "export CUDA_VISIBLE_DEVICES=N for a free one; nvidia-smi shows who"),
    (check_mig, "whole GPUs; a slice serves as one small GPU", "export CUDA_VISIBLE_DEVICES=MIG-UUID, from nvidia-smi -L"),
    (check_xid, "no error of a GPU in the kernel's log", "look it up at docs.nvidia.com/deploy/xid-errors; nvidia-smi -q"),
    (check_shared_memory, f"{SHARED_MIB} MiB free in /dev/shm", "docker run --shm-size=64m, or --ipc=host"),
    (check_limits, f"{OPEN_FILES} open files, {LOCKED_MIB} MiB locked", f"ulimit -n {OPEN_FILES}"),
)
