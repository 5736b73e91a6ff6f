"""The attention kernel: one tile of queries over one range of a row's keys, for every phase and family.

In: queries `[T, Hq, Dk]`, a paged (or ragged) cache, the step's row tensors. Out: outputs and natural-log LSE, or one
split's unnormalised share of both for `combine.py`. A tile packs `BLOCK_M // PACK` tokens of one row with `PACK` query
heads that share a key head, so grouped heads read each key once, whatever the query length. It must never load a
value no query of the tile sees (padding may hold NaN), nor form an address in 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from backstamp_triton.fold import fold_block
from backstamp_triton.masks import tree_depths

__all__ = ["attend_tile"]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


# sizes change every step: no kernel of its own for a row count of 1 or a multiple of 16
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def attend_tile(
    q_ptr,
    q_rope_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    sinks_ptr,
    qo_indptr,
    kv_lens,
    kv_starts,
    causal_rows,
    page_ids,
    page_rows,
    tree_ptr,
    tree_indptr,
    num_rows,
    num_tokens,
    page_ids_stride,
    q_stride_t,
    q_stride_h,
    q_rope_stride_t,
    q_rope_stride_h,
    k_stride_p,
    k_stride_n,
    k_stride_h,
    v_stride_p,
    v_stride_n,
    v_stride_h,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    tree_stride_b,
    tree_stride_s,
    logit_scale,
    softcap_log2,
    window_left,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    V_IN_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INDEX: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend one tile; grid (tiles, key heads * head blocks, splits).

    Absent tensors are None. Head dims come in two powers of two, `Dk = D0 + D1` and `Dv = V0 + V1` (a zero: one part).
    `logit_scale` is the scale times log2(e), or the scale over the softcap where `softcap_log2` (softcap times log2(e))
    is given. INDEX: "page_table", "csr", "indirect" or "ragged". CAUSAL: "no", "yes" or "rows". TREE: "no", "qlen",
    "full" or "packed". ONE_TOKEN: no row holds more than one token, so program i is row i. OVERLAP: the merge of the
    shares is launched while the last programs end.
    """
    TOKENS: tl.constexpr = BLOCK_M // PACK
    HEAD_BLOCKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    kv_head = (tl.program_id(1) // HEAD_BLOCKS).to(tl.int64)
    head_block = tl.program_id(1) % HEAD_BLOCKS

    # rows: tokens past the last row are padding and form one more row, without keys
    total = tl.load(qo_indptr + num_rows).to(tl.int32)
    if ONE_TOKEN:
        row = tl.program_id(0)
        start = tl.load(qo_indptr + tl.minimum(row, num_rows)).to(tl.int32)
        stop = tl.load(qo_indptr + tl.minimum(row + 1, num_rows)).to(tl.int32)
        # the i-th row without a token answers for the i-th padding token
        has_token = stop > start
        start = tl.where(has_token, start, total + row - start)
        stop = tl.minimum(start + 1, num_tokens)
        first = 0
    else:
        # row b's tiles begin at slot `qo_indptr[b] // TOKENS + b`; heavy (late) tiles of a causal row go first
        slot = tl.num_programs(0) - 1 - tl.program_id(0)
        row = 0
        above = num_rows
        while row < above:
            middle = (row + above + 1) // 2
            begins = tl.load(qo_indptr + middle).to(tl.int32) // TOKENS + middle
            row = tl.where(begins <= slot, middle, row)
            above = tl.where(begins <= slot, above, middle - 1)
        start = tl.load(qo_indptr + row).to(tl.int32)
        stop = tl.load(qo_indptr + tl.minimum(row + 1, num_rows)).to(tl.int32)
        has_token = row < num_rows
        stop = tl.where(has_token, stop, num_tokens)
        first = (slot - (start // TOKENS + row)) * TOKENS
    q_len = stop - start
    if first >= q_len:
        return
    # a pad row may carry a negative length; the load waits for no other
    kv_len = tl.load(kv_lens + row, mask=row < num_rows, other=0).to(tl.int32)
    kv_len = tl.where(has_token, tl.maximum(kv_len, 0), 0)
    if INDEX == "page_table":
        ids = page_ids + row.to(tl.int64) * page_ids_stride
    elif INDEX == "indirect":
        ids = page_ids + tl.load(page_rows + row, mask=has_token, other=0).to(tl.int64) * page_ids_stride
    elif INDEX == "csr":
        ids = page_ids + tl.load(page_rows + row, mask=has_token, other=0).to(tl.int64)
    else:
        ids = tl.load(page_rows + row, mask=has_token, other=0).to(tl.int64)

    # queries
    m = tl.arange(0, BLOCK_M)
    token = first + m // PACK
    group_head = head_block * PACK + m % PACK
    valid = (m < TOKENS * PACK) & (token < q_len) & (group_head < GROUP)
    q_token = (start + token).to(tl.int64)
    q_head = kv_head * GROUP + group_head
    d0 = tl.arange(0, D0)
    q_rows = q_token * q_stride_t + q_head * q_stride_h
    q0 = tl.load(q_ptr + q_rows[:, None] + d0[None, :], mask=valid[:, None], other=0.0)
    if D1 > 0:
        d1 = tl.arange(0, D1)
        if q_rope_ptr is not None:
            rope_rows = q_token * q_rope_stride_t + q_head * q_rope_stride_h
            q1 = tl.load(q_rope_ptr + rope_rows[:, None] + d1[None, :], mask=valid[:, None], other=0.0)
        else:
            q1 = tl.load(q_ptr + D0 + q_rows[:, None] + d1[None, :], mask=valid[:, None], other=0.0)
    else:
        q1 = q0

    # what each query sees: keys [low, high), of which every query of the tile sees [low_all, high_all)
    prefix = kv_len - q_len
    last = tl.minimum(first + TOKENS, q_len) - 1
    tree_base = tree_ptr
    if TREE == "qlen":
        tree_base = tree_ptr + row.to(tl.int64) * tree_stride_b
    elif TREE != "no":
        tree_base = tree_ptr + tl.load(tree_indptr + row, mask=has_token, other=0).to(tl.int64)
    query_end = tl.where(valid, kv_len, 0)
    high = kv_len
    high_all = kv_len
    if TREE != "no":
        # pad queries see nothing, and tree slots nobody sees may hold anything
        high_all = tl.maximum(prefix, 0)
    elif CAUSAL != "no":
        bound_last = tl.minimum(prefix + last + 1, kv_len)
        bound_first = tl.minimum(prefix + first + 1, kv_len)
        ends = tl.minimum(prefix + token + 1, kv_len)
        if CAUSAL == "rows":
            is_causal = tl.load(causal_rows + row, mask=has_token, other=0) != 0
            bound_last = tl.where(is_causal, bound_last, kv_len)
            bound_first = tl.where(is_causal, bound_first, kv_len)
            ends = tl.where(is_causal, ends, kv_len)
        high = tl.maximum(bound_last, 0)
        high_all = tl.maximum(bound_first, 0)
        query_end = tl.where(valid, ends, 0)
    position = prefix + token
    low = 0
    low_all = 0
    if window_left is not None:
        if TREE != "no":
            position = prefix - 1 + tree_depths(tree_base, token, valid, prefix, q_len, kv_len, tree_stride_s, TREE)
            first_position = tl.min(tl.where(valid, position, 2147483647), 0)
            last_position = tl.max(tl.where(valid, position, prefix - 1), 0)
            low = tl.maximum(tl.minimum(first_position - window_left, prefix), 0)
        else:
            first_position = prefix + first
            last_position = prefix + last
            low = tl.maximum(first_position - window_left, 0)
        low_all = tl.maximum(last_position - window_left, 0)
    if kv_starts is not None:
        kv_start = tl.maximum(tl.load(kv_starts + row, mask=has_token, other=0).to(tl.int32), 0)
        low = tl.maximum(low, kv_start)
        low_all = tl.maximum(low_all, kv_start)

    begin = low // BLOCK_N * BLOCK_N
    end = high
    if SPLIT:
        # shares differ by one block at most: a rounded share would leave the last programs none
        blocks = tl.cdiv(tl.maximum(high - begin, 0), BLOCK_N)
        split = tl.program_id(2)
        end = tl.minimum(end, begin + blocks * (split + 1) // tl.num_programs(2) * BLOCK_N)
        begin += blocks * split // tl.num_programs(2) * BLOCK_N
    full_begin = tl.minimum(tl.maximum(tl.cdiv(low_all, BLOCK_N) * BLOCK_N, begin), tl.maximum(end, begin))
    full_end = tl.maximum(tl.minimum(high_all // BLOCK_N * BLOCK_N, end // BLOCK_N * BLOCK_N), full_begin)

    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = tl.zeros([BLOCK_M, V1 if V1 > 0 else 16], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    k_base = k_ptr + kv_head * k_stride_h
    v_base = v_ptr + kv_head * v_stride_h
    # keys in three runs: the edge some queries do not reach back to, the part all of them see, the edge ahead
    if (window_left is not None) or (kv_starts is not None):
        for n0 in range(begin, full_begin, BLOCK_N):
            acc0, acc1, peak, weight = fold_block(
                n0, low, high, q0, q1, acc0, acc1, peak, weight, k_base, v_base, ids,
                k_stride_p, k_stride_n, v_stride_p, v_stride_n, query_end, position, prefix, q_len, kv_len,
                tree_base, token, valid, tree_stride_s, logit_scale, softcap_log2, window_left,
                D0, D1, V0, V1, V_IN_K, PAGE_SIZE, INDEX, TREE, BLOCK_N, True,
            )  # fmt: skip
    for n0 in range(full_begin, full_end, BLOCK_N):
        acc0, acc1, peak, weight = fold_block(
            n0, low, high, q0, q1, acc0, acc1, peak, weight, k_base, v_base, ids,
            k_stride_p, k_stride_n, v_stride_p, v_stride_n, query_end, position, prefix, q_len, kv_len,
            tree_base, token, valid, tree_stride_s, logit_scale, softcap_log2, window_left,
            D0, D1, V0, V1, V_IN_K, PAGE_SIZE, INDEX, TREE, BLOCK_N, False,
        )  # fmt: skip
    for n0 in range(full_end, end, BLOCK_N):
        acc0, acc1, peak, weight = fold_block(
            n0, low, high, q0, q1, acc0, acc1, peak, weight, k_base, v_base, ids,
            k_stride_p, k_stride_n, v_stride_p, v_stride_n, query_end, position, prefix, q_len, kv_len,
            tree_base, token, valid, tree_stride_s, logit_scale, softcap_log2, window_left,
            D0, D1, V0, V1, V_IN_K, PAGE_SIZE, INDEX, TREE, BLOCK_N, True,
        )  # fmt: skip

    if SPLIT and OVERLAP:
        gdc_launch_dependents()
    seen = weight > 0
    lse2 = tl.where(seen, peak + tl.log2(tl.where(seen, weight, 1.0)), float("-inf"))
    if sinks_ptr is not None and not SPLIT:
        sink = tl.load(sinks_ptr + q_head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        weight += tl.exp2(sink - tl.where(seen, peak, 0.0))
    inverse = tl.where(seen, 1.0 / tl.where(seen, weight, 1.0), 0.0)
    acc0 *= inverse[:, None]
    acc1 *= inverse[:, None]
    e0 = tl.arange(0, V0)
    if SPLIT:
        part_rows = (q_token * (tl.num_programs(1) // HEAD_BLOCKS * GROUP) + q_head) * tl.num_programs(2)
        part_rows += tl.program_id(2)
        tl.store(part_lse_ptr + part_rows, lse2, mask=valid)
        # a split that saw nothing is known by its LSE; its share is never read
        keep = (valid & seen)[:, None]
        tl.store(part_ptr + (part_rows * (V0 + V1))[:, None] + e0[None, :], acc0, mask=keep)
        if V1 > 0:
            e1 = tl.arange(0, V1)
            tl.store(part_ptr + V0 + (part_rows * (V0 + V1))[:, None] + e1[None, :], acc1, mask=keep)
    else:
        out_rows = out_ptr + (q_token * out_stride_t + q_head * out_stride_h)
        tl.store(out_rows[:, None] + e0[None, :], acc0.to(out_ptr.dtype.element_ty), mask=valid[:, None])
        if V1 > 0:
            e1 = tl.arange(0, V1)
            tl.store(out_rows[:, None] + (V0 + e1)[None, :], acc1.to(out_ptr.dtype.element_ty), mask=valid[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + q_token * lse_stride_t + q_head * lse_stride_h, lse2 * LN_2, mask=valid)
