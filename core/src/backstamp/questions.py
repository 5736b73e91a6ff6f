"""Sixth step of the flow: launch, engine and model facts → what is asked of a kernel.

In: `Launch`, `EngineFacts`, `ModelFacts` and the role. Out: the phases this runner runs, one `Question` per (component,
family) of its layers, and what each phase needs beside. It compares nothing with any declaration.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from backstamp.catalogue import Catalogue
from backstamp.declarations import Phase, Role, Slot
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput
from backstamp.evaluation import PhaseNeeds, Question
from backstamp.host import HostFacts
from backstamp.launch import Launch
from backstamp.model import LINEAR_FAMILIES, LayerFacts, LayerGroup, ModelFacts

__all__ = ["Asked", "kv_dtype_of", "needs_of", "questions_for", "running_phases", "slot_of"]

#: What operators write for a cache dtype, and the canonical name. fp8_e4m3 is settled by the host.
_KV_NAMES: Final = {
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp32": "fp32",
    "float32": "fp32",
    "fp8_e5m2": "e5m2",
    "e5m2": "e5m2",
    "fp8_e4m3": "e4m3fn",
    "fp8": "e4m3fn",
    "e4m3fn": "e4m3fn",
    "e4m3fnuz": "e4m3fnuz",
}
#: gfx942 computes the fnuz form of e4m3, gfx950 and CUDA the fn form (AMD CDNA3 and CDNA4 ISA guides).
_FNUZ_ARCHS: Final = frozenset({"gfx940", "gfx941", "gfx942"})


class Asked(NamedTuple):
    """One question and the groups of like layers it speaks for; all of one component and one family."""

    component: str
    groups: tuple[LayerGroup, ...]
    question: Question


def slot_of(family: str) -> Slot:
    """The slot a family's kernels live in."""
    return "linear" if family in LINEAR_FAMILIES else "attention"


def running_phases(launch: Launch, role: Role) -> tuple[Phase, ...]:
    """The phases a runner runs: a target verifies when something drafts, a draft steps when it takes over one step."""
    if role == "target":
        return ("prefill", "decode", "verify") if launch.speculative else ("prefill", "decode")
    if launch.speculative_num_steps > 1:
        return ("prefill", "draft_decode", "draft_extend")
    return ("prefill", "draft_extend")


def questions_for(
    slot: Slot,
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    kv_dtype: str,
    groups: Iterable[LayerGroup] | None = None,
) -> tuple[Asked, ...]:
    """One question per component and family of a slot, in model order; `groups` narrows to some layers."""
    together: dict[tuple[str, str], list[LayerGroup]] = {}
    for group in model.groups if groups is None else groups:
        if slot_of(group.facts.family) == slot:
            together.setdefault((group.component, group.facts.family), []).append(group)
    situations = _situations(launch, engine)
    return tuple(
        [
            Asked(component, tuple(alike), _question(alike, launch, engine, model, kv_dtype, situations))
            for (component, _), alike in together.items()
        ]
    )


def needs_of(phase: Phase, slot: Slot, launch: Launch, engine: EngineFacts) -> PhaseNeeds:
    """What one phase asks beside the question."""
    features: frozenset[str] = frozenset()
    if launch.speculative_topk > 1 and phase in ("verify", "draft_decode"):
        features |= {"tree_mask" if phase == "verify" else "topk"}
    if launch.dcp_size > 1 and phase != "prefill":
        features |= {"lse"}
    prefix = phase != "prefill" or engine.prefix_cache or _is_chunked(launch)
    return PhaseNeeds(phase, features, prefix and slot == "attention")


def kv_dtype_of(launch: Launch, model: ModelFacts, host: HostFacts, catalogue: Catalogue) -> str:
    """The canonical cache dtype; "auto" is the model's own.

    Raises:
        BadInput: no kernel and no convention knows the name; the accepted names are listed.
    """
    name = launch.kv_cache_dtype
    if name == "auto":
        return model.dtype
    if name in ("fp8_e4m3", "fp8") and host.arch in _FNUZ_ARCHS:
        return "e4m3fnuz"
    if name in _KV_NAMES:
        return _KV_NAMES[name]
    declared = {kv for rows in catalogue.rows.values() for row in rows for kv in row.offer.kv_dtypes - {"same"}}
    mapped = {kv for rows in catalogue.rows.values() for row in rows for kv in row.offer.kv_dtype_names}
    if name in declared | mapped:
        return name
    known = ", ".join(sorted({"auto", *_KV_NAMES, *declared, *mapped}))
    raise BadInput("--kv-cache-dtype", needed=f"one of {known}", found=repr(name))


def _situations(launch: Launch, engine: EngineFacts) -> frozenset[str]:
    words = []
    if launch.speculative:
        words.append("spec")
    if launch.speculative_topk > 1:
        words.append("topk")
    if launch.dcp_size > 1:
        words.append("dcp")
    if launch.tp_size > 1:
        words.append("tp")
    if launch.deterministic:
        words.append("deterministic")
    if engine.graph != "never":
        words.append("graph")
    if engine.prefix_cache:
        words.append("prefix_cache")
    if _is_chunked(launch):
        words.append("chunked_prefill")
    return frozenset(words)


def _is_chunked(launch: Launch) -> bool:
    return launch.chunked_prefill_size is not None and launch.chunked_prefill_size > 0


def _question(
    groups: list[LayerGroup],
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    kv_dtype: str,
    situations: frozenset[str],
) -> Question:
    features = _layer_features(groups[0].facts)
    for group in groups[1:]:
        features |= _layer_features(group.facts)
    return Question(
        family=groups[0].facts.family,
        dims=frozenset([(group.facts.head_dim, group.facts.v_head_dim) for group in groups]),
        features=features,
        dtype=model.dtype,
        kv_dtype=kv_dtype,
        kv_name=launch.kv_cache_dtype,
        situations=situations,
        page_size=launch.page_size if launch.page_size is not None else engine.page_size,
        causal="non_causal" not in features,
        deterministic=launch.deterministic,
        chunk_tokens=launch.chunked_prefill_size,
        bypass=launch.policy.bypass,
        engine=engine,
    )


def _layer_features(facts: LayerFacts) -> frozenset[str]:
    features = []
    if facts.window_left >= 0:
        features.append("window")
    if facts.softcap > 0:
        features.append("softcap")
    if facts.sinks is not None:
        features.append("sinks")
    if not facts.causal:
        features.append("non_causal")
    return frozenset(features)
