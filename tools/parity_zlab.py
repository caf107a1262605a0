"""Compare graphcap's export and speculative decoding with z-lab's own DFlash model and generate loop.

Needs a clone of https://github.com/z-lab/dflash at commit 44947fb, the CPU, and transformers 5.17: from 5.18 on the
caches refuse the positive length by which z-lab's loop crops them. graphcap's side runs on both, which
tests/parity/test_parity_zlab.py shows with stored numbers.

    python tools/parity_zlab.py CLONE --run runs/out/NAME               a run's best drafter on its held-out prompts
    python tools/parity_zlab.py CLONE --drafter FOLDER --target FOLDER  a drafter in z-lab's format
    python tools/parity_zlab.py CLONE                                   a small random target, a drafter fitted to it
    python tools/parity_zlab.py CLONE --store tests/parity/data/zlab.safetensors     the same; z-lab's numbers are kept

z-lab's model loads graphcap's export with no tensor missing and none unexpected; both decode the same prompts in
float32 at temperature 0 and must commit the same tokens with the same list of accepted lengths. A first difference
counts only if the two largest logits there are further apart than 1e-4. Hidden states and logits of every block are
compared as well, by ||difference|| / ||reference||. z-lab's mathematics is untouched; only its clock is replaced where
there is no CUDA. z-lab's loop verifies once more when the reply is already complete (its limit met exactly, or its
first token ends it); that adds no token, graphcap does not do it, and it is left out of the list and counted.
A twin is graphcap with one thing changed on purpose: there the comparison must fail. Exit code 1: they differ.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from graphcap.data.planner import Bucket
from graphcap.engine.buckets import Engine
from graphcap.engine.optimizer import Hyper
from graphcap.engine.step import DrafterStep
from graphcap.errors import UserError
from graphcap.model.blocks import decay, default_gamma
from graphcap.model.decode import decode_plain, decode_speculative
from graphcap.model.drafter import Drafter, DrafterConfig
from graphcap.model.loading import load_model
from graphcap.model.target import Target
from graphcap.ops.export import CONFIG, WEIGHTS, config_document, read_drafter, weight_tensors

try:
    from tools.parity_specforge import check_commit, relative
except ImportError:  # started as a script: this folder is on the path, not the one above
    from parity_specforge import check_commit, relative

COMMIT = "44947fbf71114e241c96de194f4b382b5dd330d0"
TIE = 1e-4  # two largest logits closer than this: greedy decoding has no one right answer
TOLERANCE = 1e-5
CLEARLY_WRONG = 1e-3  # a twin's hidden states differ at least this much
CPU = torch.device("cpu")

# The built-in case: a random target and a drafter fitted to it, small enough to store.
CASE_SEED, CASE_PROMPTS, CASE_NEW_TOKENS, CASE_LEAST_GAP = 5, 16, 40, 1e-3
BLOCKS_STORED, REPLY_STORED = 3, ("prompt", "token_ids", "accepted", "extra")
FIT_UPDATES, FIT_ANCHORS, FIT_DOCUMENTS = 600, 48, 256
TARGET_SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    rms_norm_eps=1e-6,
)
THETA, MASK_TOKEN, STOP_IDS = 10000.0, 95, (3, 89, 94)


@dataclass
class Trace:
    """One prompt's decoding: what was committed, and the numbers behind it, one entry a verification."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)  # [K-1, D] of the drafter's final norm, without slot 0
    logits: list[Tensor] = field(default_factory=list)  # [K, V] of the target over the block
    draft_gaps: list[list[float]] = field(default_factory=list)  # largest minus second largest logit of slots 1 … K-1
    target_gaps: list[list[float]] = field(default_factory=list)  # of slots 0 … K-1
    first_gap: float = float("inf")  # of the reply's first token, which comes with the prompt
    extra: int = 0  # z-lab's verifications after the reply was complete


@dataclass(frozen=True)
class Job:
    """A drafter's folder, a loader of fresh copies of its target, and what to decode."""

    folder: Path
    load_target: object  # () -> transformers model, float32 on the CPU
    prompts: list[list[int]]
    stop_ids: set[int]
    max_new_tokens: int


# --------------------------------------------------------------------------------------------------------------- z-lab


def load_zlab(clone: Path):
    """z-lab's dflash/model.py as a module; without CUDA its clock is the host's."""
    check_transformers()
    spec = importlib.util.spec_from_file_location("zlab_dflash_model", clone / "dflash" / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not torch.cuda.is_available():
        module._cuda_time = time.perf_counter
    return module


def check_transformers() -> None:
    """Ends the program where z-lab's loop cannot run."""
    from transformers import __version__ as version

    if tuple(int(part) for part in version.split(".")[:2]) > (5, 17):
        sys.exit(
            f"transformers '{version}': expected 5.17 or older, got {version}; z-lab's loop crops its caches by a "
            "positive length, an error from 5.18 on. Fix: use an environment with transformers==5.17.0."
        )


def load_zlab_drafter(module, folder: Path, attention: str) -> nn.Module:
    """z-lab's model from our export. Ends the program if a tensor is missing, unexpected or misshapen."""
    model, info = module.DFlashDraftModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = {kind: sorted(map(str, info[kind])) for kind in kinds if info[kind]}
    if wrong:
        sys.exit(f"export '{folder}': expected every tensor of z-lab's DFlashDraftModel and no other, got {wrong}.")
    return model.eval()


def run_zlab(module, job: Job, attention: str) -> list[Trace]:
    """z-lab's model and loop over the job's prompts."""
    drafter, target = load_zlab_drafter(module, job.folder, attention), job.load_target()
    logits, hidden, traces = [], [], []
    target.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0].float().clone()))
    drafter.register_forward_hook(lambda _, __, out: hidden.append(out[0, 1:].clone()))
    for prompt in job.prompts:
        logits.clear(), hidden.clear()
        out = module.dflash_generate(
            drafter,
            target,
            torch.tensor([prompt]),
            job.max_new_tokens,
            sorted(job.stop_ids) or None,
            0.0,
            return_stats=True,
        )
        draft_gaps, target_gaps = ([gaps(block) for block in logits[first::2]] for first in (1, 2))
        trace = Trace(
            prompt,
            out.output_ids[0, len(prompt) :].tolist(),
            list(out.acceptance_lengths),
            list(hidden),
            logits[2::2],
            draft_gaps,
            target_gaps,
            gaps(logits[0])[-1],
        )
        drop_extra(trace, first_token=int(logits[0][-1].argmax()), job=job)
        traces.append(trace)
    return traces


def gaps(logits_KV: Tensor) -> list[float]:
    top = logits_KV.topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).tolist()


def drop_extra(trace: Trace, *, first_token: int, job: Job) -> None:
    """Leave out the verification that began when the reply was already complete: it adds no token."""
    before = 1 + sum(trace.accepted[:-1])
    complete = before >= job.max_new_tokens or first_token in job.stop_ids
    if trace.accepted and complete:
        for values in (trace.accepted, trace.hidden, trace.logits, trace.draft_gaps, trace.target_gaps):
            values.pop()
        trace.extra = 1


# ------------------------------------------------------------------------------------------------------------ graphcap


def run_graphcap(target: Target, drafter: Drafter, job: Job) -> list[Trace]:
    """graphcap's decode_speculative over the job's prompts."""
    logits, hidden, traces = [], [], []
    hooks = [
        target.model.lm_head.register_forward_hook(lambda _, __, out: logits.append(out[0].float().clone())),
        drafter.register_forward_hook(lambda _, __, out: hidden.append(out.clone())),
    ]
    for prompt in job.prompts:
        logits.clear(), hidden.clear()
        reply = decode_speculative(target, drafter, prompt, max_new_tokens=job.max_new_tokens, stop_ids=job.stop_ids)
        traces.append(Trace(prompt, reply.token_ids, reply.accepted, list(hidden), logits[1:]))
    for hook in hooks:
        hook.remove()
    return traces


def change_taps(drafter: Drafter) -> None:
    ids = tuple(layer_id + 1 for layer_id in drafter.config.target_layer_ids)
    drafter.config = dataclasses.replace(drafter.config, target_layer_ids=ids)


def change_theta(drafter: Drafter) -> None:
    drafter.config = dataclasses.replace(drafter.config, rope_theta=drafter.config.rope_theta * 1.5)


def change_mask_token(drafter: Drafter) -> None:
    drafter.config = dataclasses.replace(drafter.config, mask_token_id=drafter.config.mask_token_id - 1)


def change_weight(drafter: Drafter) -> None:
    weight = drafter.layers[-1].mlp.down_proj.weight
    weight[3, 5] += weight.abs().max()


def change_order(drafter: Drafter) -> None:
    hidden = drafter.config.hidden_size
    drafter.fc.weight.copy_(drafter.fc.weight.roll(hidden, dims=1))


TWINS = {
    "tapped layers one too high": change_taps,
    "features in another order": change_order,
    "rope_theta half as large again": change_theta,
    "another mask token": change_mask_token,
    "one weight changed": change_weight,
}


def run_twin(name: str, job: Job) -> list[Trace]:
    drafter = read_drafter(job.folder, dtype=torch.float32, device=CPU)
    TWINS[name](drafter)
    return run_graphcap(Target(job.load_target(), drafter.config.target_layer_ids), drafter, job)


# ------------------------------------------------------------------------------------------------------------- compare


def first_difference(ours: Trace, theirs: Trace) -> tuple[str, float]:
    """Where the two part, in words, and how far apart the two largest logits are there; ("", inf) where they do not."""
    if ours.token_ids == theirs.token_ids and ours.accepted == theirs.accepted:
        return "", float("inf")
    if ours.token_ids[0] != theirs.token_ids[0]:
        return "token 0", theirs.first_gap
    place = 1
    for number, (mine, reference) in enumerate(zip(ours.accepted, theirs.accepted)):
        span = slice(place, place + min(mine, reference))
        if mine != reference or ours.token_ids[span] != theirs.token_ids[span]:
            slot = min(mine, reference) - 1  # the last slot on which both sides may still agree
            near = [
                gap
                for values in (theirs.draft_gaps, theirs.target_gaps)
                for part in values[number : number + 1]
                for gap in part[: slot + 1]
            ]
            words = f"verification {number} (token {place}): {mine} against {reference} accepted"
            return words, min(near, default=float("inf"))
        place += reference
    return f"{len(ours.accepted)} verifications against {len(theirs.accepted)}", float("inf")


def block_differences(ours: Trace, theirs: Trace) -> dict[str, float]:
    """Largest relative difference of a block's hidden states and logits, up to where the two part."""
    found = {"drafter's hidden states": 0.0, "target's logits": 0.0}
    for number in range(min(len(ours.hidden), len(theirs.hidden))):
        pairs = ((ours.hidden, theirs.hidden), (ours.logits, theirs.logits))
        for name, (mine, reference) in zip(found, pairs, strict=True):
            found[name] = max(found[name], relative(mine[number] - reference[number], reference[number]))
        if ours.accepted[number] != theirs.accepted[number]:
            break
    return found


def compare(ours: list[Trace], theirs: list[Trace]) -> dict:
    """How many prompts are equal, which part at a tie or for real, and the largest relative differences."""
    found = {"equal": 0, "ties": [], "differences": [], "largest": {}}
    for number, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        words, gap = first_difference(mine, reference)
        if not words:
            found["equal"] += 1
        else:
            line = f"prompt {number}, {words}; the two largest logits are {gap:.1e} apart"
            found["ties" if gap <= TIE else "differences"].append(line)
        for name, value in block_differences(mine, reference).items():
            found["largest"][name] = max(found["largest"].get(name, 0.0), value)
    return found


def agrees(found: dict) -> bool:
    return not found["differences"] and max(found["largest"].values()) <= TOLERANCE


def print_comparison(ours: list[Trace], theirs: list[Trace], found: dict) -> None:
    print("prompt  tokens  verifications  accepted by graphcap")
    for number, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        same = "" if mine.accepted == reference.accepted else f"   z-lab {' '.join(map(str, reference.accepted))}"
        accepted = " ".join(map(str, mine.accepted))
        print(f"{number:>6}  {len(mine.token_ids):>6}  {len(mine.accepted):>13}  {accepted}{same}")
    visits, accepted = sum(len(trace.accepted) for trace in theirs), sum(sum(trace.accepted) for trace in theirs)
    print(
        f"\n{found['equal']} of {len(ours)} prompts equal in tokens and accepted lengths; "
        f"{len(found['ties'])} part at a tie, {len(found['differences'])} for real"
    )
    print(
        f"mean accepted {accepted / max(1, visits):.3f} over {visits} verifications; z-lab made "
        f"{sum(trace.extra for trace in theirs)} more after a complete reply"
    )
    for line in found["ties"] + found["differences"]:
        print(f"  {line}")
    print(f"\n{'largest over all blocks':<34}  ||difference|| / ||reference||")
    for name, value in found["largest"].items():
        print(f"{name:<34}  {value:.1e}")


def check(module, job: Job, attention: str) -> tuple[bool, list[Trace]]:
    """Run both sides and the twins, print, and return whether all is as it must be, and z-lab's traces."""
    theirs = run_zlab(module, job, attention)
    drafter = read_drafter(job.folder, dtype=torch.float32, device=CPU)
    ours = run_graphcap(Target(job.load_target(), drafter.config.target_layer_ids), drafter, job)
    found = compare(ours, theirs)
    print_comparison(ours, theirs, found)
    good = agrees(found)
    print(f"\n{'changed on purpose, must differ':<34}  prompts equal  hidden states")
    for name in TWINS:
        twin = compare(run_twin(name, job), theirs)
        hidden = twin["largest"]["drafter's hidden states"]
        seen = hidden > CLEARLY_WRONG
        good &= seen
        print(f"{name:<34}  {twin['equal']:>13}  {hidden:.1e}{'' if seen else '  NOT SEEN'}")
    print(f"\nz-lab's model loaded the {len(drafter.state_dict())} tensors of the export: none missing or unexpected")
    return good, theirs


# ---------------------------------------------------------------------------------------------- the built-in small case


def case_target(seed: int = CASE_SEED) -> nn.Module:
    """A random Qwen3 of 6 layers, float32; its weights from numpy's frozen generator, the same everywhere."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **TARGET_SIZES,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        eos_token_id=list(STOP_IDS),
        pad_token_id=0,
        bos_token_id=None,
        use_sliding_window=False,
    )
    model, random = Qwen3ForCausalLM(config).float(), np.random.RandomState(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            values = random.standard_normal(tuple(parameter.shape))
            spread = 1.0 if "embed" in name else 0.07
            values = 1 + 0.1 * values if parameter.dim() == 1 else spread * values
            parameter.copy_(torch.from_numpy(values))
    return model.requires_grad_(False).eval()


def case_config() -> DrafterConfig:
    sizes = TARGET_SIZES
    return DrafterConfig(
        hidden_size=sizes["hidden_size"],
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=sizes["vocab_size"],
        rms_norm_eps=1e-6,
        rope_theta=THETA,
        max_position_embeddings=256,
        block_size=8,
        mask_token_id=MASK_TOKEN,
        target_layer_ids=(1, 2, 3),
        num_target_layers=sizes["num_hidden_layers"],
    )


def case_prompts(seed: int, count: int) -> list[list[int]]:
    random = np.random.RandomState(seed)
    return [random.randint(0, max(STOP_IDS), size=random.randint(3, 12)).tolist() for _ in range(count)]


def fit_case_drafter() -> Drafter:
    """A drafter fitted to the case's target on that target's replies; rounded to bfloat16, so that it stores small."""
    config = case_config()
    drafter, target = Drafter(config), Target(case_target(), config.target_layer_ids)
    drafter.initialize(CASE_SEED)
    documents = []
    for prompt in case_prompts(CASE_SEED + 1, FIT_DOCUMENTS):
        reply = decode_plain(target, prompt, max_new_tokens=CASE_NEW_TOKENS, stop_ids=set())
        documents.append((prompt, reply.token_ids))
    hyper = Hyper(
        learning_rate=4e-3,
        warmup_fraction=0.05,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        num_updates=FIT_UPDATES,
    )
    step = DrafterStep(target, drafter, decay=decay(8, default_gamma(8)), hyper=hyper, chunk_tokens=512)
    bucket, random = Bucket(4 * (CASE_NEW_TOKENS + 12), FIT_ANCHORS), np.random.RandomState(CASE_SEED)
    engine = Engine(step, (bucket,))
    for _ in range(FIT_UPDATES):
        engine.fill(bucket, _fit_row([documents[i] for i in random.choice(len(documents), 4, replace=False)], random))
        engine.micro_step(bucket)
        engine.update()
    return drafter.to(torch.bfloat16).requires_grad_(False)


def _fit_row(documents: list[tuple[list[int], list[int]]], random: np.random.RandomState) -> dict[str, np.ndarray]:
    token_ids = np.concatenate([prompt + reply for prompt, reply in documents])
    supervised = np.concatenate([[0] * len(prompt) + [1] * len(reply) for prompt, reply in documents])
    position = np.concatenate([np.arange(len(prompt) + len(reply)) for prompt, reply in documents])
    candidates = np.flatnonzero(supervised[:-1] & supervised[1:])
    anchors = np.sort(random.choice(candidates, FIT_ANCHORS, replace=False))
    arrays = {"token_ids": token_ids, "position": position, "supervised": supervised, "anchors": anchors}
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def write_export(folder: Path, document: dict, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(document, indent=1), encoding="utf-8")


def case_job(folder: Path) -> Job:
    """The built-in case with an export made on the spot; prompts with a choice near a tie are left out."""
    drafter = fit_case_drafter()
    write_export(folder, config_document(drafter.config, torch.bfloat16), weight_tensors(drafter))
    return Job(folder, case_target, case_prompts(CASE_SEED + 2, 2 * CASE_PROMPTS), set(STOP_IDS), CASE_NEW_TOKENS)


def clear_of_ties(traces: list[Trace]) -> list[Trace]:
    """The first CASE_PROMPTS traces whose every choice is clear."""
    clear = []
    for trace in traces:
        near = [trace.first_gap, *(gap for values in trace.draft_gaps + trace.target_gaps for gap in values)]
        if min(near) > CASE_LEAST_GAP:
            clear.append(trace)
    return clear[:CASE_PROMPTS]


def store(path: Path, job: Job, traces: list[Trace], module, attention: str) -> None:
    """Write the case's drafter and z-lab's hidden states and logits of a few blocks; the rest as JSON beside it."""
    from safetensors.torch import load_file
    from transformers import __version__ as transformers_version

    clear = clear_of_ties(traces)
    if len(clear) < CASE_PROMPTS:
        sys.exit(f"case '{CASE_SEED}': expected {CASE_PROMPTS} prompts clear of ties, got {len(clear)}. Fix: change CASE_SEED.")
    loaded = load_zlab_drafter(module, job.folder, attention).state_dict()
    document = {
        "what": "reference numbers of z-lab's DFlash model and generate loop",
        "commit": COMMIT,
        "attention": attention,
        "torch": torch.__version__,
        "transformers": transformers_version,
        "target_seed": CASE_SEED,
        "max_new_tokens": job.max_new_tokens,
        "stop_ids": sorted(job.stop_ids),
        "least_gap": CASE_LEAST_GAP,
        "drafter_config": json.loads((job.folder / CONFIG).read_text(encoding="utf-8")),
        "tensor_shapes": {name: list(tensor.shape) for name, tensor in loaded.items()},
        "replies": [{name: getattr(trace, name) for name in REPLY_STORED} for trace in clear],
    }
    tensors = {f"drafter.{name}": tensor for name, tensor in load_file(job.folder / WEIGHTS).items()}
    for number in [number for number, trace in enumerate(clear) if trace.hidden][:BLOCKS_STORED]:
        trace = clear[number]
        tensors[f"reference.{number}.hidden"], tensors[f"reference.{number}.logits"] = trace.hidden[0], trace.logits[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    path.chmod(0o644)
    path.with_suffix(".json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    print(f"stored {len(clear)} prompts in {path} and {path.with_suffix('.json').name}")


# ----------------------------------------------------------------------------------------------------------------- door


def run_job(run: Path | None, drafter: Path | None, target: str | None, conversations: str | None, prompts: int) -> Job:
    """What to decode of a run's folder, or of a drafter's folder beside its target."""
    from graphcap.config import load_recipe
    from graphcap.eval import load_prompts, stop_ids_of
    from graphcap.model.loading import load_tokenizer
    from graphcap.ops import checkpoint

    paths, new_tokens = (conversations or f"{target}/conversations/held_out.jsonl",), 96
    if run:
        recipe = load_recipe(run / "config.toml")
        drafter = checkpoint.best(run / "checkpoints") or checkpoint.newest(run / "checkpoints")[0]
        if drafter is None:
            sys.exit(f"run '{run}': expected a complete checkpoint, got none. Fix: let it train until it saves one.")
        target = target or recipe.target.path
        paths, new_tokens = (conversations,) if conversations else recipe.data.held_out, recipe.eval.max_new_tokens

    def load_target() -> nn.Module:
        return load_model(target, revision="main", dtype=torch.float32, device=CPU, trust_remote_code=False)

    tokenizer = load_tokenizer(target, revision="main", trust_remote_code=False)
    model = load_target()
    limits = {"on_bad_line": "error", "max_length": model.config.get_text_config().max_position_embeddings - 1}
    loaded = load_prompts(paths, tokenizer, count=prompts, dropped=Counter(), **limits)
    return Job(drafter, load_target, loaded, stop_ids_of(model, tokenizer), new_tokens)


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextmanager
def chosen_job(options):
    if options.run or options.drafter:
        yield run_job(options.run, options.drafter, options.target, options.conversations, options.prompts)
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"no run and no drafter given: the built-in case, fitting its drafter for {FIT_UPDATES} updates")
        yield case_job(Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a clone of z-lab/dflash at 44947fb")
    parser.add_argument("--run", type=Path, help="a run of graphcap: its best drafter, target and held-out prompts")
    parser.add_argument("--drafter", type=Path, help="a drafter's folder in z-lab's format; needs --target")
    parser.add_argument("--target", help="the target's folder")
    parser.add_argument("--conversations", help="JSONL with prompts (default: the run's, or the target folder's)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa", help="attention of z-lab's drafter")
    parser.add_argument("--store", type=Path, help="write the small case's numbers (.safetensors; .json beside it)")
    options = parser.parse_args()
    if options.drafter and not options.target:
        parser.error("--drafter needs --target FOLDER")
    if options.store and (options.run or options.drafter):
        parser.error("--store takes the built-in case: leave out --run and --drafter")
    check_commit(options.clone, COMMIT, "z-lab/dflash")
    module = load_zlab(options.clone)
    quiet_transformers()
    with chosen_job(options) as job:
        good, theirs = check(module, job, options.attention)
        if options.store and good:
            store(options.store, job, theirs, module, options.attention)
    print("equal" if good else "DIFFERENT")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(str(error))
