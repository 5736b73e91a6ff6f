"""Kernels that are wrong in one way each, as a plugin of this process: equalities are worth what these break.

In: the call contract. Out: `torch_native`'s answers, with one thing dropped.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from backstamp.attention import Batch, ComputedGates, LayerSpec, PagedKV, StatePool
from backstamp.declarations import Offer
from backstamp.factories import BuildRequest, Built
from backstamp.hookspecs import hookimpl
from backstamp_cpu.linear import LinearState, TorchNativeLinear
from backstamp_cpu.native import NativeState, TorchNative
from backstamp_cpu.plugin import NATIVE, NATIVE_GDN

__all__ = ["WRONG", "WRONG_LINEAR", "WrongKernels"]

WRONG = ("zeros", "no_causal", "no_window", "no_sinks", "no_softcap", "no_first_key")


WRONG_LINEAR = ("linear_zeros", "linear_forgets")


class Wrong(TorchNative):
    """`torch_native` without one thing; the kernel's name says which."""

    def __init__(self, request: BuildRequest) -> None:
        super().__init__(request, rows_alone=False)
        self._without = request.kernel

    def plan(self, batch: Batch, *, state: NativeState | None = None, capture: bool = False) -> NativeState:
        if self._without == "no_causal":
            batch = replace(batch, causal=False)
        if self._without == "no_first_key":
            starts = torch.minimum(torch.ones_like(batch.kv_lens), (batch.kv_lens - 1).clamp(min=0))
            batch = replace(batch, kv_starts=starts)
        return super().plan(batch, state=state, capture=capture)

    def forward(
        self, q: Tensor, kv: PagedKV | None, layer: LayerSpec, state: NativeState, *, out: Tensor, **parts: Tensor
    ) -> Tensor:
        if self._without == "zeros":
            return out.zero_()
        changes = {"no_window": {"window_left": -1}, "no_sinks": {"sinks": None}, "no_softcap": {"softcap": 0.0}}
        return super().forward(q, kv, replace(layer, **changes.get(self._without, {})), state, out=out, **parts)


class WrongLinear(TorchNativeLinear):
    """`torch_native`'s delta rule, answering zeros or leaving the states as they were."""

    def __init__(self, request: BuildRequest) -> None:
        super().__init__(request)
        self._without = request.kernel

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: ComputedGates,
        layer: LayerSpec,
        state: LinearState,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor,
    ) -> Tensor:
        before = pool.ssm.clone()
        super().forward(q, k, v, gates, layer, state, pool=pool, slots=slots, out=out)
        if self._without == "linear_forgets":
            pool.ssm.copy_(before)
            return out
        return out.zero_()


class WrongKernels:
    """The plugin."""

    @hookimpl
    def backstamp_offers(self) -> tuple[Offer, ...]:
        """One row a wrong kernel; `auto` never takes the lowest priority."""
        rows = [replace(NATIVE, kernel=name, factory=f"{__name__}:build", priority=0) for name in WRONG]
        linear = [
            replace(NATIVE_GDN, kernel=name, factory=f"{__name__}:build_linear", priority=0) for name in WRONG_LINEAR
        ]
        return (*rows, *linear)


def build(request: BuildRequest) -> Built:
    """The factory of every row."""
    return Built(request.kernel, Wrong(request), dict(request.settings))


def build_linear(request: BuildRequest) -> Built:
    """The factory of every linear row."""
    return Built(request.kernel, WrongLinear(request))
