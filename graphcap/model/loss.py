"""Head and loss in one: logits exist only for a chunk of draft tokens, and their gradient is made where they are.

Chunk by chunk: the logits, the losses, over the logits their gradient and, where asked, the gradient of the hidden states. So
nothing of size tokens × vocabulary is kept and the head's matmul is never done twice. Slot 0 of a block is
never sent here.

Calls: engine/step.py.
"""

import math

import torch
from torch import Tensor

from graphcap import kernels

LOGITS_BYTES = 768 << 20  # of one chunk, or a sixteenth more: fewer, larger chunks keep a GPU busier
ALIGNED = 16  # a chunk's labels begin where their addresses are as round as those of the first: one kernel serves all


def default_chunk(vocab_size: int, itemsize: int) -> int:
    """Draft tokens of a chunk: the largest power of two whose logits take no more than LOGITS_BYTES; at least one.

    itemsize: bytes of a logit.
    """
    return 1 << max(1, LOGITS_BYTES // (vocab_size * itemsize)).bit_length() - 1


def chunk_of(num_tokens: int, chunk_tokens: int) -> int:
    """Draft tokens of each chunk of so many: alike but for the last, and a sixteenth over chunk_tokens at most.

    A short chunk at the end would take a GPU nearly as long as a whole one.
    """
    limit = chunk_tokens + chunk_tokens // 16
    even = math.ceil(num_tokens / max(1, math.ceil(num_tokens / limit)))
    rounded = math.ceil(even / ALIGNED) * ALIGNED
    return max(1, rounded if rounded <= limit else even)


@torch.no_grad()
def head_loss(
    hidden_MD: Tensor, head_VD: Tensor, label_M: Tensor, weight_M: Tensor, *, chunk_tokens: int, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Weighted sum of cross-entropies, which predictions are right, and the sum's gradient in the hidden states.

    hidden_MD: [M, D] in the head's dtype. head_VD: [V, D], frozen. label_M: int64 [M]. weight_M: float32 [M]. chunk_tokens: see
    `chunk_of`. Returns float32 [], bool [M] (the largest logit is the label's) and, with_gradient, [M, D] in the head's dtype,
    which `torch.autograd.grad(hidden, …, gradient)` takes on: nothing here is known to autograd. Logits are taken to float32
    before the softmax. Capture: safe.
    """
    gradient_MD = torch.empty_like(hidden_MD) if with_gradient else None
    loss_M = torch.empty_like(weight_M)
    correct_M = torch.empty_like(label_M, dtype=torch.bool)
    num_tokens = hidden_MD.shape[0]
    chunk = chunk_of(num_tokens, chunk_tokens)
    logits_CV = hidden_MD.new_empty(min(chunk, num_tokens), head_VD.shape[0])
    for first in range(0, num_tokens, chunk):
        part = slice(first, first + chunk)
        logits_MV = torch.mm(hidden_MD[part], head_VD.T, out=logits_CV[: hidden_MD[part].shape[0]])
        chunk_loss_(logits_MV, label_M[part], weight_M[part], loss_M[part], correct_M[part])
        if with_gradient:
            torch.mm(logits_MV, head_VD, out=gradient_MD[part])
    return loss_M.sum(), correct_M, gradient_MD


def chunk_loss(logits_MV: Tensor, label_M: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one chunk: weighted losses float32 [M], right predictions bool [M], and the gradient of the logits in their dtype."""
    logits = logits_MV.float()
    label = label_M[:, None]
    log_sum = logits.logsumexp(dim=1, keepdim=True)
    loss_M = (log_sum - logits.gather(1, label))[:, 0] * weight_M
    is_label = torch.arange(logits.shape[1], device=logits.device) == label
    gradient = (torch.exp(logits - log_sum) - is_label.float()) * weight_M[:, None]
    return loss_M, logits.argmax(dim=1) == label_M, gradient.to(logits_MV.dtype)


def chunk_loss_(logits_MV: Tensor, label_M: Tensor, weight_M: Tensor, loss_M: Tensor, correct_M: Tensor) -> None:
    """The same into loss_M and correct_M; the logits become their own gradient. On CUDA by our kernel."""
    if kernels.serve(logits_MV.device):
        from graphcap.kernels import loss

        loss.chunk_loss_(logits_MV, label_M, weight_M, loss_M, correct_M)
        return
    losses, correct, gradient = chunk_loss(logits_MV, label_M, weight_M)
    loss_M.copy_(losses)
    correct_M.copy_(correct)
    logits_MV.copy_(gradient)
