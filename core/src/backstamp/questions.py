"""Sixth step of the flow: the facts of one resolve → what is asked of a kernel.

In: `Facts`. Out: the phases this runner runs, one `Question` per (component, family) of its layers, and what each
phase needs beside. It compares nothing with any declaration.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from backstamp.declarations import Phase, Role, Slot
from backstamp.evaluation import PhaseNeeds, Question
from backstamp.facts import Facts
from backstamp.family_rules import NO_RULE
from backstamp.launch import Launch
from backstamp.model import LINEAR_FAMILIES, LayerFacts, LayerGroup

__all__ = ["Asked", "needs_of", "questions_for", "running_phases", "slot_of"]


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


def questions_for(slot: Slot, facts: Facts, groups: Iterable[LayerGroup] | None = None) -> tuple[Asked, ...]:
    """One question per component and family of a slot, in model order; `groups` narrows to some layers.

    Components whose attention the engine keeps to itself are not asked about.
    """
    served = facts.engine.components
    together: dict[tuple[str, str], list[LayerGroup]] = {}
    for group in facts.model.groups if groups is None else groups:
        if slot_of(group.facts.family) == slot and (served is None or group.component in served):
            together.setdefault((group.component, group.facts.family), []).append(group)
    situations = _situations(facts)
    return tuple(
        [
            Asked(component, tuple(alike), _question(component, alike, facts, situations))
            for (component, _), alike in together.items()
        ]
    )


def needs_of(phase: Phase, slot: Slot, facts: Facts, cached: bool = True) -> PhaseNeeds:
    """What one phase asks beside the question; `cached` False for layers without a KV cache."""
    launch = facts.launch
    features: frozenset[str] = frozenset()
    if launch.speculative_topk > 1 and phase in ("verify", "draft_decode"):
        features |= {"tree_mask" if phase == "verify" else "topk"}
    if slot == "attention" and launch.dcp_size > 1 and phase != "prefill":
        features |= {"lse"}
    if slot == "linear" and facts.engine.tracked_states:
        features |= {"tracked_states"}
    attends = slot == "attention" and cached
    prefix = attends and (phase != "prefill" or facts.engine.prefix_cache or _is_chunked(launch))
    return PhaseNeeds(phase, features, prefix, attends and phase in ("prefill", "draft_extend"))


def _situations(facts: Facts) -> frozenset[str]:
    launch, engine = facts.launch, facts.engine
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
    if launch.training:
        words.append("training")
    if engine.graph != "never":
        words.append("graph")
    if engine.prefix_cache:
        words.append("prefix_cache")
    if _is_chunked(launch):
        words.append("chunked_prefill")
    if facts.role == "draft":
        words.append("draft")
    return frozenset(words)


def _is_chunked(launch: Launch) -> bool:
    return launch.chunked_prefill_size is not None and launch.chunked_prefill_size > 0


def _question(component: str, groups: list[LayerGroup], facts: Facts, situations: frozenset[str]) -> Question:
    launch, engine = facts.launch, facts.engine
    features = _layer_features(groups[0].facts)
    for group in groups[1:]:
        features |= _layer_features(group.facts)
    if launch.training:
        features |= {"backward"}
    # a family speaks of its attention kernels; its linear layers are another slot, with names of their own
    rule = facts.rule(component) if slot_of(groups[0].facts.family) == "attention" else NO_RULE
    return Question(
        family=groups[0].facts.family,
        dims=frozenset([(group.facts.head_dim, group.facts.v_head_dim) for group in groups]),
        groups=_group_sizes(groups, launch),
        features=features,
        dtype=facts.model.dtype,
        kv_dtype=facts.kv_dtype,
        kv_name=launch.kv_cache_dtype,
        words=situations | features | {f"kv_{facts.kv_dtype}"},
        sinks=tuple(sorted({group.facts.sinks or "" for group in groups} - {""})) if "sinks" in features else (),
        allowed=rule.allowed,
        allowed_by=rule.allowed_by,
        cached=slot_of(groups[0].facts.family) == "attention" and any(at.facts.attn_type != "encoder" for at in groups),
        page_size=launch.page_size if launch.page_size is not None else engine.page_size,
        causal=any(group.facts.causal for group in groups),
        deterministic=launch.deterministic,
        chunk_tokens=launch.chunked_prefill_size,
        bypass=launch.policy.bypass,
        engine=engine,
    )


def _group_sizes(groups: list[LayerGroup], launch: Launch) -> frozenset[int]:
    """Query heads a KV head as one rank has them; tensor parallelism splits both, and no KV head further than whole.

    Nothing is said of linear mixers, of heads that ranks do not share evenly, and of decode-context parallelism, where
    the engine says how many queries a rank gathers.
    """
    ranks = launch.tp_size
    if slot_of(groups[0].facts.family) != "attention" or launch.dcp_size > 1:
        return frozenset()
    heads = [(group.facts.num_qo_heads, group.facts.num_kv_heads) for group in groups]
    return frozenset(
        qo // ranks // max(1, kv // ranks)
        for qo, kv in heads
        if qo % ranks == 0 and (kv % ranks == 0 or ranks % kv == 0)
    )


def _layer_features(facts: LayerFacts) -> frozenset[str]:
    features = []
    if facts.window_left >= 0:
        features.append("window")
    if facts.chunk_tokens:
        features.append("chunked")
    if facts.softcap > 0:
        features.append("softcap")
    if facts.sinks is not None:
        features.append("sinks")
    if facts.gate_lower_bound is not None:
        features.append("bounded_gates")
    if facts.attn_type != "decoder":
        # that its tokens see all of the keys goes without saying
        features.append(facts.attn_type)
    elif not facts.causal:
        features.append("non_causal")
    return frozenset(features)
