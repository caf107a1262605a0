"""On a GPU a save holds the state as it is between two replays, and the training thread does not wait for it."""

import threading
import time

import pytest
import torch

from graphcap.ops import checkpoint
from graphcap.ops.saver import Saver

pytestmark = pytest.mark.cuda
MIB = 1 << 20
LONG_CYCLES = 400_000_000  # of the spinning kernel: a few tenths of a second


class Counting:
    """A step whose replay adds one to every element of the state; on a stream of its own, as in training."""

    def __init__(self, num_bytes: int) -> None:
        flat = torch.zeros(num_bytes // 4, device="cuda")
        weights = flat.view(-1)[: 3 * 256].to(torch.bfloat16)
        self.flat, self.weights, self.counter = flat, weights, torch.zeros((), dtype=torch.int64, device="cuda")
        self.stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for tensor in (flat, weights, self.counter):
                tensor.add_(1)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        views = {f"w{place}_D": self.weights[256 * place : 256 * (place + 1)] for place in range(3)}
        return {
            "model.safetensors": views | {"transposed": self.weights.view(3, 256).t()},
            "state.safetensors": {"flat": self.flat, "counter": self.counter},
        }

    def replay(self, times: int) -> None:
        for _ in range(times):
            self.graph.replay()


def values_of(path) -> set[float]:
    """Every value in a checkpoint; one alone where nothing is torn."""
    loaded = [checkpoint.load_tensors(path, name) for name in ("model.safetensors", "state.safetensors")]
    return {value.item() for named in loaded for tensor in named.values() for value in tensor.unique()}


@pytest.fixture
def training():
    """A step of 256 MiB with its stream as the current one."""
    step = Counting(256 * MIB)
    with torch.cuda.stream(step.stream):
        yield step
    torch.cuda.synchronize()


def test_a_save_is_of_the_replays_before_begin_though_replays_go_on(training, tmp_path):
    with Saver(tmp_path, keep=9) as saver:
        saver.reserve(training.tensors())
        done = 0
        for update in (1, 2, 3):
            torch.cuda._sleep(LONG_CYCLES)  # the copies are queued, but cannot be made yet
            training.replay(5)
            done += 5
            saver.begin(update, tensors=training.tensors(), documents={}, score=None)
            training.replay(20)
            assert values_of(saver.wait()) == {float(done)}
            done += 20
    torch.cuda.synchronize()
    assert training.counter.item() == done and training.flat.unique().tolist() == [done]


def test_must_fail_a_copy_on_another_stream_is_of_another_moment(training, tmp_path):
    with Saver(tmp_path, keep=9) as saver:
        saver.reserve(training.tensors())
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_CYCLES)
        training.replay(5)
        with torch.cuda.stream(torch.cuda.Stream()):
            saver.begin(1, tensors=training.tensors(), documents={}, score=None)
        training.replay(20)
        assert values_of(saver.wait()) != {5.0}


def test_begin_returns_before_the_copy_was_made_and_a_save_that_blocks_does_not(training, tmp_path):
    """One process, the same state: the host's time in begin and in checkpoint.save."""
    tensors = training.tensors()
    times_s = {"begin": [], "blocking": []}
    with Saver(tmp_path / "thread", keep=1) as saver:
        saver.reserve(tensors)
        for update in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            saver.begin(update, tensors=tensors, documents={}, score=None)
            times_s["begin"].append(time.perf_counter() - start)
            saver.wait()
            start = time.perf_counter()
            checkpoint.save(tmp_path / "plain", update, tensors=tensors, documents={}, score=None, keep=1)
            times_s["blocking"].append(time.perf_counter() - start)
    assert min(times_s["begin"]) * 10 < min(times_s["blocking"]), times_s


def test_replays_are_launched_while_the_thread_writes(training, tmp_path, monkeypatch):
    entered, opened, save = threading.Event(), threading.Event(), checkpoint.save

    def gate(*args, **kwargs):
        entered.set()
        assert opened.wait(60)
        return save(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "save", gate)
    with Saver(tmp_path, keep=1) as saver:
        saver.reserve(training.tensors())
        training.replay(1)
        saver.begin(1, tensors=training.tensors(), documents={}, score=None)
        assert entered.wait(60)
        training.replay(30)
        torch.cuda.synchronize()
        assert training.counter.item() == 31 and saver.last_saved is None
        assert torch.cuda.current_stream() == training.stream
        opened.set()
        assert values_of(saver.wait()) == {1.0} and saver.last_saved == 1


def test_memory_is_pinned_once_and_given_back(training, tmp_path):
    allocated = torch.cuda.memory_allocated()
    for _ in range(3):  # memory that stayed pinned could not be pinned again at the same address
        saver = Saver(tmp_path, keep=1)
        saver.reserve(training.tensors())
        copies = saver._host["state.safetensors"] | saver._host["model.safetensors"]
        assert all(copy.is_pinned() for copy in copies.values())
        places = {name: copy.data_ptr() for name, copy in copies.items()}
        for update in (1, 2):
            saver.begin(update, tensors=training.tensors(), documents={}, score=None)
            saver.wait()
        copies = saver._host["state.safetensors"] | saver._host["model.safetensors"]
        assert places == {name: copy.data_ptr() for name, copy in copies.items()}
        saver.close()
        del copies
        assert saver._memory is None and not saver._pinned
    assert torch.cuda.memory_allocated() == allocated


def test_the_folder_has_the_bytes_of_a_blocking_save(training, tmp_path):
    training.replay(7)
    with Saver(tmp_path / "thread", keep=1) as saver:
        saver.reserve(training.tensors())
        saver.begin(4, tensors=training.tensors(), documents={"state.json": {"update": 4}}, score=0.5)
    checkpoint.save(
        tmp_path / "plain", 4, tensors=training.tensors(), documents={"state.json": {"update": 4}}, score=0.5, keep=1
    )
    thread, plain = ({file.name: file.read_bytes() for file in (tmp_path / f).rglob("*.*s*")} for f in ("thread", "plain"))
    assert len(plain) == 4 and thread == plain
