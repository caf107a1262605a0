"""A training process's place in its run: how it is seen, stopped and explained.

`entered` makes this process a rank: it opens the flight record, sends tracebacks to a file, sets the deadline, and, where no
supervisor watches it, leaves end.json itself.

Calls: cli.py (entered), train.py (Rank), ops/launch.py. Loads no torch.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback

from graphcap.config import Recipe
from graphcap.errors import ConfigError, GraphcapError, in_the_one_form
from graphcap.ops import blackbox, checkpoint, ending, faults, records, runfolder

ON_END_S = 20
NOT_AGAIN = 4  # exit code of a rank, to its supervisor: another start would end the same way
SUPERVISOR = "GRAPHCAP_SUPERVISOR"  # variable that tells a rank its supervisor's process id
BEFORE_TRAINING = ("start-up", "extract", "load target", "load data", "warm-up", "audit", "capture", "load state", "reserve")
AFTER_TRAINING = ("decode", "finished", "stopped")
FEATURES = "write features"  # where training computes what its features lack: a stop keeps them
WRITING = ("save", FEATURES)
SLOW = (*BEFORE_TRAINING, *AFTER_TRAINING, *WRITING)


class Rank:
    """This process's place in a run: its number, its flight recorder and deadline, and who draws."""

    def __init__(self, recipe: Recipe, *, number: int, supervised: bool, unhurried: bool) -> None:
        """unhurried: nothing ends this process for being slow: somebody debugs it."""
        self.recipe, self.supervised, self.number = recipe, supervised, number
        self.memory = blackbox.memory_folder(recipe.folder)
        self.recorder = blackbox.Recorder(self.memory, rank=number)
        traceback = self.memory / f"rank-{number}.{faults.TRACEBACK}"
        faults.record_faults(traceback)
        self._unhurried = unhurried
        self.deadline = faults.Deadline(traceback, 0.0 if unhurried else recipe.run.start_deadline_s)
        self.recorder.watch(self.deadline)
        self._began, self._interrupted = time.monotonic(), False

    @property
    def draws(self) -> bool:
        """Whether this process draws the bar itself."""
        return self.number == 0 and not self.supervised

    def hurries(self, training: bool) -> None:
        """From here on the deadline of training holds, or the long one of what stands around it: loading, saving, decoding."""
        run = self.recipe.run
        self.deadline.change(0.0 if self._unhurried else run.deadline_s if training else run.start_deadline_s)

    def stop_asked(self) -> bool:
        """Whether to save and stop now: somebody asked, or, where no supervisor counts them, run.max_hours are over."""
        hours = 0.0 if self.supervised else self.recipe.run.max_hours
        return self._interrupted or self.recorder.stop_asked or 0 < hours * 3600 <= time.monotonic() - self._began

    def interrupt(self, *_) -> None:
        """A first Ctrl-C asks for a planned stop while training, a second one ends at once."""
        if self._interrupted or self.recorder.phase in (*BEFORE_TRAINING, *AFTER_TRAINING):
            raise KeyboardInterrupt
        self._interrupted = True

    def close(self) -> None:
        """No deadline any more. Without a supervisor also: the records go from memory into the run's folder."""
        self.deadline.close()
        if not self.supervised:
            faults.forget_faults()
            try:
                records.keep(self.recipe.folder, self.memory)
            except OSError as error:  # the error on its way is worth more
                print(f"graphcap: records of this run could not be kept: {error}", file=sys.stderr)
            records.forget(self.memory, f"rank-{self.number}")


@contextlib.contextmanager
def entered(recipe: Recipe, *, here: bool, command: str):
    """This process as a rank: yields its Rank. Where no supervisor does, it claims the folder and leaves end.json itself.

    here: started with --here, for debuggers and profilers, so nothing ends it for being slow.
    Raises: ConfigError if another process works in the folder, or if this is one of several ranks.
    """
    supervisor, number = os.environ.get(SUPERVISOR), int(os.environ.get("RANK", "0"))
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "variable",
            "WORLD_SIZE",
            expected="1",
            got=os.environ["WORLD_SIZE"],
            cause="a run trains on one GPU; several ranks would write the same files",
            fix="start graphcap train without torchrun, or with one process",
        )
    if supervisor:
        sys.stdout, sys.stderr = _Hiding(sys.stdout), _Hiding(sys.stderr)
        faults.die_with(int(supervisor))
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a planned stop comes from the supervisor; a signal to a rank ends it
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the supervisor, if it was sent to both
    claim = runfolder.Claim(recipe, command, supervised=False) if not supervisor else None
    try:
        rank = Rank(recipe, number=number, supervised=bool(supervisor), unhurried=here)
        with _interruptible(rank) if here else contextlib.nullcontext():
            yield from _watched(rank, claim, command)
    finally:
        if claim is not None:
            claim.close()


@contextlib.contextmanager
def leaving_at_once():
    """A failure of training ends this process here, after its message or traceback, and takes none of its objects apart.

    Once a device is dead, torch aborts where it frees memory of it, and the frames of that would be the last words.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or getattr(error, "exit_code", 1) != 1:  # the device is well
            raise
        if isinstance(error, GraphcapError):
            print(f"graphcap: {error.told}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if getattr(error, "again", True) else NOT_AGAIN)


class _Hiding:
    """A stream that writes no value of a variable that looks like a secret."""

    def __init__(self, stream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(ending.hidden(text))

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def _watched(rank: Rank, claim: "runfolder.Claim | None", command: str):
    """Yield the rank; then say how it ended, in its record and, where it has claimed the folder, in end.json."""
    recipe, code, reason = rank.recipe, 1, ""
    try:
        yield rank
        code = 0 if rank.recorder.phase == "finished" else 3
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        if isinstance(error, KeyboardInterrupt):
            code, reason = 3, "at once, on request"
            rank.recorder.note("stopped")
        told = in_the_one_form(error, again="continues from the newest checkpoint")
        text = str(told) if hasattr(told, "exit_code") else f"{type(error).__name__}: {error}".removesuffix(": ")
        rank.recorder.error(ending.hidden(text))
        raise
    finally:
        rank.close()
        if claim is not None:
            end = ending.of_exit(recipe.folder, code=code, command=command, reason=reason, supervised=False)
            if end["verdict"] != ending.REFUSED or not claim.leave_nothing():
                try:
                    checkpoint.write_json(recipe.folder / ending.END, end)
                except OSError as error:  # what ended the run is worth more
                    print(f"graphcap: end.json cannot be written: {error}", file=sys.stderr)
                on_end(recipe)


@contextlib.contextmanager
def _interruptible(rank: Rank):
    """Ctrl-C asks the rank to stop, in the main thread of a program; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, rank.interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def on_end(recipe: Recipe) -> None:
    """Run the recipe's `run.on_end`, with the path of end.json behind it. Its failure is said and changes nothing."""
    if not recipe.run.on_end:
        return
    command = [*shlex.split(recipe.run.on_end), str(recipe.folder / ending.END)]
    said = ""
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        said = f"exit code {process.wait(ON_END_S)}" if process.wait(ON_END_S) else ""
    except subprocess.TimeoutExpired:
        said = f"took longer than {ON_END_S} s"
        os.killpg(process.pid, signal.SIGKILL)  # and what it has started
        process.wait()
    except OSError as error:
        said = str(error)
    if said:
        print(f"graphcap: run.on_end '{recipe.run.on_end}': {said}", file=sys.stderr)


def command_of(arguments: list[str]) -> str:
    """The command line that goes on with a run."""
    return shlex.join(["graphcap", *arguments])
