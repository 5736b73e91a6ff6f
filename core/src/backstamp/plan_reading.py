"""A plan that was written comes back: the JSON of `Plan.as_json` → an equal `Plan`, or one error naming the field.

In: parsed JSON, from a file, another rank or a parent process. Out: a `Plan` that equals the one that was written and
whose digest is that of its content. It imports nothing a plan names and never fills in what is missing; whether the
plan can run here is `backstamp.adoption.adopt`'s question.

One reader a type, its fields in the order of the type.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import Final, get_args

from backstamp.declarations import GRAPH_LEVELS, PHASES, Phase, Role
from backstamp.errors import BadPlan
from backstamp.json_fields import JsonFields
from backstamp.plan import SCHEMA, LinearPlan, Plan
from backstamp.plan_rows import (
    Conversion,
    FeaturePlan,
    GroupPlan,
    LibraryRef,
    Loss,
    PhasePlan,
    PluginRef,
    SinkNeeds,
    Timing,
    Verdict,
    Warn,
)

__all__ = ["plan_from_json"]

_ROLES: Final[tuple[Role, ...]] = get_args(Role)
_PLAN: Final = (
    *("schema", "host", "device", "model", "role", "phases", "linear", "page_size", "page_size_source", "dtype"),
    *("kv_cache_dtype", "layouts", "graph", "speculative", "losses", "warnings", "bypassed"),
    *("features", "conversions", "sub_settings", "timings", "digest"),
)
_PHASE: Final = ("requested", "setting", "kernel", "plugin", "library", "source", "groups", "verdicts")
_LINEAR: Final[tuple[Phase, ...]] = ("decode", "prefill", "verify")
_VERDICT: Final = ("kernel", "accepted", "code", "field", "wanted", "have", "message", "plugin")


def plan_from_json(data: object, who: str = "plan") -> Plan:
    """The plan that was written as this JSON; `who` starts every error.

    Raises:
        BadPlan: a field is missing, malformed or unknown, the schema is not ours, or the digest is another content's.
    """
    fields = JsonFields(data, who, BadPlan)
    fields.schema(SCHEMA)
    fields.only(_PLAN)
    speculative = fields.part("speculative").only(("num_steps", "topk", "conv_sidecar"))
    phases = fields.part("phases").only(PHASES)
    linear = fields.part_or_none("linear")
    plan = Plan(
        host=fields.word("host"),
        device=fields.word("device"),
        model=fields.word("model"),
        role=fields.one_of("role", _ROLES),
        phases=tuple(_phase(phases, phase) for phase in PHASES),
        linear=None if linear is None else _linear(linear.only(_LINEAR)),
        dtype=fields.word("dtype"),
        kv_dtype=fields.word("kv_cache_dtype"),
        page_size=fields.whole("page_size", least=1),
        page_size_source=fields.word("page_size_source"),
        layouts=_pairs(fields.part("layouts")),
        graph=fields.one_of("graph", GRAPH_LEVELS),
        num_steps=speculative.whole("num_steps"),
        topk=speculative.whole("topk"),
        losses=tuple(_loss(part) for part in fields.parts("losses")),
        warnings=tuple(_warning(part) for part in fields.parts("warnings")),
        bypassed=fields.words("bypassed"),
        features=tuple(_feature(part) for part in fields.parts("features")),
        conversions=tuple(_conversion(part) for part in fields.parts("conversions")),
        sub_settings=_pairs(fields.part("sub_settings")),
        conv_sidecar=speculative.flag("conv_sidecar"),
        timings=tuple(_timing(part) for part in fields.parts("timings")),
    )
    if fields.word("digest") != plan.digest:
        raise fields.bad(
            "digest",
            f"{plan.digest[:12]}..., that of its content",
            fields.word("digest"),
            "The plan was changed after it was written; write it again",
        )
    return plan


def _phase(phases: JsonFields, phase: Phase) -> PhasePlan:
    fields = phases.part(phase).only(_PHASE)
    return PhasePlan(
        phase=phase,
        requested=fields.word_or_none("requested"),
        setting=fields.text("setting"),
        kernel=fields.word_or_none("kernel"),
        plugin=_plugin_or_none(fields),
        library=_library_or_none(fields),
        source=fields.word("source"),
        groups=tuple(_group(part) for part in fields.parts("groups")),
        verdicts=tuple(_verdict(part) for part in fields.parts("verdicts")),
    )


def _linear(fields: JsonFields) -> LinearPlan:
    return LinearPlan(
        decode=_phase(fields, "decode"), prefill=_phase(fields, "prefill"), verify=_phase(fields, "verify")
    )


def _group(fields: JsonFields) -> GroupPlan:
    fields.only(GroupPlan._fields)
    settings = fields.part("settings")
    return GroupPlan(
        component=fields.word("component"),
        family=fields.word("family"),
        layers=fields.wholes("layers"),
        kernel=fields.word("kernel"),
        plugin=_plugin(fields.part("plugin")),
        library=_library_or_none(fields),
        row=fields.whole("row"),
        source=fields.word("source"),
        cached=fields.flag("cached"),
        settings=tuple((name, settings.number(name)) for name in settings.names()),
        skipped=fields.words("skipped"),
        alignment_tokens=None
        if fields.value("alignment_tokens") is None
        else fields.whole("alignment_tokens", least=1),
        sinks=_sinks_or_none(fields),
    )


def _sinks_or_none(fields: JsonFields) -> SinkNeeds | None:
    part = fields.part_or_none("sinks")
    if part is None:
        return None
    part.only(SinkNeeds._fields)
    return SinkNeeds(stored=part.words("stored"), reads=part.words("reads"), conversion=part.word("conversion"))


def _plugin(fields: JsonFields) -> PluginRef:
    fields.only(PluginRef._fields)
    return PluginRef(name=fields.word("name"), distribution=fields.word("distribution"), version=fields.word("version"))


def _plugin_or_none(fields: JsonFields) -> PluginRef | None:
    part = fields.part_or_none("plugin")
    return None if part is None else _plugin(part)


def _library_or_none(fields: JsonFields) -> LibraryRef | None:
    part = fields.part_or_none("library")
    if part is None:
        return None
    part.only(LibraryRef._fields)
    return LibraryRef(distribution=part.word("distribution"), version=part.word_or_none("version"))


def _verdict(fields: JsonFields) -> Verdict:
    fields.only(_VERDICT)
    verdict = Verdict(
        kernel=fields.word("kernel"),
        accepted=fields.flag("accepted"),
        code=fields.word("code"),
        field=fields.text("field"),
        wanted=fields.text("wanted"),
        have=fields.text("have"),
        plugin=fields.text("plugin"),
    )
    if fields.text("message") != verdict.message:
        raise fields.bad("message", repr(verdict.message), repr(fields.text("message")))
    return verdict


def _loss(fields: JsonFields) -> Loss:
    fields.only(Loss._fields)
    return Loss(
        code=fields.word("code"),
        phase=fields.text("phase"),
        kernel=fields.text("kernel"),
        cost=fields.text("cost"),
        alternative=fields.text("alternative"),
    )


def _warning(fields: JsonFields) -> Warn:
    fields.only(Warn._fields)
    return Warn(code=fields.word("code"), text=fields.text("text"))


def _timing(fields: JsonFields) -> Timing:
    fields.only(Timing._fields)
    instead = fields.value("by_priority_microseconds")
    return Timing(
        slot=fields.word("slot"),
        phase=fields.word("phase"),
        component=fields.word("component"),
        kernel=fields.word("kernel"),
        microseconds=fields.number("microseconds"),
        by_priority=fields.word("by_priority"),
        by_priority_microseconds=None if instead is None else fields.number("by_priority_microseconds"),
    )


def _feature(fields: JsonFields) -> FeaturePlan:
    fields.only(FeaturePlan._fields)
    return FeaturePlan(
        feature=fields.word("feature"),
        on=fields.flag("on"),
        source=fields.word("source"),
        reason=fields.text("reason"),
    )


def _conversion(fields: JsonFields) -> Conversion:
    fields.only(Conversion._fields)
    return Conversion(
        parameter=fields.word("parameter"),
        phase=fields.word("phase"),
        kernel=fields.word("kernel"),
        stored=fields.word("stored"),
        wanted=fields.word("wanted"),
    )


def _pairs(fields: JsonFields) -> tuple[tuple[str, str], ...]:
    return tuple((name, fields.word(name)) for name in fields.names())
