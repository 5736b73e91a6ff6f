"""A case run by a built backend and held against float64: the numbers of the kit.

In: a case, the device, and what was built for it. Out: the tensors of one step, and what is wrong with the answer: a
line of words, empty where nothing is. The reference shares no code with any backend.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from backstamp.attention import AttentionBackend, DraftContainer, GraphBackend, KVIndex, PagedKV, RaggedKV
from backstamp.testing.batches import MadeStep, make_batch, make_tree, split_new
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.reference import reference_attention

__all__ = [
    "ACCURACY_FACTORS",
    "DTYPES",
    "Tolerance",
    "faults_of_graph",
    "faults_of_step",
    "make_step",
    "serve",
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


class Tolerance(NamedTuple):
    """An answer is right where |out - truth| <= absolute + relative * |truth|, and over all within `norm`.

    `norm` is the relative error of the whole: where one number may be off by chance, all of them may not.
    """

    absolute: float
    relative: float
    norm: float


#: Outputs are means of N(0, 1) values: at most about 4, rounded once in the query's dtype, from weights that a kernel
#: may keep in that dtype too. Every kernel measured was within a third of these norms (bench/results).
TOLERANCES: Final = {
    "fp32": Tolerance(1e-4, 1e-4, 2e-5),
    "fp16": Tolerance(8e-3, 8e-3, 1.5e-3),
    "bf16": Tolerance(4e-2, 4e-2, 8e-3),
}
#: An accuracy class widens them: `exact` is held to them as they are, a query or a cache quantised inside is not.
ACCURACY_FACTORS: Final = {"exact": 1.0, "fp8": 16.0, "int8": 16.0, "fp4": 64.0}
LSE_TOLERANCE: Final = Tolerance(4e-3, 4e-3, 2e-3)
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
    if case.kv_dtype != "same":
        step = replace(step, kv=replace(step.kv, k_scale=0.5, v_scale=2.0))
    # a query as engines cut it out of the fused projection: rows lie further apart than they are long
    wide = step.q.new_full((step.q.shape[0], heads + 2, case.dims[0]), float("nan"))
    wide[:, :heads] = step.q
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


def serve(backend: object, case: AttentionCase, step: MadeStep, state: object, *, lse: Tensor | None = None) -> Tensor:
    """One layer's call, outputs preset to NaN; the answer has to be the tensor that was handed over."""
    part = cast("AttentionBackend[object]", backend)
    heads, (dk, dv) = case.heads[0], case.dims
    out = step.q.new_full((step.batch.num_tokens, heads, dv), float("nan"))
    kv, new = keys_of(case, step)
    q, q_rope = step.q, None
    if case.rope_apart:
        q, q_rope = step.q[..., :dv], step.q[..., dv:dk]
    answer = part.forward(q, kv, step.layer, state, out=out, lse=lse, new=new, q_rope=q_rope)
    if answer is not out and answer.data_ptr() != out.data_ptr():
        raise AssertionError("forward answered another tensor than the `out` it was given")
    synchronize()
    return out


def faults_of_step(backend: object, case: AttentionCase, step: MadeStep, accuracy: str = "exact") -> str:
    """Plan and run a step, or the steps of a draft loop; what is wrong, empty where all is right."""
    if hasattr(backend, "attn_backends"):
        return _faults_of_loop(cast("DraftContainer[object]", backend), case, step, accuracy)
    state = cast("AttentionBackend[object]", backend).plan(step.batch)
    tokens, heads = step.batch.num_tokens, case.heads[0]
    # any strides: heads first
    lse = step.q.new_full((heads, tokens), float("nan"), dtype=torch.float32).t() if case.lse else None
    out = serve(backend, case, step, state, lse=lse)
    truth, true_lse = truth_of(case, step)
    return wrong(out, truth, case, accuracy, lse=lse, true_lse=true_lse)


def _faults_of_loop(container: DraftContainer[object], case: AttentionCase, step: MadeStep, accuracy: str) -> str:
    """Step i of the loop sees i tokens more of each chain; all are planned before the first runs."""
    cases = [
        replace(case, rows=tuple((q, kv + at if q else kv) for q, kv in case.rows))
        for at in range(len(container.attn_backends))
    ]
    steps = [replace(make_step(one, str(step.q.device), seed=at), layer=step.layer) for at, one in enumerate(cases)]
    states = container.plan([one.batch for one in steps])
    for at, (backend, one, made, state) in enumerate(zip(container.attn_backends, cases, steps, states, strict=True)):
        out = serve(backend, one, made, state)
        truth, true_lse = truth_of(one, made, seed=at)
        fault = wrong(out, truth, one, accuracy, lse=None, true_lse=true_lse)
        if fault:
            return f"step {at}: {fault}"
    return ""


def faults_of_graph(backend: object, case: AttentionCase, step: MadeStep, accuracy: str = "exact") -> str:
    """Capture a step in a CUDA graph and replay it over another's numbers, pages and shorter rows, in place."""
    part = cast("GraphBackend[object]", backend)
    other = make_step(case, str(step.q.device), seed=1)
    if hasattr(backend, "init_graphs"):
        part.init_graphs(step.batch.num_rows, step.batch.num_tokens)
    out = torch.zeros(step.batch.num_tokens, case.heads[0], case.dims[1], dtype=step.q.dtype, device=step.q.device)
    state = part.plan(step.batch, capture=True)
    part.forward(step.q, step.kv, step.layer, state, out=out)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if hasattr(backend, "replan"):
            part.replan(state)
        part.forward(step.q, step.kv, step.layer, state, out=out)
    lens = torch.tensor([max(q, kv - 9) for q, kv in case.rows], dtype=torch.int32)
    for mine, theirs in _tensors_of(step, other):
        mine.copy_(theirs)
    step.batch.kv_lens.copy_(lens)
    again = replace(step.batch, kv_lens_host=lens if case.host_lens else None)
    part.plan(again, state=state)
    out.zero_()
    # what a plan dropped is written over before a graph that still reads it runs
    spoilt = [torch.full_like(out, float("nan")) for _ in range(64)]
    graph.replay()
    synchronize()
    del spoilt
    index = make_step(case, "cpu", seed=1).batch.index
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, replace(again, index=index))
    return wrong(out, truth, case, accuracy, lse=None, true_lse=true_lse)


def _tensors_of(step: MadeStep, other: MadeStep) -> list[tuple[Tensor, Tensor]]:
    """What changes from step to step, pairwise: queries, the cache and its index."""
    pairs: list[tuple[Tensor | None, Tensor | None]] = [(step.q, other.q), (step.kv.k, other.kv.k)]
    pairs += [(step.kv.v, other.kv.v)]
    pairs += [(getattr(step.batch.index, name), getattr(other.batch.index, name)) for name in _INDEX_TENSORS]
    return [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]


def synchronize() -> None:
    """Let a fault of a GPU show where it happened."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wrong(
    out: Tensor, truth: Tensor, case: AttentionCase, accuracy: str, *, lse: Tensor | None, true_lse: Tensor
) -> str:
    """What is wrong with an answer: its first token that is no number, or that is off, and by how much."""
    got = out.double().cpu()
    if not bool(torch.isfinite(got).all()):
        tokens = (~torch.isfinite(got)).any(-1).any(-1).nonzero().flatten().tolist()
        return f"output is not finite in token {tokens[0]} and {len(tokens) - 1} more: {_of_token(case, tokens[0])}"
    if accuracy not in ACCURACY_FACTORS:
        return f"accuracy class {accuracy!r} has no bound; those that have are {', '.join(ACCURACY_FACTORS)}"
    factor = ACCURACY_FACTORS[accuracy]
    bound = TOLERANCES[case.dtype]
    words = _off(got, truth, bound, factor, case, "output")
    if words or lse is None:
        return words
    seen = torch.isfinite(true_lse)
    logs = lse.double().cpu()
    if bool((logs[~seen] != float("-inf")).any()):
        return "LSE needs -inf where a token sees no key, got another number"
    return _off(logs[seen], true_lse[seen], LSE_TOLERANCE, factor, case, "LSE")


def _off(got: Tensor, truth: Tensor, bound: Tolerance, factor: float, case: AttentionCase, what: str) -> str:
    if not got.numel():
        return ""
    error = (got - truth).abs()
    allowed = factor * (bound.absolute + bound.relative * truth.abs())
    # a token off everywhere by less than one number may be, is off
    norm = float(error.norm() / truth.norm().clamp_min(1e-9))
    if bool((error <= allowed).all()) and norm <= factor * bound.norm:
        return ""
    token = int((error - allowed).flatten(1).amax(1).argmax()) if got.dim() > 1 else int((error - allowed).argmax())
    where = _of_token(case, token) if what == "output" else f"entry {token}"
    return (
        f"{what} is off by {float(error.max()):.1e} at most, {norm:.1e} of the whole (allowed "
        f"{factor * bound.norm:.1e}), most in {where}"
    )


def _of_token(case: AttentionCase, token: int) -> str:
    """Which row a token is of."""
    first = 0
    for row, (q_len, kv_len) in enumerate(case.rows):
        if token < first + q_len:
            return f"row {row}, query {token - first} of {q_len}, {kv_len} keys"
        first += q_len
    return f"token {token}, of no row"


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
