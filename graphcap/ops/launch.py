"""The supervisor of a run: starts its ranks, draws, relays, stops, restarts, and says how it ended.

It starts one process a rank with torch's elastic launcher and stays when they die. Ranks write their standard output and
errors to files in the run's folder; the supervisor alone writes to the terminal: the lines of rank 0, and one bar from its
flight record. The other side is ops/rank.py.

Calls: cli.py. Loads torch only to start ranks.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from graphcap.config import Recipe
from graphcap.ops import blackbox, checkpoint, ending, gpucore, runfolder
from graphcap.ops.progress import Progress
from graphcap.ops.rank import AFTER_TRAINING, BEFORE_TRAINING, SUPERVISOR, command_of, forget, keep_records, on_end

PROGRAM = (sys.executable, "-m", "graphcap")
POLL_S = 0.1
COPY_EVERY_S = 10.0
STOP_WITHIN_S = 25.0  # a planned stop that takes longer becomes an end at once
GRACE_S = 5  # between SIGTERM and SIGKILL for ranks that have to end


class Supervisor:
    """One `graphcap train`: its ranks, from the first start to the end, restarts included."""

    def __init__(self, recipe: Recipe, arguments: list[str], say, *, program: tuple[str, ...] = PROGRAM) -> None:
        """arguments: those of this command line, for the ranks and for the text that says how to go on.

        program: what a rank is started with, before the arguments; a fault drill gives another.
        """
        self.recipe, self.arguments, self.say, self.program = recipe, arguments, say, program
        self.folder, self.memory = recipe.folder, blackbox.memory_folder(recipe.folder)
        self.command = command_of(arguments)
        self.asked: list[str] = []  # signals that asked for a stop
        self.asked_at = 0.0
        self.workers = None
        self.bar: Progress | None = None
        self.reason = self.silence = ""
        self._shown_update, self._read_bytes, self._copied_at = -1, 0, 0.0

    def run(self) -> int:
        """Returns the exit code. The folder is this process's from here to the end."""
        new = not self.folder.exists()
        with runfolder.lock(self.recipe):
            restarts: list[str] = []
            in_a_row, newest = 0, checkpoint.newest(self.folder / "checkpoints", hashes=False)[0]
            while True:
                end = self._attempt()
                now = checkpoint.newest(self.folder / "checkpoints", hashes=False)[0]
                in_a_row = 1 if now != newest else in_a_row + 1
                newest = now
                if end["verdict"] != ending.DEAD or self.asked or in_a_row > self.recipe.run.max_restarts:
                    break
                restarts.append(ending.headline(end).split(" · continue:")[0])
                self._tell(f"restart   {in_a_row} of {self.recipe.run.max_restarts} without a new checkpoint: {restarts[-1]}")
            if self.bar is not None:
                self.bar.close()
            return self._leave(end, restarts, new)

    def _attempt(self) -> dict:
        """Start the ranks, watch them to their end, and say how it was."""
        for stream in ("stdout", "stderr"):
            path = self.folder / "rank-0" / stream
            path.parent.mkdir(exist_ok=True)
            if path.exists():
                path.replace(path.with_name(f"{stream}.before"))
        (self.folder / "rank-0" / gpucore.NAME).unlink(missing_ok=True)
        for leftover in self.memory.glob("rank-*"):
            leftover.unlink()
        (self.folder / ending.END).unlink(missing_ok=True)
        checkpoint.write_json(self.folder / ending.START, {"version": 1, "command": self.command, **blackbox.identity()})
        self._read_bytes, self._shown_update, self.reason, self.silence = 0, -1, "", ""
        more = gpucore.variables(self.folder / "rank-0") if self.recipe.run.gpu_core_dump else {}
        self.workers = _start(self.folder, [*self.program, *self.arguments], more)
        self._take_signals()
        try:
            code = self._watch()
        finally:
            self.workers.end()
        keep_records(self.folder, self.memory)
        for path in (self.folder / "rank-0").iterdir():
            ending.hide_in(path)
        end = ending.of_exit(self.folder, code=code, command=self.command, reason=self.reason or self.silence)
        if kernel := gpucore.kernel_of(self.folder / "rank-0"):
            end["cause"] += f" · {kernel}"
        if self.reason and end["verdict"] == ending.DEAD:
            end |= {"verdict": ending.STOPPED, "exit_code": ending.EXIT_CODES[ending.STOPPED]}
        return end

    def _watch(self) -> int:
        """Until the rank is over; returns its exit code, negative for a signal."""
        while True:
            code = self.workers.exit_code()
            self._relay()
            if code is not None:
                return code
            self._draw()
            self._stop_if_asked()
            self._end_if_silent()
            if time.monotonic() - self._copied_at > COPY_EVERY_S:
                self._copied_at = time.monotonic()
                if (self.folder / "config.toml").exists():
                    keep_records(self.folder, self.memory)
            time.sleep(POLL_S)

    def _relay(self) -> None:
        """Say every whole line that rank 0 has written since the last time."""
        with contextlib.suppress(FileNotFoundError), open(self.folder / "rank-0" / "stdout", "rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._tell(line)

    def _tell(self, line: str) -> None:
        (self.bar.say if self.bar is not None else self.say)(line)

    def _draw(self) -> None:
        flight = blackbox.read(self.memory / "rank-0")
        if flight is None or not flight.shown or flight.shown["update"] == self._shown_update:
            return
        if self.bar is None:
            self.bar = Progress(flight.shown["total"], start=flight.shown["start"])
        self._shown_update = flight.shown["update"]
        self.bar.update(flight.shown)

    def _stop_if_asked(self) -> None:
        if not self.asked:
            return
        flight = blackbox.read(self.memory / "rank-0")
        training = flight is not None and flight.phase not in (*BEFORE_TRAINING, *AFTER_TRAINING)
        late = time.monotonic() - self.asked_at > STOP_WITHIN_S
        if len(self.asked) > 1 or late or not training:
            self.reason = "on request" if not training else "on request, at once"
            self.workers.end()
        else:
            blackbox.ask_to_stop(self.memory / "rank-0")

    def _end_if_silent(self) -> None:
        """A rank that its own watchdog did not end, because it was stopped or hangs in the kernel."""
        flight = blackbox.read(self.memory / "rank-0")
        if flight is None:
            return
        run = self.recipe.run
        seconds = run.start_deadline_s if flight.phase in (*BEFORE_TRAINING, *AFTER_TRAINING) else run.deadline_s
        if seconds and flight.silent_s > seconds + GRACE_S:
            self.silence = f"deadline: it began nothing for {flight.silent_s:.0f} s, being stopped or stuck in the kernel"
            self.workers.end(at_once=True)

    def _take_signals(self) -> None:
        """A first signal asks for a planned stop; the terminal's end is no reason to. Elastic sets its own at every start."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)
        signal.signal(signal.SIGHUP, lambda *_: None)  # a handler, not SIG_IGN, which ranks would inherit

    def _ask(self, number: int, _) -> None:
        self.asked.append(signal.Signals(number).name)
        self.asked_at = self.asked_at or time.monotonic()

    def _leave(self, end: dict, restarts: list[str], new: bool) -> int:
        """Write end.json and say how it ended; a run that never began leaves nothing."""
        forget(self.memory)
        if end["verdict"] == ending.REFUSED and not (self.folder / "config.toml").exists():
            words = end["stderr"]
            for path in sorted(self.folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            if new:
                self.folder.rmdir()
            print("\n".join(words), file=sys.stderr)
            return end["exit_code"]
        end |= {"restarts": restarts, "asked": self.asked}
        checkpoint.write_json(self.folder / ending.END, end)
        if end["verdict"] == ending.REFUSED:
            print("\n".join(end["stderr"]), file=sys.stderr)
        elif end["verdict"] != ending.FINISHED:
            print("\n".join(["graphcap: " + ending.headline(end), *ending.lines(end)[1:]]), file=sys.stderr)
        on_end(self.recipe)
        return end["exit_code"]


def _start(folder: Path, command: list[str], variables: dict[str, str]):
    """The ranks as processes of torch's elastic launcher, each in a session of its own, output to `folder`/rank-<k>."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it tells is in end.json
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)

    class Files(LogsSpecs):
        def reify(self, envs) -> LogsDest:
            out = {rank: str(folder / f"rank-{rank}" / "stdout") for rank in envs}
            err = {rank: str(folder / f"rank-{rank}" / "stderr") for rank in envs}
            none = dict.fromkeys(envs, "")
            return LogsDest(stdouts=out, stderrs=err, tee_stdouts=none, tee_stderrs=none, error_files=none)

        @property
        def root_log_dir(self) -> str:
            return str(folder)

    class Workers(SubprocessContext):
        """Ends the others soon after one has died: elastic's own 30 s are all the time an end may take."""

        def close(self, death_sig=None, timeout: int = GRACE_S) -> None:
            super().close(death_sig=death_sig, timeout=timeout)

        def exit_code(self) -> int | None:
            """None while all run; 0, or the exit code of the rank that ended first."""
            result = self.wait(0)
            if result is None:
                return None
            return min(result.failures.values(), key=lambda one: one.timestamp).exitcode if result.failures else 0

        def end(self, *, at_once: bool = False) -> None:
            """End the ranks and what they have started."""
            self.close(signal.SIGKILL if at_once else signal.SIGTERM, GRACE_S)
            for pid in self.pids().values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    environment = {
        SUPERVISOR: str(os.getpid()),
        "PYTHONUNBUFFERED": "1",
        "PYTHONIOENCODING": "utf-8:replace",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **variables,
    }
    workers = Workers("graphcap", command[0], {0: tuple(command[1:])}, {0: environment}, Files())
    workers.start()
    return workers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
