"""Walks of the attention kernels, in triton's interpreter, against loops over every query and key."""

import os
import random

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, not interpreted: see tests/cuda/test_kernels.py", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/conftest.py sets TRITON_INTERPRET=1; this process does not have it", allow_module_level=True)
pytest.importorskip("triton", reason="triton, of graphcap's test extra, is not installed")

from graphcap.kernels.options import Tiles  # noqa: E402 - after the checks
from graphcap.kernels.walks import Walks  # noqa: E402
from graphcap.model.blocks import row_visibility  # noqa: E402
from tests.toys import fresh_seed  # noqa: E402

GROUP, LENGTH, BLOCKS = 8, 512, 64


def blocks(num_blocks: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors in order over three documents; behind them slots that see nothing."""
    starts, used = [0, 70, 200], num_blocks - rng.randrange(1, 9)
    high = sorted(rng.randrange(1, LENGTH + 1) for _ in range(used))
    low = [max(start for start in starts if start < one) for one in high]
    return tuple(torch.tensor(edges + [0] * (num_blocks - used)) for edges in (low, high))


def seen_by(low: torch.Tensor, high: torch.Tensor, group: int, num_keys: int) -> torch.Tensor:
    """bool [queries, keys]."""
    key = torch.arange(num_keys)
    return ((key >= low[:, None]) & (key < high[:, None])).repeat_interleave(group, 0)


def assert_right(walk: torch.Tensor, seen: torch.Tensor, tile: int, step: int) -> None:
    """walk: over the second dimension of `seen` for tiles of the first. It passes all that any row of its tile sees.

    And: what is called seen by all is; tiles once each, longest first; begun where the first is seen; steps stay inside.
    """
    lengths = [end - begin for _, begin, _, _, end in walk.tolist()]
    assert lengths == sorted(lengths, reverse=True)
    assert sorted(walk[:, 0].tolist()) == list(range(seen.shape[0] // tile))
    for number, begin, all_from, all_to, end in walk.tolist():
        rows = seen[number * tile : (number + 1) * tile]
        places = rows.any(0).nonzero()[:, 0].tolist()
        if not places:
            assert begin >= end, walk
            continue
        assert begin <= places[0] and end > places[-1]
        steps = -(-(end - begin) // step)
        assert begin + steps * step <= seen.shape[1] and begin >= 0
        assert begin == min(places[0], seen.shape[1] - steps * step)
        assert begin <= all_from <= all_to and (all_from - begin) % step == (all_to - all_from) % step == 0
        assert rows[:, all_from:all_to].all()


@pytest.mark.parametrize(("queries", "keys"), [(32, 64), (64, 32)])
def test_walks_are_what_a_loop_over_queries_and_keys_finds(queries, keys):
    rng = random.Random(fresh_seed())
    low, high = blocks(BLOCKS, rng)
    seen = seen_by(low, high, GROUP, LENGTH)
    walks = Walks(low, high, group=GROUP, num_queries=BLOCKS * GROUP, num_keys=LENGTH)
    tiles = Tiles(queries, keys, 4, 1)
    assert_right(walks.of_queries(tiles), seen, queries, keys)
    assert_right(walks.of_keys(tiles), seen.T.contiguous(), keys, queries)
    for walk in (walks.of_queries(tiles), walks.of_keys(tiles)):
        assert (walk[:, 3] > walk[:, 2]).any(), "no part that all see"
    assert walks.of_keys(tiles) is walks.of_keys(tiles), "made once"
    seen[:, : LENGTH // 2] = False  # must fail
    with pytest.raises(AssertionError):
        assert_right(walks.of_queries(tiles), seen, queries, keys)


def test_a_walk_over_one_document_begins_at_its_first_token():
    position = torch.cat([torch.arange(n) for n in (70, 186)])
    visibility = row_visibility(position)
    walk = Walks(visibility.low_R, visibility.high_R, group=1, num_queries=256, num_keys=256).of_queries(Tiles(64, 64, 4, 1))
    assert walk.tolist() == [
        [3, 64, 128, 192, 256],  # 70 and three steps of 64 would leave the row
        [1, 0, 128, 128, 128],  # both documents
        [2, 70, 70, 70, 192],
        [0, 0, 0, 0, 64],
    ]
