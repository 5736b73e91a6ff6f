"""The check of a linear-attention call that is like the last right one: what an engine pays for it, layer after layer.

In: what `check_linear_call` takes. Out: nothing, or its refusal. A call is let through on a few comparisons of objects,
shapes and dtypes where every check would pass as it did before; it never lets one through that the check refuses.

.. versionadded:: 0.2
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from backstamp.attention import LayerSpec
from backstamp.factories import BuildRequest
from backstamp.linear_checks import check_linear_call
from backstamp.linear_contract import ComputedGates, LinearBatch, RawGates, StatePool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LinearCallChecks"]


class LinearCallChecks:
    """`check_linear_call` for every call of one built object, at the price of a few comparisons once a call was right.

    A layer, its states and its gate parameters are remembered as the objects they are, and no tensor is kept alive.
    Tokens, gates and outputs are compared in every call. Any other call goes through the check whole: slots that are
    not the batch's, which the plan has checked, and steps that keep states apart.
    """

    __slots__ = ("_known", "_request")

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._known: dict[int, _Known] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        batch: LinearBatch,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> None:
        """Hold one layer's tensors against the row.

        Raises:
            UnsupportedBatch: the first field that does not fit.
        """
        known = self._known.get(layer.layer_id)
        plain = slots is batch.slots and batch.intermediate is None
        if known is not None and plain and known.layer is layer and known.ssm() is pool.ssm:
            keys, values = (batch.num_tokens, *known.key_shape), (batch.num_tokens, *known.value_shape)
            dtype, device = known.dtype, known.device
            # spelt out: a call of a helper costs as much as what it would compare
            if (
                pool.order == known.order
                and q.shape == keys
                and k.shape == keys
                and v.shape == values
                and q.dtype is dtype
                and k.dtype is dtype
                and v.dtype is dtype
                and q.device == device
                and k.device == device
                and v.device == device
                and q.stride()[2] == k.stride()[2] == v.stride()[2] == 1
                and (
                    out is None
                    or (out.shape == values and out.dtype is dtype and out.device == device and out.stride()[2] == 1)
                )
                and known.gates.are_like(gates, batch.num_tokens, device)
            ):
                return
        check_linear_call(self._request, q, k, v, gates, layer, batch, pool=pool, slots=slots, out=out)
        if plain:
            self._known[layer.layer_id] = _Known(
                layer=layer,
                ssm=weakref.ref(pool.ssm),
                order=pool.order,
                dtype=q.dtype,
                device=q.device,
                key_shape=(layer.num_qo_heads, layer.head_dim),
                value_shape=(layer.num_kv_heads, layer.v_head_dim),
                gates=_gates_of(gates),
            )


class _Gates(NamedTuple):
    """What the gates of another call must be to be right again."""

    decay_shape: tuple[int, ...]
    beta_shape: tuple[int, ...]
    decay_dtype: torch.dtype
    beta_dtype: torch.dtype
    bound: float | None
    parameters: Callable[[], Tensor | None]
    bias: Callable[[], Tensor | None]

    def are_like(self, gates: RawGates | ComputedGates, tokens: int, device: torch.device) -> bool:
        """Whether they have the shapes and dtypes that were right, of so many tokens; both kinds have the same."""
        if isinstance(gates, RawGates):
            if gates.A_log is not self.parameters() or gates.dt_bias is not self.bias():
                return False
            if gates.lower_bound != self.bound:
                return False
            decay, beta = gates.a, gates.b
        else:
            decay, beta = gates.g, gates.beta
        return (
            decay.shape == (tokens, *self.decay_shape)
            and beta.shape == (tokens, *self.beta_shape)
            and decay.dtype is self.decay_dtype
            and beta.dtype is self.beta_dtype
            and decay.device == device
            and beta.device == device
        )


class _Known(NamedTuple):
    """One layer whose last call was right, and what another must have to be right again."""

    layer: LayerSpec
    ssm: Callable[[], Tensor | None]
    order: str
    dtype: torch.dtype
    device: torch.device
    key_shape: tuple[int, int]
    value_shape: tuple[int, int]
    gates: _Gates


def _gates_of(gates: RawGates | ComputedGates) -> _Gates:
    decay, beta = (gates.a, gates.b) if isinstance(gates, RawGates) else (gates.g, gates.beta)
    return _Gates(
        decay_shape=tuple(decay.shape[1:]),
        beta_shape=tuple(beta.shape[1:]),
        decay_dtype=decay.dtype,
        beta_dtype=beta.dtype,
        bound=gates.lower_bound if isinstance(gates, RawGates) else None,
        parameters=weakref.ref(gates.A_log) if isinstance(gates, RawGates) else _nothing,
        bias=weakref.ref(gates.dt_bias) if isinstance(gates, RawGates) else _nothing,
    )


def _nothing() -> None:
    return None
