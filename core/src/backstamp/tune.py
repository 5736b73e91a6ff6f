"""Time the kernels `auto` may choose among on this machine, each through its real built backend, its answer checked.

In: what a launch, an engine, a model and this machine are, and the load to time them at. Out: one `Tuned` for each
phase, kind of layer and kernel: its time, or why it has none. A kernel whose answer is off is told and not timed. It
writes no file (`backstamp.tune_record` does), and no resolve ever comes here.

Timed is `forward` of one layer; `plan`, once a step for all layers, is outside. Only attention of the main component
over a plain cache is timed: other layers keep the declared priority.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, cast

from backstamp.attention import LayerSpec
from backstamp.catalogue import Catalogue
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.construction import RunnerShape, build
from backstamp.declarations import Offer, Phase
from backstamp.device_check import torch_device
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError, NoDevice
from backstamp.facts import Facts, gather
from backstamp.host import HostFacts, this_host
from backstamp.launch import Launch, Request
from backstamp.made_steps import cannot, layer_spec, random_step
from backstamp.measured import rank_layer, work_of
from backstamp.measurements import DEFAULT_WORKLOAD, Machine, Timed, WorkClass, Workload
from backstamp.model import LayerGroup, ModelFacts
from backstamp.plan import Plan
from backstamp.rank import pickable
from backstamp.resolution import decide, resolve_on
from backstamp.sampled_truth import wrong_samples
from backstamp.selection import Table
from backstamp.stamp import said
from backstamp.timers import Timer, timer_for

if TYPE_CHECKING:
    from backstamp.attention import AttentionBackend
    from backstamp.testing.batches import MadeStep

__all__ = ["Tuned", "tune"]

Status = Literal["timed", "wrong", "failed", "skipped"]
#: Why a kernel that reads a selection of keys is not timed.
_SPARSE: Final = "the selection of keys it reads is the engine's own to make"
#: Words of an error after which it may be that nothing runs on the device in this process.
_LOST: Final = ("CUDA error", "cudaError", "HIP error", "illegal memory access", "Triton Error")
_LOST_TOO: Final = "; the device is lost to this process and nothing was timed after it: --kernel times the others"


class Tuned(NamedTuple):
    """One kernel at one class of work: its time, or the `reason` it has none.

    `wrong`: its answer was off. `failed`: it accepts this work and could not be built or run. `skipped`: it cannot be
    timed as `auto` would run it.
    """

    work: WorkClass
    kernel: str
    status: Status
    timed: Timed | None = None
    reason: str = ""

    def as_json(self) -> dict[str, object]:
        """The row for tools."""
        time = self.timed.microseconds if self.timed is not None else None
        work = self.work._asdict()
        return {"work": work, "kernel": self.kernel, "status": self.status, "microseconds": time, "reason": self.reason}


def tune(
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    host: HostFacts,
    catalogue: Catalogue,
    *,
    workload: Workload = DEFAULT_WORKLOAD,
    kernels: Sequence[str] = (),
    timer: Timer | None = None,
    told: Callable[[Tuned], None] | None = None,
) -> list[Tuned]:
    """Time every kernel that `auto` may choose, or those named, in every phase of a target; `told` hears of each.

    What the launch asks for by key is left aside: the kernels are what is compared. `timer` answers the microseconds of
    one call; the default is the device's own. A kernel that leaves the device unusable is the last of the list.

    Raises:
        BadInput: a device nothing here times. BadHost, NoDevice: `host` is not this machine. BackstampError: as
        `resolve`.
    """
    _check_here(host)
    compiled, timer = compile_for(catalogue, host), timer or timer_for(host.device)
    free = replace(launch, keys={}, components={})
    done: list[Tuned] = []
    for group in model.attention_groups:
        alone = replace(model, layers=((group.facts,),), groups=(LayerGroup("main", group.facts, (0,)),))
        facts = gather(compiled, free, engine, alone)
        bench = _Bench(facts, compiled, timer)
        for phase, (table, _) in decide(facts)[1].chosen.items():
            for tuned in bench.phase(phase, table, kernels, workload):
                done.append(tuned)
                if told is not None:
                    told(tuned)
            if bench.lost:
                return done
    return done


def _check_here(host: HostFacts) -> None:
    """Times under the name of a machine are of kernels that ran on it."""
    unlike = Machine.of(host).unlike(Machine.of(this_host(host.device, host.device_index)))
    if unlike:
        raise NoDevice("tune", needed="this machine", found=f"another ({unlike})", fix="Run it on that machine")


def _answers(device: str) -> bool:
    """Whether a device still computes: "no kernel image", for one, is the error of a single launch."""
    import torch

    # the first may be told of the launch that failed before it
    for _ in range(2):
        try:
            return torch.ones(2, device=device).sum().item() == 2
        except Exception:
            continue
    return False


@dataclass(slots=True)
class _Bench:
    """One kind of layer; the last step made is kept, because most kernels of a phase read the same. `lost`: a kernel
    left the device unusable, and whatever ran after it would fail for its sake."""

    facts: Facts
    host: HostCatalogue
    timer: Timer
    lost: bool = False
    made: dict[tuple[object, ...], MadeStep] = field(default_factory=dict)

    def phase(self, phase: Phase, table: Table, kernels: Sequence[str], workload: Workload) -> Iterator[Tuned]:
        """Every kernel of one phase."""
        layer = self.facts.model.groups[0].facts
        work = work_of(self.facts, "attention", phase, layer, workload.load_of(phase))
        assert work is not None, "a target's phases all have a load"
        for name in dict.fromkeys(kernels or table.by_rank(pickable(self.facts, table))):
            yield self._kernel(work, table, name)
            if self.lost:
                return

    def _kernel(self, work: WorkClass, table: Table, name: str) -> Tuned:
        setting = f"{work.phase}_attention_backend"
        asked = replace(self.facts.launch, keys={setting: Request(name, "operator", f"tune of {work.phase}")})
        try:
            plan = resolve_on(self.host, asked, self.facts.engine, self.facts.model)
        except BackstampError as refusal:
            return Tuned(work, name, "skipped", reason=refusal.message)
        group = plan.phase(work.phase).groups[0]
        would = table.parts(name, pickable(self.facts, table))
        if would and would[0].row.index != group.row:
            return Tuned(work, name, "skipped", reason="asked for, it runs another of its rows than auto would take")
        row = self.host.catalogue.row("attention", group)
        assert row is not None, "the plan was just resolved on this catalogue"
        reason = _SPARSE if group.family == "sparse_mla" else cannot("attention", group, row.offer)
        if reason:
            return Tuned(work, name, "skipped", reason=reason)
        try:
            wrong, time = self._run(work, plan, row.offer)
        except KeyboardInterrupt:
            raise
        except BaseException as cause:
            # one kernel that cannot run must not hide the others, not even one that ends its process where it can
            words = said(cause)
            self.lost = any(word in words for word in _LOST) and not _answers(torch_device(self.facts.host.host.device))
            return Tuned(work, name, "failed", reason=words + _LOST_TOO * self.lost)
        if wrong:
            return Tuned(work, name, "wrong", reason=wrong)
        if not 0 < time < float("inf"):
            return Tuned(work, name, "failed", reason=f"needs a time above 0, got {time} from the timer")
        plugin, library = group.plugin, group.library
        # four digits are more than a repeated run agrees on
        rounded = float(f"{time:.4g}")
        timed = Timed(
            work, group.kernel, group.row, plugin.distribution, plugin.version, library, plan.page_size, rounded
        )
        return Tuned(work, name, "timed", timed)

    def _run(self, work: WorkClass, plan: Plan, offer: Offer) -> tuple[str, float]:
        """What is wrong with the kernel's answer, and its time where nothing is."""
        device = torch_device(plan.device)
        facts = rank_layer(self.facts.model.groups[0].facts, self.facts.launch)
        spec = layer_spec(facts, 0, "main", device)
        step = self._step(work, plan, offer, spec)
        runner = RunnerShape(
            device=device,
            layers=(spec,),
            max_rows=step.batch.num_rows,
            max_tokens=step.batch.num_tokens,
            max_pages=step.kv.k.shape[0],
            max_kv_len=step.batch.max_kv_len,
        )
        built = build(plan, runner, self.host.catalogue).serving_attention_backend(work.phase)
        backend = cast("AttentionBackend[object]", built)
        state = backend.plan(step.batch)
        shape = (step.batch.num_tokens, spec.num_qo_heads, spec.v_head_dim)
        # memory that is just free may hold another kernel's right answer
        out = step.q.new_full(shape, float("nan"))

        def forward() -> object:
            return backend.forward(step.q, step.kv, spec, state, out=out)

        forward()
        wrong = wrong_samples(out, step, plan.dtype, offer.accuracy)
        return (wrong, 0.0) if wrong else ("", self.timer(forward))

    def _step(self, work: WorkClass, plan: Plan, offer: Offer, spec: LayerSpec) -> MadeStep:
        forms = tuple(sorted(offer.index_forms))
        key = (work, plan.page_size, plan.kv_dtype, forms)
        if key not in self.made:
            # before the next is made: two may not fit
            self.made.clear()
            rows = ((work.q_len, max(work.q_len, work.kv_len)),) * work.rows
            self.made[key] = random_step(work.phase, spec, offer, plan, rows)
        return self.made[key]
