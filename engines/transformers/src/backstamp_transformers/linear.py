"""Gated delta rules of a hybrid model on the resolved linear kernels, in place of Transformers' own two functions.

In: a served model. Out: its linear layers' outputs, and the states its cache keeps. Transformers' layers call their
rule as a function of their module, without saying which layer calls, and hand it the keywords they were called with:
hooks on this model's layers add one, and without it the function does what it did. The convolution and its windows stay
the layer's own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from backstamp.attention import ComputedGates, LinearBackend, LinearBatch, StatePool
from backstamp_transformers.errors import NotServed, refuse_gradients
from backstamp_transformers.kernels import Bounds, Kernels
from backstamp_transformers.served import Served

__all__ = ["attach", "detach", "linear_modules"]

_Args: TypeAlias = tuple[Any, ...]

_RULES: Final = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
#: The keyword by which a rule knows who calls.
_KEY: Final = "backstamp_calling"


class _Calling(NamedTuple):
    """The layer whose forward is running."""

    served: Served
    layer: int


def attach(served: Served) -> None:
    """Have a model's linear layers call our kernels; a second call does nothing.

    Raises:
        NotServed: as `linear_modules`.
    """
    if served.hooks:
        return
    for layer, module in linear_modules(served).items():
        _open(module)
        served.hooks.append(module.register_forward_pre_hook(_Say(served, layer, module), with_kwargs=True))


def linear_modules(served: Served) -> dict[int, nn.Module]:
    """The modules of the layers that the plan gives a linear kernel, by layer id.

    Raises:
        NotServed: a linear layer whose rule this module does not know.
    """
    model = served.model()
    if model is None or not served.linear_layers:
        return {}
    found: dict[object, nn.Module] = {
        module.layer_idx: module
        for module in model.modules()
        if hasattr(module, "layer_idx") and module.layer_idx in served.linear_layers and hasattr(module, "A_log")
    }
    for layer in served.linear_layers:
        if layer not in found or not _source(found[layer]).keys() >= set(_RULES):
            who = f"{type(model).__name__}, layer {layer}"
            raise NotServed(who, needed=f"a gated delta net that calls {_RULES[0]}", found="another linear layer")
    return {layer: found[layer] for layer in served.linear_layers}


def detach(served: Served) -> None:
    """Give the layers back their own rule."""
    for hook in served.hooks:
        hook.remove()
    served.hooks.clear()


class _Say:
    """Says that a served layer's forward runs; of a copy of the layer, or under another implementation, nothing."""

    def __init__(self, served: Served, layer: int, module: nn.Module) -> None:
        self._calling = _Calling(served, layer)
        self._module = weakref.ref(module)

    def __call__(self, module: nn.Module, args: _Args, given: dict[str, Any]) -> tuple[_Args, dict[str, Any]] | None:
        # a hook stays where a model is set to another implementation, and goes along with its copies
        if self._module() is module and self._calling.served.applies():
            return args, {**given, _KEY: self._calling}
        return None

    def __deepcopy__(self, memo: object) -> _Say:
        return self

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # what is served belongs to this process
        return _idle, ()


def _idle() -> Callable[[nn.Module, _Args, dict[str, Any]], None]:
    return _say_nothing


def _say_nothing(module: nn.Module, args: _Args, given: dict[str, Any]) -> None:
    """What a served layer's hook is in a pickle."""


def _source(module: nn.Module) -> dict[str, Any]:
    """What is in the module that a layer's class is written in."""
    return vars(sys.modules[type(module).__module__])


def _open(module: nn.Module) -> None:
    """Put a switch before the two rules that a layer calls."""
    source = _source(module)
    for name in _RULES:
        if not isinstance(source[name], _Switch):
            source[name] = _Switch(source[name])


class _Switch:
    """One of Transformers' rules, which a served layer's call does not reach."""

    def __init__(self, rule: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
        self._rule = rule

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        calling: _Calling | None = given.pop(_KEY, None)
        return self._rule(query, key, value, **given) if calling is None else _run(calling, query, key, value, **given)


def _run(
    calling: _Calling,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None = None,
    **unread: object,
) -> tuple[Tensor, Tensor | None]:
    """One layer: `query, key [B, S, H, K]`, `value [B, S, HV, V]` to `[B, S, HV, V]` and states `[B, HV, K, V]`."""
    served, layer = calling
    who = f"gated delta rule, layer {layer}"
    if torch.is_grad_enabled():
        parts = {"query": query, "key": key, "value": value, "g": g, "beta": beta, "initial_state": initial_state}
        refuse_gradients(who, parts)
    if not use_qk_l2norm_in_kernel:
        raise NotServed(
            who, needed="queries and keys that the kernel normalises", found="use_qk_l2norm_in_kernel=False"
        )
    if cu_seqlens is not None:
        raise NotServed(who, needed="rows of one length", found="packed rows (cu_seq_lens_q)")
    num_rows, length = value.shape[:2]
    kernels = served.fit(Bounds(num_rows, num_rows * length, 1, 1), query.dtype, query.device)
    phase: Literal["prefill", "decode"] = "decode" if length == 1 and initial_state is not None else "prefill"
    backend, spec = kernels.linear_places[phase, layer], served.linear_specs[layer]
    offsets = torch.arange(num_rows + 1, dtype=torch.int32) * length
    slots = torch.arange(num_rows, dtype=torch.int32, device=query.device)
    batch = LinearBatch(
        phase=phase,
        num_rows=num_rows,
        num_tokens=num_rows * length,
        qo_indptr=offsets.to(query.device),
        slots=slots,
        has_state=torch.full((num_rows,), initial_state is not None, device=query.device),
        qo_indptr_host=offsets,
        max_q_len=length,
    )
    pool = _pool(kernels, initial_state, value, spec.head_dim)
    out = value.new_empty(num_rows * length, *value.shape[2:])
    gates = ComputedGates(g=g.flatten(0, 1).contiguous(), beta=beta.flatten(0, 1).contiguous())
    q, k, v = (part.flatten(0, 1).contiguous() for part in (query, key, value))
    linear = cast("LinearBackend[object]", backend)
    linear.forward(q, k, v, gates, spec, linear.plan(batch), pool=pool, slots=slots, out=out)
    states = pool.ssm.transpose(-1, -2) if pool.order == "vk" else pool.ssm
    return out.view(value.shape), states.contiguous() if output_final_state else None


def _pool(kernels: Kernels, states: Tensor | None, value: Tensor, key_dim: int) -> StatePool:
    """The rows' states in the order the plan settled on; the cache keeps them `[B, HV, K, V]`, in fp32 as a rule."""
    if states is None:
        rows, _, heads, value_dim = value.shape
        states = value.new_zeros(rows, heads, key_dim, value_dim, dtype=torch.float32)
    order = cast('Literal["vk", "kv"]', dict(kernels.plan.layouts)["linear"])
    # the kernel writes in place, and the cache takes back what the call answers
    turned = states.transpose(-1, -2) if order == "vk" else states
    return StatePool(ssm=turned.clone(memory_format=torch.contiguous_format), order=order)
