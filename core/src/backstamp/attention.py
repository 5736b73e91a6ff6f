"""The call contract: what an engine hands a built backend each step and each layer.

In: tensors the engine already owns, described by `Batch`, `PagedKV`, `RaggedKV` and `LayerSpec`. Out: attention
outputs written in place. These types carry no behaviour beyond a few readings of their own fields, import no torch at
run time, and never hold "the current batch" on a backend.

Letters used for shapes: B rows (requests) of the step, T query tokens, P pages of the cache, W width of a page table,
N cached or ragged tokens, Hq query heads, Hk key/value heads, Dk and Dv key and value head dims, S verify tokens.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from backstamp.linear_contract import ComputedGates, LinearBackend, LinearBatch, RawGates, StatePool

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.declarations import Phase

__all__ = [
    "AttentionBackend",
    "Batch",
    "ComputedGates",
    "DraftContainer",
    "GraphBackend",
    "KVIndex",
    "LayerSpec",
    "LinearBackend",
    "LinearBatch",
    "PagedKV",
    "ParameterBackend",
    "RaggedKV",
    "RawGates",
    "StatePool",
    "TreeMask",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVIndex:
    """Where each row's cached tokens lie, in at least one of three forms.

    The offer's `index_forms` say which forms a kernel reads; an adapter builds only those, once a step. Entries past
    `ceil(kv_len / page_size)` may be stale or -1 and are never read.

    - page table: `page_table [B, W]` i32 page ids;
    - CSR: `kv_indptr [B+1]` i32 over `kv_indices [N]` i32 or i64 page ids (page_size 1: token slots);
    - indirect: `table [R, W]` i32 page ids and `row_ids [B]` i64; row b reads `table[row_ids[b]]`.
    """

    page_size: int
    page_table: Tensor | None = None
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None
    table: Tensor | None = None
    row_ids: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMask:
    """Which of this step's tokens each verify token sees; it replaces the causal rule for them, nothing else.

    Tokens before this step (the prefix) are visible to every verify token. A token's logical position is the prefix
    length plus the number of tree tokens it sees, less one; sliding windows count from that position. The target's
    backend owns `buffer` and a tree kernel may fill it after `plan`, so a backend reads it in `forward` or `replan`.
    A prefill may bring one too: a mask of the engine's caller, under which a token may see later ones.

    - `full`: bool, flat, row b occupies `[q_len_b, kv_len_b]` from element `indptr[b]`;
    - `qlen`: bool `[B, S, S]`, only this step's tokens, `indptr` None;
    - `packed`: uint8, the bits of `full`, little-endian within a byte; row b starts at byte `indptr[b]`.
    """

    kind: Literal["full", "qlen", "packed"]
    buffer: Tensor
    indptr: Tensor | None = None


class _Remembered:
    """What a built object may remember without keeping it alive; `weakref_slot` came with Python 3.11."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(_Remembered):
    """One KV group's share of one step; every tensor is the engine's own or an adapter buffer of fixed address.

    Token i of row b has position `kv_lens[b] - q_len_b + i`: `kv_lens` counts the readable tokens and this step's
    (rank-local under decode context parallelism). Causal means a token sees positions up to its own.

    Attributes:
        phase: one of the five phases; a mixed step is split or served whole by prefill (`backstamp.forward`).
        causal: one answer for all rows, or `[B]` i32 with 1 for causal rows.
        num_rows, num_tokens: padded sizes B and T.
        max_q_len, max_kv_len: upper bounds in tokens, constant per CUDA-graph key.
        num_decode_rows, num_decode_tokens: leading rows that are decode rows, and their tokens; 0 when not split.
        decode_q_len: query length of every leading decode row; None when ragged.
        qo_indptr: `[B+1]` i32, exclusive cumulative query lengths.
        kv_lens: `[B]` i32.
        index: where cached tokens lie.
        kv_starts: `[B]` i32 first visible position of each row (left padding), or None.
        slot_mapping: `[T]` i64 token slots to write, -1 do not write; read only by `fused_write` kernels.
        qo_indptr_host, kv_lens_host: i32 CPU mirrors or None; `host_exact` False makes them upper bounds.
        token_rows: `[T]` i32 row of each token, supplied only where an offer's inputs ask for it.
        tree: the verify tree or None.
    """

    phase: Phase
    num_rows: int
    num_tokens: int
    max_q_len: int
    max_kv_len: int
    qo_indptr: Tensor
    kv_lens: Tensor
    index: KVIndex
    causal: bool | Tensor = True
    num_decode_rows: int = 0
    num_decode_tokens: int = 0
    decode_q_len: int | None = None
    kv_starts: Tensor | None = None
    slot_mapping: Tensor | None = None
    qo_indptr_host: Tensor | None = None
    kv_lens_host: Tensor | None = None
    host_exact: bool = True
    token_rows: Tensor | None = None
    tree: TreeMask | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV(_Remembered):
    """One layer's cache: views `[P, page_size, Hk, D]` with any strides but `stride(-1) == 1`.

    `v` None means the values lie inside `k` (MLA: `k[..., :v_head_dim]`). In layers of family csa both hold keys and
    values in one: `k` the plain entries, `v` the compressed ones, `[P, page_size / rate, Hk, D]`, or None. `layout`
    "rows" is this plain form; any packed form is a layout id of its own, and only an offer that declares that id may
    read it.
    """

    k: Tensor
    v: Tensor | None
    layout: str = "rows"
    k_scale: float | Tensor | None = None
    v_scale: float | Tensor | None = None
    k_sf: Tensor | None = None
    v_sf: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedKV:
    """Keys and values that lie in no cache: `k [N, Hk, Dk]`, `v [N, Hk, Dv]`, `kv_indptr [B+1]` i32."""

    k: Tensor
    v: Tensor
    kv_indptr: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec(_Remembered):
    """What one attention layer is, as a kernel needs to know it.

    Attributes:
        layer_id: index of the layer in its component.
        group: KV group the layer belongs to; layers of a group share one `Batch`.
        head_dim, v_head_dim: Dk and Dv (MLA absorbed: 576 and 512).
        scale: factor on the logits, linear.
        window_left: visible keys before self, -1 none (a Hugging Face window of W tokens counts self: W - 1).
        softcap: logits become `softcap * tanh(logits / softcap)`; 0.0 none.
        sinks: `[Hq]` one extra logit a head in the softmax denominator, or None.
        alibi: `[Hq]` f32 slopes or None.
        shares_kv_of: layer whose cache this layer reads instead of writing its own.
        component: "main", "vision", "audio" or "cross_attention", as the plan's groups name it.
    """

    layer_id: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    group: int = 0
    window_left: int = -1
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    attn_type: Literal["decoder", "encoder", "cross"] = "decoder"
    shares_kv_of: int | None = None
    component: str = "main"


State = TypeVar("State")


class AttentionBackend(Protocol[State]):
    """What every built attention backend offers; a backend holds workspaces, never the current batch."""

    def plan(self, batch: Batch, *, state: State | None = None, capture: bool = False) -> State:
        """Do the host half of a step for one KV group and return what `forward` needs.

        With `state` the same addresses get new values (CUDA-graph replay); with `capture` nothing may depend on host
        values that change between replays. Raises an `UnsupportedBatch` when the batch asks for what the kernel does
        not declare: nothing is dropped in silence.
        """
        ...

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: State,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer: `q [T, Hq, Dk]` to `out [T, Hq, Dv]`, written in place and returned.

        `lse [T, Hq]` f32 any strides receives the natural-log sum of exponentials, -inf where nothing is seen; with
        sinks it is refused, because whoever merges parts adds the sink once. `new` carries this step's tokens when
        the cache does not hold them yet (the cache then holds `kv_lens - q_lens`); `kv` is None when there is no
        cache at all. `q_rope [T, Hq, Dr]` is the rotary part of an absorbed MLA query passed apart. `indices
        [T, topk]` i32 selects keys, -1 none. `tree`, `new` and `indices` reach only offers that declare them.
        """
        ...


class GraphBackend(AttentionBackend[State], Protocol[State]):
    """The optional members of a backend that runs inside CUDA graphs."""

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Allocate every buffer `plan` writes, at its final size."""
        ...

    def replan(self, state: State) -> None:
        """Do the device half of `plan`: recordable in a graph, no host sync, no allocation."""
        ...


class ParameterBackend(AttentionBackend[State], Protocol[State]):
    """The optional member of a backend that keeps converted copies of parameters (sinks of another dtype)."""

    def refresh_parameters(self) -> None:
        """Convert them anew: to be called after weights were reloaded in a way that ticks no counter, as
        `param.data.copy_()`."""
        ...


class DraftContainer(Protocol[State]):
    """The per-step backends of a multi-step draft loop: `num_steps - 1` of them, in step order."""

    attn_backends: Sequence[AttentionBackend[State]]

    def plan(self, batches: Sequence[Batch]) -> list[State]:
        """Plan every step: batch i holds the B * topk rows of step i, each one query over prefix + i + 1 tokens."""
        ...
