"""A drafter step of SpecForge and of ours in one process: at fixed shapes, and on documents of realistic lengths.

    python tools/bench_peer.py CLONE                                         # on a GPU: both, at the default sizes
    python tools/bench_peer.py CLONE --cases smol:4096:512 --documents 0     # one fixed shape alone
    python tools/bench_peer.py CLONE --device cpu --cases toy:256:16 --size toy --documents 8 --row-length 2048 \\
        --anchors 32 --updates 3                                             # does it run? says nothing about speed

CLONE: https://github.com/sgl-project/SpecForge at commit a6b6b02. Its drafter, its training wrapper (anchors, mask, flex
attention, loss in checkpointed chunks) and its BF16Optimizer with fp32 masters run unchanged, without FSDP, loader and logs,
under torch's own settings; ours runs under the deterministic ones, as in training. Both have the same weights, head, random
features (no target forward), gamma, clip and learning rate; every token is supervised.

Fixed shapes, SIZE:LENGTH:ANCHORS: one document. A step is forward, loss, backward, clip and AdamW; SpecForge draws its anchors
on the GPU in every step, ours stand in the slot from before. `eager` is our step launched from Python, `replay` its graph.
Before that, loss and gradient of one step of each are compared on the anchors that SpecForge drew.

Realistic lengths: log-normal, median 735, sigma 0.7, cut at 4,096. A document of n tokens has min(--anchors, n - 1) anchors on
both sides. SpecForge takes one at a time, unpadded, and accumulates, so that both make as many updates; ours are packed into
rows by the planner and replayed. Two passes over the same documents: in the first SpecForge compiles; ours has warmed up
and captured before, which is its start-up. Cold for both only where the caches of kernels are empty. Prints tables, and one
JSON document last.
"""

import argparse
import importlib
import json
import time
from contextlib import contextmanager
from pathlib import Path

import bench_epoch
import numpy as np
import torch
import transformers
from bench_epoch import ROWS_PER_UPDATE, epoch_s, rows_of, wait
from bench_plan import MAX_BUCKETS, ROW_LENGTH, documents, planned
from bench_step import SIZES, RandomTarget, environment, forget, make_step, timed_ms
from parity_specforge import COMMIT, _specforge_config, check_commit, load_specforge, relative
from torch import Tensor
from torch.nn.attention import flex_attention

from graphcap.data.costs import ASSUMED
from graphcap.data.packing import Schedule
from graphcap.data.planner import Bucket
from graphcap.engine import Engine
from graphcap.engine.guard import use_deterministic_math
from graphcap.engine.step import DrafterStep
from graphcap.engine.timing import median_ms
from graphcap.model.blocks import default_gamma

CASES = "smol:4096:512,q0.6b:4096:512,smol:1024:128"
SET, PASSES = "lognormal", ("first", "second")
# Most that loss and gradient may differ by, relatively; tools/parity_specforge.py compares closely.
LIMITS = {torch.bfloat16: {"loss": 1e-2, "gradient": 0.1}, torch.float32: {"loss": 1e-4, "gradient": 1e-3}}
SIZES["toy"] = bench_epoch.SIZES["toy"][:6]


class SpecForge:
    """The modules of the clone, and the settings that they run under."""

    def __init__(self, clone: Path) -> None:
        self.training, self.drafting = load_specforge(clone)
        self.optimizer = importlib.import_module("specforge.optimizer")
        importlib.import_module("specforge.modeling.draft.flex_attention")  # as its package does: it sets the recompile limit
        self.recompile_limit = torch._dynamo.config.recompile_limit

    @contextmanager
    def settings(self):
        """Inside, torch is as it is in a run of SpecForge."""
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        try:
            with torch._dynamo.config.patch(recompile_limit=self.recompile_limit):
                yield
        finally:
            use_deterministic_math()


class Peer:
    """SpecForge's drafter in its training wrapper, and its optimizer, with weights, head and features of a step of ours."""

    def __init__(self, specforge: SpecForge, step: DrafterStep, num_anchors: int) -> None:
        config, hyper, head_VD = step.drafter.config, step.hyper, step.target.head_VD
        attention = "flex_attention" if step.device.type == "cuda" else "sdpa"  # flex has no backward on a CPU
        draft = specforge.drafting.DFlashDraftModel(_specforge_config(config, attention))
        draft.load_state_dict(step.drafter.state_dict(), strict=True)
        head = torch.nn.Linear(1, 1, bias=False)
        head.weight = torch.nn.Parameter(head_VD, requires_grad=False)
        self.draft, self.features_SF = draft.to(step.device, head_VD.dtype), step.target.stored_TF
        self.model = specforge.training.OnlineDFlashModel(
            self.draft,
            head,
            torch.nn.Embedding.from_pretrained(head_VD),
            mask_token_id=config.mask_token_id,
            block_size=config.block_size,
            attention_backend=attention,
            num_anchors=num_anchors,
            loss_decay_gamma=default_gamma(config.block_size),
        ).train()
        rates = {"lr": hyper.learning_rate, "weight_decay": hyper.weight_decay, "max_grad_norm": hyper.max_grad_norm}
        schedule = {"total_steps": hyper.num_updates, "warmup_ratio": hyper.warmup_fraction}
        self.optimizer = specforge.optimizer.BF16Optimizer(self.draft, **rates, **schedule)
        self.supervised_S = torch.ones(len(self.features_SF), device=step.device)

    def backward(self, token_ids_S: Tensor, *, share: float = 1.0) -> Tensor:
        """Forward and backward of one document; returns its loss. share: of the document in its update."""
        inputs = (token_ids_S, self.features_SF[: len(token_ids_S)], self.supervised_S[: len(token_ids_S)])
        loss, _, _ = self.model(*(tensor[None] for tensor in inputs))
        (loss * share).backward()
        return loss.detach()

    def reference(self, token_ids_S: Tensor) -> tuple[np.ndarray, float, dict[str, Tensor]]:
        """The anchors of a draw, and loss and gradients on them; trains nothing.

        The rotary embedding's frequencies are in float32 here, as ours are. In its runs SpecForge rounds them to bf16 with
        the whole drafter; far from a document's start the angles are others then.
        """
        rotary, device = self.draft.rotary_emb, token_ids_S.device
        rounded, rotary.inv_freq = rotary.inv_freq, type(rotary)(self.draft.config).inv_freq.to(device)
        torch.manual_seed(0)
        supervised_S = self.supervised_S[: len(token_ids_S)]
        anchors, keep = self.model._sample_anchor_positions(len(token_ids_S), supervised_S[None], device)
        torch.manual_seed(0)  # the forward draws the same once more
        loss = float(self.backward(token_ids_S))
        gradients = {name: parameter.grad for name, parameter in self.draft.named_parameters()}
        self.draft.zero_grad(set_to_none=True)
        rotary.inv_freq = rounded
        return anchors[keep].cpu().numpy(), loss, gradients


def step_of(size: str, length: int, device: torch.device) -> DrafterStep:
    """Our step at a size, without a target; float32 on a CPU."""
    target = RandomTarget(SIZES[size][0], SIZES[size][5], length, device)
    if device.type != "cuda":
        target.head_VD, target.stored_TF = target.head_VD.float(), target.stored_TF.float()
    return make_step(size, length, target)


def timed(function, count: int, device: torch.device) -> float:
    """Median ms of a call."""
    return timed_ms(function, count)[0] if device.type == "cuda" else median_ms(function, count, device)


def fixed(case: str, specforge: SpecForge, updates: int, device: torch.device) -> dict:
    """One document of fixed length: SpecForge's step, ours from Python, and ours from its graph."""
    size, length, num_anchors = case.split(":")
    bucket = Bucket(int(length), int(num_anchors))
    step = step_of(size, bucket.length, device)
    token_ids_S = torch.randint(SIZES[size][5] - 1, (bucket.length,), device=device)
    with specforge.settings():
        peer, begin = Peer(specforge, step, bucket.num_anchors), time.perf_counter()
        anchors, loss, gradients = peer.reference(token_ids_S)
        first_s = time.perf_counter() - begin
        ms = timed(lambda: (peer.backward(token_ids_S), peer.optimizer.step()), updates, device)
    result = {"case": case, "peer": {"ms": ms, "first_s": first_s}}
    assert len(anchors) == bucket.num_anchors, f"SpecForge drew {len(anchors)} anchors"
    position, supervised = np.arange(bucket.length), np.ones(bucket.length)
    row = {"token_ids": token_ids_S.cpu().numpy(), "position": position, "supervised": supervised, "anchors": anchors}
    for mode in ("eager", "replay"):
        engine = Engine(step, (bucket,))
        engine.prepare(eager=mode == "eager")
        engine.fill(bucket, {name: array.astype(np.int32) for name, array in row.items()})
        step.reset()
        engine.micro_step(bucket)
        result[mode] = {"prepare_s": engine.start_up.total_s, "difference": difference(step, loss, gradients)}
        result[mode]["ms"] = timed(lambda engine=engine: (engine.micro_step(bucket), engine.update()), updates, device)
        engine.close()
    return result


def difference(step: DrafterStep, loss: float, gradients: dict[str, Tensor]) -> dict[str, float]:
    """Relative difference of our loss and gradient, as a micro step left them, to SpecForge's; asserts that they are small."""
    loss_sum, weight_sum = step.state.statistics[:2].tolist()
    ours = torch.cat([view.flatten() for view in step.state.gradient_views]) / weight_sum
    theirs = torch.cat([gradients[name].flatten() for name in step.state.names]).float()
    found = {"loss": abs(loss_sum / weight_sum / loss - 1), "gradient": relative(ours - theirs, theirs)}
    limits = LIMITS[step.target.head_VD.dtype]
    assert all(found[name] <= limits[name] for name in limits), f"not the same step: {found}, at most {limits}"
    return found


def realistic(options: argparse.Namespace, specforge: SpecForge) -> dict:
    """Two passes over documents of realistic lengths, ours packed and SpecForge's one by one."""
    ROW_LENGTH[SET] = min(ROW_LENGTH[SET], options.row_length)
    lengths, _ = documents(SET, options.documents, 0)
    anchors, vocabulary = np.minimum(options.anchors, lengths - 1), SIZES[options.size][5]
    step = step_of(options.size, ROW_LENGTH[SET], options.device)
    ours = packed(step, lengths, anchors, vocabulary)
    if options.device.type == "cuda":
        forget()
    texts = [torch.randint(vocabulary - 1, (int(length),), device=options.device) for length in lengths]
    with specforge.settings():
        theirs = one_by_one(Peer(specforge, step, options.anchors), texts, ours["updates"])
    counts = {"documents": len(lengths), "tokens": int(lengths.sum()), "anchors": int(anchors.sum())}
    return {"size": options.size, **counts, "peer": theirs, "ours": ours}


def packed(step: DrafterStep, lengths: np.ndarray, anchors: np.ndarray, vocabulary: int) -> dict:
    """Seconds of passes over the documents, packed into the rows of a plan and replayed."""
    shapes, ids = planned(lengths, anchors, SET, ASSUMED, max_buckets=MAX_BUCKETS), np.arange(len(lengths))
    schedule = Schedule(shapes, ids, lengths, anchors, seed=0, epochs=1, rows_per_update=ROWS_PER_UPDATE)
    rows = rows_of(schedule, lengths, anchors, vocabulary)
    engine = Engine(step, shapes.buckets)
    engine.prepare(eager=False, say=lambda line: print(line, flush=True))
    found = {"start_up_s": engine.start_up.total_s, "capture_s": sum(engine.start_up.capture_s.values())}
    found["pass_s"] = {name: epoch_s(engine, rows) for name in PASSES}
    engine.close()
    counts = {"rows": len(rows), "updates": -(-len(rows) // ROWS_PER_UPDATE)}
    return {"buckets": [bucket.name for bucket in shapes.buckets], **counts, **found}


def one_by_one(peer: Peer, texts: list[Tensor], num_updates: int) -> dict:
    """Seconds of SpecForge's passes over documents, and how many graphs it compiled in each."""
    device, per_update, pass_s, compiles = texts[0].device, -(-len(texts) // num_updates), {}, {}
    stats = torch._dynamo.utils.counters["stats"]
    flex_attention._WARNINGS_SHOWN.discard("flex_attention_performance")
    for name in PASSES:
        before = stats["unique_graphs"]
        wait(device)
        begin = time.perf_counter()
        for number, token_ids_S in enumerate(texts, start=1):
            peer.backward(token_ids_S, share=1 / per_update)
            if number % per_update == 0 or number == len(texts):
                peer.optimizer.step()
        wait(device)
        pass_s[name], compiles[name] = time.perf_counter() - begin, stats["unique_graphs"] - before
    dense = "flex_attention_performance" in flex_attention._WARNINGS_SHOWN  # torch's own warning of an uncompiled call
    return {"updates": -(-len(texts) // per_update), "start_up_s": 0.0, "compiles": compiles, "dense": dense, "pass_s": pass_s}


def fixed_table(cases: list[str], specforge: SpecForge, options: argparse.Namespace) -> list[dict]:
    results, names = [], ("SpecForge ms", "eager ms", "replay ms", "SF/eager", "SF/replay", "eager/replay", "SF first s")
    print(f"{'fixed shape':<16}{''.join(f'{name:>13}' for name in names)}   gradients differ by")
    for case in cases:
        results.append(r := fixed(case, specforge, options.updates, options.device))
        peer, eager, replay = (r[mode]["ms"] for mode in ("peer", "eager", "replay"))
        figures = (peer, eager, replay, peer / eager, peer / replay, eager / replay, r["peer"]["first_s"])
        gradient = r["replay"]["difference"]["gradient"]
        print(f"{case:<16}{''.join(f'{figure:>13.2f}' for figure in figures)}   {gradient:.1e}", flush=True)
        if options.device.type == "cuda":
            forget()
    return results


def realistic_table(r: dict) -> None:
    print(f"realistic lengths, {r['size']}: {r['documents']} documents, {r['tokens']:,} tokens, {r['anchors']:,} anchors")
    print(f"{'':<12}{'updates':>9}{'start-up s':>12}{'first s':>10}{'second s':>10}{'× ours':>8}{'all s':>9}{'× ours':>8}")
    total = {way: r[way]["start_up_s"] + sum(r[way]["pass_s"].values()) for way in ("peer", "ours")}
    for way, name in (("peer", "SpecForge"), ("ours", "graphcap")):
        (first, second), own = r[way]["pass_s"].values(), r["ours"]["pass_s"]["second"]
        begun = f"{r[way]['updates']:>9}{r[way]['start_up_s']:>12.1f}{first:>10.2f}{second:>10.2f}{second / own:>8.2f}"
        print(f"{name:<12}{begun}{total[way]:>9.1f}{total[way] / total['ours']:>8.2f}")
    peer, ours = r["peer"], r["ours"]
    compile_s, graphs = peer["pass_s"]["first"] - peer["pass_s"]["second"], sum(peer["compiles"].values())
    dense = "; its flex attention ran uncompiled, dense" if peer["dense"] else ""
    print(f"  SpecForge compiled for {compile_s:.1f} s (first pass less second), {graphs} graphs{dense}")
    print(f"  ours: {ours['rows']} rows of {', '.join(ours['buckets'])}; capture {ours['capture_s']:.2f} s of the start-up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a clone of sgl-project/SpecForge at a6b6b02")
    parser.add_argument("--cases", default=CASES, help=f"SIZE:LENGTH:ANCHORS by comma, '' for none (default {CASES})")
    parser.add_argument("--updates", type=int, default=50, help="timed steps of a case")
    parser.add_argument("--documents", type=int, default=96, help="of realistic lengths; 0: none")
    parser.add_argument("--size", default="smol", choices=SIZES, help="the drafter of the realistic lengths")
    parser.add_argument("--anchors", type=int, default=512, help="at most so many in a document")
    parser.add_argument("--row-length", type=int, default=4096, help="cut documents and rows to so many tokens")
    parser.add_argument("--device", type=torch.device, default="cuda", help="cuda, or cpu to see that all runs")
    options = parser.parse_args()
    check_commit(options.clone, COMMIT, "sgl-project/SpecForge")
    specforge, on_gpu = SpecForge(options.clone), options.device.type == "cuda"
    settings = use_deterministic_math()
    where = environment(settings) if on_gpu else {"gpu": "none", "torch": torch.__version__, "settings": settings}
    results = {"fixed": fixed_table([case for case in options.cases.split(",") if case], specforge, options)}
    if options.documents:
        results["realistic"] = realistic(options, specforge)
        realistic_table(results["realistic"])
    versions = {"transformers": transformers.__version__, "peer": f"sgl-project/SpecForge {COMMIT}"}
    print(json.dumps(where | versions | results))


if __name__ == "__main__":
    main()
