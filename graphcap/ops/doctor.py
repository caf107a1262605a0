"""Whether this machine can train: one line a check, with what was found, what is needed and what to type to mend it.

Checks of the GPU run in a process of their own, for a GPU in a bad state may hold or end whoever asks it. Nothing stays on
the disk, and no line names user, host or home folder. Loads torch only in that process.

Calls: cli.py.
"""

import contextlib
import ctypes
import functools
import itertools
import json
import os
import pwd
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from graphcap.versions import RAN_ON_GPU, untested

MIB, GIB = 2**20, 2**30
PROGRAM_S, DEVICE_S = 10, 300  # seconds for a program that is asked, and for all checks of the GPU; kernels are compiled
SHARED_MIB, LOCKED_MIB, MEMORY_GIB, DISK_GIB, OPEN_FILES = 32, 64, 8, 10, 4096
BUSY_MIB = 1024  # GPU memory in use that no driver keeps for itself
PYTHON, TORCH, CAPABILITY, TRANSFORMERS = (3, 11), (2, 11), (8, 0), ((5, 17), (5, 24))  # oldest; of the last also newest
ATTENTION_BOUND = 2**-7  # largest difference ÷ largest value of the reference, as in tests/cuda/test_flex.py
NETWORK = re.compile(r"nfs\d?|lustre|cifs|smb\w*|gpfs|beegfs\w*|ceph|glusterfs|afs|9p|fuse\.(?!fuse-overlayfs$).*")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


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


def run(as_json: bool, say: Callable[[str], None]) -> int:
    """Say one line a check and the verdict; as_json: one list of all checks. Returns 0, or 2 where a check failed."""
    checks = []
    for check in itertools.chain(map(guarded, CHECKS), _device_checks()):
        checks.append(check)
        if not as_json:
            say(line(check))
    failed = [check.name for check in checks if check.state == "fail"]
    if as_json:
        say(json.dumps([{"check" if key == "name" else key: text for key, text in asdict(check).items()} for check in checks]))
    else:
        say(f"to mend before training: {', '.join(failed)}" if failed else "nothing failed")
    return 2 if failed else 0


def line(check: Check) -> str:
    """A check for people."""
    text = f"{check.state:4}  {check.name:14}  {check.found}"
    if check.state in ("ok", "skip"):
        return text
    return f"{text}; needed: {check.needed}. Fix: {check.fix}"


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
    return Check(name_of(function), state, private(" ".join(found.split())), needed, private(fix))


def name_of(function: Callable) -> str:
    return function.__name__.strip("_").replace("_", " ")


def private(text: str) -> str:
    """`text` with ~ for home folders, and without the names of user and host."""
    homes, users = [os.path.expanduser("~")], [os.environ.get("USER"), os.environ.get("LOGNAME")]
    with contextlib.suppress(KeyError):  # a container's user may have no name
        user = pwd.getpwuid(os.getuid())
        homes, users = [*homes, user.pw_dir], [*users, user.pw_name]
    for home in sorted({*homes, *map(os.path.realpath, homes)}, key=len, reverse=True):
        if home.startswith("/") and home != "/":
            text = re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w-])", "~", text)
    text = re.sub(r"/(home|Users)/[^/\s'\":,;)]+", "~", text)
    host = socket.gethostname()
    for names, word in (({*users} - {"root"}, "USER"), ({host, host.split(".")[0]} - {"localhost"}, "HOST")):
        for name in sorted(filter(None, names), key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", word, text)
    return text


def _lines(child: subprocess.Popen, seconds: float) -> Iterator[str]:
    """Lines of a program's output until it closes it or the time is up; does not wait for the program itself."""
    end, rest = time.monotonic() + seconds, b""
    while (left := end - time.monotonic()) > 0 and select.select([child.stdout], [], [], left)[0]:
        piece = os.read(child.stdout.fileno(), 65536)
        if not piece:
            break
        *whole, rest = (rest + piece).split(b"\n")
        yield from (text.decode(errors="replace") for text in whole)
    if rest:
        yield rest.decode(errors="replace")


def _ended(child: subprocess.Popen) -> int | None:
    """Exit code; None: it had to be killed. One that SIGKILL does not end, because a driver holds it, is left behind."""
    child.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(1)
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1)
    return None


def output(command: list[str], *, seconds: float = PROGRAM_S) -> tuple[int, str]:
    """Exit code and output, errors included, of a program. Raises: TimeoutError; NotChecked if it is not installed."""
    where = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        child = subprocess.Popen(command, **where, env={**os.environ, "LC_ALL": "C"}, start_new_session=True)
    except FileNotFoundError:
        raise NotChecked(f"{Path(command[0]).name} is not installed") from None
    try:
        text = "\n".join(_lines(child, seconds))
    finally:
        code = _ended(child)
    if code is None:
        raise TimeoutError(f"{Path(command[0]).name} gave no answer in {seconds:g} s")
    return code, text


# Python and packages


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version. Raises: ValueError if it does not begin with them."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if not numbers:
        raise ValueError(f"version '{version}' does not begin with two numbers")
    return int(numbers[1]), int(numbers[2])


def dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _python() -> Found:
    return "ok" if sys.version_info[:2] >= PYTHON else "fail", dotted(sys.version_info[:3])


def _torch() -> Found:
    version = metadata.version("torch")
    said = untested(version)
    return "fail" if release(version) < TORCH else "warn" if said else "ok", said or version


def _transformers() -> Found:
    version = metadata.version("transformers")
    oldest, newest = TRANSFORMERS
    return "fail" if release(version) < oldest else "warn" if release(version) > newest else "ok", version


def _package() -> Found:
    """Another project's distribution is named graphcap, and its files would lie in the same folder as ours."""
    import graphcap

    with contextlib.suppress(metadata.PackageNotFoundError):
        return "fail", f"the distribution graphcap {metadata.version('graphcap')}, which is another project"
    if not graphcap.__file__ or Path(graphcap.__file__).resolve().parent != Path(__file__).resolve().parents[1]:
        return "fail", f"`import graphcap` finds {graphcap.__file__}"
    return "ok", f"graphcap {graphcap.__version__}, no other of that name"


def compiler() -> str | None:
    """The C compiler that Triton would take: $CC, gcc or clang. It does not look for `cc`."""
    return shutil.which(os.environ["CC"]) if "CC" in os.environ else shutil.which("gcc") or shutil.which("clang")


def _compiler() -> Found:
    if found := compiler():
        return "ok", found
    if "CC" in os.environ:
        return _kernels_need(), "CC names no program", "unset CC, or let it name gcc or clang"
    return (_kernels_need(), "only cc", "export CC=cc") if shutil.which("cc") else (_kernels_need(), "none")


def _python_headers() -> Found:
    """Compiles and links what includes Python.h, as Triton does with the stub that launches a kernel."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian; Triton does the same
    include = sysconfig.get_path("include", scheme)
    if not Path(include, "Python.h").is_file():
        return _kernels_need(), f"no Python.h in {include}"
    if not (found := compiler()):
        raise NotChecked("no compiler")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "stub.c")
        source.write_text("#include <Python.h>\n")
        code, text = output([found, str(source), "-shared", "-fPIC", f"-I{include}", "-o", f"{folder}/stub.so"])
    if code:
        words = next((part for part in text.splitlines() if "error" in part), text)
        return _kernels_need(), words.replace(folder, "").strip()[:200]
    return "ok", f"{include}/Python.h"


def gpu_in_machine() -> bool:
    """Whether an NVIDIA GPU is here, whatever torch thinks of it. WSL has no such file; there torch alone tells."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/proc/driver/nvidia/version"))


def _kernels_need() -> str:
    """State where something is missing that only kernels for a GPU need."""
    return "fail" if gpu_in_machine() else "warn"


# Room and limits


def size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def nearest(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists, symbolic links followed."""
    path = path.expanduser().resolve()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def file_system(path: Path, mounts: str) -> tuple[str, list[str]]:
    """Type and options of the file system of an absolute path, from the text of /proc/mounts; later mounts cover earlier."""
    best = (Path("/"), "unknown", [])
    for entry in mounts.splitlines():
        fields = entry.split(" ")
        if len(fields) < 4:
            continue
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), fields[1]))
        if path.is_relative_to(point) and len(point.parts) >= len(best[0].parts):
            best = (point, fields[2], fields[3].split(","))
    return best[1], best[2]


def _shared_memory() -> Found:
    if not Path("/dev/shm").is_dir():
        raise NotChecked("no /dev/shm")
    free = shutil.disk_usage("/dev/shm").free
    return "ok" if free >= SHARED_MIB * MIB else "warn", f"{size(free)} free in /dev/shm"


def cache_folders() -> list[Path]:
    """Where compiled kernels are kept."""
    return list(dict.fromkeys(Path(os.environ.get(name) or "~/.cache/graphcap") for name in CACHES))


def _caches() -> Found:
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


def _limits() -> Found:
    """Limits of this process. Without locked memory NCCL cannot use InfiniBand."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, core = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_CORE))
    few_files = files != resource.RLIM_INFINITY and files < OPEN_FILES
    little_locked = locked != resource.RLIM_INFINITY and locked < LOCKED_MIB * MIB
    fixes = []
    if few_files:
        enough = hard == resource.RLIM_INFINITY or hard >= OPEN_FILES
        fixes.append(f"ulimit -n {OPEN_FILES}" if enough else f"docker run --ulimit nofile={OPEN_FILES}, or limits.conf")
    if little_locked:
        fixes.append("docker run --ulimit memlock=-1, or `* - memlock unlimited` in limits.conf")
    said = [str(files), *("unlimited" if limit == resource.RLIM_INFINITY else size(limit) for limit in (locked, core))]
    return "warn" if fixes else "ok", f"open files {said[0]}, locked memory {said[1]}, core {said[2]}", "; ".join(fixes)


def cgroup_room(limit: str, used: str, stat: str) -> float:
    """Bytes a control group has left, from the texts of its files; cache that can be given up counts as free."""
    if not limit.strip().isdecimal():
        return float("inf")  # "max"
    idle = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.M)
    return int(limit) - int(used) + (int(idle[1]) if idle else 0)


def _cgroup_rooms() -> Iterator[float]:
    for entry in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = entry.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        root = Path("/sys/fs/cgroup", controllers)
        for folder in (root / path.strip("/"), *(root / path.strip("/")).parents):
            with contextlib.suppress(OSError):  # a container may not see the groups it is in, only the root
                yield cgroup_room(*((folder / name).read_text() for name in (*names, "memory.stat")))


def _memory() -> Found:
    if not Path("/proc/meminfo").exists():
        raise NotChecked("no /proc/meminfo")
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    free = min([int(available[1]) * 1024, *_cgroup_rooms()])
    return "ok" if free >= MEMORY_GIB * GIB else "warn", f"{size(free)} free"


def _disk() -> Found:
    place = nearest(Path("runs/out"))
    tempfile.TemporaryFile(dir=place).close()
    free = shutil.disk_usage(place).free
    return "ok" if free >= DISK_GIB * GIB else "warn", f"{size(free)} free where runs/out is"


# What the driver says


def last_xid(log: str) -> str:
    """The last error of a GPU in a kernel log, without host and process; "" if there is none."""
    found = re.findall(r"NVRM: Xid \(([^)]*)\): (\d+)(.*)", log)
    if not found:
        return ""
    place, number, rest = found[-1]
    rest = re.sub(r",? ?\b(pid|name)=('[^']*'|[^,]*)", "", rest).strip(" ,")
    return f"Xid {number} of {place}" + (f": {rest[:120]}" if rest else "")


def _xid() -> Found:
    for command in (["dmesg"], ["journalctl", "-k", "-b", "-q", "--no-pager"]):
        with contextlib.suppress(NotChecked):
            code, text = output(command)
            if code == 0 and text.strip():
                last = last_xid(text)
                return "warn" if last else "ok", last or "none in the kernel's log"
    raise NotChecked("the kernel's log is not readable here (on the host: sudo dmesg | grep -i xid)")


def gpu_rows(text: str) -> list[dict[str, str]]:
    """GPUs in nvidia-smi's answer to SMI. Raises: NotChecked without a GPU, ValueError where the driver answers an error."""
    if "no devices" in text.lower():
        raise NotChecked("no GPU")
    rows = [[field.strip() for field in entry.split(",")] for entry in text.splitlines() if entry.strip()]
    if not rows or any(len(row) != len(SMI) for row in rows):
        raise ValueError(f"nvidia-smi answers: {' '.join(text.split())[:200] or 'nothing'}")
    return [dict(zip(SMI, row)) for row in rows]


SMI = ("index", "uuid", "memory.used", "mig.mode.current")


@functools.cache
def _smi() -> list[dict[str, str]]:
    return gpu_rows(output(["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"])[1])


def busy(rows: list[dict[str, str]], apps: str) -> list[str]:
    """GPUs that others use. apps: lines of uuid and pid. In a container processes may be invisible; memory in use is not."""
    owners = [entry.split(",")[0].strip() for entry in apps.splitlines() if "," in entry]
    told = []
    for row in rows:
        used, count = row["memory.used"], owners.count(row["uuid"])
        if count or (used.isdecimal() and int(used) >= BUSY_MIB):
            told.append(f"GPU {row['index']}: {used} MiB in use, processes seen: {count}")
    return told


def _others() -> Found:
    rows = _smi()
    told = busy(rows, output(["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"])[1])
    return "warn" if told else "ok", "; ".join(told) or "no other process on a GPU"


def _mig() -> Found:
    split = [row["index"] for row in _smi() if row["mig.mode.current"] == "Enabled"]
    return "warn" if split else "ok", f"on for GPU {', '.join(split)}" if split else "off"


# In a process of their own


def _device_checks() -> Iterator[Check]:
    """The checks of DEVICE_CHECKS. One that never ends, or ends the process, has failed; those behind it are skipped."""
    waiting, how = list(DEVICE_CHECKS), "its process ended before it"
    try:
        for text in _answers():
            waiting.pop(0)
            yield Check(**json.loads(text))
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
    for number, (function, needed, fix) in enumerate(waiting):
        state, found = ("skip", "not reached: not checked") if number else ("fail", private(how))
        yield Check(name_of(function), state, found, needed, "" if number else fix)


def _answers() -> Iterator[str]:
    """Lines of `answer` in a new process. Raises: TimeoutError, RuntimeError where it did not come to its end."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from graphcap.ops import doctor; doctor.answer()"
    place = None
    with contextlib.suppress(OSError, RuntimeError):  # the check of the caches has told
        place = nearest(cache_folders()[0])
    folder = tempfile.TemporaryDirectory(dir=place if place and os.access(place, os.W_OK) else None, ignore_cleanup_errors=True)
    with tempfile.TemporaryFile() as errors, folder as empty:  # nothing is cached: kernels are compiled where they will be
        where = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors, "start_new_session": True}
        variables = os.environ | dict.fromkeys(CACHES, empty) | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        child = subprocess.Popen([sys.executable, "-c", program], **where, env=variables)
        try:
            yield from (text for text in _lines(child, DEVICE_S) if text.startswith('{"name"'))
        finally:
            code = _ended(child)
        errors.seek(0)
        last = (errors.read().decode(errors="replace").strip().splitlines() or ["without a word"])[-1][:200]
    if code is None:
        raise TimeoutError(f"no answer in {DEVICE_S} s")
    if code:
        raise RuntimeError(f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}: {last}")


def answer() -> None:
    """Make DEVICE_CHECKS and print each as a line of JSON; whatever else this process prints goes to stderr."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for probe in DEVICE_CHECKS:
            print(json.dumps(asdict(guarded(probe))), file=out, flush=True)


def _with_gpu():
    """torch, set as for training. Raises: NotChecked without a GPU that it can use."""
    try:
        import torch

        from graphcap.engine.guard import use_deterministic_math
    except ImportError:
        raise NotChecked("torch does not load") from None
    if not torch.cuda.is_available():
        raise NotChecked("no GPU")
    use_deterministic_math()
    return torch


def driver_state(driver: int, built: str) -> str:
    """driver: newest CUDA of the driver, as 12080; built: torch's, as "13.0". An older minor of the same major mostly runs."""
    has, wants = (driver // 1000, driver % 1000 // 10), release(built)
    return "ok" if has >= wants else "warn" if has[0] == wants[0] else "fail"


def _driver() -> Found:
    import torch

    if not torch.version.cuda:
        if gpu_in_machine() or torch.cuda.is_available():
            return "fail", f"torch {torch.__version__} is built without CUDA", "install a torch with CUDA: see pytorch.org"
        raise NotChecked("no GPU, and a torch without CUDA")
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        if gpu_in_machine():
            return "fail", "libcuda.so.1 does not load", "docker run --gpus all, or install NVIDIA's driver"
        raise NotChecked("no GPU") from None
    has = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return driver_state(version.value, torch.version.cuda), f"driver for CUDA {has}, torch for CUDA {torch.version.cuda}"


def _gpu() -> Found:
    """A small product on every GPU that torch sees."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        raise NotChecked("CUDA_VISIBLE_DEVICES hides every GPU")
    if gpu_in_machine():
        import torch

        torch.cuda.init()  # says why, where torch cannot use it
    torch = _with_gpu()
    told = []
    for index in range(torch.cuda.device_count()):
        ones = torch.ones(64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
        if not bool(((ones @ ones) == 64).all()):
            return "fail", f"GPU {index} multiplies wrongly"
        free, total = torch.cuda.mem_get_info(index)
        told.append(f"{torch.cuda.get_device_name(index)} with {size(free)} of {size(total)} free")
    return "ok", "; ".join(told)


def runs_on(arch_list: list[str], capability: tuple[int, int]) -> bool:
    """Whether a torch built for arch_list ("sm_90", "compute_120") has code for a GPU: the same major, or PTX of an older."""
    for kind, major, minor, special in re.findall(r"\b(sm|compute)_(\d+)(\d)([af]?)\b", " ".join(arch_list)):
        has = (int(major), int(minor))
        if has == capability or (not special and has <= capability and (kind == "compute" or has[0] == capability[0])):
            return True
    return False


def _capability() -> Found:
    torch = _with_gpu()
    found = sorted({torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())})
    told = f"{', '.join(map(dotted, found))}; torch is built for {' '.join(torch.cuda.get_arch_list())}"
    return "ok" if found[0] >= CAPABILITY and all(runs_on(torch.cuda.get_arch_list(), one) for one in found) else "fail", told


def _nccl() -> Found:
    torch = _with_gpu()
    if torch.cuda.device_count() < 2:
        raise NotChecked("one GPU")
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "fail", "this torch has no NCCL"
    return "ok", f"NCCL {dotted(torch.cuda.nccl.version()[:3])}"


def _graph_capture() -> Found:
    torch = _with_gpu()
    from graphcap.engine.capture import Capturer

    x, weight, result = (torch.randn(64, 64, device="cuda") for _ in range(3))
    capturer = Capturer(torch.device("cuda"))

    def step() -> None:
        result.copy_((x @ weight).relu())

    capturer.warm_up(step)
    graph = capturer.capture("doctor", step)
    x.normal_()
    capturer.warm_up(step, times=1)
    expected = result.clone()
    result.fill_(float("nan"))
    graph.replay()
    same = torch.equal(result, expected)
    capturer.close()
    return ("ok", "a replay gives the eager bits") if same else ("fail", "a replay gives other bits than the eager step")


def attention_errors(attention, device) -> dict[str, float]:
    """Largest difference ÷ largest value of output and gradients, bfloat16 against dense float64, over blocks of one row."""
    import torch

    from graphcap.model.attention import DenseAttention
    from graphcap.model.blocks import Visibility

    group, num_context, num_queries, heads, head_dim = 8, 512, 256, 4, 64
    anchors = torch.randperm(num_context)[: num_queries // group].sort().values.to(device)
    seen = Visibility(torch.where(anchors >= 200, 200, 0), anchors, group=group, num_context=num_context)
    shapes = ((heads, num_queries), (2, num_context + num_queries), (2, num_context + num_queries), (heads, num_queries))
    *inputs, upstream = (torch.randn(*shape, head_dim, device=device).bfloat16() for shape in shapes)
    for tensor in inputs:
        tensor.requires_grad_()
    ours = attention(*inputs, attention.mask(seen, num_queries), head_dim**-0.5)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    q, k, v = exact[0], *(tensor.repeat_interleave(heads // 2, 0) for tensor in exact[1:])
    score = (q @ k.mT * head_dim**-0.5).masked_fill(~DenseAttention().mask(seen, num_queries), float("-inf"))
    theirs = score.softmax(-1) @ v
    pairs = [(ours, theirs)]
    pairs += zip(torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, exact, upstream.double()))
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    return {
        name: float((left - right).detach().abs().max() / right.detach().abs().max())
        for name, (left, right) in zip(names, pairs)
    }


def _attention() -> Found:
    torch = _with_gpu()
    from graphcap.model.attention import attention_for

    device = torch.device("cuda")
    errors = attention_errors(attention_for(device), device)
    wrong = [f"{name} is {error:.1e} off" for name, error in errors.items() if not error <= ATTENTION_BOUND]
    return "fail" if wrong else "ok", ", ".join(wrong) or f"flex forward and backward within {max(errors.values()):.1e}"


VERSION, (OLDEST, NEWEST), TRIED = dotted(sys.version_info[:2]), map(dotted, TRANSFORMERS), RAN_ON_GPU[-1]
# Each: the check, what is needed, and what to type where it is not there.
CHECKS = (
    (_python, f"Python {dotted(PYTHON)} or newer", "uv venv --python 3.12, and install graphcap-engine there"),
    (_torch, f"torch {dotted(TORCH)} or newer, tried: {', '.join(RAN_ON_GPU)}", f"pip install 'torch=={TRIED}.*'"),
    (_transformers, f"transformers {OLDEST} to {NEWEST}", f"pip install 'transformers=={NEWEST}.*'"),
    (_package, "graphcap-engine alone", "pip uninstall graphcap, then install graphcap-engine anew"),
    (_compiler, "gcc or clang, which Triton calls", "apt install gcc (or dnf install gcc)"),
    (_python_headers, "Python.h and C's headers", f"apt install python{VERSION}-dev libc6-dev (or dnf install python3-devel)"),
    (_shared_memory, f"{SHARED_MIB} MiB free in /dev/shm", "docker run --shm-size=64m, or --ipc=host"),
    (_caches, "a writable local folder", f"export {' '.join(f'{name}=/tmp/graphcap' for name in CACHES)}"),
    (_limits, f"{OPEN_FILES} open files, {LOCKED_MIB} MiB locked", f"ulimit -n {OPEN_FILES}"),
    (_memory, f"{MEMORY_GIB} GiB free", "end other programs, or give the container more: docker run --memory"),
    (_disk, f"{DISK_GIB} GiB free in a writable folder", "free space, or run where there is some: cd FOLDER"),
    (_xid, "no error of a GPU in the kernel's log", "look it up at docs.nvidia.com/deploy/xid-errors; nvidia-smi -q"),
    (_others, "GPUs of one's own", "export CUDA_VISIBLE_DEVICES=N for a free one; nvidia-smi shows who"),
    (_mig, "whole GPUs; a slice serves as one small GPU", "export CUDA_VISIBLE_DEVICES=MIG-UUID, from nvidia-smi -L"),
)
DEVICE_CHECKS = (
    (_driver, "a driver as new as torch's CUDA", "update NVIDIA's driver, or install torch for its CUDA: see pytorch.org"),
    (_gpu, "a GPU that computes", "docker run --gpus all; else mend what nvidia-smi says, or start the machine anew"),
    (_capability, f"{dotted(CAPABILITY)} or newer, in torch's list", "another GPU, or a torch built for it: see pytorch.org"),
    (_nccl, "NCCL, for more than one GPU", "pip install --force-reinstall torch"),
    (_graph_capture, "CUDA graphs that replay the same bits", "graphcap train RECIPE --eager trains without them"),
    (_attention, f"within {ATTENTION_BOUND:.1e} of dense float64", f"pip install --force-reinstall 'torch=={TRIED}.*'"),
)
