"""Cross-entropy of a chunk of logits in Triton: loss, rightness and the logits' gradient, in place.

A program has one row: it reads it once for the softmax's sum and the comparison with the label, and once more to write the
gradient over it. Sums are float32; two runs give the same bits.

Called by model/loss.py on CUDA. Needs triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 4096, 4  # of a row at once
LOWEST = tl.constexpr(-1.0e30)  # what a column past the last counts as
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit
def loss_kernel(logits, label, weight, loss, correct, num_columns, row_stride, COLUMNS: tl.constexpr):
    """One row: loss [M] float32, correct [M] int8, logits [M, V] become weight · (softmax - one at the label).

    Instructions bound it, not memory, so a logit costs few: exponents are base 2 and shifted by the largest logit of a run of
    columns, and what is compared with the label's is that largest one.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    target = tl.load(label + row).to(tl.int32)
    of_label = tl.load(logits + target).to(tl.float32)
    share = tl.load(weight + row)
    lane = tl.arange(0, COLUMNS)
    most, beaten = tl.maximum(of_label, LOWEST), tl.zeros([], tl.int32)
    total_C = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, num_columns, COLUMNS):
        column = start + lane
        x = tl.load(logits + column, mask=column < num_columns, other=LOWEST).to(tl.float32)
        highest = tl.max(x, 0)
        larger = tl.maximum(most, highest)
        total_C = total_C * tl.exp2((most - larger) * LOG2_E) + tl.exp2(x * LOG2_E - larger * LOG2_E)
        most = larger
        if start + COLUMNS <= target:  # the first of equals is the prediction
            beaten |= (highest >= of_label).to(tl.int32)
        elif start > target:
            beaten |= (highest > of_label).to(tl.int32)
        else:
            before = (x > of_label) | ((x == of_label) & (column < target))
            beaten |= tl.max(before.to(tl.int32), 0)
    total = tl.sum(total_C, 0)  # not a number where any logit is none
    log_sum = most * LOG2_E + tl.log2(total)
    tl.store(loss + row, (log_sum * LN_2 - of_label) * share)
    tl.store(correct + row, ((beaten == 0) & (total == total)).to(tl.int8))
    shift = log_sum - tl.log2(share)  # infinite where the weight is 0
    last = (num_columns - 1) // COLUMNS * COLUMNS
    for back in tl.range(0, num_columns, COLUMNS):  # from the end on: what was read last is still in the cache
        column = last - back + lane
        x = tl.load(logits + column, mask=column < num_columns, other=LOWEST).to(tl.float32)
        gradient = tl.exp2(x * LOG2_E - shift) - tl.where(column == target, share, 0.0)
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < num_columns)


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
