"""What `flex_attention` is told: which blocks of a mask to look at, who sees whom inside them, and the compiled call.

In: per-token key bounds, or a ready mask. Out: `Blocks`, and one compiled function a layer shape and kind of view.
What changes from step to step is a tensor; the mask functions are made inside the compiled call, around them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from backstamp.jit_notice import Announcer

__all__ = ["Blocks", "Call", "blocks_of_bounds", "blocks_of_mask", "compiled_call"]

#: Tokens a side of a mask block; the default of `flex_attention`, which its kernels' tiles divide.
BLOCK_TOKENS = 128


class Blocks(NamedTuple):
    """A block-sparse mask as tensors: blocks to look into, blocks seen whole, and the rule inside a block.

    Counts are i32 `[B, 1, Q blocks]`, ids i32 `[B, 1, Q blocks, K blocks]`, those that count first. The rule is
    `first` and `last`, i32 `[B, Q]` key bounds, last exclusive; or `mask`, bool `[B, Q, K]`.
    """

    partial_counts: Tensor
    partial_ids: Tensor
    full_counts: Tensor
    full_ids: Tensor
    first: Tensor | None = None
    last: Tensor | None = None
    mask: Tensor | None = None


Call = Callable[[Tensor, Tensor, Tensor, Blocks, float, "Tensor | None"], "tuple[Tensor, Tensor]"]


def compiled_call(device: torch.device) -> Call:
    """A compiled `(q, k, v, blocks, scale, softcap) -> (out, lse)` with a compile cache of its own.

    Dynamo counts recompiles per code object and gives up after eight; one code object for each layer shape and kind
    of view keeps them from using up each other's. On the CPU the graph runs eagerly: it needs no C++ compiler, and
    inductor's CPU kernel returns no LSE.

    Source: torch 2.13, `torch._dynamo.config.recompile_limit`; `torch/_inductor/kernel/flex/flex_cpu.py`.
    """
    own = types.FunctionType(_call.__code__.replace(), globals(), "flex_call")
    backend = "eager" if device.type == "cpu" else "inductor"
    compiled: Call = torch.compile(own, backend=backend, dynamic=True, fullgraph=True)
    announcer = Announcer("flex_attention")

    def call(
        q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float, softcap: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        heads, dims = f"{q.shape[1]}/{k.shape[1]} heads", f"d{q.shape[3]}x{v.shape[3]}"
        rule = "bounds" if blocks.mask is None else "mask"
        # compiled when it is first called, for sizes that may change from then on; but for one row apart from more
        rows = "flat" if q.shape[0] == 1 else "padded"
        with announcer.first(q.dtype, heads, dims, rule, rows, "" if softcap is None else "softcap"):
            return compiled(q, k, v, blocks, scale, softcap)

    return call


def blocks_of_bounds(first: Tensor, last: Tensor, num_keys: int) -> Blocks:
    """Token i of batch b sees keys `first[b, i]` to `last[b, i]`; no `[Q, K]` mask is ever made."""
    batches, num_queries = first.shape
    pad = -num_queries % BLOCK_TOKENS
    tiles = (batches, (num_queries + pad) // BLOCK_TOKENS, BLOCK_TOKENS)
    starts = torch.arange(-(-num_keys // BLOCK_TOKENS), device=first.device) * BLOCK_TOKENS
    ends = starts + BLOCK_TOKENS

    def padded(bounds: Tensor, neutral: int) -> Tensor:
        return torch.nn.functional.pad(bounds, (0, pad), value=neutral).view(tiles)[..., None]

    touched = (starts < padded(last, 0).amax(2)) & (ends > padded(first, num_keys).amin(2))
    full = (starts >= padded(first, 0).amax(2)) & (ends <= padded(last, num_keys).amin(2))
    return Blocks(*_counted(touched & ~full), *_counted(full), first=first, last=last)


def blocks_of_mask(mask: Tensor) -> Blocks:
    """Token i of batch b sees key k where `mask [B, Q, K]` says so; every block is looked at."""
    batches, num_queries, num_keys = mask.shape
    touched = mask.new_ones(batches, -(-num_queries // BLOCK_TOKENS), -(-num_keys // BLOCK_TOKENS))
    return Blocks(*_counted(touched), *_counted(torch.zeros_like(touched)), mask=mask)


def _counted(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """From dense `[B, Q blocks, K blocks]` answers, how many blocks each row of blocks has, and which.

    At least two blocks a side, the ones beyond the end empty: dynamo compiles a size of one apart from the others.
    """
    padding = (0, max(0, 2 - blocks.shape[2]), 0, max(0, 2 - blocks.shape[1]))
    blocks = torch.nn.functional.pad(blocks, padding)
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()


def _call(
    q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float, softcap: Tensor | None
) -> tuple[Tensor, Tensor]:
    block_mask = BlockMask.from_kv_blocks(
        blocks.partial_counts,
        blocks.partial_ids,
        blocks.full_counts,
        blocks.full_ids,
        # BLOCK_TOKENS as a literal: read from a global or an argument it is traced as a symbol, and inductor finds
        # no tile that is known to divide it
        BLOCK_SIZE=128,
        mask_mod=_mask_mod(blocks),
        seq_lengths=(q.shape[2], k.shape[2]),
        # the transposed lists serve a backward pass
        compute_q_blocks=False,
    )
    answer, extra = flex_attention(
        q,
        k,
        v,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    assert extra.lse is not None, "the LSE was asked for"
    return answer, extra.lse


def _mask_mod(blocks: Blocks) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    first, last, mask = blocks.first, blocks.last, blocks.mask
    if mask is not None:
        return lambda b, h, q, k: mask[b, q, k]
    assert first is not None, "blocks have bounds or a mask"
    assert last is not None
    return lambda b, h, q, k: (k >= first[b, q]) & (k < last[b, q])


def _capped(softcap: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)
