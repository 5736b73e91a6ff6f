"""Sparse attention on this GPU against the reference, case by case: resolved, built by its real factory and run.

    python bench/sparse_checks.py [KERNEL] [--from N]

KERNEL is dsa, dsv4 or flashmla; all three without one. Lines are those of `checks.py`: one JSON object a case on
stdout, before it runs and after.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.device_check import torch_device
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.host import HostFacts, this_host
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.testing.conformance.attend import answer_of_graph, answer_of_step, make_step
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.sparse_attend import (
    chosen_by_indexer,
    make_sparse_step,
    sparse_answer,
    sparse_answer_of_graph,
)
from backstamp.testing.conformance.sparse_cases import SparseCase
from checks import about, built, row_of, tell_all, verdict
from sparse_cases import CASES, KERNELS

__all__ = ["check", "main"]

MOST_TOKENS = 8192


def main() -> int:
    """Run the cases of one kernel, or all; exit 3 when the device is lost and the rest needs another process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", nargs="?", choices=sorted(KERNELS.values()))
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="skip the cases before this one")
    options = parser.parse_args()
    host, catalogue = this_host(), build_catalogue(discover())
    device = torch_device(host.device)
    return tell_all(
        (
            {"number": number, **about(KERNELS[case.family], case)},
            lambda case=case: check(case, host, catalogue, device),  # type: ignore[misc]
        )
        for number, case in enumerate(CASES)
        if number >= options.first and options.kernel in (None, KERNELS[case.family])
    )


def check(case: AttentionCase, host: HostFacts, catalogue: Catalogue, device: str) -> dict[str, object]:
    """Run one case: its status, worst error and what was built."""
    plan = resolve_case(case, host, catalogue)
    group = plan.phase(case.phase).groups[0]
    told: dict[str, object] = {"row": group.row, "library": group.library.as_json() if group.library else None}
    offer = row_of(plan, case, catalogue)
    if not isinstance(case, SparseCase):
        # dense steps that `check_cases.py` leaves out
        step = make_step(case, device)
        backend = built(plan, case.phase, step, catalogue, device, MOST_TOKENS)
        answer = answer_of_graph(backend, case, step) if case.graph else answer_of_step(backend, case, step, calls=2)
        return told | verdict(case, answer, offer)
    made = make_sparse_step(case, device)
    backend = built(plan, case.phase, made.step, catalogue, device, MOST_TOKENS)
    if case.indexer:
        made, words = chosen_by_indexer(backend, case, made)
        if words:
            return told | {"status": "wrong", "reason": words}
    run = sparse_answer_of_graph if case.graph else sparse_answer
    # three digits more than any bound here
    return told | verdict(case, run(backend, case, made, dtype=torch.float32), offer)


def resolve_case(case: AttentionCase, host: HostFacts, catalogue: Catalogue) -> Plan:
    """The plan that has the case's kernel in every phase of its runner."""
    draft = case.phase.startswith("draft")
    asked: dict[str, Any] = {"draft_attention_backend" if draft else "attention_backend": KERNELS[case.family]}
    asked["page_size"] = case.page_size
    if case.kv_dtype != "same":
        asked["kv_cache_dtype"] = case.kv_dtype
    asked |= dict(case.asks)
    if case.phase not in ("prefill", "decode"):
        asked |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_topk": 1}
    role = "draft" if draft else "target"
    graph = "uniform" if case.graph else "never"
    engine = EngineFacts(name="check", graph=graph, prefix_cache=True, layouts=frozenset({case.layout}))
    return resolve(make_launch(Requests(**asked), role=role), engine, case.model(), host, catalogue, role=role)


if __name__ == "__main__":
    sys.exit(main())
