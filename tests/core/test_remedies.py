"""What a refusal tells an operator to do: it must be possible, and it must help."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.declarations import Alias
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError, NoKernel, Refused, UnknownKey
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model, load_model
from backstamp.plan import Plan
from backstamp.refusals import _SERVES
from backstamp.resolution import resolve
from backstamp.testing.fakes import fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel, plan_of
from tests.scenes import GDN, SPARSE, SPARSE_MLA, model_with, plan_with

ROOT = Path(__file__).parent.parent.parent
MODELS = ROOT / "tests" / "data" / "models"
FP8 = "fp8_e4m3"


@cache
def installed() -> Catalogue:
    """Every first-party plugin."""
    return build_catalogue(discover())


def planned(host: str, model: str = "", role: str = "target", engine: EngineFacts | None = None, **asked: str) -> Plan:
    """A plan over the first-party plugins."""
    facts = load_model(str(MODELS / f"{model}.json")) if model else default_model()
    launch, engine = make_launch(Requests(**asked), role=role), engine or EngineFacts()  # type: ignore[arg-type]
    return resolve(launch, engine, facts, described_host(host), installed(), role=role)  # type: ignore[arg-type]


def refusal(host: str, model: str = "", role: str = "target", **asked: str) -> BackstampError:
    """What such a plan is refused with."""
    with pytest.raises(BackstampError) as caught:
        planned(host, model, role, **asked)
    return caught.value


def test_an_unknown_draft_key_names_the_draft_that_asked() -> None:
    """A draft prefills too, and its prefill is not the target's."""
    with pytest.raises(UnknownKey) as caught:
        plan_of([kernel("flash")], Requests(draft_attention_backend="flahs"), role="draft")
    assert caught.value.who == "draft prefill attention backend 'flahs', asked for with --draft-attention-backend"


def test_a_draft_is_told_of_no_split_flag() -> None:
    """It has one flag for all its phases."""
    half = kernel("half", phases=frozenset({"decode", "draft_decode", "draft_extend"}))
    with pytest.raises(Refused) as caught:
        plan_of([half, kernel("whole")], Requests(draft_attention_backend="half"), role="draft")
    assert "split" not in caught.value.fix
    assert "one flag for all its phases, --draft-attention-backend: name a key that serves each" in caught.value.fix
    assert caught.value.fix.endswith("here: whole")


@pytest.mark.parametrize(
    ("model", "family", "slot"), [("dsa", "sparse_mla", "attention"), ("lfm2", "short_conv", "linear")]
)
def test_nobody_is_told_to_install_what_is_installed(model: str, family: str, slot: str) -> None:
    """backstamp-dsa has no kernel for a CPU, backstamp-linear-attn none for short convolutions."""
    error = refusal("epyc", model)
    assert isinstance(error, NoKernel)
    assert "nstall a plugin" not in error.fix
    assert error.fix.endswith(f"The installed plugins have no {slot} kernel for {family} on cpu")


@pytest.mark.parametrize(("host", "home"), [("h100", "backstamp-dsa"), ("epyc", None)])
def test_what_is_not_installed_is_named_where_it_would_serve(host: str, home: str | None) -> None:
    """A distribution without a kernel for this device is no remedy here."""
    with pytest.raises(NoKernel) as caught:
        plan_with([kernel("dense")], host=host, model=model_with((4, SPARSE)))
    assert ("is the first-party one" in caught.value.fix) == (home is not None)
    assert home is None or f"Install a plugin that serves it; {home} " in caught.value.fix


def test_the_distributions_to_install_have_such_kernels() -> None:
    """The remedies are held to what the plugins of this repository declare."""
    declared = set()
    for path in ROOT.glob("plugins/*/src/*/backstamp.json"):
        home = f"backstamp-{path.parent.parent.parent.name.replace('_', '-')}"
        offers = json.loads(path.read_text("utf-8"))["offers"]
        declared |= {(of["family"], home, of["device"]) for of in offers}
    remedies = {(family, home, at) for family, homes in _SERVES.items() for home, devices in homes for at in devices}
    assert remedies <= declared
    assert set(_SERVES) == {family for family, _, _ in declared}


@pytest.mark.parametrize("key", [None, "dsa"])
def test_a_layout_the_engine_facts_lack_is_told_with_where_they_are_given(key: str | None) -> None:
    """The fp8 cache of sparse layers has a layout of its own, which an engine must say that it has."""
    asked = {"kv_cache_dtype": FP8, **({"attention_backend": key} if key else {})}
    error = refusal("h100", "dsa", **asked)
    assert "dsa serves it from KV layout fp8_ds_mla, which the engine facts do not list" in error.fix
    assert "--engine FILE" in error.fix
    assert "nstall a plugin" not in error.fix
    able = replace(EngineFacts(), layouts=frozenset({"rows", "fp8_ds_mla"}))
    assert planned("h100", "dsa", engine=able, **asked).phase("decode").kernel == "dsa"


def test_a_layout_is_no_remedy_where_more_is_missing() -> None:
    """A row that lacks something else too would not serve from it."""
    rows = [
        kernel("sparse", **SPARSE_MLA),
        kernel("sparse", **{**SPARSE_MLA, "kv_dtypes": frozenset({"e4m3fn"}), "layouts": ("odd",), "archs": ("10.0",)}),
    ]
    with pytest.raises(NoKernel) as caught:
        plan_with(rows, Requests(kv_cache_dtype=FP8), model=model_with((4, SPARSE)))
    assert "layout" not in caught.value.fix


def test_a_key_of_the_other_slot_is_told_by_its_flag() -> None:
    """Not as a near match of itself, in a distribution that is installed."""
    error = refusal("h100", "hybrid", linear_attn_backend="hybrid_linear_attn")
    assert error.found == "the unknown key 'hybrid_linear_attn', which exists in the attention slot"
    assert error.fix.startswith("It is a key of the attention slot, which --attention-backend sets. Keys that resolve")
    plugin = fake_plugin(
        "p", [kernel("dense"), kernel("gate", **GDN)], [Alias(key="gates", kernels=("gate",), slot="linear")]
    )
    with pytest.raises(UnknownKey) as caught:
        plan_with([plugin], Requests(attention_backend="gates"))
    assert "which --linear-attn-backend sets" in caught.value.fix


def test_a_near_match_is_never_of_the_other_slot() -> None:
    """A typo of an attention key, asked of the linear slot."""
    assert "hybrid_linear_attn" not in refusal("h100", "hybrid", linear_attn_backend="hybrid_linear_atn").fix


def test_every_kind_of_device_a_kernel_has_rows_for_is_named() -> None:
    """An error says of a kernel what the table of a plan says."""
    assert "dsa: needs cuda or rocm, got cpu" in refusal("epyc", "dsa").considered
