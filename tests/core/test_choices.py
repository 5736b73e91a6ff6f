"""What may be taken where nobody asked, and how phases, layers and drafts come to share one cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.decisions import any_phase_runs, half_runs
from backstamp.declarations import Alias, FamilyDefault, Offer, PageSizes
from backstamp.discovery import Failure
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput, ConflictingRequest, NoKernel, Refused, StrictViolation, Unresolved
from backstamp.launch import Requests, make_launch
from backstamp.model import DraftFacts, model_from_config
from backstamp.plan import Plan
from backstamp.plan_rows import PluginRef
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.models import config
from tests.resolving import kernel
from tests.scenes import DENSE, GATED, GDN, MLA, model_with, plan_with, texts_of

SPEC = Requests(speculative_algorithm="EAGLE")
HALVES = frozenset({"prefill", "decode"})
HYBRID = model_with((3, GATED), (1, DENSE))
FAMILY = model_with((2, DENSE), name="g")
TWO = EngineFacts(layouts=frozenset({"hnd", "nhd"}))
NARROW = replace(DENSE, head_dim=64, v_head_dim=64)


def wishing(*kernels: str, **more: object) -> object:
    """An engine adapter whose family g prefers these kernels."""
    default = FamilyDefault(model_type="g", kernels=kernels, **more)
    return fake_plugin("adapter", family_defaults=[default], distribution="backstamp-sglang")


def linear(name: str, **changes: object) -> Offer:
    """A kernel of the linear slot."""
    return kernel(name, **GDN, **changes)


def test_verify_by_default_takes_no_approximate_row_nobody_asked_for() -> None:
    """X verifies by an approximate row alone: behind auto's X that is no verify, behind an asked-for X it is."""
    rows = [
        kernel("X", phases=HALVES, priority=90),
        kernel("X", phases=frozenset({"verify"}), accuracy="fp8_math", priority=90),
        kernel("Y"),
    ]
    assert plan_with(rows, SPEC).phase("verify").kernel == "Y"
    assert plan_with(rows, replace(SPEC, attention_backend="X")).phase("verify").kernel == "X"


def test_a_refused_verify_says_that_only_approximate_rows_are_there() -> None:
    """Where nothing else verifies, the reason is the row, not silence."""
    rows = [kernel("X", phases=HALVES), kernel("X", phases=frozenset({"verify"}), accuracy="fp8_math")]
    with pytest.raises(Refused, match="an exact row, because nobody asked for an approximate one"):
        plan_with(rows, SPEC)


def test_a_draft_inherits_no_approximate_row_nobody_asked_for() -> None:
    """The target's X is exact for MLA and approximate for this draft: Y drafts, and the plan says why."""
    rows = [kernel("X", **MLA, priority=90), kernel("X", accuracy="fp8_math", priority=90), kernel("Y", priority=1)]
    target = plan_with(rows, SPEC, model=model_from_config(config("mla")))
    draft = plan_with(rows, SPEC, role="draft", target=target)
    assert (draft.phase("draft_decode").kernel, draft.phase("draft_decode").source) == ("Y", "inherited -> auto")
    asked = replace(SPEC, attention_backend="X")
    target = plan_with(rows, asked, model=model_from_config(config("mla")))
    assert plan_with(rows, asked, role="draft", target=target).phase("draft_decode").kernel == "X"


@pytest.mark.parametrize(
    ("rows", "policy"),
    [
        ([linear("triton", accuracy="rough")], Policy()),
        ([linear("triton")], Policy(deny=frozenset({"fake-t"}))),
        ([linear("triton")], Policy(allow=frozenset({"fake-o", "fake-p"}))),
    ],
    ids=["approximate", "denied", "outside"],
)
def test_unset_linear_verify_follows_what_auto_may_take(rows: list[Offer], policy: Policy) -> None:
    """A default is no request."""
    plugins = [kernel("x"), fake_plugin("t", rows), fake_plugin("o", [linear("other", priority=1)])]
    plan = plan_with(plugins, SPEC, model=HYBRID, policy=policy)
    assert plan.linear.verify.kernel == "other"


def test_a_strangers_hybrid_list_is_not_autos() -> None:
    """An alias for other people's kernels is refused when asked for, and so not taken by auto; the plan says so."""
    stranger = fake_plugin("q", [kernel("evil", priority=1)], [Alias(key="hybrid_linear_attn", kernels=("evil", "x"))])
    plugins = [kernel("x"), fake_plugin("t", [linear("triton")]), stranger]
    plan = plan_with(plugins, model=HYBRID)
    assert plan.phase("decode").kernel == "x"
    assert "speaks for kernels that are not its own" in texts_of(plan, "lost")[0]
    own = fake_plugin("q", [kernel("evil", priority=1)], [Alias(key="hybrid_linear_attn", kernels=("evil",))])
    assert plan_with([*plugins[:2], own], model=HYBRID).phase("decode").kernel == "evil"


def test_a_wish_that_gives_nothing_is_told() -> None:
    """A family's wish is lost with a word, an error in strict mode."""
    rows = [kernel("z"), kernel("elsewhere", archs=("10.0",)), wishing("elsewhere")]
    plan = plan_with(rows, model=FAMILY)
    assert plan.phase("decode").kernel == "z"
    assert "family g prefers elsewhere; none of them is taken" in texts_of(plan, "lost")[0]
    with pytest.raises(StrictViolation, match="prefers elsewhere"):
        plan_with(rows, model=FAMILY, policy=Policy(strict=True))


def test_a_wish_passes_over_a_failed_plugin_as_failed() -> None:
    """vLLM #48277: what did not load is not called absent, and the failure is in the plan."""
    gone = Failure(
        plugin=PluginRef("accel", "fake-accel", "1.0"),
        entry="accel.plugin",
        cause="ImportError: libx",
        error=None,
        names=frozenset({"accel"}),
    )
    catalogue = catalogue_of(fake_plugin("p", [kernel("x")]), wishing("accel", "x"), failures=[gone])
    plan = resolve(make_launch(Requests()), EngineFacts(), FAMILY, described_host("h100"), catalogue)
    assert plan.phase("decode").source == "family"
    assert "passed over accel, got one that failed: ImportError: libx" in texts_of(plan, "lost")[0]
    assert "ImportError: libx" in texts_of(plan, "failed")[0]


def test_a_wish_takes_exact_rows_of_allowed_distributions_first() -> None:
    """A wish is nobody's request: approximate rows are not for it, and an allow list comes before its order."""
    rough = fake_plugin("r", [kernel("rough", accuracy="fp8_math"), kernel("z", priority=1)])
    assert plan_with([rough, wishing("rough", "z")], model=FAMILY).phase("decode").kernel == "z"
    outside = [fake_plugin("a", [kernel("first")]), fake_plugin("b", [kernel("second")]), wishing("first", "second")]
    assert plan_with(outside, model=FAMILY).phase("decode").kernel == "first"
    allowed = plan_with(outside, model=FAMILY, policy=Policy(allow=frozenset({"fake-b"})))
    assert allowed.phase("decode").kernel == "second"


def test_an_operators_mode_is_not_undone_by_an_embedders_verify() -> None:
    """operator > embedder, also between two fields that speak about one phase."""
    rows = [kernel("x"), kernel("y", priority=1)]
    asked = replace(SPEC, decode_attention_backend="y", speculative_attention_mode="decode")
    embedder = Requests(verify_attention_backend="x")
    assert plan_with(rows, asked, embedder=embedder).phase("verify").kernel == "y"
    assert plan_with(rows, replace(asked, verify_attention_backend="x")).phase("verify").kernel == "x"


def test_the_draft_is_a_scope_too() -> None:
    """A request scoped to the draft binds the draft and leaves its target alone."""
    rows = [kernel("x", priority=90), kernel("y", priority=1)]
    asked = replace(SPEC, component_backends={"draft": "y"})
    target = plan_with(rows, asked)
    assert target.phase("decode").kernel == "x"
    assert plan_with(rows, asked, role="draft", target=target).phase("draft_decode").kernel == "y"


def test_two_requests_for_the_draft_are_a_conflict_and_none_drafts_alone() -> None:
    """One of the two would be lost; and without a draft the request is unused, with a word."""
    rows, scoped = [kernel("x"), kernel("y")], Requests(component_backends={"draft": "y"})
    with pytest.raises(ConflictingRequest, match="one request for the draft"):
        plan_with(rows, replace(scoped, draft_attention_backend="x"), role="draft")
    assert "--component-backend draft=y: nothing drafts" in texts_of(plan_with(rows, scoped), "unused")[0]


def test_an_unmasked_kernel_gets_no_causal_layer() -> None:
    """transformers #45811: one non-causal group must not hide the causal ones from the check of the mask."""
    mixed = model_with((2, replace(DENSE, causal=False)), (2, replace(DENSE, window_left=1023)))
    features = frozenset({"non_causal", "window"})
    rows = [kernel("bare", features=features, mask_format="none", priority=90), kernel("masks", features=features)]
    assert plan_with(rows, model=mixed).phase("decode").kernel == "masks"
    with pytest.raises(Refused, match="a causal model"):
        plan_with(rows, Requests(attention_backend="bare"), model=mixed)


def test_unlike_layers_are_tried_in_every_combination() -> None:
    """The best kernel of the first group leaves the second no layout: the next best pair is taken."""
    model = model_with((2, DENSE), (2, NARROW))
    rows = [
        kernel("h", layouts=("hnd",), head_dims=(128,), priority=99),
        kernel("n", layouts=("nhd",), head_dims=(128,)),
        kernel("m", layouts=("nhd",), head_dims=(64,)),
    ]
    groups = plan_with(rows, engine=TWO, model=model).phase("decode").groups
    assert [group.kernel for group in groups] == ["n", "m"]


def test_layer_by_layer_joins_what_was_asked_for_beside_it() -> None:
    """A bound decode fixes the page size; prefill's groups take what reads it."""
    model = model_with((2, DENSE), (2, NARROW))
    small, large = PageSizes(preferred=16, exact=(16,)), PageSizes(preferred=64, exact=(64,))
    rows = [
        kernel("bound", page_sizes=small, phases=frozenset({"decode"})),
        kernel("big", page_sizes=large, phases=frozenset({"prefill"}), priority=90),
        kernel("fit", page_sizes=small, phases=frozenset({"prefill"}), priority=10),
    ]
    plan = plan_with(rows, Requests(decode_attention_backend="bound"), model=model, policy=Policy(layers="per_layer"))
    assert {group.kernel for group in plan.phase("prefill").groups} == {"fit"}
    verdicts = {verdict.kernel: verdict.accepted for verdict in plan.phase("prefill").verdicts}
    assert verdicts["fit"]


def test_a_kernel_that_runs_some_layers_is_not_listed_as_refused() -> None:
    """Layer by layer a verdict says whether a kernel serves any group."""
    model = model_with((2, DENSE), (2, NARROW))
    plan = plan_with([kernel("wide", head_dims=(128,)), kernel("thin", head_dims=(64,))], model=model)
    assert all(verdict.accepted for verdict in plan.phase("decode").verdicts)


def test_unlike_softcaps_go_to_a_kernel_that_takes_them_with_each_call() -> None:
    """One compiled value cannot follow two layers; auto takes the kernel that need not compile it."""
    model = model_with((1, replace(DENSE, softcap=50.0)), (1, replace(DENSE, softcap=30.0)))
    features = frozenset({"softcap"})
    rows = [
        kernel("compiled", features=features, build_settings=features, priority=90),
        kernel("per_call", features=features),
    ]
    assert plan_with(rows, model=model).phase("decode").kernel == "per_call"
    with pytest.raises(ConflictingRequest, match="one softcap for all layers"):
        plan_with(rows, Requests(attention_backend="compiled"), model=model)


def test_a_draft_that_shares_its_targets_cache_takes_what_the_target_has() -> None:
    """A flexible draft follows a hard target in layout and page size."""
    pages = PageSizes(preferred=64, exact=(64,))
    hard = kernel("t", layouts=("hnd",), page_sizes=pages, draft_phases=frozenset())
    target = plan_with([hard], SPEC, engine=TWO)
    sharing = replace(model_with((2, DENSE)), draft=DraftFacts(shares_kv=True))
    flexible = kernel("f", layouts=("nhd", "hnd"), page_sizes=PageSizes(preferred=16, multiple_of=16))
    asked = replace(SPEC, draft_attention_backend="f")
    draft = plan_with([hard, flexible], asked, role="draft", target=target, model=sharing, engine=TWO)
    assert (draft.page_size, draft.page_size_source, dict(draft.layouts)["attention"]) == (64, "target", "hnd")
    pages = PageSizes(preferred=16, multiple_of=16)
    rows = [
        hard,
        kernel("n", layouts=("nhd",), page_sizes=pages, priority=90),
        kernel("g", layouts=("hnd",), page_sizes=pages),
    ]
    draft = plan_with(rows, SPEC, role="draft", target=target, model=sharing, engine=TWO)
    assert draft.phase("draft_decode").kernel == "g"


def test_two_readings_of_one_kv_dtype_do_not_share_a_cache() -> None:
    """vLLM #41657, #14221: the operator's word means two things to two kernels, so it is an error naming both."""
    names = {"kv_dtypes": frozenset({"e5m2"}), "kv_dtype_names": {"fp8_e4m3": "e5m2"}}
    rows = [kernel("a", priority=90, **names), kernel("b", kv_dtypes=frozenset({"e4m3fn"}))]
    fp8 = Requests(kv_cache_dtype="fp8_e4m3")
    split = replace(fp8, prefill_attention_backend="a", decode_attention_backend="b")
    with pytest.raises(ConflictingRequest, match="b reads e4m3fn and a reads e5m2"):
        plan_with(rows, split)
    assert plan_with(rows, replace(fp8, attention_backend="a")).kv_dtype == "e5m2"
    assert plan_with(rows, replace(fp8, decode_attention_backend="b")).phase("prefill").kernel == "b"


def test_guards_see_the_linear_slot_and_refuse_to_be_asked_about_nothing() -> None:
    """SGLang #34264: a guard on a library fires wherever it runs; asking about no kernel is an error."""
    plan: Plan = plan_with([kernel("fa3"), linear("flashinfer")], model=HYBRID)
    assert any_phase_runs(plan, "flashinfer")
    for nothing in (None, ""):
        with pytest.raises(Unresolved, match="no backend given"):
            any_phase_runs(plan, nothing)
    with pytest.raises(Unresolved):
        half_runs(plan, "prefill", ())
    with pytest.raises(BadInput, match="'decod'"):
        half_runs(plan, "decod", {"fa3"})


def test_unlike_linear_layers_get_a_kernel_each() -> None:
    """Where no linear kernel serves them all, each group has its own."""
    other = replace(GATED, head_dim=64, v_head_dim=64)
    model = model_with((2, GATED), (1, other), (1, DENSE))
    plan = plan_with([kernel("x"), linear("wide", head_dims=(128,)), linear("thin", head_dims=(64,))], model=model)
    assert {group.kernel for group in plan.linear.decode.groups} == {"wide", "thin"}


def test_context_parallelism_asks_no_lse_of_a_recurrence() -> None:
    """A state has no softmax to merge."""
    plan = plan_with([kernel("x", features=frozenset({"lse"})), linear("triton")], Requests(dcp_size=2), model=HYBRID)
    assert plan.linear.decode.kernel == "triton"


def test_a_contested_name_nobody_needed_stops_no_strict_launch() -> None:
    """Duplicates are errors for that name, never for the catalogue."""
    plugins = [fake_plugin("a", [kernel("same"), kernel("own")]), fake_plugin("b", [kernel("same")])]
    strict = Policy(strict=True)
    asked = Requests(attention_backend="own")
    assert plan_with(plugins, asked, policy=strict).phase("decode").kernel == "own"
    with pytest.raises(StrictViolation, match="claimed by fake-a and fake-b"):
        plan_with(plugins, policy=strict)


def test_names_that_match_nothing_are_told() -> None:
    """A duplicate nobody claims twice, and a linear verify where nothing drafts."""
    plan = plan_with([kernel("x")], policy=Policy(duplicates=frozenset({"nosuch:x"})))
    assert "--duplicate nosuch:x" in texts_of(plan, "unmatched")[0]
    plugins = [kernel("x"), linear("triton")]
    plan = plan_with(plugins, Requests(linear_attn_verify_backend="triton"), model=HYBRID)
    assert "--linear-attn-verify-backend triton" in texts_of(plan, "unused")[0]


WIDE = replace(DENSE, head_dim=512, v_head_dim=512)
UNLIKE = model_with((5, DENSE), (2, WIDE))
PER_LAYER = Policy(layers="per_layer")


@pytest.mark.parametrize("policy", [Policy(), PER_LAYER], ids=["auto", "per_layer"])
def test_layer_by_layer_takes_an_earlier_phase_back_too(policy: Policy) -> None:
    """Prefill's best for the narrow layers leaves decode no layout: the next is taken, layer by layer as for all."""
    prefill, decode = frozenset({"prefill"}), frozenset({"decode", "verify"})
    rows = [
        kernel("pa", head_dims=(128,), layouts=("hnd",), phases=prefill, priority=90),
        kernel("pb", head_dims=(128,), layouts=("nhd",), phases=prefill, priority=10),
        kernel("pc", head_dims=(512,), layouts=("hnd", "nhd"), phases=prefill),
        kernel("d1", head_dims=(128,), layouts=("nhd",), phases=decode),
        kernel("d2", head_dims=(512,), layouts=("nhd",), phases=decode),
    ]
    plan = plan_with(rows, engine=TWO, model=UNLIKE, policy=policy)
    assert [group.kernel for group in plan.phase("prefill").groups] == ["pb", "pc"]
    assert [group.kernel for group in plan.phase("decode").groups] == ["d1", "d2"]


@pytest.mark.parametrize("layers", ["auto", "uniform", "per_layer"])
def test_rows_of_one_kernel_for_unlike_layers_are_one_kernel(layers: str) -> None:
    """What auto picks is served when asked for, under every policy; its draft inherits it."""
    rows = [kernel("e", head_dims=(128,)), kernel("e", head_dims=(512,))]
    policy = Policy(layers=layers)
    target = plan_with(rows, SPEC, model=UNLIKE, policy=policy)
    asked = plan_with(rows, replace(SPEC, attention_backend="e"), model=UNLIKE, policy=policy)
    assert target.phase("decode").kernel == asked.phase("decode").kernel == "e"
    draft = plan_with(rows, SPEC, model=UNLIKE, policy=policy, role="draft", target=target)
    assert (draft.phase("draft_decode").source, texts_of(draft, "inherited")) == ("inherited", [])


def test_two_kernels_are_not_uniform() -> None:
    """The policy that wants one kernel refuses two, with the reasons of the whole."""
    rows = [kernel("thin", head_dims=(128,)), kernel("wide", head_dims=(512,))]
    with pytest.raises(NoKernel, match="thin: needs head dim 128"):
        plan_with(rows, model=UNLIKE, policy=Policy(layers="uniform"))


def test_a_draft_inherits_layer_by_layer() -> None:
    """The target runs two kernels; its draft runs the same two, without a word about it."""
    rows = [kernel("fa", head_dims=(128,), priority=90), kernel("tri", head_dims=("any",), priority=10)]
    strict = Policy(layers="per_layer", strict=True)
    target = plan_with(rows, SPEC, model=UNLIKE, policy=strict)
    draft = plan_with(rows, SPEC, model=UNLIKE, policy=strict, role="draft", target=target)
    assert [group.kernel for group in draft.phase("draft_decode").groups] == ["fa", "tri"]
    assert draft.phase("draft_decode").source == "inherited (per_layer)"


def test_a_draft_inherits_nothing_of_a_denied_distribution() -> None:
    """Nobody asked for the target's kernel, so the draft's deny list holds."""
    plugins = [fake_plugin("q", [kernel("a", priority=99)]), kernel("z", priority=1)]
    target = plan_with(plugins, SPEC)
    denied = Policy(deny=frozenset({"fake-q"}))
    draft = plan_with(plugins, SPEC, role="draft", target=target, policy=denied)
    assert (draft.phase("draft_decode").kernel, draft.phase("draft_decode").source) == ("z", "inherited -> auto")


def test_dead_ends_of_many_unlike_layers_are_given_up() -> None:
    """Six unlike groups of seven kernels each that never share: an error, after a bounded number of tries."""
    dims = (64, 96, 128, 192, 256, 512)
    model = model_with(*[(1, replace(DENSE, head_dim=dim, v_head_dim=dim)) for dim in dims])
    rows = [
        kernel(f"k{dim}_{at}", head_dims=(dim,), page_sizes=PageSizes(preferred=size, exact=(size,)))
        for dim, size in zip(dims, (16, 16, 16, 16, 16, 7), strict=True)
        for at in range(7)
    ]
    with pytest.raises(ConflictingRequest, match="one page size"):
        plan_with(rows, model=model)


def test_the_linear_slot_keeps_the_policy_of_layers() -> None:
    """uniform refuses two kernels, per_layer takes the best of each, and an alias goes layer by layer."""
    other = replace(GATED, head_dim=256, v_head_dim=256)
    model = model_with((2, GATED), (2, other), (1, DENSE))
    rows = [kernel("x"), linear("g1", head_dims=(128,)), linear("g2", head_dims=(256,))]
    with pytest.raises(NoKernel):
        plan_with(rows, model=model, policy=Policy(layers="uniform"))
    whole = linear("g3", head_dims=("any",), priority=1)
    plan = plan_with([*rows, whole], model=model, policy=PER_LAYER)
    assert [group.kernel for group in plan.linear.decode.groups] == ["g1", "g2"]
    alias = fake_plugin("p", rows, [Alias(key="la", kernels=("g1", "g2"), slot="linear")])
    plan = plan_with([alias], Requests(linear_attn_backend="la"), model=model, policy=PER_LAYER)
    assert [group.kernel for group in plan.linear.prefill.groups] == ["g1", "g2"]


def test_a_denied_distributions_wish_is_no_word_at_all() -> None:
    """Deny says that its plugin counts for nothing: no choice, and no warning that strict mode would stop at."""
    wish = FamilyDefault(model_type="g", kernels=("own",))
    evil = fake_plugin("evil", [kernel("own")], family_defaults=[wish])
    policy = Policy(deny=frozenset({"fake-evil"}), strict=True)
    assert plan_with([kernel("a"), evil], model=FAMILY, policy=policy).phase("decode").kernel == "a"


def test_an_alias_of_an_alias_is_told_as_one() -> None:
    """A list names kernels: another key in it is no kernel that is merely not installed."""
    aliases = [Alias(key="a", kernels=("b",)), Alias(key="b", kernels=("k",))]
    with pytest.raises(Refused, match="needs the name of a kernel, got b, an alias itself"):
        plan_with([fake_plugin("p", [kernel("k")], aliases)], Requests(attention_backend="a"))
