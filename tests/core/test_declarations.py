"""Declarations: what follows from them, what contradicts itself, and their JSON form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import ANY, Alias, EntryPair, Offer, PageSizes, RetiredSetting
from backstamp.declared import Declared, declared_from_json, declared_to_json
from backstamp.errors import DeclarationError
from backstamp.soundness import faults_of
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin

OFFER = cpu_offer("k", "fake")


def test_draft_phases_follow_their_halves() -> None:
    """Draft decode follows decode and draft extend follows prefill unless the row names them."""
    assert OFFER.all_phases == {"prefill", "decode", "verify", "draft_decode", "draft_extend"}
    assert replace(OFFER, draft_phases=frozenset()).all_phases == {"prefill", "decode", "verify"}
    only_decode = replace(OFFER, phases=frozenset({"decode"}))
    assert only_decode.all_phases == {"decode", "draft_decode"}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        pytest.param({"phases": frozenset()}, "phases is empty", id="no-phases"),
        pytest.param({"archs": ()}, "archs is empty", id="no-archs"),
        pytest.param({"dtypes": frozenset()}, "dtypes is empty", id="no-dtypes"),
        pytest.param({"head_dims": ()}, "head_dims is empty", id="no-head-dims"),
        pytest.param({"kernel": " "}, "kernel is empty", id="no-name"),
        pytest.param({"phases": frozenset({"extend"})}, "unknown ['extend']", id="unknown-phase"),
        pytest.param({"features": frozenset({"sink"})}, "unknown ['sink']", id="unknown-feature"),
        pytest.param({"priority": 101}, "priority needs 0..100", id="priority"),
        pytest.param({"factory": "fake.backend"}, "module:callable", id="factory-form"),
        pytest.param({"factory": "os:system"}, "lies outside", id="foreign-factory"),
        pytest.param({"needs": frozenset({"tp"}), "excludes": frozenset({"tp"})}, "both name", id="needs-and-excludes"),
        pytest.param({"page_sizes": PageSizes(preferred=8, exact=(64,))}, "prefers page size 8", id="page-size"),
        pytest.param({"requires": ("torch=2",)}, "PEP 508", id="bad-requirement"),
        pytest.param({"requires": ("torch>=2; python_version>'3'",)}, "marker", id="marker"),
        pytest.param({"draft_phases": frozenset({"decode"})}, "no draft phases", id="draft-phases"),
        pytest.param({"device": "any", "archs": ("9.0",)}, "archs ANY", id="any-device-one-arch"),
        pytest.param({"alignment_tokens": 128}, "not deterministic", id="alignment"),
    ],
)
def test_a_faulty_offer_is_a_failure_and_its_fault_is_named(changes: dict[str, object], word: str) -> None:
    """Empty or self-contradicting rows never reach the catalogue; the plugin is listed with every fault."""
    faulty = fake_plugin("bad", [replace(OFFER, **changes)], packages=frozenset({"fake"}))
    catalogue = catalogue_of(faulty)
    assert not catalogue.rows
    assert word in catalogue.failures[0].cause


def test_all_faults_are_reported_together() -> None:
    """A registry check reports every fault at once."""
    faults = faults_of(Declared(offers=(replace(OFFER, archs=(), priority=-1),)), frozenset({"fake"}))
    assert len(faults) == 2


def test_declaring_nothing_is_a_fault() -> None:
    """A plugin without any row is a mistake, not a plugin."""
    assert "declares nothing" in faults_of(Declared(), frozenset())[0]


def test_a_tombstone_maps_to_a_request_that_exists() -> None:
    """A retired setting that becomes a request nobody reads would be accepted without effect."""
    grave = RetiredSetting(name="OLD", replacement="NEW", values={"x": "k"}, request="attn_backend")
    (fault,) = faults_of(Declared(retired_settings=(grave,)), frozenset())
    assert "attn_backend" in fault
    assert not faults_of(Declared(retired_settings=(replace(grave, request="draft_attention_backend"),)), frozenset())


def test_json_form_is_the_same_declarations() -> None:
    """What a wheel carries reads back equal, sets, pairs and maps included."""
    offer = Offer(
        kernel="k",
        factory="fake.backend:build",
        family="mha",
        device="cuda",
        archs=("9.0", "10.0"),
        phases=frozenset({"decode"}),
        dtypes=frozenset({"bf16"}),
        head_dims=(64, (192, 128)),
        page_sizes=PageSizes(preferred=16, exact=(16, 64), multiple_of=128),
        kv_dtypes=frozenset({"same", "e4m3fn"}),
        mask_format="2d",
        graph="any",
        graph_under={"spec+dcp": "never"},
        phase_inputs={"decode": frozenset({"host_lens"})},
        sink_dtypes=frozenset({"bf16"}),
        kv_dtype_names={"fp8_e4m3": "e4m3fn"},
        draft_phases=frozenset(),
        requires=("torch>=2.11",),
    )
    declared = Declared(
        offers=(offer, OFFER),
        aliases=(Alias(key="a", kernels=("k",), by_phase={"prefill": ("j", "k")}, deprecated="k"),),
        entry_classes=(EntryPair(draft="m:Draft", target="m:Target"),),
    )
    text = declared_to_json(declared)
    assert declared_from_json(text, "test") == declared
    assert declared_to_json(declared_from_json(text, "test")) == text


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "JSON"),
        ("[]", "schema"),
        ('{"schema": 99}', "99"),
        ('{"schema": 1, "offers": [{"kernel": "k"}]}', "missing"),
        ('{"schema": 1, "offers": [{"colour": "red"}]}', "colour"),
        ('{"schema": 1, "offers": {}}', "list"),
        ('{"schema": 1, "offers": ["k"]}', "object"),
    ],
)
def test_malformed_json_is_one_clear_error(text: str, word: str) -> None:
    """A broken backstamp.json names the row and the fault, and what to do."""
    with pytest.raises(DeclarationError, match="backstamp declare") as caught:
        declared_from_json(text, "plugin p")
    assert word in caught.value.message


def test_any_head_dim_is_written_out() -> None:
    """ANY accepts everything, an empty tuple nothing: the two are never confused."""
    assert OFFER.head_dims == ANY
