"""A save in the background writes what a blocking one would have, of the moment it began; its errors are told, once.

`gate` holds the thread at the door of checkpoint.save until a test opens it, so that the order of events is the test's
and nothing sleeps.
"""

import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch

from graphcap.errors import CheckpointError, GraphcapError
from graphcap.ops import checkpoint, saver
from graphcap.ops.saver import Saver

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.complex64)
DOCUMENTS = {"state.json": {"update": 7, "text": "ä", "list": [1, 2.5]}, "config.json": {}}


def random_files() -> dict[str, dict[str, torch.Tensor]]:
    """Every bit pattern of every dtype, views of a flat tensor, strided, overlapping, 0-d and empty ones, two files."""
    raw = {str(dtype): torch.randint(0, 256, (64,), dtype=torch.uint8).view(dtype) for dtype in DTYPES}
    flat = torch.randn(60)
    views = {"view": flat[4:24], "overlapping": flat[10:40], "strided": flat.view(6, 10).t(), "expanded": flat[:1].expand(5)}
    small = {"bool": torch.rand(7) > 0.5, "scalar": torch.randn(()), "empty": torch.empty(0, 3)}
    return {"model.safetensors": raw | small, "state.safetensors": views | {"parameter": torch.nn.Parameter(torch.randn(3))}}


def one(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model.safetensors": {"w_D": torch.full((50,), value)}}


def value_of(path: Path) -> float:
    """The value that every element of a checkpoint of `one` has."""
    w_D = checkpoint.load_tensors(path, "model.safetensors")["w_D"]
    assert (w_D == w_D[0]).all(), "torn"
    return w_D[0].item()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class Gate:
    """Stands in for checkpoint.save: waits until it is open, then fails as told or saves."""

    def __init__(self) -> None:
        self.save, self.failure = checkpoint.save, None
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args, **kwargs) -> Path:
        self.entered.set()
        assert self.opened.wait(60)
        if self.failure is not None:
            raise self.failure
        return self.save(*args, **kwargs)


@pytest.fixture
def gate(monkeypatch):
    made = Gate()
    monkeypatch.setattr(checkpoint, "save", made)
    yield made
    made.opened.set()


def ready(folder: Path, tensors: dict, **options) -> Saver:
    made = Saver(folder, keep=2, **options)
    made.reserve(tensors)
    return made


def begin(made: Saver, update: int, tensors: dict) -> None:
    made.begin(update, tensors=tensors, documents={"state.json": {"update": update}}, score=None)


def test_the_folder_has_the_bytes_that_a_blocking_save_writes(tmp_path):
    seen = []
    tensors = random_files()
    with ready(tmp_path / "thread", tensors, on_saved=seen.append) as made:
        for update, score in ((7, 1.5), (9, None)):
            made.begin(update, tensors=tensors, documents=DOCUMENTS, score=score)
            path = made.wait()
            assert path == tmp_path / "thread" / f"update-{update:08d}" and checkpoint.verify(path) == ""
            assert made.last_saved == update == seen[-1] and made.wait() == path
            checkpoint.save(tmp_path / "plain", update, tensors=tensors, documents=DOCUMENTS, score=score, keep=2)
            tensors["model.safetensors"][random.choice(["torch.float32", "torch.float64"])].normal_()
    assert seen == [7, 9]
    assert len(contents(tmp_path / "plain")) == 10 and contents(tmp_path / "plain") == contents(tmp_path / "thread")
    tensors["state.safetensors"]["view"][3] += 1  # must fail: one element more
    checkpoint.save(tmp_path / "plain", 9, tensors=tensors, documents=DOCUMENTS, score=None, keep=2)
    assert contents(tmp_path / "plain") != contents(tmp_path / "thread")


def test_host_copies_are_contiguous_aligned_and_share_no_storage(tmp_path):
    tensors = random_files()
    made = ready(tmp_path, tensors)
    copies = [copy for _, _, copy in saver._walk(made._host) if copy.numel()]
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == len(copies)
    assert all(copy.is_contiguous() and copy.data_ptr() % saver.ALIGNMENT_BYTES == 0 for copy in copies)
    for copy in copies:
        copy.fill_(1)  # poison
    begin(made, 1, tensors)
    path = made.wait()
    for file, named in tensors.items():
        loaded = checkpoint.load_tensors(path, file)
        for name, tensor in named.items():
            assert loaded[name].shape == tensor.shape
            raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (loaded[name], tensor)]
            assert torch.equal(*raw), name
    made.close()


@pytest.mark.parametrize("aliased", [False, True], ids=["", "must-fail"])
def test_what_changes_right_after_begin_is_not_in_the_file(tmp_path, gate, aliased):
    tensors, document = one(1.0), {"list": [1]}
    made = ready(tmp_path, tensors)
    if aliased:
        made._host = tensors
    made.begin(3, tensors=tensors, documents={"state.json": document}, score=None)
    tensors["model.safetensors"]["w_D"].fill_(2.0)
    document["list"].append(2)
    gate.opened.set()
    assert value_of(made.wait()) == (2.0 if aliased else 1.0)
    assert checkpoint.load_document(made.wait(), "state.json") == {"list": [1]}
    made.close()


def test_the_loop_goes_on_while_the_thread_writes(tmp_path, gate):
    tensors = one(0.0)
    made = ready(tmp_path, tensors)
    begin(made, 1, tensors)
    assert gate.entered.wait(60)
    for _ in range(100):
        tensors["model.safetensors"]["w_D"] += 1
        made.check()
    assert made.last_saved is None and not any(tmp_path.iterdir())
    gate.opened.set()
    assert value_of(made.wait()) == 0.0 and made.last_saved == 1
    made.close()


@pytest.mark.parametrize("waits", [True, False], ids=["", "must-fail"])
def test_a_second_begin_waits_for_the_first_save(tmp_path, gate, monkeypatch, waits):
    """The gate opens only from inside the second begin's wait; one that does not wait spoils the first one's copy."""
    tensors = one(1.0)
    made = ready(tmp_path, tensors)
    begin(made, 1, tensors)
    first = made._save.thread
    tensors["model.safetensors"]["w_D"].fill_(2.0)

    def wait():
        gate.opened.set()
        return Saver.wait(made)

    monkeypatch.setattr(made, "wait", wait if waits else lambda: None)
    begin(made, 2, tensors)
    assert waits <= (not first.is_alive())
    gate.opened.set()
    first.join()
    Saver.wait(made)
    assert value_of(tmp_path / "update-00000001") == (1.0 if waits else 2.0)
    assert value_of(tmp_path / "update-00000002") == 2.0
    monkeypatch.undo()
    made.close()


TELLING = {
    "check": Saver.check,
    "begin": lambda made: begin(made, 9, one(9.0)),
    "wait": Saver.wait,
    "close": Saver.close,
}


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), "disk", MemoryError(), SystemExit(5)], ids=repr)
@pytest.mark.parametrize("where", TELLING)
def test_a_failed_save_is_told_at_the_next_call_once_with_type_and_traceback(tmp_path, gate, failure, where):
    if failure == "disk":
        failure = CheckpointError("folder", "x", expected="room", got="none", fix="free space")
    seen = []
    tensors = one(1.0)
    made = ready(tmp_path, tensors, on_saved=seen.append)
    gate.failure = failure
    begin(made, 1, tensors)
    made.check()  # waits for nothing, and there is nothing to tell yet
    gate.opened.set()
    made._save.thread.join()
    with pytest.raises(type(failure)) as caught:
        TELLING[where](made)
    assert caught.value is failure
    assert "__call__" in [frame.name for frame in traceback.extract_tb(failure.__traceback__)], "the thread's frames"
    assert made.last_saved is None and seen == [] and not any(tmp_path.iterdir()), "and the begin that told began nothing"
    made.check()
    assert made.wait() is None
    if where != "close":
        gate.failure = None
        begin(made, 2, tensors)
        assert value_of(made.wait()) == 1.0 and made.last_saved == 2 and seen == [2]
    made.close()


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error_with_exit_code_2(tmp_path):
    tensors = one(1.0)
    made = ready(tmp_path / "checkpoints", tensors)
    begin(made, 1, tensors)
    path = made.wait()
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    (tmp_path / "checkpoints").touch()
    begin(made, 2, tensors)
    with pytest.raises(CheckpointError, match="older checkpoints are intact") as caught:
        made.wait()
    assert caught.value.exit_code == 2 and made.last_saved == 1
    made.close()
    assert checkpoint.verify(tmp_path / "moved" / path.name) == ""


def test_an_error_of_on_saved_is_told_too_and_the_checkpoint_stands(tmp_path):
    def broken(update: int) -> None:
        raise ValueError(f"cannot show {update}")

    tensors = one(1.0)
    made = ready(tmp_path, tensors, on_saved=broken)
    begin(made, 1, tensors)
    with pytest.raises(ValueError, match="cannot show 1"):
        made.wait()
    assert made.last_saved == 1 and checkpoint.newest(tmp_path)[0].name == "update-00000001"
    made.close()


def test_with_hides_neither_error(tmp_path, gate):
    gate.failure = CheckpointError("folder", "x", expected="room", got="none", fix="free space")
    tensors = one(1.0)
    gate.opened.set()
    with pytest.raises(KeyboardInterrupt) as caught, ready(tmp_path, tensors) as made:
        begin(made, 1, tensors)
        raise KeyboardInterrupt
    assert "expected room, got none" in caught.value.__notes__[0] and made._memory is None
    with pytest.raises(CheckpointError), ready(tmp_path, tensors) as made:
        begin(made, 1, tensors)
    assert made._memory is None
    made = ready(tmp_path, tensors)  # must fail: close in a finally puts its own error in the place of the other
    with pytest.raises(CheckpointError) as caught:
        try:
            begin(made, 1, tensors)
            raise KeyboardInterrupt
        finally:
            made.close()
    assert isinstance(caught.value.__context__, KeyboardInterrupt)


def test_close_completes_the_save_drops_the_memory_and_comes_twice(tmp_path, gate):
    tensors = one(1.0)
    made = ready(tmp_path, tensors)
    begin(made, 1, tensors)
    gate.opened.set()
    made.close()
    assert value_of(tmp_path / "update-00000001") == 1.0 and made._memory is None and made._host == {}
    made.close()
    assert made.wait().name == "update-00000001" and made.last_saved == 1
    with pytest.raises(AssertionError, match="reserved"):
        begin(made, 2, tensors)
    Saver(tmp_path, keep=1).close()


@pytest.mark.parametrize("name, tensor", [("v_D", torch.ones(50)), ("w_D", torch.ones(49)), ("w_D", torch.ones(50).int())])
def test_tensors_other_than_reserved_are_our_bug(tmp_path, name, tensor):
    with ready(tmp_path, one(1.0)) as made, pytest.raises(AssertionError, match="reserved"):
        begin(made, 1, {"model.safetensors": {name: tensor}})
    assert not any(tmp_path.iterdir())


def test_ctrl_c_ends_the_waiting_but_not_the_save_wherever_it_comes(tmp_path, gate):
    """The thread interrupts the main thread, which may still be in begin, or already in wait, and saves after that."""
    save, interrupted = gate.save, threading.Event()

    def interrupting(*args, **kwargs):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert interrupted.wait(60)
        return save(*args, **kwargs)

    gate.save = interrupting
    gate.opened.set()
    tensors = one(1.0)
    made = ready(tmp_path, tensors)
    for update in range(1, 21):
        interrupted.clear()
        with pytest.raises(KeyboardInterrupt):
            begin(made, update, tensors)
            made.wait()
        assert made.last_saved == (update - 1 or None)
        interrupted.set()
        assert made.wait().name == f"update-{update:08d}" and made.last_saved == update
    made.close()


def test_ctrl_c_in_close_keeps_what_the_thread_reads_until_closed_again(tmp_path, gate, monkeypatch):
    tensors = one(1.0)
    made = ready(tmp_path, tensors)
    begin(made, 1, tensors)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(made, "wait", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        made.close()
    assert made._memory is not None
    gate.opened.set()
    made.close()
    assert value_of(tmp_path / "update-00000001") == 1.0 and made._memory is None


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def test_a_thread_that_does_not_start_leaves_the_saver_as_it_was(tmp_path, monkeypatch, error):
    tensors = one(1.0)
    made = ready(tmp_path, tensors)
    late = []

    def start(thread):
        late.append(thread)
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(threading.Thread, "start", start)
        begin(made, 1, tensors)
    late[0].start()  # it was started after all, as Ctrl-C gave it up
    late[0].join()
    assert made.wait() is None and not any(tmp_path.iterdir())
    begin(made, 2, tensors)
    assert value_of(made.wait()) == 1.0
    made.close()


AT_EXIT = """
import sys, threading
from pathlib import Path
import torch
from graphcap.ops import checkpoint, saver
save = checkpoint.save
def late(*args, **kwargs):
    threading.main_thread().join()
    return save(*args, **kwargs)
checkpoint.save = late
tensors = {"model.safetensors": {"w_D": torch.full((50,), 4.0)}}
made = saver.Saver(Path(sys.argv[1]), keep=1)
made.reserve(tensors)
if sys.argv[2] == "daemon":
    start = threading.Thread.start
    def as_daemon(thread):
        thread.daemon = True
        start(thread)
    threading.Thread.start = as_daemon
made.begin(5, tensors=tensors, documents={}, score=None)
if sys.argv[2] == "raise":
    raise KeyError("the loop died")
"""


@pytest.mark.parametrize("how, code, saved", [("return", 0, True), ("raise", 1, True), ("daemon", 0, False)])
def test_a_process_that_ends_completes_the_save_under_way(tmp_path, how, code, saved):
    """The save begins only after the main thread has ended. Must fail: a daemon dies with the main thread."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path), how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and ("the loop died" in done.stderr) == (how == "raise"), done.stderr
    newest = checkpoint.newest(tmp_path)[0]
    assert (newest is not None and value_of(newest) == 4.0) if saved else newest is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_save_under_way_and_does_not_hang(tmp_path, gate):
    tensors = one(1.0)
    made = ready(tmp_path, tensors)
    begin(made, 1, tensors)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            made.check()
            code = 0 if made.wait() is None and made.last_saved is None else 2
            made.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.opened.set()
    assert value_of(made.wait()) == 1.0
    made.close()


def test_a_copy_that_never_arrives_ends_in_an_error_and_the_memory_stays(tmp_path, monkeypatch):
    tensors = one(1.0)
    made = ready(tmp_path, tensors)
    monkeypatch.setattr(made, "_copy", lambda tensors: made._arrivals.append("never"))
    monkeypatch.setattr(saver, "_arrived", lambda event: event != "never")
    monkeypatch.setattr(saver, "COPY_LIMIT_S", 0.0)
    begin(made, 1, tensors)
    with pytest.raises(GraphcapError, match="copy of the state 'update 1': expected its arrival.*the device hangs") as caught:
        made.close()
    assert caught.value.exit_code == 1 and made._memory is not None and not any(tmp_path.iterdir())
    made._arrivals = ["here"]
    made.close()
    assert made._memory is None


def test_after_the_main_thread_the_limit_is_the_short_one(monkeypatch):
    ended = threading.Thread(target=int)
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    monkeypatch.setattr(saver, "EXIT_LIMIT_S", 0.0)
    monkeypatch.setattr(saver, "_arrived", lambda event: False)
    with pytest.raises(GraphcapError):
        saver._await([None], 1)
    saver._await([], 1)


def system(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:  4000000 kB\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def group(place: str, limit: str, used: int, cached: int, *, version: int) -> dict[str, str]:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    stat = f"anon 5\n{prefix}inactive_file {cached - 3}\n{prefix}active_file 3\n"
    files = {names[0]: f"{limit}\n", names[1]: f"{used}\n", "memory.stat": stat}
    return {f"sys/fs/cgroup/{place}{name}": text for name, text in files.items()}


@pytest.mark.parametrize(
    "files, expected",
    [
        pytest.param({}, 4_096_000_000, id="no control groups"),
        pytest.param(group("", "3000", 2000, 500, version=2), 1500, id="container, version 2"),
        pytest.param(group("memory/", "3000", 2000, 500, version=1), 1500, id="container, version 1"),
        pytest.param(group("", "max", 2000, 500, version=2), 4_096_000_000, id="no limit"),
        pytest.param(
            {"proc/self/cgroup": "0::/job/step\n"}
            | group("job/", "9000", 1000, 3, version=2)
            | group("job/step/", "max", 0, 3, version=2),
            8003,
            id="the job above the step",
        ),
        pytest.param(
            {"proc/self/cgroup": "3:cpu,cpuacct:/x\n2:memory:/job\n1:name=systemd:/y\n"}
            | group("memory/", str(2**63 - 4096), 0, 3, version=1)
            | group("memory/job/", "7000", 8000, 3, version=1),
            0,
            id="a job of version 1, over its limit",
        ),
    ],
)
def test_memory_left_is_the_machines_or_the_containers(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(saver, "SYSTEM", system(tmp_path, files))
    assert saver._available_bytes() == expected


def test_too_little_memory_is_refused_with_both_sizes_before_anything_is_allocated(tmp_path, monkeypatch):
    tensors = {"a.safetensors": {"w": torch.ones(300)}, "b.safetensors": {"w": torch.ones(10)}}
    needed = 1280 + 128 + 1200  # both at multiples of 128, and the larger file once more
    made = Saver(tmp_path / "c", keep=1)
    monkeypatch.setattr(saver, "SYSTEM", system(tmp_path, group("", str(needed - 1), 3, 3, version=2)))
    with pytest.raises(CheckpointError, match="expected 2,608 bytes free, got 2,607 bytes; .*Fix: ") as caught:
        made.reserve(tensors)
    assert caught.value.exit_code == 2 and made._memory is None
    monkeypatch.setattr(saver, "SYSTEM", system(tmp_path, group("", str(needed), 3, 3, version=2)))
    made.reserve(tensors)
    made.close()


def test_memory_that_the_system_refuses_is_a_checkpoint_error(tmp_path, monkeypatch):
    huge = {"a.safetensors": {"w": torch.empty(1, dtype=torch.uint8).expand(1 << 60)}}
    monkeypatch.setattr(saver, "_available_bytes", lambda: 1 << 62)
    with pytest.raises(CheckpointError, match="host memory 'copies of the state': .*Cannot allocate memory"):
        Saver(tmp_path, keep=1).reserve(huge)


def test_the_memory_is_private_to_the_process(tmp_path):
    """Shared anonymous memory would count against /dev/shm, and a forked child could write into a save."""
    made = ready(tmp_path, one(1.0))
    assert isinstance(made._memory, mmap.mmap)
    pid = os.fork()
    if pid == 0:
        made._host["model.safetensors"]["w_D"].fill_(5.0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (made._host["model.safetensors"]["w_D"] == 0).all()
    made.close()
