"""`flashinfer` in decode and verify of gated delta nets: the library's recurrent kernels over one fp32 state pool.

In: the linear call contract; states `vk`. Out: outputs and states in place, by the library's own slot indices, -1 for a
row that is left alone. Its kernels are compiled by the CuTe DSL at the first call. Never holds the current batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose, gated_delta_rule_mtp
from torch import Tensor

from backstamp.attention import ComputedGates, LayerSpec, LinearBatch, RawGates, StatePool
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.linear_checks import (
    LinearForm,
    check_linear_batch,
    check_linear_build,
    linear_refusal,
)
from backstamp.linear_math import first_slots
from backstamp.repeated_linear_calls import LinearCallChecks
from backstamp_linear_attn.flashinfer_prefill import run_chunked
from backstamp_linear_attn.token_slots import longest_row, slots_of_tokens

__all__ = ["GdnRows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsStep:
    """One planned decode or verify.

    Attributes:
        read: i32 slots: of each token in decode, of each row in verify.
        write: verify with a slot table: `[B, S]` i32.
        num_rows, width: verify: leading rows with tokens, and how many each has.
    """

    batch: LinearBatch
    form: LinearForm
    read: Tensor
    write: Tensor | None = None
    num_rows: int = 0
    width: int = 1


class GdnRows:
    """Decode and verify of one group of gated delta nets, over fp32 states."""

    def __init__(self, request: BuildRequest) -> None:
        check_linear_build(request)
        self._request = request
        self._check_call = LinearCallChecks(request)
        self._compiles = Announcer("flashinfer")

    def plan(self, batch: LinearBatch, *, state: RowsStep | None = None, capture: bool = False) -> RowsStep:
        """Check the step and note the slot of every token, or of every row of a verify step.

        Raises:
            UnsupportedBatch: a field the row does not take; a decode step whose rows may have more than one token; a
                verify step whose rows are unlike, or have one.
        """
        form = check_linear_batch(self._request, batch, capture=capture)
        if batch.phase == "verify":
            return self._plan_verify(batch, form)
        longest = longest_row(batch)
        if longest is not None and longest > 1:
            needed = "at most 1 in decode: the library advances a state by one token"
            raise linear_refusal(self._request, "max_q_len", needed, str(longest), "decode")
        return RowsStep(batch=batch, form=form, read=slots_of_tokens(batch, batch.slots))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: RowsStep,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer; shapes as in `LinearBackend.forward`. Pads and tokens of no row come out as zero."""
        batch = state.batch
        self._check_call(q, k, v, gates, layer, batch, pool=pool, slots=slots, out=out)
        if pool.ssm.dtype is not torch.float32:
            # a bf16 pool has its slot 0 overwritten by every pad. Source: flashinfer 0.7.4 gdn_decode.py:744
            raise linear_refusal(self._request, "pool.ssm", "torch.float32", str(pool.ssm.dtype), batch.phase)
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if batch.phase == "verify":
            return self._verify(q, k, v, gates, layer, state, pool, slots, out)
        if batch.num_tokens == 0:
            return out
        read = state.read if slots is batch.slots else slots_of_tokens(batch, slots)
        with self._compiles.first("gated delta net decode", self._request.dtype):
            if isinstance(gates, ComputedGates):
                # every token is a sequence of its own
                ends = torch.arange(batch.num_tokens + 1, dtype=torch.int32, device=read.device)
                return run_chunked(q, k, v, gates, layer, ends, read, read, pool, out)
            answer, _ = gated_delta_rule_decode_pretranspose(
                q=q[:, None],
                k=k[:, None],
                v=v[:, None],
                state=None,
                A_log=gates.A_log.float(),
                a=gates.a[:, None],
                dt_bias=gates.dt_bias.float(),
                b=gates.b[:, None],
                scale=layer.scale,
                output=out[:, None] if out.is_contiguous() else None,
                use_qk_l2norm=True,
                initial_state=pool.ssm,
                initial_state_indices=read,
                # the library's default may pick another kernel by a manifest of shapes
                backend="flashinfer",
            )
        return out if out.is_contiguous() else out.copy_(answer[:, 0])

    def _plan_verify(self, batch: LinearBatch, form: LinearForm) -> RowsStep:
        """The library takes `[B, S]` tokens: as many in every row; rows without any may follow."""
        assert batch.qo_indptr_host is not None, "the row declares host_lens for verify, and the check holds it"
        lens = batch.qo_indptr_host[: batch.num_rows + 1].diff().tolist()
        width = lens[0] if lens else 0
        num_rows = next((row for row, length in enumerate(lens) if length != width), len(lens))
        if width and (any(lens[num_rows:]) or width < 2):
            needed = "at least two tokens a row, as many in each; rows without any last"
            raise linear_refusal(self._request, "qo_indptr_host", needed, str(lens), "verify")
        rows = num_rows if width else 0
        # a tensor of its own, aligned as the library wants it
        read, write = first_slots(batch)[:rows].to(torch.int32, copy=True), None
        if batch.slot_table is not None:
            write = batch.slot_table[:rows, :width].to(torch.int32).contiguous()
            # "NO negative-padding promise": it would write outside the pool. One look at the device a step
            if bool(((write < 0) & (read >= 0)[:, None]).any()):
                needed = "a slot for every token of a live row: the library has no way to skip one"
                raise linear_refusal(self._request, "slot_table", needed, "-1", "verify")
        return RowsStep(batch=batch, form=form, read=read, write=write, num_rows=rows, width=width)

    def _verify(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: RowsStep,
        pool: StatePool,
        slots: Tensor,
        out: Tensor,
    ) -> Tensor:
        batch, rows, width = state.batch, state.num_rows, state.width
        # rows of pads are left as they are by the library
        out.zero_()
        if not isinstance(gates, RawGates):
            needed, found = "RawGates: the library computes them in its kernel", "ComputedGates"
            raise linear_refusal(self._request, "gates", needed, found, "verify")
        if not gates.a.dtype == gates.b.dtype == torch.bfloat16:
            needed, found = "torch.bfloat16: the library rounds them to it", f"{gates.a.dtype} and {gates.b.dtype}"
            raise linear_refusal(self._request, "gates.a and gates.b", needed, found, "verify")
        kept = batch.intermediate
        if kept is not None and (kept.dtype is not torch.float32 or not kept.is_contiguous()):
            found = f"{kept.dtype} with strides {list(kept.stride())}"
            raise linear_refusal(self._request, "intermediate", "torch.float32, contiguous", found, "verify")
        if rows == 0:
            return out
        read = state.read
        if state.write is None and slots is not batch.slots:
            read = slots[:rows].to(torch.int32, copy=True)
        q, k, v, a, b = (x[: rows * width].unflatten(0, (rows, width)) for x in (q, k, v, gates.a, gates.b))
        with self._compiles.first("gated delta net verify", self._request.dtype, f"{width} tokens"):
            answer, _ = gated_delta_rule_mtp(
                q=q,
                k=k,
                v=v,
                initial_state=pool.ssm,
                initial_state_indices=read,
                A_log=gates.A_log.float(),
                a=a,
                dt_bias=gates.dt_bias.float(),
                b=b,
                scale=layer.scale,
                intermediate_states_buffer=kept,
                ssm_state_indices=state.write,
                # with a slot a token the library writes those, and needs to be told that it may
                disable_state_update=state.write is None,
                use_qk_l2norm=True,
            )
        out[: rows * width] = answer.flatten(0, 1)
        return out
