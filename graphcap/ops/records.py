"""A run's records on their way from this node's memory into the run's folder, and the end that nobody was left to write.

Calls: ops/rank.py, ops/launch.py, ops/runfolder.py, ops/status.py. Loads no torch.
"""

import contextlib
from datetime import datetime, timedelta, timezone
from pathlib import Path

from graphcap.ops import blackbox, checkpoint, ending, faults


def keep(folder: Path, memory: Path) -> None:
    """Copy flight records and tracebacks from the node's memory into the run's folder."""
    for record in memory.glob("rank-*"):
        name = record.name.split(".")[0]
        kept = folder / name
        kept.mkdir(exist_ok=True)
        if record.name == name:
            blackbox.copy_record(record, kept / blackbox.FILE)
        elif record.stat().st_size:
            (kept / faults.TRACEBACK).write_bytes(record.read_bytes())


def forget(memory: Path, rank: str = "rank-*") -> None:
    """Take the records of one rank, or of all, out of the node's memory, once the run's folder has them."""
    for path in (*memory.glob(rank), *memory.glob(f"{rank}.*")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is gone, or other ranks still write in it
        memory.rmdir()


def conclude(folder: Path, start: dict) -> dict:
    """The end of a run whose processes have all gone without a word; its records and end.json go into its folder.

    start: its start.json. Where the file system refuses (another user's run, a full or read-only disk) it is told all the same,
    and the records stay where they are.
    """
    memory = blackbox.memory_folder(folder)
    with contextlib.suppress(OSError):
        keep(folder, memory)
    supervised = start.get("supervised", True)
    end = ending.of_exit(folder, code=None, command=start["command"], supervised=supervised)
    end |= {"when": _last_heard(folder), "restarts": [], "asked": [], "concluded": True}
    with contextlib.suppress(OSError):
        checkpoint.write_json(folder / ending.END, end)
        forget(memory)
    return end


def _last_heard(folder: Path) -> str:
    """When the run's record says that it last began something: about when it died. Else now."""
    now, flights = datetime.now(timezone.utc), blackbox.flights(folder)
    if flights and flights[0].boot == blackbox.boot_id():
        now -= timedelta(seconds=min(flight.silent_s for flight in flights))
    elif times := [path.stat().st_mtime for path in folder.glob(f"rank-*/{blackbox.FILE}")]:
        now = datetime.fromtimestamp(max(times), timezone.utc)
    return now.isoformat(timespec="seconds")
