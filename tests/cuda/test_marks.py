"""What the GPU writes into the flight record: how many launches it has finished, also after a fault inside a replay."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from graphcap.engine import Engine
from graphcap.engine.marks import Marks
from graphcap.errors import CaptureError
from graphcap.ops import blackbox
from tests.cuda.test_engine import BUCKETS, random_row, same, small_step

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder():
    """In the node's memory, where a run's records are: the driver takes no page of a file on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


def test_marks_count_every_launch_of_replays_change_no_number_and_can_be_read_by_others(folder):
    recorder = blackbox.Recorder(folder, rank=0)
    marked = Engine(
        small_step(), BUCKETS[2:], note=recorder.note, marks=Marks(recorder.memory, blackbox.GPU_AT, torch.device("cuda"))
    )
    marked.prepare(eager=False)
    before = marked._num_launches
    assert blackbox.read(recorder.path).gpu_finished == before > 0
    plain = Engine(small_step(), BUCKETS[2:])
    rng = np.random.default_rng(0)
    rows = [random_row(BUCKETS[2], rng) for _ in range(6)]
    for engine in (marked, plain):
        engine.step.reset()
        for row in rows:
            engine.fill(BUCKETS[2], row)
            engine.micro_step(BUCKETS[2])
            engine.update()
    torch.cuda.synchronize()
    flight = blackbox.read(recorder.path)
    assert flight.launches == flight.gpu_finished == before + 12
    assert same(marked.step.state_tensors(), plain.step.state_tensors())
    assert flight.phase == "replay"
    marked.close()


def test_a_page_that_the_driver_does_not_take_is_an_error_and_nothing_is_broken(tmp_path):
    recorder = blackbox.Recorder(tmp_path, rank=0)
    try:
        Marks(recorder.memory, blackbox.GPU_AT, torch.device("cuda"))
    except CaptureError as error:
        assert "make /dev/shm writable" in str(error)
    assert torch.ones(3, device="cuda").sum().item() == 3  # also where this file system is one that it takes


def test_a_fault_inside_a_replay_is_pinned_to_its_launch_and_update(folder):
    body = f"""
import torch
from pathlib import Path
from graphcap.engine.guard import use_deterministic_math
use_deterministic_math()
from graphcap.engine import Bucket, Buffer, Engine, Step
from graphcap.engine.marks import Marks
from graphcap.ops import blackbox
import numpy as np

class Reads(Step):
    device = torch.device('cuda')
    def __init__(self):
        self.table, self.sum = torch.zeros(8, device='cuda'), torch.zeros(1, device='cuda')
    def buffers(self, bucket):
        return (Buffer('place', bucket.length, pad_value=0, dtype=torch.int64),)
    def example(self, bucket):
        return {{'place': np.zeros(bucket.length, np.int64)}}
    def micro(self, slot):
        self.sum += self.table[slot['place']].sum()
    def update(self):
        self.table += 1
    def state_tensors(self):
        return {{'table': self.table, 'sum': self.sum}}
    def reset(self):
        self.table.zero_(); self.sum.zero_()

recorder = blackbox.Recorder(Path({str(folder)!r}), rank=0)
bucket = Bucket(16)
engine = Engine(Reads(), (bucket,), note=recorder.note, marks=Marks(recorder.memory, blackbox.GPU_AT, torch.device('cuda')))
engine.prepare(eager=False)
print('BEFORE', engine._num_launches)
for update in range(1, 9):
    recorder.note('fill', update=update)
    places = np.full(16, 1 << 40 if update == 5 else 1, np.int64)
    engine.fill(bucket, {{'place': places}})
    engine.micro_step(bucket)
    engine.update()
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print('FAULT', str(error).splitlines()[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", body],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "FAULT" in done.stdout, done.stdout + done.stderr
    before = int(re.search(r"BEFORE (\d+)", done.stdout)[1])
    flight = blackbox.read(folder / "rank-0")
    assert flight.entries[-1].update == 8 and flight.at.update == 5 and flight.at.phase == "replay"
    assert flight.gpu_finished == before + 8
