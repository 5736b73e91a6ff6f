"""A plan made elsewhere is used as it is, or refused with every reason; never resolved anew."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from backstamp.adoption import adopt
from backstamp.catalogue import Catalogue
from backstamp.declarations import Offer, PageSizes
from backstamp.discovery import Failure
from backstamp.errors import BadPlan, NotAdopted
from backstamp.host import HostFacts
from backstamp.launch import Requests
from backstamp.model import ModelFacts, model_from_config
from backstamp.plan import Plan
from backstamp.plan_rows import PluginRef, SinkNeeds
from backstamp.policy import Policy
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.models import config
from tests.plans import resolved
from tests.resolving import kernel, plan_of
from tests.scenes import DENSE, model_with, plan_with

LIBRARIES = {"triton": "3.4.0"}
OFFERS = [kernel("flashinfer", priority=60), kernel("triton", requires=("triton>=3.2",), archs=("9.0", "12.0"))]
ASKED = Requests(attention_backend="triton")
PLAN = plan_of(OFFERS, ASKED, libraries=LIBRARIES)
HOST = described_host("h100", libraries=LIBRARIES)


def catalogue(offers: Sequence[Offer] = OFFERS, **changes: str) -> Catalogue:
    """The catalogue of the one plugin."""
    return catalogue_of(fake_plugin("p", offers, **changes))


def refused(host: HostFacts = HOST, known: Catalogue | None = None, plan: object = None) -> str:
    """Why the plan is not adopted."""
    with pytest.raises(NotAdopted) as caught:
        adopt(PLAN.as_json() if plan is None else plan, host, catalogue() if known is None else known)
    return caught.value.found


@settings(deadline=None)
@given(resolved())
def test_whatever_a_host_resolves_it_adopts(made: tuple[object, list[Offer]]) -> None:
    """Rank 0's plan on a rank like rank 0: equal, and through JSON text as it travels."""
    plan, offers = made
    # the libraries the plan was resolved with, or the list it was assumed without
    found = {group.library for row in plan.phases for group in row.groups if group.library is not None}
    libraries = {"triton": "3.4.0", "flashinfer-python": "0.6.1"} if any(item.version for item in found) else None
    host = described_host("h100", libraries=libraries)
    assert adopt(json.dumps(plan.as_json()), host, catalogue(offers)) == plan


def test_a_plan_is_used_as_it_is_where_this_host_would_choose_another() -> None:
    """Auto here would take flashinfer; the plan says triton, and so does what comes back."""
    here = plan_of(OFFERS, libraries=LIBRARIES)
    assert here.phase("decode").kernel == "flashinfer"
    adopted = adopt(json.dumps(PLAN.as_json()).encode(), HOST, catalogue())
    assert adopted == PLAN
    assert adopted.phase("decode").kernel == "triton"


def test_a_row_this_host_refuses_is_refused() -> None:
    """Rank 0 is SM90, this rank is not, and the row is not for it."""
    reasons = refused(described_host("a100", libraries=LIBRARIES))
    assert "prefill: triton needs SM90 (9.0), SM120 (12.0), got SM80 (8.0)" in reasons
    assert "decode: triton needs" in reasons


def test_a_row_another_host_accepts_is_adopted_there() -> None:
    """Rank 0 is SM90 and this rank SM120: the row claims both."""
    assert adopt(PLAN.as_json(), described_host("rtx5090", libraries=LIBRARIES), catalogue()) == PLAN


def test_another_version_of_the_plugin_is_refused() -> None:
    """Names and versions are those of the plan."""
    reasons = refused(known=catalogue(version="1.1"))
    assert "triton needs fake-p 1.0 and its row 0 for mha, got fake-p 1.1" in reasons


def test_a_kernel_nobody_here_has_is_refused() -> None:
    """The plugin is not installed in this process."""
    assert "triton needs fake-p 1.0 and its row 0 for mha, got no plugin that has it" in refused(
        known=catalogue(OFFERS[:1])
    )


def test_a_plugin_that_failed_here_is_told_with_its_cause() -> None:
    """Not installed and broken are two things."""
    failure = Failure(
        plugin=PluginRef("p", "fake-p", "1.0"),
        entry="p",
        cause="ImportError: no libcuda",
        error=ImportError("no libcuda"),
        names=frozenset({"triton"}),
    )
    reasons = refused(known=catalogue_of(failures=[failure]))
    assert "got a plugin that failed: ImportError: no libcuda" in reasons


def test_another_row_in_the_same_place_is_refused() -> None:
    """Same distribution and version, other rows: a plan's row 0 for mha is an MLA row here."""
    assert "got another row there" in refused(known=catalogue([OFFERS[0], replace(OFFERS[1], family="mla")]))


@pytest.mark.parametrize(
    ("libraries", "reason"),
    [
        ({}, "triton needs triton>=3.2, got triton is not installed"),
        ({"triton": "3.1.0"}, "triton needs triton>=3.2, got triton 3.1.0"),
        ({"triton": "3.5.0"}, "triton needs triton 3.4.0, got triton 3.5.0"),
    ],
    ids=["missing", "too-old", "another-good-one"],
)
def test_another_library_is_refused(libraries: dict[str, str], reason: str) -> None:
    """The version in the plan is the one that runs on every rank."""
    assert reason in refused(described_host("h100", libraries=libraries))


def test_a_check_the_operator_switched_off_stays_off() -> None:
    """A bypassed library version was a decision, and is on the stamp; a machine's check is never bypassed."""
    old = {"triton": "3.1.0"}
    policy = Policy(bypass=frozenset({"library_version"}))
    plan = plan_of(OFFERS, ASKED, libraries=old, policy=policy)
    assert adopt(plan.as_json(), described_host("h100", libraries=old), catalogue()) == plan
    tampered = replace(PLAN, bypassed=("arch",)).as_json()
    assert "got SM80 (8.0)" in refused(described_host("a100", libraries=LIBRARIES), plan=tampered)


def test_a_phase_that_names_another_kernel_than_its_layers_is_refused() -> None:
    """The digest covers the groups; what a phase says of itself must be theirs."""
    rows = [row._replace(kernel="flashinfer") if row.phase == "decode" else row for row in PLAN.phases]
    assert (
        refused(plan=replace(PLAN, phases=tuple(rows)).as_json())
        == "decode: it names flashinfer, which none of its layers has"
    )
    rows = [row._replace(kernel="flashinfer") if row.phase == "verify" else row for row in PLAN.phases]
    assert refused(plan=replace(PLAN, phases=tuple(rows)).as_json()) == "verify: it names flashinfer and no layers"


def test_a_phase_its_row_does_not_declare_is_refused() -> None:
    """Same row, but for decode alone."""
    reasons = refused(known=catalogue([OFFERS[0], replace(OFFERS[1], phases=frozenset({"decode"}))]))
    assert reasons == "prefill: triton needs a phase it declares, got prefill"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 24}, "triton needs page size 16, multiples of 32, got 24"),
        ({"layouts": (("attention", "packed"),)}, "triton needs KV layout rows, got packed"),
        ({"kv_dtype": "e4m3fn"}, "triton needs KV dtype same, got e4m3fn"),
    ],
)
def test_a_cache_its_rows_do_not_read_is_refused(changes: dict[str, object], reason: str) -> None:
    """A plan edited and digested again is still held against what the kernels declare."""
    pages = PageSizes(preferred=16, exact=(16,), multiple_of=32)
    offers = [replace(offer, page_sizes=pages) for offer in OFFERS]
    plan = plan_of(offers, ASKED, libraries=LIBRARIES)
    assert adopt(plan.as_json(), HOST, catalogue(offers)) == plan
    assert reason in refused(known=catalogue(offers), plan=replace(plan, **changes).as_json())


def test_the_linear_slot_is_adopted_with_the_rest() -> None:
    """A recurrent layer's kernel must be here as well."""
    linear = kernel(
        "gdn", slot="linear", family="gdn", head_dims=("any",), phases=frozenset({"prefill", "decode", "verify"})
    )
    offers = [kernel("flashinfer", head_dims=("any",)), linear]
    plan = plan_of(offers, model=model_from_config(config("hybrid")))
    host = described_host("h100")
    assert adopt(plan.as_json(), host, catalogue(offers)) == plan
    assert "linear decode: gdn needs fake-p 1.0" in refused(host, catalogue(offers[:1]), plan.as_json())


@pytest.mark.parametrize("text", ["", "{", b"\xff", "[" * 100_000, '{"schema": 1}'])
def test_what_is_no_plan_is_one_clear_error(text: str | bytes) -> None:
    """Whatever arrives from elsewhere."""
    with pytest.raises(BadPlan, match="plan handed over"):
        adopt(text, HOST, catalogue())


def test_adopting_imports_no_plugin() -> None:
    """Whether it can be built is asked of declarations."""
    before = set(sys.modules)
    adopt(PLAN.as_json(), HOST, catalogue())
    assert set(sys.modules) == before


ENCODER = replace(DENSE, component="vision", attn_type="encoder", causal=False)
CROSS = replace(DENSE, component="cross_attention", attn_type="cross")
WITH_VISION = model_with((2, DENSE), (2, ENCODER), name="v")
CAPPED = model_with((2, replace(DENSE, softcap=50.0)), name="c")
SINKS = kernel(
    "sinks",
    features=frozenset({"sinks"}),
    sink_dtypes=frozenset({"fp32"}),
    sink_conversion="lossless",
    deterministic=True,
    alignment_tokens=64,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"alignment_tokens": None}, "prefill: sinks needs the alignment it declares (64), got None"),
        ({"alignment_tokens": 1}, "prefill: sinks needs the alignment it declares (64), got 1"),
        (
            {"sinks": SinkNeeds(("bf16",), ("bf16",), "no")},
            "prefill: sinks needs sinks read as it declares (fp32, conversion lossless), got bf16, conversion no",
        ),
    ],
)
def test_what_decisions_read_is_what_the_row_declares(changes: dict[str, object], reason: str) -> None:
    """A plan that cuts prefill elsewhere, or reads sinks otherwise, has the digest of one that does not."""
    plan = plan_with([SINKS], model=model_with((2, replace(DENSE, sinks="bf16"))))
    (group,) = plan.phases[0].groups
    told = replace(plan, phases=(plan.phases[0]._replace(groups=(group._replace(**changes),)), *plan.phases[1:]))
    assert told.digest == plan.digest
    assert adopt(plan.as_json(), HOST, catalogue([SINKS])) == plan
    assert reason in refused(known=catalogue([SINKS]), plan=told.as_json())


CAPS = kernel("caps", features=frozenset({"softcap"}), build_settings=frozenset({"softcap"}))
ONES = PageSizes(preferred=1, exact=(1,))
FP8 = frozenset({"same", "e4m3fn"})


def encoder(**changes: object) -> Offer:
    """A kernel of encoders."""
    return kernel("enc", features=frozenset({"encoder", "cross"}), **changes)


@pytest.mark.parametrize(
    ("offers", "model", "asked"),
    [
        pytest.param([kernel("a"), encoder(page_sizes=ONES)], WITH_VISION, {"page_size": 16}, id="pages-of-an-encoder"),
        pytest.param(
            [kernel("a", kv_dtypes=FP8), encoder()],
            WITH_VISION, {"kv_cache_dtype": "fp8_e4m3"}, id="fp8-beside-an-encoder",
        ),
        pytest.param(
            [kernel("a", kv_dtypes=frozenset({"nvfp8"}), kv_dtype_names={"fp8_e4m3": "nvfp8"})],
            None, {"kv_cache_dtype": "fp8_e4m3"}, id="renamed-dtype",
        ),
        pytest.param(
            [kernel("a", kv_dtype_names={"half_precision": "bf16"})],
            None, {"kv_cache_dtype": "half_precision"}, id="renamed-to-its-own",
        ),
        pytest.param(
            [kernel("a", kv_dtypes=FP8), encoder(kv_dtypes=FP8)],
            model_with((2, DENSE), (2, CROSS), name="x"), {"kv_cache_dtype": "fp8_e4m3"}, id="cross-attention-in-fp8",
        ),
        pytest.param([CAPS], CAPPED, {"speculative_algorithm": "EAGLE"}, id="softcap-compiled-in"),
        pytest.param([CAPS], model_with((2, DENSE), name="c"), {}, id="softcap-the-model-lacks"),
    ],
)  # fmt: skip
def test_a_plan_made_here_is_adopted_here(
    offers: list[Offer], model: ModelFacts | None, asked: dict[str, object]
) -> None:
    """Whatever components, cache dtypes and settings are in it."""
    plan = plan_with(offers, Requests(**asked), model=model)  # type: ignore[arg-type]
    assert adopt(json.dumps(plan.as_json()), described_host("h100"), catalogue(offers)) == plan


def _set(plan: Plan, phases: Sequence[str], settings: tuple[tuple[str, float], ...]) -> Plan:
    """A plan with other settings in some phases."""
    return replace(
        plan,
        phases=tuple(
            row._replace(groups=tuple(group._replace(settings=settings) for group in row.groups))
            if row.phase in phases
            else row
            for row in plan.phases
        ),
    )


@pytest.mark.parametrize(("settings", "got"), [((), "0"), ((("softcap", 30.0),), "30")], ids=["removed", "another"])
def test_phases_that_compile_one_layer_with_unlike_settings_are_refused(
    settings: tuple[tuple[str, float], ...], got: str
) -> None:
    """One layer has one softcap; a plan that says two was changed on the way."""
    plan = _set(plan_with([CAPS], model=CAPPED), ["decode"], settings)
    reasons = refused(described_host("h100"), catalogue([CAPS]), plan.as_json())
    assert f"decode: caps needs softcap 50 for layer 0, as in prefill, got {got}" in reasons


def test_a_setting_its_row_does_not_compile_in_is_refused() -> None:
    """The factory would be handed what it never declared."""
    plan = _set(plan_with([kernel("a")]), ["prefill", "decode"], (("softcap", 50.0),))
    reasons = refused(described_host("h100"), catalogue([kernel("a")]), plan.as_json())
    assert "prefill: a needs a setting it compiles in, got softcap 50" in reasons


def test_a_plan_switches_off_no_check_an_operator_may_not() -> None:
    """What a plan says was bypassed is held to what can be: a missing library is missing on every rank."""
    tampered = replace(PLAN, bypassed=("library_missing",))
    assert "triton is not installed" in refused(host=described_host("h100", libraries={}), plan=tampered.as_json())
