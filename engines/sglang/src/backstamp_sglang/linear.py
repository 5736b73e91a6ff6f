"""Gated delta nets of a hybrid model on a linear kernel of ours, inside SGLang's own backend for them.

In: SGLang's hook on the construction of that backend, then its calls of one kernel: queries, keys and values as its
convolution leaves them, gates, and its pool of states. Out: outputs, with the states updated in place. Convolutions,
slots and the states that prefix caching keeps stay SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase
from sglang.srt.layers.attention.linear.utils import LinearAttnBackends, LinearAttnKernelBackend
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

from backstamp.attention import ComputedGates, LinearBackend, LinearBatch, RawGates, StatePool
from backstamp.declarations import Phase
from backstamp.errors import Refused
from backstamp_sglang.asked import linear_names
from backstamp_sglang.layers import linear_spec_of
from backstamp_sglang.runner import runner_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor

__all__ = ["LinearKernel", "build_with_ours"]


def build_with_ours(construct: Callable[..., None], backend: GDNAttnBackend, runner: ModelRunner) -> None:
    """Let SGLang build its backend with its own kernels, then put ours where it dispatches to.

    Raises:
        Refused: gated delta nets that one kernel does not serve alike.
    """
    if not linear_names(resolved_view(runner.server_args)):
        construct(backend, runner)
        return
    # what SGLang has no kernel for is no choice of its dispatcher
    triton = LinearAttnKernelBackend.TRITON
    runner.linear_attn_backends = LinearAttnBackends(decode=triton, prefill=triton, verify=triton)
    construct(backend, runner)
    engine = runner_of(runner)
    layers = [layer for layer in runner.model.modules() if isinstance(layer, RadixLinearAttention)]
    dispatcher = backend.kernel_dispatcher
    dispatcher.decode_kernel = LinearKernel(backend, engine.serving_linear("decode"), layers)
    dispatcher.extend_kernel = LinearKernel(backend, engine.serving_linear("prefill"), layers)
    dispatcher.supports_packed_decode = False


class _Planned(NamedTuple):
    """What one step was planned for, and the answer."""

    metadata: object
    state: object


class LinearKernel(LinearAttnKernelBase):
    """What SGLang's dispatcher calls for every gated delta net of a model, in one of its phases."""

    def __init__(
        self, owner: GDNAttnBackend, kernel: LinearBackend[object], layers: list[RadixLinearAttention]
    ) -> None:
        """Take over the calls of these layers.

        Raises:
            Refused: they are unlike, and SGLang does not say which one calls.
        """
        alike = {replace(linear_spec_of(layer), layer_id=0) for layer in layers}
        if len(alike) != 1:
            raise Refused("backstamp-sglang", needed="gated delta nets of one shape", found=f"{len(alike)} shapes")
        self.kernel, self._owner, self._spec = kernel, owner, linear_spec_of(layers[0])
        self._planned: _Planned | None = None

    def decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        *,
        A_log: Tensor,
        dt_bias: Tensor,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        **others: object,
    ) -> Tensor:
        """One token a row, with gates as the projections leave them: `q [1, B, H, K]` to `[1, B, HV, V]`."""
        gates = RawGates(a=a.view(-1, v.shape[2]), b=b.view(-1, v.shape[2]), A_log=A_log, dt_bias=dt_bias)
        return self._run("decode", q, k, v, gates, ssm_states, cache_indices, query_start_loc)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        ssm_states: Tensor,
        cache_indices: Tensor,
        query_start_loc: Tensor,
        **others: object,
    ) -> tuple[Tensor, None, None]:
        """Chunks of prompts, with computed gates; the states in between are nobody's: prefix caching keeps none."""
        gates = ComputedGates(g=g.view(-1, v.shape[2]), beta=beta.view(-1, v.shape[2]))
        return self._run("prefill", q, k, v, gates, ssm_states, cache_indices, query_start_loc), None, None

    def _run(
        self,
        phase: Phase,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        ssm_states: Tensor,
        slots: Tensor,
        starts: Tensor,
    ) -> Tensor:
        out = torch.empty_like(v[0], memory_format=torch.contiguous_format)
        state = self._state(phase, v.shape[1], slots, starts)
        pool = StatePool(ssm=ssm_states, order="vk")
        self.kernel.forward(q[0], k[0], v[0], gates, self._spec, state, pool=pool, slots=slots, out=out)
        return out[None]

    def _state(self, phase: Phase, num_tokens: int, slots: Tensor, starts: Tensor) -> object:
        """The planned step: SGLang makes its metadata anew for each, and all layers share it."""
        metadata = self._owner.forward_metadata
        if self._planned is None or self._planned.metadata is not metadata:
            rows = len(slots)
            batch = LinearBatch(
                phase=phase,
                num_rows=rows,
                num_tokens=num_tokens,
                qo_indptr=starts,
                slots=slots,
                # SGLang clears the slots of new requests before the step
                has_state=torch.ones(rows, dtype=torch.bool, device=slots.device),
                qo_indptr_host=starts.cpu(),
            )
            self._planned = _Planned(metadata, self.kernel.plan(batch))
        return self._planned.state
