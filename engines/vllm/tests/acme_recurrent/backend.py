"""The factories and the backends; a kernel's name says what it drops."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RawGates, StatePool
from backstamp.factories import BuildRequest, Built
from backstamp_cpu.linear import LinearState, TorchNativeLinear
from backstamp_cpu.native import NativeState, TorchNative

__all__ = [
    "build_latent",
    "build_latent_no_causal",
    "build_latent_zeros",
    "build_rule",
    "build_rule_forgets",
    "build_rule_zeros",
]


class Rule(TorchNativeLinear):
    """A delta rule, or one that answers zeros or leaves states as they were."""

    def __init__(self, request: BuildRequest) -> None:
        super().__init__(request)
        self._kernel = request.kernel

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates,
        layer: LayerSpec,
        state: LinearState,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor,
    ) -> Tensor:
        """Run one layer."""
        before = pool.ssm.clone() if self._kernel.endswith("forgets") else None
        super().forward(q, k, v, gates, layer, state, pool=pool, slots=slots, out=out)
        if before is not None:
            pool.ssm.copy_(before)
        return out.zero_() if self._kernel.endswith("zeros") else out


class Latent(TorchNative):
    """MLA prefill, or one that answers zeros or drops the causal rule."""

    def __init__(self, request: BuildRequest) -> None:
        super().__init__(request, rows_alone=False)
        self._kernel = request.kernel

    def plan(self, batch: Batch, *, state: NativeState | None = None, capture: bool = False) -> NativeState:
        """Plan one step."""
        assert batch.kv_lens_host is not None, "declared as an input"
        if self._kernel.endswith("no_causal"):
            batch = replace(batch, causal=False)
        return super().plan(batch, state=state, capture=capture)

    def forward(
        self, q: Tensor, kv: PagedKV | None, layer: LayerSpec, state: NativeState, *, out: Tensor, **parts: Tensor
    ) -> Tensor:
        """Attend one layer."""
        super().forward(q, kv, layer, state, out=out, **parts)
        return out.zero_() if self._kernel.endswith("zeros") else out


def build_rule(request: BuildRequest) -> Built:
    """The delta rule."""
    return Built("acme_rule", Rule(request))


def build_rule_zeros(request: BuildRequest) -> Built:
    """A rule that answers zeros."""
    return Built("acme_rule_zeros", Rule(request))


def build_rule_forgets(request: BuildRequest) -> Built:
    """A rule that leaves states as they were."""
    return Built("acme_rule_forgets", Rule(request))


def build_latent(request: BuildRequest) -> Built:
    """MLA prefill."""
    return Built("acme_latent", Latent(request), dict(request.settings))


def build_latent_zeros(request: BuildRequest) -> Built:
    """MLA prefill that answers zeros."""
    return Built("acme_latent_zeros", Latent(request), dict(request.settings))


def build_latent_no_causal(request: BuildRequest) -> Built:
    """MLA prefill without the causal rule."""
    return Built("acme_latent_no_causal", Latent(request), dict(request.settings))
