"""The attention function Transformers calls in each layer, under every name of ours.

In: a module, its query, keys and values, the mask that names the step, and whatever else the model hands over. Out: the
kernel's output. What is handed over and means nothing to a kernel is refused; only what changes no number is let by.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backstamp.attention import LayerSpec
from backstamp_transformers.admission import served_for
from backstamp_transformers.custom import custom_step
from backstamp_transformers.errors import NotServed
from backstamp_transformers.layers import AttentionModule
from backstamp_transformers.masks import step_of
from backstamp_transformers.paged import PagedKeys, paged_step
from backstamp_transformers.step import Rule, Step

__all__ = ["attention_forward"]


@torch.compiler.disable
def attention_forward(
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
    """Attend one layer: `query [B, Hq, Q, Dk]`, `key, value [B, Hk, S, D]` to `[B, Q, Hq, Dv]`.

    Raises:
        NotServed: a call that asks for gradients, dropout, weights or a bias, or that is not what the plan was told.
        UnsupportedBatch: the kernel does not declare what the step needs.
    """
    who = f"{type(module).__name__}, layer {module.layer_idx}"
    _check_call(who, query, dropout, position_bias, output_attentions)
    _check_dtypes(who, query, key, value)
    if backstamp_kv is None:
        step = _step(who, module, query, key, attention_mask)
        out = step.attend(query, key, value, module.layer_idx)
        served, rule = step.served, step.rule
    else:
        assert cu_seq_lens_q is not None, "continuous batching hands over both"
        assert cu_seq_lens_k is not None, "continuous batching hands over both"
        served = served_for(module.config)
        out = paged_step(served, cu_seq_lens_q).attend(query, backstamp_kv, cu_seq_lens_k, module.layer_idx)
        # a paged cache has no mask: its windows are the cache's own
        rule = Rule(True, served.spec(module.layer_idx).window_left)
    _check_layer(who, rule, served.spec(module.layer_idx), scaling, sliding_window, softcap, s_aux, is_causal)
    return out, None


def _step(who: str, module: AttentionModule, query: Tensor, key: Tensor, mask: Tensor | None) -> Step:
    if mask is None:
        needed = "the mask that the model made for this implementation"
        raise NotServed(who, needed=needed, found="none", fix="Use a model whose masks Transformers makes")
    step = step_of(mask, who)
    if step is not None:
        return step
    rows, _, q_len, _ = query.shape
    return custom_step(served_for(module.config), mask, rows, q_len, key.shape[2], module.layer_idx)


def _check_call(
    who: str, query: Tensor, dropout: float, position_bias: Tensor | None, output_attentions: bool | None
) -> None:
    if query.requires_grad and torch.is_grad_enabled():
        fix = "Run under torch.inference_mode() or torch.no_grad(); train with sdpa or eager"
        raise NotServed(who, needed="a call without gradients", found="a query that requires them", fix=fix)
    for name, given in (
        ("dropout", dropout),
        ("position_bias", position_bias),
        ("output_attentions", output_attentions),
    ):
        if given is not None and given is not False and not (isinstance(given, float | int) and given == 0):
            raise NotServed(who, needed=f"a call without {name}", found="one with it", fix="Use sdpa or eager for it")


def _check_dtypes(who: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    # autocast turns what a projection answers, and leaves what position embeddings answer as it was
    if not query.dtype == key.dtype == value.dtype:
        raise NotServed(
            who,
            needed="queries, keys and values of one dtype",
            found=f"{query.dtype}, {key.dtype}, {value.dtype}",
            fix="Leave torch.autocast, and load the model in the dtype it is to run in",
        )


def _check_layer(
    who: str,
    rule: Rule,
    spec: LayerSpec,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    is_causal: bool | None,
) -> None:
    """Hold what the model says in the call against what the kernels were told of this layer."""
    window = -1 if sliding_window is None else sliding_window - 1
    scale = spec.head_dim**-0.5 if scaling is None else scaling
    # a token that sees later ones is the mask's to say; a model may only agree with it
    said = rule.causal if is_causal is None else is_causal
    for name, told, found in (
        ("sliding_window", spec.window_left, window),
        ("the mask's window", spec.window_left, rule.window_left),
        ("softcap", spec.softcap, softcap or 0.0),
        ("scaling", spec.scale, scale),
        ("is_causal", rule.causal, said),
    ):
        if not math.isclose(told, found):
            raise NotServed(who, needed=f"{name} {told:g}, as the config says", found=f"{found:g}")
    if s_aux is not spec.sinks:
        raise NotServed(who, needed="the sinks the kernels were built with", found="others, or none")
