"""`graphcap export`: a run's best drafter as a folder to serve; `export --check`: whether such a folder is whole and sound.

The format is z-lab's (ops/export.py): config.json and model.safetensors. A checkpoint has both, so an export copies them, in
another dtype if asked, and adds a README.md that says which target the drafter is for and what was measured.

Called by cli.py.
"""

import contextlib
import json
import shutil
from pathlib import Path

import torch

from graphcap.config import Target as TargetSection
from graphcap.errors import CheckpointError, ConfigError
from graphcap.model.attention import DenseAttention
from graphcap.model.drafter import Drafter
from graphcap.model.identity import Identity, identity_of
from graphcap.model.loading import load_model
from graphcap.ops import checkpoint, report, runfolder
from graphcap.ops.export import CONFIG, WEIGHTS, check_fits, config_document, read_config, read_drafter, read_target

CARD = "README.md"


def export(source: str, out: str, *, dtype: str, say) -> Path:
    """Write the drafter of a run, or of one checkpoint, into the new folder `out`; whole or not at all.

    source: a run's folder, whose best checkpoint is taken (the newest where none has a score), or a checkpoint's.
    dtype: "auto" keeps the checkpoint's; else "float32" or "bfloat16". say: called with each line for people.
    Raises: ConfigError if `out` holds anything; CheckpointError if no checkpoint is complete, or if the disk refuses.
    """
    source, out = Path(source), Path(out).resolve()
    weights = _weights_of(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            "export", out, expected="a folder that does not exist yet", got="one that holds something", fix="choose another"
        )
    config, target = read_config(weights), read_target(weights)
    kept = getattr(torch, json.loads((weights / CONFIG).read_text(encoding="utf-8"))["dtype"])
    wanted = kept if dtype == "auto" else getattr(torch, dtype)
    tensors = {name: tensor.to(wanted) for name, tensor in checkpoint.load_tensors(weights, WEIGHTS).items()}
    beside = out.with_name(f".{out.name}.partial")
    above = [folder for folder in out.parents if not folder.exists()]
    fix = "free space, or export to another disk"
    checkpoint.check_room(out, checkpoint.needed_bytes({WEIGHTS: tensors}), fix=fix)
    try:
        shutil.rmtree(beside, ignore_errors=True)  # of an export that was killed
        beside.mkdir(parents=True)
        checkpoint.write_tensors(beside / WEIGHTS, tensors)
        checkpoint.write_json(beside / CONFIG, config_document(config, wanted, target))
        checkpoint.write_text(beside / CARD, _card(source, weights, config, target))
        beside.rename(out)  # takes an empty folder's place, too
    except OSError as error:
        raise CheckpointError(
            "export",
            out,
            expected="a folder that can be written",
            got=error.strerror or str(error),
            cause="the run is as it was",
            fix=f"{fix}; or mend the folder's rights",
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError):  # what holds something stays: after a success, all of them
            for folder in above:
                folder.rmdir()
    say(f"exported  {weights.name} of {source} to {out}: {CONFIG}, {WEIGHTS} ({wanted}), {CARD}".replace("torch.", ""))
    return out


def _weights_of(source: Path) -> Path:
    """The checkpoint that an export of this folder takes, every byte of it verified."""
    if (source / checkpoint.MANIFEST).is_file():
        why = checkpoint.verify(source)
        if why:
            raise CheckpointError(
                "checkpoint", source, expected="a complete one", got=why, fix="export the run: it takes a complete one"
            )
        return source
    newest, passed_over = checkpoint.newest(source / "checkpoints")
    found = checkpoint.best(source / "checkpoints") or newest
    if found is None:
        raise CheckpointError(
            "folder",
            source,
            expected="a run with a complete checkpoint, or a checkpoint's folder",
            got="; ".join(passed_over) or "neither",
            fix="give runs/out/NAME, or one of its checkpoints",
        )
    return found


def _card(source: Path, weights: Path, config, target: Identity | None) -> str:
    """README.md of an export. No path, host or user stands in it."""
    lines = [
        "# A DFlash drafter",
        "",
        f"Drafts blocks of {config.block_size} tokens for {target or 'a target that its checkpoint does not name'}.",
        f"Layers: {config.num_layers}. Tapped target layers (0-based outputs): {list(config.target_layer_ids)}. "
        f"MASK is token {config.mask_token_id}.",
        "",
        "Trained with graphcap; config.json and model.safetensors are in z-lab's format. The target's embedding and head are",
        "used with it and are not in these files.",
    ]
    return "\n".join([*lines, *_measured(source, weights)]) + "\n"


def _measured(source: Path, weights: Path) -> list[str]:
    """What the run measured with these weights; nothing where its result is of others, or cannot be read."""
    try:
        result = json.loads((source / runfolder.RESULT).read_text(encoding="utf-8"))
        if result["weights"] != f"checkpoints/{weights.name}":
            return []
        tau, low, high = (report.number(result["after"][name]) for name in ("tau", "low", "high"))
        return [
            "",
            f"Measured on {result['prompts']} held-out prompts at {report.sampling_text(result)} in {result['dtype']}, at most "
            f"{result['max_new_tokens']} new tokens: acceptance length {tau} tokens a verification (pooled, 95 % interval "
            f"{low} to {high}); prompt lookup without a model: {report.number(result['prompt_lookup']['tau'])}.",
        ]
    except (OSError, ValueError, KeyError, TypeError):  # no result yet, or no result of ours: the card goes without
        return []


def check(folder: str, *, target: TargetSection | None) -> list[str]:
    """What a drafter's folder holds, or a run's best checkpoint, one line each, if it is whole and sound. Writes nothing.

    target: also compare it with this one.
    Raises: CheckpointError naming the first thing that is wrong.
    """
    folder = checkpoint.weights_of(folder)
    config, known = read_config(folder), read_target(folder)
    drafter = read_drafter(folder, dtype=torch.float32, device=torch.device("cpu"))
    lines = [
        f"config    block {config.block_size}, layers {config.num_layers}, taps {list(config.target_layer_ids)} of "
        f"{config.num_target_layers} layers, MASK {config.mask_token_id}, rope theta {config.rope_theta:g}",
        f"tensors   {len(drafter.state_dict())}, {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters",
    ]
    _check_numbers(folder, drafter)
    lines.append("numbers   finite, and so is a forward on random features")
    if known is not None:
        lines.append(f"target    {known}")
    if target is not None:
        lines.append(_check_target(folder, config, known, target))
    return lines


@torch.no_grad()
def _check_numbers(folder: Path, drafter: Drafter) -> None:
    """Raises: CheckpointError for tensors that do nothing, and for a forward that is not finite."""
    wrong = [f"{name} is all zeros" for name, tensor in drafter.state_dict().items() if not tensor.any()]
    if not wrong:
        config, generator = drafter.config, torch.Generator().manual_seed(0)
        features = torch.randn(8, len(config.target_layer_ids) * config.hidden_size, generator=generator)
        block = torch.randn(2, config.hidden_size, generator=generator)
        context = drafter.context(features, torch.arange(8))
        attend, position = DenseAttention(), 7 + torch.arange(config.block_size)
        hidden = drafter(block, position, context, lambda q, *keys: attend(q, *keys, None, drafter.scale))
        wrong = [] if hidden.isfinite().all() else ["a forward on random features is not finite"]
    if wrong:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected="finite numbers",
            got="; ".join(wrong[:6]),
            fix="export an earlier checkpoint, or copy the folder again",
        )


def _check_target(folder: Path, config, known: Identity | None, target: TargetSection) -> str:
    where = {"revision": target.revision, "trust_remote_code": target.trust_remote_code}
    model = load_model(target.path, dtype=torch.bfloat16, device=torch.device("cpu"), **where)
    check_fits(config, model.config, folder=folder)
    found = identity_of(model, target.path)
    if known is not None and known.fingerprint != found.fingerprint:
        raise CheckpointError(
            "drafter folder",
            folder,
            expected=f"a drafter of {found}",
            got=f"one of {known}",
            fix="give the target it was trained for, or measure it on this one: graphcap eval",
        )
    return f"fits      {found}"
