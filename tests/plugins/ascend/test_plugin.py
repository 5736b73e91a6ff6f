"""The declarations of ascend: sound, importable without torch, true of what the factories build."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.declarations import PHASES
from backstamp.declared import Declared, declared_from_json, declared_to_json
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import NotInstalled
from backstamp.factories import Built
from backstamp.launch import Requests, make_launch
from backstamp.linear import LinearAttnBackends
from backstamp.model import model_from_config
from backstamp.resolution import resolve
from backstamp.soundness import faults_of
from backstamp.testing.hosts import described_host
from backstamp.testing.requests import request_for
from backstamp_ascend.plugin import backstamp_aliases, backstamp_offers
from tests.libraries.fake import FakeLibrary
from tests.models import config

OFFERS = backstamp_offers()
rows = pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.factory.split(":")[1])


def build(offer):
    """What the row's factory answers."""
    module, name = offer.factory.split(":")
    kernels = LinearAttnBackends("ascend", "ascend", "ascend")
    return vars(import_module(module))[name](request_for(offer, linear_attn_backends=kernels))


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
    built = build(offer)
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


def test_a_hybrid_model_is_served_whole_where_it_is_asked_for():
    """Full layers by one kernel of this plugin, gated delta nets by the other, of one name in two slots."""
    launch = make_launch(
        Requests(attention_backend="ascend", linear_attn_backend="ascend", linear_attn_verify_backend="ascend")
    )
    host, catalogue = described_host("ascend910b"), build_catalogue(discover())
    plan = resolve(launch, EngineFacts(), model_from_config(config("hybrid")), host, catalogue)
    assert {row.kernel for row in plan.running} == {"ascend"}
    assert [row.kernel for row in plan.linear.rows if row.kernel is not None][:2] == ["ascend", "ascend"]
    assert {group.plugin.distribution for row in plan.linear.rows for group in row.groups} == {"backstamp-ascend"}


def test_the_linear_rows_serve_targets_in_one_order_of_states():
    """The library has no parents of tokens, and drafts have no recurrent layers."""
    linear = [offer for offer in OFFERS if offer.slot == "linear"]
    assert [offer.phases for offer in linear] == [{"decode", "verify"}, {"prefill"}]
    assert {offer.state_layouts for offer in linear} == {("vk",)}
    assert {offer.all_phases - offer.phases for offer in linear} == {frozenset()}


def distributions(folder, **versions):
    """Metadata of distributions, as an installer leaves it."""
    for name, version in versions.items():
        there = folder / f"{name}-{version}.dist-info"
        there.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (there / "METADATA").write_text(text, "utf-8")


@rows
def test_a_torch_of_another_minor_is_refused_before_the_library_is_imported(offer, monkeypatch, tmp_path):
    """The wheels pin their torch; beside another they fail in the loader."""
    distributions(tmp_path, torch_npu="2.12.0.post3", torch="2.13.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(NotInstalled, match=r"needs torch 2\.12 beside torch-npu 2\.12\.0\.post3.*got torch 2\.13\.0"):
        build(offer)


@rows
def test_a_torch_of_its_own_minor_will_do(offer, monkeypatch, tmp_path):
    """Post releases and local labels of either are the same minor."""
    distributions(tmp_path, torch_npu="2.12.0.post3", torch="2.12.1+cpu")
    monkeypatch.syspath_prepend(tmp_path)
    FakeLibrary("torch-npu", monkeypatch)
    assert build(offer).kernel == "ascend"
