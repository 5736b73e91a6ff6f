"""Calls FlashAttention-3 through its registered PyTorch operator, which every build of it has.

In: a `LayerCall`. Out: `call.out` written in place, and the LSE. The Python entries of these builds take no `out` (all
but the newest of SGLang's), and cost a copy of the output and the dispatch of a custom operator besides; the operator
under them takes one. It makes no decision of its own: splits, packing and schedule are the library's.

Source of the schema: the string in each wheel's image; see the table in README.md.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backstamp_fa3.calls import LayerCall

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ForwardOp", "OpName", "load"]


@dataclass(frozen=True, slots=True)
class OpName:
    """Where a build keeps its operator.

    `module` registers it when imported; `extras` are arguments that only this build has, with what leaves them off.
    """

    module: str
    namespace: str
    has_sinks: bool
    extras: Mapping[str, object] = field(default_factory=dict)


def load(name: OpName) -> ForwardOp:
    """Import the build and answer its operator. Raises what the import raises."""
    importlib.import_module(name.module)
    namespace = getattr(torch.ops, name.namespace)
    return ForwardOp(namespace.fwd.default, name.has_sinks, dict(name.extras))


class ForwardOp:
    """One build's forward operator."""

    def __init__(self, op: Callable[..., tuple[Tensor, ...]], has_sinks: bool, extras: dict[str, object]) -> None:
        self._op = op
        self._has_sinks = has_sinks
        self._extras = extras

    def attend(self, call: LayerCall) -> Tensor | None:
        """Write `call.out`; the LSE comes as `[Hq, T]` in natural log."""
        step, layer = call.step, call.layer
        paged = call.kv_indptr is None
        left, right = call.window
        extras = self._extras if not self._has_sinks else {**self._extras, "sinks": call.sinks}
        answer = self._op(
            q=call.q,
            k=call.k,
            v=call.v,
            # no appending: the engine has written this step's keys
            k_new=None,
            v_new=None,
            q_v=call.q_v,
            out=call.out,
            cu_seqlens_q=step.batch.qo_indptr,
            cu_seqlens_k=call.kv_indptr,
            cu_seqlens_k_new=None,
            seqused_q=None,
            seqused_k=step.batch.kv_lens if paged else None,
            max_seqlen_q=step.batch.max_q_len,
            max_seqlen_k=None if paged else step.batch.max_kv_len,
            page_table=step.page_table if paged else None,
            kv_batch_idx=None,
            leftpad_k=call.leftpad,
            rotary_cos=None,
            rotary_sin=None,
            seqlens_rotary=None,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            softmax_scale=layer.scale,
            is_causal=call.causal,
            window_size_left=left,
            window_size_right=right,
            attention_chunk=0,
            softcap=layer.softcap,
            is_rotary_interleaved=False,
            scheduler_metadata=None,
            # 0: the library's own heuristic
            num_splits=0,
            pack_gqa=None,
            sm_margin=0,
            **extras,
        )
        return answer[1].transpose(0, 1) if call.with_lse else None
