"""Processes that tokenise: each gets batches of rows through a pipe and sends documents back.

They are programs of their own, not forks: this process may have threads, CUDA and hundreds of megabytes that a child has
no use for. They load no torch, take no part in a Ctrl-C (this process stops for it, and their pipe ends), and a dead one
is an error here, with its last words. Called by conversations.py.
"""

import os
import pickle
import queue
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor

from graphcap.data.sources import Row
from graphcap.data.tokenising import Rules, Tokenised, Tokeniser
from graphcap.errors import DataError, GraphcapError

_HEADER = struct.Struct("<Q")
_PROGRAM = "from graphcap.data.workers import serve; serve()"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Workers:
    """So many processes with one tokenizer and one set of rules. A batch goes to whichever is free."""

    def __init__(self, tokenizer, rules: Rules, *, count: int) -> None:
        """Raises: GraphcapError if one cannot be started; then none is left."""
        task = pickle.dumps((tokenizer, rules))
        self.count = count
        self._all: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count)
        try:
            for _ in range(count):
                self._all.append(_Worker(task))
                self._free.put(self._all[-1])
        except OSError as error:
            self.close()
            raise GraphcapError(
                "worker that tokenises",
                f"{len(self._all) + 1} of {count}",
                expected="a process more",
                got=(error.strerror or str(error)).lower(),
                fix="raise the limit of processes or memory, or give fewer CPUs (taskset -c 0), which means fewer workers",
            ) from error

    def submit(self, entries: list[Row | DataError], form: str) -> "Future[Tokenised]":
        """What Tokeniser.tokenise gives for these rows. Its result raises GraphcapError if the process has died."""
        return self._threads.submit(self._ask, pickle.dumps((entries, form), protocol=5))

    def _ask(self, message: bytes) -> Tokenised:
        worker = self._free.get()
        try:
            return worker.ask(message)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self._all:
            worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.close()


class _Worker:
    def __init__(self, task: bytes) -> None:
        self._words = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,
        )
        self._task: bytes | None = task  # sent with the first batch, by that batch's thread: it may wait for the process

    def ask(self, message: bytes) -> Tokenised:
        try:
            if self._task is not None:
                task, self._task = self._task, None
                _send(self.process.stdin, task)
            _send(self.process.stdin, message)
            return pickle.loads(_receive(self.process.stdout))
        except (OSError, EOFError) as error:
            raise self._died() from error

    def _died(self) -> GraphcapError:
        code = self.process.wait()
        self._words.seek(0)
        last = self._words.read()[-2000:].decode(errors="replace").split("\n")
        words = " ".join(next((line for line in reversed(last) if line.strip()), "it said nothing").split())[:300]
        killed = f"signal {-code}" if code < 0 else f"exit code {code}"
        return GraphcapError(
            "worker that tokenises",
            self.process.pid,
            expected="documents",
            got=f"its end by {killed}",
            cause=words if code != -9 else "SIGKILL is what a container's memory limit sends",
            fix="raise that limit or give fewer CPUs (taskset -c 0), which means fewer workers"
            if code == -9
            else "look for the row that does it: halve the file",
        )

    def close(self) -> None:
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self._words):
            try:
                file.close()
            except BrokenPipeError:  # a batch was on its way
                pass


def serve() -> None:
    """The program of a worker: answer batches from standard input until it ends."""
    into, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    tokeniser = Tokeniser(*pickle.loads(_receive(into)))
    while True:
        try:
            entries, form = pickle.loads(_receive(into))
        except EOFError:
            return
        _send(out, pickle.dumps(tokeniser.tokenise(entries, form), protocol=5))


def _send(file, message: bytes) -> None:
    file.write(_HEADER.pack(len(message)))
    file.write(message)
    file.flush()


def _receive(file) -> bytes:
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError("the pipe has ended")
    (size,) = _HEADER.unpack(header)
    message = file.read(size)
    if len(message) < size:
        raise EOFError("the pipe has ended")
    return message
