"""Cross-entropy of a chunk of logits in Triton: loss, rightness and the logits' gradient, in place.

A program has one row: it reads it once for the softmax's sum and the comparison with the label, and once more to write the
gradient over it. Sums are float32; two runs give the same bits.

Called by model/loss.py on CUDA. Needs triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 2048, 8  # of a row at once
LOWEST = tl.constexpr(-1.0e30)  # below every logit


@triton.jit
def loss_kernel(logits, label, weight, loss, correct, num_columns, row_stride, COLUMNS: tl.constexpr):
    """One row: loss [M] float32, correct [M] int8, logits [M, V] become weight · (softmax - one at the label)."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    target = tl.load(label + row).to(tl.int32)
    of_label = tl.load(logits + target).to(tl.float32)
    share = tl.load(weight + row)
    lane = tl.arange(0, COLUMNS)
    most_C = tl.full([COLUMNS], LOWEST, tl.float32)
    total_C = tl.zeros([COLUMNS], tl.float32)
    beaten_C = tl.zeros([COLUMNS], tl.int32)
    for start in tl.range(0, num_columns, COLUMNS):  # each lane has a softmax of its own, so that nothing waits inside
        column = start + lane
        x = tl.load(logits + column, mask=column < num_columns, other=LOWEST).to(tl.float32)
        shrink = tl.exp(-tl.abs(x - most_C))
        total_C = tl.where(x > most_C, total_C * shrink + 1.0, total_C + shrink)
        most_C = tl.maximum(most_C, x)
        before = (x > of_label) | ((x == of_label) & (column < target)) | (x != x)  # the first of equals is the prediction
        beaten_C |= before.to(tl.int32)
    most = tl.max(most_C, 0)
    total = tl.sum(total_C * tl.exp(most_C - most), 0)
    beaten = tl.sum(beaten_C, 0)
    log_sum = most + tl.log(total)
    tl.store(loss + row, (log_sum - of_label) * share)
    tl.store(correct + row, (beaten == 0).to(tl.int8))
    last = (num_columns - 1) // COLUMNS * COLUMNS
    for back in tl.range(0, num_columns, COLUMNS):  # from the end on: what was read last is still in the cache
        column = last - back + lane
        x = tl.load(logits + column, mask=column < num_columns, other=LOWEST).to(tl.float32)
        gradient = (tl.exp(x - log_sum) - (column == target).to(tl.float32)) * share
        tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < num_columns)


def chunk_loss_(logits_MV: Tensor, label_M: Tensor, weight_M: Tensor, loss_M: Tensor, correct_M: Tensor) -> None:
    """Fill loss_M (float32 [M], weighted) and correct_M (bool [M]); logits_MV [M, V] become their own gradient.

    label_M: int64 [M]. weight_M: float32 [M]. Capture: safe.
    """
    num_rows, num_columns = logits_MV.shape
    assert logits_MV.stride(1) == 1 and all(x.is_contiguous() for x in (label_M, weight_M, loss_M, correct_M))
    loss_kernel[(num_rows,)](
        logits_MV, label_M, weight_M, loss_M, correct_M.view(torch.int8), num_columns, logits_MV.stride(0),
        COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
