"""Every row of the fault drill once, on a CPU; and a drill that notices what it is there to notice."""

import json
import subprocess
import sys
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGTERM

import pytest

from graphcap.ops import blackbox

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def drill():
    """tools/fault_drill.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        import fault_drill

        yield fault_drill


@pytest.fixture(scope="module")
def undisturbed(drill, tmp_path_factory) -> Path:
    """The row of a run in which nothing happens."""
    row = drill.drill(drill.NOTHING, "step", tmp_path_factory.mktemp("drill") / "nothing", None)
    assert row.problems == []
    return row.folder


def rows() -> list:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        from faults import FAULTS
    return [pytest.param(fault, phase, id=f"{fault.name}, {phase}") for fault in FAULTS for phase in fault.phases]


@pytest.mark.parametrize("fault, phase", rows())
def test_a_run_ends_as_it_has_to_after(drill, request, tmp_path, fault, phase):
    if fault.needs_gpu and (missing := drill.no_gpu()):
        pytest.skip(missing)
    undisturbed = request.getfixturevalue("undisturbed") if fault.undone else None
    row = drill.drill(fault, phase, tmp_path / "row", undisturbed)
    assert row.problems == [], f"{row.problems}\n{row.headline}\n{row.text('terminal')}"


def test_must_fail_a_recorder_that_records_nothing_turns_the_drill_red(drill, tmp_path):
    command = [sys.executable, drill.__file__, "--only", "SIGHUP", "--blind", "--out", str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, env=drill.with_path(), timeout=240)
    assert ran.returncode == 1, ran.stderr
    (row,) = json.loads((tmp_path / "out" / "drill.json").read_text())
    assert "phase None, but it was step" in row["problems"] and "update None, but it was 3" in row["problems"]
    assert ran.stdout.splitlines()[-1].startswith("1 rows, 1 not as they have to be")
    assert "SIGHUP" in (tmp_path / "out" / "drill.txt").read_text()


def test_must_fail_what_a_run_leaves_behind_is_found(drill, tmp_path):
    row = drill.Row(drill.NOTHING, "step", tmp_path)
    memory = blackbox.memory_folder(row.run)
    (row.run / "rank-0").mkdir(parents=True)
    (row.run / "rank-0" / blackbox.FILE).write_bytes(b"\0" * 100)
    (row.run / "run.log").write_text("token 0123456789")
    memory.mkdir()
    found = list(drill.of_what_is_left(row, {"saved": 2}, ["0123456789"]))
    assert found == [
        "records left in shared memory",
        "flight.bin is damaged",
        f"a secret is in {drill.RUN}/run.log",
        "the checkpoint of update 2 is not complete",
    ]
    assert not memory.exists(), "the drill itself leaves nothing"

    program = "import os, sys; os.write(1, b'.'); sys.stdin.read()"
    left = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert left.stdout.read(1) == b"."
    assert drill.wait_for_end(row, None, 0.0) == [left.pid]
    assert left.wait(timeout=30) == -9 and drill.processes_of(row, left.pid) == []


def test_every_fault_of_the_matrix_has_a_row_and_a_name_of_its_own(drill):
    names = [fault.name for fault in drill.FAULTS]
    assert len(set(names)) == len(names)
    matrix = {number.name for number in (SIGKILL, SIGSEGV, SIGABRT, SIGBUS, SIGTERM, SIGINT, SIGHUP)}
    matrix |= {"supervisor killed", "exception", "exit code 0", "stack overflow", "out of memory", "GPU memory before"}
    matrix |= {"GPU memory in capture", "device assert", "illegal access", "endless kernel", "deadlock", "damaged line"}
    matrix |= {"disk full", "folder removed", "nan once", "nan for ever", "caches unwritable", "caches cut short"}
    matrix |= {"caches of another", "second run", "terminal closed", "clock set back"}
    assert matrix <= set(names)
    assert {phase for fault, phase in drill.rows_of(["SIGKILL"], full=False)} == {"load data", "step", "save", "eval", "decode"}
    assert len(drill.rows_of([], full=True)) > len(drill.rows_of([], full=False)) + 40
