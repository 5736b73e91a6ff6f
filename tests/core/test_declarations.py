"""Declarations: what follows from them, what contradicts itself, and their JSON form."""

from __future__ import annotations

from dataclasses import replace
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest

from backstamp.declarations import (
    ANY,
    Alias,
    EntryPair,
    FamilyDefault,
    FeatureDefault,
    Offer,
    PageSizes,
    RetiredSetting,
)
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
        pytest.param({"forward_archs": "minor"}, "forward_archs has unknown ['minor']", id="forward-archs"),
        pytest.param({"slot": "att"}, "slot has unknown ['att']", id="slot"),
        pytest.param({"plan": "maybe"}, "plan has unknown ['maybe']", id="plan"),
        pytest.param({"device": "cudaa"}, "device has unknown ['cudaa']", id="device"),
        pytest.param({"family": "mhaa"}, "family has unknown ['mhaa']", id="family"),
        pytest.param({"graph": "full"}, "graph has unknown ['full']", id="graph"),
        pytest.param({"graph_under": {"spec": "full"}}, "graph_under has unknown ['full']", id="graph-under-level"),
        pytest.param({"graph_under": {"nope": "never"}}, "graph_under has unknown ['nope']", id="graph-under-word"),
        pytest.param({"mask_format": "3d"}, "mask_format has unknown ['3d']", id="mask-format"),
        pytest.param({"sink_conversion": "yes"}, "sink_conversion has unknown ['yes']", id="sink-conversion"),
        pytest.param({"build_settings": frozenset({"soft"})}, "build_settings has unknown ['soft']", id="settings"),
        pytest.param({"accuracy": ""}, "accuracy needs 'exact' or", id="no-accuracy"),
        pytest.param({"accuracy": " exact"}, "accuracy needs 'exact' or", id="accuracy-with-blanks"),
        pytest.param({"companions": ("",)}, "companions needs words inside", id="empty-companion"),
        pytest.param({"requires": ("foo",), "companions": ("a b",)}, "'a b' is no PEP 508", id="no-companion"),
        pytest.param({"requires": ("foo",), "companions": ("a>=1",)}, "distribution alone", id="companion-range"),
        pytest.param({"runtimes": ("cuda=12",)}, "'cuda=12' is no PEP 508", id="bad-runtime"),
        pytest.param({"head_dims": (0,)}, "head_dims needs d", id="no-head-dim"),
        pytest.param({"head_dims": (64, -128)}, "got -128", id="negative-head-dim"),
        pytest.param({"head_dims": ((576, -512),)}, "got (576, -512)", id="negative-pair"),
        pytest.param({"head_dims": (True,)}, "got True", id="head-dim-flag"),
        pytest.param({"group_sizes": ()}, "group_sizes is empty", id="no-group-sizes"),
        pytest.param({"group_sizes": (0,)}, "group_sizes needs a number", id="no-group"),
        pytest.param({"group_sizes": ((8, 4),)}, "got (8, 4)", id="group-backwards"),
        pytest.param({"group_sizes": (True,)}, "got True", id="group-flag"),
        pytest.param({"group_sizes": ("any", 8)}, "got 'any'", id="any-among-group-sizes"),
        pytest.param({"page_sizes": PageSizes(preferred=-16, exact=(-16,))}, "sizes >= 1", id="negative-page"),
        pytest.param({"page_sizes": PageSizes(preferred=16, exact=(16, 0))}, "sizes >= 1", id="page-of-none"),
        pytest.param({"page_sizes": PageSizes(preferred=16, exact=(16,), multiple_of=-1)}, ">= 0", id="multiple"),
        pytest.param({"page_sizes": PageSizes(preferred=16, exact=(True,))}, "exact needs int", id="page-flag"),
        pytest.param({"fill_value": -1}, "fill_value needs a kv_len >= 0", id="fill-value"),
        pytest.param({"kernel": ".."}, "kernel needs to start with", id="name-path"),
        pytest.param({"kernel": "-k"}, "kernel needs to start with", id="name-flag"),
        pytest.param({"kernel": "auto"}, "kernel needs a name of its own", id="name-auto"),
        pytest.param({"kernel": "None"}, "kernel needs a name of its own", id="name-none"),
        pytest.param({"kernel": "default"}, "kernel needs a name of its own", id="name-default"),
    ],
)
def test_a_faulty_offer_is_a_failure_and_its_fault_is_named(changes: dict[str, object], word: str) -> None:
    """Empty or self-contradicting rows never reach the catalogue; the plugin is listed with every fault."""
    faulty = fake_plugin("bad", [replace(OFFER, **changes)], packages=frozenset({"fake"}))
    catalogue = catalogue_of(faulty)
    assert not catalogue.rows
    assert word in catalogue.failures[0].cause


PACKAGES = frozenset({"fake"})
ALIAS = Alias(key="a", kernels=("k",))
FAMILY = FamilyDefault(model_type="g", kernels=("k",))
FEATURE = FeatureDefault(feature="f", archs=("9.0",))
RETIRED = RetiredSetting(name="OLD", replacement="--attention-backend", values={"1": "k"})
ENTRY = EntryPair(draft="m:Draft", target="m:Target")
ROWS = {
    "offers": OFFER,
    "aliases": ALIAS,
    "family_defaults": FAMILY,
    "feature_defaults": FEATURE,
    "retired_settings": RETIRED,
    "entry_classes": ENTRY,
}


@pytest.mark.parametrize(
    ("table", "changes", "word"),
    [
        pytest.param("aliases", {"slot": "att"}, "slot has unknown ['att']", id="alias-slot"),
        pytest.param("aliases", {"key": "auto"}, "key needs a name of its own", id="alias-auto"),
        pytest.param(
            "offers",
            {"sub_settings": {"dsa_verify_backend": frozenset({"x"})}},
            "sub_settings has unknown ['dsa_verify_backend']",
            id="sub-setting-nobody-asks-for",
        ),
        pytest.param("aliases", {"kernels": ("none",)}, "kernels needs a name of its own", id="alias-of-none"),
        pytest.param("aliases", {"kernels": ("k", "")}, "kernels needs words inside", id="alias-of-nothing"),
        pytest.param("aliases", {"deprecated": "a"}, "deprecated needs the key", id="alias-instead-of-itself"),
        pytest.param("aliases", {"deprecated": ""}, "deprecated needs the key", id="alias-instead-of-nothing"),
        pytest.param("family_defaults", {"role": "drfat"}, "role has unknown ['drfat']", id="family-role"),
        pytest.param("family_defaults", {"model_type": ""}, "model_type needs a word", id="family-of-nothing"),
        pytest.param("family_defaults", {"component": " "}, "component needs a word", id="family-no-component"),
        pytest.param(
            "family_defaults", {"kernels": (), "allowed": frozenset()}, "says nothing", id="family-allows-nothing"
        ),
        pytest.param("feature_defaults", {"device": "cudaa"}, "device has unknown ['cudaa']", id="feature-device"),
        pytest.param("feature_defaults", {"feature": ""}, "feature needs a word", id="feature-of-nothing"),
        pytest.param("feature_defaults", {"archs": ("any", "9.0")}, "got both in", id="feature-any-among-others"),
        pytest.param("retired_settings", {"replacement": ""}, "replacement needs a word", id="retired-for-nothing"),
        pytest.param("retired_settings", {"values": {"1": ""}}, "values needs words inside", id="retired-empty-key"),
        pytest.param("entry_classes", {"draft": "Draft"}, 'draft needs "module:Class"', id="entry-form"),
        pytest.param("entry_classes", {"target": "m:1"}, 'target needs "module:Class"', id="entry-name"),
    ],
)
@pytest.mark.parametrize("form", ["objects", "json"])
def test_a_faulty_row_of_any_table_fails_its_plugin_alone(
    form: str, table: str, changes: dict[str, object], word: str
) -> None:
    """From objects and from backstamp.json alike: the fault is named and the other plugin is there."""
    declared = Declared(**{table: (replace(ROWS[table], **changes),)})
    if form == "json":
        declared = declared_from_json(declared_to_json(declared), "p")
    bad = replace(fake_plugin("bad"), declared=declared)
    catalogue = catalogue_of(bad, fake_plugin("good", [OFFER]))
    assert word in catalogue.failures[0].cause
    assert list(catalogue.rows) == [("attention", OFFER.kernel)]


def literal_places() -> list[tuple[str, str]]:
    """Every field of every row that holds a word of a Literal, however deep."""

    def within(hint: object) -> bool:
        return get_origin(hint) is Literal or any(within(part) for part in get_args(hint))

    return [(table, name) for table in ROWS for name, hint in get_type_hints(type(ROWS[table])).items() if within(hint)]


@pytest.mark.parametrize(("table", "name"), literal_places(), ids=lambda word: word)
def test_every_literal_is_held_to_its_words(table: str, name: str) -> None:
    """A field added later is asked too: an unknown word in it, at every place it has, is a fault of the plugin."""
    hint = get_type_hints(type(ROWS[table]))[name]
    if get_origin(hint) in (UnionType, Union) and type(None) in get_args(hint):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is frozenset:
        odd: object = frozenset({"zzz"})
    elif name in ("by_phase", "phase_inputs"):
        odd = {"zzz": ("k",) if name == "by_phase" else frozenset({"host_lens"})}
    else:
        odd = {"spec": "zzz"} if name == "graph_under" else "zzz"
    declared = Declared(**{table: (replace(ROWS[table], **{name: odd}),)})
    assert any("unknown ['zzz']" in fault or "names ['zzz']" in fault for fault in faults_of(declared, PACKAGES))


def test_a_row_in_the_wrong_table_is_a_fault() -> None:
    """It would be asked for fields it has not."""
    (fault,) = faults_of(Declared(offers=(ALIAS,)), frozenset())  # type: ignore[arg-type]
    assert fault == "offers[0]: needs Offer, got Alias"


def test_all_faults_are_reported_together() -> None:
    """A registry check reports every fault at once."""
    faults = faults_of(Declared(offers=(replace(OFFER, archs=(), priority=-1),)), frozenset({"fake"}))
    assert len(faults) == 2


@pytest.mark.parametrize("name", [["k"], {"a": 1}, None, 7], ids=str)
def test_a_name_that_is_no_word_takes_down_its_own_plugin_alone(name: object) -> None:
    """xarray #5136: one broken plugin must not take every lookup with it."""
    faulty = fake_plugin("bad", [replace(OFFER, kernel=name)], [Alias(key=name, kernels=("x",))])
    catalogue = catalogue_of(faulty, fake_plugin("good", [OFFER]))
    assert [kernel for _, kernel in catalogue.rows] == [OFFER.kernel]
    assert [failure.plugin.name for failure in catalogue.failures] == ["bad"]


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
        sub_settings={"dsa_decode_backend": frozenset({"triton"})},
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
        ('{"schema": 1, "offers": [{"kernel": "k", "page_sizes": {}}]}', "'preferred'"),
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
