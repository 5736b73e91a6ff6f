"""Plans in tests: plans the resolver makes of generated offers and requests, and two of everything a plan holds."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from backstamp.declarations import FEATURES, Offer
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.launch import Requests
from backstamp.model import ModelFacts, default_model, model_from_config
from backstamp.plan import LinearPlan, Plan
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
from tests.models import config
from tests.resolving import kernel, plan_of

#: Small, many-headed, latent, sliding beside full, and recurrent beside full.
MODELS = (default_model(), *(model_from_config(config(name)) for name in ("mha", "mla", "gemma4", "hybrid")))
_NAMES = st.sampled_from(("alpha", "beta", "gamma", "delta"))
_LINEAR_PHASES = frozenset({"prefill", "decode", "verify"})

_offers = st.builds(
    lambda name, changes: kernel(name, **changes),
    _NAMES,
    st.fixed_dictionaries(
        {
            "priority": st.integers(0, 100),
            "family": st.sampled_from(("mha", "mla", "gdn")),
            "archs": st.sampled_from((("9.0",), ("8.0", "9.0"), ("any",))),
            "head_dims": st.sampled_from((("any",), (128,), (64, 128), (256,))),
            "requires": st.sampled_from(((), ("triton>=3.2",), ("flashinfer-python>=0.6",))),
            "features": st.sampled_from((frozenset(), frozenset({"window", "softcap", "sinks", "tree_mask", "topk"}))),
            "graph": st.sampled_from(("never", "uniform", "any")),
            "dtypes": st.just(frozenset({"bf16", "fp16"})),
        }
    ),
).map(lambda offer: _linear(offer) if offer.family == "gdn" else offer)


def _requests(kernels: list[str], hybrid: bool) -> st.SearchStrategy[Requests]:
    keys = st.none() | st.none() | st.sampled_from(kernels)
    return st.builds(
        Requests,
        attention_backend=keys,
        decode_attention_backend=keys,
        linear_attn_backend=st.none() | st.just("base_linear") if hybrid else st.none(),
        speculative_algorithm=st.sampled_from((None, "EAGLE")),
        speculative_num_steps=st.sampled_from((None, 2, 4)),
        page_size=st.sampled_from((None, 16, 64)),
    )


def _linear(offer: Offer) -> Offer:
    return kernel(
        f"{offer.kernel}_linear",
        slot="linear",
        family="gdn",
        priority=offer.priority,
        archs=offer.archs,
        head_dims=("any",),
        phases=_LINEAR_PHASES,
        requires=offer.requires,
        state_layouts=("gdn_f32",),
    )


#: Serves everything and is nobody's first choice, so that most of what is generated resolves.
_BASE = [
    kernel("base", family=family, priority=0, head_dims=("any",), features=FEATURES, dtypes=frozenset({"bf16", "fp16"}))
    for family in ("mha", "mla")
]


@st.composite
def resolved(draw: st.DrawFn) -> tuple[Plan, list[Offer]]:
    """A plan the resolver makes, and the offers it made it of."""
    # a kernel has one priority and may have several rows
    made = {(item.kernel, item.family): item for item in draw(st.lists(_offers, min_size=2, max_size=8))}
    offers = [*made.values(), *_BASE, _linear(_BASE[0])]
    model: ModelFacts = draw(st.sampled_from(MODELS))
    role = draw(st.sampled_from(("target", "draft")))
    engine = EngineFacts(graph=draw(st.sampled_from(("never", "uniform"))))
    libraries = draw(st.sampled_from((None, {"triton": "3.4.0", "flashinfer-python": "0.6.1"})))
    asked = draw(_requests(sorted({item.kernel for item in offers if item.slot == "attention"}), model.is_hybrid))
    try:
        plan = plan_of(offers, asked, model=model, role=role, engine=engine, libraries=libraries)
    except BackstampError:
        assume(False)
        raise
    return plan, offers


def samples() -> dict[type[object], tuple[object, object]]:
    """Two values of every type a plan is made of, unlike in every field; the first `Plan` holds only first values."""
    plugins = PluginRef("p", "fake-p", "1.0"), PluginRef("q", "fake-q", "2.0")
    libraries = LibraryRef("triton", "3.4.0"), LibraryRef("flashinfer-python", None)
    verdicts = Verdict("a", True), Verdict("b", False, "arch", "archs", "SM90", "SM80", "q")
    warns = Warn("failed", "plugin q"), Warn("assumed", "a library list")
    losses = Loss("graph", "decode", "a", "no graph", ""), Loss("plan", "verify", "b", "a host plan", "c")
    features = FeaturePlan("lse", True, "auto", ""), FeaturePlan("sinks", False, "operator", "asked")
    conversions = (
        Conversion("sinks", "decode", "a", "bf16", "fp32"),
        Conversion("scale", "prefill", "b", "fp16", "bf16"),
    )
    timings = (
        Timing("attention", "decode", "main", "a", 2.5, "b", 5.0),
        Timing("linear", "prefill", "vision", "c", 7.25, "a", None),
    )
    sinks = SinkNeeds(("bf16",), ("fp32",), "lossless"), SinkNeeds(("fp32",), ("bf16", "fp16"), "any")
    groups = (
        GroupPlan("main", "mha", (0, 2), "a", plugins[0], libraries[0], 0, "operator", True, (("softcap", 50.0),), ()),
        GroupPlan("vision", "mla", (1,), "b", plugins[1], None, 3, "auto", False, (), ("companion",), 512, sinks[1]),
    )
    phases = tuple(_phases(*parts) for parts in zip(plugins, libraries, groups, verdicts, strict=True))
    linears = tuple(LinearPlan(found["decode"], found["prefill"], found["verify"]) for found in phases)
    plans = tuple(
        Plan(
            host=("h100", "mi300x")[at],
            device=("cuda", "rocm")[at],
            model=("llama", "qwen3")[at],
            role=("target", "draft")[at],
            phases=tuple(phases[at].values()),
            linear=(linears[0], None)[at],
            dtype=("bf16", "fp16")[at],
            kv_dtype=("bf16", "e4m3fn")[at],
            page_size=(16, 64)[at],
            page_size_source=("kernel a", "operator")[at],
            layouts=((("attention", "rows"), ("linear", "gdn_f32")), (("attention", "packed"),))[at],
            graph=("never", "uniform")[at],
            num_steps=(0, 3)[at],
            topk=(1, 4)[at],
            losses=(losses[at],),
            warnings=(warns[at],),
            bypassed=((), ("companion",))[at],
            features=(features[at],),
            conversions=(conversions[at],),
            sub_settings=((), (("dsa_prefill_backend", "trtllm"),))[at],
            conv_sidecar=bool(at),
            timings=(timings[at],),
        )
        for at in (0, 1)
    )
    pairs = (plugins, libraries, verdicts, warns, losses, features, conversions, timings, sinks, groups, linears, plans)
    firsts = phases[0]["prefill"], phases[1]["decode"]
    return {type(pair[0]): (pair[0], pair[1]) for pair in (*pairs, firsts)}


def _phases(plugin: PluginRef, library: LibraryRef, group: GroupPlan, verdict: Verdict) -> dict[str, PhasePlan]:
    first = group.kernel == "a"
    return {
        phase: PhasePlan(
            phase,
            f"{phase}-{group.kernel}" if first else None,
            f"--{phase}-{group.kernel}",
            group.kernel if first else None,
            plugin,
            library,
            "operator" if first else "auto",
            (group,),
            (verdict,),
        )
        for phase in ("prefill", "decode", "verify", "draft_decode", "draft_extend")
    }
