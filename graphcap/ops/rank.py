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
from pathlib import Path

from graphcap.config import Recipe
from graphcap.ops import blackbox, checkpoint, ending, runfolder

SUPERVISOR = "GRAPHCAP_SUPERVISOR"  # variable that tells a rank its supervisor's process id
BEFORE_TRAINING = ("start-up", "load target", "load data", "compile", "audit", "capture")
AFTER_TRAINING = ("decode", "finished")


class Rank:
    """This process's place in a run: its number, its flight recorder and deadline, who draws, and who holds the folder."""

    def __init__(self, recipe: Recipe, *, number: int, supervised: bool, unhurried: bool) -> None:
        """unhurried: nothing ends this process for being slow: somebody debugs it."""
        self.recipe, self.supervised, self.number = recipe, supervised, number
        self.memory = blackbox.memory_folder(recipe.folder)
        self.recorder = blackbox.Recorder(self.memory, rank=number)
        self.traceback = self.memory / f"rank-{number}.{blackbox.TRACEBACK}"
        blackbox.record_faults(self.traceback)
        self._unhurried = unhurried
        self.deadline = blackbox.Deadline(self.traceback, 0.0 if unhurried else recipe.run.start_deadline_s)
        self.recorder.watch(self.deadline)
        self._began, self._interrupted = time.monotonic(), False

    @property
    def draws(self) -> bool:
        """Whether this process draws the bar itself."""
        return self.number == 0 and not self.supervised

    def trains(self, training: bool) -> None:
        """Training begins or has ended: from here on another deadline holds."""
        run = self.recipe.run
        self.deadline.change(0.0 if self._unhurried else run.deadline_s if training else run.start_deadline_s)

    def lock(self):
        """The run's folder as this process's own; the supervisor holds it already for its ranks."""
        return contextlib.nullcontext() if self.supervised else runfolder.lock(self.recipe)

    def stop_asked(self) -> bool:
        """Whether to save and stop now: somebody asked, or run.max_hours are over."""
        hours = self.recipe.run.max_hours
        return self._interrupted or self.recorder.stop_asked or 0 < hours * 3600 <= time.monotonic() - self._began

    def interrupt(self, *_) -> None:
        """A first Ctrl-C asks for a planned stop while training, a second one ends at once."""
        if self._interrupted or self.recorder.phase in (*BEFORE_TRAINING, *AFTER_TRAINING):
            raise KeyboardInterrupt
        self._interrupted = True

    def close(self) -> None:
        """Without a supervisor: leave the records in the run's folder, if the run has begun, and nothing in memory."""
        self.deadline.close()
        if self.supervised:
            return
        blackbox.forget_faults()
        if (self.recipe.folder / "config.toml").exists():
            keep_records(self.recipe.folder, self.memory)
        forget(self.memory)


@contextlib.contextmanager
def entered(recipe: Recipe, *, here: bool, command: str):
    """This process as a rank. Where no supervisor watches it, it leaves end.json itself, if its run has begun.

    here: started with --here, for debuggers and profilers, so nothing ends it for being slow.
    """
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor:
        blackbox.die_with(int(supervisor))
    number = int(os.environ.get("RANK", "0"))
    rank = Rank(recipe, number=number, supervised=bool(supervisor), unhurried=here)
    if here and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, rank.interrupt)
    code, reason = 1, ""
    try:
        yield rank
        code = 0 if rank.recorder.phase == "finished" else 3
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        if isinstance(error, KeyboardInterrupt):
            code, reason = 3, "on request, at once"
        rank.recorder.error(f"{type(error).__name__}: {error}" if not hasattr(error, "exit_code") else str(error))
        raise
    finally:
        rank.close()
        began = (recipe.folder / "config.toml").exists() and code != 2
        if not supervisor and number == 0 and began:
            end = ending.of_exit(recipe.folder, code=code, command=command, reason=reason)
            checkpoint.write_json(recipe.folder / ending.END, end)
            on_end(recipe)


def keep_records(folder: Path, memory: Path) -> None:
    """Copy flight records and tracebacks from the node's memory into the run's folder."""
    for record in memory.glob("rank-*"):
        name = record.name.split(".")[0]
        kept = folder / name
        kept.mkdir(exist_ok=True)
        if record.name == name:
            blackbox.copy_record(record, kept / blackbox.FILE)
        elif record.stat().st_size:
            (kept / blackbox.TRACEBACK).write_bytes(record.read_bytes())
        else:
            (kept / blackbox.TRACEBACK).unlink(missing_ok=True)


def forget(memory: Path) -> None:
    """Take the records out of the node's memory, once the run's folder has them."""
    for path in memory.glob("rank-*"):
        path.unlink()
    with contextlib.suppress(FileNotFoundError):
        memory.rmdir()


def on_end(recipe: Recipe) -> None:
    """Run the recipe's `run.on_end`, with the path of end.json behind it. Its failure is said and changes nothing."""
    if not recipe.run.on_end:
        return
    command = [*shlex.split(recipe.run.on_end), str(recipe.folder / ending.END)]
    try:
        done = subprocess.run(command, timeout=60, check=False, stdin=subprocess.DEVNULL)
        said = f"exit code {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        print(f"graphcap: run.on_end '{recipe.run.on_end}': {said}", file=sys.stderr)


def command_of(arguments: list[str]) -> str:
    """The command line that goes on with a run."""
    return shlex.join(["graphcap", *arguments])
