"""What a bucket costs: the predicted time of a micro step, an update and a captured graph.

A micro step's time is linear in the tokens and draft tokens of its bucket, and in the squares of its documents' lengths:
attention sees one document at a time, and its kernels skip the tiles between documents, but padding is computed like any
token. Times are whole picoseconds, rounded once, so plans and schedules made from them are equal on every machine.
Measures nothing (`Fit` takes what was measured). Called by search.py, planner.py, packing.py, layout.py and shapes.py.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass

import numpy as np

PS_PER_MS = 10**9
PS_PER_S = 10**12
# Assumed where nothing was measured. An H200 makes 790 TFLOP/s in one large bfloat16 matrix product; norms, losses and
# attention bring a whole step to about half of that.
_FLOP_PER_S = 400e12
# Mask, fill and small kernels, whatever the bucket; and in each layer kernels that a short row does not keep busy. Measured on
# an H200: 1.7 ms for 28 layers of hidden size 576 and the five of the drafter.
_MICRO_STEP_S, _LAYER_S = 0.3e-3, 0.035e-3
_DRAFTER_LAYER = 3  # forward and backward, in forwards of a target's layer
_BYTES_PER_PARAMETER_AND_UPDATE, _BYTES_PER_S = 48, 4.3e12
_BUCKET_S = 1.0  # to warm up, audit and capture one more bucket at start-up; the kernels serve them all
_DRAFT_TOKENS_PER_TOKEN = 1.5  # that attend to half of their document, forward and backward
_KEYS = ("micro_step_ps", "token_ps", "draft_token_ps", "pair_ps", "update_ps", "bucket_ps")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What FLOPs follow from. Parameters by how they are used; widths are layers times heads times head size.

    target: of the layers that run; context: the drafter's fusion and its keys and values of the context; drafter: its
    layers; head: vocabulary times hidden size. target_layers: how many run; drafter_layers.
    """

    target: int
    context: int
    drafter: int
    head: int
    target_width: int
    drafter_width: int
    target_layers: int
    drafter_layers: int


@dataclass(frozen=True)
class Sample:
    """A measured micro step. pairs: sum of the documents' squared lengths. draft_pairs: context tokens that the draft tokens
    see, counted once for each."""

    length: int
    num_anchors: int
    pairs: int
    draft_pairs: int
    ms: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Predicted times, whole picoseconds: of a micro step whatever its bucket, of one token and one draft token in it, of
    one token-times-token of a document (its length squared), of an update, and of one more bucket at start-up."""

    micro_step_ps: int
    token_ps: int
    draft_token_ps: int
    pair_ps: int
    update_ps: int
    bucket_ps: int

    def __post_init__(self) -> None:
        for name in _KEYS:
            value = getattr(self, name)
            assert type(value) is int and value >= 0, f"{name} {value!r}"
        assert self.token_ps > 0, "a token costs something"

    def bucket(self, length, num_anchors, block_size: int):
        """A micro step of this bucket without its attention, ps: int or int64 array, as length and num_anchors are."""
        return self.micro_step_ps + self.token_ps * length + self.draft_token_ps * block_size * num_anchors

    def bound(self, lengths: np.ndarray, anchor_counts: np.ndarray, block_size: int) -> int:
        """All documents at their own cost, ps: no padding, no micro step's constant, no update."""
        tokens, anchors = int(np.sum(lengths)), int(np.sum(anchor_counts))
        return self.token_ps * tokens + self.draft_token_ps * block_size * anchors + self.attention(lengths)

    def attention(self, lengths: np.ndarray) -> int:
        """Attention of documents of these lengths, ps."""
        return self.pair_ps * int(np.sum(np.square(np.asarray(lengths, dtype=np.int64))))

    def to_json(self) -> dict:
        """Names and whole numbers; `Costs(**…)` reads them back."""
        return asdict(self)

    @classmethod
    def assumed(cls, sizes: Sizes) -> Costs:
        """Costs from FLOPs at a rate that nobody measured here: right in their proportions more than in their size."""
        flops = {
            "token_ps": 2 * sizes.target + 6 * sizes.context,
            "draft_token_ps": 6 * sizes.drafter + 4 * sizes.head,  # the head is frozen: no gradient of its weights
            "pair_ps": 2 * sizes.target_width + _DRAFT_TOKENS_PER_TOKEN * 7 * sizes.drafter_width,
        }
        trained = sizes.context + sizes.drafter
        layers = sizes.target_layers + _DRAFTER_LAYER * sizes.drafter_layers
        return cls(
            micro_step_ps=round((_MICRO_STEP_S + _LAYER_S * layers) * PS_PER_S),
            update_ps=round(trained * _BYTES_PER_PARAMETER_AND_UPDATE / _BYTES_PER_S * PS_PER_S),
            bucket_ps=round(_BUCKET_S * PS_PER_S),
            **{name: max(1, round(flop / _FLOP_PER_S * PS_PER_S)) for name, flop in flops.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What measured micro steps take, ps: a constant, and for one token, draft token, pair and draft pair (as in Sample)."""

    block_size: int
    constant: float
    token: float
    draft_token: float
    pair: float
    draft_pair: float

    @classmethod
    def of(cls, samples: list[Sample], *, block_size: int) -> Fit:
        """Least squares, no coefficient below zero; errors count by the root of the time, so that neither the few long rows of
        an epoch nor its many short ones decide alone."""
        assert samples and all(sample.ms > 0 for sample in samples), "micro steps that took some time"
        columns, ms = np.array([_columns(one, block_size) for one in samples]), np.array([one.ms for one in samples])
        found = _non_negative(columns * ms[:, None] ** -0.5, ms**0.5) * PS_PER_MS
        names = ("constant", "token", "draft_token", "pair", "draft_pair")
        return cls(block_size=block_size, **dict(zip(names, found.tolist(), strict=True)))

    def ms(self, row: Sample) -> float:
        """Predicted time of such a row; its own is not looked at."""
        each = (self.constant, self.token, self.draft_token, self.pair, self.draft_pair)
        return float(np.dot(_columns(row, self.block_size), each)) / PS_PER_MS

    def costs(self, *, anchors_per_token: float, update_ms: float = 0.0, bucket_s: float = 0.0) -> Costs:
        """Costs of documents with so many anchors a token, whose draft tokens see half a document each.

        update_ms, bucket_s: measured apart.
        """
        pair = self.pair + self.draft_pair * self.block_size * anchors_per_token / 2
        return Costs(
            micro_step_ps=round(self.constant),
            token_ps=max(1, round(self.token)),
            draft_token_ps=round(self.draft_token),
            pair_ps=round(pair),
            update_ps=round(update_ms * PS_PER_MS),
            bucket_ps=round(bucket_s * PS_PER_S),
        )


def _columns(row: Sample, block_size: int) -> list[float]:
    return [1.0, row.length, row.num_anchors * block_size, row.pairs, row.draft_pairs]


def _non_negative(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with no coefficient below zero: the best of the free solutions over every choice of columns."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    best, least = np.zeros(columns.shape[1]), float(wanted @ wanted)
    for count in range(1, columns.shape[1] + 1):
        for used in itertools.combinations(range(columns.shape[1]), count):
            part = columns[:, used] / scale[list(used)]
            solution = np.linalg.lstsq(part, wanted, rcond=None)[0]
            error = float(np.square(part @ solution - wanted).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(columns.shape[1]), error
                best[list(used)] = solution / scale[list(used)]
    return best


# For plans made without a target at hand: a drafter of five layers for a dense target of 8 billion parameters.
ASSUMED = Costs.assumed(
    Sizes(
        target=6_950_000_000,
        context=126_000_000,
        drafter=963_000_000,
        head=622_000_000,
        target_width=36 * 4096,
        drafter_width=5 * 4096,
        target_layers=36,
        drafter_layers=5,
    )
)
