"""The declarations of aiter: sound, importable without torch, true of what the factories build."""

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
from backstamp_aiter.plugin import backstamp_aliases, backstamp_offers
from tests.libraries.fake import FakeLibrary

OFFERS = backstamp_offers()
rows = pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.factory.split(":")[1])


def test_declarations_import_neither_torch_nor_the_library():
    """Any machine can be asked about from any machine."""
    code = (
        "import sys, backstamp_aiter.plugin as p; p.backstamp_offers(); "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'aiter') or m == 'backstamp_aiter.backend'])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_declarations_are_sound_and_survive_their_json():
    """No fault is found, and `backstamp.json` says the same."""
    declared = Declared(offers=OFFERS, aliases=backstamp_aliases())
    assert faults_of(declared, frozenset({"backstamp_aiter"})) == []
    assert declared_from_json(declared_to_json(declared), "aiter") == declared


@rows
def test_every_factory_builds_its_kernel(offer, monkeypatch):
    """The path of each row leads to a callable that answers the row's name."""
    FakeLibrary("amd-aiter", monkeypatch)
    module, name = offer.factory.split(":")
    built = vars(import_module(module))[name](request_for(offer))
    assert isinstance(built, Built)
    assert built.kernel == offer.kernel == "aiter"
    assert callable(built.backend.plan)
    assert callable(built.backend.forward)


@rows
def test_rows_name_their_library_and_the_two_chips(offer):
    """RDNA is another kernel's business, and no newer chip is claimed."""
    assert [item.split(">=")[0] for item in offer.requires] == ["amd-aiter"]
    assert (offer.device, offer.archs, offer.forward_archs) == ("rocm", ("gfx942", "gfx950"), "no")
    assert offer.features.isdisjoint({"tree_mask", "non_causal", "lse", "split_kv", "encoder", "cross"})


def test_mha_is_served_in_every_phase_and_mla_in_all_but_verify():
    """What a draft needs follows from decode and prefill."""
    phases = {family: set() for family in ("mha", "mla")}
    for offer in OFFERS:
        phases[offer.family] |= offer.all_phases
    assert phases == {"mha": set(PHASES), "mla": set(PHASES) - {"verify"}}
