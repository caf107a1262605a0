"""The two passes of an update over flat state, in Triton: gradients added to the sums, and AdamW with everything around it.

Called by engine/optimizer.py on CUDA. Needs triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS, WARPS = 2048, 8  # of a program
TENSORS_AT_ONCE = 16


@triton.jit
def add_kernel(sums, gradients, places, sizes, NUMBERS: tl.constexpr):
    """sums[place + i] += gradient[i] of each of a few tensors; the second grid dimension says which."""
    offset = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    for number in tl.static_range(len(gradients)):
        if tl.program_id(1) == number:
            known = offset < sizes[number]
            at = sums + places[number] + offset
            tl.store(at, tl.load(at, mask=known) + tl.load(gradients[number] + offset, mask=known).to(tl.float32), mask=known)


def add_(sums: Tensor, gradients: tuple[Tensor, ...], places: list[int]) -> None:
    """Add each gradient, of any float dtype, to the float32 numbers of `sums` that begin at its place. Capture: safe."""
    order = sorted(range(len(gradients)), key=lambda number: -gradients[number].numel())  # near in size go together
    for first in range(0, len(order), TENSORS_AT_ONCE):
        some = order[first : first + TENSORS_AT_ONCE]
        parts = tuple(gradients[number].contiguous() for number in some)
        sizes = tuple(part.numel() for part in parts)
        add_kernel[triton.cdiv(max(sizes), NUMBERS), len(some)](
            sums, parts, tuple(places[number] for number in some), sizes, NUMBERS=NUMBERS, num_warps=WARPS
        )


@triton.jit
def adamw_kernel(
    master, exp_avg, exp_avg_sq, gradients, weights, rate, grad_scale, found_inf, correction1, correction2, size,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, WEIGHT_DECAY: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """One AdamW update; where found_inf is not 0, only the gradients become zero."""
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    known = place < size
    if tl.load(found_inf) == 0:
        lr = tl.load(rate)
        g = tl.load(gradients + place, mask=known) / tl.load(grad_scale)
        p = tl.load(master + place, mask=known)
        m = tl.load(exp_avg + place, mask=known)
        v = tl.load(exp_avg_sq + place, mask=known)
        p -= lr * WEIGHT_DECAY * p
        m += (1 - BETA1) * (g - m)
        v = BETA2 * v + (1 - BETA2) * g * g
        rooted = tl.sqrt(v) / tl.sqrt(tl.load(correction2)).to(tl.float32)
        p -= lr / tl.load(correction1).to(tl.float32) * m / (rooted + EPS)
        tl.store(master + place, p, mask=known)
        tl.store(exp_avg + place, m, mask=known)
        tl.store(exp_avg_sq + place, v, mask=known)
        tl.store(weights + place, p.to(weights.dtype.element_ty), mask=known)
    tl.store(gradients + place, tl.zeros([NUMBERS], tl.float32), mask=known)


def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradients: Tensor,
    weights: Tensor,
    adam_step: Tensor,
    *,
    rate: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """AdamW with the gradients / grad_scale: `weights` follow the float32 master, the gradients become zero.

    All [P], float32 but for the weights; rate, grad_scale, found_inf: float32 []; adam_step: float32 [], updates applied, one
    more afterwards. Where found_inf is 1 only the gradients change. Capture: safe.
    Source of the formula: torch.optim.adamw, fused.
    """
    adam_step += 1 - found_inf
    step = adam_step.double()
    correction1, correction2 = 1 - torch.pow(beta1, step), 1 - torch.pow(beta2, step)
    adamw_kernel[(triton.cdiv(master.numel(), NUMBERS),)](
        master, exp_avg, exp_avg_sq, gradients, weights, rate, grad_scale, found_inf, correction1, correction2, master.numel(),
        BETA1=beta1, BETA2=beta2, EPS=eps, WEIGHT_DECAY=weight_decay, NUMBERS=NUMBERS, num_warps=WARPS,
    )  # fmt: skip
