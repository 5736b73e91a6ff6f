"""What is declared: every row's factory, library and record; which host it fits, and what it says where it does not."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.launch import Requests, make_launch
from backstamp.model import model_from_config
from backstamp.resolution import resolve
from backstamp.testing.hosts import described_host
from backstamp_fa3 import plugin
from tests.libraries.record import FROM_CALLER
from tests.models import config
from tests.plugins.fa3.kernels import ROWS, library_of, recorded

LIBRARIES = {
    "flash-attn-3": {"flash-attn-3": "3.0.0"},
    "tokenspeed-fa3": {"tokenspeed-fa3": "3.0.0.post20260810"},
    "sglang-kernel": {"sglang-kernel": "0.4.10", "torch": "2.14.1"},
    "sgl-kernel": {"sgl-kernel": "0.3.21", "torch": "2.9.1", "nvidia-cuda-runtime-cu12": "12.8.90"},
}


def plan_of(libraries, model="mha", host="h100", engine=EngineFacts(), cuda="13.0", **asked):
    launch = make_launch(Requests(**asked))
    there = described_host(host, libraries={"torch": "2.11.0", **libraries})
    there = replace(there, runtimes=(("cuda", cuda),))
    return resolve(launch, engine, model_from_config(config(model)), there, build_catalogue(discover()))


def groups_of(plan):
    return [group for phase in plan.running for group in phase.groups]


def test_every_row_is_offered_and_its_factory_exists():
    """The rows of the tests are the rows of the plugin."""
    offers = plugin.backstamp_offers()
    assert set(map(id, offers)) == set(map(id, ROWS.values()))
    for offer in offers:
        module, _, name = offer.factory.partition(":")
        assert inspect.signature(getattr(importlib.import_module(module), name)).parameters.keys() == {"request"}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_names_its_library(row):
    """The stamp shows the first requirement; the record of its signatures bears the same name."""
    first = ROWS[row].requires[0]
    assert first.partition(">=")[0] == library_of(row)
    assert recorded(library_of(row))["distribution"].replace("_", "-") == library_of(row)


def test_what_only_a_caller_shows_says_so():
    """MUSA's functions: file and line of SGLang 0.5.23."""
    for entry in recorded("mate")["functions"].values():
        assert entry["source"] == FROM_CALLER
        assert "sglang 0.5.23" in entry["file"]
        assert entry["line"] > 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_build_alone_serves_every_phase(library):
    """Whichever is installed."""
    plan = plan_of(LIBRARIES[library], attention_backend="fa3")
    assert {group.library.distribution for group in groups_of(plan)} == {library}
    assert {group.kernel for group in groups_of(plan)} == {"fa3"}


@pytest.mark.parametrize("library", ["flash-attn-3", "sglang-kernel", "sgl-kernel"])
def test_builds_with_the_latent_image_serve_mla(library):
    """tokenspeed-fa3 was built without it."""
    plan = plan_of(LIBRARIES[library], model="mla", attention_backend="fa3")
    assert {group.library.distribution for group in groups_of(plan)} == {library}
    with pytest.raises(BackstampError, match="is not installed"):
        plan_of(LIBRARIES["tokenspeed-fa3"], model="mla", attention_backend="fa3")


FA3_FWD = {"fa3-fwd": "0.0.3"}


def test_fa3_fwd_serves_a_prefill_without_a_prefix():
    """Beside another kernel's decode."""
    plan = plan_of(FA3_FWD, engine=EngineFacts(prefix_cache=False), prefill_attention_backend="fa3")
    (group,) = plan.phase("prefill").groups
    assert (group.kernel, group.library.distribution) == ("fa3", "fa3-fwd")


@pytest.mark.parametrize("request_field", ["decode_attention_backend", "attention_backend"])
def test_fa3_fwd_is_refused_for_decode_because_it_reads_no_pages(request_field):
    """It is there, and is FA3: what to install is another build, and why."""
    with pytest.raises(BackstampError) as cause:
        plan_of(FA3_FWD, engine=EngineFacts(prefix_cache=False), **{request_field: "fa3"})
    assert cause.value.message.startswith("decode attention backend 'fa3'")
    assert "fa3 over fa3-fwd 0.0.3, which is installed" in cause.value.message
    assert "needs a kernel that reads paged KV, got ragged KV only" in cause.value.message
    assert "Install tokenspeed-fa3" in cause.value.message


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("host", ["b200", "a100", "rtx5090"])
def test_an_installed_build_whose_image_does_not_fit_is_refused(library, host):
    """The images are sm_90a: the chip is named when the plan is made, not when a kernel is launched."""
    arch = {"b200": "10.0", "a100": "8.0", "rtx5090": "12.0"}[host]
    with pytest.raises(BackstampError) as cause:
        plan_of(LIBRARIES[library], host=host, attention_backend="fa3")
    assert f"got SM{arch.replace('.', '')} ({arch})" in cause.value.message


@pytest.mark.parametrize("library", ["tokenspeed-fa3", "sglang-kernel"])
def test_a_torch_of_another_cuda_is_refused(library):
    """Their images link libcudart.so.13."""
    with pytest.raises(BackstampError) as cause:
        plan_of(LIBRARIES[library], cuda="12.8", attention_backend="fa3")
    assert f"fa3 over {library}" in cause.value.message
    assert "needs cuda>=13.0,<14, got 12.8" in cause.value.message


def test_the_old_name_of_sglangs_build_needs_the_old_runtime():
    """Its image links libcudart.so.12, whatever the driver."""
    with pytest.raises(BackstampError, match="nvidia-cuda-runtime-cu12 is not installed"):
        plan_of({"sgl-kernel": "0.3.21", "torch": "2.9.1"}, attention_backend="fa3")


def test_fa4_needs_the_compiler_too():
    """It imports it at once: missing, it is refused when the plan is made."""
    fa4 = {"tokenspeed-fa4": "4.0.0.post20260923"}
    with pytest.raises(BackstampError, match="nvidia-cutlass-dsl"):
        plan_of(fa4, host="b200", attention_backend="fa4")
    plan = plan_of({**fa4, "nvidia-cutlass-dsl": "4.8.0"}, host="b200", attention_backend="fa4")
    assert {group.kernel for group in groups_of(plan)} == {"fa4"}
    beta = {"flash-attn-4": "4.0.0b36", "nvidia-cutlass-dsl": "4.8.0"}
    assert {group.kernel for group in groups_of(plan_of(beta, attention_backend="fa4"))} == {"fa4"}
