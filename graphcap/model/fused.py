"""What stands between the matmuls of a layer, each one pass: by our kernels on CUDA, as written here elsewhere.

And matmuls that share their input, as one; and rows as they stand in blocks. Called by model/drafter.py and model/lean.py.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcap import kernels


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, the mean in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x)[1]

    def after(self, x: Tensor, other: Tensor | None = None, *, skipped_of: int = 0) -> tuple[Tensor, Tensor]:
        """(x + other, its norm): the residual stream goes on with the first, the layer with the second.

        skipped_of: of so many rows of both the first is left out; 0: none is.
        """
        return after_norm(x, other, self.weight, self.eps, skipped_of)

    def rotated(self, x_HSC: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """The norm of heads [H, S, C], rotated. table: from `rotary_table`."""
        return normed_rotated(x_HSC, table, self.weight, self.eps)


def after_norm(x: Tensor, other: Tensor | None, weight: Tensor, eps: float, skipped_of: int = 0) -> tuple[Tensor, Tensor]:
    """(x + other, that / rms(that) · weight) over the last dimension; without other, x itself comes first.

    skipped_of: of so many rows the first is left out; 0: none is.
    """
    if kernels.serve(x.device):
        from graphcap.kernels import rows

        return rows.norm(x, other, weight, eps, skipped_of)
    total = x if other is None else x + other
    if skipped_of:
        total = total.unflatten(0, (-1, skipped_of))[:, 1:].flatten(0, 1)
    return total, F.rms_norm(total, weight.shape, weight, eps)


def normed_rotated(x_HSC: Tensor, table: tuple[Tensor, Tensor], weight: Tensor | None, eps: float) -> Tensor:
    """Heads [H, S, C] normed, unless weight is None, and rotated. Without a norm the kernel has no gradient."""
    if kernels.serve(x_HSC.device):
        from graphcap.kernels import rows

        return rows.norm_rotate(x_HSC, weight, table, eps)
    return rotate(x_HSC if weight is None else F.rms_norm(x_HSC, weight.shape, weight, eps), table)


def heads_rotated(
    joined_SR: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, table: tuple[Tensor, Tensor], key_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [H, S, C], keys and values [G, S, C] that stand side by side in [S, (H + 2G) · C]; the first two rotated."""
    if kernels.serve(joined_SR.device):
        from graphcap.kernels import rows

        return rows.heads_rotated(joined_SR, q_norm.weight, k_norm.weight, table, q_norm.eps, key_heads)
    heads = joined_SR.unflatten(1, (-1, q_norm.weight.numel())).transpose(0, 1)
    q, k, v = heads.split([heads.shape[0] - 2 * key_heads, key_heads, key_heads])
    return q_norm.rotated(q, table), k_norm.rotated(k, table), v


def rotary_table(position_S: Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, [S, C] in `dtype`; angles in float32 whatever the drafter's dtype."""
    # Written as the serving engines write it: theta ** -x is one bit off in a fifth of the frequencies.
    frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2, device=position_S.device, dtype=torch.float32) / head_dim)
    angle = position_S.float()[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_HSC: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply a rotary table to heads [H, S, C]."""
    cos, sin = table
    left, right = x_HSC.chunk(2, dim=-1)
    return x_HSC * cos + torch.cat((-right, left), dim=-1) * sin


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) · up [S, I] of [S, 2I], the gate first."""
    if kernels.serve(gate_up.device):
        from graphcap.kernels import rows

        return rows.gate(gate_up)
    left, right = gate_up.chunk(2, dim=-1)
    return F.silu(left) * right


def linear(x_SD: Tensor, *weights: Tensor) -> Tensor:
    """[S, rows of all weights]: x times each of them, side by side, as one matmul, forward and backward."""
    return _Linear.apply(x_SD, *weights)


def in_blocks(x_UD: Tensor, block_size: int) -> Tensor:
    """[N·K, D] of [N + 1, D]: every block begins with a row of its own; the last row stands in it K-1 times. Capture: safe."""
    return _InBlocks.apply(x_UD, block_size)


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_UD, block_size):
        ctx.block_size, own_N1D = block_size, x_UD[:-1, None]
        out_NKD = x_UD.new_empty(len(own_N1D), block_size, x_UD.shape[1])
        kernels.copy_rows_(out_NKD[:, :1], own_N1D)
        kernels.copy_rows_(out_NKD[:, 1:], x_UD[-1].expand_as(out_NKD[:, 1:]))
        return out_NKD.flatten(0, 1)

    @staticmethod
    def backward(ctx, upstream_QD):
        upstream_NKD = upstream_QD.unflatten(0, (-1, ctx.block_size))
        if kernels.serve(upstream_QD.device):
            from graphcap.kernels import sums

            return sums.of_blocks(upstream_NKD.contiguous()), None
        return torch.cat((upstream_NKD[:, 0], upstream_NKD[:, 1:].sum((0, 1))[None])), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SD, *weights):
        weight = _joined(weights)
        ctx.save_for_backward(x_SD, weight)
        ctx.rows = [one.shape[0] for one in weights]
        return x_SD @ weight.T

    @staticmethod
    def backward(ctx, upstream):
        x_SD, weight = ctx.saved_tensors
        dx = upstream @ weight if ctx.needs_input_grad[0] else None
        return dx, *(upstream.T @ x_SD).split(ctx.rows)


def _joined(weights: tuple[Tensor, ...]) -> Tensor:
    """All of them under each other: the memory they stand in where they stand there so, as in flat state, else a copy."""
    assert all(one.is_contiguous() for one in weights), [one.stride() for one in weights]
    first, rows = weights[0], sum(one.shape[0] for one in weights)
    if stand_together(weights):
        return torch.as_strided(first.detach(), (rows, first.shape[1]), (first.shape[1], 1), first.storage_offset())
    return torch.cat([one.detach() for one in weights])


def stand_together(weights: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors stand one behind the other in one memory."""
    one_memory = len({one.untyped_storage().data_ptr() for one in weights}) == 1
    ends = [one.data_ptr() + one.nbytes for one in weights]
    return one_memory and ends[:-1] == [one.data_ptr() for one in weights[1:]]
