"""`triton` in decode and verify: the recurrent kernel launched over the rows of a step.

In: the linear call contract. Out: outputs and states in place. `plan` reads no device value and launches nothing, so a
graph may record a step and a later `plan` brings its tensors up to date. Never holds the current batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields
from typing import Final, Literal

import torch
import triton
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
from backstamp.relaunch import Codes, alignments, launch
from backstamp.repeated_linear_calls import LinearCallChecks
from backstamp_linear_attn.recurrence import advance_rows
from backstamp_linear_attn.token_slots import longest_row

__all__ = ["RowsStep", "TritonRows", "blocks_of"]

#: Numbers of state and warps of a program. Keys last: one warp, so that no sum leaves it, and 32 registers a thread;
#: twice of both is 8 to 11% slower, half the numbers 1% (H200, fp32, 32 to 512 rows).
#: Values last: lines of 64 values, 0.83 to 0.88; narrower ones read parts of lines, 0.64 to 0.84.
_BLOCKS: Final[dict[str, tuple[int, int]]] = {"vk": (1024, 1), "kv": (8192, 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsStep:
    """One planned step.

    Attributes:
        many: whether a row may have more than one token.
        what: its launch in words, for the notice of a first compile.
        codes: what its first layers were compiled to, for those that follow.
    """

    batch: LinearBatch
    form: LinearForm
    many: bool
    what: str
    codes: Codes = field(default_factory=dict, compare=False)


class TritonRows:
    """The backend of one group of linear layers, of either family."""

    def __init__(self, request: BuildRequest) -> None:
        check_linear_build(request)
        on_cpu = request.device.partition(":")[0] == "cpu"
        if on_cpu and isinstance(advance_rows, triton.runtime.JITFunction):
            needed = "a CUDA or ROCm GPU, or Triton's interpreter (TRITON_INTERPRET=1 before triton is imported)"
            raise linear_refusal(request, "device", needed, request.device)
        self._request = request
        self._check_call = LinearCallChecks(request)
        self._compiles = Announcer("triton")

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step refers to the batch's own tensors."""

    def plan(self, batch: LinearBatch, *, state: RowsStep | None = None, capture: bool = False) -> RowsStep:
        """Check the step; with `state`, copy what lies elsewhere into the tensors it was planned with.

        Raises:
            UnsupportedBatch: a field the row does not take, or another launch than the recorded one.
        """
        form = check_linear_batch(self._request, batch, capture=capture)
        tree = "" if batch.parents is None else ", tree"
        what = f"{self._request.family} {batch.phase} {self._request.dtype}, {form}{tree}"
        longest = longest_row(batch)
        step = RowsStep(batch=batch, form=form, many=longest is None or longest > 1, what=what)
        return step if state is None else self._refresh(state, step)

    def replan(self, state: RowsStep) -> None:
        """Nothing to do on the device: the kernel reads the batch's tensors itself."""

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
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if batch.num_tokens == 0:
            return out
        bound = gates.lower_bound if isinstance(gates, RawGates) else None
        channels = self._request.family == "kda"
        a, b = (gates.a, gates.b) if isinstance(gates, RawGates) else (gates.g, gates.beta)
        if channels and a.stride(-1) != 1:
            a = a.contiguous()
        kept, table, parents = batch.intermediate, batch.slot_table, batch.parents
        block_k, block_v, num_warps = blocks_of(layer.head_dim, layer.v_head_dim, pool.order)
        rate, bias = None, None
        if isinstance(gates, RawGates):
            rate, bias = gates.A_log.contiguous(), gates.dt_bias.contiguous()
        pool_strides = pool.ssm.stride()
        strides = (
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *a.stride()[:2], *b.stride()[:2]),
            *(*out.stride()[:2], *pool_strides[:2]),
        )
        like = (
            *(layer.num_kv_heads, layer.num_qo_heads, layer.head_dim, layer.v_head_dim, pool.order, bound is None),
            *(strides, pool_strides[2]),
            # q, k, v and out have the dtype that was built for
            *(a.dtype, b.dtype, pool.ssm.dtype, slots.dtype, None if rate is None else rate.dtype),
            *(None if bias is None else bias.dtype, alignments(q, k, v, a, b, rate, bias, out, pool.ssm, slots)),
        )
        with self._compiles.first(state.what):
            launch(
                advance_rows,
                state.codes,
                like,
                ((batch.num_rows + 1) * layer.num_kv_heads * -(-layer.v_head_dim // block_v), 1, 1),
                (
                    *(q, k, v, a, b, rate, bias, out, pool.ssm, kept),
                    batch.qo_indptr,
                    slots,
                    table,
                    batch.num_accepted,
                    parents,
                    batch.num_rows,
                    batch.num_tokens,
                    # a whole number would be a constant of the code
                    float(layer.scale),
                    float(bound or 0.0),
                    *strides,
                    *((0, 0, 0) if kept is None else kept.stride()[:3]),
                    0 if table is None else table.stride(0),
                    0 if table is None else table.shape[1],
                    0 if parents is None else parents.stride(0),
                ),
                lambda: {
                    "POOL_LINE": pool_strides[2],
                    "KEPT_LINE": 0 if kept is None else kept.stride(3),
                    "HEADS": layer.num_kv_heads,
                    "SHARED": layer.num_kv_heads // layer.num_qo_heads,
                    "K": layer.head_dim,
                    "V": layer.v_head_dim,
                    "BLOCK_K": block_k,
                    "BLOCK_V": block_v,
                    "V_FIRST": pool.order == "vk",
                    "CHANNELS": channels,
                    "RAW": rate is not None,
                    "BOUNDED": bound is not None,
                    "FORM": state.form,
                    "TREE": parents is not None,
                    "MANY": state.many,
                },
                num_warps=num_warps,
            )
        return out

    def _refresh(self, state: RowsStep, fresh: RowsStep) -> RowsStep:
        old, new = state.batch, fresh.batch
        if fresh.many and not state.many:
            needed = "1, as the recorded step has it; plan a new state"
            raise linear_refusal(self._request, "max_q_len", needed, str(new.max_q_len), new.phase)
        copies: list[tuple[Tensor, Tensor]] = []
        for of in fields(LinearBatch):
            # a launch depends on whether a row may have many tokens, and not on how many
            if of.name in ("qo_indptr_host", "max_q_len", "phase"):
                continue
            kept: object = getattr(old, of.name)
            given: object = getattr(new, of.name)
            if isinstance(kept, Tensor) and isinstance(given, Tensor) and kept.shape == given.shape:
                same = kept.data_ptr() == given.data_ptr()
                if same and _steps(kept) == _steps(given):
                    continue
                # another view of the same memory would be copied onto itself
                if of.name != "intermediate" and not same:
                    copies.append((kept, given))
                    continue
            elif not isinstance(kept, Tensor) and not isinstance(given, Tensor) and kept == given:
                continue
            needed = "as the recorded step has it; plan a new state"
            raise linear_refusal(self._request, of.name, needed, "another", new.phase)
        # nothing is copied of a step that is refused
        for kept_at, values in copies:
            kept_at.copy_(values)
        return state


# kept: Triton's own arithmetic on whole numbers takes the host as long as a check of the call
@functools.lru_cache(maxsize=64)
def blocks_of(head_dim: int, v_head_dim: int, order: Literal["vk", "kv"]) -> tuple[int, int, int]:
    """Key channels, value channels and warps of one program."""
    block_k = triton.next_power_of_2(head_dim)
    numbers, warps = _BLOCKS[order]
    return block_k, min(max(numbers // block_k, 1), triton.next_power_of_2(v_head_dim)), warps


def _steps(tensor: Tensor) -> list[int]:
    """Strides that say where an entry lies: those of more than one."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
