"""The linear-attention part of the call contract: recurrent states, gates, and the calls on them.

In: tensors the engine owns. Out: outputs written in place, states updated in place. Re-exported by
`backstamp.attention`, which engines import. Letters: B rows, T tokens, N state slots, H key heads, HV value heads,
K and V key and value head dims, S verify tokens.

.. versionadded:: 0.1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.attention import LayerSpec
    from backstamp.declarations import Phase

__all__ = ["ComputedGates", "LinearBackend", "LinearBatch", "RawGates", "StatePool"]

State = TypeVar("State")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePool:
    """Recurrent states of one linear layer: `ssm [N, HV, V, K]` (order vk) or `[N, HV, K, V]` (kv), conv windows.

    The order is declared and never guessed: with K == V a swapped pair has the right shape and wrong values.
    """

    ssm: Tensor
    order: Literal["vk", "kv"]
    conv: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGates:
    """Gate inputs before activation: `a`, `b [T, HV]`, `A_log`, `dt_bias [HV]`."""

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedGates:
    """Gates ready for use: `g [T, HV]` f32 natural-log decay, `beta [T, HV]`."""

    g: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearBatch:
    """One step of a linear-attention group.

    Verify comes in one of two forms: `slot_table [B, 1+S]` with `num_accepted [B]` (each state written to its own
    slot), or `intermediate [n, S, HV, V, K]` with tree `parents [B, S]`, where the engine commits after acceptance.

    Attributes:
        slots: `[B]` i32 state slots, -1 pad.
        has_state: `[B]` bool, False starts from zero.
        qo_indptr, qo_indptr_host: `[B+1]` i32 and its CPU mirror.
    """

    phase: Phase
    num_rows: int
    num_tokens: int
    qo_indptr: Tensor
    slots: Tensor
    has_state: Tensor
    qo_indptr_host: Tensor | None = None
    slot_table: Tensor | None = None
    num_accepted: Tensor | None = None
    intermediate: Tensor | None = None
    parents: Tensor | None = None


class LinearBackend(Protocol[State]):
    """What a built linear-attention backend offers."""

    def plan(self, batch: LinearBatch, *, state: State | None = None, capture: bool = False) -> State:
        """Do the host half of a step for one linear group."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: RawGates | ComputedGates,
        layer: LayerSpec,
        state: State,
        *,
        pool: StatePool,
        slots: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run one layer's recurrence: `q`, `k [T, H, K]`, `v [T, HV, V]` to `out [T, HV, V]`; states in place."""
        ...
