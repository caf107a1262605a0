"""Does a micro step cost what it should? Time against the row's length at fixed anchors, and against anchors at fixed length.

    python tools/bench_growth.py                        # SmolLM2-135M's shape, target in the step
    python tools/bench_growth.py --size toy --longest 1024 --most 64 --document 128          # a CPU

Rows hold documents of one length, so that attention grows as the row does. Both series are fitted with a line; beside its
slope stands that of the planner's cost model, calibrated on trial buckets as `graphcap shapes --measure` does, over the same
buckets. Prints a table and, as the last line, one JSON document.
"""

import argparse
import json

import numpy as np
import torch
from bench_epoch import SIZES, make_step, measured_fit

from graphcap.data.costs import Fit, Sample
from graphcap.data.planner import Bucket
from graphcap.engine import Engine
from graphcap.engine.guard import use_deterministic_math
from graphcap.engine.step import DrafterStep
from graphcap.engine.timing import sample


def measured(step: DrafterStep, buckets: list[Bucket], document: int, times: int) -> list[Sample]:
    """Micro steps of full rows, medians."""
    engine, found = Engine(step, tuple(sorted(set(buckets), reverse=True))), []
    engine.prepare(eager=False, say=lambda line: print(line, flush=True))
    for bucket in buckets:
        found.append(sample(engine, bucket, num_documents=max(1, bucket.length // document), times=times))
    engine.close()
    return found


def line_through(x: list[int], ms: list[float]) -> tuple[float, float, float]:
    """Slope (ms per unit of x), ms at 0, and R²."""
    slope, at_zero = np.polyfit(x, ms, 1)
    left = np.square(np.polyval((slope, at_zero), x) - ms).sum()
    return float(slope), float(at_zero), float(1 - left / np.square(np.array(ms) - np.mean(ms)).sum())


def grow(step: DrafterStep, name: str, buckets: list[Bucket], x: list[int], fit: Fit, options) -> dict:
    found = measured(step, buckets, options.document, options.times)
    ms, model_ms = [one.ms for one in found], [fit.ms(one) for one in found]
    (slope, at_zero, r2), (model_slope, *_) = line_through(x, ms), line_through(x, model_ms)
    for bucket, one, other in zip(buckets, ms, model_ms):
        print(f"  {bucket.name:<12}{one:>9.3f} ms {other:>9.3f} by the model")
    print(
        f"{name:<8} {1e3 * slope:.4f} us each, {at_zero:.2f} ms at 0, R² {r2:.4f}; the model's slope {1e3 * model_slope:.4f} "
        f"({slope / model_slope - 1:+.1%} measured)",
        flush=True,
    )
    return {"x": x, "ms": ms, "model_ms": model_ms, "slope_us": 1e3 * slope, "r2": r2, "slope_ratio": slope / model_slope}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="smol", choices=SIZES)
    parser.add_argument("--longest", type=int, default=16384, help="tokens of the longest row")
    parser.add_argument("--most", type=int, default=2048, help="anchor slots, in a row half as long")
    parser.add_argument("--document", type=int, default=512, help="tokens of a document")
    parser.add_argument("--times", type=int, default=20, help="micro steps that a time is the median of")
    options = parser.parse_args()
    if options.longest % 1024 or options.most % 64 or min(options.longest, options.most, options.document, options.times) < 1:
        parser.error("--longest: a multiple of 1024; --most: of 64; --document and --times: at least 1")
    if options.size != "toy" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here: give --size toy")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_deterministic_math()
    step, parts = make_step(options.size, device), range(1, 9)
    fit, _ = measured_fit(step, Bucket(options.longest, options.most), options.times)
    lengths = [options.longest * part // 8 for part in parts]
    slots = [options.most * part // 8 for part in parts]
    found = {
        "tokens": grow(step, "tokens", [Bucket(n, options.most // 4) for n in lengths], lengths, fit, options),
        "anchors": grow(step, "anchors", [Bucket(options.longest // 2, n) for n in slots], slots, fit, options),
    }
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"gpu": where, "torch": torch.__version__, "size": options.size, "fit": vars(fit), **found}))


if __name__ == "__main__":
    main()
