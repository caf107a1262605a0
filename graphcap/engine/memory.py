"""What training needs of a GPU's memory, from sizes alone: before a target is loaded, and for any bucket.

Counted, tensor by tensor, from what a micro step keeps at its fullest moments: in the head and loss of the last chunk, when the
backward begins, or at its end, when every gradient is there; and from the audit before it. A graph's pool adds what the
allocator rounds up. What is predicted is the most that is allocated; torch's allocator may hold a few percent more in parts of
segments that it cannot give back.
tests/cuda/test_memory.py holds it against a captured bucket.

Called by layout.py, room.py, extract.py and shapes.py.
"""

import math
from dataclasses import dataclass

from graphcap.data.planner import TILE_TOKENS, Bucket
from graphcap.engine.audit import REFERENCE_BLOCKS
from graphcap.engine.guard import CHECKSUM_BYTES
from graphcap.model.drafter import DrafterConfig
from graphcap.model.loss import chunk_of

WORKSPACE_BYTES = 96 << 20  # of cuBLAS, on the two streams that multiply
ROUNDING, SEGMENT_BYTES = 1.02, 20 << 20  # allocator blocks over the tensors in them, and its smallest segment of a pool
LEFT_FREE_BYTES = 512 << 20  # for kernels that are loaded, and for whatever else draws on the GPU
STAGED_ROWS = 3  # on their way into a slot
STATE_BYTES = 4 + 4 + 4 + 4  # float32 a parameter: master, two moments, gradient sum; the weights come on top


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the memory of a run depends on, beside its buckets.

    num_parameters: of the drafter. target_bytes: the target's tensors that are loaded. target_intermediate: width of the
    target's MLP; 0: no target runs. itemsize: bytes of the compute dtype. chunk_tokens: draft tokens whose logits exist at
    once, about. stored: features come from the host, into every slot.
    """

    drafter: DrafterConfig
    num_parameters: int
    target_bytes: int
    target_intermediate: int
    itemsize: int
    chunk_tokens: int
    checkpointing: bool = False
    stored: bool = False

    def needed_bytes(self, *buckets: Bucket) -> int:
        """Memory of a run over these buckets, start-up included; CUDA's own context is not counted."""
        step = max(self.bucket_bytes(bucket) for bucket in buckets)  # graphs of all buckets share one pool
        checksums = SEGMENT_BYTES + 2 * min(CHECKSUM_BYTES, 4 * self.num_parameters)  # of the audit: more than a small step
        return self.held_bytes() + max(step, checksums) + self._slot_bytes(buckets)

    def held_bytes(self) -> int:
        """What stays from before the first step to the end, whatever the buckets."""
        return self.target_bytes + self.num_parameters * (self.itemsize + STATE_BYTES) + WORKSPACE_BYTES

    def bucket_bytes(self, bucket: Bucket) -> int:
        """What a bucket takes beside that: its graphs or, before them, the audit of its attention."""
        return max(self.step_bytes(bucket), self.audit_bytes(bucket))

    def step_bytes(self, bucket: Bucket) -> int:
        """What the graphs of a bucket take beside it: the pool."""
        c, rows, draft = self.drafter, bucket.length, bucket.num_anchors * self.drafter.block_size
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        features = 0 if self.stored else rows * len(c.target_layer_ids) * c.hidden_size
        context = self._context_numbers(rows)
        predicted = draft // c.block_size * (c.block_size - 1)
        blocks = draft * 2 * c.head_dim + predicted * 2 * c.hidden_size  # rotary table; the last sum and its norm
        layer = draft * (4 * (c.hidden_size + queries) + 3 * c.intermediate_size + 3 * keys)
        loss = min(predicted, chunk_of(predicted, self.chunk_tokens)) * c.vocab_size
        heads = 2 * rows * queries * 4 // self.itemsize if queries > keys else 0  # float32, of each query head alone
        if self.checkpointing:  # of the first layer one row a block
            kept, turning = (c.num_layers - 1) * draft * c.hidden_size, layer + heads
        else:  # not what goes into the first layer, nor its norm; nor of the last behind its attention what is not predicted
            kept = c.num_layers * layer - 2 * draft * c.hidden_size
            kept -= (draft - predicted) * (2 * c.hidden_size + 3 * c.intermediate_size)
            turning = max(2 * draft * c.intermediate_size, heads)
        forward_ends = context + blocks + kept + max(loss, turning) + predicted * c.hidden_size
        # Every gradient in the compute dtype; those of the context's keys and values wait for the end.
        backward_ends = context + blocks + layer + heads + self.num_parameters + 2 * c.num_layers * rows * keys
        numbers = features + max(self._target_numbers(rows), forward_ends, backward_ends)
        return SEGMENT_BYTES + math.ceil(ROUNDING * self.itemsize * numbers)

    def audit_bytes(self, bucket: Bucket) -> int:
        """What the audit of a bucket's attention takes: more than a step of few anchors in a long row.

        Either its random features and their context, or its float32 reference.
        """
        c, rows, draft = self.drafter, bucket.length, bucket.num_anchors * self.drafter.block_size
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        parameters = c.hidden_size * (2 * queries + 2 * keys + 3 * c.intermediate_size)
        scores = 3 * c.num_heads * REFERENCE_BLOCKS * c.block_size  # and their gradients
        exact = parameters + rows * (3 * queries + 6 * keys + scores)  # keys and values once a query head, and gradients
        kept = rows * (2 * c.num_layers + 1) * keys + 4 * draft * c.hidden_size
        made = rows * len(c.target_layer_ids) * c.hidden_size + self._context_numbers(rows)
        return math.ceil(ROUNDING * max(4 * exact + self.itemsize * kept, self.itemsize * made))

    def extraction_bytes(self, bucket: Bucket) -> int:
        """Memory of computing features alone over rows of at most this bucket's length."""
        features = bucket.length * len(self.drafter.target_layer_ids) * self.drafter.hidden_size
        pool = SEGMENT_BYTES + math.ceil(ROUNDING * self.itemsize * self._target_numbers(bucket.length))
        return self.target_bytes + WORKSPACE_BYTES + features * self.itemsize + pool

    def largest_that_fits(self, bucket: Bucket, room_bytes: int) -> Bucket | None:
        """The longest bucket of the same anchors a token that needs no more than that; None if even one tile does not fit."""
        fitting = None
        for length in range(TILE_TOKENS, bucket.length + 1, TILE_TOKENS):
            smaller = Bucket(length, _whole_tiles(bucket.num_anchors * length / bucket.length, self.drafter.block_size))
            if self.needed_bytes(smaller) <= room_bytes:  # a longer one may need less: chunks of the head are alike
                fitting = smaller
        return fitting

    def _context_numbers(self, rows: int) -> int:
        """Fused features and their norm, rotary table, every layer's keys before and behind their norm, and values."""
        c = self.drafter
        return rows * (2 * c.hidden_size + 2 * c.head_dim + 3 * c.num_layers * c.num_kv_heads * c.head_dim)

    def _target_numbers(self, rows: int) -> int:
        """What one layer of the target's forward holds at most, beside its features."""
        return rows * (3 * self.target_intermediate + 4 * self.drafter.hidden_size) if self.target_intermediate else 0

    def _slot_bytes(self, buckets: tuple[Bucket, ...]) -> int:
        """Features that the host fills in: a slot for each bucket, and what stages the largest. Other buffers are small."""
        if not self.stored:
            return 0
        row_bytes = len(self.drafter.target_layer_ids) * self.drafter.hidden_size * self.itemsize
        lengths = [bucket.length for bucket in buckets]
        return row_bytes * (sum(lengths) + STAGED_ROWS * max(lengths))


def _whole_tiles(num_anchors: float, block_size: int) -> int:
    """So many anchors or more that their draft tokens are whole tiles."""
    unit = TILE_TOKENS // math.gcd(TILE_TOKENS, block_size)
    return max(unit, math.ceil(num_anchors / unit) * unit)


def gib(num_bytes: int, digits: int = 2) -> str:
    """A size for people."""
    return f"{num_bytes / 2**30:.{digits}f} GiB"
