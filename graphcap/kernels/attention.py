"""Attention over intervals as an operator of torch with a gradient: tiles chosen, kernels launched (kernels/intervals.py).

Called by model/attention.py on CUDA. Needs triton, which torch's CUDA builds bring along.
"""

import math

import torch
import triton
from torch import Tensor

from graphcap.errors import ConfigError
from graphcap.kernels import options, sums
from graphcap.kernels.intervals import dkv_kernel, dq_kernel, forward_kernel
from graphcap.kernels.options import Tiles

LOG2_E = math.log2(math.e)
LEAST = 16  # what a matrix unit multiplies at least


@torch.library.custom_op("graphcap::attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    draft_k: Tensor | None,
    draft_v: Tensor | None,
    low: Tensor,
    high: Tensor,
    group: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    heads, num_queries, channels = q.shape
    tiles, pad = tiles_for("forward", q), padded(channels)
    _check(q, k, v, tiles)
    out, log_sum = _forward_shapes(q)
    draft_k, draft_v, has_draft = (k, v, False) if draft_k is None else (draft_k, draft_v, True)
    forward_kernel[num_queries // tiles.queries, heads](
        q, k, v, draft_k, draft_v, low, high, out, log_sum,
        *_strides(q, k, v, draft_k, draft_v, out), num_queries, scale * LOG2_E,
        HEADS=heads // k.shape[0], GROUP=group, C=channels, PAD=pad, HAS_DRAFT=has_draft, M=tiles.queries, N=tiles.keys,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out, log_sum


@_forward.register_fake
def _forward_shapes(q, *_) -> tuple[Tensor, Tensor]:
    heads, num_queries, channels = q.shape
    return q.new_empty(num_queries, heads, channels).transpose(0, 1), q.new_empty(heads, num_queries, dtype=torch.float32)


@torch.library.custom_op("graphcap::attention_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, draft_k: Tensor, draft_v: Tensor, low: Tensor, high: Tensor,
    out: Tensor, log_sum: Tensor, dout: Tensor, group: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    heads, num_queries, channels = q.shape
    key_heads, num_keys, pad = k.shape[0], k.shape[1], padded(channels)
    gradients = _backward_shapes(q, k, v, draft_k, draft_v)
    dq, dk, dv, draft_dk, draft_dv = gradients
    delta = torch.empty_like(log_sum)
    sizes = {"HEADS": heads // key_heads, "GROUP": group, "C": channels, "PAD": pad}
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    tiles = tiles_for("dq", q)
    _check(q, k, v, tiles)
    dq_kernel[num_queries // tiles.queries, heads](
        q, k, v, draft_k, draft_v, low, high, out, log_sum, dout, dq, delta,
        *_strides(q, k, v, draft_k, draft_v, out, dout, dq), num_queries, scale * LOG2_E, scale,
        **sizes, M=tiles.queries, N=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    tiles = tiles_for("dkv", q)
    _check(q, k, v, tiles)
    num_tiles = num_keys // tiles.keys
    apart = heads > key_heads and options.heads_apart(key_heads * num_tiles, q.device)
    parts = q.new_empty(2, num_keys, heads, channels, dtype=torch.float32) if apart else None
    summands = parts.transpose(1, 2) if apart else (dk, dv)
    dkv_kernel[heads if apart else key_heads, num_tiles + num_queries // tiles.keys](
        q, k, v, draft_k, draft_v, low, high, log_sum, delta, dout, *summands, draft_dk, draft_dv,
        *_strides(q, k, v, draft_k, draft_v, dout, *summands, draft_dk, draft_dv),
        key_heads, num_queries, low.numel(), num_tiles, scale * LOG2_E, scale,
        **sizes, APART=apart, M=tiles.queries, N=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if apart:
        sums.of_heads_(parts, dk, dv)
    return gradients


@_backward.register_fake
def _backward_shapes(q, k, v, draft_k, draft_v, *_) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(torch.empty_like(x) for x in (q, k, v, draft_k, draft_v))  # laid out in memory as they are


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.group, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx, dout, _):
    q, k, v, draft_k, draft_v, low, high, out, log_sum = ctx.saved_tensors
    gradients = _backward(q, k, v, draft_k, draft_v, low, high, out, log_sum, dout, ctx.group, ctx.scale)
    return *gradients, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def interval_attention(q_HQC: Tensor, context, blocks, low_R: Tensor, high_R: Tensor, *, group: int, scale: float) -> Tensor:
    """Attention output [H, Q, C], differentiable in queries, keys and values where there are blocks.

    q_HQC: [H, Q, C]. context: keys and values [G, T, C]. blocks: keys and values [G, Q, C] of the queries' own tokens, or
    None. low_R, high_R: int64 [Q / group]. Query i sees the context's keys from low_R[i // group] to before high_R[i // group],
    and the blocks' keys j with j // group == i // group; it must see one at least. Q and T are multiples of 128; the last
    dimension has stride 1. Capture: safe.
    """
    draft_k, draft_v = blocks if blocks is not None else (None, None)
    return _forward(q_HQC, *context, draft_k, draft_v, low_R, high_R, group, scale)[0]


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


def _check(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> None:
    assert k.shape == v.shape and k.shape[2] == q.shape[2] and q.shape[0] % k.shape[0] == 0, (q.shape, k.shape, v.shape)
    whole = q.shape[1] % tiles.queries == 0 and k.shape[1] % tiles.keys == 0 and q.shape[1] % tiles.keys == 0
    assert whole, f"{q.shape[1]} queries and {k.shape[1]} keys are not whole tiles of {tiles}"
