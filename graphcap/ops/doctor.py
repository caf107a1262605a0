"""`graphcap doctor`: whether this machine can train; one line a check, with what was found, needed, and what to type.

First the checks of machine.py, here, then those of device.py in a child process, whose death or silence fails the check it
was at. No line names user, host or home folder, and nothing stays on the disk.

Calls: cli.py. Loads torch only in the child process.
"""

import contextlib
import itertools
import json
import os
import pwd
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from graphcap.ops import device, machine
from graphcap.ops.machine import Check

DEVICE_S = 300  # seconds for all checks of the GPU; kernels are compiled


def run(as_json: bool, say: Callable[[str], None]) -> int:
    """Say one line a check and the verdict; as_json: one list of all checks. Returns 0, or 2 where a check failed."""
    checks = []
    for check in map(nameless, itertools.chain(map(machine.guarded, machine.CHECKS), device_checks())):
        checks.append(check)
        if not as_json:
            say(line(check))
    failed = [check.name for check in checks if check.state == "fail"]
    if as_json:
        say(json.dumps([{"check" if key == "name" else key: text for key, text in asdict(check).items()} for check in checks]))
    else:
        say(f"to mend before training: {', '.join(failed)}" if failed else "nothing failed")
    return 2 if failed else 0


def line(check: Check) -> str:
    """A check for people."""
    text = f"{check.state:4}  {check.name:14}  {check.found}"
    if check.state in ("ok", "skip"):
        return text
    return f"{text}; needed: {check.needed}. Fix: {check.fix}"


def nameless(check: Check) -> Check:
    return replace(check, found=private(check.found), fix=private(check.fix))


def private(text: str) -> str:
    """`text` with ~ for home folders, and without the names of user and host."""
    homes, users = [os.path.expanduser("~")], [os.environ.get("USER"), os.environ.get("LOGNAME")]
    with contextlib.suppress(KeyError):  # a container's user may have no name
        user = pwd.getpwuid(os.getuid())
        homes, users = [*homes, user.pw_dir], [*users, user.pw_name]
    for home in sorted({*homes, *map(os.path.realpath, homes)}, key=len, reverse=True):
        if home.startswith("/") and home != "/":
            text = re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w-])", "~", text)
    text = re.sub(r"/(home|Users)/[^/\s'\":,;)]+", "~", text)
    host = socket.gethostname()
    for names, word in (({*users} - {"root"}, "USER"), ({host, host.split(".")[0]} - {"localhost"}, "HOST")):
        for name in sorted(filter(None, names), key=len, reverse=True):
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", word, text)
    return text


def device_checks() -> Iterator[Check]:
    """The checks of device.py. One that never ends, or ends the process, has failed; those behind it are skipped."""
    waiting, how = list(device.DEVICE_CHECKS), "its process ended before it"
    try:
        for text in answers():
            waiting.pop(0)
            yield Check(**json.loads(text))
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
    for number, (function, needed, fix) in enumerate(waiting):
        state, found = ("skip", "not reached: not checked") if number else ("fail", how)
        yield Check(machine.name_of(function), state, found, needed, "" if number else fix)


def answers() -> Iterator[str]:
    """Lines of `device.answer` in a new process. Raises: TimeoutError, RuntimeError where it did not come to its end."""
    program = f"import sys; sys.path[:] = {sys.path!r}; from graphcap.ops import device; device.answer()"
    place = None
    with contextlib.suppress(OSError, RuntimeError):  # the check of the caches has told
        place = machine.nearest(machine.cache_folders()[0])
    folder = tempfile.TemporaryDirectory(dir=place if place and os.access(place, os.W_OK) else None, ignore_cleanup_errors=True)
    with tempfile.TemporaryFile() as errors, folder as empty:  # nothing is cached: kernels are compiled where they will be
        where = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors, "start_new_session": True}
        variables = os.environ | dict.fromkeys(machine.CACHES, empty)
        child = subprocess.Popen([sys.executable, "-c", program], **where, env=variables)
        try:
            yield from (text for text in lines_of(child, DEVICE_S) if text.startswith('{"name"'))
        finally:
            code = machine.ended(child)
        errors.seek(0)
        last = (errors.read().decode(errors="replace").strip().splitlines() or ["without a word"])[-1][:200]
    if code is None:
        raise TimeoutError(f"no answer in {DEVICE_S} s")
    if code:
        raise RuntimeError(f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}: {last}")


def lines_of(child: subprocess.Popen, seconds: float) -> Iterator[str]:
    """Lines of a program's output until it closes it or the time is up; does not wait for the program itself."""
    end, rest = time.monotonic() + seconds, b""
    while (left := end - time.monotonic()) > 0 and select.select([child.stdout], [], [], left)[0]:
        piece = os.read(child.stdout.fileno(), 65536)
        if not piece:
            break
        *whole, rest = (rest + piece).split(b"\n")
        yield from (text.decode(errors="replace") for text in whole)
    if rest:
        yield rest.decode(errors="replace")
