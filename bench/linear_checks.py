"""One linear-attention kernel on this GPU against float64, case by case: resolved, built, planned and run.

    python bench/linear_checks.py [KERNEL] [--from N] [--tune]

One JSON line a case on stdout, before it runs and after; every kernel of the slot where none is named. Outputs of live
rows, the whole state pool and the kept states are compared, NaN of slots that nobody may touch included.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from backstamp.attention import ComputedGates, RawGates
from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.construction import RunnerShape, build
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError, Refused
from backstamp.host import HostFacts, this_host
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp
from backstamp.testing.linear_batches import MadeLinearStep, make_linear_step
from backstamp.testing.linear_reference import LinearAnswer, reference_linear, relative_error
from checks import say, synchronize
from linear_cases import CASES, LinearCase

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Relative error of outputs and of states; chunked kernels keep what is inside a chunk in the dtype of the tokens.
BOUNDS = {"bf16": 8e-3, "fp16": 4e-3}
#: Tokens of a graph's rows are copied over, so a step that is replayed has other numbers at the same addresses.
SEEDS = (0, 1)


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
    for number, (kernel, case) in list(enumerate(jobs))[options.first :]:
        about = {"number": number, "kernel": kernel, "family": case.family, "phase": case.phase, "case": case.name}
        say({**about, "status": "running"})
        try:
            say({**about, **check(kernel, case, host, catalogue)})
        except BackstampError as refused:
            say({**about, "status": "refused", "reason": refused.message})
        except Exception as cause:
            say({**about, "status": "failed", "reason": f"{type(cause).__name__}: {cause}"[:600]})
            if "CUDA error" in str(cause) or "cudaError" in str(cause):
                return 3
    return 0


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
    device = "cpu" if host.device == "cpu" else f"{host.device.replace('rocm', 'cuda')}:0"
    plan, group = resolve_case(kernel, case, host, catalogue)
    runner = RunnerShape(device=device, layers=case.layers(), max_rows=64, max_tokens=1024)
    backend: Any = build(plan, runner, catalogue).serving_linear_backend(case.phase)
    assert read_stamp(backend).kernel == kernel
    made = make_step(case, device, SEEDS[0])
    if case.graph:
        answer = run_graph(backend, case, made, device)
    else:
        truth = true_answer(case, SEEDS[0])
        answer = (run(backend, made), made, truth)
    library = group.library.as_json() if group.library else None
    return {"row": group.row, "library": library, **verdict(case, *answer)}


def resolve_case(kernel: str, case: LinearCase, host: HostFacts, catalogue: Catalogue) -> tuple[Plan, GroupPlan]:
    """The plan that has this kernel in the case's phase and the reference kernel in the others.

    Raises:
        Refused: the row the plan accepted reads no states of the case's order.
    """
    asked: dict[str, Any] = {"attention_backend": "torch_native"}
    asked |= {f"linear_attn_{phase}_backend": "torch_native" for phase in ("prefill", "decode", "verify")}
    asked |= {f"linear_attn_{case.phase}_backend": kernel}
    if case.phase == "verify":
        asked |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
        asked |= {"speculative_topk": 2 if "parents" in case.more else 1}
    plan = resolve(make_launch(Requests(**asked)), EngineFacts(name="check"), case.model(), host, catalogue)
    assert plan.linear is not None
    group = next(row for row in plan.linear.rows if row.phase == case.phase).groups[0]
    row = catalogue.row("linear", group)
    assert row is not None
    if case.order not in row.offer.state_layouts:
        found = " and ".join(row.offer.state_layouts)
        raise Refused(f"{case.phase} kernel {kernel!r}", needed=f"states in the order {case.order}", found=found)
    return replace(plan, layouts=(("attention", "rows"), ("linear", case.order))), group


def make_step(case: LinearCase, device: str, seed: int) -> MadeLinearStep:
    """The case's tensors."""
    return make_linear_step(
        case.q_lens,
        family=case.family,
        phase=case.phase,
        layer=case.layer(),
        order=case.order,
        dtype=DTYPES[case.dtype],
        state_dtype=DTYPES[case.state_dtype],
        device=device,
        seed=seed,
        **case.more,
    )


def true_answer(case: LinearCase, seed: int) -> LinearAnswer:
    """What the step comes to, from the same numbers on the CPU."""
    made = make_step(case, "cpu", seed)
    return reference_linear(made.q, made.k, made.v, made.gates, made.layer, made.batch, made.pool)


def run(backend: Any, made: MadeLinearStep) -> Tensor:
    """One eager step; outputs start as NaN."""
    out = torch.full_like(made.v, float("nan"))
    forward(backend, made, backend.plan(made.batch), out)
    synchronize()
    return out


def forward(backend: Any, made: MadeLinearStep, state: Any, out: Tensor) -> None:
    """One layer's call."""
    named = {"pool": made.pool, "slots": made.batch.slots, "out": out}
    backend.forward(made.q, made.k, made.v, made.gates, made.layer, state, **named)


def run_graph(
    backend: Any, case: LinearCase, made: MadeLinearStep, device: str
) -> tuple[Tensor, MadeLinearStep, LinearAnswer]:
    """Capture one step, then replay it after `plan` was given another: what the replay leaves behind."""
    if device == "cpu":
        raise Refused("CUDA graph", needed="a GPU", found="cpu")
    if hasattr(backend, "init_graphs"):
        backend.init_graphs(64, 1024)
    out = torch.zeros_like(made.v)
    state = backend.plan(made.batch, capture=True)
    forward(backend, made, state, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if hasattr(backend, "replan"):
            backend.replan(state)
        forward(backend, made, state, out)
    again = make_step(case, device, SEEDS[1])
    for old, new in zip(tensors_of(made), tensors_of(again), strict=True):
        old.copy_(new)
    # its rows lie elsewhere: what was recorded reads them where they were
    backend.plan(replace(again.batch, intermediate=made.batch.intermediate), state=state)
    out.fill_(float("nan"))
    graph.replay()
    synchronize()
    return out, made, true_answer(case, SEEDS[1])


def tensors_of(made: MadeLinearStep) -> list[Tensor]:
    """What an engine writes at fixed addresses: tokens, gates and states."""
    kind = RawGates if isinstance(made.gates, RawGates) else ComputedGates
    gates = [getattr(made.gates, field.name) for field in fields(kind)]
    kept = [] if made.batch.intermediate is None else [made.batch.intermediate]
    return [made.q, made.k, made.v, *gates, made.pool.ssm, *kept]


def verdict(case: LinearCase, out: Tensor, made: MadeLinearStep, truth: LinearAnswer) -> dict[str, object]:
    """Whether what came out is right: outputs finite and near, states near, slots of others as they were."""
    if not bool(out.isfinite().all()):
        tokens = (~out.float().isfinite()).any(-1).any(-1).nonzero().flatten().tolist()
        return {"status": "wrong", "reason": f"not finite in tokens {tokens[:8]}"}
    live = truth.out.abs().sum((1, 2)) > 0
    error = relative_error(out.cpu()[live], truth.out[live])
    states = relative_error(made.pool.ssm, truth.ssm)
    if truth.intermediate is not None and made.batch.intermediate is not None:
        states = max(states, relative_error(made.batch.intermediate, truth.intermediate))
    right = max(error, states) <= BOUNDS[case.dtype]
    told: dict[str, object] = {"status": "ok" if right else "wrong", "rel_error": error, "state_error": states}
    return told if right else {**told, "reason": f"states off by {states:.1e}"}


if __name__ == "__main__":
    sys.exit(main())
