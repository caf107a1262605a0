"""The supervisor of a run: starts its ranks, draws, relays, stops, restarts, and says how it ended.

It starts one process a rank with torch's elastic launcher and stays when they die. Ranks write their standard output and
errors to files in the run's folder; the supervisor alone writes to the terminal: the lines of rank 0, and one bar from its
flight record. The other side is ops/rank.py.

Calls: cli.py. Loads torch only to start ranks.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from datetime import datetime, timezone
from pathlib import Path

from graphcap.config import Recipe
from graphcap.errors import ConfigError
from graphcap.ops import blackbox, checkpoint, ending, faults, gpucore, records, runfolder, workers
from graphcap.ops.blackbox import Flight
from graphcap.ops.progress import Progress, while_there
from graphcap.ops.rank import AFTER_TRAINING, BEFORE_TRAINING, NOT_AGAIN, SLOW, WRITING, command_of, on_end
from graphcap.ops.stopping import ASK

PROGRAM = (sys.executable, "-m", "graphcap")
POLL_S = 0.1
COPY_EVERY_S = 10.0
STOP_WITHIN_S = 25.0  # a planned stop that takes longer becomes an end at once, but a save may be finished
SAVE_WITHIN_S = 600.0
LEAVE_WITHIN_S = 30.0  # for a rank that has said it has finished, and for one that was killed
SILENT_POLLS = 3  # in a row, until a rank is ended for its silence


class Supervisor:
    """One `graphcap train`: its ranks, from the first start to the end, restarts included."""

    def __init__(self, recipe: Recipe, arguments: list[str], say, *, program: tuple[str, ...] = PROGRAM) -> None:
        """arguments: those of this command line, for the ranks and for the text that says how to go on.

        program: what a rank is started with, before the arguments; a fault drill gives another.
        """
        self.recipe, self.arguments, self.say, self.program = recipe, arguments, say, program
        self.folder, self.memory = recipe.folder, blackbox.memory_folder(recipe.folder)
        self.command = command_of(arguments)
        self.asked: list[str] = []  # what asked for a stop: signals, run.max_hours
        self.asked_at = 0.0
        self.began = time.monotonic()
        self.workers = None
        self.bar: Progress | None = None
        self.cause, self.at_once = "", False  # why this process ended the rank, if it did
        self._shown_update, self._read_bytes, self._copied_at = -1, 0, 0.0
        self._silent_polls, self._leaving_since, self._killed_at = 0, 0.0, 0.0
        self._refusal = ""  # what was said last of a file system that refuses
        self._kept = True  # whether the records of the last rank are in the run's folder

    def run(self) -> int:
        """Returns the exit code. The folder is this process's from here to the end.

        Raises: ConfigError if another process works in the folder.
        """
        claim = runfolder.Claim(self.recipe, self.command)
        with _signals(self._ask):
            try:
                try:
                    end = self._attempts(claim)
                except ConfigError as error:  # the folder is no longer there
                    self._kept = True
                    self._tell_where_it_is(claim, str(error))
                    raise
                except Exception as error:
                    while_there(traceback.print_exc)
                    reason = f"its supervisor failed: {type(error).__name__}: {error}"
                    end = ending.of_exit(self.folder, code=None, command=self.command, reason=reason)
                    end |= {"restarts": [], "asked": self.asked}
                finally:
                    if self.bar is not None:
                        while_there(self.bar.close)
                if self._kept:
                    records.forget(self.memory)
                return self._leave(end, claim)
            finally:
                if self._kept:
                    records.forget(self.memory)
                claim.close()

    def _tell_where_it_is(self, claim: runfolder.Claim, cause: str) -> None:
        """Leave the end in a folder that was renamed while the run was in it."""
        moved = claim.moved_to()
        if moved is None:
            return
        with self._suppressed("keeping the records"):
            records.keep(moved, self.memory)
            end = ending.of_exit(moved, code=None, command=self.command, reason=cause)
            checkpoint.write_json(moved / ending.END, end | {"restarts": [], "asked": self.asked})

    def _attempts(self, claim: runfolder.Claim) -> dict:
        """Start the ranks until they finish, are stopped, or die once too often. The last end, with the restarts before it."""
        restarts: list[str] = []
        in_a_row, newest = 0, self._newest()
        while True:
            if restarts:
                claim.begin(self.command, restarts=len(restarts))
            end = self._attempt(claim)
            in_a_row, newest = (1 if self._newest() != newest else in_a_row + 1), self._newest()
            if restarts and end["verdict"] == ending.REFUSED:  # not the start that somebody is waiting for
                end |= {"verdict": ending.DEAD, "exit_code": ending.EXIT_CODES[ending.DEAD]}
            hopeless = end["verdict"] != ending.DEAD or end["rank_exit_code"] == NOT_AGAIN
            if hopeless or self.asked or in_a_row > self.recipe.run.max_restarts:
                return end | {"restarts": restarts, "asked": self.asked}
            restarts.append(ending.what_happened(end))
            self._tell(f"restart   {in_a_row} of {self.recipe.run.max_restarts} without a new checkpoint: {restarts[-1]}")

    def _newest(self) -> Path | None:
        return checkpoint.newest(self.folder / "checkpoints", hashes=False)[0]

    def _attempt(self, claim: runfolder.Claim) -> dict:
        """Start the ranks, watch them to their end, and say how it was."""
        own = self.folder / "rank-0"
        own.mkdir(exist_ok=True)
        (own / gpucore.NAME).unlink(missing_ok=True)
        records.forget(self.memory)
        self._read_bytes, self._shown_update, self.cause, self.at_once = 0, -1, "", False
        self._silent_polls, self._leaving_since, self._killed_at, self._kept = 0, 0.0, 0.0, False
        code: int | None = None
        if self.asked:
            self.cause, self.at_once = self._request(), True
        else:
            more = gpucore.variables(own) if self.recipe.run.gpu_core_dump else {}
            self.workers = workers.start(self.folder, [*self.program, *self.arguments], more)
            try:
                code = self._watch(claim)
            finally:
                self.workers.end()
        with self._suppressed("keeping the records"):
            records.keep(self.folder, self.memory)
            self._kept = True
            for path in (*own.glob("std*"), *own.glob(blackbox.FILE), *own.glob(faults.TRACEBACK)):
                ending.hide_in(path)
        reason = self.cause or (self._request() if self.asked and code == 3 else "")
        end = ending.of_exit(self.folder, code=code, command=self.command, reason=reason)
        if self.at_once:
            end |= {"verdict": ending.STOPPED, "exit_code": ending.EXIT_CODES[ending.STOPPED]}
        kernel = gpucore.kernel_of(own) if end["verdict"] == ending.DEAD and end["cause"] else ""
        if kernel:
            first, *more = end["cause"].splitlines()
            end["cause"] = ending.hidden("\n".join([f"{first} · {kernel}", *more]))
        return end

    def _watch(self, claim: runfolder.Claim) -> int | None:
        """Until the rank is over; returns its exit code, negative for a signal; None for one that the kernel does not end."""
        while True:
            code = self.workers.exit_code()
            self._relay()
            claim.check(at_once=code is not None)
            if code is not None:
                return code
            flight = blackbox.read(self.memory / "rank-0")
            self._draw(flight)
            self._stop_if_asked(flight)
            self._end_if_silent(flight)
            if self._killed_at and time.monotonic() - self._killed_at > LEAVE_WITHIN_S:
                self.cause = f"{self.cause}; SIGKILL does not end it: it is stuck in the kernel, in a driver or a file system"
                self.at_once = False
                return None
            if time.monotonic() - self._copied_at > COPY_EVERY_S:
                self._copied_at = time.monotonic()
                with self._suppressed("copying the records"):
                    records.keep(self.folder, self.memory)
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _suppressed(self, what: str):
        """A file system that refuses is said once and ends nothing: training is worth more than its record."""
        before, self._refusal = self._refusal, ""
        try:
            yield
        except OSError as error:
            self._refusal = f"records   {what}: {error}"
            if self._refusal != before:
                self._tell(self._refusal)

    def _relay(self) -> None:
        """Say every whole line that rank 0 has written since the last time."""
        try:
            with open(self.folder / "rank-0" / "stdout", "rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except OSError:  # not there yet, or its disk is gone: the rank will tell
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._tell(ending.hidden(line))

    def _tell(self, line: str) -> None:
        """Say a line for people, and keep it in run.log with its time."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with contextlib.suppress(OSError), open(self.folder / runfolder.LOG, "a", encoding="utf-8") as log:
            log.write(f"{now} {line}\n")
        while_there(lambda: (self.bar.say if self.bar is not None else self.say)(line))

    def _draw(self, flight: Flight | None) -> None:
        if flight is None or not flight.shown or flight.shown["update"] == self._shown_update:
            return
        if self.bar is None:
            self.bar = Progress(flight.shown["total"], start=flight.shown["start"])
        self._shown_update = flight.shown["update"]
        self.bar.update(flight.shown)

    def _request(self) -> str:
        """Who asked for the stop, in words."""
        return self.asked[0] if self.asked[0].startswith("run.") else f"on request ({self.asked[0]})"

    def _stop_if_asked(self, flight: Flight | None) -> None:
        hours = self.recipe.run.max_hours
        if not self.asked and 0 < hours * 3600 <= time.monotonic() - self.began:
            self._note_request("run.max_hours are over")
        if not self.asked:
            return
        training = flight is not None and flight.phase not in (*BEFORE_TRAINING, *AFTER_TRAINING)
        limit_s = SAVE_WITHIN_S if flight is not None and flight.phase in WRITING else STOP_WITHIN_S
        late = time.monotonic() - self.asked_at > limit_s
        if len(self.asked) > 1 or late or not training:
            if flight is not None and flight.phase in ("finished", "stopped") and not self._leaves_late():
                return  # it is leaving by itself
            self.at_once = True
            self.cause = self._request() + (", at once" if training else "")
            self._end_rank()
        else:
            blackbox.ask_to_stop(self.memory / "rank-0")

    def _end_if_silent(self, flight: Flight | None) -> None:
        """A rank that its own watchdog did not end, because it was stopped or hangs in the kernel."""
        if flight is None:
            return
        if flight.phase in ("finished", "stopped") and self._leaves_late():
            self.cause = f"it had {flight.phase} and did not leave within {LEAVE_WITHIN_S:.0f} s"
            self._end_rank(at_once=True)
            return
        run = self.recipe.run
        seconds = run.start_deadline_s if flight.phase in SLOW else run.deadline_s
        self._silent_polls = self._silent_polls + 1 if seconds and flight.silent_s > seconds + workers.GRACE_S else 0
        if self._silent_polls >= SILENT_POLLS:
            self.cause = f"deadline: it began nothing for {flight.silent_s:.0f} s, being stopped or stuck in the kernel"
            self._end_rank(at_once=True)

    def _leaves_late(self) -> bool:
        """Whether a rank that has said it is done is still there after a while."""
        self._leaving_since = self._leaving_since or time.monotonic()
        return time.monotonic() - self._leaving_since > LEAVE_WITHIN_S

    def _end_rank(self, *, at_once: bool = False) -> None:
        if not self._killed_at:
            self._killed_at = time.monotonic()
            self.workers.end(at_once=at_once)

    def _ask(self, number: int, _) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP:  # the terminal's end is no reason to stop
            return
        if number == signal.SIGQUIT:
            self._note_request(name)
        self._note_request(name)

    def _note_request(self, by: str) -> None:
        self.asked.append(by)
        self.asked_at = self.asked_at or time.monotonic()

    def _leave(self, end: dict, claim: runfolder.Claim) -> int:
        """Write end.json and say how it ended; a refused start leaves everything as it was."""
        if end["verdict"] == ending.REFUSED and claim.leave_nothing():
            while_there(lambda: print(f"graphcap: {end['cause']}", file=sys.stderr))
            return end["exit_code"]
        told = []
        try:
            checkpoint.write_json(self.folder / ending.END, end)
        except OSError as error:
            told = [f"graphcap: end.json cannot be written: {error}; `graphcap status` will write it once it can"]
        if end["verdict"] != ending.FINISHED:
            claim.note(ending.headline(end))
            told += ["graphcap: " + ending.headline(end), *ending.lines(end)[1:]]
        if told:
            while_there(lambda: print("\n".join(told), file=sys.stderr))
        on_end(self.recipe)
        return end["exit_code"]


@contextlib.contextmanager
def _signals(ask):
    """Signals to this process call `ask(number, frame)`; a program that calls this from another thread keeps its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Handlers, not SIG_IGN, which ranks would inherit. Elastic would set its own, that raise, unless it is told to set none.
    numbers = (*ASK, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, ask) for number in numbers}
    told = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if told is None:
            del os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
        else:
            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = told
