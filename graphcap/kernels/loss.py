"""Cross-entropy of a chunk of logits in Triton: loss, rightness and the logits' gradient, in place.

A program has one row: it reads it once for the softmax's sum and the comparison with the label, and once more to write the
gradient over it. Sums are float32; two runs give the same bits.

Called by model/loss.py on CUDA. Needs triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 4096, 8  # of a row at once
LOWEST = tl.constexpr(-1.0e30)  # what a column past the last counts as
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def _columns(logits, start, num_columns, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr):
    """Logits from a column on, float32 [COLUMNS]; LOWEST past the last, unless all are WHOLE. KEEP: they are read again."""
    POLICY: tl.constexpr = "evict_last" if KEEP else "evict_first"
    column = start + tl.arange(0, COLUMNS)
    if WHOLE:
        x = tl.load(logits + column, eviction_policy=POLICY)
    else:
        x = tl.load(logits + column, mask=column < num_columns, other=LOWEST, eviction_policy=POLICY)
    return x.to(tl.float32)


@triton.jit
def _sum(
    total_C, most, beaten, logits, start, target, of_label, num_columns, COLUMNS: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Sums of exponentials, the largest logit and whether one beats the label's, continued over COLUMNS more.

    The first of equals is the prediction; equals in the label's own columns are left to the caller.
    """
    x = _columns(logits, start, num_columns, COLUMNS, WHOLE, True)
    highest = tl.max(x, 0)
    larger = tl.maximum(most, highest)
    total_C = total_C * tl.exp2((most - larger) * LOG2_E) + tl.exp2(x * LOG2_E - larger * LOG2_E)
    beaten |= ((highest > of_label) | ((highest == of_label) & (start + COLUMNS <= target))).to(tl.int32)
    return total_C, larger, beaten


@triton.jit
def _put_softmax(logits, start, shift, num_columns, COLUMNS: tl.constexpr, WHOLE: tl.constexpr):
    x = _columns(logits, start, num_columns, COLUMNS, WHOLE, False)
    share = tl.exp2(x * LOG2_E - shift).to(logits.dtype.element_ty)
    column = start + tl.arange(0, COLUMNS)
    if WHOLE:
        tl.store(logits + column, share, eviction_policy="evict_first")
    else:
        tl.store(logits + column, share, mask=column < num_columns, eviction_policy="evict_first")


@triton.jit
def loss_kernel(logits, label, weight, loss, correct, num_columns, row_stride, COLUMNS: tl.constexpr):
    """One row: loss [M] float32, correct [M] int8, logits [M, V] become weight · (softmax - one at the label).

    Instructions bound it as much as memory, so a logit costs few: exponents are base 2 and shifted by the largest logit of a
    run of columns, what is compared with the label's is that largest one, no column but the last ones is masked, and the
    label's own gradient is written last.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    target = tl.load(label + row).to(tl.int32)
    of_label = tl.load(logits + target).to(tl.float32)
    weight_ = tl.load(weight + row)
    most, beaten = tl.maximum(of_label, LOWEST), tl.zeros([], tl.int32)
    total_C = tl.zeros([COLUMNS], tl.float32)
    whole = num_columns // COLUMNS * COLUMNS
    for start in tl.range(0, whole, COLUMNS):
        total_C, most, beaten = _sum(total_C, most, beaten, logits, start, target, of_label, num_columns, COLUMNS, True)
    if whole < num_columns:
        total_C, most, beaten = _sum(total_C, most, beaten, logits, whole, target, of_label, num_columns, COLUMNS, False)
    own = target // COLUMNS * COLUMNS  # of the label's own columns those before it
    before_C = _columns(logits, own, target, COLUMNS, False, True)
    beaten |= tl.max((before_C == of_label).to(tl.int32), 0)
    total = tl.sum(total_C, 0)  # not a number where any logit is none
    log_sum = most * LOG2_E + tl.log2(total)
    tl.store(loss + row, (log_sum * LN_2 - of_label) * weight_)
    tl.store(correct + row, ((beaten == 0) & (total == total)).to(tl.int8))
    shift = log_sum - tl.log2(weight_)  # infinite where the weight is 0
    if whole < num_columns:
        _put_softmax(logits, whole, shift, num_columns, COLUMNS, False)
    for back in tl.range(COLUMNS, whole + COLUMNS, COLUMNS):  # from the end on: what was read last is still in the cache
        _put_softmax(logits, whole - back, shift, num_columns, COLUMNS, True)
    tl.debug_barrier()  # after whichever thread wrote this column
    tl.store(logits + target, (tl.exp2(of_label * LOG2_E - shift) - weight_).to(logits.dtype.element_ty))


def chunk_loss_(logits_MV: Tensor, label_M: Tensor, weight_M: Tensor, loss_M: Tensor, correct_M: Tensor) -> None:
    """Fill loss_M (float32 [M], weighted) and correct_M (bool [M]); logits_MV [M, V] become their own gradient.

    label_M: int64 [M]. weight_M: float32 [M], none negative. Logits beyond ±1e30 are not told apart. Capture: safe.
    """
    num_rows, num_columns = logits_MV.shape
    assert logits_MV.stride(1) == 1 and all(x.is_contiguous() for x in (label_M, weight_M, loss_M, correct_M))
    loss_kernel[(num_rows,)](
        logits_MV, label_M, weight_M, loss_M, correct_M.view(torch.int8), num_columns, logits_MV.stride(0),
        COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
