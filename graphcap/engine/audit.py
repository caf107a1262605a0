"""The audit of a bucket's attention: a layer, at the bucket's real shape, against a dense float32 reference.

Blocks do not see each other, so a few sampled blocks can be computed densely and exactly: their outputs, the gradient of
their inputs, and, with no gradient coming in anywhere else, the whole gradient of the context's keys and values.

Calls: engine/step.py, before a bucket trains anything.
"""

import copy
import functools

import torch
from torch import Tensor

from graphcap.errors import CaptureError
from graphcap.kernels import written_out
from graphcap.model.attention import DenseAttention, joined
from graphcap.model.blocks import Blocks, Visibility
from graphcap.model.drafter import Layer

NUM_SAMPLED = 64
REFERENCE_BLOCKS = 2  # sampled blocks that are in the reference's memory at a time
TOLERANCE = 0.05  # of a block's or tensor's norm: bf16 stays under 0.02, one key too many is far above in short contexts


def audit_attention(layer: Layer, blocks: Blocks, table_Q, context, attend, *, bucket_name: str, scale: float) -> None:
    """Compare `layer`, as those in the middle train, with a dense float32 copy of it on sampled blocks.

    The first differs before its attention only, and the last behind it. table_Q: rotary table of the blocks. context: keys
    and values [G, T, C]. attend: the attention that training hands to the layer. All of them laid out in memory as in training.
    Raises: CaptureError naming bucket and quantity, with the largest relative error.
    """
    device, group = table_Q[0].device, blocks.visibility.group
    sampled_R = _sample(blocks)
    token_M = _tokens(sampled_R, group)
    x, k, v = (tensor.detach().requires_grad_() for tensor in (_states(layer, blocks), *context))
    generator = torch.Generator(device).manual_seed(1)
    incoming_MD = torch.randn(token_M.numel(), x.shape[1], generator=generator, device=device)

    out = torch.add(*layer(x, None, table_Q, (k, v), attend, group))
    gradient = torch.zeros_like(out).index_copy_(0, token_M, incoming_MD.to(out.dtype))
    dx, dk, dv = torch.autograd.grad(out, (x, k, v), gradient)

    out32, dx32, dk32, dv32 = _reference(layer, x, table_Q, (k, v), blocks.visibility, sampled_R, incoming_MD, scale)
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
                cause="the attention kernel is wrong on this card",
                fix="report this with the versions it printed; another version of torch brings another compiler of kernels",
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
    shape = blocks.position_Q.numel(), weight.shape[1]
    return torch.randn(shape, generator=generator, device=weight.device).to(weight.dtype)


def _tokens(block_R: Tensor, group: int) -> Tensor:
    """Places of the tokens of these blocks among all block tokens."""
    return (block_R[:, None] * group + torch.arange(group, device=block_R.device)).flatten()


def _reference(layer: Layer, x_QD, table_Q, context, visibility: Visibility, sampled_R, incoming_MD, scale: float):
    """The layer in float32 with dense attention on the sampled blocks, a few at a time: output and the three gradients."""
    exact = copy.deepcopy(layer).float()
    k, v = (tensor.detach().float().requires_grad_() for tensor in context)
    outputs, gradients, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    group, size = visibility.group, REFERENCE_BLOCKS
    for block_R, incoming in zip(sampled_R.split(size), incoming_MD.split(size * group), strict=True):
        token_M = _tokens(block_R, group)
        x = x_QD[token_M].detach().float().requires_grad_()
        few = Visibility(visibility.low_R[block_R], visibility.high_R[block_R], group, visibility.num_context)
        mask = DenseAttention().mask(few, len(x))
        table_M = tuple(part[token_M].float() for part in table_Q)
        attend = functools.partial(_dense, mask_QS=mask, scale=scale)
        with written_out():  # no kernel checks itself
            out = torch.add(*exact(x, None, table_M, (k, v), attend, group))
        dx, part_k, part_v = torch.autograd.grad(out, (x, k, v), incoming)
        outputs.append(out.detach())
        gradients.append(dx)
        dk, dv = dk + part_k, dv + part_v
    return torch.cat(outputs), torch.cat(gradients), dk, dv


def _dense(q_HQC: Tensor, context, blocks, mask_QS: Tensor, scale: float) -> Tensor:
    """Attention written out, so that no kernel of attention checks another."""
    k_GSC, v_GSC = joined(context, blocks)
    repeat = q_HQC.shape[0] // k_GSC.shape[0]
    k_HSC, v_HSC = k_GSC.repeat_interleave(repeat, 0), v_GSC.repeat_interleave(repeat, 0)
    scores = (q_HQC @ k_HSC.transpose(1, 2) * scale).masked_fill(~mask_QS, float("-inf"))
    return scores.softmax(dim=-1) @ v_HSC


def _largest_relative(got: Tensor, expected: Tensor) -> float:
    """The largest ‖got - expected‖ / ‖expected‖ over the first dimension; nan counts as infinite."""
    got, expected = got.detach().float(), expected.detach()
    difference = (got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1).clamp(min=1e-6)
    return float(torch.nan_to_num(difference, nan=float("inf")).max())
