"""Sums of parts that programs made one by one, in a fixed order, so that two runs give the same bits.

Called by kernels/rows.py, kernels/attention.py and model/fused.py. Needs triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS, WARPS = 1024, 4  # of a program that sums heads
ROWS, COLUMNS, WARPS_OF_PARTS = 256, 16, 8  # of a tile of parts
PROGRAMS, NUMBERS_OF_BLOCK = 264, 4096  # that share the blocks; of a tile of one block


@triton.jit
def parts_kernel(parts, out, num_parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out [W] = the sum of parts [N, W]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, num_parts, ROWS):
        row = first + tl.arange(0, ROWS)
        known = (row < num_parts)[:, None] & inside[None, :]
        total += tl.load(parts + row[:, None] * width + column[None, :], mask=known, other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def blocks_kernel(
    rows, firsts, parts, num_blocks, width, SIZE: tl.constexpr, PAD: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Of rows [N, SIZE, W]: firsts [N, W], each block's first row; parts [programs, W] float32: sums of all the others."""
    program, of_block = tl.program_id(0), tl.arange(0, PAD)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    known = (of_block < SIZE)[:, None] & inside[None, :]
    first = known & (of_block == 0)[:, None]
    total = tl.zeros([PAD, COLUMNS], tl.float32)
    for block in tl.range(program, num_blocks, tl.num_programs(0)):
        row = (block * SIZE + of_block).to(tl.int64)[:, None]
        x = tl.load(rows + row * width + column[None, :], mask=known, other=0.0)
        tl.store(firsts + row // SIZE * width + column[None, :], x, mask=first)
        total += x.to(tl.float32)
    total = tl.where(first, 0.0, total)
    tl.store(parts + program * width + column, tl.sum(total, 0), mask=inside)


@triton.jit
def heads_kernel(
    parts, first, second, size, key_heads, first_row, first_head, second_row, second_head,
    HEADS: tl.constexpr, C: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """first and second [G, T, C] = sums over HEADS of the two halves of parts [2, T, G, HEADS, C]; the grid's other half."""
    number = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    known = number < size
    row, channel = number // C, number % C
    token, head = row // key_heads, row % key_heads
    at = parts + tl.program_id(1).to(tl.int64) * size * HEADS + row * (HEADS * C) + channel
    total = tl.zeros([NUMBERS], tl.float32)
    for one in tl.static_range(HEADS):
        total += tl.load(at + one * C, mask=known, other=0.0)
    if tl.program_id(1) == 0:
        place = first + token * first_row + head * first_head + channel
        tl.store(place, total.to(first.dtype.element_ty), mask=known)
    else:
        place = second + token * second_row + head * second_head + channel
        tl.store(place, total.to(second.dtype.element_ty), mask=known)


def of_parts(parts_NW: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of float32 parts [N, W] over N, [W] in `dtype`. Capture: safe."""
    num_parts, width = parts_NW.shape
    out = parts_NW.new_empty(width, dtype=dtype)
    parts_kernel[(triton.cdiv(width, COLUMNS),)](
        parts_NW, out, num_parts, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS_OF_PARTS
    )
    return out


def of_blocks(rows_NKW: Tensor) -> Tensor:
    """[N + 1, W] of [N, K, W]: the first row of each block and, last, the sum of all others. Capture: safe."""
    num_blocks, block_size, width = rows_NKW.shape
    assert rows_NKW.is_contiguous(), rows_NKW.stride()
    out = rows_NKW.new_empty(num_blocks + 1, width)
    parts = torch.empty(min(PROGRAMS, num_blocks), width, dtype=torch.float32, device=rows_NKW.device)
    pad = triton.next_power_of_2(block_size)
    columns = max(16, min(256, NUMBERS_OF_BLOCK // pad))
    blocks_kernel[len(parts), triton.cdiv(width, columns)](
        rows_NKW, out, parts, num_blocks, width, SIZE=block_size, PAD=pad, COLUMNS=columns, num_warps=WARPS
    )  # fmt: skip
    out[-1] = of_parts(parts, out.dtype)
    return out


def of_heads_(parts: Tensor, first: Tensor, second: Tensor) -> None:
    """Fill first and second [G, T, C] with the sums over each key head's query heads of parts[0] and parts[1].

    parts: float32 [2, T, H, C], contiguous; query head h belongs to key head h // (H / G). Capture: safe.
    """
    key_heads, num_tokens, channels = first.shape
    assert parts.is_contiguous() and first.stride(2) == second.stride(2) == 1
    size = first.numel()
    heads_kernel[triton.cdiv(size, NUMBERS), 2](
        parts, first, second, size, key_heads, first.stride(1), first.stride(0), second.stride(1), second.stride(0),
        HEADS=parts.shape[2] // key_heads, C=channels, NUMBERS=NUMBERS, num_warps=WARPS,
    )  # fmt: skip
