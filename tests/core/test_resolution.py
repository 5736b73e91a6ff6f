"""The resolver on described hosts with in-memory plugins: binding keys, auto, drafts, verify, pages, layouts."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from backstamp.declarations import ANY, Alias, PageSizes
from backstamp.engine import EngineFacts
from backstamp.errors import (
    BadInput,
    ConflictingRequest,
    NoKernel,
    NotInstalled,
    Refused,
    StrictViolation,
    UnknownKey,
)
from backstamp.launch import Requests, make_launch
from backstamp.model import LayerFacts, LayerGroup, default_model, model_from_config
from backstamp.plan_rows import Timing
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.models import config
from tests.resolving import kernel, kernels, plan_of, times_of

MLA = model_from_config(config("mla"))


def test_all_five_phases_are_always_there() -> None:
    """A phase this runner never runs has no kernel and says so."""
    plan = plan_of([kernel("a")])
    assert kernels(plan) == {
        "prefill": "a", "decode": "a", "verify": None, "draft_decode": None, "draft_extend": None,
    }  # fmt: skip
    assert plan.phase("verify").source == "not run"


def test_auto_takes_the_highest_priority_and_ties_go_by_name() -> None:
    """Without a measurement the declared priority ranks; equal priorities fall to the name."""
    assert kernels(plan_of([kernel("a", priority=10), kernel("b", priority=90)]))["decode"] == "b"
    assert kernels(plan_of([kernel("d"), kernel("c")]))["decode"] == "c"


def test_a_measurement_outranks_priority_and_the_plan_says_so() -> None:
    """What was timed on this host beats what was declared."""
    offers = [kernel("slow", priority=90), kernel("b", priority=10)]
    plan = plan_of(offers, measurements=times_of(offers, {("decode", "slow"): 9.0, ("decode", "b"): 2.0}))
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("b", "auto (measured)")
    assert plan.phase("prefill").kernel == "slow"
    assert plan.timings == (Timing("attention", "decode", "main", "b", 2.0, "slow", 9.0),)


def test_every_candidate_has_a_verdict_with_its_reason() -> None:
    """One evaluator selects and explains: what was not chosen says needs X, got Y."""
    plan = plan_of([kernel("good"), kernel("old", archs=("8.0",)), kernel("small", head_dims=(64,))])
    verdicts = {verdict.kernel: verdict for verdict in plan.phase("decode").verdicts}
    assert verdicts["good"].accepted
    assert (verdicts["old"].code, verdicts["old"].message) == ("arch", "needs SM80 (8.0), got SM90 (9.0)")
    assert (verdicts["small"].code, verdicts["small"].message) == ("head_dim", "needs head dim 64, got 128")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"archs": ("10.0", "10.3")}, "arch"),
        ({"device": "rocm", "archs": ("gfx942",)}, "device"),
        ({"dtypes": frozenset({"fp16"})}, "dtype"),
        ({"head_dims": (64,)}, "head_dim"),
        ({"group_sizes": (3, (5, 9))}, "group_size"),
        ({"family": "mla"}, "family"),
        ({"phases": frozenset({"prefill"})}, "phase"),
        ({"prefix": False}, "prefix"),
        ({"kv_dtypes": frozenset({"e5m2"})}, "kv_dtype"),
        ({"excludes": frozenset({"prefix_cache"})}, "excludes"),
        ({"needs": frozenset({"tp"})}, "needs"),
        ({"kv_forms": frozenset({"ragged"})}, "kv_form"),
        ({"runtimes": ("cuda>=13.1",)}, "runtime"),
        ({"layouts": ("packed",)}, "layout"),
        ({"mask_format": "4d_bool"}, "mask"),
        ({"mask_format": "none"}, "mask"),
        ({"inputs": frozenset({"crystal_ball"})}, "input"),
    ],
)
def test_what_auto_never_picks_is_refused_when_asked_for(changes: dict[str, object], code: str) -> None:
    """Auto and explicit use one table: the same row is passed over by one and refused by the other."""
    offers = [kernel("good", priority=1), kernel("bad", priority=99, **changes)]
    plan = plan_of(offers)
    assert plan.phase("decode").kernel == "good"
    (verdict,) = [verdict for verdict in plan.phase("decode").verdicts if verdict.kernel == "bad"]
    assert verdict.code == code
    with pytest.raises(Refused) as caught:
        plan_of(offers, Requests(decode_attention_backend="bad"))
    assert caught.value.needed == verdict.wanted
    assert "good" in caught.value.fix


def test_an_explicit_request_never_falls_back() -> None:
    """A refused key is an error with every reason, before anything is built."""
    with pytest.raises(Refused) as caught:
        plan_of([kernel("good"), kernel("bad", archs=("10.0",))], Requests(attention_backend="bad"))
    error = caught.value
    assert error.who == "prefill attention backend 'bad' (plugin p, fake-p 1.0), asked for with --attention-backend"
    assert error.needed == "SM100 (10.0)"
    assert error.found == "SM90 (9.0) (host h100: cuda SM90 (9.0))"
    assert error.as_json()["error"]["verdicts"][0]["code"] == "arch"


def test_an_unknown_key_names_the_near_match_and_the_keys_with_their_distributions() -> None:
    """vllm-ascend #4197: a mistyped key is answered with what exists and who has it."""
    with pytest.raises(UnknownKey) as caught:
        plan_of([kernel("flash")], Requests(attention_backend="flahs"))
    assert "flash (fake-p)" in caught.value.needed
    assert "'flash'" in caught.value.fix


def test_a_first_party_key_that_is_not_installed_names_its_distribution() -> None:
    """Not installed is another answer than unknown."""
    with pytest.raises(NotInstalled, match="pip install backstamp-fa3"):
        plan_of([kernel("good")], Requests(attention_backend="fa3"))


def test_a_near_match_may_be_a_key_that_is_not_installed() -> None:
    """A typo of a known key is told apart from nonsense even where the key's plugin is missing."""
    with pytest.raises(UnknownKey, match=r"flashinfer.*backstamp-flashinfer, not installed"):
        plan_of([kernel("good")], Requests(attention_backend="flashinfr"))


def test_an_alias_binds_the_first_kernel_whose_facts_fit() -> None:
    """hybrid_linear_attn's way: one key, another kernel on each host, the rows decide."""
    offers = [kernel("hopper"), kernel("everywhere", archs=("8.0",), forward_archs="any")]
    alias = Alias(key="key", kernels=("hopper", "everywhere"))
    asked = Requests(attention_backend="key")
    assert kernels(plan_of(offers, asked, aliases=[alias]))["decode"] == "hopper"
    assert kernels(plan_of(offers, asked, aliases=[alias], host="l40s"))["decode"] == "everywhere"


def test_an_alias_stops_where_only_the_installation_is_missing() -> None:
    """A kernel that fits the machine and lacks its library is the answer: install it, nothing else is tried."""
    offers = [kernel("first", requires=("wanted-lib>=2",)), kernel("second")]
    alias = Alias(key="key", kernels=("first", "second"))
    with pytest.raises(Refused) as caught:
        plan_of(offers, Requests(attention_backend="key"), aliases=[alias], libraries={"wanted-lib": "1.0"})
    assert caught.value.needed == "wanted-lib>=2"
    assert "Install wanted-lib>=2" in caught.value.fix


@pytest.mark.parametrize(
    ("libraries", "code"),
    [
        ({}, "library_missing"),
        ({"lib": "1.9"}, "library_version"),
        ({"lib": "N/A"}, "library_unknown"),
        ({"lib": "0.0.0+unknown"}, "library_unknown"),
        ({"lib": "2.1", "lib-cubin": "2.0"}, "companion"),
    ],
)
def test_a_library_that_does_not_fit_is_a_verdict_not_an_exception(libraries: dict[str, str], code: str) -> None:
    """flashinfer #3044: unreadable versions and unequal companions refuse the row and leave the rest alone."""
    offers = [kernel("lib_kernel", priority=99, requires=("lib>=2",), companions=("lib-cubin",)), kernel("good")]
    plan = plan_of(offers, libraries=libraries)
    assert plan.phase("decode").kernel == "good"
    assert [verdict.code for verdict in plan.phase("decode").verdicts if not verdict.accepted] == [code]


def test_a_bypassed_check_is_recorded() -> None:
    """The operator may skip the companion check; the plan remembers that it was skipped."""
    offers = [kernel("lib_kernel", requires=("lib>=2",), companions=("lib-cubin",))]
    policy = Policy(bypass=frozenset({"companion"}))
    plan = plan_of(offers, libraries={"lib": "2.1", "lib-cubin": "2.0"}, policy=policy)
    assert plan.bypassed == ("companion",)


def test_local_builds_count_as_their_version() -> None:
    """2.13.0+cpu satisfies >=2.11."""
    plan = plan_of([kernel("k", requires=("torch>=2.11",))], libraries={"torch": "2.13.0+cpu"})
    assert plan.phase("decode").library == ("torch", "2.13.0+cpu")


def test_a_host_without_a_library_list_is_assumed_and_says_so() -> None:
    """The one assumption: libraries of a described host count as present."""
    plan = plan_of([kernel("k", requires=("lib>=2",))])
    assert plan.phase("decode").library == ("lib", None)
    assert [warning.code for warning in plan.warnings] == ["assumed"]


def test_a_split_launch_resolves_the_other_half_by_auto() -> None:
    """sglang #34264: no None anywhere, and each half says who decided."""
    plan = plan_of([kernel("a", priority=90), kernel("b")], Requests(prefill_attention_backend="b"))
    assert (plan.phase("prefill").kernel, plan.phase("prefill").source) == ("b", "operator")
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("a", "auto")
    assert plan.phase("decode").setting == "--decode-attention-backend"


def test_a_base_request_that_serves_one_half_names_the_split_flag() -> None:
    """A key for decode alone is refused as base, with the split flag as remedy."""
    offers = [kernel("half", phases=frozenset({"decode"})), kernel("good")]
    with pytest.raises(Refused, match="split flag"):
        plan_of(offers, Requests(attention_backend="half"))
    assert kernels(plan_of(offers, Requests(decode_attention_backend="half"))) | {} == {
        "prefill": "good", "decode": "half", "verify": None, "draft_decode": None, "draft_extend": None,
    }  # fmt: skip


def test_verify_follows_prefill_by_default() -> None:
    """An unset mode is a default, not a request: prefill verifies."""
    plan = plan_of([kernel("a")], Requests(speculative_algorithm="EAGLE"))
    assert (plan.phase("verify").kernel, plan.phase("verify").source) == ("a", "default")


def test_verify_goes_to_decode_where_prefills_rows_refuse_it() -> None:
    """The default moves to the decode half, and the plan says so."""
    offers = [
        kernel("pre", phases=frozenset({"prefill"}), priority=90),
        kernel("dec", phases=frozenset({"decode", "verify"}), priority=90),
    ]
    plan = plan_of(offers, Requests(speculative_algorithm="EAGLE"))
    assert (plan.phase("verify").kernel, plan.phase("verify").source) == ("dec", "default -> decode")


def test_an_explicit_mode_binds_verify() -> None:
    """What the operator said about the mode is never a default."""
    offers = [kernel("pre", phases=frozenset({"prefill"})), kernel("dec", phases=frozenset({"decode", "verify"}))]
    with pytest.raises(Refused, match="--speculative-attention-mode prefill"):
        plan_of(offers, Requests(speculative_algorithm="EAGLE", speculative_attention_mode="prefill"))


def test_a_draft_inherits_its_targets_half() -> None:
    """Unset draft: the half the operator asked for is a preference, and the plan calls it inherited."""
    offers = [kernel("a"), kernel("b", priority=90)]
    plan = plan_of(offers, Requests(decode_attention_backend="a"), role="draft")
    assert (plan.phase("draft_decode").kernel, plan.phase("draft_decode").source) == ("a", "inherited")
    assert plan.phase("draft_extend").kernel == "b"


def test_a_draft_the_inherited_kernel_cannot_serve_resolves_on_its_own() -> None:
    """sglang #20298: a dense draft of an MLA target does not crash on the target's kernel; strict mode refuses."""
    offers = [kernel("mla_kernel", family="mla", head_dims=((576, 512),), priority=90), kernel("dense")]
    target = plan_of(offers, model=MLA)
    asked = Requests(speculative_algorithm="EAGLE3")
    plan = plan_of(offers, asked, role="draft", target=target)
    assert (plan.phase("draft_decode").kernel, plan.phase("draft_decode").source) == ("dense", "inherited -> auto")
    assert "inherited" in [warning.code for warning in plan.warnings]
    with pytest.raises(StrictViolation, match="mla_kernel"):
        plan_of(offers, asked, role="draft", target=target, policy=Policy(strict=True))
    with pytest.raises(Refused, match="needs an MLA model, got mha"):
        plan_of(offers, Requests(draft_attention_backend="mla_kernel"), role="draft", target=target)


def test_a_single_step_draft_has_no_draft_decode() -> None:
    """speculative_num_steps <= 1: the draft loop does not exist."""
    plan = plan_of([kernel("a")], Requests(speculative_num_steps=1), role="draft")
    assert plan.phase("draft_decode").source == "not run"


def test_tree_verify_needs_a_declared_tree_mask() -> None:
    """topk > 1 asks for features nobody may assume."""
    asked = Requests(speculative_algorithm="EAGLE", speculative_topk=4)
    with pytest.raises(Refused) as caught:
        plan_of([kernel("a")], asked)
    assert "tree_mask" in caught.value.needed
    assert kernels(plan_of([kernel("a", features=frozenset({"tree_mask"}))], asked))["verify"] == "a"


def test_undeclared_means_no() -> None:
    """vllm #40153: a model with sinks never runs on a kernel that says nothing about sinks."""
    sinks = model_from_config(config("sinks"))
    with pytest.raises(NoKernel) as caught:
        plan_of([kernel("silent")], model=sinks)
    assert "sinks" in caught.value.considered
    plan = plan_of([kernel("silent"), kernel("said", features=frozenset({"sinks", "window"}))], model=sinks)
    assert plan.phase("decode").kernel == "said"


def test_page_size_comes_from_the_kernel_when_unset() -> None:
    """Unset page size: the kernel's preferred one, in the plan with its source."""
    plan = plan_of([kernel("a", page_sizes=PageSizes(preferred=64, multiple_of=64))])
    assert (plan.page_size, plan.page_size_source) == (64, "kernel a")


def test_page_sizes_of_two_kernels_must_meet() -> None:
    """An explicit pair without a common page size is an error that lists what each reads."""
    offers = [
        kernel("a", page_sizes=PageSizes(preferred=16, exact=(16,))),
        kernel("b", page_sizes=PageSizes(preferred=64, exact=(64,))),
    ]
    asked = Requests(prefill_attention_backend="a", decode_attention_backend="b")
    with pytest.raises(ConflictingRequest, match="b reads 64; a reads 16"):
        plan_of(offers, asked)


def test_an_explicit_page_size_is_refused_where_unsupported() -> None:
    """The operator's page size binds; kernels that do not read it say what they do read."""
    with pytest.raises(Refused) as caught:
        plan_of(
            [kernel("a", page_sizes=PageSizes(preferred=64, exact=(64, 128)))],
            Requests(attention_backend="a", page_size=16),
        )
    assert caught.value.needed == "page size 64, 128"


def test_auto_joins_what_was_asked_for() -> None:
    """The unset half takes a kernel that shares a layout and a page size with the asked one."""
    offers = [
        kernel("asked", page_sizes=PageSizes(preferred=64, exact=(64,)), phases=frozenset({"decode"})),
        kernel("fast", priority=99, page_sizes=PageSizes(preferred=16, exact=(16,))),
        kernel("fits", priority=1),
    ]
    plan = plan_of(offers, Requests(decode_attention_backend="asked"))
    assert plan.phase("prefill").kernel == "fits"
    assert plan.page_size == 64


def test_layouts_of_a_shared_cache_must_meet() -> None:
    """vllm #48162: two hard layouts on one cache are an error naming both kernels."""
    offers = [kernel("a", layouts=("hnd",)), kernel("b", layouts=("nhd",))]
    engine = EngineFacts(layouts=frozenset({"hnd", "nhd"}))
    asked = Requests(prefill_attention_backend="a", decode_attention_backend="b")
    with pytest.raises(ConflictingRequest, match="b reads nhd and a reads hnd"):
        plan_of(offers, asked, engine=engine)


def test_a_lost_graph_level_is_a_loss_with_its_alternative() -> None:
    """vllm #49547: a weaker graph level is priced in the plan, with the kernel that would not cost it."""
    offers = [kernel("asked", graph="single"), kernel("other", graph="any")]
    plan = plan_of(offers, Requests(decode_attention_backend="asked"), engine=EngineFacts(graph="uniform"))
    (loss,) = plan.losses
    assert (loss.kernel, loss.cost, loss.alternative) == ("asked", "CUDA graph uniform -> single", "other")
    assert plan.graph == "single"


def test_an_unknown_kv_dtype_lists_the_accepted_names() -> None:
    """vllm #14221: a cache dtype nobody reads is refused at once."""
    with pytest.raises(BadInput, match="fp8_e4m3"):
        plan_of([kernel("a")], Requests(kv_cache_dtype="fp7"))


def test_fp8_is_another_format_on_gfx942() -> None:
    """e4m3fn and e4m3fnuz are apart; the operator's name follows the host."""
    offers = [
        kernel("fn", device="rocm", archs=("gfx942", "gfx950"), kv_dtypes=frozenset({"same", "e4m3fn"})),
        kernel("fnuz", device="rocm", archs=("gfx942",), kv_dtypes=frozenset({"same", "e4m3fnuz"})),
    ]
    asked = Requests(kv_cache_dtype="fp8_e4m3")
    assert kernels(plan_of(offers, asked, host="mi300x"))["decode"] == "fnuz"
    assert kernels(plan_of(offers, asked, host="mi355x"))["decode"] == "fn"


def test_sub_settings_without_their_parent_are_an_error() -> None:
    """InferenceX #1011: flags of a backend that is not in force are never ignored."""
    with pytest.raises(ConflictingRequest, match="--dsa-prefill-backend"):
        plan_of([kernel("a")], Requests(dsa_prefill_backend="trtllm"))
    with pytest.raises(ConflictingRequest, match="--linear-attn-backend"):
        plan_of([kernel("a")], Requests(linear_attn_backend="triton"))


def test_deterministic_takes_only_kernels_that_declare_it() -> None:
    """sglang #28063: determinism is declared with its alignment, and a chunk that breaks it is refused."""
    offers = [kernel("fast", priority=90), kernel("same_bits", deterministic=True, alignment_tokens=4096)]
    assert kernels(plan_of(offers, Requests(deterministic=True)))["decode"] == "same_bits"
    with pytest.raises(NoKernel, match="multiples of 4096"):
        plan_of(offers, Requests(deterministic=True, chunked_prefill_size=128))


def test_unlike_layers_get_one_kernel_where_one_exists_else_one_each() -> None:
    """vllm #38891: uniform by default, per layer where no kernel serves all, and the plan names it."""
    gemma = model_from_config(config("softcap"))
    wide = kernel("wide", head_dims=(256,), features=frozenset({"window", "softcap"}))
    assert {row.kernel for row in plan_of([wide], model=gemma).phase("decode").groups} == {"wide"}
    offers = [
        kernel("full_only", head_dims=(256,), features=frozenset({"softcap"}), priority=90),
        replace(wide, kernel="windowed", excludes=frozenset({"tp"})),
    ]
    assert {row.kernel for row in plan_of(offers, model=gemma).phase("decode").groups} == {"windowed"}


def test_the_interpreter_accepts_triton_rows_and_auto_never_picks_them() -> None:
    """A CPU with Triton's interpreter runs Triton rows for tests: asked for, said so, never automatic."""
    rows = [
        kernel("triton", requires=("triton>=3.6",), archs=("8.0",), forward_archs="any", priority=99),
        cpu_offer("native", "fake"),
    ]
    launch = make_launch(Requests(decode_attention_backend="triton"))
    host = described_host("epyc", triton_interpreter=True)
    catalogue = catalogue_of(fake_plugin("p", rows, packages=frozenset({"fake"})))
    plan = resolve(launch, EngineFacts(), default_model(), host, catalogue)
    assert kernels(plan)["decode"] == "triton"
    assert kernels(plan)["prefill"] == "native"
    assert "interpreted" in [warning.code for warning in plan.warnings]


def test_no_kernel_lists_one_reason_for_every_candidate() -> None:
    """TransformerEngine #2285: the first error already holds every reason."""
    with pytest.raises(NoKernel) as caught:
        plan_of([kernel("a", archs=("10.0",)), kernel("b", dtypes=frozenset({"fp16"}))])
    assert "a: needs SM100 (10.0), got SM90 (9.0)" in caught.value.considered
    assert "b: needs fp16, got bf16" in caught.value.considered
    assert len(caught.value.verdicts) == 2


def test_a_plan_is_byte_stable_and_pickles_equal() -> None:
    """Plan, JSON and digest do not depend on the order of plugins, and survive a process border."""
    import json

    first, second = fake_plugin("p", [kernel("a")]), fake_plugin("q", [kernel("b"), kernel("c", archs=("8.0",))])
    launch = make_launch(Requests(speculative_algorithm="EAGLE"))
    host = described_host("h100")
    plans = [
        resolve(launch, EngineFacts(), default_model(), host, catalogue_of(*order))
        for order in ([first, second], [second, first])
    ]
    assert json.dumps(plans[0].as_json()) == json.dumps(plans[1].as_json())
    assert pickle.loads(pickle.dumps(plans[0])) == plans[0]


def test_the_digest_covers_what_runs_and_nothing_else() -> None:
    """Warnings, verdicts and host names leave it alone; a kernel, a page size or a version changes it."""
    plain = plan_of([kernel("a", archs=("9.0", "8.0"))])
    elsewhere = plan_of([kernel("a", archs=("9.0", "8.0")), kernel("z", archs=("7.5",))], host="a100")
    assert plain.digest == elsewhere.digest
    assert plain.digest != plan_of([kernel("b")]).digest
    assert plain.digest != plan_of([kernel("a")], Requests(page_size=32)).digest
    assert plain.digest != plan_of([kernel("a", requires=("lib",))], libraries={"lib": "1.0"}).digest


def test_any_is_written_out_for_archs() -> None:
    """ANY archs accept a host nobody listed."""
    assert kernels(plan_of([kernel("a", archs=ANY)], host="gb10"))["decode"] == "a"


@pytest.mark.parametrize(
    ("ranks", "dcp", "fits"),
    [
        pytest.param(1, 1, False, id="one-rank-has-8-a-head"),
        pytest.param(4, 1, False, id="ranks-share-both-alike"),
        pytest.param(16, 1, True, id="ranks-share-a-key-head"),
        pytest.param(3, 1, True, id="no-even-share-is-not-asked-about"),
        pytest.param(8, 2, True, id="gathered-queries-are-the-engines"),
    ],
)
def test_heads_are_counted_as_one_rank_has_them(ranks: int, dcp: int, fits: bool) -> None:
    """Tensor parallelism splits query heads and key heads, and a key head is never split: 64 over 8."""
    layer = LayerFacts(family="mha", num_qo_heads=64, num_kv_heads=8, head_dim=128, v_head_dim=128)
    model = replace(default_model(), groups=(LayerGroup("main", layer, (0,)),))
    few = kernel("few", priority=99, group_sizes=((1, 4),), features=frozenset({"lse"}))
    offers = [few, kernel("any", features=frozenset({"lse"}))]
    plan = plan_of(offers, Requests(tp_size=ranks, dcp_size=dcp), model=model)
    assert (plan.phase("decode").kernel == "few") is fits
