"""Every Triton kernel that training launches, compiled for chips that need not be here: shared memory, registers, spills.

    python tools/kernel_targets.py                   # needs triton, no GPU
    python tools/kernel_targets.py --capability 9.0

The launches are recorded from the functions that training calls, at the sizes of tools/bench_step.py and at head sizes 64, 128
and 256, in bfloat16 and float32, with the tiles that each chip would use. A kernel that asks for more shared memory than the
chip has ends with exit code 1. The last line is one JSON document.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from graphcap.kernels import attention, loss, options, rows, sums, update, walks

SHARED_BYTES = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}  # KB a block
WIDTHS = {"smol": (576, 1536), "q0.6b": (1024, 3072), "q8b": (4096, 12288), "q14b": (5120, 17408)}  # hidden, MLP
HEADS = {"smol": (9, 3, 64), "q0.6b": (16, 8, 128), "q8b": (32, 8, 128), "head 256": (8, 2, 256)}
BLOCK_SIZE, NUM_ANCHORS, LENGTH, VOCABULARY = 16, 128, 1024, 49152
LAUNCH = ("num_warps", "num_stages", "maxnreg")  # what a compiler is told beside the constants
TYPES = {
    "torch.bfloat16": "*bf16",
    "torch.float32": "*fp32",
    "torch.float64": "*fp64",
    "torch.int64": "*i64",
    "torch.int32": "*i32",
    "torch.int8": "*i8",
}


def recorded(chip: tuple[int, int]) -> list[tuple]:
    """(kernel, arguments, keywords) of every launch of a micro step and an update on that chip; nothing runs."""
    launches = []
    run, capability, processors = JITFunction.run, options.capability, options.num_processors
    JITFunction.run = lambda self, *arguments, grid, warmup, **keywords: launches.append((self, arguments, keywords))
    options.capability = lambda device: chip
    try:
        for dtype in (torch.bfloat16, torch.float32):
            for heads, key_heads, head_dim in HEADS.values():
                for count in (0, 132):  # gradients of keys all heads at once, and head by head
                    options.num_processors = lambda device, count=count: count
                    attend(heads, key_heads, head_dim, dtype)
            for hidden, width in WIDTHS.values():
                pass_between(hidden, width, dtype)
        learn()
    finally:
        JITFunction.run, options.capability, options.num_processors = run, capability, processors
    return launches


def attend(heads: int, key_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    def states(heads: int, rows: int) -> torch.Tensor:
        return torch.zeros(heads, rows, head_dim, dtype=dtype, requires_grad=True)

    draft = NUM_ANCHORS * BLOCK_SIZE
    edges = torch.zeros(NUM_ANCHORS, dtype=torch.int64)
    q, context = states(heads, draft), (states(key_heads, LENGTH), states(key_heads, LENGTH))
    blocks = states(key_heads, draft), states(key_heads, draft)
    seen = walks.Walks(edges, edges, group=BLOCK_SIZE, num_queries=draft, num_keys=LENGTH)
    out = attention.interval_attention(q, context, blocks, seen, head_dim**-0.5)
    out.sum().backward()
    table = tuple(torch.zeros(draft, head_dim, dtype=dtype) for _ in range(2))
    rows.norm_rotate(q, torch.ones(head_dim, dtype=dtype, requires_grad=True), table, 1e-6).sum().backward()
    rows.norm_rotate(q.detach(), None, table, 0.0)  # a target's heads without a norm
    row = torch.zeros(LENGTH, dtype=torch.int64)
    seen = walks.Walks(row, row, group=1, num_queries=LENGTH, num_keys=LENGTH)
    with torch.no_grad():
        attention.interval_attention(states(heads, LENGTH), context, None, seen, head_dim**-0.5)


def pass_between(hidden: int, width: int, dtype: torch.dtype) -> None:
    x, other, gate_up = (torch.zeros(64, size, dtype=dtype, requires_grad=True) for size in (hidden, hidden, 2 * width))
    for skipped_of in (0, BLOCK_SIZE):
        total, out = rows.norm(x, other, torch.ones(hidden, dtype=dtype, requires_grad=True), 1e-6, skipped_of)
        (total.sum() + out.sum()).backward()
    rows.norm(x, None, torch.ones(hidden, dtype=dtype), 1e-6)[1].sum().backward()
    sums.of_blocks(x.detach().unflatten(0, (-1, BLOCK_SIZE)))
    rows.gate(gate_up).sum().backward()


def learn() -> None:
    rows, flat = 4, 1 << 16
    logits = torch.zeros(rows, VOCABULARY, dtype=torch.bfloat16)
    label, weight = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
    loss.chunk_loss_(logits, label, weight, torch.empty(rows), torch.empty(rows, dtype=torch.bool))
    sums, gradients = torch.zeros(flat), tuple(torch.zeros(4096, dtype=torch.bfloat16) for _ in range(16))
    update.add_(sums, gradients, [4096 * number for number in range(16)])
    one, rates = torch.ones(()), {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    moments = [torch.zeros(flat) for _ in range(3)]
    weights = torch.zeros(flat, dtype=torch.bfloat16)
    update.adamw_(*moments, sums, weights, torch.ones(()), rate=one, grad_scale=one, found_inf=one, **rates)


def compiled(chip: tuple[int, int], kernel: JITFunction, arguments: tuple, keywords: dict) -> dict:
    """Shared memory (bytes), registers a thread and spilled bytes of one launch's kernel."""
    names = kernel.arg_names
    values = dict(zip(names, arguments)) | {name: keywords[name] for name in names if name in keywords}
    constexprs = {name: value for name, value in values.items() if name in kernel_constexprs(kernel)}
    signature = {name: "constexpr" if name in constexprs else kind(value) for name, value in values.items()}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name, value in values.items() if divisible(name, value, constexprs)
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constexprs.items()}, attributes)
    launch = {"num_warps": 4, "num_stages": 3} | {name: keywords[name] for name in LAUNCH if name in keywords}
    done = triton.compile(source, target=GPUTarget("cuda", 10 * chip[0] + chip[1], 32), options=launch)
    registers, spilled = usage(done.asm["cubin"])
    found = {"kernel": kernel.__name__, "shared": done.metadata.shared, "registers": registers, "spilled": spilled}
    shown = {
        name: value
        for name, value in constexprs.items()
        if name in ("PAD", "M", "N", "GROUP", "APART", "COLUMNS", "NUMBERS", "HEADS", "ROWS")
    }
    return found | {"constants": shown | launch}


def kernel_constexprs(kernel: JITFunction) -> set[str]:
    return {parameter.name for parameter in kernel.params if parameter.is_constexpr}


def divisible(name: str, value, constexprs: dict) -> bool:
    if name in constexprs or isinstance(value, tuple | float):
        return False
    return value % 16 == 0 if isinstance(value, int) else True


def kind(value):
    if isinstance(value, tuple):
        return tuple(map(kind, value))
    if isinstance(value, torch.Tensor):
        return TYPES[str(value.dtype)]
    return "fp32" if isinstance(value, float) else "i32"


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes, from the resource lines of cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [f"{major}.{minor}" for major, minor in SHARED_BYTES]
    parser.add_argument("--capability", action="append", choices=known, help="left out: all of them")
    options_ = parser.parse_args()
    chips = [tuple(map(int, one.split("."))) for one in options_.capability or []] or list(SHARED_BYTES)
    results, too_large = [], 0
    for chip in chips:
        seen = set()
        for launch in recorded(chip):
            found = {"capability": f"{chip[0]}.{chip[1]}"} | compiled(chip, *launch)
            if json.dumps(found) in seen:
                continue
            seen.add(json.dumps(found))
            fits = found["shared"] <= SHARED_BYTES[chip] * 1024
            too_large += not fits
            print(
                f"{found['capability']:<5} {found['kernel']:<15} {found['shared'] / 1024:>6.1f} KB of {SHARED_BYTES[chip]:>3}"
                f" {found['registers']:>4} registers {found['spilled']:>5} bytes spilled  {found['constants']}"
                + ("" if fits else "  TOO LARGE"),
                flush=True,
            )
            results.append(found | {"fits": fits})
    print(json.dumps({"triton": triton.__version__, "results": results}))
    return 1 if too_large else 0


if __name__ == "__main__":
    raise SystemExit(main())
