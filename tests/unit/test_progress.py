"""metrics.jsonl stays a file of whole records, and people see one bar, whole lines, and no noise of libraries."""

import errno
import fcntl
import io
import json
import os
import random
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from graphcap.errors import CheckpointError, DataError
from graphcap.ops import progress
from graphcap.ops.progress import FIELDS, MetricsLog, Progress, read_metrics, without_clock

ROOT = Path(__file__).resolve().parents[2]


def train_record(update: int) -> dict:
    return {
        "kind": "train",
        "update": update,
        "epoch": 0,
        "loss": random.random(),
        "block_match": 1.5,
        "match_share": [random.random() for _ in range(3)],
        "learning_rate": 6e-4,
        "grad_norm": 1.0,
        "anchors": 8,
        "tokens": 100,
        "supervised_tokens": 60,
        "rows": 1,
        "bucket": "512/80",
        "skipped": 0,
        "empty": 0,
        "time_s": 0.5,
        "tokens_per_s": 12345.6,
    }


def eval_record(update: int) -> dict:
    return {
        "kind": "eval",
        "update": update,
        "loss": 2.0,
        "block_match": 1.2,
        "walked_estimate": 1.4,
        "documents": 8,
        "eval_s": 0.1,
    }


def written(path: Path, updates: int) -> list[dict]:
    """A file of train records with an eval record every third update."""
    with MetricsLog(path) as log:
        for update in range(1, updates + 1):
            log.append(train_record(update))
            if update % 3 == 0:
                log.append(eval_record(update))
    return read_metrics(path)


def test_the_records_of_both_kinds_name_every_field_of_the_table_and_come_back_equal(tmp_path):
    assert train_record(1).keys() == progress.FIELDS_OF["train"] and eval_record(1).keys() == progress.FIELDS_OF["eval"]
    assert len({field.name for field in FIELDS}) == len(FIELDS) and all(field.since and field.line for field in FIELDS)
    records = [train_record(1), eval_record(1), {"kind": "train", "update": 2}]
    with MetricsLog(tmp_path / "run" / "metrics.jsonl") as log:
        for record in records:
            log.append(record)
            assert read_metrics(log.path)[-1] == record, "a record can be read as soon as append returns"
    assert read_metrics(log.path) == records
    log.close()


def test_without_clock_leaves_out_what_two_identical_runs_may_differ_in():
    assert train_record(1).keys() - without_clock(train_record(1)).keys() == {"time_s", "tokens_per_s"}
    assert eval_record(1).keys() - without_clock(eval_record(1)).keys() == {"eval_s"}


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "train", "update": 1, "lost": 2.0},
        {"kind": "eval", "update": 1, "grad_norm": 2.0},
        {"kind": "tests", "update": 1},
        {"update": 1},
        {"kind": "train"},
        {"kind": "train", "update": 1.0},
    ],
)
def test_a_record_outside_the_table_is_our_bug_and_is_not_written(tmp_path, record):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        with pytest.raises(AssertionError):
            log.append(record)
    assert log.path.read_bytes() == b""


def test_a_loss_that_is_not_finite_is_written_as_null_so_that_the_file_stays_json(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"kind": "train", "update": 1, "loss": float("nan"), "match_share": [0.5, float("inf")]})
    line = log.path.read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {
        "kind": "train",
        "update": 1,
        "loss": None,
        "match_share": [0.5, None],
    }


def test_cut_leaves_whole_records_up_to_the_update_wherever_a_kill_truncated_the_file(tmp_path):
    records = written(tmp_path / "whole.jsonl", 30)
    data = (tmp_path / "whole.jsonl").read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    for _ in range(200):
        size, update = random.randrange(len(data) + 1), random.randrange(32)
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(data[:size])
        with MetricsLog(path) as log:
            log.cut(update)
            expected = [record for record, end in zip(records, ends) if end <= size and record["update"] <= update]
            assert read_metrics(path) == expected, (size, update)
            log.append(train_record(update + 1))
        assert [record["update"] for record in read_metrics(path)] == [r["update"] for r in expected] + [update + 1]


def test_must_fail_without_the_cut_at_opening_a_record_is_glued_to_half_a_line(tmp_path):
    data = (json.dumps(train_record(1)) + "\n").encode()
    (tmp_path / "m.jsonl").write_bytes(data + data[:40])
    with open(tmp_path / "m.jsonl", "ab") as file:
        file.write(data)
    with pytest.raises(DataError, match=r"m.jsonl:2'.*Fix: "):
        read_metrics(tmp_path / "m.jsonl")
    (tmp_path / "m.jsonl").write_bytes(data + data[:40])
    assert len(read_metrics(tmp_path / "m.jsonl")) == 1, "half a last line is a run at work"
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.append(train_record(2))
    assert [record["update"] for record in read_metrics(tmp_path / "m.jsonl")] == [1, 2]


class Disk:
    """A file on a disk that is full now and then: it takes some bytes, or none and says so."""

    def __init__(self, file) -> None:
        self.file, self.full = file, False

    def write(self, data) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(bytes(data[: random.randint(1, len(data))]))

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def test_what_a_full_disk_refuses_waits_and_is_written_once_and_in_order_when_there_is_room(tmp_path):
    log, records = MetricsLog(tmp_path / "metrics.jsonl"), []
    log._file = disk = Disk(log._file)
    for update in range(1, 200):
        disk.full = random.random() < 0.7
        records.append(train_record(update))
        log.append(records[-1])
        assert bool(log.refusal) == disk.full
        if not disk.full:
            assert read_metrics(log.path) == records
        elif update % 9 == 0:
            with pytest.raises(CheckpointError, match=r"metrics '.*metrics.jsonl': .*No space left.*Fix: "):
                log.sync()
    disk.full = False
    log.sync()
    assert read_metrics(log.path) == records and not log.refusal
    disk.full = True
    log.append(train_record(200))
    with pytest.raises(CheckpointError, match="No space left"):
        log.close()
    assert log._file.closed


@pytest.mark.parametrize(
    "tail",
    [
        b"\0" * 300,
        b"\0" * 300 + b"\n",
        b"\xff\xfe\n",
        b"12\n",
        b"a\rb\x0bc\n",
        b'{"kind": "train"}\n',
    ],
)
def test_cut_removes_a_tail_that_is_no_record(tmp_path, tail):
    records = written(tmp_path / "m.jsonl", 9)
    with open(tmp_path / "m.jsonl", "ab") as file:
        file.write(tail)
    inode = (tmp_path / "m.jsonl").stat().st_ino
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.cut(9)
    assert read_metrics(log.path) == records and log.path.stat().st_ino == inode


def test_cut_keeps_records_that_stand_behind_removed_ones_and_goes_on_in_the_same_file(tmp_path):
    lines = [json.dumps(record).encode() + b"\n" for record in map(train_record, (1, 2, 5, 3, 6))]
    (tmp_path / "m.jsonl").write_bytes(b"".join(lines[:2]) + b"\0\0\n" + b"".join(lines[2:]))
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.cut(4)
        log.append(train_record(4))
    assert [record["update"] for record in read_metrics(log.path)] == [1, 2, 3, 4]


# The screen.


def screen(data: bytes) -> list[str]:
    """What a terminal shows after these bytes: carriage return, line feed, cursor up, erase to the end of the line."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", data.decode()):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\x1b[A":
            row -= 1
        elif part == "\x1b[K":
            lines[row] = lines[row][:column]
        else:
            assert not part.startswith("\x1b"), f"an escape that this screen does not know: {part!r}"
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def on_a_terminal(body: str, *, rows: int = 40, columns: int = 120) -> list[str]:
    """The last screen of a program that runs `body` with `Progress` imported, its output and errors on one terminal."""
    main, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    source = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom graphcap.ops.progress import Progress\n" + body
    with subprocess.Popen([sys.executable, "-c", source], stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        data = b""
        try:
            while select.select([main], [], [], 60)[0]:
                data += os.read(main, 65536)
            process.kill()
        except OSError:  # Linux's way to say that the last writer closed the terminal
            pass
        os.close(main)
    return screen(data)


RECORD = '{"kind": "train", "update": update, "loss": 2.0 + update, "block_match": 1.5, "tokens_per_s": 45000.0}'
LOOP = f"""
import time
with Progress(60, start=20) as shown:
    for update in range(21, 61):
        shown.update({RECORD})
        if update % 10 == 0:
            shown.say(f"update {{update}}: held-out loss 1.234\\nand a second line")
            shown.update({{"kind": "eval", "update": update, "loss": 1.0}})
        time.sleep(0.005)
"""


def test_a_terminal_shows_one_bar_and_above_it_the_lines_said_whole():
    lines = on_a_terminal(LOOP + "print('after')")
    said = [line for n in (30, 40, 50, 60) for line in (f"update {n}: held-out loss 1.234", "and a second line")]
    assert lines[:8] == said and lines[9:] == ["after", ""], lines
    assert re.match(r"100%\|.*\| 60/60 \[.* updates/s, loss 62\.000, block_match 1\.50, 45,000 tokens/s\]$", lines[8])


def test_must_fail_a_line_printed_past_the_bar_garbles_the_screen():
    lines = on_a_terminal(LOOP.replace("shown.say(", "print("))
    said = [line for n in (30, 40, 50, 60) for line in (f"update {n}: held-out loss 1.234", "and a second line")]
    assert lines[:8] != said


def test_an_exception_ends_the_bar_and_its_traceback_starts_on_a_line_of_its_own():
    lines = on_a_terminal("with Progress(60, start=0) as shown:\n    shown.say('said')\n    raise RuntimeError('gone')")
    assert lines[0] == "said" and lines[1].startswith("  0%|") and lines[2] == "Traceback (most recent call last):"
    assert lines[-2:] == ["RuntimeError: gone", ""]


def test_the_bar_stands_again_as_soon_as_a_line_was_said():
    lines = on_a_terminal("import os\nshown = Progress(60, start=0)\nshown.say('said')\nos._exit(0)")
    assert lines[0] == "said" and lines[1].startswith("  0%|") and len(lines) == 2


def test_drawing_starts_no_thread():
    body = "import threading\nwith Progress(60, start=0) as shown:\n    shown.say(str(threading.active_count()))"
    assert on_a_terminal(body)[0] == "1"


@pytest.mark.parametrize("rows, columns", [(40, 0), (0, 0), (0, 80), (24, 20)])
def test_a_terminal_of_no_size_or_a_narrow_one_shows_a_bar_too(rows, columns):
    assert on_a_terminal("Progress(60, start=0).close()", rows=rows, columns=columns)[0].startswith("  0%")


def test_a_terminal_that_goes_away_does_not_end_the_run(tmp_path):
    body = LOOP.replace("for update", "sys.stdin.readline()\n    for update", 1)
    source = f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom graphcap.ops.progress import Progress\n" + body
    source += f"open({str(tmp_path / 'ended')!r}, 'w').close()\nos._exit(7)"
    main, terminal = os.openpty()
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        assert select.select([main], [], [], 60)[0] and os.read(main, 10), "the bar is there"
        os.close(main)
        process.communicate(b"\n", timeout=30)
    assert process.returncode == 7 and (tmp_path / "ended").exists()


def test_without_a_terminal_there_is_a_line_now_and_then_and_one_at_the_end(capsys, monkeypatch):
    stream = io.StringIO()
    with Progress(1000, start=0, stream=stream) as shown:
        for update in range(1, 1001):
            shown.update(train_record(update) | {"loss": 2.5, "match_share": [0.5, None, 0.066]})
        shown.say("a line said")
    assert stream.getvalue().splitlines() == [
        f"update {n}/1000, loss 2.500, block_match 1.50, 12,346 tokens/s, bucket 512/80, slots 50 7 %" for n in (1, 1000)
    ]
    assert capsys.readouterr().out == "a line said\n"
    shown.close()
    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    stream = io.StringIO()
    with Progress(5, start=2, stream=stream) as shown:
        for update in (3, 4, 5):
            shown.update({"kind": "train", "update": update, "loss": None})
    assert stream.getvalue().splitlines() == [f"update {n}/5" for n in (3, 4, 5)]


def test_a_closed_stream_does_not_end_the_run():
    stream = io.StringIO()
    shown = Progress(5, start=0, stream=stream)
    stream.close()
    shown.update(train_record(1))
    shown.close()


# The libraries.

NOISE = """
import logging, os, sys, warnings
sys.path.insert(0, {root!r})
from graphcap.ops.progress import quiet_libraries, silence_transformers
for _ in range(2):
    quiet_libraries({path!r})
assert not os.path.exists({path!r})
{imports}
warnings.warn("a warning of Python")
for name in ("transformers.modeling", "torch._inductor", "huggingface_hub.download"):
    logging.getLogger(name).warning("a warning of " + name)
from tqdm import tqdm
"""
EXPECTED = ["Python", "transformers.modeling", "torch._inductor", "huggingface_hub.download"]


def noise(path: Path, imports: str, ending: str = "") -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    source = NOISE.format(root=str(ROOT), path=str(path), imports=imports) + ending
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment, timeout=100)


def test_warnings_and_logs_of_libraries_go_once_to_the_file_and_not_to_the_terminal(tmp_path):
    ending = "print(os.environ['TRANSFORMERS_VERBOSITY'], os.environ['HF_HUB_DISABLE_TELEMETRY'])"
    ran = noise(tmp_path / "run.log", "", ending)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "error 1\n", "")
    log = (tmp_path / "run.log").read_text()
    assert [log.count(f"a warning of {name}\n") for name in EXPECTED] == [1, 1, 1, 1]


def test_the_real_libraries_are_quiet_too_once_imported(tmp_path):
    imports = "import torch, transformers.modeling_utils\nquiet_libraries({path!r})\nsilence_transformers()\n".format(
        path=str(tmp_path / "run.log")
    )
    ending = "from transformers.utils import logging as t\nfor _ in t.tqdm(range(3), desc='Loading weights'): pass\n"
    ran = noise(tmp_path / "run.log", imports, ending)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    log = (tmp_path / "run.log").read_text()
    assert [log.count(f"a warning of {name}\n") for name in EXPECTED] == [1, 1, 1, 1]


def test_another_log_file_replaces_the_first(tmp_path):
    second = str(tmp_path / "second.log")
    ran = noise(tmp_path / "run.log", f"quiet_libraries({second!r})")
    assert (ran.returncode, ran.stderr) == (0, "") and not (tmp_path / "run.log").exists()
    assert (tmp_path / "second.log").read_text().count("a warning of") == 4
