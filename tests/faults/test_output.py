"""What a person sees of a run: graphcap's own lines and one bar, nothing of the libraries'; the second run's table."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

from graphcap.ops import blackbox

ROOT = Path(__file__).parents[2]
SHORT = (
    "optimizer.max_updates=4",
    "eval.every=2",
    "checkpoint.every=2",
    "eval.documents=2",
    "eval.prompts=2",
    "eval.passes=1",
    "eval.max_new_tokens=8",
    "run.threads=1",
    "run.device=cpu",
)
OWN_LINES = re.compile(
    r"graphcap \d|target    |train     |resume    |held_out  |plan      |drafter   |training  |"
    r"update +\d+ +held-out|decoding \d+|"
    r"\d+ held-out prompts|acceptance length|  (drafter|prompt lookup|walked)|tokens equal|  prompt \d+|seconds per token|"
    r"distinct 4-grams|what limits them|  τ:|  speed:|weights, ready|checkpoint to resume|decode with other settings"
)


def run_on_a_terminal(arguments: list[str]) -> tuple[str, str, int]:
    """stdout, what the terminal on stderr received, and the exit code."""
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    environment.pop("TRANSFORMERS_VERBOSITY", None)  # as a person has it
    process = subprocess.Popen(
        [sys.executable, "-m", "graphcap", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
    )
    os.close(slave)
    received = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        received += part
    shown = process.stdout.read()
    return shown, received.decode(), process.wait(timeout=60)


def test_only_graphcaps_own_lines_and_one_bar_are_seen_and_a_second_run_prints_the_table_again(tmp_path):
    arguments = ["train", "runs/tiny.toml", *SHORT, f"run.out={tmp_path}"]
    shown, terminal, code = run_on_a_terminal(arguments)
    assert code == 0, terminal
    strange = [line for line in shown.splitlines() if line and not OWN_LINES.match(line)]
    assert not strange, strange
    bars = [part for part in re.split(r"[\r\n]", terminal) if part.strip() and not part.startswith("\x1b")]
    assert bars and all(re.match(r" *\d+%\|", part) for part in bars), bars
    assert bars[-1].lstrip().startswith("100%") and "loss" in bars[-1]
    kept = [line.split(" ", 1)[1] for line in (tmp_path / "tiny" / "run.log").read_text(encoding="utf-8").splitlines()]
    assert kept == shown.splitlines()[1:]
    table = shown[shown.index("2 held-out prompts ·") :].split("\n\ndecode with")[0]

    again, terminal, code = run_on_a_terminal(arguments)
    assert code == 0 and not terminal
    assert table in again and "nothing is trained" in again and "to start afresh" in again
    assert "\ntraining  " not in again


def test_a_strange_line_would_be_seen():
    assert not OWN_LINES.match("Loading weights: 100%|███| 134/134")
    assert not OWN_LINES.match("UserWarning: something")


def test_after_three_resizes_and_a_restart_the_screen_holds_one_bar_and_no_leftover(tmp_path):
    import pyte

    settings = (*SHORT[6:], "optimizer.max_updates=30", "eval.every=100", "checkpoint.every=5", "progress.every=1")
    small = ("eval.documents=2", "eval.prompts=1", "eval.passes=1", "eval.max_new_tokens=4", "run.max_restarts=1")
    command = [sys.executable, "-m", "graphcap", "train", "runs/tiny.toml", *settings, *small, f"run.out={tmp_path}"]
    master, slave = pty.openpty()
    screen = pyte.HistoryScreen(120, 40, history=1000)
    stream = pyte.ByteStream(screen)
    resize(master, screen, 40, 120)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    sizes, killed = {6: (40, 100), 14: (40, 150), 20: (40, 90)}, False
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        stream.feed(part)
        flights = blackbox.flights(tmp_path / "tiny")
        update = flights[0].update if flights else 0
        for when in [when for when in sizes if update >= when]:
            resize(master, screen, *sizes.pop(when))
        if not killed and update >= 11 and flights[0].saved >= 5:
            killed = True
            os.kill(flights[0].pid, signal.SIGKILL)
    assert process.wait(timeout=60) == 0 and killed and not sizes
    past = ["".join(cell.data for _, cell in sorted(line.items())) for line in screen.history.top]
    lines = [line.rstrip() for line in [*past, *screen.display] if line.strip()]
    bars = [line for line in lines if "%|" in line]
    assert len(bars) == 1 and "100%|" in bars[0] and "30/30" in bars[0], "\n".join(lines)
    assert not [line for line in lines if line not in bars and re.search(r"updates/s|slots \d|\[\d\d:\d\d<", line)]
    assert sum(line.startswith("restart ") for line in lines) == 1 and any("SIGKILL" in line for line in lines)


def resize(terminal: int, screen, num_lines: int, num_columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", num_lines, num_columns, 0, 0))
    screen.resize(num_lines, num_columns)
