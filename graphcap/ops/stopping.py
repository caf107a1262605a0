"""Signals that ask a process without a supervisor to stop: the first lets it keep its work, a second one ends it at once.

Handlers in Python, as the supervisor of a run has them: this is no rank, and whoever hangs in C gets SIGKILL.

Calls: cli.py (asked_by_signals), ops/launch.py (ASK). Loads no torch.
"""

import contextlib
import signal
import threading

ASK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Whether somebody has asked for a stop."""

    def __init__(self) -> None:
        self._asked = self._waits = False

    def asked(self) -> bool:
        """Whether to keep what was done and stop. Before the first call there is nothing to keep: a signal ends at once."""
        self._waits = True
        return self._asked

    def ask(self, number: int, _) -> None:
        """The handler. Raises: KeyboardInterrupt to end at once."""
        again, self._asked = self._asked, True
        if again and number == signal.SIGHUP:  # a terminal that closes sends it, and then its shell does
            return
        if again or not self._waits:
            raise KeyboardInterrupt


@contextlib.contextmanager
def asked_by_signals():
    """Yields a Stop that Ctrl-C, SIGTERM, SIGUSR1 and the terminal's end ask, in the main thread of a program.

    What was ignored, as SIGHUP is under nohup, stays so.
    """
    stop, before = Stop(), {}
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in (*ASK, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, stop.ask) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
