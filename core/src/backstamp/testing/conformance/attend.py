"""A case run by a built backend and held against float64: the numbers of the kit.

In: a case, the device, and what was built for it. Out: the tensors of one step, and what is wrong with the answer: a
line of words, empty where nothing is. The reference shares no code with any backend.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

import torch
from torch import Tensor

from backstamp.attention import AttentionBackend, Batch, DraftContainer, GraphBackend, KVIndex, PagedKV, RaggedKV
from backstamp.testing.batches import MadeStep, make_batch, make_tree, split_new
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.replays import replay, synchronize
from backstamp.testing.conformance.verdicts import Answer, wrong
from backstamp.testing.reference import reference_attention

__all__ = [
    "DTYPES",
    "answer_of_graph",
    "answer_of_step",
    "copy_step",
    "faults_of_graph",
    "faults_of_step",
    "keys_of",
    "make_step",
    "nan_lse",
    "rows_of",
    "serve",
    "shorter",
    "truth_of",
    "wrong",
]

DTYPES: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
}


#: Tokens kept free on both sides of an output.
_GUARD: Final = 4
_INDEX_TENSORS: Final = ("page_table", "kv_indptr", "kv_indices", "table", "row_ids")


def make_step(case: AttentionCase, device: str, seed: int = 0) -> MadeStep:
    """The case's tensors; the same seed gives the same numbers and pages on every device."""
    q_lens, kv_lens = [q for q, _ in case.rows], [kv for _, kv in case.rows]
    generator = torch.Generator().manual_seed(seed + 100)
    heads = case.heads[0]
    sinks = None if case.sinks is None else torch.randn(heads, generator=generator).to(device, DTYPES[case.sinks])
    alibi = torch.rand(heads, generator=generator).to(device) * -0.5 if case.alibi else None
    step = make_batch(
        q_lens,
        kv_lens,
        layer=case.layer(sinks, alibi),
        phase=case.phase,
        page_size=case.page_size,
        dtype=DTYPES[case.dtype],
        kv_dtype=None if case.kv_dtype == "same" else DTYPES[case.kv_dtype],
        index_form=case.index_form,
        cache_form=case.cache_form,
        causal=case.causal,
        tree=None if case.tree is None else make_tree(q_lens, kv_lens, case.tree, device=device, seed=seed),
        pad_tokens=case.pad_tokens,
        host_lens=case.host_lens,
        device=device,
        seed=seed,
    )
    if case.kv_dtype != "same" and case.scales != "none":
        # no power of the other, nor its reciprocal
        k_scale, v_scale = (torch.tensor(scale, device=device) for scale in (0.5, 3.0))
        scales = (k_scale, v_scale) if case.scales == "tensors" else (0.5, 3.0)
        step = replace(step, kv=replace(step.kv, k_scale=scales[0], v_scale=scales[1]))
    if not case.host_exact:
        bounds = torch.tensor(kv_lens, dtype=torch.int32) + 5
        step = replace(step, batch=replace(step.batch, kv_lens_host=bounds, host_exact=False))
    # a query as engines cut it out of the fused projection: rows lie further apart than they are long
    wide = step.q.new_full((step.q.shape[0], heads + 2, case.dims[0]), float("nan"))
    wide[:, :heads] = step.q * case.loudness
    if not case.token_rows:
        return replace(step, q=wide[:, :heads])
    # pads count to the last row
    rows = torch.tensor([row for row, q in enumerate(q_lens) for _ in range(q)], dtype=torch.int32)
    rows = torch.nn.functional.pad(rows, (0, case.pad_tokens), value=max(0, len(q_lens) - 1)).to(device)
    return replace(step, q=wide[:, :heads], batch=replace(step.batch, token_rows=rows))


def keys_of(case: AttentionCase, step: MadeStep) -> tuple[PagedKV | None, RaggedKV | None]:
    """The cache and this step's own keys, as the case hands them over."""
    if not case.new:
        return step.kv, None
    kv, new = split_new(step)
    return (None if case.new == "all" else kv), new


def truth_of(case: AttentionCase, step: MadeStep, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Float64 outputs and LSE; from an index on the CPU, because it reads page by page."""
    index = make_step(case, "cpu", seed).batch.index
    return reference_attention(step.q, step.kv, step.layer, replace(step.batch, index=index))


def serve(
    backend: object,
    case: AttentionCase,
    step: MadeStep,
    state: object,
    *,
    lse: Tensor | None = None,
    indices: Tensor | None = None,
) -> Tensor:
    """One layer's call, outputs preset to NaN; the answer has to be the tensor that was handed over."""
    part = cast("AttentionBackend[object]", backend)
    heads, (dk, dv) = case.heads[0], case.dims
    # what lies about the outputs is somebody else's
    tokens = step.batch.num_tokens
    around = step.q.new_full((tokens + 2 * _GUARD, heads, dv), float("nan"))
    out = around[_GUARD : _GUARD + tokens]
    kv, new = keys_of(case, step)
    q, q_rope = step.q, None
    if case.rope_apart:
        q, q_rope = step.q[..., :dv], step.q[..., dv:dk]
    if indices is None:
        answer = part.forward(q, kv, step.layer, state, out=out, lse=lse, new=new, q_rope=q_rope)
    else:
        answer = part.forward(q, kv, step.layer, state, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
    if answer is not out and answer.data_ptr() != out.data_ptr():
        raise AssertionError("forward answered another tensor than the `out` it was given")
    synchronize()
    if not bool(torch.isnan(around[:_GUARD]).all() and torch.isnan(around[_GUARD + tokens :]).all()):
        raise AssertionError("forward wrote outside the `out` it was given")
    return out


def faults_of_step(backend: object, case: AttentionCase, step: MadeStep, accuracy: str = "exact") -> str:
    """Plan and run a step, or the steps of a draft loop; what is wrong, empty where all is right."""
    if hasattr(backend, "attn_backends"):
        return _faults_of_loop(cast("DraftContainer[object]", backend), case, step, accuracy)
    answer = answer_of_step(backend, case, step)
    return wrong(answer.out, answer.truth, case, accuracy, lse=answer.lse, true_lse=answer.true_lse)


def answer_of_step(backend: object, case: AttentionCase, step: MadeStep, calls: int = 1) -> Answer:
    """Plan one step and run it, `calls` times over as layers do; what it came to beside the truth."""
    state = cast("AttentionBackend[object]", backend).plan(step.batch)
    lse = nan_lse(case, step)
    for _ in range(calls):
        out = serve(backend, case, step, state, lse=lse)
    truth, true_lse = truth_of(case, step)
    return Answer(out, truth, lse, true_lse)


def nan_lse(case: AttentionCase, step: MadeStep) -> Tensor | None:
    """Where LSE goes, `[T, Hq]` of any strides: heads first; None where it is not asked for."""
    if not case.lse:
        return None
    return step.q.new_full((case.heads[0], step.batch.num_tokens), float("nan"), dtype=torch.float32).t()


def _faults_of_loop(container: DraftContainer[object], case: AttentionCase, step: MadeStep, accuracy: str) -> str:
    """Step i of the loop sees i tokens more of each chain; all are planned before the first runs."""
    cases = [
        replace(case, rows=tuple((q, kv + at if q else kv) for q, kv in case.rows))
        for at in range(len(container.attn_backends))
    ]
    steps = [replace(make_step(one, str(step.q.device), seed=at), layer=step.layer) for at, one in enumerate(cases)]
    states = container.plan([one.batch for one in steps])
    for at, (backend, one, made, state) in enumerate(zip(container.attn_backends, cases, steps, states, strict=True)):
        lse = nan_lse(one, made)
        out = serve(backend, one, made, state, lse=lse)
        truth, true_lse = truth_of(one, made, seed=at)
        fault = wrong(out, truth, one, accuracy, lse=lse, true_lse=true_lse)
        if fault:
            return f"step {at}: {fault}"
    return ""


def faults_of_graph(backend: object, case: AttentionCase, step: MadeStep, accuracy: str = "exact") -> str:
    """Capture a step in a CUDA graph and replay it over another's numbers, pages and shorter rows, in place."""
    answer = answer_of_graph(backend, case, step)
    return wrong(answer.out, answer.truth, case, accuracy, lse=None, true_lse=answer.true_lse)


def answer_of_graph(backend: object, case: AttentionCase, step: MadeStep, max_kv_len: int | None = None) -> Answer:
    """What the replay came to; `max_kv_len` is the bound its graph is recorded for, the step's own where None."""
    part = cast("GraphBackend[object]", backend)
    other = make_step(case, str(step.q.device), seed=1)
    recorded = step.batch if max_kv_len is None else replace(step.batch, max_kv_len=max_kv_len)
    again, lens = shorter(recorded, case)
    out = torch.zeros(step.batch.num_tokens, case.heads[0], case.dims[1], dtype=step.q.dtype, device=step.q.device)

    def change() -> Batch:
        copy_step(step, other, lens)
        return again

    replay(part, recorded, lambda state: part.forward(step.q, step.kv, step.layer, state, out=out), change, out)
    index = make_step(case, "cpu", seed=1).batch.index
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, replace(again, index=index))
    return Answer(out, truth, None, true_lse)


def shorter(batch: Batch, case: AttentionCase) -> tuple[Batch, Tensor]:
    """The batch of a later step of the same graph, whose rows have fewer keys, and their number on the host."""
    lens = torch.tensor([max(q, kv - 9) for q, kv in case.rows], dtype=torch.int32)
    return replace(batch, kv_lens_host=lens if case.host_lens else None), lens


def copy_step(step: MadeStep, other: MadeStep, lens: Tensor) -> None:
    """Write what changes from step to step where it lies: queries, the cache and its index, the lengths of rows."""
    for mine, theirs in _tensors_of(step, other):
        mine.copy_(theirs)
    step.batch.kv_lens.copy_(lens)


def _tensors_of(step: MadeStep, other: MadeStep) -> list[tuple[Tensor, Tensor]]:
    """What changes from step to step, pairwise: queries, the cache and its index."""
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(step.q, other.q), (step.kv.k, other.kv.k)]
    pairs += [(step.kv.v, other.kv.v)]
    pairs += [(getattr(step.batch.index, name), getattr(other.batch.index, name)) for name in _INDEX_TENSORS]
    return [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]


def rows_of(step: MadeStep, rows: Sequence[int]) -> MadeStep:
    """A step of some rows of another, in this order, over the same cache: what they are asked in other company."""
    starts = step.batch.qo_indptr.tolist()
    tokens = [token for row in rows for token in range(starts[row], starts[row + 1])]
    lens = [starts[row + 1] - starts[row] for row in rows]
    device = step.batch.kv_lens.device
    host_q = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    kv_lens = step.batch.kv_lens[list(rows)]
    of_token = torch.tensor([at for at, q_len in enumerate(lens) for _ in range(q_len)], dtype=torch.int32).to(device)
    batch = replace(
        step.batch,
        num_rows=len(rows),
        num_tokens=len(tokens),
        max_q_len=max(lens, default=0),
        max_kv_len=int(kv_lens.max()),
        qo_indptr=host_q.to(device),
        kv_lens=kv_lens,
        qo_indptr_host=None if step.batch.qo_indptr_host is None else host_q,
        kv_lens_host=None if step.batch.kv_lens_host is None else kv_lens.cpu(),
        index=_index_of(step.batch.index, rows),
        token_rows=None if step.batch.token_rows is None else of_token,
    )
    return replace(step, q=step.q[tokens], batch=batch, pages=tuple(step.pages[row] for row in rows))


def _index_of(index: KVIndex, rows: Sequence[int]) -> KVIndex:
    if index.page_table is not None:
        return replace(index, page_table=index.page_table[list(rows)])
    if index.row_ids is not None:
        return replace(index, row_ids=index.row_ids[list(rows)])
    assert index.kv_indptr is not None
    assert index.kv_indices is not None
    starts = index.kv_indptr.tolist()
    parts = [index.kv_indices[starts[row] : starts[row + 1]] for row in rows]
    lens = torch.tensor([0, *(len(part) for part in parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return replace(index, kv_indptr=lens.to(index.kv_indptr.device), kv_indices=torch.cat(parts))
