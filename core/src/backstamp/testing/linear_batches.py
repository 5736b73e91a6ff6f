"""Random steps of linear attention for tests: a pool of scattered slots, a `LinearBatch` over it, tokens and gates.

In: query lengths a row, and what the step has. Out: a `MadeLinearStep` for `reference_linear` and for any backend.
Every slot that no row may read holds NaN, so a kernel that reads one shows it. The same arguments give the same
numbers on every device.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from backstamp.attention import ComputedGates, LayerSpec, LinearBatch, RawGates, StatePool
from backstamp.declarations import Phase
from backstamp.linear_gates import computed_gates

__all__ = ["SMALL_LINEAR_LAYER", "MadeLinearStep", "linear_layer", "make_linear_step"]


class _Random(Protocol):
    def __call__(self, *shape: int) -> Tensor:
        """Normal numbers of a shape, fp32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeLinearStep:
    """One step: tokens, gates, the batch, the layer and the pool of its states."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: RawGates | ComputedGates
    batch: LinearBatch
    layer: LayerSpec
    pool: StatePool


def linear_layer(key_heads: int, value_heads: int, head_dim: int, v_head_dim: int, layer_id: int = 0) -> LayerSpec:
    """A linear layer: H key heads of K, HV value heads of V, queries scaled by `K ** -0.5`."""
    return LayerSpec(
        layer_id=layer_id,
        num_qo_heads=key_heads,
        num_kv_heads=value_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        scale=head_dim**-0.5,
    )


#: Two value heads a key head, keys and values of unlike width: a swapped order or head shows.
SMALL_LINEAR_LAYER = linear_layer(2, 4, 16, 32)


def make_linear_step(
    q_lens: Sequence[int],
    *,
    family: Literal["gdn", "kda"] = "gdn",
    phase: Phase = "prefill",
    layer: LayerSpec = SMALL_LINEAR_LAYER,
    order: Literal["vk", "kv"] = "vk",
    has_state: Sequence[bool] | None = None,
    pads: Sequence[int] = (),
    form: Literal["slot_table", "intermediate"] = "intermediate",
    parents: Sequence[Sequence[int]] | None = None,
    num_accepted: Sequence[int] | None = None,
    raw_gates: bool = True,
    lower_bound: float | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    pad_tokens: int = 0,
    host_lens: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> MadeLinearStep:
    """Build a step of `len(q_lens)` rows; rows named in `pads` have slot -1, `pad_tokens` belong to no row.

    `form`, `parents` and `num_accepted` are read in verify only. With `lower_bound`, the decay is bounded by it.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, total = len(q_lens), sum(q_lens) + pad_tokens

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    stateful = [True] * rows if has_state is None else list(has_state)
    width = max([*q_lens, 1])
    # unused slots lie between used ones
    num_slots = 2 * rows * (width if phase == "verify" and form == "slot_table" else 1) + 2
    order_of_slots = torch.randperm(num_slots, generator=generator)
    slots = torch.where(torch.tensor([row in pads for row in range(rows)], dtype=torch.bool), -1, order_of_slots[:rows])
    table = accepted = intermediate = None
    if phase == "verify" and form == "slot_table":
        table = order_of_slots[: rows * width].view(rows, width).clone()
        table[list(pads)] = -1
        accepted = torch.tensor(list(num_accepted) if num_accepted is not None else [1] * rows, dtype=torch.int32)
        read = [int(table[row, at - 1]) if 1 <= at <= width else -1 for row, at in enumerate(accepted.tolist())]
    else:
        read = [int(slots[row]) if stateful[row] or phase != "prefill" else -1 for row in range(rows)]
        if phase == "verify":
            intermediate = torch.full((rows + 1, width, layer.num_kv_heads, *_inner(layer, order)), float("nan"))
    ssm = torch.full((num_slots, layer.num_kv_heads, *_inner(layer, order)), float("nan"))
    for slot in read:
        if slot >= 0:
            ssm[slot] = random(layer.num_kv_heads, *_inner(layer, order))
    raw = _raw_gates(family, layer, total, dtype, random)
    raw = replace(raw, lower_bound=lower_bound)
    gates: RawGates | ComputedGates = raw if raw_gates else computed_gates(raw)
    offsets = torch.tensor([0, *torch.tensor(list(q_lens), dtype=torch.int32).cumsum(0).tolist()], dtype=torch.int32)
    batch = LinearBatch(
        phase=phase,
        num_rows=rows,
        num_tokens=total,
        qo_indptr=offsets.to(device),
        slots=slots.to(device, torch.int32),
        has_state=torch.tensor(stateful, dtype=torch.bool).to(device),
        qo_indptr_host=offsets if host_lens else None,
        max_q_len=max(q_lens, default=0),
        slot_table=None if table is None else table.to(device, torch.int32),
        num_accepted=None if accepted is None else accepted.to(device),
        intermediate=None if intermediate is None else intermediate.to(device, state_dtype),
    )
    if parents is not None:
        filled = [[*row, *[-1] * (width - len(row))] for row in parents]
        batch = replace(batch, parents=torch.tensor(filled, dtype=torch.int32).to(device))
    return MadeLinearStep(
        q=random(total, layer.num_qo_heads, layer.head_dim).to(device, dtype),
        k=random(total, layer.num_qo_heads, layer.head_dim).to(device, dtype),
        v=random(total, layer.num_kv_heads, layer.v_head_dim).to(device, dtype),
        gates=_on(gates, device),
        batch=batch,
        layer=layer,
        pool=StatePool(ssm=ssm.to(device, state_dtype), order=order),
    )


def _inner(layer: LayerSpec, order: str) -> tuple[int, int]:
    return (layer.v_head_dim, layer.head_dim) if order == "vk" else (layer.head_dim, layer.v_head_dim)


def _raw_gates(family: str, layer: LayerSpec, total: int, dtype: torch.dtype, random: _Random) -> RawGates:
    heads = layer.num_kv_heads
    channels = (layer.head_dim,) if family == "kda" else ()
    return RawGates(
        a=random(total, heads, *channels).to(dtype),
        b=random(total, heads).to(dtype),
        # decays of some tens of tokens down to a few, as trained models have
        A_log=random(heads).sub(1.0),
        dt_bias=random(heads, *channels).mul(0.5),
    )


def _on(gates: RawGates | ComputedGates, device: str) -> RawGates | ComputedGates:
    if isinstance(gates, ComputedGates):
        return ComputedGates(g=gates.g.to(device), beta=gates.beta.to(device))
    a, b, rate, bias = (tensor.to(device) for tensor in (gates.a, gates.b, gates.A_log, gates.dt_bias))
    return replace(gates, a=a, b=b, A_log=rate, dt_bias=bias)
