"""The audit of a bucket's attention: the compiled layer, at the bucket's real shape, against a dense float32 reference.

Blocks do not see each other, so a few sampled blocks can be computed densely and exactly: their outputs, the gradient of
their inputs, and, with no gradient coming in anywhere else, the whole gradient of the context's keys and values.

Calls: engine/step.py, before a bucket trains anything.
"""

import copy

import torch
from torch import Tensor

from graphcap.errors import CaptureError
from graphcap.model.attention import DenseAttention
from graphcap.model.blocks import Blocks, Visibility
from graphcap.model.drafter import Layer

NUM_SAMPLED = 64
TOLERANCE = 0.05  # of a block's or tensor's norm: bf16 stays under 0.02, one key too many is far above in short contexts


def audit_attention(layer: Layer, blocks: Blocks, table_Q, context, attend, *, bucket_name: str, scale: float) -> None:
    """Compare `layer`, as it is compiled and trained, with a dense float32 copy of it on sampled blocks.

    table_Q: rotary table of the blocks. context: keys and values [G, T, C]. attend: the attention that training hands to the
    layer. All of them laid out in memory as in training, so that the layer needs no compile of its own here.
    Raises: CaptureError naming bucket and quantity, with the largest relative error.
    """
    device, group = table_Q[0].device, blocks.visibility.group
    sampled_R = _sample(blocks)
    inputs = _states(layer, blocks), *context
    token_M = (sampled_R[:, None] * group + torch.arange(group, device=device)).flatten()
    incoming_MD = torch.randn(
        token_M.numel(), inputs[0].shape[1], generator=torch.Generator(device).manual_seed(1), device=device
    )

    x, k, v = (tensor.detach().requires_grad_() for tensor in inputs)
    out = layer(x, table_Q, (k, v), attend)
    gradient = torch.zeros_like(out).index_copy_(0, token_M, incoming_MD.to(out.dtype))
    dx, dk, dv = torch.autograd.grad(out, (x, k, v), gradient)

    x32, k32, v32 = (tensor.detach().float().requires_grad_() for tensor in (inputs[0][token_M], *inputs[1:]))
    out32 = _reference(
        layer, x32, (k32, v32), tuple(part[token_M].float() for part in table_Q), blocks.visibility, sampled_R, scale
    )
    dx32, dk32, dv32 = torch.autograd.grad(out32, (x32, k32, v32), incoming_MD)
    pairs = {
        "output": (out[token_M].unflatten(0, (-1, group)), out32.unflatten(0, (-1, group))),
        "gradient of the blocks": (dx[token_M].unflatten(0, (-1, group)), dx32.unflatten(0, (-1, group))),
        "gradient of the context's keys": (dk[None], dk32[None]),
        "gradient of the context's values": (dv[None], dv32[None]),
    }
    for quantity, (got, expected) in pairs.items():
        error = _largest_relative(got, expected)
        if not error <= TOLERANCE:
            raise CaptureError(
                "bucket",
                bucket_name,
                expected=f"attention's {quantity} within {TOLERANCE:.0%} of a dense reference",
                got=f"{error:.0%}",
                cause="the compiled attention kernel is wrong on this card",
                fix="update torch and the driver, and report this with the versions it printed",
            )


def _sample(blocks: Blocks) -> Tensor:
    """The first 16 used blocks, whose contexts are short, and others evenly over the row: int64 [≤ NUM_SAMPLED]."""
    used = blocks.keep_N.nonzero()[:, 0]
    spread = torch.linspace(0, used.numel() - 1, min(NUM_SAMPLED - 16, used.numel()), device=used.device).long()
    return torch.cat((used[:16], used[spread])).unique()


def _states(layer: Layer, blocks: Blocks) -> Tensor:
    """Random block states [Q, D]."""
    weight = layer.self_attn.q_proj.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    shape = blocks.token_ids_Q.numel(), weight.shape[1]
    return torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)


def _reference(layer: Layer, x_MD, context, table_M, visibility: Visibility, sampled_R, scale: float) -> Tensor:
    """The layer in float32 with dense attention, on the sampled blocks only."""
    exact = copy.deepcopy(layer).float()
    exact._compiled_call_impl = None
    few = Visibility(visibility.low_R[sampled_R], visibility.high_R[sampled_R], visibility.group, visibility.num_context)
    mask = DenseAttention().mask(few, x_MD.shape[0])
    return exact(x_MD, table_M, context, lambda q, k, v: _dense(q, k, v, mask, scale))


def _dense(q_HQC: Tensor, k_GSC: Tensor, v_GSC: Tensor, mask_QS: Tensor, scale: float) -> Tensor:
    """Attention written out, so that no kernel of attention checks another."""
    repeat = q_HQC.shape[0] // k_GSC.shape[0]
    k_HSC, v_HSC = k_GSC.repeat_interleave(repeat, 0), v_GSC.repeat_interleave(repeat, 0)
    scores = (q_HQC @ k_HSC.transpose(1, 2) * scale).masked_fill(~mask_QS, float("-inf"))
    return scores.softmax(dim=-1) @ v_HSC


def _largest_relative(got: Tensor, expected: Tensor) -> float:
    """The largest ‖got - expected‖ / ‖expected‖ over the first dimension; nan counts as infinite."""
    got, expected = got.detach().float(), expected.detach()
    difference = (got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1).clamp(min=1e-6)
    return float(torch.nan_to_num(difference, nan=float("inf")).max())
