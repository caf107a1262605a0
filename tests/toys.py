"""Toys for the tests: tiny targets and drafters built in the test, rows of documents, and naive references.

A reference here is a loop or a dense float64 formula and shares no code with graphcap. Random inputs are fresh in every
run; `fresh_seed` prints its seed, which pytest shows when the test fails. GRAPHCAP_TEST_SEED=<n> repeats it.
"""

import functools
import math
import os
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphcap.data.planner import Bucket
from graphcap.engine import Engine
from graphcap.engine.optimizer import Hyper
from graphcap.engine.step import DrafterStep
from graphcap.model.attention import attention_for
from graphcap.model.blocks import Visibility, decay, default_gamma
from graphcap.model.drafter import Drafter, DrafterConfig
from graphcap.model.target import Target

torch.set_num_threads(1)

HIDDEN, VOCAB, MASK_ID = 32, 64, 63
HYPER = {
    "learning_rate": 3e-3,
    "warmup_fraction": 0.1,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}


def fresh_seed() -> int:
    """A new seed, printed and given to torch's and Python's generators."""
    seed = int(os.environ.get("GRAPHCAP_TEST_SEED") or random.SystemRandom().getrandbits(31))
    print(f"seed {seed}: repeat with GRAPHCAP_TEST_SEED={seed}")
    torch.manual_seed(seed)
    random.seed(seed)
    return seed


# --- targets and drafters


def tiny_model(family: str, seed: int, **changes) -> nn.Module:
    """A random causal language model of transformers: 4 layers of 32, 4 heads, 2 key heads; sharp enough to choose."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    }[family]
    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen2":
        del sizes["head_dim"]
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
        sizes |= {"sliding_window": 8, "layer_types": kinds, "query_pre_attn_scalar": 8}
    if family == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = model_class(config_class(**(sizes | changes))).requires_grad_(False).eval()
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(noise * 0.1)
        else:
            parameter.copy_(noise * (1.0 if "embed" in name else 1.5 / math.sqrt(parameter.shape[1])))
    return model


def tiny_target(seed: int, *, family: str = "llama", taps: tuple[int, ...] = (0, 2), dtype=torch.float32, **changes) -> Target:
    """A target on such a model. Its head's rows have one length, so that each token is some hidden state's choice."""
    model = tiny_model(family, seed, **changes)
    head = model.get_output_embeddings().weight
    head.mul_(4 / head.norm(dim=1, keepdim=True))
    return Target(model.to(dtype), taps)


def tagged_model() -> nn.Module:
    """Four layers of which layer k adds 2^k, on a zero embedding; every layer's output says which layers ran."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Adds(LlamaDecoderLayer):  # of this class, so that transformers records its outputs as hidden states
        def __init__(self, number: float) -> None:
            nn.Module.__init__(self)
            self.number = number

        def forward(self, hidden_states, *arguments, **keywords):
            return hidden_states + self.number

    model = tiny_model("llama", 0)
    model.get_input_embeddings().weight.zero_()
    model.get_decoder().layers = nn.ModuleList(Adds(2.0**k) for k in range(4))
    return model


class TableTarget:
    """A target of tables: the features of a token are row `token id` of `features_VF`, whatever stands around it."""

    def __init__(self, seed: int, *, vocab: int = VOCAB, num_taps: int = 2, features_VF: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding_VD = torch.randn(vocab, HIDDEN, generator=generator)
        self.head_VD = torch.randn(vocab, HIDDEN, generator=generator) / math.sqrt(HIDDEN)
        self.features_VF = torch.randn(vocab, num_taps * HIDDEN, generator=generator) if features_VF is None else features_VF
        self.num_features, self.hidden_size = self.features_VF.shape[1], HIDDEN

    def embed(self, token_ids_S: Tensor) -> Tensor:
        return self.embedding_VD[token_ids_S]

    @torch.no_grad()
    def features(self, token_ids_T: Tensor, position_T: Tensor, out_TF: Tensor) -> None:
        out_TF.copy_(self.features_VF[token_ids_T.long()])


def drafter_config(**changes) -> DrafterConfig:
    sizes = {
        "hidden_size": HIDDEN,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "block_size": 4,
        "mask_token_id": MASK_ID,
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
    }
    return DrafterConfig(**(sizes | changes))


def random_drafter(seed: int, *, sharpness: float = 1.0, **changes) -> Drafter:
    """A drafter with random norms too; `sharpness` scales the matrices."""
    drafter, generator = Drafter(drafter_config(**changes)), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else sharpness * noise / math.sqrt(parameter.shape[1]))
    return drafter


def make_step(
    target, drafter: Drafter, *, num_updates: int = 100, chunk_tokens: int = 64, kind=DrafterStep, **hyper
) -> DrafterStep:
    """A step of DrafterStep's kind with the loss weights of the drafter's block size."""
    block_size = drafter.config.block_size
    return kind(
        target,
        drafter,
        decay=decay(block_size, default_gamma(block_size)),
        hyper=Hyper(num_updates=num_updates, **(HYPER | hyper)),
        chunk_tokens=chunk_tokens,
    )


def make_engine(step: DrafterStep, *sizes: tuple[int, int]) -> tuple[Engine, list[Bucket]]:
    """An eager engine with a bucket for each (length, anchor slots)."""
    buckets = [Bucket(*size) for size in sizes]
    return Engine(step, tuple(buckets)), buckets


def run_update(engine: Engine, rows: list[tuple[Bucket, dict[str, np.ndarray]]]) -> Tensor:
    """A micro step of every row, then the update. Returns the sums as they stood before it."""
    for bucket, arrays in rows:
        engine.fill(bucket, arrays)
        engine.micro_step(bucket)
    sums = engine.step.state.sums.clone()
    engine.update()
    return sums


# --- rows


def random_lengths(total: int, rng: random.Random, *, most: int = 5) -> list[int]:
    """Lengths of up to `most` documents, of 1 token or more, that leave some of `total` tokens as padding, or none."""
    used = total - rng.choice([0, 0, 1, total // 5])
    cuts = sorted(rng.sample(range(1, used), rng.randint(0, most - 1)))
    return [end - start for start, end in zip([0, *cuts], [*cuts, used])]


def random_row(
    lengths: list[int], rng: random.Random, *, vocab: int = MASK_ID, num_anchors: int | None = None
) -> dict[str, np.ndarray]:
    """Unpadded arrays of a row of documents, as a slot is filled with them. num_anchors: at most so many."""
    supervised = [int(rng.random() < 0.8) for _ in range(sum(lengths))]
    position = [p for length in lengths for p in range(length)]
    candidates = [
        i for i in range(len(position) - 1) if supervised[i] and supervised[i + 1] and position[i + 1] == position[i] + 1
    ]
    chosen = sorted(rng.sample(candidates, min(len(candidates), num_anchors or len(candidates))))
    return {
        "token_ids": np.array([rng.randrange(vocab) for _ in position], np.int32),
        "position": np.array(position, np.int32),
        "supervised": np.array(supervised, np.int32),
        "anchors": np.array(chosen, np.int32),
    }


def padded(arrays: dict[str, np.ndarray], length: int, num_anchors: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token ids, positions, supervised [length] and anchors [num_anchors] as int64, padded as the engine does."""

    def tail(name: str, size: int, value: int) -> Tensor:
        array = torch.from_numpy(arrays[name]).long()
        return torch.cat((array, torch.full((size - len(array),), value)))

    return (
        tail("token_ids", length, 0),
        tail("position", length, 0),
        tail("supervised", length, 0),
        tail("anchors", num_anchors, -1),
    )


def document_numbers(position: list[int]) -> list[int]:
    """Which document each token of a row belongs to: a new one wherever a position is 0."""
    numbers, number = [], -1
    for place in position:
        number += place == 0
        numbers.append(number)
    return numbers


# --- naive references


def naive_visible(position: list[int], anchors: list[int], block_size: int) -> Tensor:
    """bool [N·K, T + N·K], pair by pair: the block's document strictly before its anchor, and its own block."""
    document = document_numbers(position)
    num_tokens, num_queries = len(position), len(anchors) * block_size
    visible = torch.zeros(num_queries, num_tokens + num_queries, dtype=torch.bool)
    for query in range(num_queries):
        anchor = anchors[query // block_size]
        for key in range(num_tokens):
            visible[query, key] = anchor >= 0 and key < anchor and document[key] == document[anchor]
        for other in range(num_queries):
            visible[query, num_tokens + other] = other // block_size == query // block_size
    return visible


def naive_attention(q_HQC: Tensor, k_GSC: Tensor, v_GSC: Tensor, visible_QS: Tensor, scale: float) -> Tensor:
    """Softmax attention in float64, head by head and query by query."""
    repeat = q_HQC.shape[0] // k_GSC.shape[0]
    out = torch.zeros(q_HQC.shape, dtype=torch.float64)
    for head in range(q_HQC.shape[0]):
        k, v = k_GSC[head // repeat].double(), v_GSC[head // repeat].double()
        for query in range(q_HQC.shape[1]):
            seen = visible_QS[query]
            score = (k[seen] @ q_HQC[head, query].double()) * scale
            weight = (score - score.max()).exp()
            out[head, query] = (weight / weight.sum()) @ v[seen]
    return out


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def naive_rotate(x_SHC: Tensor, position_S: Tensor, theta: float) -> Tensor:
    """Channel i and i + C/2 are one complex number, turned by position · theta^(-2i/C)."""
    half = x_SHC.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(
        torch.ones(len(position_S), 1, half, dtype=torch.float64), position_S.double()[:, None, None] * frequency
    )
    turned = torch.complex(x_SHC[..., :half], x_SHC[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def naive_drafter(
    weights: dict[str, Tensor],
    config: DrafterConfig,
    features_SF: Tensor,
    position_S: Tensor,
    embeddings_QD: Tensor,
    position_Q: Tensor,
    visible: Tensor,
) -> Tensor:
    """Final hidden states [Q, D] in one float64 piece: DFlash's equations over the concatenated [context | blocks]."""
    eps, heads, groups, size = config.rms_norm_eps, config.num_heads, config.num_kv_heads, config.head_dim
    context = naive_norm(features_SF @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    positions, x = torch.cat((position_S, position_Q)), embeddings_QD
    for layer in range(config.num_layers):

        def w(name, layer=layer):
            return weights[f"layers.{layer}.{name}.weight"]

        states = naive_norm(x, w("input_layernorm"), eps)
        both = torch.cat((context, states))
        q = naive_norm((states @ w("self_attn.q_proj").T).view(-1, heads, size), w("self_attn.q_norm"), eps)
        k = naive_norm((both @ w("self_attn.k_proj").T).view(-1, groups, size), w("self_attn.k_norm"), eps)
        v = (both @ w("self_attn.v_proj").T).view(-1, groups, size)
        q, k = naive_rotate(q, position_Q, config.rope_theta), naive_rotate(k, positions, config.rope_theta)
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        score = torch.einsum("qhc,khc->hqk", q, k) / math.sqrt(size)
        share = score.masked_fill(~visible, -math.inf).softmax(-1)
        x = x + torch.einsum("hqk,khc->qhc", share, v).flatten(1) @ w("self_attn.o_proj").T
        states = naive_norm(x, w("post_attention_layernorm"), eps)
        x = x + (F.silu(states @ w("mlp.gate_proj").T) * (states @ w("mlp.up_proj").T)) @ w("mlp.down_proj").T
    return naive_norm(x, weights["norm.weight"], eps)


def naive_labels(
    tokens: list[int], position: list[int], supervised: list[int], anchors: list[int], block_size: int, gamma: float
):
    """Label and weight of slots 1 … K-1 of every anchor slot, slot by slot: two tensors [N, K-1], float64 weights."""
    document = document_numbers(position)
    label = torch.zeros(len(anchors), block_size - 1, dtype=torch.int64)
    weight = torch.zeros(len(anchors), block_size - 1, dtype=torch.float64)
    for n, anchor in enumerate(anchors):
        for k in range(1, block_size):
            place = anchor + k
            if anchor >= 0 and place < len(tokens) and document[place] == document[anchor] and supervised[place]:
                label[n, k - 1] = tokens[place]
                weight[n, k - 1] = math.exp(-(k - 1) / gamma)
    return label, weight


def relative(difference: Tensor, reference: Tensor) -> float:
    """||difference|| / ||reference||."""
    return (difference.double().norm() / reference.double().norm()).item()


# --- a target with fitted drafters


@functools.cache
def fitted() -> "Fitted":
    """A float64 target, its greedy replies to random prompts, and a drafter trained on some; made once a process."""
    from graphcap.model.decode import decode_plain

    seed = fresh_seed()
    rng = random.Random(seed)
    target = tiny_target(seed, taps=(0, 1, 3), dtype=torch.float64)
    prompts = [[rng.randrange(MASK_ID) for _ in range(rng.randint(3, 9))] for _ in range(6)]
    replies = [decode_plain(target, prompt, max_new_tokens=20, stop_ids=set()).token_ids for prompt in prompts]
    drafter = Drafter(drafter_config(target_layer_ids=(0, 1, 3)))
    drafter.initialize(seed)
    fit(tiny_target(seed, taps=(0, 1, 3)), drafter, list(zip(prompts, replies))[:4])
    return Fitted(target, drafter.double(), prompts, replies)


@dataclass(frozen=True)
class Fitted:
    """What `fitted` makes. The drafter never saw the last two replies."""

    target: Target
    drafter: Drafter
    prompts: list[list[int]]
    replies: list[list[int]]


def fit(target: Target, drafter: Drafter, texts: list[tuple[list[int], list[int]]], *, num_updates: int = 60) -> None:
    """Some updates on one row of all texts; a supervised token is one of a reply."""
    step = make_step(target, drafter, num_updates=num_updates, learning_rate=1e-2)
    arrays = {
        "token_ids": [token for prompt, reply in texts for token in prompt + reply],
        "position": [place for prompt, reply in texts for place in range(len(prompt) + len(reply))],
        "supervised": [int(place >= len(prompt)) for prompt, reply in texts for place in range(len(prompt) + len(reply))],
    }
    supervised = arrays["supervised"]
    arrays["anchors"] = [i for i in range(len(supervised) - 1) if supervised[i] and supervised[i + 1]]
    engine, (bucket,) = make_engine(step, (len(supervised), len(arrays["anchors"])))
    row = {name: np.array(values, np.int32) for name, values in arrays.items()}
    for _ in range(num_updates):
        run_update(engine, [(bucket, row)])


def first_layer_is_the_plain_one(blocks: int, block_size: int, device: torch.device, dtype: torch.dtype, bound: float) -> None:
    """A layer on [first tokens | MASK] against it on all tokens laid out: output and gradients. Must fail: another MASK."""
    drafter = random_drafter(1, block_size=block_size).to(device, dtype)
    layer, tokens = drafter.layers[0], 128
    table = drafter.table(torch.arange(blocks * block_size, device=device), dtype)
    states_UD = torch.randn(blocks + 1, HIDDEN, device=device, dtype=dtype)
    features = torch.randn(tokens, drafter.fc.in_features, device=device, dtype=dtype)
    context = drafter.context(features, torch.arange(tokens, device=device))
    attention = attention_for(device)
    seen = Visibility(
        torch.zeros(blocks, dtype=torch.int64, device=device),
        torch.full((blocks,), tokens, device=device),
        group=block_size,
        num_context=tokens,
    )
    mask = attention.mask(seen, blocks * block_size)
    incoming = torch.randn(blocks * block_size, HIDDEN, device=device, dtype=dtype)

    def attend(q, *keys):
        return attention(q, *keys, mask, drafter.scale)

    def run(x, first):
        out = torch.add(*layer(x, None, table, context[0], attend, block_size, first=first))
        return out, *torch.autograd.grad(out, list(layer.parameters()), incoming, retain_graph=True)

    place = torch.tensor([[n] + [blocks] * (block_size - 1) for n in range(blocks)], device=device).flatten()
    distinct, plain = run(states_UD, True), run(states_UD[place], False)
    assert all(relative(a - b, b) < bound for a, b in zip(distinct, plain, strict=True))
    states_UD[-1] += 1
    assert relative(run(states_UD, True)[0] - plain[0], plain[0]) > 10 * bound
