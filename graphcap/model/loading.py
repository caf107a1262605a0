"""Loading the target: model, config and tokenizer from a folder or a Hub name, and what its config and tokenizer tell.

Whatever is missing, broken or refused is a ConfigError that names the path and the cause.

Called by build.py, train.py, eval.py, export.py, model/ends.py and ops/export.py.
"""

import contextlib
from pathlib import Path

import torch
from torch import nn

from graphcap.errors import ConfigError

_MOST_SAID = 200  # characters of what transformers says
MASK_NAMES = ("<|mask|>", "<|MASK|>", "<mask>", "[MASK]")


def device_and_dtype(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """The torch device and dtype of `run.device` and `target.dtype`. Raises: ConfigError if cuda is asked for and absent."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "recipe key", "run.device", expected="a usable CUDA GPU", got="none", fix="set run.device=cpu, or mend the driver"
        )
    kind = "cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu")
    if dtype == "auto":
        dtype = "bfloat16" if kind == "cuda" else "float32"
    return torch.device(kind), getattr(torch, dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def load_model(path: str, *, revision: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> nn.Module:
    """A causal language model of transformers, from a folder or a Hub name, frozen, in eval mode.

    Raises: ConfigError if there is none, if it is quantised, or if its files lack a tensor, naming the path.
    """
    from transformers import AutoModelForCausalLM

    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    load_config(path, **where)  # refuses what would be loaded as something else
    with reading(path, "its config or its safetensors cannot be used"):
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, output_loading_info=True, **where
        )
    if loaded["missing_keys"]:  # transformers would fill them with random numbers
        raise no_target(path, ValueError(f"its files lack {', '.join(sorted(loaded['missing_keys'])[:4])}"))
    return model.requires_grad_(False).eval().to(device)


def load_config(path: str, *, revision: str, trust_remote_code: bool):
    """The target's config alone. Raises: ConfigError if there is none or if it is quantised, naming the path."""
    from transformers import AutoConfig

    with reading(path, "its config cannot be read"):
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"):
            if getattr(text, name, None) is not None and getattr(text, name) < 1:
                raise ValueError(f"its config has {name} = {getattr(text, name)}")
    for one in (config, text):
        if getattr(one, "quantization_config", None):
            raise ConfigError(
                "recipe key",
                "target.path",
                expected="a target in float32, bfloat16 or float16",
                got=f"'{path}', whose weights are quantised",
                cause="quantised targets are not supported",
                fix="use the model that it was quantised from",
            )
    return config


def load_tokenizer(path: str, *, revision: str, trust_remote_code: bool):
    """The target's tokenizer. Raises: ConfigError if there is none, naming the path."""
    from transformers import AutoTokenizer

    with reading(path, "the tokenizer's files cannot be read"):
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)


@contextlib.contextmanager
def reading(path: str, what: str):
    """Turn whatever transformers runs into on wrong files into a ConfigError. Want of memory is no fault of the files."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (OSError, ValueError) as error:
        raise no_target(path, error) from error
    except Exception as error:
        if "can't allocate memory" in str(error):  # of a CPU
            raise
        if "size mismatch" in str(error) or "mismatched" in str(error):
            raise no_target(path, ValueError("its tensors have other sizes than its config.json says")) from error
        said = " ".join(str(error).split())[:_MOST_SAID]
        raise no_target(path, ValueError(f"{what} ({type(error).__name__}: {said})")) from error


def no_target(path: str, error: Exception) -> ConfigError:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" .")
    if said.endswith(":"):  # the next lines go on
        said = " ".join(str(error).split())[:_MOST_SAID]
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        said = "it has no config.json"
    pickles = sorted(file.name for file in Path(path).glob("*.bin")) if Path(path).is_dir() else []
    if pickles and not any(Path(path).glob("*.safetensors")):
        load, save = f"AutoModelForCausalLM.from_pretrained('{path}')", "save_pretrained('FOLDER')"
        return ConfigError(
            "recipe key",
            "target.path",
            expected="weights in safetensors",
            got=f"a pickle, {pickles[0]}, in '{path}'",
            cause="loading a pickle runs whatever code it holds, so graphcap never does",
            fix=f'where you trust it, convert it with `python -c "from transformers import *; {load}.{save}; '
            f"AutoTokenizer.from_pretrained('{path}').{save}\"`",
        )
    kind = "a folder without it" if Path(path).is_dir() else "neither a folder nor a cached Hub name"
    return ConfigError(
        "recipe key",
        "target.path",
        expected="a causal language model of transformers with its tokenizer",
        got=f"'{path}' ({kind})",
        cause=said.rstrip("."),
        fix="read that code, then set target.trust_remote_code=true to run it, or use a target that transformers knows"
        if "trust_remote_code" in str(error)
        else "give the path of the target's folder (a relative path begins in the folder that graphcap runs in); where a Hub "
        "name cannot be reached, fetch it first with `hf download NAME`",
    )


def find_mask_token(tokenizer, num_embeddings: int, *, name: str) -> tuple[int, str]:
    """The id of the token that stands for MASK, and its name in words: the named one, else an unused row of the embedding.

    Looked for in this order: the tokenizer's mask token; an added token called so; an added token called reserved or unused; a
    row that no token has; an added token that has no role and does not stand in the chat template, the last of them. Never a
    word of the vocabulary, whatever its name: text may contain it. Raises: ConfigError if the named token does not exist, or if
    none of these is there.
    """
    vocabulary = tokenizer.get_vocab()
    if name:
        if name not in vocabulary or vocabulary[name] >= num_embeddings:
            raise ConfigError(
                "recipe key",
                "drafter.mask_token",
                expected="a token of the target's tokenizer and embedding",
                got=f"'{name}'",
                fix="name an unused special token, or leave the key out",
            )
        return vocabulary[name], name
    added = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    kept_free = [token for token in added if "reserved" in token.lower() or "unused" in token.lower()]
    for token in (tokenizer.mask_token, *(name for name in MASK_NAMES if name in added), *kept_free):
        if token in vocabulary and vocabulary[token] < num_embeddings:
            return vocabulary[token], token
    if max(vocabulary.values()) + 1 < num_embeddings:
        return max(vocabulary.values()) + 1, "a row of the embedding that no token has"
    taken = {*tokenizer.all_special_tokens, *(token for token in added if token in str(tokenizer.chat_template))}
    for token in reversed(added):
        if token not in taken and vocabulary.get(token, num_embeddings) < num_embeddings:
            return vocabulary[token], token
    raise ConfigError(
        "recipe key",
        "drafter.mask_token",
        expected="the name of a token that no text contains",
        got="nothing",
        cause="the target's tokenizer shows no unused row",
        fix='write drafter.mask_token = "<token>"',
    )


def rope_theta(text_config) -> float:
    """The target's rotary base, wherever its config keeps it (transformers 5 nests it, per layer type where they differ)."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    for candidate in (parameters, parameters.get("full_attention") or {}):
        if candidate.get("rope_theta"):
            return float(candidate["rope_theta"])
    theta = getattr(text_config, "rope_theta", None)
    if theta is None:
        raise ConfigError(
            "target",
            text_config.model_type,
            expected="rotary positions with a rope_theta",
            got="none in its config",
            fix="use a target with rotary positions",
        )
    return float(theta)
