"""The attention function Transformers calls in each layer, under every name of ours.

In: a module, its query, keys and values, the mask that names the step, and whatever else the model hands over. Out: the
kernel's output. What is handed over and means nothing to a kernel is refused; only what changes no number is let by.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from backstamp_transformers.admission import served_for
from backstamp_transformers.custom import custom_step
from backstamp_transformers.errors import NotServed, refuse_gradients
from backstamp_transformers.layers import AttentionModule
from backstamp_transformers.masks import step_of
from backstamp_transformers.paged import PagedKeys, paged_step
from backstamp_transformers.step import Rule, Step

__all__ = ["attention_forward"]


def attention_forward(
    module: AttentionModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **told: Any,
) -> tuple[Tensor, None]:
    """Attend one layer: `query [B, Hq, Q, Dk]`, `key, value [B, Hk, S, D]` to `[B, Q, Hq, Dv]`.

    Raises:
        NotServed: a call that asks for gradients, dropout, weights or a bias, or that is not what the plan was told.
        UnsupportedBatch: the kernel does not declare what the step needs.
    """
    # what keeps a compiler out costs every layer, and there seldom is one
    attend = _uncompiled if torch.compiler.is_compiling() else _attend
    return attend(module, query, key, value, attention_mask, **told)


def _attend(
    module: AttentionModule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = False,
    backstamp_kv: PagedKeys | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **unread: object,
) -> tuple[Tensor, None]:
    if torch.is_grad_enabled():
        refuse_gradients(_who(module), {"query": query, "key": key, "value": value, "sinks": s_aux})
    if dropout or position_bias is not None or output_attentions:
        _check_call(_who(module), dropout, position_bias, output_attentions)
    if not query.dtype == key.dtype == value.dtype:
        raise _mixed_dtypes(_who(module), query, key, value)
    if backstamp_kv is None:
        step = _step(module, query, key, attention_mask)
        out = step.attend(query, key, value, module.layer_idx)
        served, rule = step.served, step.rule
    else:
        assert cu_seq_lens_q is not None, "continuous batching hands over both"
        assert cu_seq_lens_k is not None, "continuous batching hands over both"
        served = served_for(module.config)
        out = paged_step(served, cu_seq_lens_q).attend(query, backstamp_kv, cu_seq_lens_k, module.layer_idx)
        # a paged cache has no mask: its windows are the cache's own
        rule = Rule(True, served.spec(module.layer_idx).window_left)
    spec = served.spec(module.layer_idx)
    planned = (spec.window_left, spec.softcap, spec.scale, spec.head_dim)
    fault = _layer_fault(rule, planned, scaling, sliding_window, softcap, is_causal)
    if fault is not None:
        raise NotServed(_who(module), needed=fault[0], found=fault[1])
    if s_aux is not spec.sinks:
        raise NotServed(_who(module), needed="the sinks the kernels were built with", found="others, or none")
    return out, None


@torch.compiler.disable
def _uncompiled(
    module: AttentionModule, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **told: Any
) -> tuple[Tensor, None]:
    return _attend(module, query, key, value, attention_mask, **told)


def _who(module: AttentionModule) -> str:
    return f"{type(module).__name__}, layer {module.layer_idx}"


def _step(module: AttentionModule, query: Tensor, key: Tensor, mask: Tensor | None) -> Step:
    if mask is None:
        needed = "the mask that the model made for this implementation"
        raise NotServed(_who(module), needed=needed, found="none", fix="Use a model whose masks Transformers makes")
    step = step_of(mask)
    if step is not None:
        return step
    if mask.dim() != 4 or not mask.numel():
        needed = "the mask that the model made for this implementation, or one of four dimensions"
        raise NotServed(_who(module), needed=needed, found=f"one of shape {list(mask.shape)}")
    rows, _, q_len, _ = query.shape
    return custom_step(served_for(module.config), mask, rows, q_len, key.shape[2], module.layer_idx)


def _check_call(who: str, dropout: float, position_bias: Tensor | None, output_attentions: bool | None) -> None:
    for name, given in (
        ("dropout", dropout),
        ("position_bias", position_bias),
        ("output_attentions", output_attentions),
    ):
        if given is not None and given is not False and not (isinstance(given, float | int) and given == 0):
            raise NotServed(who, needed=f"a call without {name}", found="one with it", fix="Use sdpa or eager for it")


def _mixed_dtypes(who: str, query: Tensor, key: Tensor, value: Tensor) -> NotServed:
    # autocast turns what a projection answers, and leaves what position embeddings answer as it was
    return NotServed(
        who,
        needed="queries, keys and values of one dtype",
        found=f"{query.dtype}, {key.dtype}, {value.dtype}",
        fix="Leave torch.autocast, and load the model in the dtype it is to run in",
    )


@functools.lru_cache(maxsize=256)
def _layer_fault(
    rule: Rule,
    planned: tuple[int, float, float, int],
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    is_causal: bool | None,
) -> tuple[str, str] | None:
    """Where what the model says in the call is not what the kernels were told of this layer: needed, and found.

    `planned` is the layer's window, softcap, scale and head dim. Kept: a model says the same in every step.
    """
    planned_window, planned_softcap, planned_scale, head_dim = planned
    window = -1 if sliding_window is None else sliding_window - 1
    scale = head_dim**-0.5 if scaling is None else scaling
    # a token that sees later ones is the mask's to say; a model may only agree with it
    said = rule.causal if is_causal is None else is_causal
    for name, told, found in (
        ("sliding_window", planned_window, window),
        ("the mask's window", planned_window, rule.window_left),
        ("softcap", planned_softcap, softcap or 0.0),
        ("scaling", planned_scale, scale),
        ("is_causal", rule.causal, said),
    ):
        if not math.isclose(told, found):
            return f"{name} {told:g}, as the config says", f"{found:g}"
    return None
