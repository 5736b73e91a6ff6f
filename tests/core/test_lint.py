"""What the lint finds in declarations that are sound one by one: a test for each finding and for its near misses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from backstamp.declarations import Alias, FamilyDefault, FeatureDefault, Offer, PageSizes, RetiredSetting
from backstamp.declared import declared_from_json, declared_to_json
from backstamp.discovery import Found
from backstamp.host import HostFacts
from backstamp.lint import Flaw, known_hosts, lint
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.resolving import kernel


def flaws_of(*plugins: Found, hosts: Sequence[HostFacts] = ()) -> list[Flaw]:
    """Every finding on the named hosts, or on those given."""
    return list(lint(catalogue_of(*plugins), hosts or known_hosts()))


def plugin(
    offers: Sequence[Offer] = (),
    aliases: Sequence[Alias] = (),
    *,
    name: str = "p",
    retired: Sequence[RetiredSetting] = (),
    families: Sequence[FamilyDefault] = (),
    features: Sequence[FeatureDefault] = (),
) -> Found:
    """A plugin with every kind of declaration."""
    found = fake_plugin(name, offers, aliases)
    more = {"retired_settings": tuple(retired), "family_defaults": tuple(families), "feature_defaults": tuple(features)}
    return replace(found, declared=replace(found.declared, **more))


def told(flaws: Sequence[Flaw]) -> list[tuple[str, str]]:
    """Level and text of each finding."""
    return [(flaw.level, flaw.text) for flaw in flaws]


def the_one(flaws: Sequence[Flaw], level: str, *words: str) -> Flaw:
    """The only finding there is: of this level, with these words."""
    assert len(flaws) == 1, told(flaws)
    assert flaws[0].level == level
    for word in words:
        assert word in flaws[0].text, flaws[0].text
    assert flaws[0].fix
    return flaws[0]


def test_a_plain_kernel_has_no_flaw() -> None:
    """The kernel every test varies is quiet, so that what a test finds is what it changed."""
    assert flaws_of(plugin([kernel("k")])) == []


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        pytest.param(
            {"needs": frozenset({"spec+dcp"}), "excludes": frozenset({"spec"})},
            "fault", ("needs spec+dcp", "excludes 'spec'"), id="needs-what-excludes-covers",
        ),
        pytest.param(
            {"needs": frozenset({"spec", "dcp"}), "excludes": frozenset({"spec+dcp"})},
            "fault", ("excludes 'spec+dcp'",), id="needs-two-that-together-are-excluded",
        ),
        pytest.param(
            {"needs": frozenset({"topk"}), "excludes": frozenset({"spec"})},
            "fault", ("needs topk", "excludes 'spec'"), id="topk-holds-only-with-spec",
        ),
        pytest.param(
            {"needs": frozenset({"draft"}), "draft_phases": frozenset()},
            "fault", ("needs draft", "serves no draft phase"), id="needs-draft-serves-none",
        ),
        pytest.param(
            {"excludes": frozenset({"draft"}), "draft_phases": frozenset({"draft_decode"})},
            "fault", ("excludes 'draft'", "draft_decode"), id="excludes-draft-names-a-draft-phase",
        ),
        pytest.param(
            {"needs": frozenset({"softcap"})}, "fault", ("needs softcap", "declare"), id="needs-an-undeclared-feature"
        ),
        pytest.param(
            {"needs": frozenset({"kv_e5m2"})}, "fault", ("reads no KV dtype e5m2",), id="needs-a-kv-dtype-unread"
        ),
        pytest.param(
            {
                "needs": frozenset({"kv_fp8_e4m3"}), "kv_dtypes": frozenset({"e4m3fn"}),
                "kv_dtype_names": {"fp8_e4m3": "e4m3fn"},
            },
            "fault", ("needs names 'kv_fp8_e4m3'", "'e4m3fn'", "never accepted"), id="needs-an-operators-word",
        ),
        pytest.param(
            {"excludes": frozenset({"spec+kv_fp8_e4m3"}), "kv_dtypes": frozenset({"e4m3fn"})},
            "fault", ("excludes names 'kv_fp8_e4m3'", "nothing is excluded"), id="excludes-an-operators-word",
        ),
        pytest.param(
            {"graph": "any", "graph_under": {"kv_half": "single"}},
            "fault", ("graph_under names 'kv_half'", "'fp16'"), id="graph-under-an-operators-word",
        ),
        pytest.param(
            {"needs": frozenset({"deterministic"})}, "fault", ("deterministic",), id="needs-determinism-it-lacks"
        ),
        pytest.param({"needs": frozenset({"training"})}, "fault", ("backward",), id="needs-training-has-no-gradients"),
        pytest.param(
            {"needs": frozenset({"prefix_cache"}), "phases": frozenset({"prefill"}), "prefix": False},
            "fault", ("cached tokens",), id="needs-a-prefix-cache-reads-no-prefix",
        ),
        pytest.param(
            {"excludes": frozenset({"softcap"})}, "note", ("excludes 'softcap'", "anyway"), id="excludes-the-undeclared"
        ),
        pytest.param(
            {"excludes": frozenset({"spec", "spec+dcp"})}, "note", ("'spec+dcp'", "covers"), id="excludes-twice"
        ),
        pytest.param(
            {"graph": "uniform", "graph_under": {"spec": "uniform"}},
            "fault", ("not weaker", "'uniform'"), id="graph-under-no-weaker",
        ),
        pytest.param(
            {"graph": "single", "graph_under": {"spec": "any"}}, "fault", ("not weaker",), id="graph-under-stronger"
        ),
        pytest.param(
            {"graph": "any", "graph_under": {"spec+dcp": "single"}, "excludes": frozenset({"dcp"})},
            "fault", ("never applies", "excludes 'dcp'"), id="graph-under-what-is-excluded",
        ),
        pytest.param(
            {"graph": "any", "graph_under": {"non_causal": "never"}},
            "fault", ("never applies", "non_causal"), id="graph-under-an-undeclared-feature",
        ),
        pytest.param(
            {"graph": "any", "graph_under": {"spec": "single"}, "needs": frozenset({"spec"})},
            "note", ("always applies",), id="graph-under-what-is-needed",
        ),
        pytest.param({"prefix": False}, "fault", ("decode", "prefix=False"), id="decode-without-cached-tokens"),
        pytest.param({"kv_forms": frozenset({"ragged"})}, "fault", ("pages", "ragged"), id="decode-without-pages"),
        pytest.param(
            {"features": frozenset({"topk"}), "draft_phases": frozenset()}, "fault", ("topk",), id="topk-without-draft"
        ),
        pytest.param(
            {"phases": frozenset({"prefill", "decode"}), "phase_inputs": {"verify": frozenset({"token_rows"})}},
            "fault", ("phase_inputs names verify",), id="inputs-of-a-phase-not-served",
        ),
        pytest.param({"deterministic": True}, "fault", ("alignment_tokens",), id="deterministic-without-alignment"),
        pytest.param({"family": "gdn"}, "fault", ("gdn in the attention slot",), id="linear-family-among-attention"),
        pytest.param({"slot": "linear"}, "fault", ("mha in the linear slot",), id="attention-family-among-linear"),
        pytest.param({"mask_format": "none"}, "fault", ("no model is left",), id="no-mask-and-causal-only"),
        pytest.param({"build_settings": frozenset({"softcap"})}, "fault", ("softcap",), id="builds-in-the-undeclared"),
        pytest.param({"sink_dtypes": frozenset({"fp32"})}, "fault", ("sinks",), id="sink-dtypes-without-sinks"),
        pytest.param({"sink_conversion": "lossless"}, "fault", ("sinks",), id="sink-conversion-without-sinks"),
        pytest.param(
            {"kv_dtype_names": {"fp8_e4m3": "e4m3fn"}}, "fault", ("'fp8_e4m3'", "'e4m3fn'"), id="name-of-no-dtype"
        ),
        pytest.param(
            {"plan": "device", "inputs": frozenset({"host_lens"})}, "fault", ("host_lens",), id="device-plan-host-lens"
        ),
        pytest.param(
            {"plan": "device", "phase_inputs": {"decode": frozenset({"host_lens"})}},
            "fault", ("host_lens",), id="device-plan-host-lens-in-decode",
        ),
        pytest.param(
            {"features": frozenset({"sinks"}), "sink_dtypes": frozenset({"same", "bfloat16"})},
            "fault", ("bfloat16",), id="sinks-in-a-dtype-nobody-has",
        ),
        pytest.param({"head_dims": ("any", 64)}, "fault", ("head_dims",), id="any-head-dim-among-others"),
        pytest.param(
            {"kv_dtypes": frozenset({"same", "fp8_e4m3"})}, "fault", ("'fp8_e4m3'", "'e4m3fn'"), id="operators-word"
        ),
        pytest.param({"kv_dtypes": frozenset({"auto"})}, "fault", ("'auto'",), id="auto-is-no-dtype"),
        pytest.param({"companions": ("lib-cubin",)}, "fault", ("never checked",), id="companions-of-nothing"),
    ],
)  # fmt: skip
def test_a_row_that_contradicts_itself_is_told(changes: dict[str, object], level: str, words: tuple[str, ...]) -> None:
    """What can never hold is a fault, what says nothing is a note; each names the words that clash."""
    flaw = the_one(flaws_of(plugin([kernel("k", **changes)])), level, *words)
    assert (flaw.plugin, flaw.subject.partition(" row")[0]) == ("p", "kernel 'k'")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"needs": frozenset({"spec"}), "excludes": frozenset({"spec+dcp"})}, id="needs-spec-not-with-dcp"),
        pytest.param({"excludes": frozenset({"draft"})}, id="targets-only"),
        pytest.param({"graph": "any", "graph_under": {"spec+dcp": "single"}}, id="weaker-under-both"),
        pytest.param({"deterministic": True, "alignment_tokens": 1}, id="any-split-is-the-same"),
        pytest.param(
            {"deterministic": True, "phases": frozenset({"decode"}), "draft_phases": frozenset()}, id="decode-only"
        ),
        pytest.param({"phases": frozenset({"prefill"}), "prefix": False}, id="prefill-of-new-tokens"),
        pytest.param({"plan": "device", "phase_inputs": {"prefill": frozenset({"host_lens"})}}, id="lens-in-prefill"),
        pytest.param({"kv_dtype_names": {"half_precision": "bf16"}}, id="name-of-its-own-dtype"),
        pytest.param({"kv_dtypes": frozenset({"e4m3fn", "e4m3fnuz", "e5m2", "bf16", "int4"})}, id="canonical-dtypes"),
        pytest.param(
            {"excludes": frozenset({"kv_e4m3fnuz", "kv_int4"}), "kv_dtypes": frozenset({"e4m3fnuz", "bf16", "int4"})},
            id="canonical-words",
        ),
        pytest.param({"family": "mla", "head_dims": ((576, 512),)}, id="latent-and-rotary"),
        pytest.param({"mask_format": "none", "features": frozenset({"non_causal"})}, id="encoders-only"),
        pytest.param(
            {"family": "gdn", "slot": "linear", "prefix": False, "kv_forms": frozenset({"ragged"})}, id="recurrent"
        ),
        pytest.param({"family": "gdn", "slot": "linear", "deterministic": True}, id="recurrent-and-deterministic"),
    ],
)
def test_a_row_that_makes_sense_is_left_alone(changes: dict[str, object]) -> None:
    """Near misses of every rule: what a kernel may well say is no finding."""
    assert flaws_of(plugin([kernel("k", **changes)])) == []


@pytest.mark.parametrize(
    ("changes", "words", "fix"),
    [
        pytest.param({"archs": ("9.9",)}, ("no known host", "SM99 (9.9)"), "--host", id="no-such-capability"),
        pytest.param({"runtimes": ("cuda>=99",)}, ("cuda>=99", "got 13.0"), "--host", id="no-such-runtime"),
        pytest.param(
            {"device": "cpu", "archs": ("x86_64",), "cpu_features": frozenset({"amx_fp99"})},
            ("amx_fp99",), "--host", id="no-such-cpu-feature",
        ),
        pytest.param({"device": "rocm", "archs": ("gfx1",)}, ("'gfx1'",), "hosts list", id="half-a-gfx-name"),
        pytest.param({"archs": ("13.0",), "forward_archs": "any"}, ("SM130",), "--host", id="newer-than-all"),
        pytest.param({"archs": ("gfx942",)}, ("'gfx942'",), "device='rocm'", id="gfx942-under-cuda"),
        pytest.param({"archs": ("sm_90",)}, ("'sm_90'",), "Say '9.0'", id="sm_90"),
        pytest.param({"archs": ("90",)}, ("'90'",), "Say '9.0'", id="90"),
        pytest.param({"archs": ("sm_100a", "9.0")}, ("'sm_100a'",), "Say '10.0a'", id="one-of-two-misspelt"),
        pytest.param({"archs": ("9",)}, ("'9'",), "Say '9.0'", id="9"),
        pytest.param({"archs": ("any", "9.0")}, ("'any'",), "ANY", id="any-among-others"),
        pytest.param({"device": "rocm", "archs": ("942",)}, ("'942'",), "Say 'gfx942'", id="942-under-rocm"),
        pytest.param({"device": "cpu", "archs": ("AMD64", "x86_64")}, ("'AMD64'",), "Say 'x86_64'", id="amd64"),
        pytest.param(
            {"archs": ("9.0a",), "forward_archs": "major"}, ("forward_archs", "9.0a"), "forward_archs", id="90a-forward"
        ),
        pytest.param(
            {"device": "rocm", "archs": ("gfx942",), "forward_archs": "any"},
            ("forward_archs",), "forward_archs", id="gfx-forward",
        ),
    ],
)  # fmt: skip
def test_a_row_no_known_host_fits_is_told(changes: dict[str, object], words: tuple[str, ...], fix: str) -> None:
    """A rule that can never match, or an arch in letters no host uses, is a fault with the right spelling."""
    assert fix in the_one(flaws_of(plugin([kernel("k", **changes)])), "fault", *words).fix


def test_a_recorded_host_makes_its_rows_match() -> None:
    """A kernel for a chip without a profile passes once that chip is recorded."""
    chip = replace(known_hosts()[0], name="mine", arch="9.9")
    assert flaws_of(plugin([kernel("k", archs=("9.9",))]), hosts=[*known_hosts(), chip]) == []


@pytest.mark.parametrize(
    "narrower",
    [
        pytest.param({}, id="twice-the-same"),
        pytest.param({"head_dims": (64,)}, id="fewer-head-dims"),
        pytest.param({"features": frozenset()}, id="fewer-features"),
        pytest.param({"needs": frozenset({"spec"})}, id="needs-more"),
        pytest.param({"excludes": frozenset({"spec"})}, id="excludes-more"),
        pytest.param({"page_sizes": PageSizes(preferred=32, exact=(32, 64))}, id="fewer-pages"),
        pytest.param({"page_sizes": PageSizes(preferred=64, multiple_of=64)}, id="coarser-pages"),
        pytest.param({"requires": ("lib>=2",)}, id="requires-more"),
        pytest.param({"inputs": frozenset({"token_rows"})}, id="asks-for-more"),
        pytest.param({"phases": frozenset({"decode"})}, id="fewer-phases"),
        pytest.param({"accuracy": "fp8_scores"}, id="less-exact"),
        pytest.param({"graph": "any"}, id="stronger-graphs-behind"),
        pytest.param({"priority": 40}, id="lower-priority"),
    ],
)
def test_a_row_behind_a_wider_one_of_its_kernel_is_told(narrower: dict[str, object]) -> None:
    """The first row that fits is taken: a later one that serves no more is never reached."""
    rows = [kernel("k"), kernel("k", **narrower)]
    flaw = the_one(flaws_of(plugin(rows)), "fault", "never reached", "row 0")
    assert "row 1" in flaw.subject


@pytest.mark.parametrize(
    "wider",
    [
        pytest.param({"archs": ("9.0", "10.0")}, id="more-archs"),
        pytest.param({"head_dims": (64, 128, 256)}, id="more-head-dims"),
        pytest.param({"features": frozenset({"window", "softcap"})}, id="more-features"),
        pytest.param({"dtypes": frozenset({"bf16", "fp16"})}, id="more-dtypes"),
        pytest.param({"kv_dtypes": frozenset({"same", "e5m2"})}, id="more-kv-dtypes"),
        pytest.param({"layouts": ("rows", "hnd")}, id="more-layouts"),
        pytest.param({"index_forms": frozenset({"page_table", "csr"})}, id="more-index-forms"),
        pytest.param({"plan": "device"}, id="plans-on-the-device"),
        pytest.param({"deterministic": True, "alignment_tokens": 1}, id="deterministic"),
        pytest.param({"priority": 60, "head_dims": (64,)}, id="narrower-and-first"),
        pytest.param({"family": "mla"}, id="another-family"),
        pytest.param({"forward_archs": "major"}, id="claims-more"),
        pytest.param({"mask_format": "2d"}, id="another-mask"),
        pytest.param({"kv_dtype_names": {"half_precision": "bf16"}}, id="knows-another-name"),
        pytest.param({"kv_forms": frozenset({"paged", "ragged"})}, id="more-kv-forms"),
        pytest.param({"state_layouts": ("v_first",)}, id="more-state-layouts"),
    ],
)
def test_a_later_row_that_serves_more_is_left_alone(wider: dict[str, object]) -> None:
    """Every field counts: a row that serves something the first does not is reached."""
    assert flaws_of(plugin([kernel("k"), kernel("k", **wider)])) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"needs": frozenset({"spec"})}, {}, id="needs-less"),
        pytest.param({"excludes": frozenset({"spec"})}, {}, id="excludes-less"),
        pytest.param({"requires": ("lib>=2",)}, {}, id="requires-less"),
        pytest.param({"requires": ("lib>=2",)}, {"requires": ("other",)}, id="over-another-library"),
        pytest.param({"accuracy": "fp8_scores"}, {}, id="exact-behind-approximate"),
        pytest.param({"inputs": frozenset({"token_rows"})}, {}, id="asks-for-less"),
        pytest.param({"page_sizes": PageSizes(preferred=64, multiple_of=64)}, {}, id="finer-pages"),
        pytest.param({"deterministic": True, "alignment_tokens": 4096},
                     {"deterministic": True, "alignment_tokens": 64}, id="finer-alignment"),
        pytest.param({"phases": frozenset({"prefill"})}, {"phases": frozenset({"decode"})}, id="other-phases"),
        pytest.param({"runtimes": ("cuda>=13",)}, {}, id="older-runtimes"),
        pytest.param({"group_sizes": ((1, 32),)}, {}, id="more-heads"),
        pytest.param(
            {"device": "cpu", "archs": ("x86_64",), "cpu_features": frozenset({"amx_tile"})},
            {"device": "cpu", "archs": ("x86_64",)}, id="fewer-cpu-features",
        ),
        pytest.param({"features": frozenset({"sinks"})},
                     {"features": frozenset({"sinks"}), "sink_dtypes": frozenset({"same", "fp32"})}, id="more-sinks"),
        pytest.param({"features": frozenset({"sinks"})},
                     {"features": frozenset({"sinks"}), "sink_conversion": "lossless"}, id="converts-sinks"),
        pytest.param({"phases": frozenset({"prefill"}), "prefix": False},
                     {"phases": frozenset({"prefill"}), "prefix": True}, id="reads-a-prefix"),
        pytest.param({"phase_inputs": {"decode": frozenset({"host_lens"})}}, {}, id="asks-for-less-in-decode"),
    ],
)  # fmt: skip
def test_a_later_row_that_asks_for_less_is_left_alone(first: dict[str, object], second: dict[str, object]) -> None:
    """The fallback row of a kernel is what the order of rows is for."""
    assert flaws_of(plugin([kernel("k", **first), kernel("k", **second)])) == []


def test_kernels_auto_can_tell_apart_by_name_only_are_noted() -> None:
    """Both are named, with the priority and a host; across plugins too."""
    one, two = plugin([kernel("a")], name="one"), plugin([kernel("b")], name="two")
    flaw = the_one(flaws_of(two, one), "note", "a and b", "priority 50", "h100", "mha", "decode", "name, a")
    assert flaw.plugin == "two"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"priority": 51}, id="another-priority"),
        pytest.param({"archs": ("10.0",)}, id="another-host"),
        pytest.param({"family": "mla"}, id="another-family"),
        pytest.param({"phases": frozenset({"verify"}), "draft_phases": frozenset()}, id="another-phase"),
        pytest.param({"dtypes": frozenset({"fp16"})}, id="another-dtype"),
        pytest.param({"head_dims": (256,)}, id="another-head-dim"),
        pytest.param({"accuracy": "fp8_scores"}, id="approximate"),
        pytest.param({"layouts": ("hnd",)}, id="another-layout"),
        pytest.param({"needs": frozenset({"spec"})}, id="under-another-condition"),
    ],
)
def test_kernels_that_never_meet_do_not_tie(changes: dict[str, object]) -> None:
    """A tie needs one host, family, phase, dtype and head dim both serve."""
    first = kernel("a", phases=frozenset({"prefill", "decode"}), excludes=frozenset({"spec"}))
    assert flaws_of(plugin([first, kernel("b", **changes)])) == []


def test_kernels_of_two_slots_do_not_tie() -> None:
    """Names and ranks never meet across slots."""
    linear = {"family": "gdn", "slot": "linear"}
    assert flaws_of(plugin([kernel("a", **linear), kernel("b")])) == []


def test_an_alias_circle_is_told_once_for_each_key_across_plugins() -> None:
    """Aliases that lead to one another resolve to nothing; the whole way round is named."""
    one = plugin([kernel("k")], [Alias(key="x", kernels=("k", "y"))], name="one")
    two = plugin(aliases=[Alias(key="y", kernels=("z",)), Alias(key="z", kernels=("x",))], name="two")
    flaws = flaws_of(two, one)
    assert {flaw.text for flaw in flaws} == {"leads in a circle: x -> y -> z -> x"}
    assert {(flaw.level, flaw.plugin) for flaw in flaws} == {("fault", "one"), ("fault", "two")}


def test_an_alias_that_lists_itself_is_a_circle() -> None:
    """The shortest circle, in a list of one phase only."""
    alias = Alias(key="x", kernels=("k",), by_phase={"decode": ("x", "k")})
    the_one(flaws_of(plugin([kernel("k")], [alias])), "fault", "x -> x")


def test_an_alias_may_be_named_after_its_first_kernel() -> None:
    """trtllm_mha = (trtllm_mha, xqa): a kernel's name in a list is the kernel, not the key."""
    offers = [kernel("trtllm_mha", archs=("10.0",)), kernel("xqa")]
    assert flaws_of(plugin(offers, [Alias(key="trtllm_mha", kernels=("trtllm_mha", "xqa"))])) == []


@pytest.mark.parametrize(
    ("alias", "words", "fix"),
    [
        pytest.param(Alias(key="x", kernels=("other",)), ("'other'", "alias and no kernel"), "k", id="names-an-alias"),
        pytest.param(Alias(key="x", kernels=("k", "fa33")), ("'fa33'", "nobody"), "'fa3'", id="names-nobodys"),
        pytest.param(
            Alias(key="x", kernels=("k",), by_phase={"decode": ("gone",)}), ("'gone'",), "install", id="in-a-phase"
        ),
        pytest.param(Alias(key="x", kernels=("gdn_k",)), ("linear slot",), "", id="names-a-kernel-of-the-other-slot"),
        pytest.param(
            Alias(key="x", kernels=("k",), by_phase={"decode": ()}), ("nothing for decode",), "", id="empty-for-a-phase"
        ),
        pytest.param(Alias(key="x", kernels=("k", "small")), ("small is never reached", "k"), "", id="behind-a-wider"),
        pytest.param(Alias(key="x", kernels=("k", "k")), ("k is never reached",), "", id="listed-twice"),
        pytest.param(
            Alias(key="x", kernels=("k", "dec"), by_phase={"decode": ("k",), "draft_decode": ("k",)}),
            ("dec is never reached", "serves none of"), "", id="by-phase-hides-a-kernel",
        ),
        pytest.param(
            Alias(key="x", kernels=("k",), by_phase={"prefill": ("dec",)}), ("dec", "serves none of it"), "", id="wrong"
        ),
        pytest.param(
            Alias(key="x", kernels=("k",), deprecated="nowhere"), ("'nowhere'", "does not exist"), "", id="for-none"
        ),
        pytest.param(
            Alias(key="x", kernels=("k",), deprecated="old"), ("deprecated itself",), "'k'", id="for-another"
        ),
    ],
)  # fmt: skip
def test_an_alias_that_leads_nowhere_is_told(alias: Alias, words: tuple[str, ...], fix: str) -> None:
    """An alias lists kernels that exist and can be reached, and sends its users to a living key."""
    offers = [
        kernel("k", priority=1),
        kernel("small", head_dims=(64,), requires=("lib",), priority=2),
        kernel("dec", phases=frozenset({"decode"}), archs=("9.0", "10.0"), priority=3),
        kernel("gdn_k", family="gdn", slot="linear"),
    ]
    others = [Alias(key="other", kernels=("k",)), Alias(key="old", kernels=("k",), deprecated="k")]
    flaw = the_one(flaws_of(plugin(offers, [alias, *others])), "fault", *words)
    assert flaw.subject == "alias 'x'"
    assert fix in flaw.fix


def test_an_alias_over_unlike_hosts_is_left_alone() -> None:
    """hybrid_linear_attn: each kernel has a host of its own, and first-party names need not be installed."""
    offers = [
        kernel("fa3"),
        kernel("triton", archs=("8.0",), forward_archs="any", priority=40),
        kernel("intel_amx", device="cpu", archs=("x86_64",), cpu_features=frozenset({"amx_tile"})),
    ]
    alias = Alias(key="hybrid_linear_attn", kernels=("fa3", "triton", "intel_amx", "aiter"))
    assert flaws_of(plugin(offers, [alias])) == []


def test_an_alias_for_another_distributions_kernel_is_noted() -> None:
    """Installing is not consenting: such a key binds only where it is named with its distribution."""
    theirs = plugin([kernel("k")], name="theirs")
    ours = plugin(aliases=[Alias(key="x", kernels=("k",))], name="ours")
    flaw = the_one(flaws_of(ours, theirs), "note", "k of fake-theirs", "fake-ours:x")
    assert flaw.plugin == "ours"
    adapter = replace(ours, plugin=ours.plugin._replace(distribution="backstamp-sglang"))
    assert flaws_of(adapter, theirs) == []


def test_a_key_that_hides_a_kernel_is_noted() -> None:
    """A key named like a kernel that it does not list: that kernel cannot be asked for."""
    offers = [kernel("a"), kernel("b", archs=("10.0",))]
    the_one(flaws_of(plugin(offers, [Alias(key="a", kernels=("b",))])), "note", "hides the kernel a")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        pytest.param(
            RetiredSetting(name="OLD", replacement="--attention-backend", values={"1": "tritn"}),
            ("'1'", "'tritn'"), id="maps-to-no-key",
        ),
        pytest.param(
            RetiredSetting(name="OLD", replacement="x", values={"1": "k"}, request="linear_attn_backend"),
            ("'k'",), id="maps-to-the-other-slot",
        ),
        pytest.param(RetiredSetting(name="--attention-backend", replacement="x"), ("still read",), id="not-retired"),
    ],
)  # fmt: skip
def test_a_tombstone_that_leads_nowhere_is_told(setting: RetiredSetting, words: tuple[str, ...]) -> None:
    """vllm #50292: what a retired value becomes must be a key."""
    flaw = the_one(flaws_of(plugin([kernel("k")], retired=[setting])), "fault", *words)
    assert flaw.subject == f"retired setting {setting.name!r}"


def test_a_tombstone_that_leads_somewhere_is_left_alone() -> None:
    """Kernels, aliases, first-party names and another's inner settings are fine."""
    settings = [
        RetiredSetting(name="A", replacement="x", values={"1": "k", "2": "key", "3": "flashinfer", "4": "fake-p:k"}),
        RetiredSetting(name="B", replacement="x", values={"1": "anything"}, request="dsa_decode_backend"),
    ]
    assert flaws_of(plugin([kernel("k")], [Alias(key="key", kernels=("k",))], retired=settings)) == []


@pytest.mark.parametrize(
    ("default", "word"),
    [
        pytest.param(FamilyDefault(model_type="g", kernels=("kk",)), "'kk'", id="prefers-nobodys"),
        pytest.param(FamilyDefault(model_type="g", allowed=frozenset({"k", "gone"})), "'gone'", id="allows-nobodys"),
        pytest.param(FamilyDefault(model_type="g", kernels=("key",)), "'key'", id="prefers-an-alias"),
    ],
)
def test_a_family_default_for_a_kernel_nobody_has_is_told(default: FamilyDefault, word: str) -> None:
    """A model family's wish is for kernels that exist, or for first-party ones."""
    found = plugin([kernel("k")], [Alias(key="key", kernels=("k",))], families=[default])
    assert the_one(flaws_of(found), "fault", word).subject == "family default 'g'"
    fine = FamilyDefault(model_type="g", kernels=("k", "trtllm_mha"))
    assert flaws_of(plugin([kernel("k")], families=[fine])) == []


@pytest.mark.parametrize(
    ("default", "words"),
    [
        pytest.param(FeatureDefault(feature="f", archs=("9.9",)), ("9.9", "never on"), id="no-such-arch"),
        pytest.param(FeatureDefault(feature="f", archs=("9.0",), device="rocm"), ("'9.0'",), id="of-another-device"),
        pytest.param(FeatureDefault(feature="f", archs=("90a",)), ("'90a'",), id="misspelt"),
    ],
)
def test_a_feature_default_no_host_has_is_told(default: FeatureDefault, words: tuple[str, ...]) -> None:
    """sglang #31578: a default bound to an arch nobody has is never on."""
    assert (
        the_one(flaws_of(plugin([kernel("k")], features=[default])), "fault", *words).subject == "feature default 'f'"
    )
    fine = FeatureDefault(feature="f", archs=("9.0a", "10.0"))
    assert flaws_of(plugin([kernel("k")], features=[fine])) == []


def test_refused_rows_and_claimed_names_are_faults() -> None:
    """What the catalogue already refuses is told with the rest."""
    gross = plugin([kernel("bad", archs=())], name="gross")
    the_one(flaws_of(gross), "fault", "archs is empty")
    flaws = flaws_of(plugin([kernel("k")], name="one"), plugin([kernel("k")], name="two"))
    assert [(flaw.plugin, flaw.subject) for flaw in flaws] == [("one", "name 'k'"), ("two", "name 'k'")]
    assert "fake-one and fake-two" in flaws[0].text


def test_findings_come_faults_first_whatever_the_order_of_plugins() -> None:
    """The report of one installation is the same on every machine."""
    one, two = plugin([kernel("a")], name="one"), plugin([kernel("b", archs=("sm_90", "9.0"))], name="two")
    flaws = flaws_of(one, two)
    assert flaws == flaws_of(two, one)
    assert [flaw.level for flaw in flaws] == ["fault", "note"]


def test_every_finding_reads_the_same_from_json() -> None:
    """What a wheel carries is linted as its module is."""
    found = plugin([kernel("k", archs=("sm_90",))], features=[FeatureDefault(feature="f", archs=("9.9",))])
    again = replace(found, declared=declared_from_json(declared_to_json(found.declared), "p"))
    assert len(flaws_of(found)) == 2
    assert flaws_of(again) == flaws_of(found)
