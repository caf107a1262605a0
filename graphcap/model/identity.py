"""Which target this is: its name, the commit of a Hub name, and a fingerprint of its weights.

Runs and exports carry it; a resume refuses another target, a warm start and `eval` say so. Two loads of the same weights in
other dtypes are the same target.

Calls: build.py, eval.py, extract.py, model/ends.py, ops/export.py.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

SAMPLES = 256  # elements of each parameter that the fingerprint is of


@dataclass(frozen=True)
class Identity:
    """A target. name: a Hub name, or a folder's own name without the path to it. commit: of a Hub name, else empty."""

    name: str
    commit: str
    fingerprint: str

    def __str__(self) -> str:
        commit = f" at {self.commit[:12]}" if self.commit else ""
        return f"{self.name}{commit}, fingerprint {self.fingerprint}"


def identity_of(model: nn.Module, path: str) -> Identity:
    """The identity of a model of transformers that was loaded from `path`, a folder or a Hub name."""
    name = Path(path).resolve().name if Path(path).is_dir() else path
    return Identity(name, _commit_of(model), fingerprint(model))


def _commit_of(model: nn.Module) -> str:
    """The commit that transformers resolved a Hub name to. A private name, read in transformers 5.17 and 5.24."""
    return getattr(model.config, "_commit_hash", None) or ""


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """16 hex digits of a SHA-256 over names, shapes and evenly spaced elements of every parameter, rounded to bfloat16.

    The rounding makes it the same for every dtype the weights are loaded in; a training step on the target changes it.
    """
    parameters = dict(model.named_parameters())
    return fingerprint_by(model, lambda name, place: parameters[name].reshape(-1)[place.to(parameters[name].device)].cpu())


@torch.no_grad()
def fingerprint_by(model: nn.Module, elements: Callable[[str, Tensor], Tensor]) -> str:
    """The same of a model whose tensors lie elsewhere. elements(name, places): those of a flattened parameter, int64 places."""
    hashed = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        hashed.update(f"{name} {list(parameter.shape)}".encode())
        place = torch.linspace(0, parameter.numel() - 1, min(SAMPLES, parameter.numel()), dtype=torch.float64).long()
        hashed.update(elements(name, place).to(torch.bfloat16).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:16]
