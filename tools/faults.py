"""The faults of the drill: what is done to a run, in its rank and at which phase, and how the run then has to end.

There is none for a killed data worker: the loader works in the rank itself and has no worker to kill.

Calls: tools/fault_drill.py, which plants them.
"""

import ctypes
import errno
import mmap
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, SIGUSR1

from graphcap.errors import CheckpointError
from graphcap.ops import blackbox, caches, checkpoint, ending, status
from graphcap.ops.ending import DEAD, FINISHED, STOPPED
from graphcap.ops.progress import MetricsLog, read_metrics
from graphcap.ops.rank import SUPERVISOR

RUN = Path("out", "run")  # the run's folder in a row's folder
START = "load data"
EVERYWHERE = (START, "step", "save", "eval", "decode")  # a CPU neither warms up nor captures nor replays
ON_GPU = ("warm-up", "capture", "replay", "save", "eval")
WITHIN_S = 30.0  # from the fault to the end of everything
SECRETS = ("HF_TOKEN", "WANDB_API_KEY")


@dataclass
class Place:
    """Where a fault is committed: in the rank. folder: the row's. step: the training step, if `arm` has it remembered."""

    folder: Path
    recorder: blackbox.Recorder
    supervisor: int
    step = None

    @property
    def run(self) -> Path:
        return self.folder / RUN


@dataclass(frozen=True)
class Fault:
    """A fault, where it comes, and how the run has to end: cause (a regular expression), verdict, exit code, and more."""

    name: str
    commit: Callable[[Place], object]
    says: str = ""
    verdict: str | None = DEAD  # None: there is no end.json; `says` has to be on the terminal
    code: int | None = 1  # None: any but 0
    phases: tuple[str, ...] = ("step",)
    all_phases: tuple[str, ...] = ()  # those of --full, if they are more
    settings: tuple[str, ...] = ()
    later: bool = False  # the run notices it after the phase in which it came
    again: bool = False  # the same command once more finishes
    undone: bool = False  # in the end weights and metrics are those of an undisturbed run
    also: Callable[[Path], bool] = lambda folder: True  # what else has to hold; its docstring says it
    arm: Callable[[Path], None] = lambda folder: None  # in the rank, before it begins
    needs_gpu: bool = False


def to_rank(number: int) -> Callable[[Place], None]:
    return lambda place: os.kill(os.getpid(), number)


def nothing(place: Place) -> None:
    """Nothing is done in the phase: the fault was armed before, or there is none."""


def kill_supervisor(place: Place) -> None:
    os.kill(place.supervisor, SIGKILL)
    signal.pause()  # until the kernel ends this process too


def ask(number: int, *, twice: bool = False) -> Callable[[Place], None]:
    """The supervisor gets a signal, and the rank goes on once it is asked to stop; twice: instead it hangs at a second one."""

    def commit(place: Place) -> None:
        os.kill(place.supervisor, number)
        limit_s = time.monotonic() + WITHIN_S
        while not place.recorder.stop_asked and time.monotonic() < limit_s:
            time.sleep(0.01)
        if twice:
            os.kill(place.supervisor, number)
            signal.pause()

    return commit


def raise_exception(place: Place) -> None:
    raise RuntimeError("planted by the drill")


def overflow_stack(place: Place) -> None:
    ctypes.CDLL(None).regcomp(ctypes.create_string_buffer(4096), b"(" * 10**6, 1)  # one C call deeper for each bracket


def exhaust_memory(place: Place) -> None:
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 2**26, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bytearray(2**31)


def deadlock(place: Place) -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Thread(target=lock.acquire, daemon=True).start()
    lock.acquire()


def fill_disk(place: Place, *, most_bytes: int = 0, alone: bool = False) -> None:
    """From here on the kernel refuses every byte of a file to rank and supervisor. It says EFBIG; a full disk, ENOSPC.

    alone: to the rank alone, where its supervisor has to write into shared memory, which is refused too.
    """
    for pid in (os.getpid(),) if alone else (os.getpid(), place.supervisor):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fill_disk_for_a_while(place: Place) -> None:
    """Until it has refused a checkpoint for its metrics' sake."""
    sync = MetricsLog.sync

    def synced(log: MetricsLog) -> None:
        try:
            sync(log)
        except CheckpointError:
            MetricsLog.sync = sync
            fill_disk(place, most_bytes=resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            raise

    MetricsLog.sync = synced
    fill_disk(place)


def rename_folder(place: Place) -> None:
    place.run.rename(place.run.with_name("renamed"))


def end_is_there(folder: Path) -> bool:
    """The renamed folder has an end.json that says so."""
    end = ending.read(folder / RUN.with_name("renamed"), ending.END)
    return end is not None and "removed or renamed" in end["cause"]


def fill_disk_once(place: Place) -> None:
    write = checkpoint.write_tensors

    def refused(path: Path, tensors: dict) -> None:
        checkpoint.write_tensors = write
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint.write_tensors = refused


def went_on(folder: Path) -> bool:
    """The save that failed is told, and that training goes on."""
    refused = "No space left on device|File too large"
    return bool(re.search(rf"not saved +.*({refused}).*Training goes on", (folder / "terminal").read_text()))


def full_and_asked(place: Place) -> None:
    fill_disk(place, alone=True)
    ask(SIGINT)(place)


def damage_conversations(place: Place) -> None:
    path = place.folder / "train.jsonl"
    os.truncate(path, path.stat().st_size - 20)


def damage_checkpoint(place: Place) -> None:
    weights = checkpoint.newest(place.run / "checkpoints")[0] / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.kill(os.getpid(), SIGKILL)


def start_second_run(place: Place) -> None:
    """The same command in the same folder, as somebody else gives it."""
    of_a_rank = ("RANK", "LOCAL_RANK", "WORLD_SIZE", SUPERVISOR)
    environment = {name: value for name, value in os.environ.items() if name not in of_a_rank}
    command = [sys.executable, "-m", "graphcap", *sys.argv[5:]]
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WITHIN_S)
    assert second.returncode == 2 and "no other process trains in" in second.stderr, (second.returncode, second.stderr)


def close_terminal(place: Place) -> None:
    """Has the drill, which is the supervisor's terminal, close it, and waits until it has."""
    (place.folder / "to_drill").write_text("close")
    with open(place.folder / "to_rank", "rb", buffering=0) as closed:
        closed.read(1)
    assert status.status_of(place.run)["verdict"] == "running"


def set_clock_back(place: Place) -> None:
    now = time.time
    time.time = lambda: now() - 365 * 86400


def tell_secrets(place: Place) -> None:
    told = " ".join(os.environ[name] for name in SECRETS)
    print(told, flush=True)
    print(told, file=sys.stderr, flush=True)
    raise RuntimeError(f"401 for {told}")


def spoil_gradients(place: Place) -> None:
    place.step.state.sums[:1].fill_(float("nan"))


def spoil_all_gradients(place: Place) -> None:
    accumulate = place.step.state.accumulate
    place.step.state.accumulate = lambda gradients: (accumulate(gradients), spoil_gradients(place))


def index(value: int) -> Callable[[Place], None]:
    """Where the table of `read_too_far` is read from here on."""
    return lambda place: place.step.drill_index.fill_(value)


def exhaust_gpu(place: Place) -> None:
    import torch

    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-5)


def hang_gpu(place: Place) -> None:
    import torch

    torch.cuda._sleep(2**62)


def remember_step(folder: Path) -> None:
    """Arms: the training step is kept for the fault."""
    from graphcap.engine.step import DrafterStep

    init = DrafterStep.__init__

    def remembered(self, *args, **kwargs) -> None:
        init(self, *args, **kwargs)
        Place.step = self

    DrafterStep.__init__ = remembered


def read_too_far(claimed: int) -> Callable[[Path], None]:
    """Arms: each micro step, captured or not, also reads an 8-entry table that claims to have more, at an index on the GPU."""

    def arm(folder: Path) -> None:
        import torch

        from graphcap.engine.step import DrafterStep

        remember_step(folder)
        micro = DrafterStep.micro

        def reading(self, slot) -> None:
            if not hasattr(self, "drill_index"):  # in the warm-up, so outside the graphs' memory
                self.drill_index = torch.zeros(1, dtype=torch.int64, device=self.device)
                self.drill_memory = torch.zeros(8, device=self.device)
                place = {"shape": (claimed,), "typestr": "<f4", "data": (self.drill_memory.data_ptr(), False), "version": 2}
                table = type("Table", (), {"__cuda_array_interface__": place})()
                self.drill_table = torch.as_tensor(table, device=self.device)
            micro(self, slot)
            self.state.sums[:1].add_(self.drill_table[self.drill_index], alpha=0)

        DrafterStep.micro = reading

    return arm


def keep_caches(folder: Path) -> Path:
    """Where a rank of this row keeps its kernels: below the row's folder, in no folder of this machine's user."""
    from graphcap.versions import made_by

    for variable in caches.VARIABLES:
        os.environ.pop(variable, None)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    return caches.folder(made_by())


def block_caches(folder: Path) -> None:
    keep_caches(folder)
    (folder / "cache").write_text("a file in the folder's place")


def cut_short_caches(folder: Path) -> None:
    kernel = keep_caches(folder) / "triton" / "KERNEL"
    kernel.mkdir(parents=True)
    (kernel / "gate.json").write_text('{"name": ')


def age_caches(folder: Path) -> None:
    cache = keep_caches(folder) / "triton"
    cache.mkdir(parents=True)
    (cache / caches.STAMP).write_text('{"torch": "1.0"}')


def said_of_caches(what: str) -> Callable[[Path], bool]:
    def said(folder: Path) -> bool:
        """The line about the caches says what was amiss; only a cache that could not be used is a folder for one run."""
        told = re.findall(r"caches +(.*)", (folder / "terminal").read_text())
        return len(told) in (1, 2) and all(re.search(what, line) for line in told)

    return said


def end_of(folder: Path) -> dict:
    return ending.read(folder / RUN, ending.END) or {}


def traced(folder: Path) -> bool:
    """traceback.txt has two threads, each with a file and a line."""
    text = (folder / RUN / "rank-0" / "traceback.txt").read_text()
    return len(re.findall(r'hread 0x.*\n  File ".*", line', text)) >= 2


def one_skipped(folder: Path) -> bool:
    """metrics.jsonl has one line an update and counts one as skipped."""
    lines = [line for line in read_metrics(folder / RUN / "metrics.jsonl") if line["kind"] == "train"]
    return [line["update"] for line in lines] == [*range(1, 7)] and sum(line["skipped"] for line in lines) == 1


def passed_over(folder: Path) -> bool:
    """The damaged checkpoint is named as not used, with its file."""
    return bool(re.search(r"not used +update-0*6: model.safetensors", (folder / "terminal").read_text()))


def nothing_written(folder: Path) -> bool:
    """A run that never began leaves no folder."""
    return not (folder / RUN).exists()


def restarted(folder: Path) -> bool:
    """end.json has one restart, after SIGKILL."""
    return ["SIGKILL" in line for line in end_of(folder).get("restarts", [])] == [True]


def always_raise(folder: Path) -> None:
    """Arms: every start fails in its first micro step."""
    from graphcap.engine.step import DrafterStep

    def micro(self, slot) -> None:
        raise RuntimeError("planted by the drill")

    DrafterStep.micro = micro


def two_starts(folder: Path) -> bool:
    """The limit of restarts without a new checkpoint is kept."""
    return len(end_of(folder).get("restarts", [])) == 1


def no_restart(folder: Path) -> bool:
    """A start that can only end the same way is not made."""
    return end_of(folder).get("restarts") == []


def asked_by(name: str) -> Callable[[Path], bool]:
    def asked(folder: Path) -> bool:
        """end.json says which signal asked."""
        return end_of(folder).get("asked", [])[:1] == [name]

    return asked


QUICK, PATIENT, STRICT = ("run.deadline_s=3",), ("run.max_restarts=1",), ("optimizer.max_skipped=2",)
ANYWHERE = {"all_phases": EVERYWHERE}
ON_TERMINAL = {"verdict": None}
GOES_ON = {"verdict": FINISHED, "code": 0, "undone": True}
ASKED = {"says": "^on request", "verdict": STOPPED, "code": 3, "later": True}
AT_ONCE = ASKED | {"says": "at once"}
RESUMED = ASKED | {"phases": (START, "step"), "all_phases": EVERYWHERE, "again": True, "undone": True}
GPU = {"phases": ("replay",), "needs_gpu": True}
IN_VAIN = {"later": True, "arm": always_raise}
DIVERGES = {"later": True, "arm": remember_step}
TOGETHER, NO_ROOM = "killed together with its supervisor", r"B asked for with .* already held.* largest bucket is \d+/"
AT_START = {"phases": ("warm-up",), "verdict": FINISHED, "code": 0, "needs_gpu": True}
FULL = "^(checkpoint|metrics) .*File too large"
DUMPED = ("run.gpu_core_dump=true",)
NOTHING = Fault("nothing", nothing, verdict=FINISHED, code=0)
FAULTS = (
    Fault("SIGKILL", to_rank(SIGKILL), "^SIGKILL", phases=EVERYWHERE),
    *(
        Fault(number.name, to_rank(number), f"^{number.name}", **ANYWHERE)
        for number in (SIGSEGV, SIGABRT, SIGBUS, SIGTERM, SIGINT, SIGHUP)
    ),
    Fault("supervisor killed", kill_supervisor, TOGETHER, code=-SIGKILL, **ANYWHERE),
    Fault("exception", raise_exception, "^RuntimeError: planted by the drill", **ANYWHERE),
    Fault("exit code 0", lambda place: os._exit(0), "exit code 0 before it had finished", **ANYWHERE),
    Fault("stack overflow", overflow_stack, "^SIGSEGV", **ANYWHERE),
    Fault("out of memory", exhaust_memory, "^memory .*Fix: set shapes.row_length", **ANYWHERE),
    Fault("deadlock", deadlock, "^deadline", settings=QUICK, also=traced),
    Fault("stopped process", to_rank(SIGSTOP), "deadline", settings=QUICK),
    Fault("disk full", fill_disk, FULL, phases=("step", "save"), later=True, again=True, undone=True),
    Fault("disk full once", fill_disk_once, phases=("save",), also=went_on, **GOES_ON),
    Fault("disk full for a while", fill_disk_for_a_while, also=went_on, **GOES_ON),
    Fault(
        "disk full for ever",
        fill_disk,
        FULL,
        phases=("save",),
        later=True,
        settings=("checkpoint.every=1", "eval.every=1"),
    ),
    Fault("folder removed", lambda place: shutil.rmtree(place.run), "run's folder .*out/run", code=None, **ON_TERMINAL),
    Fault("folder renamed", rename_folder, "removed or renamed", also=end_is_there, code=2, **ON_TERMINAL),
    Fault(
        "damaged line",
        damage_conversations,
        "conversation .*train.jsonl line 24",
        None,
        2,
        (START,),
        also=nothing_written,
    ),
    Fault("damaged checkpoint", damage_checkpoint, phases=("decode",), settings=PATIENT, also=passed_over, **GOES_ON),
    Fault("nan once", spoil_gradients, verdict=FINISHED, code=0, also=one_skipped, arm=remember_step),
    Fault("nan for ever", spoil_all_gradients, "first fc.weight", settings=STRICT, **DIVERGES),
    Fault("nan and restarts", spoil_all_gradients, "first fc.weight", settings=STRICT + PATIENT, also=no_restart, **DIVERGES),
    Fault("nan to the end", spoil_all_gradients, "first fc.weight", settings=(*STRICT, "progress.every=5"), **DIVERGES),
    Fault("asked on a full disk", full_and_asked, FULL, later=True),
    Fault("second run", start_second_run, **GOES_ON),
    Fault("terminal closed", close_terminal, phases=(START, "step"), **GOES_ON),
    Fault("clock set back", set_clock_back, **GOES_ON),
    Fault("SIGINT asks", ask(SIGINT), also=asked_by("SIGINT"), **RESUMED),
    *(Fault(f"{one.name} asks", ask(one), also=asked_by(one.name), **ASKED) for one in (SIGTERM, SIGUSR1)),
    Fault("SIGINT twice", ask(SIGINT, twice=True), also=asked_by("SIGINT"), **AT_ONCE),
    Fault("restart", to_rank(SIGKILL), settings=PATIENT, also=restarted, **GOES_ON),
    Fault("restarts in vain", nothing, "^RuntimeError: planted", phases=(START,), settings=PATIENT, also=two_starts, **IN_VAIN),
    Fault("secrets", tell_secrets, r"401 for \*+ \*+", **ANYWHERE),
    Fault("SIGKILL on a GPU", to_rank(SIGKILL), "^SIGKILL", phases=ON_GPU, needs_gpu=True),
    Fault("supervisor killed on a GPU", kill_supervisor, TOGETHER, code=-SIGKILL, **GPU),
    Fault("GPU memory before", exhaust_gpu, NO_ROOM, phases=("warm-up",), needs_gpu=True),
    Fault("GPU memory in capture", exhaust_gpu, NO_ROOM, phases=("capture",), needs_gpu=True),
    Fault("device assert", index(2**40), "device-side assert", arm=read_too_far(8), **GPU),
    Fault("illegal access", index(2**38), "illegal memory access", arm=read_too_far(2**39), **GPU),
    Fault("assert with a dump", index(2**40), "kernel .*index", arm=read_too_far(8), settings=DUMPED, **GPU),
    Fault("access with a dump", index(2**38), "kernel .*index", arm=read_too_far(2**39), settings=DUMPED, **GPU),
    Fault("endless kernel", hang_gpu, "^deadline", settings=QUICK, **GPU),
    Fault("caches unwritable", nothing, arm=block_caches, also=said_of_caches("cannot be written"), **AT_START),
    Fault("caches cut short", nothing, arm=cut_short_caches, also=said_of_caches("gate.json is no JSON; replaced"), **AT_START),
    Fault("caches of another", nothing, arm=age_caches, also=said_of_caches("another version .*; replaced"), **AT_START),
)
