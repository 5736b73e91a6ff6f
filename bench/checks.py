"""One kernel on this GPU against float64, case by case: resolved, built by its real factory, planned and run.

    python bench/checks.py KERNEL [--from N]

One JSON line a case on stdout, before it runs and after. `kernels.py --check` runs one such process a kernel, because
a kernel that faults takes its process's device with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.construction import RunnerShape, build
from backstamp.declarations import Offer, Phase
from backstamp.device_check import torch_device
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.host import HostFacts, this_host
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.stamp import is_container, read_stamp, steps_of
from backstamp.testing.batches import IndexForm, MadeStep
from backstamp.testing.conformance.attend import answer_of_graph, answer_of_step, make_step
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.verdicts import Answer, wrong
from backstamp.testing.reference import relative_error
from check_cases import CASES

__all__ = ["built", "check", "row_of", "tell_all", "verdict"]

#: Tokens a runner is built for, and keys a graph is recorded for.
MOST_TOKENS = 4096
FORMS: tuple[IndexForm, ...] = ("page_table", "csr", "indirect")


def main() -> int:
    """Run the cases of one kernel; exit 3 when the device is lost and the rest needs another process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="skip the cases before this one")
    options = parser.parse_args()
    host, catalogue = this_host(), build_catalogue(discover())
    numbered = list(enumerate(CASES))[options.first :]
    return tell_all(
        (
            {"number": number, "key": options.kernel, **about(options.kernel, case)},
            lambda case=case: check(options.kernel, case, host, catalogue),  # type: ignore[misc]
        )
        for number, case in numbered
    )


def about(kernel: str, case: Any) -> dict[str, object]:
    """What a line says of any case."""
    return {"kernel": kernel, "family": case.family, "phase": case.phase, "case": case.name}


def tell_all(jobs: Iterable[tuple[dict[str, object], Callable[[], dict[str, object]]]]) -> int:
    """Run checks one after the other, a line before each and one after; 3 when one took the device."""
    for told, run in jobs:
        say({**told, "status": "running"})
        try:
            say({**told, **run()})
        except BackstampError as refused:
            say({**told, "status": "refused", "reason": refused.message})
        except Exception as cause:
            say({**told, "status": "failed", "reason": f"{type(cause).__name__}: {cause}"[:600]})
            if "CUDA error" in str(cause) or "cudaError" in str(cause):
                return 3
    return 0


def say(line: dict[str, object]) -> None:
    """One line of JSON, at once."""
    print(json.dumps(line), flush=True)


def check(kernel: str, case: AttentionCase, host: HostFacts, catalogue: Catalogue) -> dict[str, object]:
    """Run one case: its status, worst error and what was built."""
    plan = resolve_case(kernel, case, host, catalogue)
    offer = row_of(plan, case, catalogue)
    # LSE is asked for where the row has it, pages come in the form it reads
    form = next(form for form in FORMS if form in offer.index_forms or form == "indirect")
    case = replace(case, index_form=form, lse=case.lse and "lse" in offer.features)
    device = torch_device(host.device)
    step = make_step(case, device)
    backend = built(plan, case.phase, step, catalogue, device)
    group = plan.phase(case.phase).groups[0]
    # a key may lead to another kernel: what ran is what is told
    library = group.library and group.library.as_json()
    answer = answer_of_graph(backend, case, step, MOST_TOKENS) if case.graph else answer_of_step(backend, case, step)
    return {"kernel": group.kernel, "row": group.row, "library": library, **verdict(case, answer, offer)}


def resolve_case(kernel: str, case: AttentionCase, host: HostFacts, catalogue: Catalogue) -> Plan:
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


def row_of(plan: Plan, case: AttentionCase, catalogue: Catalogue) -> Offer:
    """The declared row the plan accepted."""
    row = catalogue.row("attention", plan.phase(case.phase).groups[0])
    assert row is not None
    return row.offer


def built(
    plan: Plan, phase: Phase, step: MadeStep, catalogue: Catalogue, device: str, most: int = MOST_TOKENS
) -> object:
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


def verdict(case: AttentionCase, answer: Answer, offer: Offer) -> dict[str, object]:
    """Whether what came out is right, by the kit's bounds; how far it is off, LSE too."""
    out, truth, lse, true_lse = answer
    words = wrong(out, truth, case, offer.accuracy, lse=lse, true_lse=true_lse)
    told: dict[str, object] = {"status": "wrong" if words else "ok"}
    if bool(torch.isfinite(out.float()).all()):
        told["rel_error"] = relative_error(out, truth)
    if lse is not None:
        seen = torch.isfinite(true_lse)
        off = (lse.double().cpu()[seen] - true_lse.double()[seen]).abs()
        told["lse_error"] = float(off.max()) if off.numel() else 0.0
    return told | ({"reason": words} if words else {})


if __name__ == "__main__":
    sys.exit(main())
