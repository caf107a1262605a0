"""Flat state and the update: fp32 masters, moments and gradients as one tensor each, the learning rate on the device.

Every tensor that outlives a step lives here, is made once and never moves; loading copies into it. No Optimizer object
owns state: the update is AdamW over the flat tensors, by our kernel on CUDA, elsewhere by torch's in its functional form.

Calls: engine/step.py. Source of the update's order: DESIGN's way of the data; of AdamW: torch.optim.adamw.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from graphcap import kernels

ALIGNMENT_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """What the update needs of a recipe. learning_rate is the highest; the schedule is cosine to zero after a linear rise."""

    learning_rate: float
    warmup_fraction: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    num_updates: int


class FlatState:
    """The drafter's parameters and their optimizer state as flat tensors.

    `weights` [P'] in the compute dtype backs every parameter; `master`, `exp_avg`, `exp_avg_sq` [P'] and `sums` are
    float32. `sums` is [gradients | statistics], so that one all-reduce carries both. P' counts padding: every parameter's
    view starts at a multiple of 128 bytes of float32, and the padding stays zero.
    """

    def __init__(self, module: nn.Module, *, num_statistics: int, dtype: torch.dtype, device: torch.device) -> None:
        self.names = [name for name, _ in module.named_parameters()]
        parameters = list(module.parameters())
        places, size = _places([parameter.numel() for parameter in parameters])
        self.weights = torch.zeros(size, dtype=dtype, device=device)
        self.master = torch.zeros(size, dtype=torch.float32, device=device)
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.adam_step = torch.zeros((), dtype=torch.float32, device=device)  # updates applied, skipped ones left out
        self.counter = torch.zeros((), dtype=torch.int64, device=device)  # updates made, skipped ones counted
        self.sums = torch.zeros(size + num_statistics, dtype=torch.float32, device=device)
        self.gradients, self.statistics = self.sums[:size], self.sums[size:]
        self.norms_P = torch.zeros(len(parameters), dtype=torch.float32, device=device)  # of the last update's summed gradients
        self.parameters, self.places = parameters, [place.start for place in places]
        self.gradient_views = [self.gradients[p].view(parameter.shape) for p, parameter in zip(places, parameters, strict=True)]
        self.master_views = [self.master[p].view(parameter.shape) for p, parameter in zip(places, parameters, strict=True)]
        self._initial = [parameter.detach().to("cpu", torch.float32, copy=True) for parameter in parameters]
        for part, parameter in zip(places, parameters, strict=True):
            parameter.data = self.weights[part].view(parameter.shape)
        self.begin()

    def begin(self) -> None:
        """Bring every tensor, in place, to where training begins: the parameters the module came with, no moments."""
        for tensor in self.tensors().values():
            tensor.zero_()
        for master, initial in zip(self.master_views, self._initial, strict=True):
            master.copy_(initial)
        self.weights.copy_(self.master)
        self.sums.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """Everything a resume needs, by name; the tensors themselves, not copies."""
        return {
            "master": self.master,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
            "adam_step": self.adam_step,
            "counter": self.counter,
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Copy a saved state into place; no address changes. tensors: as `tensors()` gave them."""
        for name, tensor in self.tensors().items():
            saved = tensors[name]
            assert saved.shape == tensor.shape and saved.dtype == tensor.dtype, f"{name}: {saved.shape} {saved.dtype}"
            tensor.copy_(saved)
        self.weights.copy_(self.master)
        self.sums.zero_()

    @torch.no_grad()
    def accumulate(self, gradients: tuple[Tensor, ...]) -> None:
        """Add one micro step's gradients, in the compute dtype, to the float32 sums. Capture: safe."""
        if kernels.serve(self.sums.device):
            from graphcap.kernels import update

            update.add_(self.gradients, gradients, self.places)
        else:
            torch._foreach_add_(self.gradient_views, list(gradients))


def _places(sizes: list[int]) -> tuple[list[slice], int]:
    """Where each parameter lies in a flat float32 tensor, each start a multiple of ALIGNMENT_BYTES, and the total size."""
    step = ALIGNMENT_BYTES // 4
    places, start = [], 0
    for size in sizes:
        places.append(slice(start, start + size))
        start += math.ceil(size / step) * step
    return places, start


def learning_rate(counter: Tensor, hyper: Hyper) -> Tensor:
    """Learning rate of update `counter` (0-based): float32 []. Linear rise, then cosine to zero at the last update.

    Computed on the device in float64 from the counter, so that a resume needs nothing but the counter. Capture: safe.
    """
    update = counter.double() + 1
    warmup = max(1, round(hyper.warmup_fraction * hyper.num_updates))
    rise = (update / warmup).clamp(max=1.0)
    fall = ((update - warmup) / max(1, hyper.num_updates - warmup)).clamp(0.0, 1.0)
    return (hyper.learning_rate * rise * 0.5 * (1 + torch.cos(math.pi * fall))).float()


@torch.no_grad()
def apply_update(state: FlatState, weight_sum: Tensor, hyper: Hyper) -> dict[str, Tensor]:
    """One AdamW update from the accumulated gradients; then gradients and statistics are zeroed and the counter moves on.

    weight_sum: float32 [], W over all rows and ranks. Gradients are of the loss *sum*; the update is of the mean, sum / W.
    Where W is 0 or the norm is not finite nothing is applied (the learning rate's counter still moves on).
    Returns float32 [] tensors: grad_norm (of the mean's gradient, before clipping), learning_rate, empty, skipped.
    Capture: safe; no host read.
    """
    state.norms_P.copy_(torch.stack(torch._foreach_norm(state.gradient_views)))
    norm = torch.linalg.vector_norm(state.norms_P) / weight_sum
    empty = weight_sum == 0
    not_finite = ~torch.isfinite(norm)
    clip = (hyper.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    rate = learning_rate(state.counter, hyper)
    _adamw(state, hyper, rate=rate, grad_scale=weight_sum / clip, found_inf=(empty | not_finite).float())
    state.statistics.zero_()
    state.counter.add_(1)
    return {"grad_norm": norm, "learning_rate": rate, "empty": empty.float(), "skipped": (not_finite & ~empty).float()}


def _adamw(state: FlatState, hyper: Hyper, *, rate: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
    """AdamW on the mean's gradient, masters into weights, gradients to zero; on CUDA in one pass by our kernel."""
    rates = {"beta1": hyper.beta1, "beta2": hyper.beta2, "eps": hyper.eps, "weight_decay": hyper.weight_decay}
    scalars = {"grad_scale": grad_scale, "found_inf": found_inf}
    if kernels.serve(state.master.device):
        from graphcap.kernels import update

        moments = state.exp_avg, state.exp_avg_sq
        update.adamw_(state.master, *moments, state.gradients, state.weights, state.adam_step, rate=rate, **scalars, **rates)
        return
    from torch.optim.adamw import adamw

    lists = [state.master], [state.gradients], [state.exp_avg], [state.exp_avg_sq], [], [state.adam_step]
    how = {"foreach": False, "fused": True, "capturable": True, "amsgrad": False, "maximize": False}
    adamw(*lists, **how, lr=rate, **scalars, **rates)
    state.weights.copy_(state.master)
    state.gradients.zero_()
