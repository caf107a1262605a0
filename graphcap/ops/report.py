"""Acceptance lengths with their uncertainty, the tables of a run and of several drafters, replies as they were committed.

Called by train.py, cli.py, eval.py and export.py. Loads no torch.
"""

from pathlib import Path

import numpy as np

from graphcap.data.sample import harmless

BOOTSTRAP_DRAWS = 2000


def acceptance(committed: list[list[int]]) -> dict[str, float]:
    """Acceptance length τ of a set of replies: tokens committed ÷ verifications, bonus token included.

    committed: for every reply the tokens each verification added. Returns tau (pooled over all replies), low and high (its
    95 % interval, bootstrap over replies, seeded), mean (the mean of the replies' own means) and verifications. Replies
    that ended with their first token needed no verification and count in nothing.
    """
    committed = [steps for steps in committed if steps]
    tokens = np.array([sum(steps) for steps in committed], float)
    visits = np.array([len(steps) for steps in committed], float)
    if not len(visits):
        return {"tau": float("nan"), "low": float("nan"), "high": float("nan"), "mean": float("nan"), "verifications": 0}
    draws = np.random.default_rng(0).integers(0, len(visits), (BOOTSTRAP_DRAWS, len(visits)))
    low, high = np.quantile(tokens[draws].sum(1) / visits[draws].sum(1), [0.025, 0.975])
    return {
        "tau": float(tokens.sum() / visits.sum()),
        "low": float(low),
        "high": float(high),
        "mean": float((tokens / visits).mean()),
        "verifications": int(visits.sum()),
    }


def survival(accepted: list[list[int]], block_size: int) -> list[float]:
    """Share of verifications that kept at least k drafts, for k = 1 … K-1."""
    lengths = np.array([length for reply in accepted for length in reply])
    return [float((lengths > k).mean()) if len(lengths) else float("nan") for k in range(1, block_size)]


def distinct_4grams(replies: list[list[int]]) -> float:
    """Distinct token 4-grams within each reply ÷ all 4-grams, pooled over replies: 1 where no reply repeats itself."""
    distinct = total = 0
    for reply in replies:
        grams = [tuple(reply[i : i + 4]) for i in range(len(reply) - 3)]
        distinct, total = distinct + len(set(grams)), total + len(grams)
    return distinct / total if total else float("nan")


def number(value: float | None, form: str = ".2f") -> str:
    """A number as text, or a dash where there is none: no verification was needed, or none was made."""
    return "–" if value is None or value != value else format(value, form)


def table(result: dict, folder: Path | None = None) -> str:
    """The final table of a run or of `graphcap eval`, as text. folder: the run's, to which the result's paths are relative."""
    at = (lambda path: str(folder / path)) if folder else str
    conditions = (
        f"{result['prompts']} {result.get('prompts_from', 'held-out prompts')} · {sampling_text(result)} · "
        f"at most {result['max_new_tokens']} new tokens · "
        f"{result['dtype']} on {result['device']}"
    )
    lines = [
        conditions,
        *(result[name] for name in ("not_used", "other_target") if name in result),
        "",
        f"{'acceptance length τ (tokens a verification)':<46}{'pooled':>8}{'95 % interval':>18}{'mean of means':>16}",
    ]
    for name, label in (
        ("before", "drafter before training"),
        ("after", "drafter after training" if "before" in result else "drafter"),
        ("prompt_lookup", "prompt lookup, no model"),
    ):
        if name in result:
            row = result[name]
            interval = f"{number(row['low'])} … {number(row['high'])}"
            lines.append(f"  {label:<44}{number(row['tau']):>8}{interval:>18}{number(row['mean']):>16}")
    if result.get("walked_estimate") is not None:
        lines.append(f"  {'walked estimate on held-out text':<44}{number(result['walked_estimate']):>8}")
    lines.append("")
    if "equal" in result:
        lines.append(f"tokens equal to plain greedy decoding           {_equality(result)}")
        lines += [f"  {tie}" for tie in result["ties"] + result["differences"]]
    plain, drafted = result["plain_s_per_token"], result["speculative_s_per_token"]
    of_run = Path(result["weights"]).parent.name == "checkpoints"
    lines += [
        f"seconds per token, plain                        {plain:.5f}",
        f"seconds per token, with the drafter             {drafted:.5f}  = {drafted / plain:.2f} × plain "
        f"(median of {result['passes']} passes)",
        f"distinct 4-grams of the replies                 {number(result['distinct_4grams'])}",
        "",
        "what limits them",
        *_limits(result),
        "",
        f"{'weights, ready to export' if of_run else 'weights':<27}{at(result['weights'])}",
    ]
    if result.get("checkpoint"):
        lines.append(f"checkpoint to resume from  {at(result['checkpoint'])}")
    return "\n".join(lines)


def side_by_side(results: list[dict]) -> str:
    """One table of several results of `graphcap eval`, as text: a line a folder, then what they are compared with."""
    rows = [("", "τ pooled", "95 % interval", "mean of means", "distinct 4-grams", "s per token", "× plain", "equal to plain")]
    for baseline in dict.fromkeys(result["baseline"] for result in results):
        group = [result for result in results if result["baseline"] == baseline]
        for result in group:
            seconds, plain = result["speculative_s_per_token"], result["plain_s_per_token"]
            equal = f"{result['equal']} of {result['prompts']}" if "equal" in result else "–"
            speed = (number(result["distinct_4grams"]), f"{seconds:.5f}", f"{seconds / plain:.2f}", equal)
            rows.append((result["folder"], *_acceptance_cells(result["after"]), *speed))
        for block_size, result in {result["block_size"]: result for result in group}.items():
            name = f"prompt lookup, blocks of {block_size}"
            rows.append((name, *_acceptance_cells(result["prompt_lookup"]), "", "", "", ""))
        rows.append(("plain decoding", "", "", "", "", f"{group[0]['plain_s_per_token']:.5f}", "1.00", ""))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join(lines)


def _acceptance_cells(row: dict) -> tuple[str, str, str]:
    return number(row["tau"]), f"{number(row['low'])} … {number(row['high'])}", number(row["mean"])


def sampling_text(result: dict) -> str:
    """Temperature, and above 0 rule and seed. A result from before there was a choice has none of them."""
    if not result.get("temperature"):
        return "temperature 0"
    return f"temperature {result['temperature']:g}, rule {result['rule']}, seed {result['seed']}"


def runs_of(reply, decode) -> list[tuple[str, str]]:
    """A reply (model/decode.Reply) as pairs of text: what one step committed, and the drafts it refused.

    decode: from token ids to text. The first pair is the token that came with the prompt. A character whose bytes two runs
    share stands in the later one.
    """
    runs, end, done = [], 0, 0
    for size, rejected in zip([1, *reply.committed], [[], *reply.rejected], strict=True):
        end += size
        text = decode(reply.token_ids[:end])
        text = text.rstrip("\ufffd") if end < len(reply.token_ids) else text
        runs.append((text[done:], decode(rejected) if rejected else ""))
        done = max(done, len(text))
    return runs


SHADES = ("\x1b[38;5;255;48;5;236m", "\x1b[38;5;255;48;5;241m")  # light text on two dark greys, whatever the terminal's own
STRUCK, NORMAL = "\x1b[9;31m", "\x1b[0m"


def reply_text(runs: list[tuple[str, str]], *, terminal: bool) -> str:
    """Committed runs in alternating shade, refused drafts struck through; without a terminal |run| and ~refused~."""
    pieces = []
    for number, (committed, rejected) in enumerate(runs):
        committed, rejected = harmless(committed), harmless(rejected)
        if not terminal:
            pieces.append((f"|{committed}|" if committed else "") + (f"~{rejected}~" if rejected else ""))
            continue
        for style, text in ((SHADES[number % 2], committed), (STRUCK, rejected)):
            pieces += [f"{style}{text}{NORMAL}".replace("\n", f"{NORMAL}\n{style}")] if text else []
    return "".join(pieces)


def _equality(result: dict) -> str:
    text = f"{result['equal']} of {result['prompts']}"
    if result["ties"]:
        text += f", {len(result['ties'])} a tie of the two largest logits (within {result['tie_below']:.0e})"
    if result["differences"]:
        text += f", {len(result['differences'])} DIFFERENT"
    return text


def _limits(result: dict) -> list[str]:
    """One line for τ and one for speed, from what the decode measured."""
    verify, drafting = number(result["verify_cost"]), number(result["draft_cost"])
    kept = [share for share in result["survival"] if share is not None and share == share]
    if not kept:
        return ["  nothing was drafted: every reply ended with its first token"]
    if kept[0] < 0.01:
        cause = "training was too short, or it diverged" if "before" in result else "it is another target's, or hardly trained"
        return [f"  τ: the drafter drafts nothing right: {cause}"]
    losses = [before - after for before, after in zip([1.0, *kept], kept, strict=False)]
    shares = " ".join(f"{share:.2f}" for share in kept)
    most, tau = losses.index(max(losses)) + 1, number(result["after"]["tau"])
    return [
        f"  τ: the drafter; {shares} of verifications keep 1 … {len(kept)} drafts, most end at draft {most}",
        f"  speed: a verification takes {verify} plain steps and its draft {drafting}, for {tau} tokens",
    ]
