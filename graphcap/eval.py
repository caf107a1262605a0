"""`graphcap eval`: real speculative decoding on prompts, measured against plain decoding and prompt lookup.

`measure` does the decoding and returns one result; train.py ends with it, the verb prints it for any run or drafter
folder. The table itself is ops/report.py's.
"""

import contextlib
import json
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from graphcap.config import Data as DataSection
from graphcap.config import Eval as EvalSection
from graphcap.config import Recipe, load_recipe
from graphcap.config import Run as RunSection
from graphcap.config import Target as TargetSection
from graphcap.data.prompts import counted, load_prompts
from graphcap.data.sources import short
from graphcap.engine.decoding import FixedSteps
from graphcap.engine.guard import use_deterministic_math
from graphcap.errors import ConfigError
from graphcap.model.decode import EagerSteps, Reply, decode_plain, decode_speculative, prompt_lookup_committed
from graphcap.model.drafter import Drafter
from graphcap.model.ends import TargetEnds
from graphcap.model.identity import identity_of
from graphcap.model.loading import device_and_dtype, dtype_name, load_config, load_model, load_tokenizer
from graphcap.model.sampling import Sampling, generator_of
from graphcap.model.target import Target
from graphcap.ops import checkpoint, report
from graphcap.ops.export import WEIGHTS, check_fits, read_drafter, read_target

TIE = 1e-4  # two largest logits closer than this in float32: greedy decoding has no one right answer


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Tokenised prompts, when a reply ends, and how often all of them are decoded for the time."""

    token_ids: list[list[int]]
    stop_ids: set[int]
    max_new_tokens: int
    passes: int
    sampling: Sampling
    seed: int  # of the uniform numbers; each prompt has its own
    eager: bool = False  # on a GPU, too, launch the steps from Python


@dataclass(frozen=True)
class Plain:
    """Plain decoding of all prompts, and prompt lookup's acceptance on that text by block size."""

    replies: list[Reply]
    s_per_token: float
    looked_up: dict[int, dict[str, float]]


@dataclass(frozen=True)
class Measured:
    """What `measure` found: numbers for tables and files, and the replies themselves."""

    result: dict
    plain: Plain
    drafted: list[Reply]


def stop_ids_of(model, tokenizer) -> set[int]:
    """Every token that ends a reply: the generation config's and the tokenizer's end-of-sequence."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = set(ids) if isinstance(ids, (list, tuple)) else {ids}
    return (found | {tokenizer.eos_token_id}) - {None}


def measure(
    target: Target, drafter: Drafter, prompts: Prompts, *, before: Drafter | None, say, note=None, plain: Plain | None = None
) -> Measured:
    """Decode every prompt plainly and with the drafter, `prompts.passes` times by turns, and compare.

    before: the drafter as it was before training, decoded once, or None. say: called with a line of what happens next. note:
    called with "decode" before every prompt. plain: what an earlier call made of the same target and prompts, which is then
    not decoded plainly again. The result is what ops/report.table prints. Raises: nothing of its own.
    """
    plain_s, drafted_s = [], []
    plain_replies = drafted = []
    ways = "with the drafter" if plain else "plain and with the drafter"
    say(f"decoding {len(prompts.token_ids)} held-out prompts, {ways}, {prompts.passes} times")
    with _decoder(target, drafter, prompts, note) as decode:
        for _ in range(prompts.passes):
            if plain is None:
                plain_replies = decode(decode_plain)
                plain_s.append(_seconds_per_token(plain_replies))
            drafted = decode(decode_speculative)
            drafted_s.append(_seconds_per_token(drafted))
    plain = plain or Plain(plain_replies, statistics.median(plain_s), {})
    result = {
        "prompts": len(drafted),
        "max_new_tokens": prompts.max_new_tokens,
        "passes": prompts.passes,
        "temperature": prompts.sampling.temperature,
        "rule": prompts.sampling.rule,
        "seed": prompts.seed,
        "dtype": dtype_name(target.head_VD.dtype),
        "device": target.head_VD.device.type,
        "block_size": drafter.config.block_size,
        "after": report.acceptance([reply.committed for reply in drafted]),
        "prompt_lookup": _looked_up(plain, prompts, drafter.config.block_size),
        "plain_s_per_token": plain.s_per_token,
        "speculative_s_per_token": statistics.median(drafted_s),
        "distinct_4grams": report.distinct_4grams([reply.token_ids for reply in drafted]),
        "survival": report.survival([reply.accepted for reply in drafted], drafter.config.block_size),
        **_costs(plain.s_per_token, statistics.median(drafted_s), drafted),
    }
    if prompts.sampling.temperature == 0:  # above it two samples of one distribution differ, and equality says nothing
        result |= compare(plain.replies, drafted, tie=tie_of(target.head_VD.dtype))
    if before is not None:
        with _decoder(target, before, prompts, note) as decode:
            untrained = decode(decode_speculative)
        result["before"] = report.acceptance([reply.committed for reply in untrained])
    return Measured(result, plain, drafted)


def _looked_up(plain: Plain, prompts: Prompts, block_size: int) -> dict[str, float]:
    """Acceptance of prompt lookup on the plain replies, worked out once for a block size."""
    if block_size not in plain.looked_up:
        pairs = zip(prompts.token_ids, [reply.token_ids for reply in plain.replies], strict=True)
        committed = [prompt_lookup_committed(prompt, text, block_size=block_size) for prompt, text in pairs]
        plain.looked_up[block_size] = report.acceptance(committed)
    return plain.looked_up[block_size]


@contextlib.contextmanager
def _decoder(target: Target, drafter: Drafter, prompts: Prompts, note):
    """A function that decodes every prompt with decode_plain or decode_speculative; on a GPU by replaying graphs."""
    limits = {"max_new_tokens": prompts.max_new_tokens, "stop_ids": prompts.stop_ids}
    captured = target.head_VD.device.type == "cuda" and not prompts.eager
    longest = max(map(len, prompts.token_ids)) + prompts.max_new_tokens + drafter.config.block_size + 1
    steps = (FixedSteps if captured else EagerSteps)(target, drafter, max_length=longest, sampling=prompts.sampling)

    def decode(way) -> list[Reply]:
        who, replies = (target,) if way is decode_plain else (target, drafter), []
        for number, prompt in enumerate(prompts.token_ids):
            if note is not None:
                note("decode")
            steps.generator = generator_of(prompts.seed, number)
            replies.append(way(*who, prompt, steps=steps, **limits))
        return replies

    try:
        yield decode
    finally:
        if captured:
            steps.close()


def at_dtype(target: Target | TargetEnds, recipe: Recipe) -> Target:
    """The whole target in `eval.dtype`: itself where it is that already, else loaded from its own files."""
    dtype = target.head_VD.dtype if recipe.eval.dtype == "auto" else getattr(torch, recipe.eval.dtype)
    if isinstance(target, Target) and dtype == target.head_VD.dtype:
        return target
    section = recipe.target
    model = load_model(
        section.path,
        revision=section.revision,
        dtype=dtype,
        device=target.head_VD.device,
        trust_remote_code=section.trust_remote_code,
    )
    return Target(model, target.target_layer_ids)


def _seconds_per_token(replies: list[Reply]) -> float:
    """Decoding seconds ÷ tokens after each reply's first, which comes with the prompt."""
    return sum(reply.decode_s for reply in replies) / max(1, sum(len(reply.token_ids) - 1 for reply in replies))


def _costs(plain_s: float, drafted_s: float, drafted: list[Reply]) -> dict[str, float]:
    """What verifying and drafting a block cost, in plain decoding steps. plain_s, drafted_s: seconds per token."""
    visits = max(1, sum(len(reply.accepted) for reply in drafted))
    whole = drafted_s / plain_s * sum(len(reply.token_ids) - 1 for reply in drafted) / visits
    share = sum(reply.draft_s for reply in drafted) / max(1e-12, sum(reply.decode_s for reply in drafted))
    return {"draft_cost": whole * share, "verify_cost": whole * (1 - share)}


def tie_of(dtype: torch.dtype) -> float:
    """How close the two largest logits may be for a difference to be a tie: TIE, or 32 steps of a coarser dtype."""
    return max(TIE, 32 * torch.finfo(dtype).eps)


def compare(plain: list[Reply], drafted: list[Reply], *, tie: float) -> dict:
    """How many replies are equal token for token; each first difference is a tie or a real difference, in words."""
    equal, ties, differences = 0, [], []
    for number, (left, right) in enumerate(zip(plain, drafted, strict=True)):
        if left.token_ids == right.token_ids:
            equal += 1
            continue
        pairs = zip(left.token_ids, right.token_ids)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left.token_ids), len(right.token_ids)))
        gap = left.gaps[place] if place < len(left.gaps) else float("inf")
        line = f"prompt {number}, token {place}: the two largest logits are {gap:.1e} apart"
        (ties if gap <= tie else differences).append(line)
    return {"equal": equal, "ties": ties, "differences": differences, "tie_below": tie}


def run_eval(folders: list[str], *, target: TargetSection | None, prompt_paths: list[str], settings: dict) -> list[dict]:
    """Measure every run or drafter folder; the verb `eval`.

    target and prompt_paths: as the run has them where not given. settings: prompts, max_new_tokens, passes, temperature, rule
    and seed, or None for the run's; show, how many replies of each folder the results hold as text; eager, no graphs. Folders
    with the same target and prompts share plain decoding; `baseline` numbers what they are compared with.
    Raises: ConfigError if a folder is neither a run nor a drafter, or if a drafter folder comes without target and prompts;
    CheckpointError for a drafter that is damaged or another target's: before anything is decoded.
    """
    found = []
    for folder in map(Path, folders):
        recipe = load_recipe(folder / "config.toml") if (folder / "config.toml").is_file() else None
        weights = checkpoint.best(folder / "checkpoints") or checkpoint.newest(folder / "checkpoints")[0] if recipe else folder
        if weights is None or not (weights / WEIGHTS).is_file():
            raise ConfigError(
                "folder",
                folder,
                expected=f"a run with a complete checkpoint, or a drafter's folder with {WEIGHTS}",
                got="neither",
                fix="give runs/out/NAME, or a folder in z-lab's format",
            )
        if recipe is None and not (target and prompt_paths):
            raise ConfigError(
                "folder",
                folder,
                expected="--target and --prompts beside a drafter's folder",
                got="only the folder",
                fix=f"graphcap eval {folder} --target FOLDER --prompts FILE.jsonl",
            )
        own = target or recipe.target
        drafter = read_drafter(weights, dtype=torch.float32, device=torch.device("cpu"))
        check_fits(drafter.config, load_config(own.path, **_where(own)), folder=weights)
        found.append((folder, weights, recipe, own))
    use_deterministic_math()
    known: dict[tuple, Plain] = {}
    return [
        {"folder": str(folder), **_measure_folder(weights, recipe, own, prompt_paths, settings, known)}
        for folder, weights, recipe, own in found
    ]


def _measure_folder(weights, recipe, own: TargetSection, prompt_paths, settings, known) -> dict:
    """One folder's result. known: plain decoding of the folders before, by target and prompts; this one's is added."""
    target, drafter, tokenizer = _load(weights, recipe, own)
    prompts, said = _prompts(target, tokenizer, recipe, prompt_paths, settings)
    key = (own.path, own.revision, target.head_VD.dtype, target.head_VD.device, repr(prompts))
    measured = measure(target, drafter, prompts, before=None, say=lambda line: None, plain=known.get(key))
    known.setdefault(key, measured.plain)
    shown = [report.runs_of(reply, tokenizer.decode) for reply in measured.drafted[: settings["show"]]]
    place = {"weights": str(weights), "baseline": list(known).index(key)}
    trained_for, here = read_target(weights), identity_of(target.model, own.path)
    if trained_for is not None and trained_for.fingerprint != here.fingerprint:
        place["other_target"] = f"trained for {trained_for}; measured on {here}"
    return {**measured.result, **place, **said, **({"shown": shown} if shown else {})}


def _where(own: TargetSection) -> dict:
    return {"revision": own.revision, "trust_remote_code": own.trust_remote_code}


def _load(weights: Path, recipe: Recipe | None, own: TargetSection) -> tuple:
    """Target, drafter and tokenizer of a folder, on the device and in the dtype of its run or the defaults."""
    wanted = [recipe.eval.dtype if recipe else "auto", own.dtype]
    dtype_wanted = next((name for name in wanted if name != "auto"), "auto")
    device, dtype = device_and_dtype(recipe.run.device if recipe else "auto", dtype_wanted)
    model = load_model(own.path, dtype=dtype, device=device, **_where(own))
    drafter = read_drafter(weights, dtype=dtype, device=device)
    return Target(model, drafter.config.target_layer_ids), drafter, load_tokenizer(own.path, **_where(own))


def _prompts(target: Target, tokenizer, recipe: Recipe | None, prompt_paths: list[str], settings: dict) -> tuple[Prompts, dict]:
    """The prompts, and what the result says of them."""
    evaluation, data = recipe.eval if recipe else EvalSection(), recipe.data if recipe else DataSection()
    seed = (recipe.run if recipe else RunSection()).seed

    def chosen(name: str):
        return settings[name] if settings[name] is not None else getattr(evaluation, name)

    dropped: Counter = Counter()
    texts = load_prompts(
        prompt_paths or data.held_out,
        tokenizer,
        count=chosen("prompts"),
        on_bad_line=data.on_bad_line,
        max_length=target.model.config.get_text_config().max_position_embeddings - 1,
        dropped=dropped,
    )
    prompts = Prompts(
        token_ids=texts,
        stop_ids=stop_ids_of(target.model, tokenizer),
        max_new_tokens=chosen("max_new_tokens"),
        passes=chosen("passes"),
        sampling=Sampling(temperature=chosen("temperature"), rule=chosen("rule")),
        seed=seed if settings["seed"] is None else settings["seed"],
        eager=settings["eager"],
    )
    said = {"prompts_from": f"prompts of {', '.join(map(short, prompt_paths))}"} if prompt_paths else {}
    return prompts, said | ({"not_used": f"conversations not used: {counted(dropped)}"} if dropped else {})


def print_results(results: list[dict], *, as_json: bool, terminal: bool) -> None:
    """Every result as a table under its folder, then all side by side, or all as one JSON document."""
    if as_json:
        print(json.dumps(checkpoint.finite(results), indent=1, allow_nan=False))
        return
    for result in results:
        print(f"{result['folder']}\n{report.table(result)}\n")
        if "shown" in result and not terminal:
            print("replies, with |what was committed together| and ~drafts that were refused~:\n")
        for number, runs in enumerate(result.get("shown", [])):
            print(f"reply {number}\n{report.reply_text(runs, terminal=terminal)}\n")
    if len(results) > 1:
        print(report.side_by_side(results))
