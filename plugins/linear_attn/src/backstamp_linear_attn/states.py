"""Triton kernels that carry whole states between a pool and the packed rows that a library's prefill takes.

In: a pool with slots, or packed states. Out: packed fp32 states, zero for a row that starts from none, or the pool's
slots; a row without a slot, or without tokens, is left alone. They read every row number on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["load_states", "store_states"]

_BLOCK = 1024


def load_states(pool: Tensor, slots: Tensor, has_state: Tensor, num_rows: int) -> Tensor:
    """`[num_rows, HV, ., .]` fp32, contiguous: each row's state, zero where it has none yet or is a pad."""
    packed = torch.empty(num_rows, *pool.shape[1:], dtype=torch.float32, device=pool.device)
    heads, lines, width = pool.shape[1:]
    grid = (num_rows * heads, triton.cdiv(lines * width, _BLOCK))
    # bytes: a bool pointer has no type of its own on every version of Triton
    _load[grid](
        pool, packed, slots, has_state.view(torch.uint8), *pool.stride()[:3], heads, lines * width, width, _BLOCK
    )
    return packed


def store_states(packed: Tensor, pool: Tensor, slots: Tensor, qo_indptr: Tensor) -> None:
    """Write packed states back to the slots of the rows that have one and had tokens."""
    heads, lines, width = pool.shape[1:]
    grid = (packed.shape[0] * heads, triton.cdiv(lines * width, _BLOCK))
    _store[grid](packed, pool, slots, qo_indptr, *pool.stride()[:3], heads, lines * width, width, _BLOCK)


@triton.jit
def _load(
    pool_ptr,
    packed_ptr,
    slots_ptr,
    has_state_ptr,
    stride_slot,
    stride_head,
    stride_line,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    there = at < tl.where((slot >= 0) & (tl.load(has_state_ptr + row) != 0), SIZE, 0)
    source = pool_ptr + slot * stride_slot + head * stride_head + (at // WIDTH) * stride_line + at % WIDTH
    state = tl.load(source, mask=there, other=0.0).to(tl.float32)
    tl.store(packed_ptr + tl.program_id(0).to(tl.int64) * SIZE + at, state, mask=at < SIZE)


@triton.jit
def _store(
    packed_ptr,
    pool_ptr,
    slots_ptr,
    qo_indptr,
    stride_slot,
    stride_head,
    stride_line,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    ran = tl.load(qo_indptr + row + 1) > tl.load(qo_indptr + row)
    mask = at < tl.where(ran & (slot >= 0), SIZE, 0)
    state = tl.load(packed_ptr + tl.program_id(0).to(tl.int64) * SIZE + at, mask=mask, other=0.0)
    target = pool_ptr + slot * stride_slot + head * stride_head + (at // WIDTH) * stride_line + at % WIDTH
    tl.store(target, state.to(pool_ptr.dtype.element_ty), mask=mask)
