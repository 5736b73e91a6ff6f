"""The declarations: sound, importable without torch, and true of what the factories build."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from backstamp.declarations import ANY, PHASES
from backstamp.declared import Declared, declared_from_json, declared_to_json
from backstamp.soundness import faults_of
from backstamp_cpu.plugin import backstamp_aliases, backstamp_offers

OFFERS = backstamp_offers()
IDS = [f"{o.kernel}-{o.family}-{o.device}{'-alone' if o.deterministic else ''}" for o in OFFERS]
rows = pytest.mark.parametrize("offer", OFFERS, ids=IDS)


def test_declarations_import_neither_torch_nor_the_backend():
    """Any machine can be asked about from any machine, without a kernel library."""
    code = (
        "import sys, backstamp_cpu.plugin as p; p.backstamp_offers(); "
        "print([m for m in sys.modules if m.split('.')[0] == 'torch' or m == 'backstamp_cpu.backend'])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_the_declarations_are_sound_and_survive_their_json():
    """No fault is found, and `backstamp.json` says the same."""
    declared = Declared(offers=OFFERS, aliases=backstamp_aliases())
    assert faults_of(declared, frozenset({"backstamp_cpu"})) == []
    assert declared_from_json(declared_to_json(declared), "cpu") == declared


@rows
def test_every_factory_exists(offer):
    """The path of each row leads to a callable."""
    module, name = offer.factory.split(":")
    assert callable(vars(import_module(module))[name])


@rows
def test_every_row_is_over_torch_and_claims_no_graph(offer):
    """`plan` reads host lengths, so no row may be recorded in a CUDA graph."""
    assert offer.requires == ("torch>=2.11",)
    assert (offer.graph, offer.plan, offer.inputs) == ("never", "host", frozenset())


def test_torch_native_serves_every_phase_of_every_family_everywhere():
    """The embedded default: any device, any head dim, any page size."""
    for offer in OFFERS:
        if offer.kernel == "torch_native" and not offer.deterministic:
            assert offer.all_phases == frozenset(PHASES)
            assert (offer.device, offer.archs, offer.head_dims) == ("any", ANY, ANY)
            assert all(offer.page_sizes.accepts(size) for size in (1, 3, 16, 100))
    families = {(offer.slot, offer.family) for offer in OFFERS if offer.kernel == "torch_native"}
    assert families == {("attention", "mha"), ("attention", "mla"), ("linear", "gdn"), ("linear", "kda")}


def test_flex_attention_serves_targets_only():
    """Every target phase and no draft phase, on every device."""
    for device in ("cpu", "cuda", "rocm"):
        rows = [offer for offer in OFFERS if offer.kernel == "flex_attention" and offer.device == device]
        assert frozenset().union(*(offer.all_phases for offer in rows)) == {"prefill", "decode", "verify"}


@pytest.mark.parametrize(
    ("device", "features", "phase", "best"),
    [
        ("cpu", set(), "prefill", "torch_native"),
        ("cpu", {"amx_tile", "amx_bf16"}, "decode", "intel_amx"),
        ("cuda", set(), "prefill", "flex_attention"),
        ("cuda", set(), "decode", "torch_native"),
    ],
)
def test_auto_prefers_the_faster_kernel_of_a_device(device, features, phase, best):
    """Eager flex_attention on the CPU and its one-query tiles on a GPU are slower than torch_native."""
    fitting = [
        offer
        for offer in OFFERS
        if offer.device in (device, "any") and phase in offer.phases and offer.cpu_features <= features
    ]
    assert max(fitting, key=lambda offer: offer.priority).kernel == best


def test_intel_amx_serves_every_phase_of_both_families_in_bf16_where_amx_is():
    """The host's CPU features decide, and nothing is converted to bf16."""
    rows = [offer for offer in OFFERS if offer.kernel == "intel_amx"]
    assert {offer.family for offer in rows} == {"mha", "mla"}
    for offer in rows:
        assert (offer.device, offer.archs, offer.forward_archs) == ("cpu", ("x86_64",), "no")
        assert offer.cpu_features == {"amx_tile", "amx_bf16"}
        assert (offer.dtypes, offer.kv_dtypes) == ({"bf16"}, {"same"})
        assert offer.all_phases == frozenset(PHASES)


def test_only_rows_that_run_alone_are_declared_deterministic():
    """Grouped rows are padded to each other, so their bits may depend on the batch."""
    for offer in OFFERS:
        assert offer.deterministic == offer.factory.endswith("rows_alone")


def test_determinism_is_claimed_for_prefill_only_where_cuts_were_measured():
    """The CPU for both families, SM90 for MHA; decode and verify, which nobody cuts, everywhere."""
    cut = {
        (row.device, row.archs, row.family): row.alignment_tokens
        for row in OFFERS
        if row.deterministic and "prefill" in row.phases
    }
    assert cut == {("cpu", ANY, "mha"): 512, ("cpu", ANY, "mla"): 512, ("cuda", ("9.0",), "mha"): 512}
    uncut = [row for row in OFFERS if row.deterministic and row.device == "any"]
    assert {row.family: row.phases for row in uncut} == dict.fromkeys(("mha", "mla"), frozenset({"decode", "verify"}))
