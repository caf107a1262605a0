"""Which target this is: its name, the commit of a Hub name, and a fingerprint of its weights.

Runs and exports carry it; a resume refuses another target, a warm start and `eval` say so. Two loads of the same weights in
other dtypes are the same target.

Called by build.py, train.py, eval.py, export.py, extract.py, model/ends.py and ops/export.py.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

CHUNK = 2**22  # elements of a parameter that are widened to int64 at once
# What a config says beside the parameters' shapes about the mathematics. A name that a family does not have counts as null.
CONFIG_KEYS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "rms_norm_eps"),
    *("rope_parameters", "partial_rotary_factor", "layer_types", "sliding_window", "use_sliding_window"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
)


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
    """The identity of a model of transformers that was loaded from `path`, a folder or a Hub name. Reads every parameter.

    Raises: nothing of its own; a parameter on the meta device has no elements to read.
    """
    name = Path(path).resolve().name if Path(path).is_dir() else path
    return Identity(name, _commit_of(model), fingerprint(model))


def _commit_of(model: nn.Module) -> str:
    """The commit that transformers resolved a Hub name to. A private name, read in transformers 5.17 and 5.24."""
    return getattr(model.config, "_commit_hash", None) or ""


def fingerprint(model: nn.Module) -> str:
    """16 hex digits of a SHA-256 over what the config computes with, and names, shapes and elements of every parameter.

    The elements are rounded to bfloat16, so that it is the same for every dtype and device the weights are loaded in. Of each
    parameter the sums of its rows and of its columns are hashed, of whole numbers, which are exact in any order: no element
    can change alone unseen, and it costs little more than reading the weights once.
    """
    return fingerprint_by(model, dict(model.named_parameters()).__getitem__)


@torch.no_grad()
def fingerprint_by(model: nn.Module, tensor_of: Callable[[str], Tensor]) -> str:
    """The same of a model whose tensors lie elsewhere. tensor_of(name): a parameter in any float dtype."""
    config = model.config.get_text_config()
    said = {name: getattr(config, name, None) for name in CONFIG_KEYS}
    hashed = hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        hashed.update(f"{name} {list(parameter.shape)}".encode())
        for sums in _sums(tensor_of(name)):
            hashed.update(sums.cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


def _sums(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int64 sums of the rows and of the columns of a tensor as [all other dimensions, last one], of its bfloat16 bits."""
    matrix = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    rows, columns = [], torch.zeros(matrix.shape[1], dtype=torch.int64, device=matrix.device)
    for part in matrix.split(max(1, CHUNK // max(1, matrix.shape[1]))):
        bits = part.to(torch.bfloat16).view(torch.int16).long()
        rows.append(bits.sum(dim=1))
        columns += bits.sum(dim=0)
    return torch.cat(rows), columns
