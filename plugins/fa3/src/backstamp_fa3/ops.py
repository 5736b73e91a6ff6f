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
    from collections.abc import Mapping

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


#: Arguments that are the same in every call: no appending, as the engine has written this step's keys; no scales, no
#: rotary embedding; 0 splits are the library's own heuristic.
_SAME: Mapping[str, object] = {
    **dict.fromkeys(("k_new", "v_new", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx")),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale")),
    "attention_chunk": 0,
    "is_rotary_interleaved": False,
    "scheduler_metadata": None,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
}


#: Arguments that are a call's own.
_OWN = (
    *("q", "k", "v", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k"),
    *("page_table", "leftpad_k", "softmax_scale", "is_causal", "window_size_left", "window_size_right", "softcap"),
)


def load(name: OpName) -> ForwardOp:
    """Import the build and answer its operator. Raises what the import raises.

    Raises:
        ImportError: an operator without an argument that a call needs: left out, it would be lost in silence.
    """
    importlib.import_module(name.module)
    op = getattr(torch.ops, name.namespace).fwd.default
    known = {argument.name for argument in op._schema.arguments}
    needed = {*_SAME, *_OWN, *name.extras, *(("sinks",) if name.has_sinks else ())}
    if not needed <= known:
        missing = ", ".join(sorted(needed - known))
        raise ImportError(f"{name.namespace}::fwd of {name.module}: needs {missing}, got none")
    return ForwardOp(op, name.extras)


class ForwardOp:
    """One build's forward operator, called by position: names cost the host twice what the call itself does."""

    def __init__(self, op: torch._ops.OpOverload, extras: Mapping[str, object]) -> None:
        self._op = op
        arguments = op._schema.arguments
        self._order = tuple(argument.name for argument in arguments)
        # what a later release has besides is left as it is
        others = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        self._same = {**others, **_SAME, **extras}

    def attend(self, call: LayerCall) -> Tensor | None:
        """Write `call.out`; the LSE comes as `[Hq, T]` in natural log."""
        step, layer = call.step, call.layer
        paged = call.kv_indptr is None
        left, right = call.window
        given = {
            **self._same,
            # a build without them has no such argument, and its row no sinks
            "sinks": call.sinks,
            "q": call.q,
            "k": call.k,
            "v": call.v,
            "q_v": call.q_v,
            "out": call.out,
            "cu_seqlens_q": step.batch.qo_indptr,
            "cu_seqlens_k": call.kv_indptr,
            "seqused_k": step.batch.kv_lens if paged else None,
            "max_seqlen_q": step.batch.max_q_len,
            "max_seqlen_k": None if paged else step.batch.max_kv_len,
            "page_table": step.page_table if paged else None,
            "leftpad_k": call.leftpad,
            "softmax_scale": layer.scale,
            "is_causal": call.causal,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": layer.softcap,
        }
        answer = self._op(*[given[name] for name in self._order])
        return answer[1].transpose(0, 1) if call.with_lse else None
