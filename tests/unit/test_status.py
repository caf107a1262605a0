"""`graphcap status`: its text for a running, a hanging, a finished, a stopped and a dead run, and what it concludes itself."""

import json
import os
import struct
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from graphcap import config
from graphcap.cli import main
from graphcap.errors import ConfigError
from graphcap.ops import blackbox, checkpoint, ending, faults, runfolder, status

COMMAND = "graphcap train runs/q27b.toml"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run's folder that has begun, with a checkpoint of update 1,200; its records in memory are taken away afterwards."""
    run = tmp_path / "q27b"
    (run / "rank-0").mkdir(parents=True)
    (run / "config.toml").write_text("")
    checkpoint.save(run / "checkpoints", 1200, tensors={}, documents={"state.json": {}}, score=None, keep=1)
    yield run
    for path in blackbox.memory_folder(run).glob("*"):
        path.unlink()
    if blackbox.memory_folder(run).exists():
        blackbox.memory_folder(run).rmdir()


def started(run: Path, *, alive: bool) -> None:
    identity = blackbox.identity() if alive else {**blackbox.identity(), "pid_start": 1}
    checkpoint.write_json(run / ending.START, {"version": 1, "command": COMMAND, **identity})


def recorder(run: Path, **at) -> blackbox.Recorder:
    """A record of this process in a replay of update 1,204."""
    record = blackbox.Recorder(blackbox.memory_folder(run), rank=0)
    record.device("GPU 6")
    record.saved(1200)
    record.finished(1203)
    record.note("fill", update=1204)
    record.note("replay", bucket="8192/1024")
    record.show({"total": 9000, "start": 0, "update": 1200, "loss": 1.5, "block_match": 4.25, "tokens_per_s": 206000.4})
    return record


def dead(run: Path, code: int | None, **more) -> list[str]:
    end = ending.of_exit(run, code=code, command=COMMAND, **more)
    checkpoint.write_json(run / ending.END, {**end, "when": "2026-11-30T12:00:00+00:00"})
    return status.status_of(run)["lines"]


def test_a_running_run_says_update_phase_and_each_rank(folder):
    started(folder, alive=True)
    recorder(folder)
    lines = status.status_of(folder)["lines"]
    assert lines[0] == "running · update 1,204 of 9,000 · replay"
    assert lines[1] == "  training   loss 1.500, block_match 4.25, 206,000 tokens/s"
    assert lines[2] == "  checkpoint update 1,200"
    assert lines[3].startswith("  rank 0     GPU 6, replay, bucket 8192/1024, begun 0.") and len(lines) == 4


def test_a_run_that_has_begun_nothing_for_long_is_said_to_hang(folder, monkeypatch):
    started(folder, alive=True)
    recorder(folder)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 312)
    found = status.status_of(folder)
    assert found["verdict"] == "hanging"
    assert found["lines"][0] == "running · update 1,204 of 9,000 · replay · rank 0 has begun nothing for 312 s"


def test_a_killed_rank_is_told_with_signal_update_bucket_phase_memory_and_how_to_go_on(folder):
    started(folder, alive=False)
    record = recorder(folder)
    record._host_share, record._host_bytes = 0.98, 5 * 2**30
    record.note("replay", bucket="8192/1024")
    (folder / "rank-0" / "stderr").write_text("a warning\n\nits last words\n")
    lines = dead(folder, -9)
    assert lines[0] == (
        "dead · rank 0 (GPU 6) · SIGKILL (host memory was nearly full: probably the kernel's out-of-memory killer) at update "
        f"1,204, bucket 8192/1024, replay · host memory 98% · nothing lost before 1,200 · continue: {COMMAND}"
    )
    assert lines[1] == "  ended      2026-11-30T12:00:00+00:00" and lines[-1] == "  stderr     its last words"
    assert len(lines) <= 12


def test_the_readme_shows_what_status_says(folder, monkeypatch):
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    started(folder, alive=True)
    record = recorder(folder)
    assert "\n".join(status.status_of(folder)["lines"][:3]) in text
    record._host_share = 0.41
    record._write_now(time.monotonic())
    (folder / "rank-0" / "stderr").write_text("its last words\n")
    assert "\n".join(dead(folder, -6)) in text
    record.note("finished")
    assert dead(folder, 0)[0] + "\n" in text
    (folder / ending.END).unlink()
    record.note("replay", bucket="8192/1024")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 312)
    assert status.status_of(folder)["lines"][0] + "\n" in text


def test_the_first_launch_that_the_gpu_has_not_finished_is_where_it_died(folder):
    record = recorder(folder)
    for number, update in ((1, 1205), (2, 1206), (3, 1207)):
        record.note("replay", update=update, bucket="4096/512", launch=number)
    record.memory[blackbox.GPU_AT : blackbox.GPU_AT + 8] = (1).to_bytes(8, "little")
    assert "CUDA error at update 1,206, bucket 4096/512, replay" in dead(folder, 1, reason="CUDA error")[0]
    record.memory[blackbox.GPU_AT : blackbox.GPU_AT + 8] = (3).to_bytes(8, "little")
    assert "at update 1,207" in dead(folder, 1, reason="x")[0]


def test_a_record_of_a_process_that_began_earlier_under_the_same_number_is_not_alive(folder):
    record = recorder(folder)
    assert blackbox.read(record.path).alive
    header = blackbox.HEADER.unpack_from(record.memory, 0)
    blackbox.HEADER.pack_into(record.memory, 0, *header[:4], header[4] - 1, header[5])
    assert not blackbox.read(record.path).alive


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (1, "ValueError: shapes differ", "dead · rank 0 (GPU 6) · ValueError: shapes differ at update 1,204"),
        (0, "", "it ended with exit code 0 before it had finished"),
        (-11, "", "SIGSEGV at update 1,204"),
        (3, "", "it ended with exit code 3 before it had finished"),
        (2, "checkpoint 'x': expected room", "dead · rank 0 (GPU 6) · checkpoint 'x': expected room at update 1,204"),
        (2, "", "exit code 2 at update 1,204"),
    ],
)
def test_each_way_to_end_has_its_words(folder, code, error, words):
    record = recorder(folder)
    if error:
        record.error(error)
    assert words in dead(folder, code)[0]


def test_a_stop_and_a_refusal_are_believed_where_the_record_agrees(folder):
    recorder(folder).note("stopped")
    assert dead(folder, 3)[0] == f"stopped · on request after update 1,203 · nothing lost before 1,200 · continue: {COMMAND}"
    blackbox.Recorder(blackbox.memory_folder(folder), rank=0).error("recipe key 'run.seed': expected a number")
    assert dead(folder, 2)[0].startswith("refused · recipe key 'run.seed': expected a number")


def test_a_deadline_is_told_from_an_exception_by_the_watchdogs_traceback(folder):
    recorder(folder)
    (folder / "rank-0" / faults.TRACEBACK).write_text("Timeout (0:05:00)!\nThread 0x1 (most recent call first):\n")
    assert "deadline: it began nothing for too long at update 1,204" in dead(folder, 1)[0]


def test_a_finished_run_is_one_line_and_its_time(folder):
    recorder(folder).note("finished")
    assert dead(folder, 0) == ["finished · 1,200 updates", "  ended      2026-11-30T12:00:00+00:00"]


def test_where_supervisor_and_rank_were_killed_status_concludes_it_and_writes_it_down(folder):
    code = f"""
import os, signal
from pathlib import Path
from tests.unit.test_status import started, recorder
started(Path({str(folder)!r}), alive=True)
recorder(Path({str(folder)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    lines = status.status_of(folder)["lines"]
    assert lines[0].startswith(
        "dead · rank 0 (GPU 6) · killed together with its supervisor: SIGKILL, a crash, a container's end, or power"
    )
    assert "at update 1,204, bucket 8192/1024, replay" in lines[0]
    end = ending.read(folder, ending.END)
    assert end["concluded"] and status.status_of(folder)["lines"] == lines
    assert not blackbox.memory_folder(folder).exists() and blackbox.read(folder / "rank-0" / blackbox.FILE) is not None


def test_a_process_of_the_same_number_that_started_later_is_not_the_one_that_died(folder):
    started(folder, alive=True)
    identity = ending.read(folder, ending.START)
    assert blackbox.lives(identity)
    assert not blackbox.lives({**identity, "pid_start": identity["pid_start"] + 1})
    assert not blackbox.lives({**identity, "boot": "00" * 16})


def test_values_of_variables_that_look_like_secrets_are_in_no_text(folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh12345678")
    recorder(folder).error("RuntimeError: cannot log in with hf_abcdefgh12345678")
    (folder / "rank-0" / "stderr").write_text("bad token hf_abcdefgh12345678\n")
    text = "\n".join(dead(folder, 1)) + (folder / ending.END).read_text()
    assert "hf_abcdefgh12345678" not in text and "cannot log in with ***" in text and "bad token ***" in text
    ending.hide_in(folder / "rank-0" / "stderr")
    assert (folder / "rank-0" / "stderr").read_text() == "bad token " + "*" * 19 + "\n"


def test_all_runs_under_a_folder_and_json(folder, capsys):
    recorder(folder)
    dead(folder, -6)
    other = folder.parent / "other"
    other.mkdir()
    (other / "config.toml").write_text("")
    assert main(["status", str(folder.parent)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 and "SIGABRT" in "".join(shown) and "unknown · no record" in "".join(shown)
    assert main(["status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["end"]["cause"] == "SIGABRT"
    with pytest.raises(ConfigError, match="no such folder"):
        status.run([str(folder / "nowhere")], as_json=False, say=print)


def test_a_record_that_is_cut_short_or_of_something_else_is_none(folder):
    record = recorder(folder)
    data = record.path.read_bytes()
    for wrong in (data[:-1], b"", b"x" * len(data), data[:8] + b"\x09" + data[9:]):
        record.path.write_bytes(wrong)
        assert blackbox.read(record.path) is None


def test_the_ring_holds_the_last_entries_in_order(folder):
    record = recorder(folder)
    for update in range(200):
        record.note("step", update=update, bucket=f"{update}/1")
    entries = blackbox.read(record.path).entries
    assert [entry.update for entry in entries] == list(range(200 - blackbox.RING, 200))


ASSERTED = """Opening GPU coredump: /runs/out/a/rank-0/gpu.core
[Current focus set to CUDA kernel 0, grid 30493, block (0,0,0), thread (0,0,0), device 0, sm 124, warp 3, lane 0]

Assertion failed.
#0  0x00007f9ff5d530f0 in void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<Opaque<4> > \
(at::TensorIteratorBase&, bool)::{lambda(int)#1}>(long, at::native::index_kernel_impl<4>)<<<(1,1,1),(128,1,1)>>> ()
  Kernel Parent Dev Grid Status     SMs Mask GridDim  BlockDim Invocation
*      0      -   0 30493 Active 0x001000000 (1,1,1) (128,1,1) at::native::index_elementwise_kernel<128, 4>()
"""


@pytest.mark.parametrize(
    ("text", "kernel"),
    [
        ("CUDA Exception: Warp Illegal Address\n#0  0x7f in triton_tem_fused_flex_attention_0<<<(8,1),(128)>>> ()", 1),
        (
            "  Kernel Dev Grid Status GridDim Invocation\n*      0   0  257 Active (1,1,1) (32,1,1) gather_kernel(long const*)",
            2,
        ),
        ("Opening GPU coredump: gpu.core\nNo symbols", 0),
        (ASSERTED, 3),
        (ASSERTED.replace("#0", "#1").replace("Assertion failed.", ""), 4),
    ],
)
def test_the_kernel_of_a_gpus_core_dump_is_read_from_what_cuda_gdb_prints(text, kernel):
    from graphcap.ops.gpucore import kernel_in

    words = ["", "kernel triton_tem_fused_flex_attention_0: Warp Illegal Address", "kernel gather_kernel"]
    words += ["kernel at::native::index_elementwise_kernel: Assertion failed", "kernel at::native::index_elementwise_kernel"]
    assert kernel_in(text) == words[kernel]


def test_no_reader_sees_a_record_half_written_as_one_silent_since_the_node_booted(folder):
    record, written = recorder(folder), []

    class Watched:
        """The record's memory, after every single write to it as a reader would find it."""

        def __init__(self, memory) -> None:
            self.memory = memory

        def __setitem__(self, place, data) -> None:
            self.memory[place] = data
            written.append(blackbox.read(record.path))

    record.memory = Watched(record.memory)
    record.note("step", update=7, bucket="512/80")
    record.finished(7)
    record.saved(7)
    assert len(written) == 4 and all(flight is not None and flight.silent_s < 60 for flight in written)
    assert all(flight.entries and flight.phase in ("replay", "step") for flight in written)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n", "SIGSEGV at update 1,204"),
        ("Timeout (0:05:00)!\nThread 0x1 (most recent call first):\n", "deadline: it began nothing for too long at update"),
        ("Thread 0x1 (most recent call first):\n  File x\n", "SIGTERM at update 1,204"),
        ("", "killed: SIGKILL, a crash, a container's end, or power at update 1,204"),
    ],
)
def test_a_process_without_a_supervisor_is_told_by_its_traceback(folder, text, words):
    code = f"""
import os, signal
from pathlib import Path
from tests.unit.test_status import recorder
from graphcap.ops import blackbox, checkpoint, ending
run = Path({str(folder)!r})
start = {{"version": 1, "command": "graphcap train x --here", "supervised": False, **blackbox.identity()}}
checkpoint.write_json(run / ending.START, start)
recorder(run)
(blackbox.memory_folder(run) / "rank-0.traceback.txt").write_text({text!r})
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert words in status.status_of(folder)["lines"][0]
    assert bool(text) == (status.status_of(folder)["end"]["traceback"] is not None)


def test_a_run_without_a_supervisor_on_another_node_is_left_alone(folder):
    checkpoint.write_json(
        folder / ending.START,
        {"version": 1, "command": COMMAND, "supervised": False, **blackbox.identity(), "boot": "00" * 16},
    )
    assert status.status_of(folder)["lines"][0].startswith("unknown · started on another node")
    assert not (folder / ending.END).exists()


def test_a_death_that_nobody_asked_about_is_in_the_log_of_the_next_start(tmp_path):
    recipe = config.load_recipe(Path(__file__).parents[2] / "runs/tiny.toml", [f"run.out={tmp_path}", "run.name=x"])
    code = f"""
import os, signal
from graphcap import config
from graphcap.ops import runfolder
from tests.unit.test_status import recorder
recipe = config.load_recipe("runs/tiny.toml", ["run.out={tmp_path}", "run.name=x"])
claim = runfolder.Claim(recipe, "graphcap train x")
(recipe.folder / "rank-0").mkdir()
recorder(recipe.folder)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}, cwd=root, timeout=60, check=False)
    claim = runfolder.Claim(recipe, "graphcap train x")
    claim.close()
    log = (recipe.folder / runfolder.LOG).read_text()
    assert "before    dead · rank 0 (GPU 6) · killed together with its supervisor" in log and "update 1,204" in log
    assert not blackbox.memory_folder(recipe.folder).exists()


def test_an_end_that_is_not_whole_counts_as_none(folder):
    started(folder, alive=False)
    whole = ending.of_exit(folder, code=-9, command=COMMAND)
    changed = ({"update": "x"}, {"checkpoint": "../x"}, {"memory": {"host_share": "a"}}, {"stderr": [3]}, {"rank": None})
    for damaged in ("{", "[]", '{"verdict": "finished"}', *(json.dumps(whole | change) for change in changed)):
        (folder / ending.END).write_text(damaged)
        assert ending.read(folder, ending.END) is None, damaged
        assert status.status_of(folder)["verdict"] == "dead"
        (folder / ending.END).unlink()
    (folder / ending.END).mkdir()
    assert status.status_of(folder)["verdict"] == "dead"


def test_a_run_whose_end_was_lost_after_it_finished_has_finished_and_ended_when_it_was_last_heard_of(folder):
    started(folder, alive=False)
    record = recorder(folder)
    record.note("finished")
    record._lay(blackbox.NOW_AT + 8 * 7, struct.pack("<d", time.monotonic() - 7200))  # its last beat
    record._lay(24, struct.pack("<Q", 1))  # a process that started at another time: it is gone
    lines = status.status_of(folder)["lines"]
    assert lines[0] == "finished · 1,200 updates"
    ended = datetime.fromisoformat(lines[1].split()[1])
    assert 7100 < (datetime.now(timezone.utc) - ended).total_seconds() < 7300


def test_a_running_run_that_was_started_again_says_how_often(folder):
    started(folder, alive=True)
    recorder(folder)
    document = ending.read(folder, ending.START)
    checkpoint.write_json(folder / ending.START, document | {"restarts": 2})
    assert status.status_of(folder)["lines"][0] == "running · update 1,204 of 9,000 · replay · restart 2"


def test_a_folder_that_is_away_for_a_moment_is_not_gone(tmp_path, monkeypatch):
    recipe = config.load_recipe(Path(__file__).parents[2] / "runs/tiny.toml", [f"run.out={tmp_path}", "run.name=x"])
    claim = runfolder.Claim(recipe, "graphcap train x")
    recipe.folder.rename(tmp_path / "away")
    claim.check()
    (tmp_path / "away").rename(recipe.folder)
    claim.check()
    recipe.folder.rename(tmp_path / "away")
    claim.check()
    monkeypatch.setattr(runfolder, "GONE_S", 0.0)
    with pytest.raises(config.ConfigError, match="the folder that this run began in"):
        claim.check()
    claim.close()
