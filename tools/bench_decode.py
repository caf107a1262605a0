"""Seconds per token of a run's target and drafter, beside transformers' generate; and the walked estimate beside real decoding.

    python tools/bench_decode.py runs/out/NAME --num-prompts 200 --max-new-tokens 128

Greedy, in the dtype of training, one prompt at a time, with the run's best checkpoint. transformers' generate runs on a second
copy of the target with its own attention and cache. Seconds are per token after a reply's first, which comes with the prompt;
for generate the time of one token is taken off. The walked estimate is made of the replies that plain decoding gave.

Prints a line for each, and as the last line one JSON document.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from graphcap.build import build
from graphcap.config import load_recipe
from graphcap.data.conversations import Document
from graphcap.engine.decoding import FixedSteps
from graphcap.engine.evaluation import Evaluation, fitting
from graphcap.eval import compare, stop_ids_of, tie_of
from graphcap.model.decode import Reply, decode_plain, decode_speculative
from graphcap.model.loading import dtype_name, load_model
from graphcap.ops import blackbox, checkpoint, report
from graphcap.ops.export import read_drafter


def generate(model, prompts: list[list[int]], *, max_new_tokens: int, stop_ids: set[int]) -> tuple[list[list[int]], float]:
    """transformers' own greedy replies, and seconds per token after the first."""
    device, replies, total_s = model.device, [], 0.0
    settings = {"do_sample": False, "eos_token_id": sorted(stop_ids), "pad_token_id": min(stop_ids)}
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first one twice: it warms up
        ids = torch.tensor([prompt], device=device)
        times = []
        for most in (1, max_new_tokens):
            wait(device)
            begin = time.perf_counter()
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, **settings)
            wait(device)
            times.append(time.perf_counter() - begin)
        if number:
            replies.append(out[0, len(prompt) :].tolist())
            total_s += times[1] - times[0]
    return replies, total_s / max(1, sum(len(reply) - 1 for reply in replies))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_per_token(replies: list[Reply]) -> float:
    return sum(reply.decode_s for reply in replies) / max(1, sum(len(reply.token_ids) - 1 for reply in replies))


def measure(folder: Path, *, num_prompts: int, max_new_tokens: int, with_generate: int) -> dict:
    weights = checkpoint.best(folder / "checkpoints") or checkpoint.newest(folder / "checkpoints")[0]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        recipe = load_recipe(
            folder / "config.toml",
            [f"drafter.init={weights}", f"run.out={memory}", "run.name=bench", f"eval.prompts={num_prompts}"],
        )
        run = build(recipe, continued=None, say=print, recorder=blackbox.Recorder(Path(memory), rank=0))
    target, head = run.target, run.target.head_VD
    drafter = read_drafter(weights, dtype=head.dtype, device=head.device)
    prompts, stop_ids = run.prompts, stop_ids_of(target.model, run.tokenizer)
    limits = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids}
    longest = max(map(len, prompts)) + max_new_tokens + drafter.config.block_size + 1
    steps = FixedSteps(target, drafter, max_length=longest)
    decode_speculative(target, drafter, prompts[0], steps=steps, **limits)  # warms up
    plain = [decode_plain(target, prompt, steps=steps, **limits) for prompt in prompts]
    drafted = [decode_speculative(target, drafter, prompt, steps=steps, **limits) for prompt in prompts]
    steps.close()
    documents = []
    for number, (prompt, reply) in enumerate(zip(prompts, plain, strict=True)):
        ids, mask = np.array(prompt + reply.token_ids, np.int32), np.zeros(len(prompt) + len(reply.token_ids), bool)
        mask[len(prompt) :] = True
        documents.append(Document(number, ids, mask, "decoded", number))
    buckets = run.shapes.buckets
    kept = fitting([one for one in documents if one.loss_mask.sum() > 1], buckets, count=len(documents))
    run.engine.prepare(eager=False)
    walked = Evaluation(kept, buckets, rows=run.shapes.rows).run(run.engine)["walked_estimate"]
    real = report.acceptance([drafted[document.id].committed for document in kept])["tau"]
    run.engine.close()
    model = load_model(
        recipe.target.path, revision=recipe.target.revision, dtype=head.dtype, device=head.device, trust_remote_code=False
    )
    own, generate_s = generate(model, prompts[:with_generate], **limits)
    theirs = [Reply(token_ids=reply) for reply in own]
    return {
        "prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "dtype": dtype_name(head.dtype),
        "device": torch.cuda.get_device_name() if head.is_cuda else "cpu",
        "torch": torch.__version__,
        "plain_s_per_token": seconds_per_token(plain),
        "speculative_s_per_token": seconds_per_token(drafted),
        "generate_s_per_token": generate_s,
        "tau_real": real,
        "tau_walked": walked,
        "walked_over_real": walked / real,
        "distinct_4grams": report.distinct_4grams([reply.token_ids for reply in plain]),
        "plain_against_speculative": compare(plain, drafted, tie=tie_of(head.dtype)),
        "plain_against_generate": compare(plain[:with_generate], theirs, tie=tie_of(head.dtype)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--with-generate", type=int, default=24, help="how many of them transformers' generate answers too")
    options = parser.parse_args()
    result = measure(
        options.run,
        num_prompts=options.num_prompts,
        max_new_tokens=options.max_new_tokens,
        with_generate=options.with_generate,
    )
    plain_s, drafted_s, generate_s = (result[f"{name}_s_per_token"] for name in ("plain", "speculative", "generate"))
    print(f"seconds per token: generate {generate_s:.5f}, plain {plain_s:.5f}, with the drafter {drafted_s:.5f}")
    print(f"with the drafter {drafted_s / plain_s:.2f} × plain, {drafted_s / generate_s:.2f} × generate")
    print(f"pooled τ {result['tau_real']:.3f}, walked {result['tau_walked']:.3f} ({result['walked_over_real'] - 1:+.2%})")
    for name in ("speculative", "generate"):
        pair = result[f"plain_against_{name}"]
        print(f"plain and {name}: {pair['equal']} equal, {len(pair['ties'])} ties, {len(pair['differences'])} different")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
