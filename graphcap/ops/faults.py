"""Tracebacks of a process that dies or hangs, by Python's faulthandler, and its end when its parent ends.

Tracebacks of all threads are written at a fatal signal, at SIGTERM, and when the process has begun nothing for longer than its
deadline. The watchdog of the deadline is a thread in C that needs neither Python nor CUDA, so a process that hangs in C is
ended too.

Calls: ops/rank.py, ops/blackbox.py. Loads no torch.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

TRACEBACK = "traceback.txt"
REARM_EVERY_S = 1.0


class Deadline:
    """Ends this process, with the tracebacks of all threads, when nothing has put it off for `seconds`."""

    def __init__(self, path: Path, seconds: float) -> None:
        """path: file for the tracebacks, the one of `record_faults`. seconds: 0: no deadline."""
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - faulthandler writes to it until the process ends
        self._armed: float | None = None
        self.change(seconds)

    def change(self, seconds: float) -> None:
        """Another number of seconds from now on."""
        self._cancel()
        self._seconds = seconds
        self.put_off(time.monotonic())

    def put_off(self, now: float) -> None:
        if self._seconds and (self._armed is None or now - self._armed >= REARM_EVERY_S):
            self._armed = now
            faulthandler.dump_traceback_later(self._seconds, file=self._file, exit=True)

    def close(self) -> None:
        self._cancel()
        self._file.close()

    def _cancel(self) -> None:
        if self._armed is not None:  # cancelling what another has armed would hang in a child that was forked
            faulthandler.cancel_dump_traceback_later()
            self._armed = None


def record_faults(path: Path) -> None:
    """Tracebacks of all threads go to `path` at a fatal signal and at SIGTERM, before this process dies of it."""
    path.unlink(missing_ok=True)
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.enable(file=file, all_threads=True)
    faulthandler.register(signal.SIGTERM, file=file, all_threads=True, chain=True)


def forget_faults() -> None:
    """Take `record_faults` back."""
    faulthandler.unregister(signal.SIGTERM)
    faulthandler.disable()


def die_with(parent: int) -> None:
    """This process gets SIGKILL when the thread that started it ends, whatever ends that. parent: its process id.

    Not SIGTERM, which a process that was stopped would not take.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    PR_SET_PDEATHSIG = 1
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        print(f"graphcap: prctl failed (errno {ctypes.get_errno()}); this rank may outlive its supervisor", file=sys.stderr)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)
