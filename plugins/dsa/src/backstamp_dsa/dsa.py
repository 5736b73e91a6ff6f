"""DeepSeek sparse attention over one latent cache: checks a step, turns a selection into slots, calls a kernel.

In: a `BuildRequest`, then the contract's batches, caches, queries and `indices [T, topk]` i32 in request space. Out:
attention over the chosen keys. A choice that is -1, past the row or ahead of a causal token is masked, whoever made
it. The object holds workspaces, never the current batch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, check_build, refusal
from backstamp_dsa.indexer import DsaIndexer
from backstamp_dsa.queries import nothing_seen
from backstamp_dsa.settings import SEED, Inside
from backstamp_dsa.slots import INDEX_SPACE, find_slots, padded
from backstamp_dsa.steps import Slots, SparseStep, renew

__all__ = ["DsaAttention", "SparseKernel"]


class SparseKernel(Protocol):
    """One way to attend over chosen slots of a cache of one layout."""

    def slots_per_page(self, kv: PagedKV) -> int:
        """How many slots lie between the starts of two pages."""
        ...

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        kv: PagedKV,
        chosen: Slots,
        layer: LayerSpec,
        step: SparseStep,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write outputs `[T, Hq, Dv]` and, where asked, natural-log LSE `[T, Hq]`."""
        ...


class DsaAttention:
    """The attention object of kernel `dsa`; its indexer is the second object of the same kernel.

    Attributes:
        index_space: what `indices` count: positions within a token's own request.
        indexer: chooses `indices` from index keys; the engine may choose them otherwise.
        by_phase: the implementation that serves each phase, "library" or "triton".
    """

    def __init__(self, request: BuildRequest, inside: Inside, kernels: dict[str, SparseKernel]) -> None:
        check_build(request)
        self.index_space = INDEX_SPACE
        self.indexer = DsaIndexer(request)
        self.by_phase = inside.by_phase
        self.seeded = inside.seeded
        self._kernels = kernels
        self._request = request
        self._check_call = CallChecks(request)
        self._compiles = Announcer("dsa")

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step refers to the batch's own tensors."""

    def plan(self, batch: Batch, *, state: SparseStep | None = None, capture: bool = False) -> SparseStep:
        """Check the batch; with `state`, give a planned step its values at the same addresses.

        Raises:
            UnsupportedBatch: the batch asks for what the row does not declare.
        """
        form = check_batch(self._request, batch, capture=capture)
        if state is None:
            return SparseStep(batch, form)
        renew(self._request, state.batch, state.form, batch, form)
        state.seed = None
        return state

    def replan(self, state: SparseStep) -> None:
        """Nothing to do on the device: kernels read the batch's tensors themselves."""

    def seed_of(self, indices: Tensor, last: Tensor) -> Tensor:
        """Draft extend: the choice of keys of each row's last accepted token, `[B, topk]` i32 of its own.

        `indices [T, topk]` is what this step attended over, `last [B]` i64 the token of each row. Positions do not
        move when tokens are appended, so the choice stays good for the draft loop that follows.

        Raises:
            UnsupportedBatch: the operator did not ask for seeded drafts.
        """
        self._check_seeded()
        return indices.index_select(0, last)

    def use_seed(self, state: SparseStep, seed: Tensor) -> None:
        """Draft decode: attend over `seed [B, topk]` i32 in this step instead of choosing keys anew.

        Every step of the loop may take the same seed: SGLang's steps share one choice. Rows of a step hold one token
        each, in the order of the seed's rows.

        Raises:
            UnsupportedBatch: the operator did not ask for it, another phase than draft decode, or another shape.
        """
        self._check_seeded()
        batch = state.batch
        if batch.phase != "draft_decode":
            raise refusal(self._request, "seed", "a draft_decode step", f"a {batch.phase} step", phase=batch.phase)
        if seed.dim() != 2 or seed.shape[0] != batch.num_tokens or seed.dtype is not torch.int32:
            found = f"{list(seed.shape)} {seed.dtype}"
            raise refusal(self._request, "seed", f"[{batch.num_tokens}, topk] torch.int32", found, phase=batch.phase)
        state.seed = seed

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: SparseStep,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer over `indices`, or over the seed of a seeded draft step."""
        batch = state.batch
        if indices is None:
            indices = state.seed
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        if indices is None or kv is None:
            missing = "indices" if kv is not None else "kv"
            raise refusal(self._request, missing, "a tensor: this kernel attends over chosen keys of a cache", "None")
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        served_by = self.by_phase[batch.phase]
        kernel = self._kernels[served_by]
        slots_per_page = kernel.slots_per_page(kv)
        with self._compiles.first(served_by, self._request.dtype, state.form):
            chosen = find_slots(
                state,
                indices=indices,
                width=padded(indices.shape[1]),
                entries_per_page=self._request.page_size,
                slots_per_page=slots_per_page,
            )
            kernel.attend(q, q_rope, kv, chosen, layer, state, out, lse)
        return out

    def _check_seeded(self) -> None:
        if not self.seeded:
            flag = "--" + SEED.replace("_", "-")
            raise refusal(self._request, "seed", f"a launch with {flag}", "none", fix=f"Set {flag}")
