"""Calls FlashAttention-4 through its public `flash_attn_varlen_func`, compiled on first use.

In: a `LayerCall`. Out: `call.out` copied from the library's own output (the public entry takes none), and the LSE.
What is compiled depends on the layer and on the shape of the batch; the first call of each kind is announced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from backstamp.jit_notice import compiling
from backstamp_fa3.calls import LayerCall

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CuteFunction"]

#: Rows past which FA4 compiles a kernel that looks its rows up. Source: flash_attn/cute/interface.py,
#: `BIN_BATCH_SEARCH_THRESH`.
MANY_ROWS = 256
#: Query rows (tokens times heads a KV head) of one tile, by chip and head dim: a step that fits one is compiled apart.
TILE_ROWS = (128, 192, 256)


class CuteFunction:
    """FA4's variable-length entry. `num_splits` 1 is one pass over the keys, 0 the library's heuristic."""

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor | None]], num_splits: int) -> None:
        self._function = function
        self._num_splits = num_splits
        self._met: set[tuple[object, ...]] = set()

    def attend(self, call: LayerCall) -> Tensor | None:
        """Write `call.out`; the LSE comes as `[Hq, T]` in natural log."""
        kind = self._kind(call)
        if kind in self._met:
            return self._attend(call)
        with compiling("fa4", " ".join(map(str, kind))):
            lse = self._attend(call)
        self._met.add(kind)
        return lse

    def _attend(self, call: LayerCall) -> Tensor | None:
        step, layer = call.step, call.layer
        paged = call.kv_indptr is None
        left, right = call.window
        # split with unlike head dims, tiles shrink to 64 keys on Blackwell (`_get_fwd_config`), a page loaded whole
        num_splits = self._num_splits if layer.head_dim == layer.v_head_dim else 1
        out, lse = self._function(
            q=call.q,
            k=call.k,
            v=call.v,
            cu_seqlens_q=step.batch.qo_indptr,
            cu_seqlens_k=call.kv_indptr,
            max_seqlen_q=step.batch.max_q_len,
            max_seqlen_k=step.batch.max_kv_len,
            seqused_k=step.batch.kv_lens if paged else None,
            page_table=step.page_table if paged else None,
            softmax_scale=layer.scale,
            causal=call.causal,
            # None is "all" here; -1 would be one key short
            window_size=(left if left >= 0 else None, right if right >= 0 else None),
            learnable_sink=call.sinks,
            softcap=layer.softcap,
            num_splits=num_splits,
            return_lse=call.with_lse,
        )
        call.out.copy_(out)
        return lse.transpose(0, 1) if lse is not None else None

    def _kind(self, call: LayerCall) -> tuple[object, ...]:
        """What decides which kernel is compiled, in words for the announcement."""
        batch, layer = call.step.batch, call.layer
        heads = layer.num_qo_heads // layer.num_kv_heads
        return (
            f"d{layer.head_dim}x{layer.v_head_dim}",
            f"{heads} heads a KV head",
            "ragged" if call.kv_indptr is not None else "paged",
            "causal" if call.causal else "non-causal",
            next((f"up to {rows} query rows" for rows in TILE_ROWS if batch.max_q_len * heads <= rows), "long"),
            *(("many rows",) if batch.num_rows > MANY_ROWS else ()),
            *(("window",) if layer.window_left >= 0 else ()),
            *((f"softcap {layer.softcap}",) if layer.softcap else ()),
            *((f"{str(call.sinks.dtype).removeprefix('torch.')} sinks",) if call.sinks is not None else ()),
            *(("lse",) if call.with_lse else ()),
        )
