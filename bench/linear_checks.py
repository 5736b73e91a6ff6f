"""One linear-attention kernel on this GPU against float64, case by case: resolved, built, planned and run.

    python bench/linear_checks.py [KERNEL] [--from N] [--tune]

One JSON line a case on stdout, before it runs and after; every kernel of the slot where none is named. Outputs of live
rows, the whole state pool and the kept states are compared, NaN of slots that nobody may touch included.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.construction import RunnerShape, build
from backstamp.declarations import Offer
from backstamp.device_check import torch_device
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import Refused
from backstamp.host import HostFacts, this_host
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp
from backstamp.testing.conformance.linear_attend import (
    LinearOutcome,
    make_linear_case,
    outcome_of,
    outcome_of_graph,
    wrong_linear,
)
from backstamp.testing.conformance.linear_cases import LinearCase
from backstamp.testing.linear_reference import relative_error
from checks import about, tell_all
from linear_cases import CASES

__all__ = ["check", "main", "take_first_configurations"]


def main() -> int:
    """Run the cases; exit 3 when the device is lost and the rest needs another process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernel", nargs="?")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="skip the cases before this one")
    parser.add_argument("--tune", action="store_true", help="let Triton's autotuners measure all their configurations")
    options = parser.parse_args()
    if not options.tune:
        take_first_configurations()
    host, catalogue = this_host(), build_catalogue(discover())
    kernels = [options.kernel] if options.kernel else list(catalogue.keys("linear"))
    jobs = [(kernel, case) for kernel in kernels for case in CASES]
    return tell_all(
        (
            {"number": number, **about(kernel, case)},
            lambda kernel=kernel, case=case: check(kernel, case, host, catalogue),  # type: ignore[misc]
        )
        for number, (kernel, case) in list(enumerate(jobs))[options.first :]
    )


def take_first_configurations() -> None:
    """Have every autotuned Triton kernel take its first configuration that fits.

    What is checked is numbers. fla-core's prefill tunes some forty configurations for each number of heads, head dim
    and state order, and compiling them all takes longer than every other check together.
    """
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return
    every = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, *named: every(self, *named)[:1]


def check(kernel: str, case: LinearCase, host: HostFacts, catalogue: Catalogue) -> dict[str, object]:
    """Run one case: its status, worst error and what was built."""
    plan, group, offer = resolve_case(kernel, case, host, catalogue)
    device = torch_device(host.device)
    runner = RunnerShape(device=device, layers=case.layers(), max_rows=64, max_tokens=1024)
    backend: Any = build(plan, runner, catalogue).serving_linear_backend(case.phase)
    assert read_stamp(backend).kernel == kernel
    if case.graph and device == "cpu":
        raise Refused("CUDA graph", needed="a GPU", found="cpu")
    made = make_linear_case(case, device)
    outcome = (outcome_of_graph if case.graph else outcome_of)(backend, case, made)
    library = group.library.as_json() if group.library else None
    return {"row": group.row, "library": library, **verdict(case, outcome, offer)}


def resolve_case(kernel: str, case: LinearCase, host: HostFacts, catalogue: Catalogue) -> tuple[Plan, GroupPlan, Offer]:
    """The plan that has this kernel in the case's phase and the reference kernel in the others.

    Raises:
        Refused: the row the plan accepted reads no states of the case's order.
    """
    asked: dict[str, Any] = {"attention_backend": "torch_native"}
    asked |= {f"linear_attn_{phase}_backend": "torch_native" for phase in ("prefill", "decode", "verify")}
    asked |= {f"linear_attn_{case.phase}_backend": kernel}
    if case.phase == "verify":
        asked |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
        asked |= {"speculative_topk": 2 if case.parents else 1}
    plan = resolve(make_launch(Requests(**asked)), EngineFacts(name="check"), case.model(), host, catalogue)
    assert plan.linear is not None
    group = next(row for row in plan.linear.rows if row.phase == case.phase).groups[0]
    row = catalogue.row("linear", group)
    assert row is not None
    if case.order not in row.offer.state_layouts:
        found = " and ".join(row.offer.state_layouts)
        raise Refused(f"{case.phase} kernel {kernel!r}", needed=f"states in the order {case.order}", found=found)
    return replace(plan, layouts=(("attention", "rows"), ("linear", case.order))), group, row.offer


def verdict(case: LinearCase, outcome: LinearOutcome, offer: Offer) -> dict[str, object]:
    """Whether what a call left behind is right, by the kit's bounds; how far outputs and states are off."""
    out, made, _, truth = outcome
    words = wrong_linear(outcome, case, offer.accuracy)
    told: dict[str, object] = {"status": "wrong" if words else "ok"}
    if bool(out.isfinite().all()):
        live = truth.out.abs().sum((1, 2)) > 0
        states = relative_error(made.pool.ssm, truth.ssm)
        if truth.intermediate is not None and made.batch.intermediate is not None:
            states = max(states, relative_error(made.batch.intermediate, truth.intermediate))
        told |= {"rel_error": relative_error(out.cpu()[live], truth.out[live]), "state_error": states}
    return told | ({"reason": words} if words else {})


if __name__ == "__main__":
    sys.exit(main())
