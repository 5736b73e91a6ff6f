"""What one row says against itself: sound to read, and still never true or without meaning.

In: one `Offer` that `backstamp.soundness` let through. Out: what is wrong with it, with what to do. It knows no host
and no other row, and refuses nothing: the lint reports.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal, NamedTuple

from backstamp.catalogue import Catalogue
from backstamp.declarations import FEATURES, GRAPH_LEVELS, SITUATIONS, Offer, Phase
from backstamp.errors import BadInput
from backstamp.host import HostFacts
from backstamp.kv_dtypes import kv_dtype_of
from backstamp.launch import Launch
from backstamp.model import LINEAR_FAMILIES, default_model

__all__ = ["Level", "Said", "row_flaws", "words_of"]

Level = Literal["fault", "note"]
#: Situations that never hold without another: both need something that drafts.
_IMPLIED: Final = {"topk": "spec", "draft": "spec"}
#: What comes of a condition that never holds.
_EFFECTS: Final = {
    "needs": "so the row is never accepted",
    "excludes": "so nothing is excluded",
    "graph_under": "so no graph is lowered",
}
#: Stands for every host where only the spelling of a cache dtype is asked about.
_ANYWHERE: Final = HostFacts(name="any host", device="cuda", arch="9.0")
_DRAFT_PHASES: Final = frozenset({"draft_decode", "draft_extend"})
#: Phases a CUDA graph may record, whose plan `plan: device` is about.
_CAPTURED: Final[frozenset[Phase]] = frozenset({"decode", "verify", "draft_decode"})


class Said(NamedTuple):
    """One finding, before it is known whose."""

    level: Level
    text: str
    fix: str


def row_flaws(offer: Offer) -> list[Said]:
    """Everything one row says that can never hold or means nothing."""
    return [
        *_situations(offer),
        *_conditions(offer),
        *_graph(offer),
        *_phases(offer),
        *_determinism(offer),
        *_features(offer),
        *_head_dims(offer),
        *_cache(offer),
        *_installation(offer),
    ]


def words_of(conditions: Iterable[str]) -> frozenset[str]:
    """The words that hold where all these conditions do."""
    words = {word for condition in conditions for word in condition.split("+")}
    return frozenset(words | {_IMPLIED[word] for word in words if word in _IMPLIED})


def _situations(offer: Offer) -> Iterator[Said]:
    """Cache dtypes in conditions as operators write them: a launch's are canonical by the time rows are asked."""
    fields = {"needs": offer.needs, "excludes": offer.excludes, "graph_under": offer.graph_under}
    for field, conditions in fields.items():
        for word in sorted(word for word in words_of(conditions) if word.startswith("kv_")):
            dtype = word.removeprefix("kv_")
            canonical = _canonical(dtype)
            if canonical != dtype:
                text = f"{field} names {word!r}, and operators write {dtype!r} for {canonical!r}: no launch holds it"
                yield Said("fault", f"{text}, {_EFFECTS[field]}", f"Say 'kv_{canonical}'")


def _canonical(dtype: str) -> str:
    try:
        return kv_dtype_of(Launch(kv_cache_dtype=dtype), default_model(), _ANYWHERE, Catalogue())
    except BadInput:
        # a name of the plugin's own, which only its rows read
        return dtype


def _conditions(offer: Offer) -> Iterator[Said]:
    needed = words_of(offer.needs)
    for why in _never(needed, offer):
        yield Said("fault", f"needs {_join(offer.needs)}, but {why}: never accepted", "Drop one of the two")
    for excluded in sorted(offer.excludes):
        if words_of([excluded]) <= needed:
            text = f"needs {_join(offer.needs)} and excludes {excluded!r}, which holds with it: never accepted"
            yield Said("fault", text, "Drop one of the two")
    for condition in sorted(offer.excludes):
        for why in _never(words_of([condition]), offer):
            yield Said("note", f"excludes {condition!r}, and {why}: it is refused anyway", "Drop it from excludes")
        wider = [other for other in sorted(offer.excludes) if words_of([other]) < words_of([condition])]
        if wider:
            yield Said("note", f"excludes {condition!r} beside {wider[0]!r}, which covers it", "Drop the longer one")
    if "draft" in offer.excludes and offer.draft_phases:
        text = f"excludes 'draft' and names the draft phases {_join(offer.draft_phases)}"
        yield Said("fault", text, "Drop 'draft' from excludes, or say draft_phases=frozenset()")


def _never(words: frozenset[str], offer: Offer) -> Iterator[str]:
    """Why no launch in which these words hold is served, but for what the row excludes."""
    for feature in sorted((words & FEATURES) - SITUATIONS - offer.features):
        yield f"does not declare the feature {feature}"
    for dtype in sorted(word.removeprefix("kv_") for word in words if word.startswith("kv_")):
        if _canonical(dtype) != dtype:
            # told already, as a word no launch holds
            continue
        same = "same" in offer.kv_dtypes and dtype in offer.dtypes
        if not same and dtype not in {*offer.kv_dtypes, *offer.kv_dtype_names, *offer.kv_dtype_names.values()}:
            yield f"reads no KV dtype {dtype}"
    if "draft" in words and not offer.all_phases & _DRAFT_PHASES:
        yield "serves no draft phase"
    if "deterministic" in words and not offer.deterministic:
        yield "is not declared deterministic"
    if "training" in words and "backward" not in offer.features:
        yield "does not declare the feature backward"
    if words & {"prefix_cache", "chunked_prefill"} and offer.slot == "attention" and not offer.prefix:
        yield "does not attend over cached tokens (prefix)"


def _graph(offer: Offer) -> Iterator[Said]:
    for condition, level in sorted(offer.graph_under.items()):
        under = f"graph_under {condition!r}: {level!r}"
        words = words_of([condition])
        if GRAPH_LEVELS.index(level) >= GRAPH_LEVELS.index(offer.graph):
            yield Said("fault", f"{under} is not weaker than graph {offer.graph!r}", "Name a weaker level, or drop it")
        excluded = [other for other in sorted(offer.excludes) if words_of([other]) <= words]
        never = [f"excludes {excluded[0]!r}"] if excluded else list(_never(words, offer))
        if never:
            yield Said("fault", f"{under} never applies: the row {never[0]}", "Drop it from graph_under")
        if words <= words_of(offer.needs):
            text = f"{under} always applies, because the row needs it: graph {offer.graph!r} is never reached"
            yield Said("note", text, f"Say graph={level!r}")


def _phases(offer: Offer) -> Iterator[Said]:
    named = offer.phases | (offer.draft_phases or frozenset())
    cached = named - {"prefill"}
    if offer.slot == "attention" and cached and not offer.prefix:
        text = f"serves {_join(cached)}, which attend over cached tokens, and declares prefix=False"
        yield Said("fault", text, "Declare prefix=True, or drop those phases")
    if offer.slot == "attention" and (cached or offer.prefix) and "paged" not in offer.kv_forms:
        what = _join(cached) if cached else "prefix"
        text = f"declares {what}, where cached tokens lie in pages, and reads {_join(offer.kv_forms)} KV only"
        yield Said("fault", text, 'Declare "paged" in kv_forms, or drop it')
    if "topk" in offer.features and "draft_decode" not in offer.all_phases:
        yield Said("fault", "declares topk, which only draft_decode asks for, and does not serve it", "Drop topk")
    for phase in sorted(set(offer.phase_inputs) - offer.all_phases):
        yield Said("fault", f"phase_inputs names {phase}, which the row does not serve", "Drop it from phase_inputs")


def _determinism(offer: Offer) -> Iterator[Said]:
    prefills = offer.all_phases & {"prefill", "draft_extend"}
    if offer.slot == "attention" and offer.deterministic and prefills and offer.alignment_tokens is None:
        text = f"is deterministic and serves {_join(prefills)} without alignment_tokens: chunks may be cut anywhere"
        yield Said("fault", text, "Declare alignment_tokens; 1 says that any split is the same")


def _features(offer: Offer) -> Iterator[Said]:
    if (offer.family in LINEAR_FAMILIES) != (offer.slot == "linear"):
        text = f"family {offer.family} in the {offer.slot} slot, where no layer of it is ever asked about"
        yield Said("fault", text, f"Say slot={'linear' if offer.slot == 'attention' else 'attention'!r}")
    if offer.mask_format == "none" and "non_causal" not in offer.features:
        text = "mask_format 'none' serves no causal model, and non_causal is not declared: no model is left"
        yield Said("fault", text, "Declare non_causal, or the mask the kernel applies")
    for setting in sorted(offer.build_settings - offer.features):
        text = f"build_settings names {setting}, a feature the row does not declare"
        yield Said("fault", text, f"Add {setting} to features, or drop it")
    strange = sorted(offer.sink_dtypes - {"same", "fp16", "bf16", "fp32"})
    if strange:
        fix = "Say fp16, bf16, fp32 or same"
        yield Said("fault", f"sink_dtypes names {_join(strange)}, which no model stores sinks in", fix)
    if "sinks" not in offer.features and (offer.sink_dtypes != {"same"} or offer.sink_conversion != "no"):
        yield Said("fault", "says how it reads sinks and does not declare the feature sinks", "Add sinks to features")


def _head_dims(offer: Offer) -> Iterator[Said]:
    if "any" in offer.head_dims and len(offer.head_dims) > 1:
        text = "head_dims names 'any' among others, where it accepts nothing"
        yield Said("fault", text, "Say head_dims=ANY, or leave it out")


def _cache(offer: Offer) -> Iterator[Said]:
    for name, dtype in sorted(offer.kv_dtype_names.items()):
        if dtype not in offer.kv_dtypes and not ("same" in offer.kv_dtypes and dtype in offer.dtypes):
            text = f"kv_dtype_names maps {name!r} to {dtype!r}, which is not in kv_dtypes"
            yield Said("fault", text, f"Add {dtype!r} to kv_dtypes, or drop the name")
    captured = [phase for phase in sorted(_CAPTURED) if "host_lens" in offer.phase_inputs.get(phase, frozenset())]
    if offer.plan == "device" and (captured or "host_lens" in offer.inputs):
        text = "plan 'device' says that replan needs no host work, and host_lens is an input of it"
        yield Said("fault", text, "Say plan='host', or ask for host_lens in the prefill phases alone")


def _installation(offer: Offer) -> Iterator[Said]:
    if offer.companions and not offer.requires:
        text = f"companions {_join(offer.companions)} follow the first of requires, which is empty: never checked"
        yield Said("fault", text, "Name the library in requires")


def _join(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))
