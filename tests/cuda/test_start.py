"""Starting up: what fails before update 1, and how; each in a process of its own, since a failed capture ends one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda
ROOT = Path(__file__).parents[2]
HEAD = """
import threading, torch
from graphcap.engine.guard import use_deterministic_math
use_deterministic_math()
from graphcap.engine import Bucket, Buffer, Engine
from tests.cuda.test_engine import small_step, BUCKETS, run, same
"""


def program(body: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", HEAD + body], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_host_read_in_the_step_fails_capture_with_the_cause_and_the_eager_way_runs():
    body = """
step = small_step()
micro = step.micro
def reads(slot):
    micro(slot)
    step.state.sums.sum().item()
step.micro = reads
engine = Engine(step, BUCKETS[3:])
engine.prepare(eager=True); run_ok = engine.micro_step(BUCKETS[3]); engine.close()
engine = Engine(step, BUCKETS[3:])
before = torch.cuda.current_stream()
import gc
try:
    engine.prepare(eager=False)
except Exception as error:
    print('FAILED', error, gc.isenabled(), torch.cuda.current_stream() == engine._capturer.stream)
"""
    done = program(body)
    assert "FAILED capture 'micro step 128/32'" in done.stdout, done.stdout + done.stderr
    assert (
        "reads a value on the host" in done.stdout and "--eager" in done.stdout and done.stdout.rstrip().endswith("True True")
    )


def test_the_audit_finds_an_attention_that_is_off_by_one_key_and_names_bucket_and_quantity():
    body = """
from graphcap.model.blocks import Visibility
step = small_step()
right = step.attention
class Wrong:
    def mask(self, v, n):
        return right.mask(Visibility(v.low_R, v.high_R + 1, v.group, v.num_context), n)
    def __call__(self, *a):
        return right(*a)
step.attention = Wrong()
engine = Engine(step, BUCKETS[3:])
try:
    engine.prepare(eager=False)
except Exception as error:
    print('FOUND', error)
"""
    done = program(body)
    assert "FOUND bucket '128/32'" in done.stdout and "attention's output" in done.stdout, done.stdout + done.stderr


def test_more_buckets_than_torchs_recompile_limit_train_and_uncompiled_flex_attention_is_an_error():
    body = """
buckets = tuple(Bucket(128 * n, 32) for n in range(12, 0, -1))
engine = Engine(small_step(), buckets)
engine.prepare(eager=True)
print('compiles', engine.door.counts.before)
import numpy as np
for bucket in buckets:
    engine.fill(bucket, engine.step.example(bucket)); engine.micro_step(bucket)
engine.update(); torch.cuda.synchronize()
print('trained', torch.isfinite(engine.step.state.master).all().item())
from torch.nn.attention.flex_attention import flex_attention
q = torch.randn(1, 2, 128, 32, device='cuda')
try:
    flex_attention(q, q, q)
except Exception as error:
    print('REFUSED', str(error)[:60])
"""
    done = program(body)
    assert "trained True" in done.stdout and "REFUSED flex_attention called without torch.compile" in done.stdout, (
        done.stdout + done.stderr
    )


def test_a_compile_still_running_when_the_door_shuts_fails_the_start_and_names_the_thread():
    body = """
from graphcap.engine.guard import Door
door, inside, go = Door(), threading.Event(), threading.Event()
def backend(module, inputs):
    inside.set(); go.wait(60); return module.forward
thread = threading.Thread(target=lambda: torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3)), name='slow compiler')
thread.start(); inside.wait(60)
try:
    door.close()
except Exception as error:
    print('NAMED', error)
go.set(); thread.join(); door.close(); print('shut', door.shut)
"""
    done = program(body)
    assert "NAMED thread 'slow compiler'" in done.stdout and "shut True" in done.stdout, done.stdout + done.stderr
