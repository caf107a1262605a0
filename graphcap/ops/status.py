"""`graphcap status`: what a run is doing, or how it ended, from its folder and, while it lives, this node's memory.

Where supervisor and ranks were killed together nobody has said how it ended; then this concludes it and writes it down.

Calls: cli.py. Loads no torch.
"""

import json
import time
from pathlib import Path

from graphcap.errors import ConfigError
from graphcap.ops import blackbox, checkpoint, ending, rank, records, runfolder
from graphcap.ops.blackbox import Flight

SILENT_S = 60.0  # a rank that trains and has begun nothing for so long is said to hang
ELSEWHERE_S = 60.0  # a run of another node whose record is younger is taken for alive


def run(folders: list[str], *, as_json: bool, say) -> int:
    """Say the status of each run, or of every run under a folder. Returns 0. Raises: ConfigError if a folder holds no run."""
    found = [status for folder in folders for status in _of(Path(folder), one=len(folders) == 1)]
    if as_json:
        say(json.dumps(checkpoint.finite(found if len(found) != 1 else found[0]), sort_keys=True))
        return 0
    several = len(found) > 1
    for status in found:
        say(f"{status['folder']}: {status['lines'][0]}" if several else "\n".join(status["lines"]))
    return 0


def _of(folder: Path, *, one: bool) -> list[dict]:
    if (folder / ending.START).is_file() or (folder / "config.toml").is_file():
        return [status_of(folder)]
    runs = sorted(path.parent for name in (ending.START, "config.toml") for path in folder.glob(f"*/{name}"))
    if not runs:
        raise ConfigError(
            "folder",
            folder,
            expected="a run's folder, or one that holds runs",
            got="neither" if folder.is_dir() else "no such folder",
            fix="give the folder that `graphcap train` printed, for example runs/out/tiny",
        )
    return [status_of(path) for path in dict.fromkeys(runs)]


def status_of(folder: Path) -> dict:
    """folder, verdict, lines for people, and what they are made from. Writes end.json where nobody was left to.

    The verdict: running, hanging, finished, stopped, dead, refused or unknown.
    """
    start, end, ranks = ending.read(folder, ending.START), ending.read(folder, ending.END), blackbox.flights(folder)
    if end is None and start is None:
        return {"folder": str(folder), "verdict": "unknown", "lines": ["unknown · no record of how it was started or ended"]}
    here = start is not None and start["boot"] == blackbox.boot_id().hex()
    claimed = end is None and runfolder.is_claimed(folder)
    if end is None and here and (claimed or blackbox.lives(start) or any(flight.alive for flight in ranks)):
        return _running(folder, ranks, watched=claimed or blackbox.lives(start), restarts=start.get("restarts", 0))
    if end is None and not here and (claimed or _heard_s(folder) < ELSEWHERE_S):
        heard = "" if claimed else f", heard of {_heard_s(folder):.0f} s ago"
        lines = [f"running · on another node{heard}; ask `graphcap status` there"]
        return {"folder": str(folder), "verdict": "running", "lines": lines, "ranks": []}
    if end is None and not here and not start.get("supervised", True):  # its records are nowhere but on its own node
        lines = ["unknown · started on another node, or before this one booted, without a supervisor; ask there"]
        return {"folder": str(folder), "verdict": "unknown", "lines": lines}
    if end is None:
        end = records.conclude(folder, start)
    return {"folder": str(folder), "verdict": end["verdict"], "lines": ending.lines(end), "end": end}


def _heard_s(folder: Path) -> float:
    """Seconds since the record of a run was last copied into its folder."""
    times = [path.stat().st_mtime for path in folder.glob(f"rank-*/{blackbox.FILE}")]
    return max(0.0, time.time() - max(times)) if times else float("inf")


def _running(folder: Path, ranks: list[Flight], *, watched: bool, restarts: int) -> dict:
    first = ranks[0] if ranks else None
    if first is None:
        lines = ["running · starting"]
        return {"folder": str(folder), "verdict": "running", "lines": lines, "ranks": []}
    silent = max(flight.silent_s for flight in ranks)
    slowest = max(ranks, key=lambda flight: flight.silent_s)
    shown = first.shown or {}
    where = f"update {first.update:,}" + (f" of {shown['total']:,}" if "total" in shown else "")
    slow = slowest.phase in rank.SLOW
    hangs = f" · rank {slowest.rank} has begun nothing for {silent:.0f} s" if silent > SILENT_S and not slow else ""
    alone = "" if watched else " · its supervisor is gone"
    again = f" · restart {restarts}" if restarts else ""
    lines = [f"running · {where} · {slowest.phase}{again}{hangs}{alone}"]
    if shown.get("loss") is not None:
        speed = f"{shown['tokens_per_s']:,.0f} tokens/s"
        lines.append(f"  training   loss {shown['loss']:.3f}, block_match {shown['block_match']:.2f}, {speed}")
    saved = f"update {first.saved:,}" if first.saved >= 0 else "none yet"
    lines.append(f"  checkpoint {saved}")
    for flight in ranks[:8]:
        bucket = f", bucket {flight.at.bucket}" if "/" in flight.at.bucket else ""
        gpu = f", GPU memory {flight.gpu_bytes / 2**30:.1f} GiB" if flight.gpu_bytes else ""
        alive = "" if flight.alive else ", no longer alive"
        lines.append(
            f"  rank {flight.rank}     {flight.device}, {flight.at.phase}{bucket}, begun {flight.silent_s:.1f} s ago, "
            f"memory {flight.host_bytes / 2**30:.1f} GiB{gpu}{alive}"
        )
    records = [
        {
            "rank": flight.rank,
            "device": flight.device,
            "pid": flight.pid,
            "update": flight.at.update,
            "phase": flight.at.phase,
            "bucket": flight.at.bucket,
            "silent_s": flight.silent_s,
            "host_bytes": flight.host_bytes,
            "gpu_bytes": flight.gpu_bytes,
            "alive": flight.alive,
        }
        for flight in ranks
    ]
    verdict = "running" if not hangs else "hanging"
    return {"folder": str(folder), "verdict": verdict, "lines": lines[:12], "ranks": records, "metrics": shown}
