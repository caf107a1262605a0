"""What stands between the matmuls of a layer, in Triton, one pass each way: norm, norm and rotation, gate.

Numbers come and go in the compute dtype and are float32 in between. The gradient of a norm's weight is summed over the rows
that a program walks through, a fixed number of programs whatever the GPU, and then over the programs (kernels/sums.py): no
atomics, so two runs give the same bits.

Called by model/fused.py on CUDA. Needs triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphcap.kernels import copy_rows_, sums

PROGRAMS = 1056  # that share the rows where a weight's gradient is summed
NUMBERS, WARPS = 2048, 8  # of a program of the gate
PREFETCHED_BYTES = 16 << 10  # of the largest tile that is: six of them fit 99 KB of shared memory
NUMBERS_OF_NORM, NUMBERS_A_WARP = 4096, 1024  # of a tile of rows in the norm's backward; 4,096 wide, two rows


@triton.jit
def _with_skipped(number, OF: tl.constexpr):
    """Which row it is where the first of every OF is counted too."""
    return number + number // (OF - 1) + 1


@triton.jit
def norm_kernel(
    x, other, weight, total, out, width, eps, HAS_OTHER: tl.constexpr, PAD: tl.constexpr, SKIPPED_OF: tl.constexpr
):  # fmt: skip
    """total = x + other, out = total / rms(total) · weight, of one row; without other, out of x alone.

    SKIPPED_OF: of so many rows of x and other the first has none in total and out; 0: each has.
    """
    number = tl.program_id(0).to(tl.int64)
    row, source = number * width, number * width
    if SKIPPED_OF:
        source = _with_skipped(number, SKIPPED_OF) * width
    place = tl.arange(0, PAD)
    known = place < width
    x_D = tl.load(x + source + place, mask=known, other=0.0).to(tl.float32)
    if HAS_OTHER:
        x_D += tl.load(other + source + place, mask=known, other=0.0).to(tl.float32)
        rounded_D = x_D.to(total.dtype.element_ty)
        tl.store(total + row + place, rounded_D, mask=known)
        x_D = rounded_D.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_D * x_D, 0) / width + eps)
    weight_D = tl.load(weight + place, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row + place, (x_D * scale * weight_D).to(out.dtype.element_ty), mask=known)


@triton.jit
def norm_backward_kernel(
    x, weight, dtotal, dout, dx, dweight, num_rows, width, eps,
    HAS_TOTAL: tl.constexpr, PAD: tl.constexpr, SKIPPED_OF: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = dtotal + the norm's gradient, of this program's tiles of ROWS; dweight [programs, width] float32: their sums.

    x is the forward's total. SKIPPED_OF: of so many rows of dx the first is zero, and has no row elsewhere.
    """
    program = tl.program_id(0)
    place = tl.arange(0, PAD)
    inside = place < width
    weight_D = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    dweight_D = tl.zeros([PAD], tl.float32)
    for first in tl.range(program * ROWS, num_rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        number_R = first + tl.arange(0, ROWS)
        known = (number_R < num_rows)[:, None] & inside[None, :]
        at = number_R.to(tl.int64)[:, None] * width + place[None, :]
        x_RD = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
        dout_RD = tl.load(dout + at, mask=known, other=0.0).to(tl.float32)
        if HAS_TOTAL:  # with the others: behind the sums it would wait for them
            dtotal_RD = tl.load(dtotal + at, mask=known, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_RD * x_RD, 1) / width + eps)[:, None]
        unit_RD = x_RD * scale
        weighted_RD = dout_RD * weight_D[None, :]
        along = (tl.sum(weighted_RD * unit_RD, 1) / width)[:, None]
        dx_RD = scale * (weighted_RD - unit_RD * along)
        if HAS_TOTAL:
            dx_RD += dtotal_RD
        if SKIPPED_OF:
            at = _with_skipped(number_R.to(tl.int64), SKIPPED_OF)[:, None] * width + place[None, :]
            before = known & (number_R % (SKIPPED_OF - 1) == 0)[:, None]
            tl.store(dx + at - width, tl.zeros_like(dx_RD).to(dx.dtype.element_ty), mask=before)
        tl.store(dx + at, dx_RD.to(dx.dtype.element_ty), mask=known)
        dweight_D += tl.sum(dout_RD * unit_RD, 0)
    tl.store(dweight + program * width + place, dweight_D, mask=inside)


@triton.jit
def rotate_kernel(
    x, weight, cos, sin, out, num_rows, x_row, x_head, out_row, out_head, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out = rotated(x / rms(x) · weight) of ROWS heads, tokens first; the table's two halves are the same angles.

    Without NORM, rotated(x).
    """
    number_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place, known_R = tl.arange(0, HALF), number_R < num_rows
    token_R, head_R = number_R // HEADS, number_R % HEADS
    known = known_R[:, None] & (place < C // 2)[None, :]
    at = (token_R.to(tl.int64) * x_row + head_R.to(tl.int64) * x_head)[:, None] + place[None, :]
    left = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
    right = tl.load(x + at + C // 2, mask=known, other=0.0).to(tl.float32)
    if NORM:
        scale_R = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / C + eps)
        of_left = tl.load(weight + place, mask=place < C // 2, other=0.0).to(tl.float32)
        of_right = tl.load(weight + place + C // 2, mask=place < C // 2, other=0.0).to(tl.float32)
        left *= scale_R[:, None] * of_left[None, :]
        right *= scale_R[:, None] * of_right[None, :]
    angle = token_R.to(tl.int64)[:, None] * C + place[None, :]
    cosine = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32)
    at = (token_R.to(tl.int64) * out_row + head_R.to(tl.int64) * out_head)[:, None] + place[None, :]
    tl.store(out + at, (left * cosine - right * sine).to(out.dtype.element_ty), mask=known)
    tl.store(out + at + C // 2, (right * cosine + left * sine).to(out.dtype.element_ty), mask=known)


@triton.jit
def rotate_backward_kernel(
    x, weight, cos, sin, dout, dx, dweight, num_rows, x_row, x_head, dout_row, dout_head, dx_row, dx_head, eps,
    HEADS: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx of the heads of this program's tiles of ROWS; dweight [programs, C] float32: their sums."""
    program, place = tl.program_id(0), tl.arange(0, HALF)
    inside = place < C // 2
    of_left = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    of_right = tl.load(weight + place + C // 2, mask=inside, other=0.0).to(tl.float32)
    dleft_sum = tl.zeros([HALF], tl.float32)
    dright_sum = tl.zeros([HALF], tl.float32)
    for first in tl.range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        number_R = first + tl.arange(0, ROWS)
        token_R, head_R = number_R // HEADS, number_R % HEADS
        known = (number_R < num_rows)[:, None] & inside[None, :]
        at = (token_R.to(tl.int64) * x_row + head_R.to(tl.int64) * x_head)[:, None] + place[None, :]
        left = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
        right = tl.load(x + at + C // 2, mask=known, other=0.0).to(tl.float32)
        angle = token_R.to(tl.int64)[:, None] * C + place[None, :]
        cosine = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)
        sine = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32)
        at = (token_R.to(tl.int64) * dout_row + head_R.to(tl.int64) * dout_head)[:, None] + place[None, :]
        dleft_out = tl.load(dout + at, mask=known, other=0.0).to(tl.float32)
        dright_out = tl.load(dout + at + C // 2, mask=known, other=0.0).to(tl.float32)
        scale = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / C + eps)[:, None]
        left *= scale
        right *= scale
        dleft = dleft_out * cosine + dright_out * sine
        dright = dright_out * cosine - dleft_out * sine
        dleft_sum += tl.sum(dleft * left, 0)
        dright_sum += tl.sum(dright * right, 0)
        dleft *= of_left[None, :]
        dright *= of_right[None, :]
        along = ((tl.sum(dleft * left, 1) + tl.sum(dright * right, 1)) / C)[:, None]
        at = (token_R.to(tl.int64) * dx_row + head_R.to(tl.int64) * dx_head)[:, None] + place[None, :]
        tl.store(dx + at, (scale * (dleft - left * along)).to(dx.dtype.element_ty), mask=known)
        tl.store(dx + at + C // 2, (scale * (dright - right * along)).to(dx.dtype.element_ty), mask=known)
    tl.store(dweight + program * C + place, dleft_sum, mask=inside)
    tl.store(dweight + program * C + place + C // 2, dright_sum, mask=inside)


@triton.jit
def gate_kernel(gate_up, out, size, width, NUMBERS: tl.constexpr):
    """out [S, I] = silu(gate) · up of gate_up [S, 2I], the gate first."""
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    known = place < size
    at = place // width * (2 * width) + place % width
    gate = tl.load(gate_up + at, mask=known, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=known, other=0.0).to(tl.float32)
    tl.store(out + place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=known)


@triton.jit
def gate_backward_kernel(gate_up, dout, dgate_up, size, width, NUMBERS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    known = place < size
    at = place // width * (2 * width) + place % width
    gate = tl.load(gate_up + at, mask=known, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=known, other=0.0).to(tl.float32)
    grad = tl.load(dout + place, mask=known, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    dgate = grad * up * open_ * (1.0 + gate * (1.0 - open_))
    tl.store(dgate_up + at, dgate.to(dgate_up.dtype.element_ty), mask=known)
    tl.store(dgate_up + at + width, (grad * gate * open_).to(dgate_up.dtype.element_ty), mask=known)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, other, weight, eps, skipped_of):
        width = x.shape[-1]
        if skipped_of:
            out = x.new_empty(len(x) // skipped_of * (skipped_of - 1), width)
        else:
            out = torch.empty_like(x)
        total = x if other is None else torch.empty_like(out)
        norm_kernel[(out.numel() // width,)](
            x, x if other is None else other, weight, total, out, width, eps,
            HAS_OTHER=other is not None, PAD=triton.next_power_of_2(width), SKIPPED_OF=skipped_of, num_warps=_warps(width),
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.set_materialize_grads(False)  # where nothing comes in by the first output, nothing is added
        ctx.eps, ctx.has_other, ctx.shape, ctx.skipped_of = eps, other is not None, x.shape, skipped_of
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx, dtotal, dout):
        total, weight = ctx.saved_tensors
        if dout is None:  # the norm itself is not used
            assert not ctx.skipped_of, "rows are left out for the norm's sake"
            return dtotal, dtotal if ctx.has_other else None, None, None, None
        width = total.shape[-1]
        num_rows, dx, dout = total.numel() // width, total.new_empty(ctx.shape), dout.contiguous()
        pad = triton.next_power_of_2(width)
        rows = max(2 if pad <= NUMBERS_OF_NORM else 1, NUMBERS_OF_NORM // pad)
        prefetched = rows * pad * total.element_size() <= PREFETCHED_BYTES
        programs = min(PROGRAMS, triton.cdiv(num_rows, rows))
        dweight = torch.empty(programs, width, dtype=torch.float32, device=total.device)
        norm_backward_kernel[(len(dweight),)](
            total, weight, dout if dtotal is None else dtotal.contiguous(), dout, dx, dweight, num_rows, width, ctx.eps,
            HAS_TOTAL=dtotal is not None, PAD=pad, SKIPPED_OF=ctx.skipped_of, ROWS=rows, STAGES=3 if prefetched else 1,
            num_warps=min(32, max(1, rows * pad // NUMBERS_A_WARP)),
        )  # fmt: skip
        return dx, dx if ctx.has_other else None, sums.of_parts(dweight, weight.dtype), None, None


def _warps(width: int) -> int:
    return min(16, max(1, triton.next_power_of_2(width) // 512))


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, cos, sin, eps):
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps = eps
        return _rotated(x, weight, cos, sin, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        x, weight, cos, sin = ctx.saved_tensors
        heads, tokens, channels = x.shape
        dx = x.new_empty(tokens, heads, channels).transpose(0, 1)
        return dx, _rotated_backward(x, weight, cos, sin, ctx.eps, dout, dx), None, None, None


class _HeadsRotated(torch.autograd.Function):
    """Queries, keys and values of one matmul; their gradients are written side by side, as its backward wants them."""

    @staticmethod
    def forward(ctx, joined, q_weight, k_weight, cos, sin, eps, key_heads):
        ctx.save_for_backward(joined, q_weight, k_weight, cos, sin)
        ctx.eps, ctx.key_heads = eps, key_heads
        q, k, v = _heads(joined, q_weight.numel(), key_heads)
        return _rotated(q, q_weight, cos, sin, eps), _rotated(k, k_weight, cos, sin, eps), v

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        joined, q_weight, k_weight, *table = ctx.saved_tensors
        djoined, channels = torch.empty_like(joined), q_weight.numel()
        (q, k, _), (dq_in, dk_in, dv_in) = (_heads(one, channels, ctx.key_heads) for one in (joined, djoined))
        dq_weight = _rotated_backward(q, q_weight, *table, ctx.eps, dq, dq_in)
        dk_weight = _rotated_backward(k, k_weight, *table, ctx.eps, dk, dk_in)
        copy_rows_(dv_in, dv)
        return djoined, dq_weight, dk_weight, None, None, None, None


def _heads(joined: Tensor, channels: int, key_heads: int) -> tuple[Tensor, ...]:
    """[heads, S, C] of the queries, keys and values that stand side by side in [S, (H + 2G) · C]."""
    heads = joined.unflatten(1, (-1, channels)).transpose(0, 1)
    return heads.split([heads.shape[0] - 2 * key_heads, key_heads, key_heads])


def _rotated(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    heads, tokens, channels = x.shape
    out, rows = x.new_empty(tokens, heads, channels).transpose(0, 1), _rows(channels)
    rotate_kernel[(triton.cdiv(heads * tokens, rows),)](
        x, cos if weight is None else weight, cos, sin, out, heads * tokens,
        x.stride(1), x.stride(0), out.stride(1), out.stride(0), eps, NORM=weight is not None,
        HEADS=heads, C=channels, HALF=triton.next_power_of_2(channels // 2), ROWS=rows,
    )  # fmt: skip
    return out


def _rotated_backward(x, weight, cos, sin, eps: float, dout: Tensor, dx: Tensor) -> Tensor:
    """Fills dx, laid out in any way with channels next to each other; returns the weight's gradient."""
    heads, tokens, channels = x.shape
    rows = _rows(channels)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    programs = min(PROGRAMS, triton.cdiv(heads * tokens, rows))
    dweight = torch.empty(programs, channels, dtype=torch.float32, device=x.device)
    rotate_backward_kernel[(programs,)](
        x, weight, cos, sin, dout, dx, dweight, heads * tokens,
        x.stride(1), x.stride(0), dout.stride(1), dout.stride(0), dx.stride(1), dx.stride(0), eps,
        HEADS=heads, C=channels, HALF=triton.next_power_of_2(channels // 2), ROWS=rows,
    )  # fmt: skip
    return sums.of_parts(dweight, weight.dtype)


def _rows(channels: int) -> int:
    return max(1, 4096 // triton.next_power_of_2(channels))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        gate_kernel[(triton.cdiv(out.numel(), NUMBERS),)](gate_up, out, out.numel(), width, NUMBERS=NUMBERS, num_warps=WARPS)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        (gate_up,) = ctx.saved_tensors
        dgate_up, dout = torch.empty_like(gate_up), dout.contiguous()
        gate_backward_kernel[(triton.cdiv(dout.numel(), NUMBERS),)](
            gate_up, dout, dgate_up, dout.numel(), gate_up.shape[-1] // 2, NUMBERS=NUMBERS, num_warps=WARPS
        )
        return dgate_up


def _check_dense(*tensors: Tensor) -> None:
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]


def norm(x: Tensor, other: Tensor | None, weight: Tensor, eps: float, skipped_of: int = 0) -> tuple[Tensor, Tensor]:
    """(x + other, that / rms(that) · weight) over the last dimension; without other, x itself comes first.

    x, other: contiguous. Differentiable in all three; the gradient that comes in by the first output is added in the same pass.
    skipped_of: x and other are [S, D], and of so many rows the first is left out of both outputs; 0: none is.
    Capture: safe.
    """
    _check_dense(x, weight, *([] if other is None else [other]))
    if skipped_of:
        assert x.dim() == 2 and other is not None and skipped_of > 1 and len(x) % skipped_of == 0, (x.shape, skipped_of)
    return _Norm.apply(x, other, weight, eps, skipped_of)


def norm_rotate(x_HSC: Tensor, weight_C: Tensor | None, table: tuple[Tensor, Tensor], eps: float) -> Tensor:
    """Normed and rotated heads [H, S, C], tokens first in memory; without a weight only rotated, and without a gradient.

    table: cos and sin [S, C], contiguous. Capture: safe.
    """
    assert weight_C is not None or not x_HSC.requires_grad, "without a norm there is no gradient"
    assert x_HSC.stride(2) == 1, "the last dimension must be contiguous"
    _check_dense(*table)
    return _NormRotate.apply(x_HSC, weight_C, *table, eps)


def heads_rotated(
    joined_SR: Tensor, q_weight_C: Tensor, k_weight_C: Tensor, table: tuple[Tensor, Tensor], eps: float, key_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [H, S, C], keys and values [G, S, C] of one matmul's output [S, (H + 2G) · C], queries and keys as norm_rotate.

    Capture: safe.
    """
    assert joined_SR.stride(1) == 1, "the last dimension must be contiguous"
    _check_dense(*table)
    return _HeadsRotated.apply(joined_SR, q_weight_C, k_weight_C, *table, eps, key_heads)


def gate(gate_up: Tensor) -> Tensor:
    """silu of the first half times the second half of the last dimension; contiguous. Capture: safe."""
    _check_dense(gate_up)
    assert gate_up.shape[-1] % 2 == 0, gate_up.shape
    return _Gate.apply(gate_up)
