"""One kernel on this GPU against float64, case by case: resolved, built by its real factory, planned and run.

    python bench/checks.py KERNEL [--from N]

One JSON line a case on stdout, before it runs and after. `kernels.py --check` runs one such process a kernel, because
a kernel that faults takes its process's device with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backstamp.attention import PagedKV, RaggedKV
from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.construction import RunnerShape, build
from backstamp.declarations import Offer, Phase
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.host import HostFacts, this_host
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.stamp import is_container, read_stamp, steps_of
from backstamp.testing.batches import MadeStep, make_batch, make_tree, split_new
from backstamp.testing.reference import reference_attention, relative_error
from check_cases import CASES, Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Relative error of the whole output; every kernel measured in bf16 was at 2e-3 to 3.2e-3 (three runs on an H200).
BOUNDS = {"bf16": 8e-3, "fp16": 1.5e-3}
LSE_BOUND = 2e-3
INDEX_TENSORS = ("page_table", "kv_indptr", "kv_indices", "table", "row_ids")


def main() -> int:
    """Run the cases of one kernel; exit 3 when the device is lost and the rest needs another process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="skip the cases before this one")
    options = parser.parse_args()
    host, catalogue = this_host(), build_catalogue(discover())
    for number, case in list(enumerate(CASES))[options.first :]:
        about = {
            "number": number,
            "key": options.kernel,
            "kernel": options.kernel,
            "family": case.family,
            "phase": case.phase,
            "case": case.name,
        }
        say({**about, "status": "running"})
        try:
            say({**about, **check(options.kernel, case, host, catalogue)})
        except BackstampError as refused:
            say({**about, "status": "refused", "reason": refused.message})
        except Exception as cause:
            say({**about, "status": "failed", "reason": f"{type(cause).__name__}: {cause}"[:600]})
            if "CUDA error" in str(cause) or "cudaError" in str(cause):
                return 3
    return 0


def say(line: dict[str, object]) -> None:
    """One line of JSON, at once."""
    print(json.dumps(line), flush=True)


def check(kernel: str, case: Case, host: HostFacts, catalogue: Catalogue) -> dict[str, object]:
    """Run one case: its status, worst error and what was built."""
    device = "cpu" if host.device == "cpu" else f"{host.device.replace('rocm', 'cuda')}:0"
    step = make_step(case, device)
    plan = resolve_case(kernel, case, host, catalogue, step)
    offer = row_of(plan, case, catalogue)
    step = with_index(case, offer, step, device)
    backend = built(plan, case.phase, step, catalogue, device)
    group = plan.phase(case.phase).groups[0]
    # a key may lead to another kernel: what ran is what is told
    library = group.library and group.library.as_json()
    outcome: dict[str, object] = {"kernel": group.kernel, "row": group.row, "library": library}
    if case.graph:
        other = with_index(case, offer, make_step(case, device, seed=1), device, seed=1)
        return outcome | verdict(case, *run_graph(backend, case, step, other), None)
    wants_lse = case.lse and "lse" in offer.features
    lse = torch.full((step.batch.num_tokens, case.heads[0]), float("nan"), device=device) if wants_lse else None
    out, truth, true_lse = run(backend, case, step, lse)
    return outcome | verdict(case, out, truth, None if lse is None else (lse, true_lse))


def make_step(case: Case, device: str, seed: int = 0) -> MadeStep:
    """The case's tensors."""
    q_lens, kv_lens = zip(*case.rows, strict=True)
    sinks = torch.randn(case.heads[0], device=device) if case.sinks else None
    return make_batch(
        q_lens,
        kv_lens,
        layer=case.layer(sinks),
        phase=case.phase,
        page_size=case.page_size,
        dtype=DTYPES[case.dtype],
        cache_form="latent" if case.family == "mla" else "nhd",
        causal=case.causal,
        tree=None if case.tree is None else make_tree(q_lens, kv_lens, case.tree, device=device),
        device=device,
        seed=seed,
    )


def resolve_case(kernel: str, case: Case, host: HostFacts, catalogue: Catalogue, step: MadeStep) -> Plan:
    """The plan that has this kernel in the case's phase and the reference kernel in the others."""
    draft = case.phase.startswith("draft")
    others = {f"{half}_attention_backend": "torch_native" for half in ("prefill", "decode", "verify")}
    own = "draft_attention_backend" if draft else f"{case.phase}_attention_backend"
    asked: dict[str, Any] = {**({} if draft else others), own: kernel, "page_size": case.page_size}
    if case.phase not in ("prefill", "decode"):
        asked |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
        asked |= {"speculative_topk": 2 if case.tree else 1}
    role = "draft" if draft else "target"
    graph = "uniform" if case.graph else "never"
    launch = make_launch(Requests(**asked), role=role)
    engine = EngineFacts(name="check", graph=graph, prefix_cache=case.new != "all")
    return resolve(launch, engine, case.model(), host, catalogue, role=role)


def row_of(plan: Plan, case: Case, catalogue: Catalogue) -> Offer:
    """The declared row the plan accepted."""
    row = catalogue.row("attention", plan.phase(case.phase).groups[0])
    assert row is not None
    return row.offer


def with_index(case: Case, offer: Offer, step: MadeStep, device: str, seed: int = 0) -> MadeStep:
    """The same step with its pages in the form the row reads; no index where nothing is cached."""
    q_lens, kv_lens = zip(*case.rows, strict=True)
    form = next(form for form in ("page_table", "csr", "indirect") if form in offer.index_forms or form == "indirect")
    again = make_batch(
        q_lens,
        kv_lens,
        layer=step.layer,
        page_size=case.page_size,
        index_form=form,
        cache_form="latent" if case.family == "mla" else "nhd",
        device=device,
        seed=seed,
    )
    # the same lengths and seed give the same pages
    assert again.pages == step.pages
    return replace(step, batch=replace(step.batch, index=again.batch.index))


def built(plan: Plan, phase: Phase, step: MadeStep, catalogue: Catalogue, device: str, most: int = 4096) -> Any:
    """The stamped backend of a phase, for up to `most` tokens; a draft loop's first step."""
    runner = RunnerShape(
        device=device,
        layers=(step.layer,),
        max_rows=max(64, step.batch.num_rows),
        max_tokens=most,
        max_pages=step.kv.k.shape[0],
        max_kv_len=most,
    )
    backend = build(plan, runner, catalogue).serving_attention_backend(phase)
    if is_container(backend):
        backend = steps_of(backend)[0]
    # a key may stand for several kernels: the plan says which of them this is
    assert read_stamp(backend).kernel == plan.phase(phase).groups[0].kernel
    return backend


def run(backend: Any, case: Case, step: MadeStep, lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """One eager step; outputs start as NaN."""
    kv: PagedKV | None = step.kv
    new: RaggedKV | None = None
    if case.new:
        kv, new = split_new(step)
        kv = None if case.new == "all" else kv
    out = torch.full(
        (step.batch.num_tokens, case.heads[0], case.dims[1]), float("nan"), dtype=step.q.dtype, device=step.q.device
    )
    state = backend.plan(step.batch)
    backend.forward(step.q, kv, step.layer, state, out=out, lse=lse, new=new)
    synchronize()
    index = make_step(case, "cpu").batch.index
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, replace(step.batch, index=index))
    return out, truth, true_lse


def run_graph(backend: Any, case: Case, step: MadeStep, other: MadeStep) -> tuple[Tensor, Tensor]:
    """Capture one step; then replay it over another's tensors at the same addresses: the output of the replay.

    The other step has other numbers, other pages and shorter rows, as an engine's next step has.
    """
    batch = replace(step.batch, max_kv_len=4096)
    if hasattr(backend, "init_graphs"):
        backend.init_graphs(len(case.rows), step.batch.num_tokens)
    out = torch.zeros(step.batch.num_tokens, case.heads[0], case.dims[1], dtype=step.q.dtype, device=step.q.device)
    state = backend.plan(batch, capture=True)
    backend.forward(step.q, step.kv, step.layer, state, out=out)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if hasattr(backend, "replan"):
            backend.replan(state)
        backend.forward(step.q, step.kv, step.layer, state, out=out)
    kv_lens = torch.tensor([max(1, kv - 9) for _, kv in case.rows], dtype=torch.int32)
    for mine, theirs in tensors_of(step, other):
        mine.copy_(theirs)
    batch.kv_lens.copy_(kv_lens)
    again = replace(batch, kv_lens_host=kv_lens)
    backend.plan(again, state=state)
    out.zero_()
    # what a plan dropped is written over before a graph that still reads it runs
    spoilt = [torch.full_like(out, float("nan")) for _ in range(64)]
    graph.replay()
    synchronize()
    del spoilt
    index = make_step(case, "cpu", seed=1).batch.index
    truth, _ = reference_attention(step.q, step.kv, step.layer, replace(again, index=index))
    return out, truth


def tensors_of(step: MadeStep, other: MadeStep) -> list[tuple[Tensor, Tensor]]:
    """What changes from step to step, pairwise: queries, the cache and its index."""
    pairs = [(step.q, other.q), (step.kv.k, other.kv.k), (step.kv.v, other.kv.v)]
    pairs += [(getattr(step.batch.index, name), getattr(other.batch.index, name)) for name in INDEX_TENSORS]
    return [(mine, theirs) for mine, theirs in pairs if mine is not None and theirs is not None]


def synchronize() -> None:
    """Let a fault show where it happened."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def verdict(case: Case, out: Tensor, truth: Tensor, lse: tuple[Tensor, Tensor] | None) -> dict[str, object]:
    """Whether what came out is right: no NaN, within the bound of its dtype, LSE too."""
    if not bool(torch.isfinite(out.float()).all()):
        tokens = (~torch.isfinite(out.float())).any(-1).any(-1).nonzero().flatten().tolist()
        return {"status": "wrong", "reason": f"not finite in tokens {tokens[:8]}"}
    error = relative_error(out, truth)
    told: dict[str, object] = {"status": "ok" if error <= BOUNDS[case.dtype] else "wrong", "rel_error": error}
    if lse is not None:
        got, true = (item.double().cpu() for item in lse)
        seen = torch.isfinite(true)
        off = float((got[seen] - true[seen]).abs().max()) if bool(seen.any()) else 0.0
        told["lse_error"] = off
        if not off <= LSE_BOUND * max(1.0, float(true[seen].abs().max())) or bool(torch.isfinite(got[~seen]).any()):
            told |= {"status": "wrong", "reason": f"LSE off by {off:.1e}"}
    return told


if __name__ == "__main__":
    sys.exit(main())
