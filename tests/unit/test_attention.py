"""Dense attention against float64 loops, and the analytic tiles of the block mask against the predicate itself."""

import random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from graphcap.model.attention import TILE, DenseAttention, FlexAttention, attention_for, block_mask, tiles
from graphcap.model.blocks import Visibility, decay, make_blocks, row_visibility
from tests.toys import MASK_ID, fresh_seed, naive_attention, padded, random_lengths, random_row

SLOTS = {4: 32, 7: 128, 8: 32, 10: 64, 16: 16}  # anchor slots that make whole tiles


def block_visibility(block_size: int, length: int, rng: random.Random, *, share_used: float = 0.8) -> tuple[Visibility, int]:
    """The visibility of random blocks: several documents, anchors at 0, at tile edges and last; some slots unused."""
    num_slots = SLOTS[block_size]
    arrays = random_row(random_lengths(length, rng), rng, num_anchors=max(1, int(share_used * num_slots)))
    token_ids, position, supervised, anchors = padded(arrays, length, num_slots)
    special = [place for place in (0, TILE - 1, TILE, TILE + 1, length - 1) if place < length]
    used = sorted({*special, *anchors[anchors >= 0].tolist()})[: num_slots - 1]
    anchors = torch.tensor(used + [-1] * (num_slots - len(used)))
    blocks = make_blocks(
        token_ids, position, supervised, anchors, decay_J=torch.tensor(decay(block_size, 4.0)), mask_token_id=MASK_ID
    )
    return blocks.visibility, num_slots * block_size


def by_tile(visible: torch.Tensor) -> torch.Tensor:
    """[query tiles, key tiles, TILE · TILE] of a dense mask."""
    return visible.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2).flatten(2)


def assert_tiles_are_right(visible: torch.Tensor, some: torch.Tensor, full: torch.Tensor, num_context: int) -> None:
    needed, whole = by_tile(visible).any(-1), by_tile(visible).all(-1)
    assert not (needed & ~some).any(), "a tile with a visible pair is missing"
    assert not (full & ~whole).any(), "a tile counts as full and is not"
    assert not (some & ~needed).any(), "an empty tile is computed"
    context = num_context // TILE
    assert torch.equal(full[:, :context], whole[:, :context]), "a full context tile is computed with its mask"


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dense_attention_is_softmax_attention_in_float64_loops(groups):
    seed = fresh_seed()
    visibility, num_queries = block_visibility(4, 128, random.Random(seed))
    num_queries = 32  # the first blocks are enough for a loop
    visibility = Visibility(visibility.low_R[:8], visibility.high_R[:8], group=4, num_context=128)
    q, k, v = torch.randn(4, num_queries, 8), torch.randn(groups, 160, 8), torch.randn(groups, 160, 8)
    mask = DenseAttention().mask(visibility, num_queries)
    out = DenseAttention()(q, k, v, mask, 0.35)
    expected = naive_attention(q, k, v, mask, 0.35)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    mask[0, 128] = ~mask[0, 128]  # must fail: one pair
    with pytest.raises(AssertionError):
        torch.testing.assert_close(out.double(), naive_attention(q, k, v, mask, 0.35), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [128, 256, 512])
@pytest.mark.parametrize("block_size", [4, 7, 8, 10, 16])
def test_no_needed_tile_is_missing_and_no_tile_is_wrongly_full_for_blocks(block_size, length):
    visibility, num_queries = block_visibility(block_size, length, random.Random(fresh_seed()))
    visible = DenseAttention().mask(visibility, num_queries)
    some, full = tiles(visibility, num_queries)
    assert_tiles_are_right(visible, some, full, length)
    dropped = some.clone()
    dropped[tuple(random.choice(some.nonzero().tolist()))] = False  # must fail: one tile
    with pytest.raises(AssertionError, match="missing"):
        assert_tiles_are_right(visible, dropped, full, length)


@pytest.mark.parametrize("window", [None, 1, 100, 200])
def test_no_needed_tile_is_missing_and_no_tile_is_wrongly_full_for_the_targets_row(window):
    rng = random.Random(fresh_seed())
    position = padded(random_row(random_lengths(512, rng, most=3), rng), 512, 512)[1]
    visibility = row_visibility(position, window=window)
    some, full = tiles(visibility, 512)
    assert_tiles_are_right(DenseAttention().mask(visibility, 512), some, full, 512)


def test_a_context_tile_is_full_only_if_it_is_full_for_every_block_of_the_query_tile():
    """Blocks of 10 straddle the border between query tiles: tile 0 holds blocks 0 … 12, tile 1 blocks 12 … 25."""
    low, high = torch.zeros(64, dtype=torch.int64), torch.full((64,), 256)
    high[12] = 130  # block 12 lies in both query tiles
    _, full = tiles(Visibility(low, high, group=10, num_context=256), 640)
    assert full[:, :2].tolist() == [[True, False], [True, False], [True, True], [True, True], [True, True]]


def test_a_context_tile_of_which_one_key_is_seen_is_computed_and_one_of_none_is_not():
    low, high = torch.zeros(32, dtype=torch.int64), torch.zeros(32, dtype=torch.int64)
    low[0], high[0] = 127, 129  # the last key of tile 0 and the first of tile 1
    low[16], high[16] = 128, 256  # tile 1, all of it
    some, _ = tiles(Visibility(low, high, group=8, num_context=384), 256)
    assert some[:, :3].tolist() == [[True, True, False], [False, True, False]]


def test_the_draft_band_holds_the_neighbour_tile_of_a_block_that_straddles_a_border():
    zero = torch.zeros(64, dtype=torch.int64)
    some, full = tiles(Visibility(zero, zero, group=10, num_context=128), 640)
    assert not some[:, 0].any() and not full.any()  # every slot unused: no context at all
    assert some[:, 1:].int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
        [0, 0, 0, 1, 1],
    ]


def listed(count: torch.Tensor, index: torch.Tensor) -> list[set[int]]:
    return [set(row[:n].tolist()) for n, row in zip(count[0, 0].tolist(), index[0, 0])]


@pytest.mark.parametrize("block_size", [4, 7, 8, 10, 16])
def test_the_block_mask_lists_the_same_tiles_as_one_made_from_every_pair(block_size):
    visibility, num_queries = block_visibility(block_size, 256, random.Random(fresh_seed()))
    num_keys = 256 + num_queries
    mask = block_mask(visibility, num_queries)
    oracle = create_block_mask(visibility.predicate(), None, None, num_queries, num_keys, device="cpu", BLOCK_SIZE=TILE)
    assert mask.shape == oracle.shape == (1, 1, num_queries, num_keys)
    assert torch.equal(mask.to_dense(), oracle.to_dense())
    for side in ("kv", "q"):  # queries' lists for the forward, keys' lists for the backward

        def tiles_of(one, side=side):
            partial = listed(getattr(one, f"{side}_num_blocks"), getattr(one, f"{side}_indices"))
            return partial, listed(getattr(one, f"full_{side}_num_blocks"), getattr(one, f"full_{side}_indices"))

        # A draft tile could be full only with blocks of 128 tokens or more.
        assert tiles_of(mask) == tiles_of(oracle)
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        assert getattr(mask, name).dtype == torch.int32
    first = next(tile for tile in listed(mask.kv_num_blocks, mask.kv_indices) if tile)
    assert listed(mask.kv_num_blocks - 1, mask.kv_indices)[0] != first  # must fail: one tile fewer


def test_a_row_length_that_no_tile_divides_is_refused():
    with pytest.raises(AssertionError, match="160"):
        block_mask(row_visibility(torch.arange(160)), 160)


def test_the_device_chooses_the_body():
    assert isinstance(attention_for(torch.device("cpu")), DenseAttention)
    assert isinstance(attention_for(torch.device("cuda", 0)), FlexAttention)
