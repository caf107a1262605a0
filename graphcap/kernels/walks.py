"""How the attention kernels walk: for every tile of queries the keys it passes, for every tile of keys the queries.

Long walks stand first, so that no processor begins one when the others are done. A walk begins at the first key (or query)
that its tile sees, not at a whole tile, unless its last step would leave the row. Made once a row for all layers.

Called by model/attention.py, read by kernels/attention.py and kernels/intervals.py. Needs triton, which torch's CUDA builds
bring along.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcap.kernels.options import Tiles

FAR = tl.constexpr(1 << 30)
AT_ONCE = 1024  # groups, or walks, that a program looks at


@triton.jit
def _put(walk, place, tile, begin, all_from, all_to, end):
    tl.store(walk + place * 5, tile)
    tl.store(walk + place * 5 + 1, begin)
    tl.store(walk + place * 5 + 2, all_from)
    tl.store(walk + place * 5 + 3, all_to)
    tl.store(walk + place * 5 + 4, end)


@triton.jit
def walk_at(walk, place):
    """The walk at a place: tile, begin, from where all see all, to where, end."""
    walk += place * 5
    return tl.load(walk), tl.load(walk + 1), tl.load(walk + 2), tl.load(walk + 3), tl.load(walk + 4)


@triton.jit
def _steps(begin, end, all_first, all_last, limit, STEP: tl.constexpr):
    """A walk over [begin, end) in whole steps, none past the limit; from where to where all is seen, as steps lie in it."""
    begin = tl.minimum(begin, limit - tl.cdiv(end - begin, STEP) * STEP)
    all_from = begin + tl.cdiv(tl.maximum(all_first - begin, 0), STEP) * STEP
    all_to = all_from + tl.maximum(all_last - all_from, 0) // STEP * STEP
    return begin, all_from, all_to


@triton.jit
def of_queries_kernel(low, high, walk, num_keys, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """One tile of M queries over the context's keys, N at a step."""
    tile = tl.program_id(0)
    group_M = (tile * M + tl.arange(0, M)) // GROUP
    low_M, high_M = tl.load(low + group_M).to(tl.int32), tl.load(high + group_M).to(tl.int32)
    sees = high_M > low_M
    end = tl.max(tl.where(sees, high_M, 0))
    first = tl.minimum(tl.min(tl.where(sees, low_M, FAR)), end)
    all_first, all_last = tl.max(tl.where(sees, low_M, 0)), tl.min(tl.where(sees, high_M, 0))
    begin, all_from, all_to = _steps(first, end, all_first, all_last, num_keys, N)
    _put(walk, tile, tile, begin, all_from, all_to, end)


@triton.jit
def of_keys_kernel(
    low, high, walk, num_groups, num_queries, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """One tile of N keys over the queries that see any of them, M at a step.

    The run that sees all of them is taken for empty where its groups do not follow one another.
    """
    tile = tl.program_id(0)
    begin, end = tile * N, tile * N + N
    first, last, all_first, all_last, number = num_groups, 0, num_groups, 0, 0
    for start in tl.range(0, num_groups, AT_ONCE):
        group = start + tl.arange(0, AT_ONCE)
        known = group < num_groups
        low_R = tl.load(low + group, mask=known, other=0).to(tl.int32)
        high_R = tl.load(high + group, mask=known, other=0).to(tl.int32)
        sees = (low_R < end) & (high_R > begin) & (high_R > low_R)
        first = tl.minimum(first, tl.min(tl.where(sees, group, num_groups)))
        last = tl.maximum(last, tl.max(tl.where(sees, group + 1, 0)))
        sees_all = known & (low_R <= begin) & (high_R >= end)
        all_first = tl.minimum(all_first, tl.min(tl.where(sees_all, group, num_groups)))
        all_last = tl.maximum(all_last, tl.max(tl.where(sees_all, group + 1, 0)))
        number += tl.sum(sees_all.to(tl.int32))
    first = tl.minimum(first, last)
    if number == 0 or all_last - all_first != number:
        all_first, all_last = first, first
    begin, all_from, all_to = _steps(first * GROUP, last * GROUP, all_first * GROUP, all_last * GROUP, num_queries, M)
    _put(walk, tile, tile, begin, all_from, all_to, last * GROUP)


@triton.jit
def longest_first_kernel(walk, ordered, num_tiles, AT_ONCE: tl.constexpr):
    """One walk to its place: behind all that are longer, and behind those as long that stand before it."""
    own = tl.program_id(0)
    tile, begin, all_from, all_to, end = walk_at(walk, own)
    place = tl.zeros([], tl.int32)
    for start in tl.range(0, num_tiles, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        known = other < num_tiles
        longer = tl.load(walk + other * 5 + 4, mask=known) - tl.load(walk + other * 5 + 1, mask=known) - (end - begin)
        place += tl.sum((known & ((longer > 0) | ((longer == 0) & (other < own)))).to(tl.int32))
    _put(ordered, place, tile, begin, all_from, all_to, end)


class Walks:
    """Of one row's intervals: its walks for the tiles that a kernel has, made when the first kernel asks.

    low_R, high_R: int64 [R]; query i of `num_queries` sees the keys from low_R[i // group] to before high_R[i // group] of
    `num_keys`. Both numbers are multiples of every tile. Capture: safe, if made anew in every forward.
    """

    def __init__(self, low_R: Tensor, high_R: Tensor, *, group: int, num_queries: int, num_keys: int) -> None:
        assert low_R.numel() * group == num_queries, (low_R.shape, group, num_queries)
        self.low_R, self.high_R, self.group = low_R, high_R, group
        self.num_queries, self.num_keys = num_queries, num_keys
        self._made: dict[tuple[str, int, int], Tensor] = {}

    def of_queries(self, tiles: Tiles) -> Tensor:
        """int32 [tiles of queries, 5], longest first: the tile; keys from where on, all from, all to, before which end."""
        return self._once("queries", tiles)

    def of_keys(self, tiles: Tiles) -> Tensor:
        """int32 [tiles of keys, 5], longest first: the same, of queries."""
        return self._once("keys", tiles)

    def _once(self, kind: str, tiles: Tiles) -> Tensor:
        name = kind, tiles.queries, tiles.keys
        if name not in self._made:
            walk = self._queries(tiles) if kind == "queries" else self._keys(tiles)
            self._made[name] = torch.empty_like(walk)
            longest_first_kernel[(len(walk),)](
                walk, self._made[name], len(walk), AT_ONCE=min(AT_ONCE, triton.next_power_of_2(len(walk)))
            )
        return self._made[name]

    def _queries(self, tiles: Tiles) -> Tensor:
        walk = self._empty(self.num_queries, tiles.queries)
        of_queries_kernel[(len(walk),)](
            self.low_R, self.high_R, walk, self.num_keys, GROUP=self.group, M=tiles.queries, N=tiles.keys
        )
        return walk

    def _keys(self, tiles: Tiles) -> Tensor:
        walk = self._empty(self.num_keys, tiles.keys)
        of_keys_kernel[(len(walk),)](
            self.low_R, self.high_R, walk, self.low_R.numel(), self.num_queries,
            GROUP=self.group, M=tiles.queries, N=tiles.keys, AT_ONCE=min(AT_ONCE, triton.next_power_of_2(self.low_R.numel())),
        )  # fmt: skip
        return walk

    def _empty(self, rows: int, tile: int) -> Tensor:
        assert rows % tile == 0 and self.num_queries % tile == 0, f"{rows} rows are not whole tiles of {tile}"
        return torch.empty(rows // tile, 5, dtype=torch.int32, device=self.low_R.device)
