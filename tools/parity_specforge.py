"""Compare mask, loss and every gradient of graphcap's step with SpecForge's DFlash training module.

Needs a clone of https://github.com/sgl-project/SpecForge at commit a6b6b02 and the CPU; transformers 5.17 and 5.24 do.

    python tools/parity_specforge.py CLONE                         16 fresh random cases, then the changed twins
    python tools/parity_specforge.py CLONE --seed 3 --cases 4      these again
    python tools/parity_specforge.py CLONE --store tests/parity/data/specforge.safetensors

Both sides get the same weights, tokens, features, loss masks and anchors, in float32 on the CPU. SpecForge has one
document in a batch row; graphcap has the same documents end to end in one row. Only SpecForge's draw of anchors is
replaced. Compared over kept blocks: where a block may begin and the mask exactly, loss and gradients by
||difference|| / ||reference|| <= 1e-5 for every tensor. A twin is graphcap's step with one thing changed on purpose:
there the comparison must fail. `--store` writes SpecForge's numbers for fixed seeds; with them
tests/parity/test_parity_specforge.py needs no clone. Exit code 1: they differ.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import subprocess
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from graphcap.data.packing import anchor_candidates
from graphcap.data.planner import Bucket
from graphcap.engine import step as engine_step
from graphcap.engine.buckets import Engine
from graphcap.engine.optimizer import Hyper
from graphcap.engine.slots import Slot
from graphcap.engine.step import DrafterStep
from graphcap.model.attention import DenseAttention
from graphcap.model.blocks import UNUSED, decay, default_gamma
from graphcap.model.drafter import Drafter, DrafterConfig

COMMIT = "a6b6b0230009d15ec2a97a57384e6f53f0f96946"
TOLERANCE = 1e-5
CLEARLY_WRONG = 1e-3  # a twin differs at least this much
STORED_SEEDS = (11, 12, 13, 14, 15, 16)
ENTRIES_STORED = 160  # of one gradient
BLOCK_SIZES = (4, 7, 8, 16)
VOCABULARY, MASK_TOKEN = 61, 60


@dataclass(frozen=True)
class Case:
    """A batch of documents, the drafter's weights, and everything else that both sides get: a function of its seed."""

    seed: int
    config: DrafterConfig
    gamma: float
    token_ids: list[np.ndarray]  # of each document
    supervised: list[np.ndarray]
    features: list[np.ndarray]
    anchors: np.ndarray  # int64 [documents, slots], rising, UNUSED in dropped slots
    weights: dict[str, Tensor]
    embedding_VD: Tensor
    head_VD: Tensor


@dataclass(frozen=True)
class Outcome:
    """What one side made of a case: the mask over kept blocks, loss sum, weight sum, gradients of their quotient."""

    candidates: list[list[int]]  # positions of each document where a block may begin
    mask: np.ndarray  # bool [kept blocks · K, row tokens + documents · slots · K]
    loss_sum: float
    weight_sum: float
    gradients: dict[str, Tensor]


def make_case(seed: int) -> Case:
    """A case from numpy's frozen generator, so that a stored seed means the same numbers everywhere."""
    random = np.random.RandomState(seed)
    block_size = BLOCK_SIZES[seed % len(BLOCK_SIZES)]
    heads, kv_heads = [(4, 2), (2, 2), (4, 1)][random.randint(3)]
    config = DrafterConfig(
        hidden_size=16,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        intermediate_size=24,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=512,
        block_size=block_size,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=(1, 3, 5),
        num_target_layers=8,
    )
    lengths = random.randint(block_size + 3, (40, 60, 300)[random.randint(3)], size=random.randint(2, 5))
    supervised = [_loss_mask(random, length) for length in lengths]
    return Case(
        seed=seed,
        config=config,
        gamma=default_gamma(block_size),
        token_ids=[random.randint(0, MASK_TOKEN, size=length) for length in lengths],
        supervised=supervised,
        features=[random.standard_normal((length, 3 * config.hidden_size)).astype(np.float32) for length in lengths],
        anchors=_anchors(random, supervised),
        weights={name: _weight(random, tensor.shape) for name, tensor in sorted(Drafter(config).state_dict().items())},
        embedding_VD=_weight(random, (VOCABULARY, config.hidden_size)) * 3,
        head_VD=_weight(random, (VOCABULARY, config.hidden_size)) * 2,
    )


def _loss_mask(random: np.random.RandomState, length: int) -> np.ndarray:
    """Supervised from some token on, with holes; the last two tokens always, so that blocks run past the end."""
    mask = np.arange(length) >= random.randint(0, length // 2)
    mask &= random.uniform(size=length) > 0.2
    mask[-2:] = True
    return mask.astype(np.int64)


def _anchors(random: np.random.RandomState, supervised: list[np.ndarray]) -> np.ndarray:
    """Some candidates of each document, the last possible one always; the first document leaves a slot unused."""
    slots = random.randint(4, 9)
    anchors = np.full((len(supervised), slots), UNUSED)
    for row, mask in enumerate(supervised):
        candidates = np.flatnonzero(mask[:-1] & mask[1:])
        count = min(len(candidates), slots - 1 if row == 0 else slots)
        chosen = random.choice(candidates[:-1], size=count - 1, replace=False) if count > 1 else []
        anchors[row, :count] = np.sort(np.append(chosen, candidates[-1]))
    return anchors


def _weight(random: np.random.RandomState, shape: tuple[int, ...]) -> Tensor:
    """Matrices large enough that attention is far from uniform; norms around one."""
    values = random.standard_normal(tuple(shape))
    return torch.from_numpy((1 + 0.2 * values if len(shape) == 1 else 0.25 * values).astype(np.float32))


# ------------------------------------------------------------------------------------------------------------ graphcap


class GivenTarget:
    """Stands for the frozen target: the case's embedding, head and features."""

    def __init__(self, case: Case) -> None:
        self.head_VD, self.embedding_VD = case.head_VD, case.embedding_VD
        self.num_features = case.features[0].shape[1]
        self.features_TF = torch.from_numpy(np.concatenate(case.features))

    def embed(self, token_ids_S: Tensor) -> Tensor:
        return self.embedding_VD[token_ids_S.long()]

    def features(self, token_ids_T: Tensor, position_T: Tensor, out_TF: Tensor) -> None:
        out_TF.fill_(1e3)  # padding tokens must not matter
        out_TF[: len(self.features_TF)] = self.features_TF


def row_anchors(case: Case) -> np.ndarray:
    """The case's anchors as indices in graphcap's row, dropped slots left in place: int32 [documents · slots]."""
    start = np.cumsum([0] + [len(ids) for ids in case.token_ids[:-1]])[:, None]
    return np.where(case.anchors == UNUSED, UNUSED, case.anchors + start).astype(np.int32).ravel()


def run_graphcap(case: Case) -> Outcome:
    """One micro step of graphcap's engine over all documents in one padded row."""
    drafter = Drafter(case.config)
    drafter.load_state_dict(case.weights)
    hyper = Hyper(
        learning_rate=1e-3,
        warmup_fraction=0.0,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        num_updates=1,
    )
    weights = decay(case.config.block_size, case.gamma)
    step = DrafterStep(GivenTarget(case), drafter, decay=weights, hyper=hyper, chunk_tokens=32)
    lengths, anchors = [len(ids) for ids in case.token_ids], row_anchors(case)
    bucket = Bucket(sum(lengths) + 5, len(anchors))
    engine = Engine(step, (bucket,))
    engine.fill(
        bucket,
        {
            "token_ids": np.concatenate(case.token_ids).astype(np.int32),
            "position": np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
            "supervised": np.concatenate(case.supervised).astype(np.int32),
            "anchors": anchors,
        },
    )
    engine.micro_step(bucket)
    loss_sum, weight_sum = step.state.statistics[:2].tolist()
    views = zip(step.state.names, step.state.gradient_views, strict=True)
    gradients = {name: view / weight_sum for name, view in views}
    candidates = [anchor_candidates(mask).tolist() for mask in case.supervised]
    return Outcome(candidates, _row_mask(step, engine.slots[bucket], sum(lengths)), loss_sum, weight_sum, gradients)


def _row_mask(step: DrafterStep, slot: Slot, num_tokens: int) -> np.ndarray:
    blocks = engine_step.make_blocks(
        slot["token_ids"],
        slot["position"],
        slot["supervised"],
        slot["anchors"],
        decay_J=step.decay_J,
        mask_token_id=MASK_TOKEN,
    )
    mask = DenseAttention().mask(blocks.visibility, blocks.position_Q.numel())
    keep = blocks.keep_N.repeat_interleave(step.block_size)
    padding = slice(num_tokens, slot["token_ids"].numel())
    assert not mask[keep, padding].any(), "padding is visible to a kept block"
    return np.delete(mask[keep].numpy(), np.arange(padding.start, padding.stop), axis=1)


def _changed_visibility(change):
    def changed_blocks(blocks):
        visibility = dataclasses.replace(blocks.visibility, **change(blocks.visibility))
        return dataclasses.replace(blocks, visibility=visibility)

    return changed_blocks


TWINS = {
    "context includes the anchor": _changed_visibility(lambda seen: {"high_R": seen.high_R + 1}),
    "context ends one token early": _changed_visibility(lambda seen: {"high_R": (seen.high_R - 1).clamp(min=0)}),
    "documents before are visible": _changed_visibility(lambda seen: {"low_R": torch.zeros_like(seen.low_R)}),
    "labels shifted by one": lambda blocks: dataclasses.replace(blocks, label_NJ=blocks.label_NJ.roll(1, dims=1)),
    "positions off by one": lambda blocks: dataclasses.replace(blocks, position_Q=blocks.position_Q + 1),
    "a label of weight zero counts": lambda blocks: dataclasses.replace(blocks, weight_NJ=_one_more(blocks.weight_NJ)),
}


def _one_more(weight_NJ: Tensor) -> Tensor:
    weight_NJ = weight_NJ.clone()
    place = tuple((weight_NJ == 0).nonzero()[0])
    weight_NJ[place] = 0.5
    return weight_NJ


@contextmanager
def changed(name: str):
    """Inside, the engine's step sees blocks with the twin's change."""
    original = engine_step.make_blocks

    def with_change(token_ids_T, position_T, supervised_T, anchor_N, *, decay_J, mask_token_id):
        return TWINS[name](
            original(token_ids_T, position_T, supervised_T, anchor_N, decay_J=decay_J, mask_token_id=mask_token_id)
        )

    engine_step.make_blocks = with_change
    try:
        yield
    finally:
        engine_step.make_blocks = original


# ----------------------------------------------------------------------------------------------------------- SpecForge


def check_commit(clone: Path, commit: str, repository: str) -> None:
    """Ends the program unless `clone` is a git work tree at `commit`."""
    fix = f"git clone https://github.com/{repository} CLONE && git -C CLONE checkout {commit[:7]}"
    if not clone.is_dir():
        sys.exit(f"clone '{clone}': expected a clone of {repository}, got no such folder. Fix: {fix}.")
    asked = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True)
    found = asked.stdout.strip() if asked.returncode == 0 else "no git work tree"
    if found != commit:
        sys.exit(f"clone '{clone}': expected {repository} at {commit[:12]}, got {found[:40]}. Fix: {fix}.")
    if subprocess.run(["git", "-C", str(clone), "diff", "--quiet", "HEAD"]).returncode:
        sys.exit(f"clone '{clone}': expected {repository} unchanged, got local changes. Fix: git -C CLONE stash.")


def load_specforge(clone: Path):
    """SpecForge's two modules (training, draft), without the package's own imports of servers and launchers."""
    for name in (
        "specforge",
        "specforge.core",
        "specforge.modeling",
        "specforge.modeling.draft",
        "specforge.algorithms",
        "specforge.algorithms.common",
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(clone.joinpath(*name.split(".")))]
        sys.modules[name] = package
    return (
        importlib.import_module("specforge.algorithms.common.dflash_family_model"),
        importlib.import_module("specforge.modeling.draft.dflash"),
    )


def run_specforge(case: Case, modules, attention: str) -> Outcome:
    """SpecForge's forward and backward over the same documents, one in a batch row, padded at the end."""
    training, drafting = modules
    size, num_documents = max(map(len, case.token_ids)), len(case.token_ids)

    def batch(arrays: list[np.ndarray]) -> Tensor:
        out = np.zeros((num_documents, size, *arrays[0].shape[1:]), arrays[0].dtype)
        for row, array in enumerate(arrays):
            out[row, : len(array)] = array
        return torch.from_numpy(out)

    draft = drafting.DFlashDraftModel(_specforge_config(case.config, attention))
    draft.load_state_dict(case.weights, strict=True)
    embed, head = torch.nn.Embedding.from_pretrained(case.embedding_VD), torch.nn.Linear(1, 1, bias=False)
    head.weight = torch.nn.Parameter(case.head_VD, requires_grad=False)
    model = training.OnlineDFlashModel(
        draft,
        head,
        embed,
        mask_token_id=MASK_TOKEN,
        block_size=case.config.block_size,
        attention_backend=attention,
        num_anchors=size,
        loss_decay_gamma=case.gamma,
        objective_chunk_blocks=3,
    )
    every, real = model._sample_anchor_positions(size, batch(case.supervised), torch.device("cpu"))
    candidates = [row[kept].tolist() for row, kept in zip(every, real, strict=True)]
    keep = torch.from_numpy(case.anchors != UNUSED)
    anchors = torch.from_numpy(np.where(case.anchors == UNUSED, 0, case.anchors))
    model._sample_anchor_positions = lambda seq_len, loss_mask, device: (anchors, keep)
    loss, _, metrics = model(batch(case.token_ids), batch(case.features), batch(case.supervised).float())
    loss.backward()
    loss_sum, weight_sum = (float(term.detach()) for term in metrics["loss_terms"])
    mask = training.create_dflash_sdpa_mask(anchors, keep, size, case.config.block_size, torch.device("cpu"))
    gradients = {name: parameter.grad for name, parameter in draft.named_parameters()}
    return Outcome(candidates, _placed(case, mask[:, 0], size), loss_sum, weight_sum, gradients)


def _specforge_config(config: DrafterConfig, attention: str):
    from transformers import Qwen3Config

    made = Qwen3Config(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        block_size=config.block_size,
        layer_types=["full_attention"] * config.num_layers,
        num_target_layers=config.num_target_layers,
        dflash_config={"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
    )
    made._attn_implementation = attention
    return made


def _placed(case: Case, mask: Tensor, size: int) -> np.ndarray:
    """SpecForge's masks of each document, set into graphcap's row; kept blocks only."""
    lengths, width = [len(ids) for ids in case.token_ids], mask.shape[1]
    total, out, start = sum(lengths), [], 0
    for row, length in enumerate(lengths):
        placed = np.zeros((width, total + len(lengths) * width), dtype=bool)
        placed[:, start : start + length] = mask[row, :, :length]
        placed[:, total + row * width : total + (row + 1) * width] = mask[row, :, size:]
        kept = np.repeat(case.anchors[row] != UNUSED, case.config.block_size)
        assert not mask[row, kept, length:size].any()
        out.append(placed[kept])
        start += length
    return np.concatenate(out)


# ------------------------------------------------------------------------------------------------------------- compare


def relative(difference: Tensor, reference: Tensor) -> float:
    """||difference|| / ||reference||, in float64."""
    return float(difference.double().norm() / reference.double().norm())


def compare(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    """Relative difference of every quantity; of candidates and mask, how many are on one side only."""
    assert ours.gradients.keys() == theirs.gradients.keys(), ours.gradients.keys() ^ theirs.gradients.keys()
    found = {
        "candidates": float(sum(len(set(a) ^ set(b)) for a, b in zip(ours.candidates, theirs.candidates, strict=True))),
        "mask": float((ours.mask != theirs.mask).sum()) if ours.mask.shape == theirs.mask.shape else float("inf"),
        "weight sum": abs(ours.weight_sum / theirs.weight_sum - 1),
        "loss": abs(ours.loss_sum / ours.weight_sum / (theirs.loss_sum / theirs.weight_sum) - 1),
    }
    for name, reference in theirs.gradients.items():
        found[f"gradient {name}"] = relative(ours.gradients[name] - reference, reference)
    return found


def sampled(gradient: Tensor) -> Tensor:
    """At most ENTRIES_STORED evenly spread entries; the stride is odd, so that every column is met."""
    stride = -(-gradient.numel() // ENTRIES_STORED) | 1
    return gradient.flatten()[::stride]


def numbers(outcome: Outcome) -> tuple[dict, Tensor]:
    """What is stored of an outcome: scalars, hashes and norms; and the sampled entries of all gradients, in order."""
    names = sorted(outcome.gradients)
    scalars = {
        "candidates_sha256": hashlib.sha256(json.dumps(outcome.candidates).encode()).hexdigest(),
        "mask_sha256": hashlib.sha256(np.packbits(outcome.mask).tobytes()).hexdigest(),
        "mask_shape": list(outcome.mask.shape),
        "loss_sum": outcome.loss_sum,
        "weight_sum": outcome.weight_sum,
        "gradient_norms": {name: float(outcome.gradients[name].double().norm()) for name in names},
    }
    return scalars, torch.cat([sampled(outcome.gradients[name]) for name in names])


def compare_stored(ours: Outcome, scalars: dict, entries: Tensor) -> dict[str, float]:
    """As `compare`, against stored numbers."""
    mine, mine_entries = numbers(ours)
    loss, reference = (side["loss_sum"] / side["weight_sum"] for side in (mine, scalars))
    found = {
        "candidates": float(mine["candidates_sha256"] != scalars["candidates_sha256"]),
        "mask": float(mine["mask_sha256"] != scalars["mask_sha256"] or mine["mask_shape"] != scalars["mask_shape"]),
        "weight sum": abs(mine["weight_sum"] / scalars["weight_sum"] - 1),
        "loss": abs(loss / reference - 1),
    }
    assert mine["gradient_norms"].keys() == scalars["gradient_norms"].keys()
    sizes = [sampled(ours.gradients[name]).numel() for name in sorted(ours.gradients)]
    for name, part, ref in zip(sorted(ours.gradients), mine_entries.split(sizes), entries.split(sizes), strict=True):
        found[f"norm {name}"] = abs(mine["gradient_norms"][name] / scalars["gradient_norms"][name] - 1)
        found[f"gradient {name}"] = relative(part - ref, ref)
    return found


def run_cases(seeds: list[int], modules, attention: str) -> dict[str, float]:
    """Compare fresh cases, print a line for each, and return the largest difference of every quantity."""
    worst: dict[str, float] = {}
    print(f"{'seed':>10}  block  documents  tokens  kept/slots  past the end  loss      largest difference")
    for seed in seeds:
        case = make_case(seed)
        theirs = run_specforge(case, modules, attention)
        found = compare(run_graphcap(case), theirs)
        for name, value in found.items():
            worst[name] = max(worst.get(name, 0.0), value)
        kept, lengths = case.anchors != UNUSED, np.array([len(ids) for ids in case.token_ids])
        past = int((kept & (case.anchors + case.config.block_size > lengths[:, None])).sum())
        largest = max(found, key=found.get)
        print(
            f"{seed:>10}  {case.config.block_size:>5}  {len(lengths):>9}  {lengths.sum():>6}  "
            f"{kept.sum():>4}/{kept.size:<5}  {past:>12}  {theirs.loss_sum / theirs.weight_sum:<8.4f}  "
            f"{found[largest]:.1e} ({largest})"
        )
    return worst


def twin_outcomes(case: Case):
    """Name and outcome of graphcap's step changed in each way, and with another gamma."""
    for name in TWINS:
        with changed(name):
            yield name, run_graphcap(case)
    yield "gamma 5 % off", run_graphcap(dataclasses.replace(case, gamma=case.gamma * 1.05))


def largest_gradient(found: dict[str, float]) -> float:
    return max(value for name, value in found.items() if name.startswith("gradient"))


def run_twins(seed: int, modules, attention: str) -> dict[str, float]:
    """The largest relative difference of a gradient for every twin."""
    case = make_case(seed)
    theirs = run_specforge(case, modules, attention)
    return {name: largest_gradient(compare(outcome, theirs)) for name, outcome in twin_outcomes(case)}


def store(path: Path, modules, attention: str) -> None:
    """Write SpecForge's numbers of STORED_SEEDS: scalars as JSON beside the safetensors file with the entries."""
    from safetensors.torch import save_file
    from transformers import __version__ as transformers_version

    document, tensors = (
        {
            "what": "reference numbers of SpecForge's DFlash training module",
            "commit": COMMIT,
            "attention": attention,
            "torch": torch.__version__,
            "transformers": transformers_version,
            "cases": {},
        },
        {},
    )
    for seed in STORED_SEEDS:
        document["cases"][str(seed)], tensors[str(seed)] = numbers(run_specforge(make_case(seed), modules, attention))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    path.chmod(0o644)
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"stored {len(tensors)} cases in {path} and {path.with_suffix('.json').name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a clone of sgl-project/SpecForge at a6b6b02")
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--seed", type=int, help="of the first case (default: fresh)")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager", help="SpecForge's attention path")
    parser.add_argument("--store", type=Path, help="write reference numbers here (.safetensors; .json beside it)")
    options = parser.parse_args()
    check_commit(options.clone, COMMIT, "sgl-project/SpecForge")
    modules = load_specforge(options.clone)
    if options.store:
        store(options.store, modules, options.attention)
    first = options.seed if options.seed is not None else int(np.random.SeedSequence().generate_state(1)[0] % 1_000_000)
    worst = run_cases(list(range(first, first + options.cases)), modules, options.attention)
    print(f"\n{'largest over all cases':<52}  ||difference|| / ||reference||")
    for name, value in sorted(worst.items(), key=lambda item: -item[1]):
        print(f"{name:<52}  {value:.1e}")
    twins = run_twins(first, modules, options.attention)
    print(f"\n{'changed on purpose, must differ':<52}  largest difference of a gradient")
    for name, value in twins.items():
        print(f"{name:<52}  {value:.1e}{'' if value > CLEARLY_WRONG else '  NOT SEEN'}")
    equal, seen = max(worst.values()) <= TOLERANCE, min(twins.values()) > CLEARLY_WRONG
    print(f"\n{'equal' if equal else 'DIFFERENT'} within {TOLERANCE:g}; every change {'seen' if seen else 'NOT seen'}")
    return 0 if equal and seen else 1


if __name__ == "__main__":
    sys.exit(main())
