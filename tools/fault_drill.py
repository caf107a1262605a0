"""Plants every fault of the matrix into a small real run, under the real supervisor, and checks how the run ends.

    python tools/fault_drill.py                       every fault once, SIGKILL at every phase
    python tools/fault_drill.py --only SIGKILL "disk full"
    python tools/fault_drill.py --full --out FOLDER   every fault at every phase it can strike in

Prints a table and writes it to FOLDER/drill.txt and drill.json; exit code 1 if a row is not as it has to be. A row starts
`fault_drill.py supervise …`, which is `graphcap train` with another program for its rank: `fault_drill.py rank …`, the same
`graphcap train` with a flight recorder that commits the fault as the run enters the row's phase. So a fault comes at an
event, in the rank itself, and never after a sleep. The rank writes what it knows of that moment to planted.json; with
that, and not with what graphcap says of itself, end.json and `graphcap status` are compared. The faults: tools/faults.py.

`--blind` makes the recorder record nothing: a drill that stayed green then would notice nothing.
"""

import argparse
import fcntl
import functools
import json
import os
import pty
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL

from compare_runs import FILES, differing_metrics, differing_tensors
from faults import FAULTS, NOTHING, RUN, SECRETS, WITHIN_S, Fault, Place

from graphcap import cli
from graphcap.ops import blackbox, checkpoint, ending, launch, status
from graphcap.ops.ending import DEAD, FINISHED
from graphcap.ops.rank import SUPERVISOR

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    *("optimizer.max_updates=6", "optimizer.rows_per_update=2", "eval.every=2", "checkpoint.every=2", "eval.documents=2"),
    *("eval.prompts=1", "eval.max_new_tokens=4", "eval.passes=1", "shapes.row_length=256", "progress.every=1"),
    *("run.threads=1", "run.name=run"),
)
CONVERSATIONS = {"train": 24, "held_out": 4}
FROM_UPDATE = 3  # a fault in training comes from here on, once a checkpoint is complete
TRAINING = ("step", "replay", "save", "eval")
LIMIT_S = 120.0  # for one start of a row
LAST_WORDS = "drill: last words of rank 0"
BLIND = "GRAPHCAP_DRILL_BLIND"
PIPES = ("to_drill", "to_rank")


@dataclass
class Row:
    """A fault at a phase, and how it went. problems: empty if everything is as it has to be."""

    fault: Fault
    phase: str
    folder: Path
    code: int | None = None
    seconds: float | None = None
    headline: str = ""
    skipped: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / RUN

    def text(self, name: str) -> str:
        """A text file of the row; `terminal` is what its supervisors wrote."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""


# The three processes of a row: the drill, the supervisor and the rank.


def supervise(fault: Fault, phase: str, folder: Path) -> int:
    """`graphcap train` with a rank that has the fault planted."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal that the drill is becomes this session's: its end hangs it up
    for number, action in {SIGINT: signal.default_int_handler, SIGHUP: signal.SIG_DFL}.items():
        signal.signal(number, action)  # nohup or a shell's & may have had them ignored, which ranks would inherit
    program = (sys.executable, __file__, "rank", fault.name, phase, str(folder))
    launch.Supervisor = functools.partial(launch.Supervisor, program=program)
    data = [f"data.{name}={folder}/{name}.jsonl" for name in CONVERSATIONS]
    where = [f"run.out={folder}/out", f"run.device={'cuda' if fault.needs_gpu else 'cpu'}"]
    return cli.main(["train", str(ROOT / "runs" / "tiny.toml"), *SETTINGS, *data, *where, *fault.settings])


def rank(fault: Fault, phase: str, folder: Path, arguments: list[str]) -> int:
    """`graphcap train` as a rank that commits the fault as it enters the phase, the first time in all its starts."""
    note, saved, blind = blackbox.Recorder.note, blackbox.Recorder.saved, BLIND in os.environ
    at = {"update": 0, "saved": 0}

    def noted(self, entered: str, *, update: int | None = None, bucket: str = "", launch: int = 0) -> None:
        if not blind:
            note(self, entered, update=update, bucket=bucket, launch=launch)
        at["update"] = at["update"] if update is None else update
        ready = entered not in TRAINING or at["saved"] and at["update"] >= FROM_UPDATE and bucket != "update"
        if entered != phase or not ready or (folder / "planted.json").exists():
            return
        document = at | {"phase": phase, "bucket": bucket, "session": os.getsid(0), "time_s": time.monotonic()}
        (folder / "planted.json").write_text(json.dumps(document))
        print(LAST_WORDS, file=sys.stderr, flush=True)
        fault.commit(Place(folder, self, int(os.environ[SUPERVISOR])))

    def saved_too(self, update: int) -> None:
        saved(self, update)
        at["saved"] = max(update, 0)  # -1: none yet

    blackbox.Recorder.note, blackbox.Recorder.saved = noted, saved_too
    fault.arm(folder)
    return cli.main(arguments)


def start(row: Row, environment: dict[str, str]) -> int | None:
    """Run a supervisor on a terminal of its own, to its end; returns its exit code, None if it had to be killed."""
    to_drill, to_rank = (os.open(row.folder / name, os.O_RDWR) for name in PIPES)
    master, slave = pty.openpty()
    command = [sys.executable, __file__, "supervise", row.fault.name, row.phase, str(row.folder)]
    process = subprocess.Popen(
        command,
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
    os.close(slave)
    limit, open_ends, over = time.monotonic() + LIMIT_S, {master, to_drill}, os.pidfd_open(process.pid)
    with open(row.folder / "terminal", "ab") as terminal:
        while time.monotonic() < limit:
            ready = select.select([*open_ends, over], [], [], 1.0)[0]
            if master in ready:
                try:
                    terminal.write(os.read(master, 65536))
                except OSError:  # all its writers have gone
                    open_ends.discard(master)
            elif to_drill in ready:
                os.close(master)
                open_ends.clear()
                master = -1
                os.write(to_rank, b"closed")
            elif over in ready:
                break
    for descriptor in {master, to_drill, to_rank, over} - {-1}:
        os.close(descriptor)
    if process.poll() is None:
        process.kill()
        process.wait()
        return None
    return process.returncode


def with_path() -> dict[str, str]:
    """This environment, in which Python finds this tree first."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def processes_of(row: Row, session: int | None) -> list[int]:
    """Processes of the row that still run: those with its folder on their command line, and of its rank's session."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            named = f"{row.folder}" in (place / "cmdline").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if state not in "ZX" and (named or int(of) == session):
            found.append(int(place.name))
    return [pid for pid in found if pid != os.getpid()]


def wait_for_end(row: Row, session: int | None, until_s: float) -> list[int]:
    """The row's processes that have not ended by then; they are killed."""
    for pid in processes_of(row, session):
        try:
            over = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([over], [], [], max(0.0, until_s - time.monotonic()))
        os.close(over)
    left = processes_of(row, session)
    for pid in left:
        os.kill(pid, SIGKILL)
    return left


def drill(fault: Fault, phase: str, folder: Path, undisturbed: Path | None, *, blind: bool = False) -> Row:
    """Run one row in `folder`, which is made for it. undisturbed: the folder of a run of NOTHING."""
    row = Row(fault, phase, folder)
    folder.mkdir(parents=True)
    for name, count in CONVERSATIONS.items():
        lines = (ROOT / "graphcap/assets/tiny/conversations" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]), encoding="utf-8")
    for name in PIPES:
        os.mkfifo(folder / name)
    planted_secrets = {name: secrets.token_hex(16) for name in SECRETS}
    environment = with_path() | planted_secrets
    row.code = start(row, environment | ({BLIND: "1"} if blind else {}))
    planted = json.loads(row.text("planted.json") or "{}")
    if not planted:
        wait_for_end(row, None, 0.0)
        shutil.rmtree(blackbox.memory_folder(row.run), ignore_errors=True)
        row.problems = [f"the phase was not reached: {row.text('terminal')[-300:]}"]
        return row
    left = wait_for_end(row, planted["session"], planted["time_s"] + WITHIN_S)
    row.seconds = round(time.monotonic() - planted["time_s"], 1)
    row.problems += [f"processes left: {left}"] if left else []
    row.problems += [f"took {row.seconds} s"] if row.seconds > WITHIN_S and fault.verdict != FINISHED else []
    if row.code == 0 if fault.code is None else row.code != fault.code:
        row.problems.append(f"exit code {row.code}, not {'above 0' if fault.code is None else fault.code}")
    row.problems += [*of_ending(row, planted), *of_what_is_left(row, planted, list(planted_secrets.values()))]
    if not row.problems and not fault.also(folder):
        row.problems.append(f"not so: {fault.also.__doc__}")
    if not row.problems and fault.again and (code := start(row, environment)) != 0:
        row.problems.append(f"the same command again: exit code {code}")
    if not row.problems and fault.undone:
        row.problems += differences(row.run, undisturbed / RUN)
    return row


def of_ending(row: Row, planted: dict) -> Iterator[str]:
    """What end.json and `graphcap status` do not say as they have to."""
    fault = row.fault
    if fault.verdict is None:
        said = re.search(f".*{fault.says}.*", row.text("terminal"))
        row.headline = said[0].strip() if said else ""
        if not said:
            yield f"'{fault.says}' is not on the terminal"
        return
    lines: list[str] = []
    status.run([str(row.run)], as_json=False, say=lines.append)
    shown, end = "\n".join(lines), ending.read(row.run, ending.END)
    row.headline = shown.splitlines()[0].split(" · continue:")[0]
    if end is None or end["verdict"] != fault.verdict or not re.search(fault.says, end["cause"]):
        yield f"not {fault.verdict} with '{fault.says}'"
        return
    if fault.verdict == FINISHED:
        return
    for name in ("update", "phase", "bucket"):
        if not fault.later and end[name] != planted[name]:
            yield f"{name} {end[name]}, but it was {planted[name]}"
    where = [planted["bucket"]] * ("/" in planted["bucket"]) + [f"update {planted['update']}"] * (planted["update"] > 0)
    words = [] if fault.later else [f"{word}" for word in (*where, planted["phase"])]
    if fault.verdict == DEAD:
        written = [line for line in row.text(f"{RUN}/rank-0/stderr").splitlines() if line.strip()]
        words += ["rank 0", (written or [LAST_WORDS])[-1][:400]]
    yield from (f"status does not say '{word}'" for word in words if word not in shown)


def of_what_is_left(row: Row, planted: dict, hidden: list[str]) -> Iterator[str]:
    """What a run has left and must not, or has not and must."""
    if blackbox.memory_folder(row.run).exists():
        yield "records left in shared memory"
        shutil.rmtree(blackbox.memory_folder(row.run))
    record = row.run / "rank-0" / blackbox.FILE
    if record.exists() and blackbox.read(record) is None:
        yield "flight.bin is damaged"
    for path in [row.folder / "terminal", *row.run.rglob("*")]:
        if path.is_file() and any(value.encode() in path.read_bytes() for value in hidden):
            yield f"a secret is in {path.relative_to(row.folder)}"
    newest = checkpoint.newest(row.run / "checkpoints")[0]
    if row.run.exists() and planted["saved"] and (newest is None or int(newest.name[7:]) < planted["saved"]):
        yield f"the checkpoint of update {planted['saved']} is not complete"
    for name in FILES if newest else ():
        tensors = checkpoint.load_tensors(newest, name)
        yield from (f"{newest.name}/{name}: {key} is not finite" for key, one in tensors.items() if not one.isfinite().all())


def differences(run: Path, undisturbed: Path) -> Iterator[str]:
    """Where the newest checkpoint's tensors and the metrics are not those of the undisturbed run."""
    newest = [checkpoint.newest(place / "checkpoints")[0] for place in (run, undisturbed)]
    for name in FILES:
        yield from (f"{newest[0].name}/{name}: {found}" for found in differing_tensors(*newest, name)[1])
    yield from (f"metrics.jsonl: {found}" for found in differing_metrics(run, undisturbed)[1])


def rows_of(only: list[str], *, full: bool) -> list[tuple[Fault, str]]:
    """The faults named, or all, each with the phases to run it at."""
    chosen = [fault for fault in FAULTS if not only or fault.name in only]
    return [(fault, phase) for fault in chosen for phase in (fault.all_phases if full and fault.all_phases else fault.phases)]


def no_gpu() -> str:
    """Why rows that need a GPU cannot run, '' where they can."""
    import torch

    return "" if torch.cuda.is_available() else "needs a GPU: torch.cuda.is_available() is False"


def table(rows: list[Row]) -> str:
    """One line a row."""
    lines = [f"{'fault':<22} {'phase':<11} {'s':>5} {'code':>4}"]
    for row in rows:
        verdict = f"skipped: {row.skipped}" if row.skipped else "; ".join(row.problems) or "ok"
        seconds = "" if row.seconds is None else f"{row.seconds:.1f}"
        code = "" if row.code is None else row.code
        lines.append(f"{row.fault.name:<22} {row.phase:<11} {seconds:>5} {code:>4}  {verdict:<4} {row.headline}")
    return "\n".join(lines)


def document_of(row: Row) -> dict:
    """A row for drill.json."""
    names = ("phase", "seconds", "code", "headline", "skipped", "problems")
    return {"fault": row.fault.name, **{name: getattr(row, name) for name in names}}


def main(arguments: list[str]) -> int:
    """Returns 1 if a row is not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--full", action="store_true", help="every fault at every phase it can strike in")
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--out", type=Path, help="folder for the table; a new one for temporary files if left out")
    parser.add_argument("--blind", action="store_true", help="a recorder that records nothing; the drill has to go red")
    options = parser.parse_args(arguments)
    out = (options.out or Path(tempfile.mkdtemp(prefix="fault_drill-"))).resolve()
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out {out} is not empty")
    missing, undisturbed = no_gpu(), out / "nothing"

    def run(chosen: tuple[Fault, str]) -> Row:
        fault, phase = chosen
        folder = out / f"{fault.name}-{phase}".replace(" ", "-")
        if fault.needs_gpu and missing:
            return Row(fault, phase, folder, skipped=missing)
        return drill(fault, phase, folder, undisturbed, blind=options.blind)

    chosen = rows_of(options.only, full=options.full)
    rows = [drill(NOTHING, "step", undisturbed, None)] if any(fault.undone for fault, _ in chosen) else []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(run, chosen):
            rows.append(row)
            print(table([row]).splitlines()[1], flush=True)
    (out / "drill.txt").write_text(table(rows) + "\n", encoding="utf-8")
    checkpoint.write_json(out / "drill.json", [document_of(row) for row in rows])
    failed = sum(bool(row.problems) for row in rows)
    print(f"{len(rows)} rows, {failed} not as they have to be; {out}/drill.txt, drill.json")
    return int(failed > 0)


if __name__ == "__main__":
    if sys.argv[1:2] in (["supervise"], ["rank"]):
        role, name, phase, folder, *rest = sys.argv[1:]
        fault = next(one for one in (*FAULTS, NOTHING) if one.name == name)
        sys.exit(supervise(fault, phase, Path(folder)) if role == "supervise" else rank(fault, phase, Path(folder), rest))
    sys.exit(main(sys.argv[1:]))
