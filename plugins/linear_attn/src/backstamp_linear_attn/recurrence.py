"""The Triton kernel of decode and verify: each row's tokens one after another, its state in registers throughout.

In: tokens, raw or computed gates, a pool of states and the slots of the rows. Out: outputs, and states in the pool, in
slots a token, or in `intermediate`. One program advances a block of value channels of one head of one row, so a row's
bits do not depend on what shares its batch. It reads every row number on the device: a CUDA graph may record it.

The library's own recurrent functions take one packed state a row: they know no slots, pads or trees.
Source: fla-core 0.6.0 ops/gated_delta_rule/fused_recurrent.py, ops/kda/fused_recurrent.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["advance_rows"]


@triton.jit
def _decay(g, bias, rate, RAW: tl.constexpr):
    """`exp(g)` of one token: from raw inputs, or from the log decay itself."""
    if RAW:
        x = g + bias
        g = -rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return tl.exp(g)


@triton.jit
def _state_offsets(ks, vs, stride, V_FIRST: tl.constexpr):
    """Where a block `[BV, BK]` of one head's state lies, in either order."""
    if V_FIRST:
        return vs[:, None] * stride + ks[None, :]
    return ks[None, :] * stride + vs[:, None]


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_width"])
def advance_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    rate_ptr,
    bias_ptr,
    out_ptr,
    pool_ptr,
    kept_ptr,
    qo_indptr,
    slots_ptr,
    table_ptr,
    accepted_ptr,
    parents_ptr,
    num_rows,
    num_tokens,
    scale,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    a_stride_token,
    a_stride_head,
    b_stride_token,
    b_stride_head,
    out_stride_token,
    out_stride_head,
    pool_stride_slot,
    pool_stride_head,
    pool_stride_line,
    kept_stride_row,
    kept_stride_token,
    kept_stride_head,
    kept_stride_line,
    table_stride,
    table_width,
    parents_stride,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    V_FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    RAW: tl.constexpr,
    FORM: tl.constexpr,
    TREE: tl.constexpr,
):
    """Advance `num_rows` rows; grid `((num_rows + 1) * HEADS, V blocks)`, the row past the last zeroes what pads."""
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    ks = tl.arange(0, BLOCK_K)
    vs = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = ks < K
    mask_v = vs < V
    mask = mask_v[:, None] & mask_k[None, :]
    out_at = out_ptr + head * out_stride_head + vs

    there = row < num_rows
    start = tl.load(qo_indptr + row).to(tl.int64)
    stop = tl.load(qo_indptr + row + 1, mask=there, other=num_tokens).to(tl.int64)
    if FORM == "slot_table":
        line = table_ptr + row.to(tl.int64) * table_stride
        accepted = tl.load(accepted_ptr + row, mask=there, other=0)
        # any other count is a pad's: its entry would be another row's
        counted = (accepted >= 1) & (accepted <= table_width)
        first = tl.load(line + accepted - 1, mask=counted, other=-1).to(tl.int64)
    else:
        line = table_ptr
        first = tl.load(slots_ptr + row, mask=there, other=-1).to(tl.int64)

    if first < 0:
        for token in range(start, stop):
            tl.store(out_at + token * out_stride_token, tl.zeros([BLOCK_V], out_ptr.dtype.element_ty), mask=mask_v)
    elif start < stop:
        inner = _state_offsets(ks, vs, pool_stride_line, V_FIRST)
        own_at = pool_ptr + first * pool_stride_slot + head * pool_stride_head + inner
        state = tl.load(own_at, mask=mask, other=0.0).to(tl.float32)
        rate = 1.0
        bias = 0.0
        if RAW:
            rate = tl.exp(tl.load(rate_ptr + head).to(tl.float32))
            if CHANNELS:
                bias = tl.load(bias_ptr + head * K + ks, mask=mask_k, other=0.0).to(tl.float32)
            else:
                bias = tl.load(bias_ptr + head).to(tl.float32)
        kept_at = kept_ptr
        if FORM == "intermediate":
            inner_kept = _state_offsets(ks, vs, kept_stride_line, V_FIRST)
            kept_at = kept_ptr + row.to(tl.int64) * kept_stride_row + head * kept_stride_head + inner_kept
        key_head = head // SHARED
        for token in range(start, stop):
            at = token - start
            if TREE:
                parent = tl.load(parents_ptr + row.to(tl.int64) * parents_stride + at).to(tl.int64)
                if parent < 0:
                    state = tl.load(own_at, mask=mask, other=0.0).to(tl.float32)
                elif parent != at - 1:
                    # other threads of this program wrote it
                    tl.debug_barrier()
                    state = tl.load(kept_at + parent * kept_stride_token, mask=mask, other=0.0).to(tl.float32)
            q = tl.load(q_ptr + token * q_stride_token + key_head * q_stride_head + ks, mask=mask_k, other=0.0)
            k = tl.load(k_ptr + token * k_stride_token + key_head * k_stride_head + ks, mask=mask_k, other=0.0)
            v = tl.load(v_ptr + token * v_stride_token + head * v_stride_head + vs, mask=mask_v, other=0.0)
            q = q.to(tl.float32)
            k = k.to(tl.float32)
            q = q * (scale / tl.sqrt(tl.sum(q * q) + 1e-6))
            k = k / tl.sqrt(tl.sum(k * k) + 1e-6)
            a_at = a_ptr + token * a_stride_token + head * a_stride_head
            if CHANNELS:
                g = tl.load(a_at + ks, mask=mask_k, other=0.0).to(tl.float32)
                state *= _decay(g, bias, rate, RAW)[None, :]
            else:
                state *= _decay(tl.load(a_at).to(tl.float32), bias, rate, RAW)
            beta = tl.load(b_ptr + token * b_stride_token + head * b_stride_head).to(tl.float32)
            if RAW:
                beta = 1.0 / (1.0 + tl.exp(-beta))
            change = beta * (v.to(tl.float32) - tl.sum(state * k[None, :], 1))
            state += change[:, None] * k[None, :]
            answer = tl.sum(state * q[None, :], 1)
            tl.store(out_at + token * out_stride_token, answer.to(out_ptr.dtype.element_ty), mask=mask_v)
            if FORM == "slot_table":
                slot = tl.load(line + at).to(tl.int64)
                if slot >= 0:
                    slot_at = pool_ptr + slot * pool_stride_slot + head * pool_stride_head + inner
                    tl.store(slot_at, state.to(pool_ptr.dtype.element_ty), mask=mask)
            if FORM == "intermediate":
                tl.store(kept_at + at * kept_stride_token, state.to(kept_ptr.dtype.element_ty), mask=mask)
        if FORM == "slots":
            tl.store(own_at, state.to(pool_ptr.dtype.element_ty), mask=mask)
