"""The Triton kernel of decode and verify: each row's tokens one after another, its state read and written once.

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
def _decay(g, bias, rate, bound, RAW: tl.constexpr, BOUNDED: tl.constexpr):
    """`exp(g)` of one token: from raw inputs, or from the log decay itself."""
    if RAW:
        x = g + bias
        if BOUNDED:
            g = bound / (1.0 + tl.exp(-rate * x))
        else:
            g = -rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return tl.exp(g)


@triton.jit
def _state_offsets(ks, vs, LINE: tl.constexpr, V_FIRST: tl.constexpr):
    """Where a block `[BV, BK]` of one head's state lies, in either order.

    Lines a known distance apart take one address a thread, not one a line: 64 registers in place of 80, and 32 programs
    on a multiprocessor of SM90 in place of 25.
    """
    if V_FIRST:
        return vs[:, None] * LINE + ks[None, :]
    return ks[None, :] * LINE + vs[:, None]


@triton.jit
def _advance(
    state,
    token,
    q_at,
    k_at,
    v_at,
    a_at,
    b_at,
    bias,
    rate,
    bound,
    scale,
    q_stride_token,
    k_stride_token,
    v_stride_token,
    a_stride_token,
    b_stride_token,
    mask_k,
    mask_v,
    CHANNELS: tl.constexpr,
    RAW: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """The state after one token, and what the token reads of it."""
    q = tl.load(q_at + token * q_stride_token, mask=mask_k, other=0.0).to(tl.float32)
    k = tl.load(k_at + token * k_stride_token, mask=mask_k, other=0.0).to(tl.float32)
    v = tl.load(v_at + token * v_stride_token, mask=mask_v, other=0.0).to(tl.float32)
    q = q * (scale / tl.sqrt(tl.sum(q * q) + 1e-6))
    k = k / tl.sqrt(tl.sum(k * k) + 1e-6)
    if CHANNELS:
        g = tl.load(a_at + token * a_stride_token, mask=mask_k, other=0.0).to(tl.float32)
        state *= _decay(g, bias, rate, bound, RAW, BOUNDED)[None, :]
    else:
        g = tl.load(a_at + token * a_stride_token).to(tl.float32)
        state *= _decay(g, bias, rate, bound, RAW, BOUNDED)
    beta = tl.load(b_at + token * b_stride_token).to(tl.float32)
    if RAW:
        beta = 1.0 / (1.0 + tl.exp(-beta))
    # the updated state's answer, S q + change * (k q), so that both sums are over the state as it was
    answer = tl.sum(state * q[None, :], 1)
    change = beta * (v - tl.sum(state * k[None, :], 1))
    return state + change[:, None] * k[None, :], answer + change * tl.sum(q * k)


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
    bound,
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
    kept_stride_row,
    kept_stride_token,
    kept_stride_head,
    table_stride,
    table_width,
    parents_stride,
    POOL_LINE: tl.constexpr,
    KEPT_LINE: tl.constexpr,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    V_FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    RAW: tl.constexpr,
    BOUNDED: tl.constexpr,
    FORM: tl.constexpr,
    TREE: tl.constexpr,
    MANY: tl.constexpr,
):
    """Advance `num_rows` rows; a program a block of a head of a row, the row past the last zeroes what pads."""
    NUM_BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    # blocks of one state lie beside one another, in memory as on the chip
    row = tl.program_id(0) // (HEADS * NUM_BLOCKS)
    head = (tl.program_id(0) // NUM_BLOCKS) % HEADS
    ks = tl.arange(0, BLOCK_K)
    vs = (tl.program_id(0) % NUM_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
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
        inner = _state_offsets(ks, vs, POOL_LINE, V_FIRST)
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
        key_head = head // SHARED
        q_at = q_ptr + key_head * q_stride_head + ks
        k_at = k_ptr + key_head * k_stride_head + ks
        v_at = v_ptr + head * v_stride_head + vs
        a_at = a_ptr + head * a_stride_head
        if CHANNELS:
            a_at += ks
        b_at = b_ptr + head * b_stride_head
        if FORM == "slots":
            # one token, as decode has; a loop for more would double the registers
            state, answer = _advance(
                state, start, q_at, k_at, v_at, a_at, b_at, bias, rate, bound, scale,
                q_stride_token, k_stride_token, v_stride_token, a_stride_token, b_stride_token,
                mask_k, mask_v, CHANNELS, RAW, BOUNDED,
            )  # fmt: skip
            tl.store(own_at, state.to(pool_ptr.dtype.element_ty), mask=mask)
            tl.store(out_at + start * out_stride_token, answer.to(out_ptr.dtype.element_ty), mask=mask_v)
            if MANY:
                for token in range(start + 1, stop):
                    # other threads of this program wrote it
                    tl.debug_barrier()
                    state = tl.load(own_at, mask=mask, other=0.0).to(tl.float32)
                    state, answer = _advance(
                        state, token, q_at, k_at, v_at, a_at, b_at, bias, rate, bound, scale,
                        q_stride_token, k_stride_token, v_stride_token, a_stride_token, b_stride_token,
                        mask_k, mask_v, CHANNELS, RAW, BOUNDED,
                    )  # fmt: skip
                    tl.store(own_at, state.to(pool_ptr.dtype.element_ty), mask=mask)
                    tl.store(out_at + token * out_stride_token, answer.to(out_ptr.dtype.element_ty), mask=mask_v)
        else:
            kept_at = kept_ptr
            if FORM == "intermediate":
                inner_kept = _state_offsets(ks, vs, KEPT_LINE, V_FIRST)
                kept_at = kept_ptr + row.to(tl.int64) * kept_stride_row + head * kept_stride_head + inner_kept
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
                state, answer = _advance(
                    state, token, q_at, k_at, v_at, a_at, b_at, bias, rate, bound, scale,
                    q_stride_token, k_stride_token, v_stride_token, a_stride_token, b_stride_token,
                    mask_k, mask_v, CHANNELS, RAW, BOUNDED,
                )  # fmt: skip
                tl.store(out_at + token * out_stride_token, answer.to(out_ptr.dtype.element_ty), mask=mask_v)
                if FORM == "slot_table":
                    slot = tl.load(line + at).to(tl.int64)
                    if slot >= 0:
                        slot_at = pool_ptr + slot * pool_stride_slot + head * pool_stride_head + inner
                        tl.store(slot_at, state.to(pool_ptr.dtype.element_ty), mask=mask)
                if FORM == "intermediate":
                    tl.store(kept_at + at * kept_stride_token, state.to(kept_ptr.dtype.element_ty), mask=mask)
