"""How long a micro step of each bucket takes, on rows of few long and of many short documents: what costs are fitted to.

On a GPU by events between replays, elsewhere by the host's clock. Trains nothing: the step's state is scratch afterwards.
Called by shapes.py and tools.
"""

import statistics
import time

import numpy as np
import torch

from graphcap.data.costs import Sample
from graphcap.engine.buckets import Engine
from graphcap.engine.step import DrafterStep

NUM_DOCUMENTS = (1, 4, 16)  # in a row: attention sees one document at a time


def samples(engine: Engine, *, times: int) -> list[Sample]:
    """Micro steps of full rows of every bucket. times: replays; their median counts.

    engine: prepared, over a DrafterStep.
    """
    return [sample(engine, bucket, num_documents=n, times=times) for bucket in engine.slots for n in NUM_DOCUMENTS]


def sample(engine: Engine, bucket, *, num_documents: int, times: int) -> Sample:
    """A micro step of a full row of so many documents."""
    step = engine.step
    assert isinstance(step, DrafterStep), f"{type(step).__name__} has no rows of documents"
    arrays = step.example(bucket, num_documents=num_documents, full=True)
    engine.fill(bucket, arrays)
    ms = median_ms(lambda: engine.micro_step(bucket), times, step.device)
    draft_pairs = step.block_size * int(arrays["position"][arrays["anchors"]].sum())
    return Sample(bucket.length, bucket.num_anchors, squares(arrays["position"]), draft_pairs, ms)


def squares(position_T: np.ndarray) -> int:
    """Sum of the squared lengths of the documents of a row; position_T: int [t], restarting at each."""
    starts = np.flatnonzero(position_T == 0)
    return int(np.square(np.diff(np.append(starts, len(position_T))).astype(np.int64)).sum())


def median_ms(function, times: int, device: torch.device) -> float:
    """Median time of a call, ms; one call before is not counted."""
    function()
    if device.type != "cuda":
        ends = [time.perf_counter()]
        for _ in range(times):
            function()
            ends.append(time.perf_counter())
        return 1e3 * statistics.median(end - begin for begin, end in zip(ends, ends[1:]))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in zip(events, events[1:]))
