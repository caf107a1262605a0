"""Attention over intervals, in Triton: forward, and the gradients of queries, keys and values.

Every group of queries sees an interval of the context's keys and the draft keys of its own group, and nothing else. So each
program walks from the first to the last key (or query) that anything in its tile sees (kernels/walks.py), context and draft
keys where they lie, and no mask ever exists. Scores and sums are float32; two runs give the same bits (no atomics).

Called by kernels/attention.py. Needs triton, which torch's CUDA builds bring along.
"""

import triton
import triton.language as tl

from graphcap.kernels.walks import walk_at

HIDDEN = tl.constexpr(-1.0e9)  # a score that no softmax sees once a real one has come; larger, it would overflow where fused


@triton.jit
def _rows(start, first, stride, ROWS: tl.constexpr, C: tl.constexpr, PAD: tl.constexpr):
    """ROWS rows of C numbers from the first on, [ROWS, PAD]; beyond C zeros."""
    channel = tl.arange(0, PAD)
    place = (
        start + first * stride + (tl.arange(0, ROWS)[:, None] * stride + channel[None, :])
    )  # the bracket is the same in every turn
    if C == PAD:
        values = tl.load(place)
    else:
        values = tl.load(place, mask=channel[None, :] < C, other=0.0)
    return values


@triton.jit
def _put_rows(start, first, stride, values, ROWS: tl.constexpr, C: tl.constexpr, PAD: tl.constexpr):
    channel = tl.arange(0, PAD)
    place = start + first * stride + (tl.arange(0, ROWS)[:, None] * stride + channel[None, :])
    if C == PAD:
        tl.store(place, values.to(start.dtype.element_ty))
    else:
        tl.store(place, values.to(start.dtype.element_ty), mask=channel[None, :] < C)


@triton.jit
def _intervals(low, high, query, GROUP: tl.constexpr):
    """First key, and the one after the last, that these queries see of the context."""
    group = query // GROUP
    return tl.load(low + group).to(tl.int32), tl.load(high + group).to(tl.int32)


@triton.jit
def _own(tile, num_queries, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The draft keys that any query of the tile sees, from a whole key tile on."""
    first = tile * M // GROUP * GROUP // N * N
    return first, tl.minimum(((tile * M + M - 1) // GROUP + 1) * GROUP, num_queries)


@triton.jit
def _seen(key, query, low, high, GROUP: tl.constexpr, DRAFT: tl.constexpr):
    """Which of these pairs are visible; key and query broadcast against each other, low and high with query."""
    if DRAFT:
        seen = key // GROUP == query // GROUP
    else:
        seen = (key >= low) & (key < high)
    return seen


@triton.jit
def _forward_over(
    out_MC, total_M, most_M, q_MC, k, k_row, v, v_row, query_M, low_M, high_M, begin, all_from, all_to, end,
    scale, DRAFT: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Softmax so far (sum of values, sum, largest score without the scale), continued over the keys of [begin, end).

    Steps that begin in [all_from, all_to) are over keys that all queries see, and look at no pair; among draft keys there are
    none of these. DRAFT: the keys are the block's own.
    """
    for start in tl.range(begin, end, N):
        key_N = start + tl.arange(0, N)
        k_NC = _rows(k, start, k_row, N, C, PAD)
        score = tl.dot(q_MC, tl.trans(k_NC), input_precision="ieee")
        if (start < all_from) | (start >= all_to):
            seen = _seen(key_N[None, :], query_M[:, None], low_M[:, None], high_M[:, None], GROUP, DRAFT)
            score = tl.where(seen, score, HIDDEN)
        larger_M = tl.maximum(most_M, tl.max(score, 1))
        weight = tl.exp2(score * scale - (larger_M * scale)[:, None])  # one instruction before the exponential
        shrink_M = tl.exp2((most_M - larger_M) * scale)
        total_M = total_M * shrink_M + tl.sum(weight, 1)
        v_NC = _rows(v, start, v_row, N, C, PAD)
        out_MC = tl.dot(weight.to(v_NC.dtype), v_NC, out_MC * shrink_M[:, None], input_precision="ieee")
        most_M = larger_M
    return out_MC, total_M, most_M


@triton.jit
def forward_kernel(
    q, k, v, draft_k, draft_v, low, high, walk, out, log_sum,
    q_row, q_head, k_row, k_head, v_row, v_head, draft_k_row, draft_k_head, draft_v_row, draft_v_head, out_row, out_head,
    num_queries, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, PAD: tl.constexpr, HAS_DRAFT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """out [Q, H, C] and log_sum, the base-2 logarithm of the softmax's sum, [H, Q]. HEADS: query heads a key head."""
    head, key_head = tl.program_id(0), tl.program_id(0) // HEADS
    tile, begin, all_from, all_to, end = walk_at(walk, tl.program_id(1))
    query_M = tile * M + tl.arange(0, M)
    q_MC = _rows(q + head * q_head, tile * M, q_row, M, C, PAD)
    low_M, high_M = _intervals(low, high, query_M, GROUP)
    out_MC = tl.zeros([M, PAD], tl.float32)
    total_M = tl.zeros([M], tl.float32)
    most_M = tl.full([M], HIDDEN, tl.float32)
    if HAS_DRAFT:
        first, last = _own(tile, num_queries, GROUP, M, N)
        out_MC, total_M, most_M = _forward_over(
            out_MC, total_M, most_M, q_MC, draft_k + key_head * draft_k_head, draft_k_row, draft_v + key_head * draft_v_head,
            draft_v_row, query_M, low_M, high_M, first, last, last, last, scale, True, GROUP, C, PAD, N,
        )  # fmt: skip
    k += key_head * k_head
    v += key_head * v_head
    out_MC, total_M, most_M = _forward_over(
        out_MC, total_M, most_M, q_MC, k, k_row, v, v_row, query_M, low_M, high_M, begin, all_from, all_to, end,
        scale, False, GROUP, C, PAD, N,
    )  # fmt: skip
    _put_rows(out + head * out_head, tile * M, out_row, out_MC / total_M[:, None], M, C, PAD)
    tl.store(log_sum + head * num_queries + query_M, most_M * scale + tl.log2(total_M))


@triton.jit
def _dq_over(
    dq_MC, q_MC, dout_MC, log_sum_M, delta_M, k, k_row, v, v_row, query_M, low_M, high_M, begin, all_from, all_to, end,
    scale, DRAFT: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, PAD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries, without the scale, continued over the keys of [begin, end), as in _forward_over."""
    for start in tl.range(begin, end, N):
        key_N = start + tl.arange(0, N)
        k_NC = _rows(k, start, k_row, N, C, PAD)
        v_NC = _rows(v, start, v_row, N, C, PAD)
        score = tl.dot(q_MC, tl.trans(k_NC), input_precision="ieee")
        dweight = tl.dot(dout_MC, tl.trans(v_NC), input_precision="ieee")
        weight = tl.exp2(score * scale - log_sum_M[:, None])
        if (start < all_from) | (start >= all_to):
            seen = _seen(key_N[None, :], query_M[:, None], low_M[:, None], high_M[:, None], GROUP, DRAFT)
            weight = tl.where(seen, weight, 0.0)
        dscore = weight * (dweight - delta_M[:, None])
        dq_MC = tl.dot(dscore.to(k_NC.dtype), k_NC, dq_MC, input_precision="ieee")
    return dq_MC


@triton.jit
def dq_kernel(
    q, k, v, draft_k, draft_v, low, high, walk, out, log_sum, dout, dq, delta,
    q_row, q_head, k_row, k_head, v_row, v_head, draft_k_row, draft_k_head, draft_v_row, draft_v_head, out_row, out_head,
    dout_row, dout_head, dq_row, dq_head, num_queries, scale, natural_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dq [Q, H, C], and delta = Σ out · dout [H, Q], which dkv_kernel reads."""
    head, key_head = tl.program_id(0), tl.program_id(0) // HEADS
    tile, begin, all_from, all_to, end = walk_at(walk, tl.program_id(1))
    query_M = tile * M + tl.arange(0, M)
    q_MC = _rows(q + head * q_head, tile * M, q_row, M, C, PAD)
    dout_MC = _rows(dout + head * dout_head, tile * M, dout_row, M, C, PAD)
    out_MC = _rows(out + head * out_head, tile * M, out_row, M, C, PAD)
    delta_M = tl.sum(out_MC.to(tl.float32) * dout_MC.to(tl.float32), 1)
    tl.store(delta + head * num_queries + query_M, delta_M)
    log_sum_M = tl.load(log_sum + head * num_queries + query_M)
    low_M, high_M = _intervals(low, high, query_M, GROUP)
    dq_MC = tl.zeros([M, PAD], tl.float32)
    first, last = _own(tile, num_queries, GROUP, M, N)
    dq_MC = _dq_over(
        dq_MC, q_MC, dout_MC, log_sum_M, delta_M, draft_k + key_head * draft_k_head, draft_k_row,
        draft_v + key_head * draft_v_head, draft_v_row, query_M, low_M, high_M, first, last, last, last,
        scale, True, GROUP, C, PAD, N,
    )  # fmt: skip
    k += key_head * k_head
    v += key_head * v_head
    dq_MC = _dq_over(
        dq_MC, q_MC, dout_MC, log_sum_M, delta_M, k, k_row, v, v_row, query_M, low_M, high_M, begin, all_from, all_to, end,
        scale, False, GROUP, C, PAD, N,
    )  # fmt: skip
    _put_rows(dq + head * dq_head, tile * M, dq_row, dq_MC * natural_scale, M, C, PAD)


@triton.jit
def _dkv_over(
    dk_NC, dv_NC, k_NC, v_NC, key_N, q, q_row, q_head, dout, dout_row, dout_head, low, high, log_sum, delta,
    first, all_from, all_to, last, num_queries, scale, DRAFT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    C: tl.constexpr, PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Gradients of these keys (without the scale) and values, continued over the query tiles of [first, last), all heads.

    Tiles that begin in [all_from, all_to) see all the keys.
    """
    num_tiles = tl.cdiv(last - first, M)
    for number in tl.range(0, HEADS * num_tiles):
        head = 0 if HEADS == 1 else number // num_tiles
        start = tl.multiple_of(first + (number - head * num_tiles) * M, (GROUP | M) & -(GROUP | M))  # what divides every start
        query_M = start + tl.arange(0, M)
        q_MC = _rows(q + head * q_head, start, q_row, M, C, PAD)
        dout_MC = _rows(dout + head * dout_head, start, dout_row, M, C, PAD)
        log_sum_M = tl.load(log_sum + head * num_queries + query_M)
        delta_M = tl.load(delta + head * num_queries + query_M)
        score = tl.dot(k_NC, tl.trans(q_MC), input_precision="ieee")
        dweight = tl.dot(v_NC, tl.trans(dout_MC), input_precision="ieee")
        weight = tl.exp2(score * scale - log_sum_M[None, :])
        if (start < all_from) | (start >= all_to):
            low_M, high_M = _intervals(low, high, query_M, GROUP)
            seen = _seen(key_N[:, None], query_M[None, :], low_M[None, :], high_M[None, :], GROUP, DRAFT)
            weight = tl.where(seen, weight, 0.0)
        dv_NC = tl.dot(weight.to(dout_MC.dtype), dout_MC, dv_NC, input_precision="ieee")
        dscore = weight * (dweight - delta_M[None, :])
        dk_NC = tl.dot(dscore.to(q_MC.dtype), q_MC, dk_NC, input_precision="ieee")
    return dk_NC, dv_NC


@triton.jit
def dkv_kernel(
    q, k, v, draft_k, draft_v, low, high, walk, log_sum, delta, dout, dk, dv, draft_dk, draft_dv,
    q_row, q_head, k_row, k_head, v_row, v_head, draft_k_row, draft_k_head, draft_v_row, draft_v_head,
    dout_row, dout_head, dk_row, dk_head, dv_row, dv_head, draft_dk_row, draft_dk_head, draft_dv_row, draft_dv_head,
    num_key_heads, num_queries, num_tiles, scale, natural_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, PAD: tl.constexpr, APART: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dk, dv of the context (the first num_tiles of every head: they take long, and begin first) and of the draft.

    A program has the keys of one tile and all query heads that see them; APART: one of those heads, and dk, dv of the context
    are [heads, T, C], to be summed.
    """
    head, place = tl.program_id(0), tl.program_id(1)
    if place >= num_tiles and head >= num_key_heads:
        return
    if APART and place < num_tiles:
        key_head, first_head = head // HEADS, head
    else:
        key_head, first_head = head, head * HEADS
    q += first_head * q_head
    dout += first_head * dout_head
    log_sum += first_head * num_queries
    delta += first_head * num_queries
    dk_NC = tl.zeros([N, PAD], tl.float32)
    dv_NC = tl.zeros([N, PAD], tl.float32)
    if place < num_tiles:
        tile, begin, all_from, all_to, end = walk_at(walk, place)
        key_N = tile * N + tl.arange(0, N)
        k_NC = _rows(k + key_head * k_head, tile * N, k_row, N, C, PAD)
        v_NC = _rows(v + key_head * v_head, tile * N, v_row, N, C, PAD)
        dk_NC, dv_NC = _dkv_over(
            dk_NC, dv_NC, k_NC, v_NC, key_N, q, q_row, q_head, dout, dout_row, dout_head, low, high, log_sum, delta,
            begin, all_from, all_to, end, num_queries, scale, False, 1 if APART else HEADS, GROUP, C, PAD, M, N,
        )  # fmt: skip
        _put_rows(dk + head * dk_head, tile * N, dk_row, dk_NC * natural_scale, N, C, PAD)
        _put_rows(dv + head * dv_head, tile * N, dv_row, dv_NC, N, C, PAD)
    else:
        tile = place - num_tiles
        key_N = tile * N + tl.arange(0, N)
        first, last = _own(tile, num_queries, GROUP, N, M)
        k_NC = _rows(draft_k + key_head * draft_k_head, tile * N, draft_k_row, N, C, PAD)
        v_NC = _rows(draft_v + key_head * draft_v_head, tile * N, draft_v_row, N, C, PAD)
        dk_NC, dv_NC = _dkv_over(
            dk_NC, dv_NC, k_NC, v_NC, key_N, q, q_row, q_head, dout, dout_row, dout_head, low, high, log_sum, delta,
            first, last, last, last, num_queries, scale, True, HEADS, GROUP, C, PAD, M, N,
        )  # fmt: skip
        _put_rows(draft_dk + head * draft_dk_head, tile * N, draft_dk_row, dk_NC * natural_scale, N, C, PAD)
        _put_rows(draft_dv + head * draft_dv_head, tile * N, draft_dv_row, dv_NC, N, C, PAD)
