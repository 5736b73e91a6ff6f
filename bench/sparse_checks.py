"""Sparse attention on this GPU against the reference, case by case: resolved, built by its real factory and run.

    python bench/sparse_checks.py [KERNEL] [--from N]

KERNEL is dsa, dsv4 or flashmla; all three without one. Lines are those of `checks.py`: one JSON object a case on
stdout, before it runs and after.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backstamp.attention import PagedKV
from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.host import HostFacts, this_host
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.testing.batches import MadeStep, make_batch
from backstamp.testing.packed_latent import pack, unpack
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.sparse_reference import (
    reference_compressed,
    reference_indexer,
    reference_sparse,
    reference_topk,
)
from checks import BOUNDS, DTYPES, LSE_BOUND, built, say, synchronize, tensors_of
from sparse_cases import CASES, SparseCase

__all__ = ["check", "main"]

#: Share of the reference's choices of keys that a bf16 indexer must find; the others tie with them.
INDEX_SHARE = 0.99


def main() -> int:
    """Run the cases of one kernel, or all; exit 3 when the device is lost and the rest needs another process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", nargs="?", choices=sorted({case.kernel for case in CASES}))
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="skip the cases before this one")
    options = parser.parse_args()
    host, catalogue = this_host(), build_catalogue(discover())
    device = "cpu" if host.device == "cpu" else f"{host.device.replace('rocm', 'cuda')}:0"
    for number, case in enumerate(CASES):
        if number < options.first or options.kernel not in (None, case.kernel):
            continue
        about = {"number": number, "kernel": case.kernel, "family": case.family, "phase": case.phase, "case": case.name}
        say({**about, "status": "running"})
        try:
            say({**about, **check(case, host, catalogue, device)})
        except BackstampError as refused:
            say({**about, "status": "refused", "reason": refused.message})
        except Exception as cause:
            say({**about, "status": "failed", "reason": f"{type(cause).__name__}: {cause}"[:600]})
            if "CUDA error" in str(cause) or "cudaError" in str(cause):
                return 3
    return 0


def check(case: SparseCase, host: HostFacts, catalogue: Catalogue, device: str) -> dict[str, object]:
    """Run one case: its status, worst error and what was built."""
    step, read = make_step(case, device)
    plan = resolve_case(case, host, catalogue)
    backend = built(plan, case.phase, step, catalogue, device, most=8192)
    group = plan.phase(case.phase).groups[0]
    told: dict[str, object] = {"row": group.row, "library": group.library.as_json() if group.library else None}
    indices = chosen_keys(case, step)
    if case.work == "index":
        indices, wrong = index(case, backend, step, device)
        if wrong:
            return told | {"status": "wrong", "reason": wrong}
    if case.graph:
        other, other_read = make_step(case, device, seed=1)
        chosen = chosen_keys(case, other, seed=2)
        again, out = run_graph(backend, step, indices, other, chosen)
        return told | verdict(case, out, *truth(case, again, other_read, chosen), None)
    lse = torch.full(step.q.shape[:2], float("nan"), device=device) if case.lse else None
    out = nan_out(step)
    state = backend.plan(step.batch)
    # twice: a library may fill a schedule in the first call and read it in the second
    for _ in range(2):
        backend.forward(step.q, step.kv, step.layer, state, out=out, lse=lse, indices=indices)
    synchronize()
    return told | verdict(case, out, *truth(case, step, read, indices), lse)


def make_step(case: SparseCase, device: str, seed: int = 0) -> tuple[MadeStep, PagedKV]:
    """The case's tensors, and the cache as its bytes read: the same where they are rows."""
    q_lens, kv_lens = zip(*case.rows, strict=True)
    sinks = torch.randn(case.heads, device=device) if case.sinks else None
    step = make_batch(
        q_lens,
        kv_lens,
        layer=case.layer(sinks),
        phase=case.phase,
        page_size=case.page_size,
        dtype=DTYPES[case.dtype],
        index_form=case.index_form,
        cache_form="latent",
        causal=case.causal,
        device=device,
        seed=seed,
    )
    if case.rate:
        step = replace(step, kv=replace(step.kv, v=compressed_entries(case, step)))
    if not case.packed:
        return step, step.kv
    k, v = (None if cache is None else pack(cache, case.layout) for cache in (step.kv.k, step.kv.v))
    assert k is not None
    means = PagedKV(k=unpack(k, case.layout), v=None if v is None else unpack(v, case.layout))
    return replace(step, kv=PagedKV(k=k, v=v, layout=case.layout)), means


def compressed_entries(case: SparseCase, step: MadeStep) -> Tensor:
    """A cache of compressed entries under the step's own pages, NaN where there is none."""
    each = case.page_size // case.rate
    entries = torch.full((step.kv.k.shape[0], each, 1, 512), float("nan"), dtype=step.q.dtype, device=step.q.device)
    generator = torch.Generator().manual_seed(4)
    for pages, (_, kv_len) in zip(step.pages, case.rows, strict=True):
        for at in range(kv_len // case.rate):
            entries[pages[at // each], at % each, 0] = torch.randn(512, generator=generator).to(entries)
    return entries


def chosen_keys(case: SparseCase, step: MadeStep, seed: int = 1) -> Tensor | None:
    """`[T, topk]` i32 on the step's device; None where a layer chooses nothing."""
    if case.kernel == "flashmla" or (case.kernel == "dsv4" and case.rate != 4):
        return None
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((step.batch.num_tokens, case.topk), -1, dtype=torch.int32)
    token = 0
    for q_len, kv_len in case.rows:
        most = kv_len // max(1, case.rate)
        for _ in range(q_len):
            # two choices in three are of the row, ahead of the token or not; the others lie past it
            some = torch.randperm(most + most // 2 + 2, generator=generator)[: case.topk].to(torch.int32)
            some[torch.rand(len(some), generator=generator) < 0.1] = -1
            indices[token, : len(some)] = some
            token += 1
    return indices.to(step.q.device)


def index(case: SparseCase, backend: Any, step: MadeStep, device: str) -> tuple[Tensor, str]:
    """Choose keys with the kernel's indexer; what is wrong with them, or nothing."""
    q_lens, kv_lens = zip(*case.rows, strict=True)
    layer = replace(step.layer, num_qo_heads=64, head_dim=128, v_head_dim=128)
    keys = make_batch(
        q_lens, kv_lens, layer=layer, phase=case.phase, page_size=case.page_size, dtype=DTYPES[case.dtype],
        index_form=case.index_form, cache_form="latent", device=device,
    )  # fmt: skip
    assert keys.pages == step.pages
    weights = torch.randn(step.batch.num_tokens, 64, device=device)
    indices = backend.indexer.select(keys.q, weights, keys.kv, backend.plan(step.batch), case.topk)
    synchronize()
    wanted = reference_topk(reference_indexer(keys.q, weights, keys.kv, step.batch), case.topk)
    pairs = list(zip(indices.tolist(), wanted.tolist(), strict=True))
    if any(sum(at < 0 for at in got) != sum(at < 0 for at in true) for got, true in pairs):
        return indices, "another number of keys was chosen"
    shared = sum(len({*got} & {*true} - {-1}) for got, true in pairs)
    share = shared / max(1, int((wanted >= 0).sum()))
    return indices, "" if share >= INDEX_SHARE else f"{share:.3f} of the reference's keys were chosen"


def resolve_case(case: SparseCase, host: HostFacts, catalogue: Catalogue) -> Plan:
    """The plan that has the case's kernel in every phase of its runner."""
    draft = case.phase.startswith("draft")
    asked: dict[str, Any] = {"draft_attention_backend" if draft else "attention_backend": case.kernel}
    asked["page_size"] = case.page_size
    if case.packed:
        asked["kv_cache_dtype"] = case.layout
    if case.inside:
        asked |= {"dsa_prefill_backend": case.inside, "dsa_decode_backend": case.inside}
    if case.phase not in ("prefill", "decode"):
        asked |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_topk": 1}
    role = "draft" if draft else "target"
    graph = "uniform" if case.graph else "never"
    engine = EngineFacts(name="check", graph=graph, prefix_cache=True, layouts=frozenset({case.layout}))
    return resolve(make_launch(Requests(**asked), role=role), engine, case.model(), host, catalogue, role=role)


def run_graph(
    backend: Any, step: MadeStep, indices: Tensor | None, other: MadeStep, chosen: Tensor | None
) -> tuple[MadeStep, Tensor]:
    """Capture one step, then replay it over another's tensors at the same addresses, its rows shorter.

    The step that was replayed, with the other's pages, and its output.
    """
    backend.init_graphs(step.batch.num_rows, step.batch.num_tokens)
    out = torch.zeros_like(nan_out(step))
    state = backend.plan(step.batch, capture=True)
    backend.forward(step.q, step.kv, step.layer, state, out=out, indices=indices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.replan(state)
        backend.forward(step.q, step.kv, step.layer, state, out=out, indices=indices)
    for mine, theirs in tensors_of(step, other):
        mine.copy_(theirs)
    if indices is not None and chosen is not None:
        indices.copy_(chosen)
    lens = torch.clamp(step.batch.kv_lens.cpu() - 9, min=1)
    step.batch.kv_lens.copy_(lens)
    again = replace(step, batch=replace(step.batch, kv_lens_host=lens))
    backend.plan(again.batch, state=state)
    out.zero_()
    # what a plan dropped is written over before a graph that still reads it runs
    spoilt = [torch.full_like(out, float("nan")) for _ in range(64)]
    graph.replay()
    synchronize()
    del spoilt
    return again, out


def truth(case: SparseCase, step: MadeStep, read: PagedKV, indices: Tensor | None) -> tuple[Tensor, Tensor]:
    """The reference's outputs and LSE; of sparse layers in float32, which is three digits more than any bound here."""
    read = PagedKV(k=read.k.cpu(), v=None if read.v is None else read.v.cpu())
    chosen = None if indices is None else indices.cpu()
    if case.kernel == "flashmla":
        return reference_attention(step.q, read, step.layer, step.batch)
    if case.kernel == "dsv4":
        return reference_compressed(step.q, read, step.layer, step.batch, chosen, dtype=torch.float32)
    assert chosen is not None
    return reference_sparse(step.q, read, step.layer, step.batch, chosen, dtype=torch.float32)


def nan_out(step: MadeStep) -> Tensor:
    """An output in which whatever is not written shows."""
    shape = (step.batch.num_tokens, step.layer.num_qo_heads, step.layer.v_head_dim)
    return torch.full(shape, float("nan"), dtype=step.q.dtype, device=step.q.device)


def verdict(case: SparseCase, out: Tensor, true: Tensor, true_lse: Tensor, lse: Tensor | None) -> dict[str, object]:
    """Whether what came out is right: finite, within the bound of its dtype, LSE too."""
    if not bool(torch.isfinite(out.float()).all()):
        tokens = (~torch.isfinite(out.float())).any(-1).any(-1).nonzero().flatten().tolist()
        return {"status": "wrong", "reason": f"not finite in tokens {tokens[:8]}"}
    error = relative_error(out, true)
    told: dict[str, object] = {"status": "ok" if error <= BOUNDS[case.dtype] else "wrong", "rel_error": error}
    if lse is not None:
        got = lse.double().cpu()
        seen = torch.isfinite(true_lse)
        off = float((got[seen] - true_lse[seen]).abs().max())
        told["lse_error"] = off
        if not off <= LSE_BOUND * max(1.0, float(true_lse[seen].abs().max())) or bool(torch.isfinite(got[~seen]).any()):
            told |= {"status": "wrong", "reason": f"LSE off by {off:.1e}"}
    return told


if __name__ == "__main__":
    sys.exit(main())
