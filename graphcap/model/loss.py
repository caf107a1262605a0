"""Head and loss in one: logits exist only for a chunk of draft tokens, and their gradient is made where they are.

The forward computes, chunk by chunk, the logits, the loss, the gradient of the logits and the gradient of the hidden
states, so nothing of size tokens × vocabulary is kept and the head's matmul is never done twice. Slot 0 of a block is
never sent here.

Calls: engine/step.py.
"""

import functools

import torch
from torch import Tensor


def head_loss(
    hidden_MD: Tensor, head_VD: Tensor, label_M: Tensor, weight_M: Tensor, *, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies, and which predictions are right.

    hidden_MD: [M, D] in the head's dtype. head_VD: [V, D], frozen. label_M: int64 [M]. weight_M: float32 [M].
    Returns the loss sum, float32 [], differentiable in the hidden states, and bool [M]: the largest logit is the label's.
    Logits are taken to float32 before the softmax. Capture: safe.
    """
    return _HeadLoss.apply(hidden_MD, head_VD, label_M, weight_M, chunk_tokens)


def chunk_loss(logits_MV: Tensor, label_M: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one chunk: weighted losses float32 [M], right predictions bool [M], and the gradient of the logits in their dtype."""
    logits = logits_MV.float()
    label = label_M[:, None]
    log_sum = logits.logsumexp(dim=1, keepdim=True)
    loss_M = (log_sum - logits.gather(1, label))[:, 0] * weight_M
    is_label = torch.arange(logits.shape[1], device=logits.device) == label
    gradient = (torch.exp(logits - log_sum) - is_label.float()) * weight_M[:, None]
    return loss_M, logits.argmax(dim=1) == label_M, gradient.to(logits_MV.dtype)


@functools.cache
def _chunk_loss_for(device_type: str):
    """On CUDA compiled into few passes over the logits, once for chunks of any length; the same function elsewhere."""
    if device_type != "cuda":
        return chunk_loss
    compiled = torch.compile(chunk_loss, fullgraph=True)

    def of_chunk(logits_MV: Tensor, label_M: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for tensor in (logits_MV, label_M, weight_M):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(logits_MV, label_M, weight_M)

    return of_chunk


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_MD, head_VD, label_M, weight_M, chunk_tokens):
        needs_gradient = ctx.needs_input_grad[0]
        gradient_MD = torch.empty_like(hidden_MD) if needs_gradient else None
        loss_M = torch.empty_like(weight_M)
        correct_M = torch.empty_like(label_M, dtype=torch.bool)
        of_chunk = _chunk_loss_for(hidden_MD.device.type)
        for first in range(0, hidden_MD.shape[0], chunk_tokens):
            part = slice(first, first + chunk_tokens)
            loss_M[part], correct_M[part], gradient = of_chunk(hidden_MD[part] @ head_VD.T, label_M[part], weight_M[part])
            if needs_gradient:
                torch.mm(gradient, head_VD, out=gradient_MD[part])
            del gradient  # before the next chunk's logits: two tensors of their size are enough
        ctx.save_for_backward(*([gradient_MD] if needs_gradient else []))
        ctx.mark_non_differentiable(correct_M)
        return loss_M.sum(), correct_M

    @staticmethod
    def backward(ctx, upstream, _):
        (gradient_MD,) = ctx.saved_tensors
        return gradient_MD * upstream.to(gradient_MD.dtype), None, None, None, None
