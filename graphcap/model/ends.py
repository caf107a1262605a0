"""A target without its layers: its config and sizes, and of its weights only the embedding and the head.

A model of transformers on the meta device has names and shapes and no memory; the two tensors are then read from the
safetensors files by name. That is all that training from stored features needs, until it decodes at its end.

Called by build.py, extract.py, offline.py, eval.py and shapes.py. Loading the whole target: model/loading.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from graphcap.errors import ConfigError
from graphcap.model.identity import Identity, fingerprint_by
from graphcap.model.loading import load_config, no_target, reading

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class TargetEnds:
    """Embedding and head of a target, frozen, as engine/offline.py's step uses them; no features come from it."""

    def __init__(self, skeleton: nn.Module, files: "TargetFiles", target_layer_ids, *, dtype, device: torch.device) -> None:
        """skeleton: from `load_skeleton`; its embedding module is filled and moved to `device`.

        Raises: ConfigError if the files lack one of the two, or if the embedding keeps more than a weight.
        """
        self.embedding = skeleton.get_input_embeddings()
        head = skeleton.get_output_embeddings().weight
        tied = head is self.embedding.weight
        names = {id(tensor): name for name, tensor in skeleton.named_parameters()}
        read = {"embedding": files.read(names[id(self.embedding.weight)], self.embedding.weight.shape)}
        if not tied:
            read["head"] = files.read(names[id(head)], head.shape)
        buffers = dict(self.embedding.named_buffers())
        scale = getattr(self.embedding, "scalar_embed_scale", None)
        if set(buffers) - {"embed_scale"} or (buffers and scale is None):
            raise ConfigError(
                "target",
                files.path,
                expected="an embedding that is a table, scaled or not",
                got=f"{type(self.embedding).__name__} with {', '.join(buffers)}",
                fix='train with the whole target: features.path=""',
            )
        held = {name: nn.Parameter(weight.to(device=device, dtype=dtype), False) for name, weight in read.items()}
        self.embedding.weight = held["embedding"]
        if buffers:
            self.embedding.embed_scale = nn.Buffer(torch.tensor(scale, device=device), persistent=False)
        self.head_VD: Tensor = held["embedding" if tied else "head"].detach()
        self.target_layer_ids = tuple(target_layer_ids)
        self.hidden_size = self.head_VD.shape[1]
        self.model = nn.ParameterDict(held)  # what is in memory, for whoever counts it or watches its addresses

    @property
    def num_features(self) -> int:
        """F = L·D."""
        return len(self.target_layer_ids) * self.hidden_size

    def embed(self, token_ids_S: Tensor) -> Tensor:
        """Input embeddings [S, D] of token ids [S]."""
        return self.embedding(token_ids_S)


def load_skeleton(path: str, *, revision: str, trust_remote_code: bool) -> nn.Module:
    """The target as transformers builds it, on the meta device: names, shapes and config, no weight in memory.

    Raises: ConfigError if there is no causal language model, naming the path.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code)
    with reading(path, "its config cannot be used"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model.requires_grad_(False).eval()


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: safetensors' name of its dtype, shape, and the byte it begins at."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


class TargetFiles:
    """The safetensors files of a target, one or several with an index, of which single tensors and elements are read."""

    def __init__(self, path: str, *, revision: str) -> None:
        """path: a folder or a Hub name. Raises: ConfigError if there are none, naming the path."""
        self.path = path
        self.entries: dict[str, Entry] = {}
        try:
            for file in _files(path, revision):
                self.entries |= _entries(file)
        except (OSError, ValueError, KeyError) as error:
            raise no_target(path, error) from error

    def read(self, name: str, shape) -> Tensor:
        """The tensor that the model calls `name`, on the CPU, in the file's dtype. Raises: ConfigError if there is none."""
        from safetensors import SafetensorError, safe_open

        found = self._name(name, tuple(shape))
        if found is None or self.entries[found].dtype not in DTYPES:
            raise no_target(self.path, ValueError(f"its files have no {name} of shape {list(shape)} in {', '.join(DTYPES)}"))
        try:
            with safe_open(self.entries[found].file, framework="pt") as file:
                return file.get_tensor(found)
        except (SafetensorError, OSError) as error:
            raise no_target(self.path, ValueError(f"its safetensors cannot be read ({error})")) from error

    def fingerprint(self, skeleton: nn.Module) -> str | None:
        """The fingerprint that the loaded model would have; None where its tensors do not lie in the files as they are."""
        shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
        found = {name: self._name(name, shape) for name, shape in shapes.items()}
        if not all(name and self.entries[name].dtype in DTYPES for name in found.values()):
            return None
        return fingerprint_by(skeleton, lambda name: _whole(self.entries[found[name]]))

    def _name(self, name: str, shape: tuple[int, ...]) -> str | None:
        """The file's name of the model's tensor: the same, or the only one that ends alike (behind another prefix)."""
        if name in self.entries:
            return name if self.entries[name].shape == shape else None
        ending = "." + (name.partition(".")[2] if name.count(".") > 1 else name)
        alike = [one for one, entry in self.entries.items() if one.endswith(ending) and entry.shape == shape]
        return alike[0] if len(alike) == 1 else None


def check_identity(known: Identity, skeleton: nn.Module, files: TargetFiles, folder: Path) -> bool:
    """Whether the files could be compared with the target that features are of. Raises: ConfigError if it is another."""
    found = files.fingerprint(skeleton)
    if found is not None and found != known.fingerprint:
        raise ConfigError(
            "features",
            folder,
            expected=f"features of the target {files.path} (fingerprint {found})",
            got=f"features of {known}",
            fix="set target.path to that target, or extract the features of this one into another folder",
        )
    return found is not None


def _files(path: str, revision: str) -> list[Path]:
    from transformers.utils import cached_file

    def find(name: str) -> str | None:
        # None for a file that is not there, also where that cannot be asked because the Hub is out of reach.
        absent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        return cached_file(path, name, revision=revision, **absent)

    whole = find("model.safetensors")
    if whole is not None:
        return [Path(whole)]
    index = find("model.safetensors.index.json")
    if index is None:
        raise ValueError("it has no model.safetensors and no model.safetensors.index.json")
    names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    found = {name: find(name) for name in names}
    if missing := [name for name, file in found.items() if file is None]:
        raise ValueError(f"it lacks {', '.join(missing[:4])}")
    return [Path(file) for file in found.values()]


def _entries(path: Path) -> dict[str, Entry]:
    """The tensors of one file, from its header."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > 100_000_000:  # the most that safetensors itself reads
            raise ValueError(f"{path.name} is not a safetensors file")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: Entry(path, one["dtype"], tuple(one["shape"]), 8 + size + one["data_offsets"][0]) for name, one in header.items()
    }


def _whole(entry: Entry) -> Tensor:
    """A tensor of a file, mapped and not yet read."""
    dtype = DTYPES[entry.dtype]
    bits = np.memmap(entry.file, np.dtype(f"<i{dtype.itemsize}"), "c", entry.begin, entry.shape)
    return torch.from_numpy(bits).view(dtype)
