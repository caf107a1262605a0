"""Attention over intervals as a function of torch with a gradient: tiles chosen, kernels launched (kernels/intervals.py).

Called by model/attention.py on CUDA. Needs triton, which torch's CUDA builds bring along.
"""

import math

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphcap.errors import ConfigError
from graphcap.kernels import options, sums
from graphcap.kernels.intervals import dkv_kernel, dq_kernel, forward_kernel
from graphcap.kernels.options import Tiles
from graphcap.kernels.walks import Walks

LOG2_E = math.log2(math.e)
LEAST = 16  # what a matrix unit multiplies at least


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, draft_k, draft_v, walks, scale):
        out, log_sum = _forward(q, k, v, draft_k, draft_v, walks, scale)
        ctx.save_for_backward(q, k, v, draft_k, draft_v, out, log_sum)
        ctx.walks, ctx.scale = walks, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return *_backward(*ctx.saved_tensors, dout, ctx.walks, ctx.scale), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, draft_k: Tensor | None, draft_v: Tensor | None, walks: Walks, scale: float):
    """Output [H, Q, C], tokens first in memory, and the base-2 logarithms of the softmaxes' sums, float32 [H, Q]."""
    heads, num_queries, channels = q.shape
    tiles = tiles_for("forward", q)
    _check(q, k, v, walks, tiles)
    out = q.new_empty(num_queries, heads, channels).transpose(0, 1)
    log_sum = q.new_empty(heads, num_queries, dtype=torch.float32)
    draft_k, draft_v, has_draft = (k, v, False) if draft_k is None else (draft_k, draft_v, True)
    forward_kernel[heads, num_queries // tiles.queries](
        q, k, v, draft_k, draft_v, walks.low_R, walks.high_R, walks.of_queries(tiles), out, log_sum,
        *_strides(q, k, v, draft_k, draft_v, out), num_queries, scale * LOG2_E,
        HEADS=heads // k.shape[0], GROUP=walks.group, C=channels, PAD=padded(channels), HAS_DRAFT=has_draft,
        M=tiles.queries, N=tiles.keys, **tiles.launch,
    )  # fmt: skip
    return out, log_sum


def _backward(q, k, v, draft_k, draft_v, out, log_sum, dout, walks: Walks, scale: float) -> tuple[Tensor, ...]:
    """Gradients of the first five, laid out in memory as they are."""
    heads, num_queries, channels = q.shape
    key_heads, num_keys = k.shape[0], k.shape[1]
    gradients = tuple(torch.empty_like(x) for x in (q, k, v, draft_k, draft_v))
    dq, dk, dv, draft_dk, draft_dv = gradients
    delta, intervals = torch.empty_like(log_sum), (walks.low_R, walks.high_R)
    sizes = {"HEADS": heads // key_heads, "GROUP": walks.group, "C": channels, "PAD": padded(channels)}
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    tiles = tiles_for("dq", q)
    _check(q, k, v, walks, tiles)
    dq_kernel[heads, num_queries // tiles.queries](
        q, k, v, draft_k, draft_v, *intervals, walks.of_queries(tiles), out, log_sum, dout, dq, delta,
        *_strides(q, k, v, draft_k, draft_v, out, dout, dq), num_queries, scale * LOG2_E, scale,
        **sizes, M=tiles.queries, N=tiles.keys, **tiles.launch,
    )  # fmt: skip
    tiles = tiles_for("dkv", q)
    _check(q, k, v, walks, tiles)
    num_tiles = num_keys // tiles.keys
    apart = heads > key_heads and options.heads_apart(key_heads * num_tiles, q.device)
    parts = q.new_empty(2, num_keys, heads, channels, dtype=torch.float32) if apart else None
    summands = parts.transpose(1, 2) if apart else (dk, dv)
    dkv_kernel[heads if apart else key_heads, num_tiles + num_queries // tiles.keys](
        q, k, v, draft_k, draft_v, *intervals, walks.of_keys(tiles), log_sum, delta, dout, *summands, draft_dk, draft_dv,
        *_strides(q, k, v, draft_k, draft_v, dout, *summands, draft_dk, draft_dv),
        key_heads, num_queries, num_tiles, scale * LOG2_E, scale,
        **sizes, APART=apart, M=tiles.queries, N=tiles.keys, **tiles.launch,
    )  # fmt: skip
    if apart:
        sums.of_heads_(parts, dk, dv)
    return gradients


def interval_attention(q_HQC: Tensor, context, blocks, walks: Walks, scale: float) -> Tensor:
    """Attention output [H, Q, C], differentiable in queries, keys and values where there are blocks.

    q_HQC: [H, Q, C]. context: keys and values [G, T, C]. blocks: keys and values [G, Q, C] of the queries' own tokens, or
    None. Query i sees the keys of the context that `walks` say, and the blocks' keys j with j // group == i // group; it must
    see one at least. Q and T are multiples of 128; the last dimension has stride 1. Capture: safe.
    """
    return _Attention.apply(q_HQC, *context, *(blocks if blocks is not None else (None, None)), walks, scale)


def tiles_for(kernel: str, q: Tensor) -> Tiles:
    return options.options(kernel, options.capability(q.device), padded(q.shape[2]), q.element_size())


def padded(channels: int) -> int:
    """The next power of two, at least what a matrix unit takes."""
    return max(LEAST, triton.next_power_of_2(channels))


def _strides(*tensors: Tensor) -> list[int]:
    """(row, head) strides of each [heads, rows, C]. Raises: ConfigError where a place in one does not fit 32 bits."""
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "the last dimension must be contiguous"
    most = max(tensor.shape[dim] * tensor.stride(dim) for tensor in tensors for dim in (0, 1))
    if most >= 2**31:
        raise ConfigError(
            "row",
            f"of {max(tensor.shape[1] for tensor in tensors)} tokens",
            expected="at most 2,147,483,647 numbers in what attention reads",
            got=f"{most:,}",
            fix="set shapes.row_length lower",
        )
    return [stride for tensor in tensors for stride in (tensor.stride(1), tensor.stride(0))]


def _check(q: Tensor, k: Tensor, v: Tensor, walks: Walks, tiles: Tiles) -> None:
    made_for = walks.num_queries, walks.num_keys
    assert (q.shape[1], k.shape[1]) == made_for, f"walks of {made_for} queries and keys, tensors of {q.shape[1], k.shape[1]}"
    assert k.shape == v.shape and k.shape[2] == q.shape[2] and q.shape[0] % k.shape[0] == 0, (q.shape, k.shape, v.shape)
    whole = q.shape[1] % tiles.queries == 0 and k.shape[1] % tiles.keys == 0 and q.shape[1] % tiles.keys == 0
    assert whole, f"{q.shape[1]} queries and {k.shape[1]} keys are not whole tiles of {tiles}"
