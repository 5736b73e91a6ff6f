"""The declarations: sound, importable without a library, and true of what the factories build."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.declared import Declared, declared_from_json, declared_to_json
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.host import HostFacts
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.soundness import faults_of
from backstamp.testing.hosts import described_host
from backstamp.testing.linear_batches import linear_layer, make_linear_step
from backstamp_linear_attn.plugin import backstamp_aliases, backstamp_offers
from tests.linear_steps import request_for
from tests.plugins.linear_attn import behave
from tests.scenes import DENSE, GATED, model_with

OFFERS = backstamp_offers()
IDS = [f"{of.kernel}-{of.family}-{of.device}-{'-'.join(sorted(of.phases))}-{at}" for at, of in enumerate(OFFERS)]
GDN = model_with((3, GATED), (1, DENSE))
KDA = model_with((3, replace(GATED, family="kda")), (1, DENSE))
BOUNDED = model_with((3, replace(GATED, family="kda", gate_lower_bound=-5.0)), (1, DENSE))


def plan_for(host: str | HostFacts, model=GDN, **asked: str) -> Plan:
    """A hybrid model's plan, every installed plugin beside; its full attention is the reference's."""
    facts = described_host(host) if isinstance(host, str) else host
    launch = make_launch(Requests(attention_backend="torch_native", **asked))
    return resolve(launch, EngineFacts(), model, facts, build_catalogue(discover()))


def linear_kernels(plan: Plan) -> dict[str, str | None]:
    """The kernel of each linear phase."""
    assert plan.linear is not None
    return {row.phase: row.kernel for row in plan.linear.rows}


def test_declaring_imports_no_library():
    """Any machine can ask what the plugin offers."""
    libraries = "{'torch', 'triton', 'fla', 'flashinfer'}"
    code = f"import sys, backstamp_linear_attn.plugin; sys.exit(bool({libraries} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_declarations_are_sound_and_survive_their_json():
    """No fault is found, and `backstamp.json` says the same."""
    declared = Declared(offers=OFFERS, aliases=backstamp_aliases())
    assert faults_of(declared, frozenset({"backstamp_linear_attn"})) == []
    assert declared_from_json(declared_to_json(declared), "linear_attn") == declared


@pytest.mark.parametrize("offer", OFFERS, ids=IDS)
def test_the_factory_is_there_and_answers_the_declared_name(offer, monkeypatch):
    """Construction compares the built name with the declared one."""
    behave.fla_core(monkeypatch)
    behave.flashinfer(monkeypatch)
    behave.flashkda(monkeypatch)
    module, name = offer.factory.split(":")
    made = make_linear_step([1], phase="decode", family=offer.family, layer=linear_layer(2, 4, 128, 128))
    dtype = sorted(offer.dtypes)[0]
    built = getattr(import_module(module), name)(request_for(offer, made, dtype, phases=tuple(offer.phases)))
    assert built.kernel == offer.kernel
    assert dict(built.settings) == {}


def test_fla_core_is_one_row_of_triton_and_never_a_kernel_of_its_own():
    """What a library is called is no kernel: the stamp says `triton`, its library says fla-core."""
    assert {offer.kernel for offer in OFFERS} == {"triton", "flashinfer", "flashkda"}
    of_fla = [offer for offer in OFFERS if any(text.startswith("fla-core") for text in offer.requires)]
    assert {(offer.kernel, tuple(offer.phases)) for offer in of_fla} == {("triton", ("prefill",))}


def test_the_key_names_full_attention_in_its_order():
    """And is no kernel: nothing is ever stamped with it."""
    (alias,) = backstamp_aliases()
    assert (alias.key, alias.kernels, alias.slot) == ("hybrid_linear_attn", ("fa3", "triton", "intel_amx"), "attention")
    assert "hybrid_linear_attn" not in {offer.kernel for offer in OFFERS}


FLASHINFER_TOO = {"prefill": "flashinfer", "decode": "triton", "verify": "triton"}
TRITON = dict.fromkeys(("prefill", "decode", "verify"), "triton")
CHOICES = [
    pytest.param("h200", GDN, FLASHINFER_TOO, id="gdn-h200"),
    pytest.param("b200", GDN, FLASHINFER_TOO, id="gdn-b200"),
    pytest.param("a100", GDN, TRITON, id="gdn-a100"),
    pytest.param("rtx5090", GDN, TRITON, id="gdn-rtx5090"),
    pytest.param("mi300x", GDN, TRITON, id="gdn-mi300x"),
    pytest.param("h200", KDA, TRITON, id="kda-h200"),
    pytest.param("b200", KDA, TRITON, id="kda-b200"),
    pytest.param("h200", BOUNDED, TRITON | {"prefill": "flashkda"}, id="bounded-kda-h200"),
    pytest.param("b200", BOUNDED, TRITON, id="bounded-kda-b200"),
    pytest.param("mi300x", BOUNDED, TRITON, id="bounded-kda-mi300x"),
    pytest.param("epyc", GDN, dict.fromkeys(TRITON, "torch_native"), id="gdn-epyc"),
]


@pytest.mark.parametrize(("host", "model", "wanted"), CHOICES)
def test_auto_takes_what_was_measured_best(host, model, wanted):
    """flashinfer prefills where it was compared or is the field's default; triton does the rest."""
    assert linear_kernels(plan_for(host, model)) == wanted


@pytest.mark.parametrize("host", ["h200", "b200", "rtx5090"])
def test_flashinfer_serves_every_phase_where_it_is_asked_to(host):
    """And unset verify follows it."""
    asked = {"linear_attn_backend": "flashinfer"}
    assert linear_kernels(plan_for(host, **asked, speculative_algorithm="EAGLE")) == dict.fromkeys(TRITON, "flashinfer")


REFUSED = [
    pytest.param("h200", KDA, "kda", id="another-family"),
    pytest.param("a100", GDN, "9.0", id="decode-needs-sm90"),
    pytest.param("mi300x", GDN, "cuda", id="device"),
]


@pytest.mark.parametrize(("host", "model", "said"), REFUSED)
def test_an_explicit_flashinfer_is_refused_where_it_has_no_row(host, model, said):
    """Nothing falls back to triton."""
    with pytest.raises(BackstampError, match=said):
        plan_for(host, model, linear_attn_backend="flashinfer")


def test_without_cutlass_dsl_flashinfers_rows_are_refused_for_what_is_missing():
    """The package imports and every call would fail."""
    facts = described_host("h200")
    installed = {"torch": "2.11.0", "triton": "3.6.0", "flashinfer-python": "0.7.4", "fla-core": "0.6.0"}
    host = replace(facts, libraries=tuple(installed.items()))
    assert linear_kernels(plan_for(host))["prefill"] == "triton"
    with pytest.raises(BackstampError, match="nvidia-cutlass-dsl"):
        plan_for(host, linear_attn_prefill_backend="flashinfer")


def test_flashkda_is_refused_where_the_decay_has_no_bound():
    """Its kernels have no form for it, and nothing falls back."""
    with pytest.raises(BackstampError, match="bounded_gates"):
        plan_for("h200", KDA, linear_attn_prefill_backend="flashkda")
    assert linear_kernels(plan_for("h200", BOUNDED, linear_attn_prefill_backend="flashkda"))["prefill"] == "flashkda"


BUILDS = [
    pytest.param("0.0.1.post20260729", "2.11.0", True, id="old-wheel-torch-2.11"),
    pytest.param("0.0.1.post20260901", "2.13.0", True, id="new-wheel-torch-2.13"),
    pytest.param("0.0.1.post20260901", "2.11.0", False, id="new-wheel-torch-2.11"),
    pytest.param("0.0.1.post20260729", "2.13.0", False, id="old-wheel-torch-2.13"),
]


@pytest.mark.parametrize(("wheel", "torch_version", "fits"), BUILDS)
def test_a_wheel_built_for_another_torch_is_refused(wheel, torch_version, fits):
    """It loads, and takes every tensor for one on the CPU: tokenspeed-flashkda 0.0.1.post20260901 beside torch 2.11."""
    installed = (("torch", torch_version), ("triton", "3.6.0"), ("tokenspeed-flashkda", wheel))
    host = replace(described_host("h200"), libraries=installed)
    asked = {"linear_attn_prefill_backend": "flashkda"}
    if fits:
        assert linear_kernels(plan_for(host, BOUNDED, **asked))["prefill"] == "flashkda"
        return
    with pytest.raises(BackstampError, match=r"tokenspeed-flashkda|torch"):
        plan_for(host, BOUNDED, **asked)


def test_without_fla_core_triton_still_decodes():
    """Its decode is our own kernel; prefill names what is missing."""
    host = replace(described_host("h200"), libraries=(("torch", "2.11.0"), ("triton", "3.6.0")))
    plan = plan_for(host, linear_attn_prefill_backend="torch_native")
    assert linear_kernels(plan)["decode"] == "triton"
    with pytest.raises(BackstampError, match="fla-core"):
        plan_for(host, linear_attn_prefill_backend="triton")
