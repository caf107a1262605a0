"""One drafter step, launched from Python and replayed from its graph: time, gaps, host time, memory.

    python tools/bench_step.py                       # the four sizes of the table
    python tools/bench_step.py smol:1024:128 --updates 50
    python tools/bench_step.py --checkpointing q0.6b:16384:2048           # gradient checkpointing: memory, time, same bits
    python tools/bench_step.py --start-up shapes/bench8.json              # q0.6b: warm up and capture every bucket of a plan
    python tools/bench_step.py --start-up shapes/bench8.json --target     # with a target of that size in the step

A step is one row: mask, drafter, head and loss, backward, accumulation, then one update with fp32 masters. Data is random,
one row of three documents, no target forward: the features are copied into place. Before anything is timed, every gradient
has been compared with that of plain float32 operations, and the audit has compared the replay with the eager step bit for
bit. Memory is the peak, and what of it lies beyond state, slot and the target's tables. Prints a table and, as the last line,
one JSON document.

What a run adds to its steps: tools/bench_run.py.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import time

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from graphcap.data.planner import Shapes
from graphcap.engine import Bucket, Engine
from graphcap.engine.guard import use_deterministic_math
from graphcap.engine.metrics import gaps_of
from graphcap.engine.optimizer import Hyper
from graphcap.engine.step import DrafterStep
from graphcap.kernels import written_out
from graphcap.model.attention import DenseAttention
from graphcap.model.blocks import decay, default_gamma
from graphcap.model.drafter import Drafter, DrafterConfig
from graphcap.model.loss import default_chunk
from graphcap.model.target import Target

SIZES = {  # hidden, query heads, key heads, head size, MLP, vocabulary
    "smol": (576, 9, 3, 64, 1536, 49152),
    "q0.6b": (1024, 16, 8, 128, 3072, 151936),
    "q8b": (4096, 32, 8, 128, 12288, 151936),
}
CASES = ("smol:1024:128", "smol:4096:512", "q0.6b:4096:512", "q8b:4096:512")
BLOCK_SIZE, NUM_LAYERS, NUM_TAPPED = 16, 5, 5
MOST_GRADIENT_ERROR = 0.03  # relative L2, bfloat16 against float32
COPY_BYTES_PER_S, MATMUL_FLOPS = 4.3e12, 790e12  # measured on one H200: a large copy, a large bf16 matmul


class RandomTarget:
    """An embedding, a head and fixed random features in place of a target."""

    def __init__(self, hidden: int, vocabulary: int, length: int, device: torch.device, dtype=torch.bfloat16) -> None:
        """The numbers are bfloat16's whatever the dtype."""
        generator = torch.Generator(device).manual_seed(0)
        self.head_VD = (torch.randn(vocabulary, hidden, generator=generator, device=device) * 0.02).bfloat16().to(dtype)
        self.num_features = NUM_TAPPED * hidden
        self.stored_TF = torch.randn(length, self.num_features, generator=generator, device=device).bfloat16().to(dtype)

    def embed(self, token_ids_S):
        return torch.nn.functional.embedding(token_ids_S, self.head_VD)

    def features(self, token_ids_T, position_T, out_TF) -> None:
        out_TF.copy_(self.stored_TF[: len(out_TF)])


def make_step(size: str, length: int, target: Target | None = None, *, kind: type[DrafterStep] = DrafterStep) -> DrafterStep:
    """target: left out, a table of random features stands in its place. kind: StoredStep where the host fills features in."""
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
        target_layer_ids=(1, 7, 13, 19, 25),
        num_target_layers=28,
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
    target = target or RandomTarget(hidden, vocabulary, length, device)
    return kind(
        target,
        drafter,
        decay=decay(BLOCK_SIZE, default_gamma(BLOCK_SIZE)),
        hyper=hyper,
        chunk_tokens=default_chunk(vocabulary, 2),
    )


def seen_pairs(arrays: dict[str, np.ndarray]) -> float:
    """(query, key) pairs of a row: every token of a block sees its document up to the anchor, and the block."""
    anchors = arrays["anchors"]
    return float((arrays["position"][anchors] + BLOCK_SIZE).sum()) * BLOCK_SIZE


class PiecewiseDense(DenseAttention):
    """Dense attention, some queries at a time and again in the backward: a reference that fits into memory."""

    def __call__(self, q_HQC, context, blocks, mask, scale: float):
        pieces = [
            checkpoint(super(PiecewiseDense, self).__call__, *part, scale, use_reentrant=False, preserve_rng_state=False)
            for part in ((q, context, blocks, seen) for q, seen in zip(q_HQC.split(512, 1), mask.split(512)))
        ]
        return torch.cat(pieces, dim=1)


def gradient_errors(step: DrafterStep, size: str, bucket: Bucket, arrays: dict[str, np.ndarray]) -> dict[str, dict]:
    """Relative L2 distance of each parameter's gradient from that of plain float32 operations, of the same weights.

    "ours": of the step; "torch": of torch's own operations in the step's dtype.
    """
    exact = _plain_gradients(step, size, bucket, arrays, torch.float32)
    plain = _plain_gradients(step, size, bucket, arrays, step.target.head_VD.dtype)
    _one_micro_step(step, bucket, arrays)
    found = {"ours": step.state.gradient_views, "torch": plain}
    return {
        way: {name: ((one - right).norm() / right.norm()).item() for name, one, right in zip(step.state.names, views, exact)}
        for way, views in found.items()
    }


def _plain_gradients(step: DrafterStep, size: str, bucket: Bucket, arrays, dtype: torch.dtype) -> list[torch.Tensor]:
    with written_out():
        twin = make_step(size, bucket.length, RandomTarget(*SIZES[size][::5], bucket.length, step.device, dtype))
        twin.drafter.checkpointing, twin.attention = True, PiecewiseDense()
        twin.state.weights.copy_(step.state.weights)
        _one_micro_step(twin, bucket, arrays)
    return [view.clone() for view in twin.state.gradient_views]


def _one_micro_step(step: DrafterStep, bucket: Bucket, arrays: dict[str, np.ndarray]) -> None:
    engine = Engine(step, (bucket,))
    engine.fill(bucket, arrays)
    step.state.sums.zero_()
    engine.micro_step(bucket)
    engine.close()


def needed(step: DrafterStep, bucket: Bucket, arrays: dict[str, np.ndarray]) -> dict[str, float]:
    """FLOPs that one step must do and the floor in ms: those at the matmul rate, 48 bytes a parameter at the copy rate."""
    c, rows, draft = step.drafter.config, bucket.length, bucket.num_anchors * BLOCK_SIZE
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    fuse = 2 * rows * NUM_TAPPED * c.hidden_size**2
    layer = 2 * c.hidden_size * (2 * draft * q + 2 * (rows + draft) * kv + 3 * draft * c.intermediate_size)
    alike = 2 * c.hidden_size * (draft - bucket.num_anchors) * (q + 2 * kv)  # in the first layer all MASKs are one row
    unread = 2 * c.hidden_size * bucket.num_anchors * 3 * c.intermediate_size  # first tokens behind the last attention
    attention = 4 * seen_pairs(arrays) * q
    head = 2 * draft * (BLOCK_SIZE - 1) / BLOCK_SIZE * c.hidden_size * c.vocab_size
    flops = 2 * fuse + NUM_LAYERS * (3 * layer + 3.5 * attention) - 3 * (alike + unread) + 2 * head
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


def bench(case: str, updates: int, *, checked: bool = True) -> dict:
    size, length, num_anchors = case.split(":")
    bucket = Bucket(int(length), int(num_anchors))
    step = make_step(size, bucket.length)
    result = {"case": case}
    arrays = step.example(bucket)
    result |= needed(step, bucket, arrays)
    torch.cuda.synchronize()
    state_bytes = torch.cuda.memory_allocated()  # the target's tables too
    if checked:
        result["gradient_errors"] = errors = gradient_errors(step, size, bucket, arrays)
        gc.collect()
        farthest = max(errors["ours"], key=errors["ours"].get)
        ours, torchs = (max(errors[way].values()) for way in ("ours", "torch"))
        print(
            f"{case}: gradients within {ours:.2%} of float32's, {farthest} the farthest; torch's own in bfloat16 {torchs:.2%}"
        )
        if ours > MOST_GRADIENT_ERROR:
            raise SystemExit(f"{case}: farther than {MOST_GRADIENT_ERROR:.0%}; not timed")
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
            "beyond_state_gib": (torch.cuda.max_memory_allocated() - state_bytes) / 2**30,
        }
        if mode == "replay":
            gaps = gaps_of(once, times=3)
            result[mode] |= {
                "nodes": gaps.num_nodes,
                "without_kernel": gaps.share,
                "us_without_kernel_per_node": gaps.us_per_node,
                "longest_ms": gaps.longest_ms,
            }
        engine.close()
    del engine, step
    forget()
    return result


def forget() -> None:
    """Free the memory of the case before."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def start_up(path: str, size: str, with_target: bool) -> dict:
    """Seconds from the first warm-up to the last capture over the buckets of a shapes file, and the pool's memory."""
    buckets = Shapes.load(path).buckets
    engine = Engine(make_step(size, buckets[0].length, qwen3_target() if with_target else None), buckets)
    engine.prepare(eager=False, say=lambda line: print(line, flush=True))
    result = {
        "case": f"start-up {path} {size}{' with a target' if with_target else ''}",
        **dataclasses.asdict(engine.start_up),
    }
    engine.close()
    print(f"start-up {result['total_s']:.1f} s", flush=True)
    return result


def qwen3_target() -> Target:
    """A target of Qwen3-0.6B's shape with random weights."""
    import transformers

    hidden, heads, kv_heads, head_dim, mlp, vocabulary = SIZES["q0.6b"]
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=28,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    return Target(model.requires_grad_(False).eval(), (1, 7, 13, 19, 25))


def checkpointing(case: str, updates: int) -> dict:
    """The captured step with every layer's activations kept, and with gradient checkpointing."""
    size, length, num_anchors = case.split(":")
    bucket, result, sums = Bucket(int(length), int(num_anchors)), {"case": f"checkpointing {case}"}, {}
    for name in ("kept", "checkpointed"):
        step = make_step(size, bucket.length)
        step.drafter.checkpointing = name == "checkpointed"
        engine, before = Engine(step, (bucket,)), torch.cuda.memory_allocated()
        engine.prepare(eager=False)
        engine.fill(bucket, step.example(bucket))
        step.reset()
        engine.micro_step(bucket)
        sums[name] = step.state.sums.cpu()
        ms, _ = timed_ms(lambda engine=engine: (engine.micro_step(bucket), engine.update()), updates)
        pool = engine.start_up.pool_bytes[bucket.name]
        result[name] = {"ms": ms, "pool_gib": pool / 2**30, "state_gib": before / 2**30}
        engine.close()
        del engine, step
        forget()
    kept, again = result["kept"], result["checkpointed"]
    total = {name: result[name]["pool_gib"] + result[name]["state_gib"] for name in sums}
    result |= {
        "same_bits": bool(torch.equal(sums["kept"], sums["checkpointed"])),
        "relative_difference": float((sums["kept"] - sums["checkpointed"]).norm() / sums["kept"].norm()),
        "time_ratio": again["ms"] / kept["ms"],
        "memory_ratio": total["checkpointed"] / total["kept"],
    }
    print(
        f"{case}: {kept['ms']:.1f} -> {again['ms']:.1f} ms ({result['time_ratio']:.2f}x), {total['kept']:.2f} -> "
        f"{total['checkpointed']:.2f} GiB ({result['memory_ratio']:.2f}x), same bits: {result['same_bits']}",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"SIZE:LENGTH:ANCHORS; left out: {' '.join(CASES)}")
    parser.add_argument("--updates", type=int, default=50, help="timed steps")
    parser.add_argument("--unchecked", action="store_true", help="compare no gradients first: for sizes where that takes long")
    parser.add_argument("--start-up", metavar="SHAPES", help="measure starting up with a plan's buckets instead")
    parser.add_argument("--size", default="q0.6b", choices=SIZES, help="the drafter of --start-up")
    parser.add_argument("--target", action="store_true", help="--start-up with a target of Qwen3-0.6B's shape in the step")
    parser.add_argument("--checkpointing", metavar="CASE", help="measure gradient checkpointing instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    settings = use_deterministic_math()
    results = []
    if options.start_up:
        results.append(start_up(options.start_up, options.size, options.target))
    if options.checkpointing:
        results.append(checkpointing(options.checkpointing, options.updates))
    if not results:
        results = table(options.cases or CASES, options.updates, checked=not options.unchecked)
    print(json.dumps(environment(settings) | {"results": results}))


def environment(settings: dict[str, str]) -> dict:
    """What the numbers were measured with."""
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "settings": settings}


def table(cases, updates: int, *, checked: bool) -> list[dict]:
    results = []
    print(
        f"{'case':<18}{'eager ms':>10}{'replay ms':>10}{'ratio':>7}{'floor ms':>9}{'× floor':>8}{'host µs':>9}{'nodes':>7}"
        f"{'no kernel':>10}{'peak GiB':>9}{'beyond':>8}{'start s':>8}"
    )
    for case in cases:
        r = bench(case, updates, checked=checked)
        results.append(r)
        e, g = r["eager"], r["replay"]
        print(
            f"{case:<18}{e['ms']:>10.2f}{g['ms']:>10.2f}{e['ms'] / g['ms']:>7.2f}"
            f"{r['floor_ms']:>9.2f}{g['ms'] / r['floor_ms']:>8.2f}"
            f"{1e3 * g['host_ms']:>9.0f}{g['nodes']:>7}{g['without_kernel']:>10.1%}"
            f"{g['peak_gib']:>9.1f}{g['beyond_state_gib']:>8.2f}{e['prepare_s']:>8.1f}",
            flush=True,
        )
    return results


if __name__ == "__main__":
    main()
