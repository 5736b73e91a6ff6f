"""Rules of the resolver, the evaluator and construction that no other test could turn red."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import LayerSpec
from backstamp.construction import RunnerShape, build
from backstamp.declarations import Alias, PageSizes
from backstamp.discovery import Failure
from backstamp.engine import EngineFacts
from backstamp.errors import (
    AliasConflict,
    BuiltMismatch,
    ConflictingRequest,
    NoKernel,
    PluginFailed,
    StrictViolation,
    UnknownKey,
)
from backstamp.forward import split_batch
from backstamp.launch import Requests, make_launch
from backstamp.model import LayerGroup, default_model, model_from_config
from backstamp.plan_rows import PluginRef
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.stamp import put_stamp, read_stamp, verify_consumed
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from backstamp.testing.hosts import described_host
from tests.core.test_forward import MIXED
from tests.models import config
from tests.resolving import kernel, kernels, plan_of

GEMMA4 = model_from_config(config("gemma4"))
HYBRID = model_from_config(config("hybrid"))
SLIDING = kernel("a256", head_dims=(256,), features=frozenset({"window", "softcap"}))
FULL = kernel("b512", head_dims=(512,), features=frozenset({"softcap"}))
EAGLE = Requests(speculative_algorithm="EAGLE")


def test_a_draft_extend_follows_the_half_that_verifies() -> None:
    """Mission section 3: decode under mode decode, else prefill."""
    offers = [kernel("p", priority=9), kernel("d", priority=8), kernel("z", priority=90)]
    asked = Requests(prefill_attention_backend="p", decode_attention_backend="d")
    assert plan_of(offers, asked, role="draft").phase("draft_extend").kernel == "p"
    moded = replace(asked, speculative_attention_mode="decode")
    assert plan_of(offers, moded, role="draft").phase("draft_extend").kernel == "d"


def test_a_draft_inherits_the_half_its_target_resolved() -> None:
    """Nobody asked: decode's kernel for the loop, prefill's for extend."""
    pre, dec = kernel("pre", phases=frozenset({"prefill", "decode"}), priority=50), kernel("dec")
    target = plan_of([pre, dec], replace(EAGLE, prefill_attention_backend="pre", decode_attention_backend="dec"))
    plan = plan_of([pre, dec, kernel("best", priority=99)], EAGLE, role="draft", target=target)
    assert (plan.phase("draft_decode").kernel, plan.phase("draft_extend").kernel) == ("dec", "pre")


def test_an_inherited_kernel_that_is_not_installed_is_a_preference_only() -> None:
    """What the target's machine has and the draft's lacks does not stop the draft."""
    plan = plan_of([kernel("a")], Requests(attention_backend="fa3"), role="draft")
    assert plan.phase("draft_decode").source == "inherited -> auto"


def test_mode_decode_verifies_with_the_decode_half() -> None:
    """An explicit mode binds, and the plan names it."""
    offers = [
        kernel("p", priority=90, phases=frozenset({"prefill", "verify"})),
        kernel("d", phases=frozenset({"decode", "verify"})),
    ]
    plan = plan_of(offers, replace(EAGLE, speculative_attention_mode="decode"))
    assert (plan.phase("verify").kernel, plan.phase("verify").source) == ("d", "mode decode")


def test_auto_of_a_hybrid_model_is_its_keys_list() -> None:
    """Not the rank: the list of hybrid_linear_attn; the linear slot is resolved beside it."""
    offers = [
        kernel("listed", priority=1), kernel("best", priority=99), kernel("other", slot="linear", family="gdn"),
        kernel("flashinfer", slot="linear", family="gdn", priority=60, phases=frozenset({"decode", "verify"})),
    ]  # fmt: skip
    any_dim = [replace(offer, head_dims=("any",)) for offer in offers]
    aliases = [Alias(key="hybrid_linear_attn", kernels=("listed",))]
    plan = plan_of(any_dim, model=HYBRID, aliases=aliases)
    assert kernels(plan)["decode"] == "listed"
    assert plan.linear is not None
    assert (plan.linear.prefill.kernel, plan.linear.verify.kernel) == ("other", "flashinfer")
    asked = Requests(linear_attn_decode_backend="other")
    split = plan_of(any_dim, asked, model=HYBRID, aliases=aliases)
    assert split.linear is not None
    assert split.linear.decode.kernel == "other"
    assert split.digest != plan.digest


def test_layers_no_kernel_serves_together_get_one_each_unless_uniform_is_asked() -> None:
    """vllm #38891, with layers that no kernel serves together; the full-attention kernel names the phase."""
    plan = plan_of([SLIDING, FULL], model=GEMMA4)
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("b512", "auto (per_layer)")
    assert [group.kernel for group in plan.phase("decode").groups] == ["a256", "b512"]
    with pytest.raises(NoKernel):
        plan_of([SLIDING, FULL], model=GEMMA4, policy=Policy(layers="uniform"))


def test_each_group_of_a_plan_has_its_own_object_and_its_own_layers() -> None:
    """Two groups, two backends, found by index."""
    plan = plan_of([SLIDING, FULL], model=GEMMA4)
    shape = {"num_qo_heads": 8, "num_kv_heads": 8, "head_dim": 256, "v_head_dim": 256, "scale": 0.1}
    runner = RunnerShape(layers=[LayerSpec(layer_id=at, **shape) for at in range(6)])
    built = build(plan, runner, catalogue_of(fake_plugin("p", [SLIDING, FULL])), load=recording_factory)
    stamps = [read_stamp(built.serving_attention_backend("decode", group)).kernel for group in (0, 1)]
    assert stamps == ["a256", "b512"]
    asked = built.serving_attention_backend("decode", 1).request
    assert [layer.layer_id for layer in asked.layers] == [5]


def test_strict_refuses_what_was_lost_or_failed() -> None:
    """An alias that passes over a missing kernel warns; strict refuses. So does a plugin that failed under auto."""
    alias, asked = Alias(key="key", kernels=("absent", "here")), Requests(attention_backend="key")
    plan = plan_of([kernel("here")], asked, aliases=[alias])
    assert "lost" in [warning.code for warning in plan.warnings]
    with pytest.raises(StrictViolation, match="absent"):
        plan_of([kernel("here")], asked, aliases=[alias], policy=Policy(strict=True))


def test_a_failed_plugin_warns_under_auto_alone_and_stops_an_alias_that_names_its_kernel() -> None:
    """A plan that asked for every half is not told of a plugin it never looked at."""
    failed = Failure(
        plugin=PluginRef("bad", "acme-bad", "1"), entry="x", cause="boom", error=None, names=frozenset({"k"})
    )
    catalogue = catalogue_of(fake_plugin("p", [kernel("a")], [Alias(key="key", kernels=("k", "a"))]), failures=[failed])

    def plan(**asked: str) -> list[str]:
        launch = make_launch(Requests(**asked))
        found = resolve(launch, EngineFacts(), default_model(), described_host("h100"), catalogue)
        return [warning.code for warning in found.warnings]

    assert plan() == ["failed"]
    assert plan(attention_backend="a") == []
    with pytest.raises(PluginFailed, match="boom"):
        plan(attention_backend="key")


def test_a_warning_is_said_once_and_a_deprecated_key_names_its_successor() -> None:
    """One row, however many phases said it."""
    libs = [kernel("a", requires=("lib",))]
    plan = plan_of(
        libs, Requests(decode_attention_backend="old"), aliases=[Alias(key="old", kernels=("a",), deprecated="a")]
    )
    assert [warning.code for warning in plan.warnings].count("deprecated") == 1


def test_a_key_may_list_other_kernels_for_a_phase() -> None:
    """cutedsl_mla: another kernel prefills."""
    alias = Alias(key="key", kernels=("dec",), by_phase={"prefill": ("pre",)})
    plan = plan_of([kernel("dec"), kernel("pre")], Requests(attention_backend="key"), aliases=[alias])
    assert (plan.phase("prefill").kernel, plan.phase("decode").kernel) == ("pre", "dec")


def test_a_distribution_before_the_colon_must_own_the_key() -> None:
    """fake-p:a is p's; other:a is nobody's."""
    assert kernels(plan_of([kernel("a")], Requests(attention_backend="fake-p:a")))["decode"] == "a"
    with pytest.raises(UnknownKey):
        plan_of([kernel("a")], Requests(attention_backend="other:a"))


def test_an_alias_and_a_foreign_kernel_of_one_name_are_a_conflict() -> None:
    """One claim to a name, whichever way it is made."""
    catalogue = catalogue_of(
        fake_plugin("p", [kernel("x")]), fake_plugin("q", [kernel("y")], [Alias(key="x", kernels=("y",))])
    )
    with pytest.raises(AliasConflict, match="fake-p, fake-q"):
        resolve(
            make_launch(Requests(attention_backend="x")),
            EngineFacts(),
            default_model(),
            described_host("h100"),
            catalogue,
        )


def test_allow_and_deny_bind_auto() -> None:
    """Outside the allow list ranks below all inside; a denied distribution is never picked."""
    catalogue = catalogue_of(
        fake_plugin("p", [kernel("x", priority=1)]), fake_plugin("q", [kernel("best", priority=99)])
    )

    def decode(policy: Policy) -> str | None:
        return kernels(
            resolve(
                make_launch(Requests(), policy=policy),
                EngineFacts(),
                default_model(),
                described_host("h100"),
                catalogue,
            )
        )["decode"]

    assert decode(Policy()) == "best"
    assert decode(Policy(allow=frozenset({"fake-p"}))) == "x"
    assert decode(Policy(deny=frozenset({"fake-q"}))) == "x"


def test_auto_takes_no_approximate_kernel() -> None:
    """Asked for, it serves."""
    offers = [kernel("rough", accuracy="int8", priority=99), kernel("exact")]
    assert kernels(plan_of(offers))["decode"] == "exact"
    assert kernels(plan_of(offers, Requests(decode_attention_backend="rough")))["decode"] == "rough"


@pytest.mark.parametrize(
    ("rows", "engine", "code"),
    [
        ([{"plan": "host"}], EngineFacts(graph="any", replay_hook=False), "plan"),
        ([{"index_forms": frozenset({"page_table"})}], EngineFacts(index_forms=frozenset({"csr"})), "index_form"),
        ([{"excludes": frozenset({"graph"})}], EngineFacts(graph="any"), "excludes"),
        ([{"page_sizes": PageSizes(preferred=64, exact=(64,))}], EngineFacts(page_size=16), "page_size"),
        ([{"archs": ("10.0",)}, {"device": "rocm", "archs": ("gfx942",)}], EngineFacts(), "arch"),
        ([{"forward_archs": "major", "archs": ("9.5",)}], EngineFacts(), "arch"),
        ([{"forward_archs": "any", "archs": ("10.0",)}], EngineFacts(), "arch"),
        ([{"cpu_features": frozenset({"amx_tile"})}], EngineFacts(), "cpu_feature"),
        ([{"family": "mla"}, {"dtypes": frozenset({"fp16"})}], EngineFacts(), "dtype"),
    ],
)  # fmt: skip
def test_a_kernel_is_told_the_refusal_of_the_row_that_came_furthest(
    rows: list[dict[str, object]], engine: EngineFacts, code: str
) -> None:
    """Several rows, one verdict: the check that took the last of them, or the deepest the machine gave."""
    plan = plan_of(
        [
            kernel("good", plan="device", index_forms=frozenset({"page_table", "csr"})),
            *(kernel("bad", **row) for row in rows),
        ],
        engine=engine,
    )
    assert {verdict.kernel: verdict.code for verdict in plan.phase("decode").verdicts}["bad"] == code


def test_a_kernel_with_two_rows_keeps_the_one_that_is_left() -> None:
    """A row that is refused takes nothing from its sister; rows of one priority are tried as declared."""
    rows = [kernel("k", dtypes=frozenset({"fp16"})), kernel("k"), kernel("k", features=frozenset())]
    assert plan_of(rows).phase("decode").groups[0].row == 1
    both = plan_of([kernel("good"), kernel("k", head_dims=(64,)), kernel("k", head_dims=(96,))])
    assert {v.kernel: v.wanted for v in both.phase("decode").verdicts}["k"] == "head dim 64 or head dim 96"


def test_cached_tokens_need_paged_kv() -> None:
    """A ragged row may prefill whole prompts and nothing else."""
    ragged = kernel(
        "r",
        kv_forms=frozenset({"ragged"}),
        index_forms=frozenset(),
        prefix=False,
        priority=99,
        phases=frozenset({"prefill"}),
    )
    assert kernels(plan_of([ragged, kernel("p")], engine=EngineFacts(prefix_cache=False)))["prefill"] == "r"
    chunked = Requests(chunked_prefill_size=128)
    assert kernels(plan_of([ragged, kernel("p")], chunked, engine=EngineFacts(prefix_cache=False)))["prefill"] == "p"


def test_a_row_reads_the_operators_dtype_name_in_its_own_way() -> None:
    """kv_dtype_names map for one row alone."""
    rows = [
        kernel("own", kv_dtypes=frozenset({"same", "packed"}), kv_dtype_names={"fp8_e4m3": "packed"}),
        kernel("plain", priority=99),
    ]
    assert kernels(plan_of(rows, Requests(kv_cache_dtype="fp8_e4m3")))["decode"] == "own"


def test_alignment_binds_prefill_alone() -> None:
    """Decode has no chunks to align; prefill needs a declared alignment that the chunk keeps."""
    offers = [
        kernel("aligned", deterministic=True, alignment_tokens=4096, priority=99),
        kernel("undeclared", deterministic=True, priority=98),
        kernel("free", deterministic=True, alignment_tokens=1),
    ]
    plan = plan_of(offers, Requests(deterministic=True, chunked_prefill_size=128))
    assert (plan.phase("prefill").kernel, plan.phase("decode").kernel) == ("free", "aligned")


def test_only_the_bypassed_check_is_bypassed_and_the_stamp_says_so() -> None:
    """A companion that does not match passes, a missing library does not."""
    offers = [kernel("k", requires=("lib>=2", "second"), companions=("lib-cubin",))]
    policy = Policy(bypass=frozenset({"companion"}))
    libraries = {"lib": "2.1", "lib-cubin": "2.0", "second": "1"}
    plan = plan_of(offers, policy=policy, libraries=libraries)
    built = build(plan, RunnerShape(), catalogue_of(fake_plugin("p", offers)), load=recording_factory)
    assert read_stamp(built.serving_attention_backend("decode")).skipped == ("companion",)
    with pytest.raises(NoKernel, match="second is not installed"):
        plan_of(offers, policy=policy, libraries={"lib": "2.1"})


def test_a_layout_the_engine_cannot_have_is_not_chosen() -> None:
    """The best-first id both can have."""
    plan = plan_of([kernel("a", layouts=("packed", "rows"))])
    assert dict(plan.layouts)["attention"] == "rows"
    engine = EngineFacts(layouts=frozenset({"packed", "rows"}))
    assert plan_of([kernel("a", layouts=("packed", "rows"))], engine=engine).digest != plan.digest


@pytest.mark.parametrize(
    ("first", "second", "size"),
    [
        (PageSizes(preferred=3, multiple_of=3), PageSizes(preferred=2, multiple_of=2), 6),
        (PageSizes(preferred=16, exact=(16, 32)), PageSizes(preferred=64, exact=(32, 64)), 32),
    ],
)  # fmt: skip
def test_two_kernels_meet_at_a_page_size_neither_prefers(first: PageSizes, second: PageSizes, size: int) -> None:
    """The least common multiple, or an exact size both list."""
    asked = Requests(prefill_attention_backend="a", decode_attention_backend="b")
    assert plan_of([kernel("a", page_sizes=first), kernel("b", page_sizes=second)], asked).page_size == size


def test_an_engines_own_page_size_is_in_the_plan() -> None:
    """Fixed by the engine, named by it."""
    plan = plan_of([kernel("a")], engine=EngineFacts(name="e", page_size=32))
    assert (plan.page_size, plan.page_size_source) == (32, "engine e")


def test_prefill_does_not_weaken_the_graph_level() -> None:
    """Graphs capture decode, verify and the draft loop."""
    asked = Requests(prefill_attention_backend="p", decode_attention_backend="d")
    plan = plan_of([kernel("p", graph="never"), kernel("d", graph="any")], asked, engine=EngineFacts(graph="uniform"))
    assert plan.graph == "uniform"
    assert plan.digest != plan_of([kernel("p", graph="never"), kernel("d", graph="any")], asked).digest


def test_context_parallel_decode_needs_lse() -> None:
    """Ranks merge by log-sum-exp."""
    with pytest.raises(NoKernel, match="lse"):
        plan_of([kernel("a")], Requests(dcp_size=2))


def test_role_and_distribution_are_in_the_digest() -> None:
    """Same kernel name from another distribution is another thing to run."""
    launch, host = make_launch(EAGLE), described_host("h100")
    plans = [
        resolve(launch, EngineFacts(), default_model(), host, catalogue_of(fake_plugin(name, [kernel("a")])))
        for name in "pq"
    ]
    assert plans[0].digest != plans[1].digest
    assert replace(plans[0], role="draft").digest != plans[0].digest


def test_the_draft_key_binds_every_phase_of_a_draft() -> None:
    """Its prefill too."""
    plan = plan_of([kernel("a"), kernel("b", priority=90)], Requests(draft_attention_backend="a"), role="draft")
    assert plan.phase("prefill").kernel == "a"


def test_the_operators_number_outranks_the_embedders() -> None:
    """As keys do."""
    assert make_launch(Requests(page_size=16), embedder=Requests(page_size=64)).page_size == 16


def test_the_factory_is_told_what_the_plan_settled() -> None:
    """topk, KV dtype, and the plan's own row of a kernel with several families."""
    offers = [kernel("k", kv_dtypes=frozenset({"same", "e4m3fn"}), features=frozenset({"tree_mask", "topk"}))]
    plan = plan_of(offers, replace(EAGLE, speculative_topk=4, kv_cache_dtype="fp8_e4m3"))
    catalogue = catalogue_of(fake_plugin("p", offers))
    request = build(plan, RunnerShape(), catalogue, load=recording_factory).serving_attention_backend("decode").request
    assert (request.topk, request.kv_dtype) == (4, "e4m3fn")
    other = catalogue_of(fake_plugin("p", [replace(offers[0], family="mla")]))
    with pytest.raises(BuiltMismatch, match="another set of plugins"):
        build(plan, RunnerShape(), other, load=recording_factory)


@pytest.mark.parametrize("change", [{"kernel": "other"}, {"sources": (("prefill", "auto"),)}], ids=["kernel", "phase"])
def test_a_stamp_that_is_not_the_plans_is_found(change: dict[str, object]) -> None:
    """Swapped in after start with another stamp: named, with both sides."""
    plan = plan_of([kernel("a")])
    built = build(plan, RunnerShape(), catalogue_of(fake_plugin("p", [kernel("a")])), load=recording_factory)
    backend = built.serving_attention_backend("decode")
    backend.backstamp_stamp = replace(read_stamp(backend), **change)
    with pytest.raises(BuiltMismatch, match=r"needs a .*for"):
        verify_consumed(built)


def test_a_stamp_is_read_from_the_object_alone() -> None:
    """Never from its class or through a proxy; a slot counts as the object's own."""

    class Proxy:
        def __init__(self, inner: object) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self._inner, name)

    class Slotted:
        __slots__ = ("backstamp_stamp",)

    built = build(
        plan_of([kernel("a")]), RunnerShape(), catalogue_of(fake_plugin("p", [kernel("a")])), load=recording_factory
    )
    inner = built.serving_attention_backend("decode")
    with pytest.raises(AttributeError, match="stamp"):
        read_stamp(Proxy(inner))
    slotted = Slotted()
    put_stamp(slotted, read_stamp(inner))
    assert read_stamp(slotted) == read_stamp(inner)


def test_split_slices_every_tensor_of_a_row() -> None:
    """Per-row causal, left padding, host lengths, and no split point left on either side."""
    batch = replace(MIXED, causal=torch.tensor([1, 0, 1, 0]), kv_starts=torch.tensor([0, 1, 2, 3]))
    decode, rest = split_batch(batch)
    assert (decode.causal.tolist(), rest.causal.tolist()) == ([1, 0], [1, 0])
    assert (decode.kv_starts.tolist(), rest.kv_starts.tolist()) == ([0, 1], [2, 3])
    assert (decode.kv_lens_host.tolist(), rest.kv_lens_host.tolist()) == ([7, 3], [20, 4])
    assert (decode.decode_q_len, rest.decode_q_len) == (1, None)
    assert (decode.num_decode_rows, rest.num_decode_rows, rest.num_decode_tokens) == (0, 0, 0)


def test_a_warning_of_two_halves_is_one_row() -> None:
    """A component that cannot take the base request says so once a phase, an alias's own words once."""
    plan = plan_of([kernel("a")], Requests(attention_backend="k"), aliases=[Alias(key="k", kernels=("z", "a"))])
    assert len(plan.warnings) == len(set(plan.warnings))


def test_only_a_cpu_is_interpreted_on() -> None:
    """The interpreter opens Triton rows to a CPU; a GPU they do not fit still refuses them."""
    rows = [kernel("triton", requires=("triton>=3.6",), archs=("10.0",)), kernel("good")]
    host = described_host("h100", triton_interpreter=True)
    plan = resolve(make_launch(Requests()), EngineFacts(), default_model(), host, catalogue_of(fake_plugin("p", rows)))
    assert {verdict.kernel: verdict.code for verdict in plan.phase("decode").verdicts}["triton"] == "arch"


def test_a_component_beside_the_main_one_takes_its_own_kernel_and_says_so() -> None:
    """The base request is a preference there: a warning, and a group of its own."""
    model = default_model()
    vision = LayerGroup("vision", replace(model.groups[0].facts, component="vision", head_dim=64, v_head_dim=64), (0,))
    both = replace(model, groups=(*model.groups, vision))
    offers = [kernel("main", head_dims=(128,)), kernel("vis", head_dims=(64,))]
    plan = plan_of(offers, Requests(attention_backend="main"), model=both)
    assert [group.kernel for group in plan.phase("decode").groups] == ["main", "vis"]
    assert "changed" in [warning.code for warning in plan.warnings]


def test_a_kernel_must_serve_every_family_of_the_main_component() -> None:
    """Two families, one of which it lacks: passed over, whatever its rank."""
    model = default_model()
    latent = LayerGroup("main", replace(model.groups[0].facts, family="mla", head_dim=576, v_head_dim=512), (99,))
    both = replace(model, groups=(*model.groups, latent))
    k_mla = kernel("k", family="mla", head_dims=((576, 512),))
    plan = plan_of([kernel("dense", priority=99), kernel("k"), k_mla], model=both)
    assert (plan.phase("decode").kernel, len(plan.phase("decode").groups)) == ("k", 2)


def test_a_broken_first_party_plugin_owns_its_published_names() -> None:
    """Nothing could be read of it, and its key still raises its cause."""
    failed = Failure(plugin=PluginRef("bad", "backstamp-fa3", "1"), entry="x", cause="boom", error=None)
    catalogue = catalogue_of(fake_plugin("p", [kernel("a")]), failures=[failed])
    with pytest.raises(PluginFailed, match="boom"):
        resolve(
            make_launch(Requests(attention_backend="fa3")),
            EngineFacts(),
            default_model(),
            described_host("h100"),
            catalogue,
        )


def test_dsa_settings_need_dsa_as_parent() -> None:
    """A sparse model served by another key: refused."""
    offers = [kernel("other", family="sparse_mla", head_dims=("any",))]
    with pytest.raises(ConflictingRequest, match="served by other"):
        plan_of(
            offers, Requests(dsa_decode_backend="x", attention_backend="other"), model=model_from_config(config("dsa"))
        )
