"""What both kernels do the same way: the state of a planned step, and a layer call's checks and empty output.

In: a batch and the request an object was built for. Out: a `StepState` that keeps a view of each kind of layer met so
far, and an output every token of which is written. How a view looks is each kernel's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.step_checks import check_batch, check_call
from backstamp_cpu.checks import check_scales
from backstamp_cpu.rows import NewOffsets, StepRows, read_rows

__all__ = ["StepState", "open_output", "plan_step"]

View = TypeVar("View")


@dataclass(slots=True)
class StepState(Generic[View]):
    """One planned step; `views` holds one entry for each kind of layer met so far, made when first met."""

    batch: Batch
    rows: StepRows
    offsets: NewOffsets = field(default_factory=NewOffsets)
    views: dict[tuple[int, bool, tuple[int, ...] | None], View] = field(default_factory=dict)


def plan_step(request: BuildRequest, batch: Batch, state: StepState[View] | None, capture: bool) -> StepState[View]:
    """Read the step's row numbers; syncs where the host mirrors are missing or inexact.

    Raises:
        UnsupportedBatch: the batch asks for what the object was not built for.
    """
    check_batch(request, batch, capture=capture, row_causal=True, left_padding=True)
    rows = read_rows(batch)
    if state is None:
        return StepState(batch, rows)
    # whoever kept the state sees the new step, as the contract says
    state.batch, state.rows, state.offsets, state.views = batch, rows, NewOffsets(), {}
    return state


def open_output(
    request: BuildRequest,
    q: Tensor,
    kv: PagedKV | None,
    layer: LayerSpec,
    state: StepState[View],
    *,
    out: Tensor | None,
    lse: Tensor | None,
    new: RaggedKV | None,
    q_rope: Tensor | None,
    indices: Tensor | None,
) -> Tensor:
    """Check one layer's call and answer `out [T, Hq, Dv]`, zeros, with `lse` -inf: what a token that sees nothing gets.

    Raises:
        UnsupportedBatch: a shape, dtype, layout or option the kernel does not serve.
    """
    batch = state.batch
    check_call(request, q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
    if kv is not None:
        check_scales(request, kv, batch)
    if out is None:
        out = q.new_empty(batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
    out.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))
    return out
