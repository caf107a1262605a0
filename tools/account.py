"""Where a replayed step's time goes: kernels by what they do, beside their FLOPs and bytes at this chip's own rates.

    python tools/account.py                       # the four cases of tools/bench_step.py
    python tools/account.py q0.6b:4096:512 --kernels 40

One row an update, as in tools/bench_step.py. Rates are measured first: a large copy, a large bf16 matmul. FLOPs are those that
the mathematics needs, bytes those that a pass must read and write once; `× floor` is the time over the larger of the two.
A group's launches are shown too: what is small costs what its launches cost. Prints a table a case and, as the last line, one
JSON document.
"""

import argparse
import json
import re
from collections import defaultdict

import torch
from bench_step import BLOCK_SIZE, CASES, NUM_LAYERS, environment, forget, make_step, needed, seen_pairs, timed_ms

from graphcap.engine import Bucket, Engine
from graphcap.engine.guard import use_deterministic_math
from graphcap.kernels.options import capability, heads_apart, options

GROUPS = (  # what a kernel's name begins with or holds; the first that fits
    ("attention forward", r"^forward_kernel"),
    ("attention dq", r"^dq_kernel"),
    ("attention dk dv", r"^dkv_kernel"),
    ("loss", r"^loss_kernel"),
    ("AdamW", r"^adamw_kernel"),
    ("gradient sums", r"^add_kernel"),
    ("gradient norm", r"LpNorm|lpnorm"),
    ("norms", r"^norm_"),
    ("rotations", r"^rotate_"),
    ("gate", r"^gate_"),
    ("sums of parts", r"^(parts|heads|blocks)_kernel|reduce_kernel.*BFloat16"),
    ("walks", r"^(of_queries|of_keys|longest_first)_kernel"),
    ("copies", r"copy|Memcpy|memcpy|Memset|CatArray|gather"),
    ("matmuls", r"nvjet|gemm|cublas|cutlass|splitK"),
)


def group_of(kernel: str) -> str:
    """The group; "small": passes over a row's tokens, labels or statistics, which cost what their launches cost."""
    return next((group for group, pattern in GROUPS if re.search(pattern, kernel)), "small")


def rates() -> tuple[float, float]:
    """Bytes a second of a large copy, read and written; FLOPs a second of a large matmul."""
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    copy_ms, _ = timed_ms(lambda: y.copy_(x), 20)
    matmul_ms, _ = timed_ms(lambda: a @ b, 20)
    return 2e3 * x.nbytes / copy_ms, 2e3 * 8192**3 / matmul_ms


def work(step, bucket: Bucket, arrays) -> dict[str, tuple[float, float]]:
    """(FLOPs, bytes) of a group in one step; bfloat16 between kernels, float32 state."""
    from graphcap.kernels.rows import PROGRAMS

    c, rows, draft = step.drafter.config, bucket.length, bucket.num_anchors * BLOCK_SIZE
    q, kv, hidden, mlp = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    all_needed, size = needed(step, bucket, arrays), sum(p.numel() for p in step.drafter.parameters())
    pairs = NUM_LAYERS * 2 * seen_pairs(arrays) * q  # FLOPs of one product over all pairs
    heads, keys = 2 * NUM_LAYERS * draft * q, 2 * NUM_LAYERS * (rows + draft) * 2 * kv  # bytes of one pass over them
    logits = 2.0 * draft * (BLOCK_SIZE - 1) / BLOCK_SIZE * c.vocab_size
    predicted = bucket.num_anchors * (BLOCK_SIZE - 1)  # what goes on behind the last attention
    stream, wide = (2 * ((NUM_LAYERS - 1) * draft + predicted) * width for width in (hidden, mlp))
    rotated = 2 * NUM_LAYERS * (draft * (q + kv) + rows * kv)
    norm_parts = 4.0 * min(PROGRAMS, draft // 4) * NUM_LAYERS * (2 * hidden + 3 * c.head_dim)  # tiles of four rows or so
    apart = heads_apart(c.num_kv_heads * rows // options("dkv", capability(step.device), c.head_dim, 2).keys, step.device)
    head_parts = NUM_LAYERS * rows * (2 * 4 * q + 2 * 2 * kv) if apart else 0
    return {
        "matmuls": (all_needed["flops"] - 3.5 * 2 * pairs, 0.0),
        "attention forward": (2 * pairs, 2 * heads + keys),
        "attention dq": (3 * pairs, 4 * heads + keys),
        "attention dk dv": (4 * pairs, 2 * heads + 2 * keys),
        "loss": (0.0, 2 * logits),
        "AdamW": (0.0, 34.0 * size),
        "gradient sums": (0.0, 10.0 * size),
        "gradient norm": (0.0, 4.0 * size),
        "norms": (0.0, 2 * (4 + 4) * stream + 2 * rows * hidden * 2),  # two a layer but in the first, the last; four passes
        "rotations": (0.0, 5 * rotated),
        "gate": (0.0, 8 * wide),
        "sums of parts": (0.0, norm_parts + head_parts + 2 * draft * (q + 2 * kv)),  # and of MASK's gradients
        # features, rows laid out in blocks, gradients of the draft's values
        "copies": (
            0.0,
            4.0 * rows * step.target.num_features + 2 * draft * (hidden + q + 2 * kv) + 4 * NUM_LAYERS * draft * kv,
        ),
    }


def account(case: str, speeds: tuple[float, float], num_kernels: int) -> dict:
    size, length, num_anchors = case.split(":")
    bucket = Bucket(int(length), int(num_anchors))
    step = make_step(size, bucket.length)
    engine, arrays = Engine(step, (bucket,)), step.example(bucket)
    engine.prepare(eager=False)
    engine.fill(bucket, arrays)

    def once() -> None:
        engine.micro_step(bucket)
        engine.update()

    step_ms, _ = timed_ms(once, 50)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            once()
        torch.cuda.synchronize()
    ms, launches = defaultdict(float), defaultdict(float)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            ms[event.name] += event.device_time / 4e3
            launches[event.name] += 1 / 4
    wanted, groups, times = work(step, bucket, arrays), defaultdict(float), defaultdict(float)
    for kernel, one in ms.items():
        groups[group_of(kernel)] += one
        times[group_of(kernel)] += launches[kernel]
    print(f"{case}: {step_ms:.2f} ms a step, kernels {sum(ms.values()):.2f} ms")
    found = {}
    for group, one in sorted(groups.items(), key=lambda pair: -pair[1]):
        flops, moved = wanted.get(group, (0.0, 0.0))
        floor_ms = 1e3 * max(flops / speeds[1], moved / speeds[0])
        found[group] = {"ms": one, "launches": times[group], "flops": flops, "bytes": moved, "floor_ms": floor_ms}
        beside = f"{floor_ms:>8.2f} {one / floor_ms:>6.2f}" if floor_ms else ""
        share = one / sum(ms.values())
        work_done = f"{flops / 1e12:>7.2f} TFLOP {moved / 1e9:>7.2f} GB"
        print(f"  {group:<20}{one:>8.3f} ms {share:>6.1%} {times[group]:>5.0f} x {work_done} {beside}")
    for kernel, one in sorted(ms.items(), key=lambda pair: -pair[1])[:num_kernels]:
        print(f"    {1e3 * one:>9.1f} us {launches[kernel]:>6.1f} x  {kernel[:90]}")
    engine.close()
    return {"case": case, "ms": step_ms, "kernels_ms": dict(ms), "groups": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"SIZE:LENGTH:ANCHORS; left out: {' '.join(CASES)}")
    parser.add_argument("--kernels", type=int, default=0, help="also the longest kernels, so many")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    settings, speeds = use_deterministic_math(), rates()
    print(f"copy {speeds[0] / 1e12:.2f} TB/s, bf16 matmul {speeds[1] / 1e12:.0f} TFLOP/s")
    results = []
    for case in options.cases or CASES:
        results.append(account(case, speeds, options.kernels))
        forget()
    print(json.dumps(environment(settings) | {"copy_bytes_per_s": speeds[0], "matmul_flops": speeds[1], "results": results}))


if __name__ == "__main__":
    main()
