"""What a person sees of a run: graphcap's own lines and one bar, nothing of the libraries'; the second run's table."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

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
    r"graphcap \d|target    |train     |held_out  |plan      |drafter   |training  |update +\d+ +held-out|decoding \d+|"
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
    table = shown[shown.index("2 held-out prompts ·") :].split("\n\ndecode with")[0]

    again, terminal, code = run_on_a_terminal(arguments)
    assert code == 0 and not terminal
    assert table in again and "nothing is trained" in again and "to start afresh" in again
    assert "\ntraining  " not in again


def test_a_strange_line_would_be_seen():
    assert not OWN_LINES.match("Loading weights: 100%|███| 134/134")
    assert not OWN_LINES.match("UserWarning: something")
