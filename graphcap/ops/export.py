"""A drafter as a folder in z-lab's format: config.json and model.safetensors, which z-lab's own model class loads.

The same two files lie in every checkpoint, so a checkpoint is ready to export. Reading is strict: missing, unexpected and
misshapen tensors are errors that name them.

Called by train.py, eval.py, export.py and build.py. Source of names and keys: z-lab/dflash 44947fb, dflash/model.py.
"""

import dataclasses
import json
from pathlib import Path

import torch

from graphcap.errors import CheckpointError, ConfigError
from graphcap.model.drafter import Drafter, DrafterConfig
from graphcap.model.identity import Identity
from graphcap.model.loading import dtype_name, rope_theta

WEIGHTS, CONFIG = "model.safetensors", "config.json"
CONVENTION = "0-based outputs of decoder layers"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of weights that are read; quantised ones would lack their scales


def config_document(config: DrafterConfig, dtype: torch.dtype, target: Identity | None = None) -> dict:
    """config.json of a drafter. `target_layer_ids` are 0-based outputs of decoder layers, which the file says.

    target: the one it was trained for; loaders that do not know the key leave it alone.
    """
    return {
        "architectures": ["DFlashDraftModel"],
        # Names a file that z-lab ships: without this key AutoModel would load a plain Qwen3 in silence.
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "target_layer_ids_convention": CONVENTION,
        },
        "num_target_layers": config.num_target_layers,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "layer_types": ["full_attention"] * config.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_layers,
        "is_causal": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        **({"target": dataclasses.asdict(target)} if target else {}),
    }


def read_target(folder: Path) -> Identity | None:
    """The target that a drafter folder says it was trained for; None where it does not say. The folder's config is readable."""
    document = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8")).get("target")
    names = {field.name for field in dataclasses.fields(Identity)}
    if not isinstance(document, dict) or set(document) != names or not all(type(text) is str for text in document.values()):
        return None  # somebody else's key of that name, or none
    return Identity(**document)


def weight_tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    """The drafter's own tensors under z-lab's names; no embedding, no head, no rotary table."""
    return {name: tensor.detach() for name, tensor in drafter.state_dict().items()}


def read_config(folder: Path) -> DrafterConfig:
    """The DrafterConfig of a drafter folder. Raises: CheckpointError naming the key that is missing or contradictory."""
    path = Path(folder) / CONFIG
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected=f"a readable {CONFIG}",
            got=f"{type(error).__name__}: {error}",
            fix="give a run of graphcap or a folder in z-lab's format",
        ) from error
    document, own = _typed(folder, document)
    sizes = {own.get("block_size"), document.get("block_size")} - {None}
    if len(sizes) != 1 or min(sizes) < 2:
        got = "none" if not sizes else " and ".join(map(str, sorted(sizes)))
        expected = "one block_size, 2 or more: an anchor and at least one draft"
        raise CheckpointError("drafter folder", folder, expected=expected, got=got, fix=f"mend block_size in {CONFIG}")
    for key in ("target_layer_ids", "mask_token_id"):
        if own.get(key) is None:
            raise CheckpointError(
                "drafter folder",
                folder,
                expected=f"dflash_config.{key} in {CONFIG}",
                got="nothing",
                cause="guessing it would lower acceptance in silence",
                fix="take it from whoever trained the drafter",
            )
    if own.get("target_layer_ids_convention", CONVENTION) != CONVENTION:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected=f"target_layer_ids as {CONVENTION}",
            got=str(own["target_layer_ids_convention"]),
            cause="read otherwise, every tapped layer would be another one",
            fix=f"convert target_layer_ids in {CONFIG}, then leave the key target_layer_ids_convention out",
        )
    _refuse_what_we_cannot_compute(folder, document, own)
    return _config_of(folder, document, own, sizes.pop())


def _typed(folder: Path, document: object) -> tuple[dict, dict]:
    """The keys of config.json and of its dflash_config, without those that are null. Raises: CheckpointError."""
    counts = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "num_target_layers")
    counts += ("intermediate_size", "vocab_size", "max_position_embeddings", "block_size")

    def is_count(value: object) -> bool:
        return type(value) is int and 0 < value < 2**31

    def is_list_of(kind: type):
        return lambda value: isinstance(value, list) and all(type(item) is kind for item in value)

    kinds = {name: ("a whole number above 0", is_count) for name in counts}
    for name in ("rms_norm_eps", "rope_theta"):
        kinds[name] = ("a number above 0", lambda value: type(value) in (int, float) and 0 < value < 1e30)
    for name in ("dflash_config", "rope_scaling", "rope_parameters"):
        kinds[name] = ("an object of keys", lambda value: isinstance(value, dict))
    dtypes = tuple(map(dtype_name, DTYPES))
    kinds["dtype"] = (" or ".join(dtypes), lambda value: value in dtypes)
    kinds["layer_types"] = ("a list of names", is_list_of(str))
    kinds["target_layer_ids"] = ("a list of whole numbers", is_list_of(int))
    kinds["mask_token_id"] = ("a whole number", lambda value: type(value) is int)

    def typed(keys: dict) -> dict:
        keys = {name: value for name, value in keys.items() if value is not None}
        for name, value in keys.items():
            what, fits = kinds.get(name, ("", None))
            if fits is not None and not fits(value):
                raise _wrong_type(folder, what, name, value)
        return keys

    if not isinstance(document, dict):
        raise _wrong_type(folder, "an object of keys", "the whole", document)
    document = typed(document)
    for name in ("rope_scaling", "rope_parameters"):
        typed(document.get(name, {}))
    return document, typed(document.get("dflash_config", {}))


def _wrong_type(folder: Path, what: str, name: str, value: object) -> CheckpointError:
    fix = "take config.json from whoever trained the drafter"
    got = json.dumps(value)[:60]
    return CheckpointError("drafter folder", folder, expected=f"{what} as {name} in {CONFIG}", got=got, fix=fix)


# What dflash_config may hold beside what is switched off: names that change nothing, or that config.json's other keys settle.
HARMLESS = ("block_size", "mask_token_id", "mask_token", "target_layer_ids", "target_layer_ids_convention", "num_target_layers")
AS_WE_COMPUTE = {"projector_type": "dflash", "use_aux_hidden_state": True}  # as SpecForge and vLLM spell it


def _refuse_what_we_cannot_compute(folder: Path, document: dict, own: dict) -> None:
    """Keys that change the drafter's mathematics in a way that ours does not have: loading on would lower acceptance.

    own: dflash_config, where others keep a window (use_swa), causal blocks (causal), a first slot that predicts the next token
    (sample_from_anchor, shift_label) and further heads. So there every key that we do not know is refused, unless it is off.
    """
    ropes = {name: document.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    rope = ropes["rope_scaling"] | ropes["rope_parameters"]
    layer_types = document.get("layer_types")
    found = {
        "layer_types": layer_types and layer_types != ["full_attention"] * document.get("num_hidden_layers", len(layer_types)),
        "use_sliding_window": document.get("use_sliding_window") and document.get("sliding_window"),
        "attention_bias": document.get("attention_bias"),
        "is_causal": document.get("is_causal"),
        "hidden_act": document.get("hidden_act", "silu") != "silu",
        "quantization_config": document.get("quantization_config"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor") or document.get("partial_rotary_factor") or 1.0) != 1.0,
        "mrope_section": rope.get("mrope_section"),
        **{name: keys.get("rope_type", keys.get("type", "default")) != "default" for name, keys in ropes.items()},
    }
    unknown = {name: value for name, value in own.items() if value and name not in HARMLESS}
    if "use_swa" in own and not own["use_swa"]:
        unknown.pop("swa_window_size", None)
    wrong = [f"{name} = {document.get(name, rope.get(name))}" for name, value in found.items() if value]
    wrong += [f"dflash_config.{name} = {value}" for name, value in unknown.items() if AS_WE_COMPUTE.get(name) != value]
    if wrong:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected="full attention, no bias, SwiGLU, plain rotary positions, and no quantised weight or further head",
            got=", ".join(one[:120] for one in wrong[:6]),
            cause="this drafter computes something else",
            fix="use a drafter without it",
        )


def _config_of(folder: Path, document: dict, own: dict, block_size: int) -> DrafterConfig:
    theta = (document.get("rope_parameters") or {}).get("rope_theta") or document.get("rope_theta")
    try:
        if theta is None:
            raise KeyError("rope_theta")
        return DrafterConfig(
            hidden_size=document["hidden_size"],
            num_layers=document["num_hidden_layers"],
            num_heads=document["num_attention_heads"],
            num_kv_heads=document["num_key_value_heads"],
            head_dim=document["head_dim"],
            intermediate_size=document["intermediate_size"],
            vocab_size=document["vocab_size"],
            rms_norm_eps=document["rms_norm_eps"],
            rope_theta=float(theta),
            max_position_embeddings=document["max_position_embeddings"],
            block_size=block_size,
            mask_token_id=own["mask_token_id"],
            target_layer_ids=tuple(own["target_layer_ids"]),
            num_target_layers=document["num_target_layers"],
        )
    except ConfigError as error:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected=error.expected,
            got=f"{error.name} {error.got}",
            cause=error.cause,
            fix=f"mend {CONFIG}",
        ) from error
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected=f"every size in {CONFIG}",
            got=f"{error} missing",
            fix="take config.json from whoever trained the drafter",
        ) from error


def check_fits(config: DrafterConfig, target_config, *, folder) -> None:
    """Refuse a drafter of another target. target_config: transformers' config of it.

    Raises: CheckpointError naming the folder and every size that differs.
    """
    text = target_config.get_text_config()
    sizes = {
        "hidden_size": (config.hidden_size, text.hidden_size),
        "num_target_layers": (config.num_target_layers, text.num_hidden_layers),
        "vocab_size": (config.vocab_size, text.vocab_size),
        "rope_theta": (config.rope_theta, rope_theta(text)),
    }
    wrong = [f"{name} {own} instead of {other}" for name, (own, other) in sizes.items() if own != other]
    if wrong:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected="a drafter of this target",
            got="; ".join(wrong),
            fix="give the target it was trained for, or a drafter trained for this one",
        )


def read_drafter(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Drafter:
    """The drafter of a folder, in `dtype` on `device`, frozen. Raises: CheckpointError listing tensors that differ."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_config(folder)
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            "drafter folder",
            folder,
            expected=WEIGHTS,
            got="no such file",
            fix="give a folder with safetensors; pickled weights are refused, convert them first",
        )
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected=f"a whole {WEIGHTS}",
            got=str(error),
            fix="copy it again, or use another checkpoint",
        ) from error
    drafter = Drafter(config)
    expected = drafter.state_dict()
    wrong = [f"{name} missing" for name in expected if name not in tensors]
    wrong += [f"{name} unexpected" for name in tensors if name not in expected]
    wrong += [
        f"{name} {list(tensors[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    taken = {name: tensor for name, tensor in tensors.items() if name in expected}
    wrong += [f"{name} in {dtype_name(tensor.dtype)}" for name, tensor in taken.items() if tensor.dtype not in DTYPES]
    wrong += [f"{name} not finite" for name, tensor in taken.items() if tensor.dtype in DTYPES and not tensor.isfinite().all()]
    if wrong:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected=f"the {len(expected)} tensors of its config in {', '.join(map(dtype_name, DTYPES))}",
            got="; ".join(wrong[:6]),
            fix="check that config.json and model.safetensors belong together",
        )
    drafter.load_state_dict(tensors)
    return drafter.to(device=device, dtype=dtype).requires_grad_(False)
