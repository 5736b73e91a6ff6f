"""Calls MUSA's FlashAttention-3 as SGLang 0.5.23 does: known from that caller, not from the library.

In: a `LayerCall`. Out: `call.out` copied from the library's own output, and the LSE. The schedule of a step is made
once for the layers of one shape, as the caller makes it at its first layer. Not yet run on hardware.

Source: sglang 0.5.23, srt/hardware_backend/musa/attention/flashattention_backend.py:102 (`get_scheduler_metadata`),
:179 (every argument of `flash_attn_with_kvcache`) and :794 (those of a step over pages).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from backstamp_fa3.calls import LayerCall

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MateFunctions"]


class MateFunctions:
    """The two functions of MUSA's `flash_attn_interface`."""

    def __init__(self, attend: Callable[..., Tensor | tuple[Tensor, ...]], schedule: Callable[..., object]) -> None:
        self._function = attend
        self._schedule = schedule

    def attend(self, call: LayerCall) -> Tensor | None:
        """Write `call.out`; the LSE comes as `[Hq, T]` in natural log."""
        step, layer = call.step, call.layer
        answer = self._function(
            q=call.q.contiguous(),
            k_cache=call.k,
            v_cache=call.v,
            page_table=step.page_table,
            cache_seqlens=step.batch.kv_lens,
            cu_seqlens_q=step.batch.qo_indptr,
            max_seqlen_q=step.batch.max_q_len,
            softmax_scale=layer.scale,
            causal=call.causal,
            window_size=call.window,
            softcap=layer.softcap,
            scheduler_metadata=self._step_schedule(call),
            return_softmax_lse=call.with_lse,
            num_splits=0,
            sinks=call.sinks,
        )
        if isinstance(answer, Tensor):
            call.out.copy_(answer)
            return None
        out, lse, *_ = answer
        call.out.copy_(out)
        return lse.transpose(0, 1)

    def _step_schedule(self, call: LayerCall) -> object:
        step, layer = call.step, call.layer
        dims = (layer.num_qo_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, *call.window)
        if dims not in step.schedules:
            step.schedules[dims] = self._schedule(
                batch_size=step.batch.num_rows,
                num_heads_q=layer.num_qo_heads,
                num_heads_kv=layer.num_kv_heads,
                headdim=layer.head_dim,
                headdim_v=layer.v_head_dim,
                cache_seqlens=step.batch.kv_lens,
                cu_seqlens_q=step.batch.qo_indptr,
                cu_seqlens_k_new=None,
                max_seqlen_q=step.batch.max_q_len,
                max_seqlen_k=step.batch.max_kv_len,
                page_size=call.k.shape[1],
                causal=call.causal,
                window_size=call.window,
                num_splits=0,
            )
        return step.schedules[dims]
