"""The drafter against DFlash's equations in one float64 piece, its names and shapes against z-lab's, and its config."""

import random

import pytest
import torch

from graphcap.errors import ConfigError
from graphcap.model.attention import DenseAttention
from graphcap.model.blocks import decay, make_blocks
from graphcap.model.drafter import Drafter, tapped_layers
from graphcap.model.fused import rotary_table, rotate
from tests.toys import (
    HIDDEN,
    MASK_ID,
    drafter_config,
    first_layer_is_the_plain_one,
    fresh_seed,
    naive_drafter,
    naive_rotate,
    padded,
    random_drafter,
    random_lengths,
    random_row,
)

LENGTH, NUM_ANCHORS = 48, 5


def expected_shapes(config) -> dict[str, tuple[int, ...]]:
    """z-lab's tensors, name by name."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    queries, keys, size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.head_dim
    shapes = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        shapes |= {
            f"layers.{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"layers.{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"layers.{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"layers.{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"layers.{layer}.self_attn.q_norm.weight": (size,),
            f"layers.{layer}.self_attn.k_norm.weight": (size,),
            f"layers.{layer}.mlp.gate_proj.weight": (mlp, hidden),
            f"layers.{layer}.mlp.up_proj.weight": (mlp, hidden),
            f"layers.{layer}.mlp.down_proj.weight": (hidden, mlp),
            f"layers.{layer}.input_layernorm.weight": (hidden,),
            f"layers.{layer}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def test_tensor_names_and_shapes_are_those_of_z_lab():
    config = drafter_config(
        num_layers=3, num_heads=6, num_kv_heads=2, head_dim=10, intermediate_size=44, target_layer_ids=(0, 1, 3)
    )
    drafter = Drafter(config)
    expected = expected_shapes(config)
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == expected
    assert {name for name, _ in drafter.named_parameters()} == set(expected)  # no buffers, nothing hidden from the state dict
    assert len(expected) == 3 + 11 * 3


def run_both(drafter: Drafter, block_size: int, seed: int, change=lambda inputs: None):
    """The drafter's hidden states of all MASKs in float64, and the reference's after `change` of its inputs."""
    rng = random.Random(seed)
    arrays = random_row(random_lengths(LENGTH, rng), rng, num_anchors=NUM_ANCHORS - 1)
    token_ids, position, supervised, anchors = padded(arrays, LENGTH, NUM_ANCHORS)
    decay_J = torch.tensor(decay(block_size, 4.0))
    blocks = make_blocks(token_ids, position, supervised, anchors, decay_J=decay_J, mask_token_id=MASK_ID)
    features = torch.randn(LENGTH, drafter.fc.in_features, dtype=torch.float64)
    embeddings = torch.randn(NUM_ANCHORS + 1, HIDDEN, dtype=torch.float64)
    visible = DenseAttention().mask(blocks.visibility, NUM_ANCHORS * block_size)
    with torch.no_grad():
        context = drafter.context(features, position)
        attend = DenseAttention()
        ours = drafter(embeddings, blocks.position_Q, context, lambda q, *keys: attend(q, *keys, visible, drafter.scale))
    weights = {name: tensor.detach().double().clone() for name, tensor in drafter.state_dict().items()}
    inputs = {
        "features_SF": features,
        "position_S": position,
        "embeddings_QD": torch.cat([embeddings[[n] + [-1] * (block_size - 1)] for n in range(NUM_ANCHORS)]),
        "position_Q": blocks.position_Q,
        "visible": visible,
        "weights": weights,
    }
    change(inputs)
    return ours, naive_drafter(config=drafter.config, **inputs).unflatten(0, (-1, block_size))[:, 1:].flatten(0, 1)


@pytest.mark.parametrize("block_size", [4, 7])
def test_context_and_forward_are_dflash_in_one_float64_piece(block_size):
    seed = fresh_seed()
    drafter = random_drafter(seed, block_size=block_size).double()
    ours, expected = run_both(drafter, block_size, seed)
    # The rotary angles are float32 by design; at positions below 64 that is worth a few 1e-6.
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


WRONG = {
    "a_context_position": lambda inputs: inputs.update(position_S=inputs["position_S"] + 1),
    "a_block_position": lambda inputs: inputs.update(position_Q=inputs["position_Q"] + 1),
    "the_mask": lambda inputs: inputs["visible"].__setitem__((0, LENGTH), False),
    "a_feature": lambda inputs: inputs["features_SF"][:, 0].add_(1.0),
    "the_norm_of_the_keys": lambda inputs: inputs["weights"]["layers.0.self_attn.k_norm.weight"].fill_(1.0),
    "the_norm_of_the_context": lambda inputs: inputs["weights"]["hidden_norm.weight"].fill_(1.0),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_float64_comparison_notices_a_change_of(what):
    seed = fresh_seed()
    ours, expected = run_both(random_drafter(seed).double(), 4, seed, WRONG[what])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


def test_rotation_turns_pairs_of_channels_half_a_head_apart():
    seed = fresh_seed()
    x, position = torch.randn(5, 3, 16, dtype=torch.float64), torch.randint(0, 60, (5,))
    table = rotary_table(position, head_dim=16, theta=10000.0, dtype=torch.float64)
    ours = rotate(x.transpose(0, 1), table).transpose(0, 1)
    torch.testing.assert_close(ours, naive_rotate(x, position, 10000.0), rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours, naive_rotate(x, position + 1, 10000.0), rtol=1e-5, atol=1e-5)
    assert seed >= 0


def test_keys_and_queries_meet_by_their_distance_only():
    """A rotated query and key give the same score wherever they stand; queries and keys are both rotated."""
    fresh_seed()
    drafter = random_drafter(1).double()
    attention, states = drafter.layers[0].self_attn, torch.randn(2, HIDDEN, dtype=torch.float64)

    def scores(offset: int) -> torch.Tensor:
        seen = []
        table = drafter.table(torch.tensor([3, 7]) + offset, torch.float64)
        empty = torch.empty(2, 0, 8, dtype=torch.float64)
        joined = attention.projected(states)
        attention(joined, table, (empty, empty), lambda q, context, block: seen.append(q[::2] @ block[0].transpose(1, 2)) or q)
        return seen[0]

    torch.testing.assert_close(scores(0), scores(50), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("blocks", "block_size"), [(1, 2), (6, 4)])
def test_the_first_layer_on_distinct_rows_is_the_layer_on_all_of_them(blocks, block_size):
    fresh_seed()
    first_layer_is_the_plain_one(blocks, block_size, torch.device("cpu"), torch.float64, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_angles_are_float32_at_position_100000_whatever_the_dtype(dtype):
    position, size, theta = torch.tensor([1, 1000, 99_999, 100_000]), 64, 1e6
    frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.cat((position.double()[:, None] * frequency,) * 2, -1)
    drafter = Drafter(drafter_config(head_dim=size, rope_theta=theta)).to(dtype)
    cos, sin = drafter.table(position, dtype)
    assert cos.dtype == sin.dtype == dtype
    # float32 holds an angle of 100,000 to about 0.01; bfloat16 of the table itself adds 2**-8
    bound = 0.02 + (2**-8 if dtype == torch.bfloat16 else 0)
    assert max((cos.double() - angle.cos()).abs().max(), (sin.double() - angle.sin()).abs().max()) < bound
    rounded = position.double()[:, None] * torch.cat((frequency.bfloat16().double(),) * 2, -1)  # must fail: the known hazard
    assert (rounded.cos() - angle.cos()).abs().max() > 10 * bound


@pytest.mark.parametrize(
    ("num_target_layers", "num_tapped", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (40, 5, [1, 10, 19, 28, 37]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 1, [18]),
        (12, 3, [1, 5, 9]),
    ],
)
def test_tapped_layers_are_z_labs(num_target_layers, num_tapped, expected):
    assert tapped_layers(num_target_layers, num_tapped) == expected


SHALLOW = [(n, k) for n in range(2, 9) for k in range(2, n + 1)]


@pytest.mark.parametrize(
    ("num_target_layers", "num_tapped"),
    SHALLOW,
)
def test_a_shallow_targets_last_layer_is_tapped_only_if_no_other_is_left(num_target_layers, num_tapped):
    ids = tapped_layers(num_target_layers, num_tapped)
    assert ids == sorted(set(ids)) and len(ids) == num_tapped and ids[0] >= 0
    assert ids[-1] < num_target_layers - (num_tapped < num_target_layers)


def test_more_taps_than_layers_are_refused():
    with pytest.raises(ConfigError, match="num_tapped_layers.*4 layers.*5"):
        tapped_layers(4, 5)


@pytest.mark.parametrize("ids", [(), (2, 2), (-1, 1), (0, 4), (0, 1, 2, 3, 4), (2, 0)])
def test_target_layer_ids_that_mean_nothing_are_refused(ids):
    with pytest.raises(ConfigError, match="target_layer_ids"):
        drafter_config(target_layer_ids=ids)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("mask_token_id", {"mask_token_id": 64}),
        ("mask_token_id", {"mask_token_id": -1}),
        ("num_kv_heads", {"num_kv_heads": 3}),
        ("head_dim", {"head_dim": 9}),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(key, changes):
    with pytest.raises(ConfigError, match=key):
        drafter_config(**changes)


def test_the_start_depends_on_the_seed_alone_and_has_the_stated_spread():
    drafters = [Drafter(drafter_config(intermediate_size=512)) for _ in range(3)]
    for drafter, seed in zip(drafters, (5, 5, 6)):
        drafter.initialize(seed)
    first, second, other = ([p.detach() for p in drafter.parameters()] for drafter in drafters)
    assert all(torch.equal(left, right) for left, right in zip(first, second))
    assert not all(torch.equal(left, right) for left, right in zip(first, other))
    assert all((p == 1).all() for p in first if p.dim() == 1)
    matrices = torch.cat([p.flatten() for p in first if p.dim() == 2])
    assert matrices.std().item() == pytest.approx(0.02, rel=0.02) and abs(matrices.mean().item()) < 5e-4
