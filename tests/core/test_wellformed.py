"""Values of declared rows: types, printable text, and names that survive lists, paths and shells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import Alias, EntryPair, FamilyDefault, FeatureDefault, Offer, PageSizes, RetiredSetting
from backstamp.declared import Declared, declared_from_json, declared_to_json
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.wellformed import malformed

OFFER = cpu_offer("k", "fake")


class Sly(str):
    """Text that prints as it was not compared."""


WRONG: dict[str, dict[str, object]] = {
    "archs": {"archs": "9.0"},
    "head-dims": {"head_dims": 64},
    "phases": {"phases": ("prefill",)},
    "dtypes": {"dtypes": "bf16"},
    "page-sizes": {"page_sizes": 16},
    "priority": {"priority": "high"},
    "priority-flag": {"priority": True},
    "prefix": {"prefix": "no"},
    "mapping": {"kv_dtype_names": [("fp8", "e4m3fn")]},
    "kernel": {"kernel": 7},
    "factory": {"factory": None},
    "requires": {"requires": "torch"},
    "arch-numbers": {"archs": (9.0,)},
    "phase-numbers": {"phases": frozenset({1})},
    "mapping-numbers": {"kv_dtype_names": {"fp8": 8}},
    "page_sizes.preferred": {"page_sizes": PageSizes(preferred="16", multiple_of=1)},  # type: ignore[arg-type]
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=list(WRONG))
def test_a_value_of_the_wrong_type_is_named(changes: dict[str, object]) -> None:
    """A word where a tuple of words belongs would be compared letter by letter."""
    (fault,) = malformed(Declared(offers=(replace(OFFER, **changes),)))
    assert fault.startswith(f"offers[0]: {next(iter(changes))}")
    assert "needs" in fault


def test_every_kind_of_row_that_holds_together_passes() -> None:
    """Optional fields may be None, and every table is looked at."""
    declared = Declared(
        offers=(replace(OFFER, draft_phases=None, alignment_tokens=16, deterministic=True, head_dims=((576, 512),)),),
        aliases=(Alias(key="trtllm_mha", kernels=("xqa", "fmha-v2.1"), by_phase={"decode": ("xqa",)}),),
        entry_classes=(EntryPair(draft="a.b:C", target="a.b:D"),),
        retired_settings=(RetiredSetting(name="OLD", replacement="--attention-backend", values={"True": "k"}),),
        family_defaults=(FamilyDefault(model_type="g", kernels=("k",), allowed=frozenset({"k"})),),
        feature_defaults=(FeatureDefault(feature="f", archs=("9.0",)),),
    )
    assert malformed(declared) == []


def test_a_phases_kernels_are_a_tuple() -> None:
    """A word there would be read as a list of letters, from a module and from JSON alike."""
    alias = Alias(key="k", kernels=("a",), by_phase={"decode": "xqa"})  # type: ignore[dict-item]
    (fault,) = malformed(Declared(aliases=(alias,)))
    assert fault.startswith("aliases[0]: by_phase needs tuple for every key")
    text = declared_to_json(Declared(aliases=(alias,)))
    assert malformed(declared_from_json(text, "p")) == [fault]
    (fault,) = malformed(Declared(offers=(replace(OFFER, phase_inputs={"decode": "host_lens"}),)))
    assert fault.startswith("offers[0]: phase_inputs needs frozenset for every key")


ODD = {
    "newline": "a\nb",
    "escape": "\x1b[31mred",
    "null": "a\0b",
    "bidi": "a\u202eb",
    "command": "::error::x",
    "surrogate": "a\ud800b",
    "long": "x" * 400,
    "sly": Sly("fa3"),
}
PLACES = {
    "kernel": lambda text: Declared(offers=(replace(OFFER, kernel=text),)),
    "arch": lambda text: Declared(offers=(replace(OFFER, archs=(text,)),)),
    "feature": lambda text: Declared(offers=(replace(OFFER, features=frozenset({text})),)),
    "kv-name": lambda text: Declared(offers=(replace(OFFER, kv_dtype_names={"fp8": text}),)),
    "key": lambda text: Declared(aliases=(Alias(key=text, kernels=("k",)),)),
    "listed": lambda text: Declared(aliases=(Alias(key="a", kernels=(), by_phase={"decode": (text,)}),)),
    "replacement": lambda text: Declared(retired_settings=(RetiredSetting(name="OLD", replacement=text),)),
    "entry": lambda text: Declared(entry_classes=(EntryPair(draft=text, target="a:B"),)),
    "model": lambda text: Declared(family_defaults=(FamilyDefault(model_type=text, kernels=("k",)),)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("odd", ODD)
def test_text_that_must_not_be_printed_is_refused_wherever_it_is(place: str, odd: str) -> None:
    """And the fault itself is one printable line."""
    faults = malformed(PLACES[place](ODD[odd]))
    assert faults
    for fault in faults:
        assert fault.isprintable()
        assert "::" not in fault
        assert len(fault) < 500


@pytest.mark.parametrize("name", ["a,b", "a/b", "a\\b", "../a", "a:b", "a b", " a", "a|b", "<a>", "a'b", "x" * 101])
def test_a_name_with_separators_is_no_name(name: str) -> None:
    """Names travel in lists, as `distribution:name`, and in paths of caches and reports."""
    assert malformed(Declared(offers=(replace(OFFER, kernel=name),)))
    assert malformed(Declared(aliases=(Alias(key=name, kernels=("k",)),)))
    assert malformed(Declared(aliases=(Alias(key="a", kernels=(name,)),)))


def test_malformed_rows_make_a_failure_with_every_fault() -> None:
    """The plugin is listed, the others resolve."""
    bad: Offer = replace(OFFER, kernel="a/b", archs="9.0", page_sizes=PageSizes(preferred=16))
    catalogue = catalogue_of(fake_plugin("bad", [bad]), fake_plugin("good", [OFFER]))
    assert list(catalogue.rows) == [("attention", "k")]
    assert "archs needs tuple, got str" in catalogue.failures[0].cause
    assert "kernel needs a word without separators" in catalogue.failures[0].cause
