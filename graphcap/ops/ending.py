"""How a run ended, in one document and in words: `end.json`.

The supervisor writes it, or the rank itself where nobody supervises it, or `graphcap status` where both were killed. What
it says comes from the exit code, the flight records and the last words on standard error; it holds no environment, and no
value of a variable that looks like a secret.

Calls: ops/launch.py, ops/status.py. Loads no torch.
"""

import json
import os
import re
import signal
from datetime import datetime, timezone
from pathlib import Path

from graphcap.ops import blackbox, checkpoint, faults
from graphcap.ops.blackbox import Flight

END, START = "end.json", "start.json"
SECRET = re.compile("TOKEN|KEY|SECRET|PASS", re.IGNORECASE)
NONE = type(None)
START_TYPES = {"command": str, "pid": int, "pid_start": int, "boot": str}
END_TYPES = {
    **dict.fromkeys(("verdict", "cause", "when", "continue"), str),
    **dict.fromkeys(("checkpoint", "traceback", "phase", "bucket", "device"), (str, NONE)),
    **dict.fromkeys(("update", "finished"), (int, NONE)),
    **dict.fromkeys(("stderr", "entries"), list),
    "rank": int,
    "memory": (dict, NONE),
}
LAST_WORDS = 20  # lines of standard error that are kept
FINISHED, STOPPED, DEAD, REFUSED = "finished", "stopped", "dead", "refused"
DEADLINE = "deadline: it began nothing for too long"
FATAL = {  # faulthandler's words
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
EXIT_CODES = {FINISHED: 0, STOPPED: 3, DEAD: 1, REFUSED: 2}


def of_exit(folder: Path, *, code: int | None, command: str, reason: str = "", rank: int = 0, supervised: bool = True) -> dict:
    """The end of a rank that is over. code: its exit code, negative a signal, None unknown. command: what goes on with the run.

    reason: why its supervisor ended it; then nothing else counts. supervised: whether it had one.
    """
    flight = next((one for one in blackbox.flights(folder) if one.rank == rank), None)
    words = last_words(folder / f"rank-{rank}" / "stderr")
    verdict, cause = _verdict(folder, code, flight, words, rank, supervised)
    newest = checkpoint.newest(folder / "checkpoints", hashes=False)[0]
    return {
        "version": 1,
        "verdict": verdict,
        "cause": hidden(reason or cause),
        "exit_code": EXIT_CODES[verdict],
        "rank_exit_code": code,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rank": rank,
        "checkpoint": newest.name if newest else None,
        "stderr": [hidden(line) for line in words],
        "traceback": f"rank-{rank}/{faults.TRACEBACK}" if (folder / f"rank-{rank}" / faults.TRACEBACK).exists() else None,
        "continue": hidden(command),
        **_last_known(flight),
    }


def _last_known(flight: Flight | None) -> dict:
    """What the flight record says of the moment of the end."""
    if flight is None:
        return {"update": None, "phase": None, "bucket": None, "device": None, "finished": None, "memory": None, "entries": []}
    at = flight.at
    memory = {"host_bytes": flight.host_bytes, "host_share": round(flight.host_share, 3), "gpu_bytes": flight.gpu_bytes}
    return {
        "update": at.update,
        "phase": at.phase,
        "bucket": at.bucket,
        "device": flight.device,
        "finished": flight.finished,
        "memory": memory,
        "entries": [f"{entry.phase} {entry.bucket} update {entry.update}".replace("  ", " ") for entry in flight.entries[-8:]],
    }


def _verdict(
    folder: Path, code: int | None, flight: Flight | None, words: list[str], rank: int, supervised: bool
) -> tuple[str, str]:
    """Verdict and cause. An exit code is believed only where the flight record agrees: any library may call exit."""
    phase, error, trained = (flight.phase, flight.error, flight.update) if flight else ("", "", 0)
    if code == 0 and phase == "finished":
        return FINISHED, ""
    if code == 3 and phase == "stopped":
        return STOPPED, "on request"
    if code == 2 and error and not trained:
        return REFUSED, error
    traceback = folder / f"rank-{rank}" / faults.TRACEBACK
    if code is None and phase in (FINISHED, STOPPED):
        return phase, "on request" if phase == STOPPED else ""
    if code is None:
        return DEAD, error or died_of(traceback, supervised) or _vanished(supervised)
    if code < 0:
        ended = _signal_name(-code) + _probable(-code, flight)
        return DEAD, f"{error}\nthen {ended}, while it ended" if error else ended
    if code in (0, 3):
        return DEAD, f"it ended with exit code {code} before it had finished"
    if died_of(traceback, supervised) == DEADLINE:
        return DEAD, DEADLINE
    return DEAD, error or (words[-1] if words else f"exit code {code}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _probable(number: int, flight: Flight | None) -> str:
    if number == signal.SIGKILL and flight is not None and flight.host_share > 0.93:
        return " (host memory was nearly full: probably the kernel's out-of-memory killer)"
    return ""


def _vanished(supervised: bool) -> str:
    together = " together with its supervisor" if supervised else ""
    return f"killed{together}: SIGKILL, a crash, a container's end, or power"


def died_of(traceback: Path, supervised: bool) -> str:
    """What faulthandler's file says a process died of; nothing where it says nothing.

    A rank gets SIGTERM when its supervisor ends, whatever ended that: it is no cause there.
    """
    try:
        text = traceback.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    if "Timeout (" in text:
        return DEADLINE
    fatal = re.search(r"^Fatal Python error: (.+)", text, re.MULTILINE)
    if fatal:
        return FATAL.get(fatal[1].strip(), fatal[1].strip())
    return "SIGTERM" if text.strip() and not supervised else ""


def last_words(path: Path) -> list[str]:
    """The last lines of a rank's standard error that are not empty."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line.rstrip()[:400] for line in lines if line.strip()][-LAST_WORDS:]


def secrets() -> list[str]:
    """Values of this process's variables that look like secrets, longest first."""
    found = {value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= 8}
    return sorted(found, key=len, reverse=True)


def hidden(text: str) -> str:
    """The text without any value of such a variable."""
    for value in secrets():
        text = text.replace(value, "***")
    return text


def hide_in(path: Path) -> None:
    """Overwrite such values in a file, in place and with nothing else moved."""
    data = path.read_bytes()
    for value in secrets():
        secret, place = value.encode(), data.find(value.encode())
        while place >= 0:
            with open(path, "r+b") as file:
                file.seek(place)
                file.write(b"*" * len(secret))
            place = data.find(secret, place + len(secret))


def read(folder: Path, name: str) -> dict | None:
    """end.json or start.json of a run; None where there is none, or not a whole one."""
    try:
        document = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    types = {END: END_TYPES, START: START_TYPES}[name]
    if not isinstance(document, dict) or not all(isinstance(document.get(key, ...), kind) for key, kind in types.items()):
        return None
    if name == END and not _sound(document):
        return None
    return document


def _sound(end: dict) -> bool:
    """Whether the parts of an end that are shown are what they have to be."""
    memory = end["memory"] or {"host_share": 0.0, "gpu_bytes": 0}
    numbers = all(isinstance(memory.get(name), (int, float)) for name in ("host_share", "gpu_bytes"))
    name = end["checkpoint"] is None or checkpoint.COMPLETE_NAME.fullmatch(end["checkpoint"])
    texts = [*end["stderr"], *end["entries"], *(end.get("restarts") or [])]
    return bool(numbers and name and all(isinstance(text, str) for text in texts))


def headline(end: dict) -> str:
    """The verdict in one line, and how to go on."""
    if end["verdict"] == FINISHED:
        return what_happened(end)
    mended_first = "then " if end.get("rank_exit_code") == EXIT_CODES[REFUSED] else ""  # the cause says what to mend
    return f"{what_happened(end)} · {mended_first}continue: {end['continue']}"


def what_happened(end: dict) -> str:
    """The verdict in one line."""
    done = int(end["checkpoint"].removeprefix("update-").removesuffix(".old")) if end["checkpoint"] else 0
    if end["verdict"] == FINISHED:
        return f"finished · {done:,} updates"
    where = ""
    if end["verdict"] == STOPPED and end["update"]:
        where = f" after update {end['finished']:,}"
    elif end["update"] is not None and end["phase"] != "stopped":
        bucket = f", bucket {end['bucket']}" if "/" in (end["bucket"] or "") else ""
        where = f" at update {end['update']:,}{bucket}, {end['phase']}" if end["update"] else f" at {end['phase']}{bucket}"
    memory = f" · host memory {end['memory']['host_share']:.0%}" if end["memory"] and end["verdict"] == DEAD else ""
    kept = f"nothing lost before {done:,}" if done else "no checkpoint yet"
    device = f" ({end['device']})" if end["device"] else ""
    who = f" · rank {end['rank']}{device}" if end["verdict"] == DEAD else ""
    cause = end["cause"].splitlines()[0] if end["cause"] else "ended"
    return f"{end['verdict']}{who} · {cause}{where}{memory} · {kept}"


def lines(end: dict) -> list[str]:
    """The verdict and what supports it, at most 12 lines."""
    found = [headline(end), f"  ended      {end['when']}"]
    if end["verdict"] in (FINISHED, STOPPED):
        return found
    if end["entries"]:
        found.append(f"  last       {' · '.join(end['entries'][-4:])}")
    if end["memory"] and end["memory"]["gpu_bytes"]:
        found.append(f"  GPU memory {end['memory']['gpu_bytes'] / 2**30:.1f} GiB")
    found += [f"  stderr     {line}" for line in end["stderr"][-5:]]
    if end["traceback"]:
        found.append(f"  traceback  {end['traceback']}")
    if end.get("restarts"):
        found.append(f"  restarts   {len(end['restarts'])}, last after: {end['restarts'][-1]}")
    return found[:12]
