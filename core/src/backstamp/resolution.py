"""The resolver: launch, engine, model, host and catalogue → the `Plan` of one runner.

In: frozen facts only. Out: a frozen plan, or one error with every reason. It reads no file, no clock and no global,
imports no backend, and raises instead of logging. A runner holds its plan: nothing is cached here.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence

from backstamp.catalogue import Catalogue
from backstamp.choosing import choose_phases
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.declarations import PHASES, Role
from backstamp.draft_needs import check_draft, check_shared_cache
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput, ConflictingRequest, StrictViolation
from backstamp.facts import Facts, gather
from backstamp.feature_gates import gate_features
from backstamp.host import HostFacts
from backstamp.launch import FLAGS, Launch
from backstamp.linear_slot import resolve_linear
from backstamp.losses import GRAPHED, losses_of
from backstamp.measured import timings_of
from backstamp.measurements import Measurements
from backstamp.model import ModelFacts
from backstamp.phase_choice import SPARSE_KEY, PhaseWork
from backstamp.plan import Plan
from backstamp.plan_rows import not_run
from backstamp.plan_warnings import STRICT_CODES, warnings_of
from backstamp.rank import first_by_priority
from backstamp.selection import Decision, Part
from backstamp.settle import conversions_of, graph_level, kv_dtype_of_rows, layout_of, page_size_of, share_a_cache
from backstamp.text import plain

__all__ = ["decide", "resolve", "resolve_on"]

#: The request for seeded drafts, by its field of `Requests`.
_SEED = "seed_dsa_topk_from_draft_extend"
_NOT_RUN = {phase: not_run(phase) for phase in PHASES}


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
        BackstampError: one of its causes, before any weight is touched, with a verdict for every candidate. BadInput:
        an argument that is not of its class, or an unknown role.
    """
    for name, value, kind in (("host", host, HostFacts), ("catalogue", catalogue, Catalogue)):
        if not isinstance(value, kind):
            raise BadInput(f"resolve, {name}", needed=kind.__name__, found=plain(repr(value)))
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
    _check_arguments(host, launch, engine, model, measurements, role, target)
    return decide(gather(host, launch, engine, model, measurements, role, target))[0]


def _check_arguments(
    host: object, launch: object, engine: object, model: object, measurements: object, role: object, target: object
) -> None:
    """Refuse what is not of its class, by the argument's name."""
    for name, value, kind in (
        ("host", host, HostCatalogue),
        ("launch", launch, Launch),
        ("engine", engine, EngineFacts),
        ("model", model, ModelFacts),
    ):
        if not isinstance(value, kind):
            raise BadInput(f"resolve, {name}", needed=kind.__name__, found=plain(repr(value)))
    if measurements is not None and not isinstance(measurements, Measurements):
        raise BadInput("resolve, measurements", needed="Measurements or None", found=plain(repr(measurements)))
    if target is not None and not isinstance(target, Plan):
        raise BadInput("resolve, target", needed="the target's Plan or None", found=plain(repr(target)))
    if role not in ("target", "draft"):
        raise BadInput("resolve, role", needed="target or draft", found=repr(role))


def decide(facts: Facts) -> tuple[Plan, PhaseWork]:
    """The plan of one runner, and the work behind it for whoever explains the plan.

    Raises:
        BackstampError: as `resolve`.
    """
    check_draft(facts)
    _check_sparse_parent(facts)
    work = choose_phases(facts)
    _check_sub_settings(work)
    features = gate_features(facts)
    linear = resolve_linear(facts, work.failed)
    decisions = [*work.decisions(), *linear.decisions]
    parts, launch, engine = work.parts(), facts.launch, facts.engine
    rows = [part.row for part in parts]
    who = f"{facts.role} of {facts.model.name}"
    # what cannot be had of a shared cache is told by naming both sides
    cache = facts.cache if share_a_cache(parts, facts.cache) else engine
    page_size, page_size_source = page_size_of(rows, launch, cache, who)
    if cache is not engine and page_size_source.startswith("engine"):
        page_size_source = "target"
    layouts = (("attention", layout_of(rows, cache, who)), *linear.layouts)
    kv_dtype = kv_dtype_of_rows(parts, who)
    check_shared_cache(facts, kv_dtype, page_size, layouts[0][1], rows)
    phases = tuple([work.plans.get(phase, _NOT_RUN[phase]) for phase in PHASES])
    plan = Plan(
        host=facts.host.host.name,
        device=facts.host.host.device,
        model=facts.model.name,
        role=facts.role,
        phases=phases,
        linear=linear.plan,
        dtype=facts.model.dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        page_size_source=page_size_source,
        layouts=layouts,
        graph="never" if engine.graph == "never" else graph_level(_captured(decisions), engine),
        num_steps=launch.speculative_num_steps,
        topk=launch.speculative_topk,
        losses=losses_of(facts, decisions),
        warnings=warnings_of(work, linear, decisions),
        bypassed=tuple(sorted(launch.policy.bypass)),
        features=features,
        conversions=conversions_of(phases),
        sub_settings=_sub_settings(work),
        conv_sidecar=facts.role == "draft" and facts.model.draft is not None and facts.model.draft.conv_sidecar,
        timings=timings_of(facts, decisions, first_by_priority),
    )
    _check_strict(launch, plan)
    return plan, work


def _captured(decisions: Sequence[Decision]) -> list[Part]:
    return [part for decision in decisions if decision.phase in GRAPHED for part in decision.choice.parts]


def _check_sparse_parent(facts: Facts) -> None:
    """A key for another kernel beside the sparse kernel's sub-settings is a conflict, whether or not it could serve."""
    sparse = facts.launch.sub_settings("dsa_") if facts.launch.keys else ()
    if not sparse:
        return
    for request in facts.launch.pair():
        bare = request.value.rpartition(":")[2] if request is not None else SPARSE_KEY
        alias = facts.host.catalogue.aliases.get(("attention", bare))
        if request is not None and SPARSE_KEY not in (bare, *(alias.alias.kernels if alias is not None else ())):
            raise ConflictingRequest(
                " ".join(item.setting for item in sparse),
                needed=f"a sparse MLA model served by {SPARSE_KEY}",
                found=f"layers served by {request.value} ({request.setting})",
                fix=f"Leave these flags out, or set {request.setting} {SPARSE_KEY} on a sparse model",
            )


def _sub_settings(work: PhaseWork) -> tuple[tuple[str, str], ...]:
    """What was asked of the sparse kernel's insides, where this runner runs it; the seed is a draft's alone."""
    launch = work.facts.launch
    asked = sorted((name, request.value) for name, request in launch.keys.items() if name.startswith("dsa_"))
    if launch.seed_dsa_topk_from_draft_extend and work.facts.role == "draft":
        asked.append((_SEED, "true"))
    runs = asked and any(group.kernel == SPARSE_KEY for plan in work.plans.values() for group in plan.groups)
    return tuple(asked) if runs else ()


def _check_seed(work: PhaseWork) -> None:
    """A seed for drafts that nobody takes is an error: no draft, another kernel, or more branches than one."""
    launch = work.facts.launch
    if not launch.seed_dsa_topk_from_draft_extend:
        return
    kernels = sorted({str(plan.kernel) for plan in work.plans.values()})
    found = ""
    if not launch.speculative:
        found = "a launch without speculation"
    elif launch.speculative_topk > 1:
        # choosing among branches reorders rows under the seed (SGLang 0.5.23, eagle_worker_v2.py:305)
        found = f"{launch.speculative_topk} branches a step"
    elif work.facts.role == "draft" and kernels != [SPARSE_KEY]:
        found = f"a draft served by {', '.join(kernels)}"
    if found:
        flag = FLAGS[_SEED]
        needed = f"a draft of one branch a step, served by {SPARSE_KEY}"
        raise ConflictingRequest(flag, needed=needed, found=found, fix=f"Leave {flag} out")


def _check_values(work: PhaseWork) -> None:
    """A value of a sub-setting that the chosen row does not know is an error that lists those it does."""
    for part in work.parts():
        offer = part.row.offer
        for name, known in sorted(offer.sub_settings.items()):
            request = work.facts.launch.keys.get(name)
            if request is not None and request.value not in known:
                who = f"{request.setting}, of kernel {offer.kernel!r} (plugin {part.row.plugin.name})"
                raise BadInput(who, needed=f"one of {', '.join(sorted(known))}", found=plain(repr(request.value)))


def _check_sub_settings(work: PhaseWork) -> None:
    """Sub-settings of a parent that is not in force are an error, never ignored; they speak of the target alone."""
    _check_seed(work)
    _check_values(work)
    launch, model = work.facts.launch, work.facts.model
    if not launch.keys or work.facts.role == "draft":
        return
    families = sorted({group.facts.family for group in model.groups})
    sparse = launch.sub_settings("dsa_")
    if sparse:
        parents = {plan.kernel for plan in work.plans.values()}
        if "sparse_mla" not in families or parents != {SPARSE_KEY}:
            raise ConflictingRequest(
                " ".join(request.setting for request in sparse),
                needed=f"a sparse MLA model served by {SPARSE_KEY}",
                found=f"{', '.join(families)} layers served by {', '.join(sorted(map(str, parents)))}",
                fix=f"Leave these flags out, or set --attention-backend {SPARSE_KEY} on a sparse model",
            )
    linear = launch.sub_settings("linear_attn_")
    if linear and not model.linear_groups:
        raise ConflictingRequest(
            " ".join(request.setting for request in linear),
            needed="a model with linear-attention layers",
            found=f"{', '.join(families)} layers only ({model.name})",
            fix="Leave these flags out",
        )


def _check_strict(launch: Launch, plan: Plan) -> None:
    if not launch.policy.strict:
        return
    lost = [warning for warning in plan.warnings if warning.code in STRICT_CODES]
    if lost:
        raise StrictViolation(
            f"{plan.role} of {plan.model} in strict mode",
            needed="no choice that is lost, changed or failed",
            found="; ".join(f"{warning.code}: {warning.text}" for warning in lost),
            fix="Ask for kernels that serve, or leave --strict out",
        )
