"""The declarations of ascend: sound, importable without torch, true of what the factories build."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from backstamp.declarations import PHASES
from backstamp.declared import Declared, declared_from_json, declared_to_json
from backstamp.factories import Built
from backstamp.soundness import faults_of
from backstamp.testing.requests import request_for
from backstamp_ascend.plugin import backstamp_aliases, backstamp_offers
from tests.libraries.fake import FakeLibrary

OFFERS = backstamp_offers()
rows = pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.factory.split(":")[1])


def test_declarations_import_neither_torch_nor_the_library():
    """Any machine can be asked about from any machine."""
    code = (
        "import sys, backstamp_ascend.plugin as p; p.backstamp_offers(); "
        "print([m for m in sys.modules if m in ('torch', 'torch_npu', 'backstamp_ascend.backend')])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_declarations_are_sound_and_survive_their_json():
    """No fault is found, and `backstamp.json` says the same."""
    declared = Declared(offers=OFFERS, aliases=backstamp_aliases())
    assert faults_of(declared, frozenset({"backstamp_ascend"})) == []
    assert declared_from_json(declared_to_json(declared), "ascend") == declared


@rows
def test_every_factory_builds_its_kernel(offer, monkeypatch):
    """The path of each row leads to a callable that answers the row's name."""
    FakeLibrary("torch-npu", monkeypatch)
    module, name = offer.factory.split(":")
    built = vars(import_module(module))[name](request_for(offer))
    assert isinstance(built, Built)
    assert built.kernel == offer.kernel == "ascend"
    assert callable(built.backend.plan)
    assert callable(built.backend.forward)


@rows
def test_rows_name_their_library_and_the_one_chip(offer):
    """No newer chip is claimed, and nothing the library has no parameter for."""
    assert [item.split(">=")[0] for item in offer.requires] == ["torch-npu"]
    assert (offer.device, offer.archs, offer.forward_archs) == ("npu", ("ascend910b",), "no")
    assert offer.features.isdisjoint({"tree_mask", "softcap", "alibi", "split_kv", "encoder", "cross"})
    assert offer.graph == "never"


def test_both_families_are_served_in_every_phase():
    """What a draft needs follows from decode and prefill."""
    phases = {family: set() for family in ("mha", "mla")}
    for offer in OFFERS:
        if offer.slot == "attention":
            phases[offer.family] |= offer.all_phases
    assert phases == {"mha": set(PHASES), "mla": set(PHASES)}


def test_what_the_library_restricts_to_some_rows_is_declared_there_alone():
    """Sinks go with 128 in bf16, a window with one packed call, fp16 and other head dims with calls a row."""
    packed, wide, by_row = OFFERS[:3]
    assert [sorted({"sinks", "window"} & offer.features) for offer in (packed, wide, by_row)] == [
        ["sinks", "window"],
        ["window"],
        [],
    ]
    assert (packed.dtypes, packed.head_dims, packed.sink_dtypes) == ({"bf16"}, (128,), {"bf16"})
    assert (wide.dtypes, wide.head_dims) == ({"bf16"}, (192,))
    assert "fp16" in by_row.dtypes
