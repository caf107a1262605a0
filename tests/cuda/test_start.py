"""Starting up: what fails before update 1, and how; each in a process of its own, since a failed capture ends one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphcap.ops import caches

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


def test_a_host_read_in_the_step_fails_capture_with_place_and_cause_and_leaves_stream_and_collector():
    body = """
import gc
step = small_step()
micro = step.micro
def reads(slot):
    micro(slot)
    step.state.sums.sum().item()
step.micro = reads
engine = Engine(step, BUCKETS[3:])
try:
    engine.prepare(eager=False)
except Exception as error:
    print('FAILED', error, gc.isenabled(), torch.cuda.current_stream() == engine._capturer.stream)
"""
    done = program(body)
    assert "FAILED capture 'micro step 128/32'" in done.stdout, done.stdout + done.stderr
    assert "(reads) reads a value on the host" in done.stdout and "--eager" in done.stdout
    assert done.stdout.rstrip().endswith("True True")


def test_a_command_whose_capture_fails_ends_with_the_message_and_the_same_command_with_eager_runs(tmp_path):
    body = f"""
import sys
from graphcap import cli
from graphcap.engine.step import DrafterStep
micro = DrafterStep.micro
def reads(self, slot):
    micro(self, slot)
    self.state.sums.sum().item()
DrafterStep.micro = reads
small = ['run.out={tmp_path}', 'shapes.max_buckets=1', 'optimizer.max_updates=2', 'eval.documents=2', 'eval.prompts=1',
         'eval.passes=1', 'eval.max_new_tokens=4']
sys.exit(cli.main(['train', '--here', 'runs/tiny.toml', *small, *EXTRA]))
"""
    done = program(body.replace("EXTRA", "[]"))
    assert done.returncode == 1 and "graphcap: capture 'micro step" in done.stderr, done.stdout + done.stderr
    assert "--eager" in done.stderr and "Traceback" not in done.stderr
    done = program(body.replace("EXTRA", "['--eager']"))
    assert done.returncode == 0 and "acceptance length" in done.stdout, done.stdout + done.stderr


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


def test_many_buckets_train_without_a_compile_and_uncompiled_flex_attention_is_an_error():
    body = """
from tests.toys import TableTarget, make_step, random_drafter
buckets = tuple(Bucket(128 * n, 32) for n in range(12, 0, -1))
target = TableTarget(0)
for name in ('embedding_VD', 'head_VD', 'features_VF'):
    setattr(target, name, getattr(target, name).to('cuda', torch.bfloat16))
engine = Engine(make_step(target, random_drafter(1, head_dim=32, num_layers=1, block_size=8)), buckets)
engine.prepare(eager=True)
import numpy as np
for bucket in buckets:
    engine.fill(bucket, engine.step.example(bucket)); engine.micro_step(bucket)
engine.update(); torch.cuda.synchronize()
print('compiles', engine.door.counts.before)
print('trained', torch.isfinite(engine.step.state.master).all().item())
from torch.nn.attention.flex_attention import flex_attention
q = torch.randn(1, 2, 128, 32, device='cuda')
try:
    flex_attention(q, q, q)
except Exception as error:
    print('REFUSED', str(error)[:60])
"""
    done = program(body)
    assert "compiles 0\n" in done.stdout and "trained True" in done.stdout, done.stdout + done.stderr
    assert "REFUSED flex_attention called without torch.compile" in done.stdout, done.stdout + done.stderr


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


def test_dense_attention_of_a_step_of_ones_own_is_refused_before_it_has_allocated_its_scores():
    body = """
from torch.nn.attention.flex_attention import flex_attention
from graphcap.engine import Step
large, small = Bucket(4096, 512), Bucket(2048, 256)
class Flex(Step):
    device = torch.device('cuda')
    def __init__(self, attend):
        self.attend, self.total = attend, torch.zeros((), device='cuda')
    def buffers(self, bucket):
        from graphcap.engine.slots import Buffer
        return (Buffer('x', bucket.length, pad_value=0),)
    def example(self, bucket):
        import numpy
        return {'x': numpy.zeros(bucket.length, dtype=numpy.int32)}
    def micro(self, slot):
        q = slot['x'].bfloat16()[None, None, :, None].expand(1, 4, -1, 32).contiguous()
        self.total += self.attend(q, q, q).sum()
    def update(self): self.total *= 1
    def state_tensors(self): return {'total': self.total}
    def reset(self): self.total.zero_()
def peak(attend, buckets):
    torch.cuda.synchronize(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
    engine = Engine(Flex(attend), buckets)
    try:
        engine.prepare(eager=True)
        engine.micro_step(buckets[0])
    except Exception as error:
        print('STOPPED', type(error).__name__, error)
    finally:
        engine.close()
    return torch.cuda.max_memory_allocated()
scores = 4 * 4096 * 4096 * 2  # heads, queries, keys, bytes of bf16
normal = peak(torch.compile(flex_attention, dynamic=False, fullgraph=True), (large,))
print('unfused', peak(flex_attention, (large,)) < normal + scores)
torch._dynamo.reset()
torch._dynamo.config.recompile_limit = 1
print('limited', peak(torch.compile(flex_attention, dynamic=False, fullgraph=True), (large, small)) < normal + scores)
torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats()
q = torch.randn(1, 4, 4096, 32, device='cuda', dtype=torch.bfloat16)
flex_attention(q, q, q)
print('dense takes it', torch.cuda.max_memory_allocated() > normal + scores, torch.cuda.max_memory_allocated(), normal, scores)
"""
    done = program(body)
    assert "bucket '4096/512'" in done.stdout and "flex attention called without torch.compile" in done.stdout, (
        done.stdout + done.stderr
    )
    assert "bucket '2048/256'" in done.stdout and "recompile limit" in done.stdout
    assert "unfused True" in done.stdout and "limited True" in done.stdout and "dense takes it True" in done.stdout


def test_the_caches_that_torch_and_triton_have_just_filled_count_as_whole(tmp_path):
    body = """
import torch
from graphcap.engine.guard import torchs_cache_folder, use_deterministic_math
from graphcap.ops import caches
from graphcap.versions import made_by
use_deterministic_math()
caches.use(made_by(), print, unless=torchs_cache_folder())
x = torch.randn(64, 64, device="cuda", requires_grad=True)
torch.compile(lambda x: torch.softmax(x * 2 + 1, -1).sum())(x).backward()
for name in caches.VARIABLES.values():
    cache = caches.folder(made_by()) / name
    print(name, sum(path.is_file() for path in cache.rglob("*")) > 3, list(caches.damage(cache)))
"""
    environment = {name: value for name, value in os.environ.items() if name not in caches.VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", body], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["inductor True []", "triton True []"], done.stdout + done.stderr
