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

    The order is the state layout the plan settled on, and never guessed: with K == V a swapped pair has the right shape
    and wrong values. The short convolution and its windows are the engine's own: a kernel leaves `conv` alone.
    """

    ssm: Tensor
    order: Literal["vk", "kv"]
    conv: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RawGates:
    """Gate inputs before activation: `g = -exp(A_log) * softplus(a + dt_bias)`, `beta = sigmoid(b)`.

    Gated delta net: `a`, `b [T, HV]`, `A_log`, `dt_bias [HV]`. Kimi delta attention, whose key channels decay each by
    their own: `a [T, HV, K]`, `b [T, HV]`, `A_log [HV]`, `dt_bias [HV, K]` or `[HV * K]`.

    Attributes:
        lower_bound: of models whose decay is bounded (Kimi K3), a negative number of log space: then
            `g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))`. None elsewhere, and in every gated delta net.

    Source of the bound: fla-core 0.6.0 ops/kda/gate.py; SGLang 0.5.23 models/kimi_k3.py, `gate_lower_bound`.
    """

    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedGates:
    """Gates ready for use: `g` f32 natural-log decay, `[T, HV]` (gated delta net) or `[T, HV, K]` (Kimi delta
    attention); `beta [T, HV]`, after the sigmoid."""

    g: Tensor
    beta: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearBatch:
    """One step of a linear-attention group.

    Verify comes in one of two forms. `slot_table [B, W]` with `num_accepted [B]`: row b starts from the state in
    `slot_table[b, num_accepted[b] - 1]` and the state after its token i is written to `slot_table[b, i]`, -1 not at
    all; a row that starts from -1 is a pad, and `slots` is not read. `num_accepted` counts the tokens the row kept of
    its last step, the bonus token included, so that a live row has 1 to W; a row with any other count is a pad too.

    Or `intermediate [n, S, HV, V, K]` (its last two in the pool's order) with tree `parents [B, S]`: row b starts from
    `slots[b]`, the state after its token i is written to `intermediate[b, i]`, the pool stays as it is, and the engine
    commits after acceptance. `parents[b, i]` is the earlier token of the row that token i follows, negative where it
    follows the row's own state; without parents the tokens are a chain.

    Attributes:
        slots: `[B]` i32 state slots, -1 pad: no state is read or written, outputs are finite.
        has_state: `[B]` bool, False starts from zero, whatever its slot holds. Rows of decode and verify have a state;
            a kernel need not read it there.
        qo_indptr, qo_indptr_host: `[B+1]` i32 and its CPU mirror. Tokens past its last entry are padding: finite out.
        max_q_len: upper bound in tokens of a row. Verify without `qo_indptr_host` needs it: no row may have more
            tokens than places for their states, S or W.

    Source: vLLM 0.32 gdn_attn.py, fla-core 0.6.0 ops/kda/fused_recurrent.py (`num_accepted_tokens`); SGLang 0.5.23
    hybrid_linear_attn_backend.py (`intermediate_ssm`, `retrieve_parent_token`).
    """

    phase: Phase
    num_rows: int
    num_tokens: int
    qo_indptr: Tensor
    slots: Tensor
    has_state: Tensor
    qo_indptr_host: Tensor | None = None
    max_q_len: int | None = None
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
        """Run one layer's recurrence: `q`, `k [T, H, K]`, `v [T, HV, V]` to `out [T, HV, V]`; states in place.

        `q`, `k` and `v` come from the engine's short convolution as they are. The kernel divides each head of `q` and
        `k` by its L2 norm, `x / sqrt(sum(x * x) + 1e-6)`, and multiplies `q` by `layer.scale`. Value head i reads key
        head `i // (HV // H)`. A token's state is `S * exp(g)`, then `S + beta * (v - S k) k^T`; it is read after its
        own update. `layer.num_qo_heads` is H, `layer.num_kv_heads` HV. `slots [B]` are this layer's, the batch's own
        where layers share them. Source: SGLang 0.5.23 gdn_backend.py and vLLM 0.32 qwen_gdn_linear_attn.py, which
        both pass `use_qk_l2norm_in_kernel=True`; eps of fla-core 0.6.0 and flashinfer 0.7.4.
        """
        ...
