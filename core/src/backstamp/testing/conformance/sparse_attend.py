"""A case of sparse attention run by a built backend and held against its reference.

In: a case, the device, and what was built for it. Out: the tensors of one step with what its tokens chose, and what is
wrong: a line of words, empty where nothing is. A choice that is -1, past the row or ahead of its token is no key.

.. versionadded:: 0.2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch
from torch import Tensor

from backstamp.attention import AttentionBackend, Batch, DraftContainer, GraphBackend, KVIndex, PagedKV
from backstamp.testing.batches import MadeStep, make_batch
from backstamp.testing.conformance import attend
from backstamp.testing.conformance.replays import replay, synchronize
from backstamp.testing.conformance.sparse_cases import SparseCase
from backstamp.testing.conformance.subject import Skipped
from backstamp.testing.conformance.verdicts import Answer, wrong
from backstamp.testing.packed_latent import FORMATS, pack, unpack
from backstamp.testing.sparse_reference import (
    reference_compressed,
    reference_indexer,
    reference_sparse,
    reference_topk,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "SparseStep",
    "chosen_by_indexer",
    "faults_of_sparse",
    "make_sparse_step",
    "sparse_answer",
    "sparse_answer_of_graph",
]

#: Share of the reference's choices of keys that an indexer of half precision must find; the others tie with them.
_INDEX_SHARE: Final = 0.99
_HOLES: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseStep:
    """One step, its cache as the bytes read (the same where they are rows), and `indices [T, topk]` i32 or None."""

    step: MadeStep
    read: PagedKV
    indices: Tensor | None


class _Indexer(Protocol):
    def select(self, q: Tensor, weights: Tensor, keys: PagedKV, state: object, topk: int) -> Tensor: ...


def make_sparse_step(case: SparseCase, device: str, seed: int = 0) -> SparseStep:
    """The case's tensors; the same seed gives the same numbers, pages and choices on every device.

    Raises:
        Skipped: a layout the kit cannot write.
    """
    packed = case.layout in FORMATS
    if case.layout != "rows" and not packed:
        raise Skipped(f"the kit cannot write a cache of layout {case.layout!r}")
    step = attend.make_step(replace(case, kv_dtype="same") if packed else case, device, seed)
    if case.rate:
        step = replace(step, kv=replace(step.kv, v=_compressed(case, step, seed)))
    indices = _chosen(case, step, seed)
    if packed:
        k, v = pack(step.kv.k, case.layout), None if step.kv.v is None else pack(step.kv.v, case.layout)
        read = PagedKV(k=unpack(k, case.layout), v=None if v is None else unpack(v, case.layout))
        step = replace(step, kv=PagedKV(k=k, v=v, layout=case.layout))
        return SparseStep(step=step, read=read, indices=indices)
    scale = step.kv.k_scale
    read = step.kv if scale is None else PagedKV(k=step.kv.k.float() * scale, v=step.kv.v)
    return SparseStep(step=step, read=read, indices=indices)


def faults_of_sparse(backend: object, case: SparseCase, made: SparseStep, accuracy: str = "exact") -> str:
    """Plan and run a step, a captured one, or the steps of a draft loop; what is wrong, empty where all is right."""
    if hasattr(backend, "attn_backends"):
        return _faults_of_loop(cast("DraftContainer[object]", backend), case, made, accuracy)
    if case.indexer:
        made, words = chosen_by_indexer(backend, case, made)
        if words:
            return words
    answer = sparse_answer_of_graph(backend, case, made) if case.graph else sparse_answer(backend, case, made)
    return wrong(answer.out, answer.truth, case, accuracy, lse=answer.lse, true_lse=answer.true_lse)


def sparse_answer(backend: object, case: SparseCase, made: SparseStep, *, dtype: torch.dtype = torch.float64) -> Answer:
    """Plan a step and run it twice, as layers do: a library may fill a schedule in the first call and read it in the
    second. What it came to beside the truth, which is computed in `dtype`."""
    state = cast("AttentionBackend[object]", backend).plan(made.step.batch)
    lse = attend.nan_lse(case, made.step)
    for _ in range(2):
        out = attend.serve(backend, case, made.step, state, lse=lse, indices=made.indices)
    truth, true_lse = _truth(case, made, dtype)
    return Answer(out, truth, lse, true_lse)


def sparse_answer_of_graph(
    backend: object, case: SparseCase, made: SparseStep, *, dtype: torch.dtype = torch.float64
) -> Answer:
    """Capture a step in a CUDA graph and replay it over another's numbers, pages, choices and shorter rows."""
    part, step = cast("GraphBackend[object]", backend), made.step
    other = make_sparse_step(case, str(step.q.device), seed=1)
    again, lens = attend.shorter(step.batch, case)
    out = torch.zeros(step.batch.num_tokens, case.heads[0], case.dims[1], dtype=step.q.dtype, device=step.q.device)

    def change() -> Batch:
        attend.copy_step(step, other.step, lens)
        if made.indices is not None and other.indices is not None:
            made.indices.copy_(other.indices)
        return again

    def run(state: object) -> None:
        part.forward(step.q, step.kv, step.layer, state, out=out, indices=made.indices)

    replay(part, step.batch, run, change, out)
    truth, true_lse = _truth(case, replace(made, step=replace(step, batch=again), read=other.read), dtype)
    return Answer(out, truth, None, true_lse)


def chosen_by_indexer(backend: object, case: SparseCase, made: SparseStep) -> tuple[SparseStep, str]:
    """The step with the choices of the kernel's own indexer; what is wrong with them, or nothing.

    Raises:
        Skipped: the built object has none.
    """
    if not hasattr(backend, "indexer"):
        raise Skipped("the built object has no indexer: the engine chooses")
    indexer, step = cast("_Indexer", backend.indexer), made.step
    q_lens, kv_lens = [q for q, _ in case.rows], [kv for _, kv in case.rows]
    device, width = str(step.q.device), case.index_dim
    keys = make_batch(
        q_lens,
        kv_lens,
        layer=replace(step.layer, num_qo_heads=case.index_heads, head_dim=width, v_head_dim=width),
        phase=case.phase,
        page_size=case.page_size,
        dtype=attend.DTYPES[case.dtype],
        index_form=case.index_form,
        cache_form="latent",
        device=device,
    )
    # the same lengths and seed give the same pages
    assert keys.pages == step.pages
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(step.batch.num_tokens, case.index_heads, generator=generator).to(device)
    state = cast("AttentionBackend[object]", backend).plan(step.batch)
    indices = indexer.select(keys.q, weights, keys.kv, state, case.topk)
    synchronize()
    wanted = reference_topk(reference_indexer(keys.q, weights, keys.kv, step.batch), case.topk)
    return replace(made, indices=indices), _wrong_choices(indices.tolist(), wanted.tolist())


def _truth(case: SparseCase, made: SparseStep, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The reference's outputs and LSE, on the CPU."""
    step = made.step
    batch = replace(step.batch, index=_on_host(step.batch.index))
    read = PagedKV(k=made.read.k.cpu(), v=None if made.read.v is None else made.read.v.cpu())
    chosen = None if made.indices is None else made.indices.cpu()
    if case.family == "csa":
        return reference_compressed(step.q, read, step.layer, batch, chosen, dtype=dtype)
    assert chosen is not None, "a sparse layer never runs dense"
    return reference_sparse(step.q, read, step.layer, batch, chosen, dtype=dtype)


def _on_host(index: KVIndex) -> KVIndex:
    def host(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cpu()

    return KVIndex(
        page_size=index.page_size,
        page_table=host(index.page_table),
        kv_indptr=host(index.kv_indptr),
        kv_indices=host(index.kv_indices),
        table=host(index.table),
        row_ids=host(index.row_ids),
    )


def _faults_of_loop(container: DraftContainer[object], case: SparseCase, made: SparseStep, accuracy: str) -> str:
    """Step i of the loop sees i tokens more of each chain; all are planned before the first runs."""
    backends = container.attn_backends
    cases = [replace(case, rows=tuple((q, kv + at if q else kv) for q, kv in case.rows)) for at in range(len(backends))]
    steps = [make_sparse_step(one, str(made.step.q.device), seed=at) for at, one in enumerate(cases)]
    steps = [replace(one, step=replace(one.step, layer=made.step.layer)) for one in steps]
    states = container.plan([one.step.batch for one in steps])
    for at, (backend, one, step, state) in enumerate(zip(backends, cases, steps, states, strict=True)):
        lse = attend.nan_lse(one, step.step)
        out = attend.serve(backend, one, step.step, state, lse=lse, indices=step.indices)
        truth, true_lse = _truth(one, step, torch.float64)
        words = wrong(out, truth, one, accuracy, lse=lse, true_lse=true_lse)
        if words:
            return f"step {at}: {words}"
    return ""


def _compressed(case: SparseCase, step: MadeStep, seed: int) -> Tensor:
    """A cache of compressed entries under the step's own pages, NaN where there is none."""
    each, width = case.page_size // case.rate, case.dims[0]
    shape = (step.kv.k.shape[0], each, 1, width)
    entries = torch.full(shape, float("nan"), dtype=step.q.dtype, device=step.q.device)
    generator = torch.Generator().manual_seed(seed + 4)
    for pages, (_, kv_len) in zip(step.pages, case.rows, strict=True):
        for at in range(kv_len // case.rate):
            entries[pages[at // each], at % each, 0] = torch.randn(width, generator=generator).to(entries)
    return entries


def _chosen(case: SparseCase, step: MadeStep, seed: int) -> Tensor | None:
    """`[T, topk]` i32 on the step's device; None where a layer chooses nothing."""
    if not case.topk:
        return None
    generator = torch.Generator().manual_seed(seed + 1)
    indices = torch.full((step.batch.num_tokens, case.topk), -1, dtype=torch.int32)
    token = 0
    for q_len, kv_len in case.rows:
        for at in range(q_len):
            some = _choices(case, kv_len - q_len + at + 1, kv_len, generator)
            indices[token, : len(some)] = some
            token += 1
    return indices.to(step.q.device)


def _choices(case: SparseCase, position: int, kv_len: int, generator: torch.Generator) -> Tensor:
    """One token's: it sees the first `position` of its row's keys, of whose compressed entries each stands for
    `rate`."""
    each = max(1, case.rate)
    seen, most = (position if case.causal else kv_len) // each, kv_len // each
    if case.choices == "none":
        return torch.empty(0, dtype=torch.int32)
    # where some lie past the row, two in three lie in it
    reach = {"ahead": most, "past": most + most // 2 + 2, "mixed": most + most // 2 + 2}.get(case.choices, seen)
    some = torch.randperm(reach, generator=generator)
    if case.choices == "past":
        some = some[(some < seen) | (some >= most)]
    some = some[: case.topk].to(torch.int32)
    if case.choices in ("holes", "mixed"):
        some[torch.rand(len(some), generator=generator) < _HOLES] = -1
    if case.choices == "holes" and len(some) > 1:
        # in front of those that count
        some[0] = -1
    return some


def _wrong_choices(got: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> str:
    """The same number of keys for every token, and but for ties the same ones."""
    shared = most = 0
    for token, (mine, true) in enumerate(zip(got, wanted, strict=True)):
        keys, best = {*mine} - {-1}, {*true} - {-1}
        if len(keys) != len(best) or sum(at >= 0 for at in mine) != len(best):
            return f"the indexer chose {len(keys)} keys for token {token}, where it may see {len(best)} of its best"
        shared, most = shared + len(keys & best), most + len(best)
    share = shared / max(1, most)
    return "" if share >= _INDEX_SHARE else f"the indexer chose {share:.3f} of the reference's keys"
