"""One drafter step, launched from Python and replayed from its graph: time, gaps, host time, memory.

    python tools/bench_step.py                       # the four sizes of the table
    python tools/bench_step.py smol:1024:128 --updates 50
    python tools/bench_step.py --start-up shapes/bench8.json      # q0.6b: compile and capture every bucket of a plan

A step is one row: mask, drafter, head and loss, backward, accumulation, then one update with fp32 masters. Data is random,
one document, no target forward: the features are copied into place. Before anything is timed, the audit has compared the
replay with the eager step bit for bit. Prints a table and, as the last line, one JSON document.
"""

import argparse
import gc
import json
import statistics
import time

import numpy as np
import torch

from graphcap.data.planner import Shapes
from graphcap.engine import Bucket, Engine
from graphcap.engine.guard import use_deterministic_math
from graphcap.engine.optimizer import Hyper
from graphcap.engine.step import DrafterStep
from graphcap.model.blocks import decay, default_gamma
from graphcap.model.drafter import Drafter, DrafterConfig

SIZES = {  # hidden, query heads, key heads, head size, MLP, vocabulary
    "smol": (576, 9, 3, 64, 1536, 49152),
    "q0.6b": (1024, 16, 8, 128, 3072, 151936),
    "q8b": (4096, 32, 8, 128, 12288, 151936),
}
CASES = ("smol:1024:128", "smol:4096:512", "q0.6b:4096:512", "q8b:4096:512")
BLOCK_SIZE, NUM_LAYERS, NUM_TAPPED = 16, 5, 5
COPY_BYTES_PER_S, MATMUL_FLOPS = 4.3e12, 790e12  # measured on one H200: a large copy, a large bf16 matmul


class RandomTarget:
    """An embedding, a head and fixed random features in place of a target."""

    def __init__(self, hidden: int, vocabulary: int, length: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.head_VD = (torch.randn(vocabulary, hidden, generator=generator, device=device) * 0.02).bfloat16()
        self.num_features = NUM_TAPPED * hidden
        self.stored_TF = torch.randn(length, self.num_features, generator=generator, device=device).bfloat16()

    def embed(self, token_ids_S):
        return torch.nn.functional.embedding(token_ids_S, self.head_VD)

    def features(self, token_ids_T, position_T, out_TF) -> None:
        out_TF.copy_(self.stored_TF[: len(out_TF)])


def make_step(size: str, length: int) -> DrafterStep:
    hidden, heads, kv_heads, head_dim, mlp, vocabulary = SIZES[size]
    device = torch.device("cuda")
    config = DrafterConfig(
        hidden_size=hidden,
        num_layers=NUM_LAYERS,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=length,
        block_size=BLOCK_SIZE,
        mask_token_id=vocabulary - 1,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=36,
    )
    drafter = Drafter(config)
    drafter.initialize(0)
    hyper = Hyper(
        learning_rate=6e-4,
        warmup_fraction=0.04,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        num_updates=1000,
    )
    target = RandomTarget(hidden, vocabulary, length, device)
    return DrafterStep(target, drafter, decay=decay(BLOCK_SIZE, default_gamma(BLOCK_SIZE)), hyper=hyper, chunk_tokens=2048)


def needed(step: DrafterStep, bucket: Bucket, anchors: np.ndarray) -> dict[str, float]:
    """FLOPs that one step must do and the floor in ms: those at the matmul rate, 48 bytes a parameter at the copy rate."""
    c, rows, draft = step.drafter.config, bucket.length, bucket.num_anchors * BLOCK_SIZE
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    fuse = 2 * rows * NUM_TAPPED * c.hidden_size**2
    layer = 2 * c.hidden_size * (2 * draft * q + 2 * (rows + draft) * kv + 3 * draft * c.intermediate_size)
    seen = float(anchors.sum()) * BLOCK_SIZE + draft * BLOCK_SIZE
    attention = 4 * seen * q
    head = 2 * draft * (BLOCK_SIZE - 1) / BLOCK_SIZE * c.hidden_size * c.vocab_size
    flops = 2 * fuse + NUM_LAYERS * (3 * layer + 3.5 * attention) + 2 * head
    parameters = sum(p.numel() for p in step.drafter.parameters())
    return {
        "flops": flops,
        "parameters": parameters,
        "floor_ms": 1e3 * (flops / MATMUL_FLOPS + 48 * parameters / COPY_BYTES_PER_S),
    }


def timed_ms(function, count: int) -> tuple[float, float]:
    """Median GPU time of `count` calls by events, and the host's median time to launch one, in ms."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    host = []
    events[0].record()
    for event in events[1:]:
        begin = time.perf_counter()
        function()
        host.append(time.perf_counter() - begin)
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:])), 1e3 * statistics.median(host[:8])


def kernels(function, count: int = 3) -> dict:
    """From a profile of `count` calls: kernels a call, time without any kernel as a share and a node, the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(count):
            function()
        torch.cuda.synchronize()
    spans, by_name = [], {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name[:70]] = by_name.get(event.name[:70], 0.0) + event.time_range.elapsed_us() / 1e3 / count
    spans.sort()
    busy = end = 0.0
    for left, right in spans:
        busy += max(0.0, right - max(left, end))
        end = max(end, right)
    whole = end - spans[0][0]
    longest = sorted(by_name.items(), key=lambda item: -item[1])[:12]
    return {
        "nodes": len(spans) // count,
        "without_kernel": 1 - busy / whole,
        "us_without_kernel_per_node": (whole - busy) / len(spans),
        "longest_ms": {name: round(ms, 3) for name, ms in longest},
    }


def bench(case: str, updates: int) -> dict:
    size, length, num_anchors = case.split(":")
    bucket = Bucket(int(length), int(num_anchors))
    step = make_step(size, bucket.length)
    result = {"case": case}
    arrays = step.example(bucket)
    result |= needed(step, bucket, arrays["anchors"])
    for mode in ("eager", "replay"):
        engine = Engine(step, (bucket,))
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        engine.prepare(eager=mode == "eager")
        prepare_s = time.perf_counter() - begin
        engine.fill(bucket, arrays)

        def once(engine=engine):
            engine.micro_step(bucket)
            engine.update()

        ms, host_ms = timed_ms(once, updates)
        result[mode] = {
            "ms": ms,
            "host_ms": host_ms,
            "prepare_s": prepare_s,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "compiles": engine.door.counts.before,
        }
        result[mode] |= kernels(once) if mode == "replay" else {}
        engine.close()
    del engine, step
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return result


def start_up(path: str, size: str) -> dict:
    """Seconds from the first compile to the last capture over the buckets of a shapes file, and the pool's growth."""
    buckets = Shapes.load(path).buckets
    engine = Engine(make_step(size, buckets[0].length), buckets)
    begin = time.perf_counter()
    engine.prepare(eager=False, say=lambda line: print(line, flush=True))
    result = {
        "case": f"start-up {path} {size}",
        "prepare_s": time.perf_counter() - begin,
        "compiles": engine.door.counts.before,
        "warm_up_s": engine.start_up.warm_up_s,
        "capture_s": engine.start_up.capture_s,
        "pool_bytes": engine.start_up.pool_bytes,
    }
    engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help="SIZE:LENGTH:ANCHORS")
    parser.add_argument("--updates", type=int, default=50, help="timed steps")
    parser.add_argument("--start-up", metavar="SHAPES", help="measure starting up with a plan's buckets instead")
    parser.add_argument("--size", default="q0.6b", choices=SIZES, help="the drafter of --start-up")
    options = parser.parse_args()
    settings = use_deterministic_math()
    results = []
    if options.start_up:
        results.append(start_up(options.start_up, options.size))
        options.cases = []
    print(
        f"{'case':<18}{'eager ms':>10}{'replay ms':>10}{'ratio':>7}{'floor ms':>9}{'× floor':>8}{'host µs':>9}{'nodes':>7}"
        f"{'no kernel':>10}{'peak GiB':>9}{'start s':>8}"
    )
    for case in options.cases:
        r = bench(case, options.updates)
        results.append(r)
        e, g = r["eager"], r["replay"]
        print(
            f"{case:<18}{e['ms']:>10.2f}{g['ms']:>10.2f}{e['ms'] / g['ms']:>7.2f}"
            f"{r['floor_ms']:>9.2f}{g['ms'] / r['floor_ms']:>8.2f}"
            f"{1e3 * g['host_ms']:>9.0f}{g['nodes']:>7}{g['without_kernel']:>10.1%}{g['peak_gib']:>9.1f}{e['prepare_s']:>8.1f}",
            flush=True,
        )
    print(
        json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "settings": settings, "results": results})
    )


if __name__ == "__main__":
    main()
