"""Loading the target: model, config and tokenizer from a folder or a Hub name, and what its config and tokenizer tell.

Whatever is missing, broken or refused is a ConfigError that names the path and the cause.

Calls: build.py, eval.py, export.py, ops/export.py.
"""

from pathlib import Path

import torch
from torch import nn

from graphcap.errors import ConfigError

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

    Raises: ConfigError if there is none, or if its files lack a tensor, naming the path.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            revision=revision,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise no_target(path, ValueError(f"its safetensors cannot be read ({error})")) from error
    except (OSError, ValueError) as error:
        raise no_target(path, error) from error
    except RuntimeError as error:
        if "size mismatch" not in str(error) and "mismatched" not in str(error):
            raise
        raise no_target(path, ValueError("its tensors have other sizes than its config.json says")) from error
    if loaded["missing_keys"]:  # transformers would fill them with random numbers
        raise no_target(path, ValueError(f"its files lack {', '.join(sorted(loaded['missing_keys'])[:4])}"))
    return model.requires_grad_(False).eval().to(device)


def load_config(path: str, *, revision: str, trust_remote_code: bool):
    """The target's config alone. Raises: ConfigError if there is none, naming the path."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise no_target(path, error) from error


def load_tokenizer(path: str, *, revision: str, trust_remote_code: bool):
    """The target's tokenizer. Raises: ConfigError if there is none, naming the path."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise no_target(path, error) from error
    except Exception as error:  # the tokenizers library raises whatever its reading of a broken file runs into
        cause = ValueError(f"the tokenizer's files cannot be read ({type(error).__name__}: {error})")
        raise no_target(path, cause) from error


def no_target(path: str, error: Exception) -> ConfigError:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    kind = "a folder without it" if Path(path).is_dir() else "neither a folder nor a cached Hub name"
    return ConfigError(
        "recipe key",
        "target.path",
        expected="a causal language model of transformers with its tokenizer",
        got=f"'{path}' ({kind})",
        cause=first_line.rstrip("."),
        fix="read that code, then set target.trust_remote_code=true to run it, or use a target that transformers knows"
        if "trust_remote_code" in str(error)
        else "give the path of the target's folder (a relative path begins in the folder that graphcap runs in); where a Hub "
        "name cannot be reached, fetch it first with `hf download NAME`",
    )


def find_mask_token(tokenizer, num_embeddings: int, *, name: str) -> tuple[int, str]:
    """The id of the token that stands for MASK, and its name in words: the named one, else an unused row of the embedding.

    Looked for in this order: a mask token; an added token called reserved or unused; a row that no token has; an added token
    that has no role and does not stand in the chat template, the last of them. Never a word of the vocabulary, whatever its
    name: text may contain it. Raises: ConfigError if the named token does not exist, or if none of these is there.
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
    for token in (tokenizer.mask_token, *MASK_NAMES, *kept_free):
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
