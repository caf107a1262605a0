"""The step: one micro step of one row, one update, one evaluation. The same functions run eagerly and are captured.

A micro step is: the target's features of the row, block mask, drafter, head and loss, backward, gradients and statistics
added to the flat sums. An update is one AdamW step on those sums. Nothing here reads a value on the host.

Calls: engine/buckets.py. Called functions: model/blocks.py, model/drafter.py, model/loss.py, engine/optimizer.py.
"""

import itertools

import numpy as np
import torch
from torch import Tensor

from graphcap.engine.audit import audit_attention
from graphcap.engine.buckets import Step
from graphcap.engine.optimizer import FlatState, Hyper, apply_update
from graphcap.engine.slots import Buffer, Slot
from graphcap.model.attention import attention_for
from graphcap.model.blocks import UNUSED, Blocks, leading_matches, make_blocks
from graphcap.model.drafter import Drafter
from graphcap.model.loss import head_loss
from graphcap.model.target import Target

RING = 4096  # updates whose metrics wait on the device until the host fetches them


class DrafterStep(Step):
    """Target, drafter, loss and optimizer state, and the three functions that an engine launches or captures."""

    def __init__(self, target: Target, drafter: Drafter, *, decay: list[float], hyper: Hyper, chunk_tokens: int) -> None:
        """drafter: initialised; its parameters become views of the flat weights, in the target's dtype on its device."""
        self.target, self.drafter, self.hyper, self.chunk_tokens = target, drafter, hyper, chunk_tokens
        device, dtype = target.head_VD.device, target.head_VD.dtype
        self.device, self.block_size = device, drafter.config.block_size
        self.attention = attention_for(device)
        self._examples = itertools.count()
        self.decay_J = torch.tensor(decay, dtype=torch.float32, device=device)
        # statistics of an update: loss sum, weight sum, blocks with a label, matches in all, matches of each slot
        self.state = FlatState(drafter, num_statistics=4 + len(decay), dtype=dtype, device=device)
        self.ring = torch.zeros(RING, len(self.metric_names), dtype=torch.float32, device=device)

    @property
    def metric_names(self) -> list[str]:
        """Columns of the ring, one row an update."""
        slots = [f"match_share_{k}" for k in range(1, self.block_size)]
        return ["loss", "block_match", "learning_rate", "grad_norm", "empty", "skipped", "anchors", *slots]

    def buffers(self, bucket) -> tuple[Buffer, ...]:
        """The host-filled buffers of a bucket. Padding tokens have position 0: each is a document of its own."""
        return (
            Buffer("token_ids", bucket.length, pad_value=0),
            Buffer("position", bucket.length, pad_value=0),
            Buffer("supervised", bucket.length, pad_value=0),
            Buffer("anchors", bucket.num_anchors, pad_value=UNUSED),
        )

    def example(self, bucket, *, num_documents: int = 3, full: bool = False) -> dict[str, np.ndarray]:
        """A row like training's: documents, a padded tail, anchors all over, a tenth of the slots unused.

        full: no padding and, as far as there are tokens, no slot unused. Another row at every call, so that a graph that kept
        something of the one it was captured on is found.
        """
        draw = np.random.default_rng((bucket.length, next(self._examples)))
        length = bucket.length - (0 if full else bucket.length // 16)
        parts = [len(part) for part in np.array_split(np.arange(length), num_documents)]
        count = min(bucket.num_anchors - (0 if full else bucket.num_anchors // 10), length - 1)
        return {
            "token_ids": draw.integers(0, self.target.head_VD.shape[0], length).astype(np.int32),
            "position": np.concatenate([np.arange(part) for part in parts]).astype(np.int32),
            "supervised": (draw.random(length) < 0.9).astype(np.int32),
            "anchors": np.sort(draw.choice(length - 1, count, replace=False)).astype(np.int32),
        }

    def state_tensors(self) -> dict[str, Tensor]:
        return {**self.state.tensors(), "weights": self.state.weights, "sums": self.state.sums, "ring": self.ring}

    def addressed(self) -> dict[str, Tensor]:
        """Beside the state, what a graph only reads: the loss weights, the drafter's views, the target's tensors."""
        read = {f"drafter {name}": tensor for name, tensor in self.drafter.named_parameters()}
        model = getattr(self.target, "model", None)
        if model is not None:
            read |= {f"target {name}": tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        return {"loss weights": self.decay_J, "norms": self.state.norms_P, **read}

    def reset(self) -> None:
        self.state.begin()
        self.ring.zero_()

    def micro(self, slot: Slot) -> None:
        """Forward and backward of the row in `slot`; gradients and statistics are added to the flat sums. Capture: safe."""
        blocks, hidden_MD = self._hidden(slot)
        loss_sum, correct_NJ, gradient_MD = self._loss(blocks, hidden_MD, with_gradient=True)
        # On this thread, which is the one that captures.
        with torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(hidden_MD, self.state.parameters, gradient_MD)
        self.state.accumulate(gradients)
        self.state.statistics.add_(self._statistics(blocks, loss_sum, correct_NJ))

    @torch.no_grad()
    def evaluate(self, slot: Slot) -> tuple[Tensor, Tensor]:
        """Forward only: the row's statistics, float32 [4 + J], and which slots are right, bool [N, J]. Capture: safe."""
        blocks, hidden_MD = self._hidden(slot)
        loss_sum, correct_NJ, _ = self._loss(blocks, hidden_MD, with_gradient=False)
        return self._statistics(blocks, loss_sum, correct_NJ), correct_NJ

    def update(self) -> None:
        """One optimizer update from the sums; its metrics go to row `counter % RING` of the ring. Capture: safe."""
        statistics, state = self.state.statistics.clone(), self.state
        row = torch.remainder(state.counter, RING)[None]
        weight_sum, num_blocks = statistics[1], statistics[2]
        applied = apply_update(state, weight_sum, self.hyper)
        means = statistics[3:] / num_blocks.clamp(min=1)
        loss = statistics[0] / weight_sum
        metrics = torch.stack(
            (
                loss,
                means[0] + 1,
                applied["learning_rate"],
                applied["grad_norm"],
                applied["empty"],
                applied["skipped"],
                num_blocks,
            )
        )
        self.ring.index_copy_(0, row, torch.cat((metrics, means[1:]))[None])

    def audit(self, bucket, slot: Slot) -> None:
        """Check the bucket's attention against a dense reference. Reads on the host; before capture only.

        Raises: CaptureError naming bucket and quantity.
        """
        blocks, drafter, dtype = self._blocks(slot), self.drafter, self.target.head_VD.dtype
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():  # nothing goes back further than a layer's keys and values
            shape = bucket.length, self.target.num_features
            features_TF = torch.randn(shape, generator=generator, dtype=dtype, device=self.device)
            context = drafter.context(features_TF, slot["position"])[-1]
            del features_TF
        audit_attention(
            drafter.layers[-1],
            blocks,
            drafter.table(blocks.position_Q, dtype),
            context,
            self._attend(blocks),
            bucket_name=bucket.name,
            scale=drafter.scale,
        )

    def _attend(self, blocks: Blocks):
        """Attention over [context | blocks] under the blocks' mask, as the drafter's layers call it: trained and audited."""
        mask = self.attention.mask(blocks.visibility, blocks.position_Q.numel())
        attention, scale = self.attention, self.drafter.scale
        return lambda q, context, block: attention(q, context, block, mask, scale)

    def _blocks(self, slot: Slot) -> Blocks:
        return make_blocks(
            slot["token_ids"],
            slot["position"],
            slot["supervised"],
            slot["anchors"],
            decay_J=self.decay_J,
            mask_token_id=self.drafter.config.mask_token_id,
        )

    def _features(self, slot: Slot) -> Tensor:
        """The target's features of the row, [T, F] in its dtype: computed here, and kept no longer than the step."""
        token_ids_T = slot["token_ids"]
        features_TF = self.target.head_VD.new_empty(token_ids_T.numel(), self.target.num_features)
        self.target.features(token_ids_T, slot["position"], features_TF)
        return features_TF

    def _hidden(self, slot: Slot) -> tuple[Blocks, Tensor]:
        """The row's blocks, and the drafter's hidden states of all draft tokens that are predicted, [N·J, D]."""
        features_TF = self._features(slot)
        blocks = self._blocks(slot)
        context = self.drafter.context(features_TF, slot["position"])
        embeddings_UD = self.target.embed(blocks.token_ids_U)
        return blocks, self.drafter(embeddings_UD, blocks.position_Q, context, self._attend(blocks))

    def _loss(self, blocks: Blocks, hidden_MD: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Loss sum, which slots are right, bool [N, J], and the gradient of the hidden states."""
        loss_sum, correct_M, gradient_MD = head_loss(
            hidden_MD,
            self.target.head_VD,
            blocks.label_NJ.flatten(),
            blocks.weight_NJ.flatten(),
            chunk_tokens=self.chunk_tokens,
            with_gradient=with_gradient,
        )
        return loss_sum, correct_M.view_as(blocks.label_NJ) & (blocks.weight_NJ > 0), gradient_MD

    def _statistics(self, blocks: Blocks, loss_sum: Tensor, correct_NJ: Tensor) -> Tensor:
        """float32 [4 + J]: loss sum, weight sum, labelled blocks, sum of leading matches, right predictions of each slot."""
        num_blocks = (blocks.weight_NJ[:, 0] > 0).sum()
        head = torch.stack((loss_sum, blocks.weight_NJ.sum(), num_blocks.float(), leading_matches(correct_NJ).sum().float()))
        return torch.cat((head, correct_NJ.float().sum(0)))
