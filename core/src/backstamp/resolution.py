"""The resolver: launch, engine, model, host and catalogue → the `Plan` of one runner.

In: frozen facts only. Out: a frozen plan, or one error with every reason. It reads no file, no clock and no global,
imports no backend, and raises instead of logging. A runner holds its plan: nothing is cached here.

.. versionadded:: 0.1
"""

from __future__ import annotations

from backstamp.catalogue import Catalogue
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.declarations import PHASES, Phase, Role
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest, StrictViolation
from backstamp.host import HostFacts
from backstamp.hostfit import HostRow
from backstamp.launch import Launch
from backstamp.linear_slot import resolve_linear
from backstamp.measurements import Measurements
from backstamp.model import ModelFacts
from backstamp.phase_choice import PhaseWork
from backstamp.plan import PhasePlan, Plan, Warn
from backstamp.questions import kv_dtype_of
from backstamp.settle import graph_level, layout_of, losses_of, page_size_of

__all__ = ["NOT_RUN", "resolve", "resolve_on"]

NOT_RUN = "not run"
_NOT_RUN = {phase: PhasePlan(phase, None, "", None, None, None, NOT_RUN, (), ()) for phase in PHASES}
#: Warnings that strict mode turns into errors: a choice was lost, changed or failed.
_STRICT_CODES = frozenset({"failed", "lost", "changed", "inherited", "retired", "shadowed", "unused"})
#: Requests that mean something only where a draft proposes tokens.
_SPECULATIVE_KEYS = ("verify_attention_backend", "draft_attention_backend")
_GRAPHED: tuple[Phase, ...] = ("decode", "verify", "draft_decode")


def resolve(
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    host: HostFacts,
    catalogue: Catalogue,
    measurements: Measurements | None = None,
    role: Role = "target",
    *,
    target: Plan | None = None,
) -> Plan:
    """Resolve one runner; `target` is the target's plan when a draft may inherit from it.

    Raises:
        BackstampError: one of its causes, before any weight is touched, with a verdict for every candidate.
    """
    return resolve_on(compile_for(catalogue, host), launch, engine, model, measurements, role, target=target)


def resolve_on(
    host: HostCatalogue,
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    measurements: Measurements | None = None,
    role: Role = "target",
    *,
    target: Plan | None = None,
) -> Plan:
    """Resolve one runner on a catalogue already compiled for its host."""
    kv_dtype = kv_dtype_of(launch, model, host.host, host.catalogue)
    if measurements is not None and measurements.host != host.host.name:
        measurements = None
    work = PhaseWork(host, launch, engine, model, measurements, role, target, kv_dtype)
    for phase in work.order():
        work.decide(phase)
    _check_sub_settings(launch, model, work)
    linear, linear_layout = resolve_linear(host, launch, engine, model, kv_dtype, measurements, role)
    rows = work.rows()
    who = f"{role} of {model.name}"
    page_size, page_size_source = page_size_of(rows, launch, engine, who)
    layouts = (("attention", layout_of(rows, engine, who)), *linear_layout)
    if target is not None and model.draft is not None and model.draft.shares_kv:
        _check_shared_cache(who, page_size, layouts[0][1], rows, target)
    plan = Plan(
        host=host.host.name,
        model=model.name,
        role=role,
        phases=tuple([work.plans.get(phase, _NOT_RUN[phase]) for phase in PHASES]),
        linear=linear,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        page_size_source=page_size_source,
        layouts=layouts,
        graph="never" if engine.graph == "never" else graph_level(work.rows(_GRAPHED), engine),
        num_steps=launch.speculative_num_steps,
        topk=launch.speculative_topk,
        losses=() if engine.graph == "never" else losses_of(work.chosen, engine),
        warnings=_warnings(work, host, rows),
        bypassed=tuple(sorted(launch.policy.bypass)),
    )
    _check_strict(launch, plan)
    return plan


def _warnings(work: PhaseWork, host: HostCatalogue, rows: list[HostRow]) -> tuple[Warn, ...]:
    warnings = list(work.warnings)
    if host.catalogue.failures and any("auto" in plan.source for plan in work.plans.values()):
        warnings += [
            Warn(
                "failed", f"plugin {item.plugin.name} ({item.plugin.distribution} {item.plugin.version}): {item.cause}"
            )
            for item in host.catalogue.failures
        ]
    warnings += [
        Warn("shadowed", f"{item.name}: claimed by {' and '.join(item.distributions)}, so nobody has it")
        for item in host.catalogue.conflicts.values()
    ]
    if not work.launch.speculative:
        asked = [work.launch.keys[name] for name in _SPECULATIVE_KEYS if name in work.launch.keys]
        warnings += [Warn("unused", f"{request.setting} {request.value}: nothing drafts") for request in asked]
    if [row for row in rows if row.assumed]:
        warnings.append(Warn("assumed", f"host {host.host.name} has no library list: libraries count as present"))
    if [row for row in rows if row.interpreted]:
        warnings.append(
            Warn("interpreted", "Triton rows run in Triton's interpreter on the CPU: for tests, not for use")
        )
    return tuple(dict.fromkeys(warnings))


def _check_shared_cache(who: str, page_size: int, layout: str, rows: list[HostRow], target: Plan) -> None:
    """A draft that reads its target's KV cache must read it as the target lays it out."""
    ours, theirs = f"{layout} pages of {page_size}", f"{dict(target.layouts)['attention']} pages of {target.page_size}"
    if ours != theirs:
        kernels = ", ".join(dict.fromkeys(phase.kernel for phase in target.running if phase.kernel is not None))
        raise ConflictingRequest(
            f"{who}, which shares its target's KV cache",
            needed=f"{theirs}, as {kernels} of the target lays it out",
            found=f"{ours} of {', '.join(dict.fromkeys(row.offer.kernel for row in rows))}",
            fix="Ask for a draft kernel that reads the target's layout, or set --page-size for both",
        )


def _check_sub_settings(launch: Launch, model: ModelFacts, work: PhaseWork) -> None:
    """Sub-settings of a parent that is not in force are an error, never ignored."""
    if not launch.keys:
        return
    families = {group.facts.family for group in model.groups}
    sparse = launch.sub_settings("dsa_")
    if sparse:
        parents = {plan.kernel for plan in work.plans.values()}
        if "sparse_mla" not in families or parents != {"dsa"}:
            raise ConflictingRequest(
                " ".join(request.setting for request in sparse),
                needed="a sparse MLA model served by dsa",
                found=f"{', '.join(sorted(families))} layers served by {', '.join(sorted(map(str, parents)))}",
                fix="Leave these flags out, or set --attention-backend dsa on a sparse model",
            )
    linear = launch.sub_settings("linear_attn_")
    if linear and not model.is_hybrid:
        raise ConflictingRequest(
            " ".join(request.setting for request in linear),
            needed="a model with linear-attention layers",
            found=f"{', '.join(sorted(families))} layers only ({model.name})",
            fix="Leave these flags out",
        )


def _check_strict(launch: Launch, plan: Plan) -> None:
    if not launch.policy.strict:
        return
    lost = [warning for warning in plan.warnings if warning.code in _STRICT_CODES]
    if lost:
        raise StrictViolation(
            f"{plan.role} of {plan.model} in strict mode",
            needed="no choice that is lost, changed or failed",
            found="; ".join(f"{warning.code}: {warning.text}" for warning in lost),
            fix="Ask for kernels that serve, or leave --strict out",
        )
