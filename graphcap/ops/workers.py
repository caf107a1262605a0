"""The ranks of a run as processes of torch's elastic launcher: started, asked for their exit code, ended.

Calls: ops/launch.py. Loads torch only in `start`.
"""

import contextlib
import logging
import os
import signal
from pathlib import Path

from graphcap.ops.rank import SUPERVISOR

GRACE_S = 5  # between SIGTERM and SIGKILL for ranks that have to end


def start(folder: Path, command: list[str], variables: dict[str, str]):
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
        **variables,
    }
    workers = Workers("graphcap", command[0], {0: tuple(command[1:])}, {0: environment}, Files())
    workers.start()
    return workers
