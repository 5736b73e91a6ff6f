"""Case 80, transformers #45811, #46132, #44679: how a mask reaches a kernel is declared, or nothing runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import Offer
from backstamp.engine import EngineFacts
from backstamp.errors import NoKernel, PluginFailed, Refused
from backstamp.launch import Requests
from backstamp.model import ModelFacts, default_model, group_layers
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.building import GDN, MLA, SPEC, model_of, plan_on
from tests.resolving import kernel, kernels

FORMATS = ("none", "2d", "4d_bool", "internal_causal")
TWO_D = EngineFacts(name="two_d", mask_formats=frozenset({"2d"}))


def non_causal() -> ModelFacts:
    """An encoder: every token sees every key."""
    model = default_model()
    layers = tuple((replace(facts, causal=False),) for (facts,) in model.layers)
    return replace(model, layers=layers, groups=group_layers(layers))


@pytest.mark.parametrize(
    "offer",
    [
        pytest.param(kernel("k", mask_format=None), id="attention"),
        pytest.param(kernel("k", mask_format=None, **GDN), id="linear"),
        pytest.param(kernel("k", mask_format=None, phases=frozenset({"decode"})), id="decode-alone"),
        pytest.param(kernel("k", mask_format="causal"), id="a-word-nobody-knows"),
        pytest.param(kernel("k", mask_format="4d"), id="half-a-word"),
    ],
)
def test_a_plugin_without_a_mask_format_is_a_registration_error(offer: Offer) -> None:
    """transformers #45811: the second registration is not optional; the key answers with that cause."""
    plugin = fake_plugin("p", [offer])
    (failure,) = catalogue_of(plugin).failures
    assert "mask_format" in failure.cause
    field = "linear_attn_backend" if offer.slot == "linear" else "attention_backend"
    other = fake_plugin("other", [kernel("other", head_dims=(128, 256))])
    with pytest.raises(PluginFailed, match="mask_format"):
        plan_on("h100", plugin, other, requests=Requests(**{field: "k"}), model=model_of("hybrid"))


@pytest.mark.parametrize(
    ("flag", "role"),
    [
        ("attention_backend", "target"),
        ("prefill_attention_backend", "target"),
        ("decode_attention_backend", "target"),
        ("verify_attention_backend", "target"),
        ("draft_attention_backend", "draft"),
    ],
)
def test_a_causal_model_never_runs_without_a_mask(flag: str, role: str) -> None:
    """transformers #46132: format none under a causal model is an error in every phase; auto passes it over."""
    plugin = fake_plugin("p", [kernel("blind", mask_format="none", priority=99), kernel("good")])
    asked = Requests(speculative_algorithm="EAGLE", **{flag: "blind"})
    with pytest.raises(Refused) as caught:
        plan_on("h100", plugin, requests=asked, role=role)
    assert "causal" in caught.value.message
    assert {row.kernel for row in plan_on("h100", plugin, requests=SPEC, role=role).running} == {"good"}
    with pytest.raises(NoKernel, match="causal"):
        plan_on("h100", fake_plugin("p", [kernel("blind", mask_format="none")]), role=role)


def test_a_non_causal_model_may_run_without_a_mask() -> None:
    """The near miss: an encoder needs none, and a kernel that says non_causal serves it."""
    encoder = kernel("encoder", mask_format="none", features=frozenset({"non_causal", "window"}))
    assert kernels(plan_on("h100", fake_plugin("p", [encoder]), model=non_causal()))["prefill"] == "encoder"


@pytest.mark.parametrize("wants", FORMATS)
@pytest.mark.parametrize("offers", [(), ("2d",), ("4d_bool",), ("2d", "4d_bool")])
def test_an_engine_hands_over_the_format_a_kernel_wants_or_it_is_an_error(wants: str, offers: tuple[str, ...]) -> None:
    """transformers #44679: 2d alone never serves 4d_bool, nor the other way; internal_causal needs none."""
    engine = EngineFacts(mask_formats=frozenset(offers))
    plugin = fake_plugin("p", [kernel("k", mask_format=wants)])
    asked = Requests(attention_backend="k")
    if wants == "internal_causal" or wants in offers:
        assert kernels(plan_on("h100", plugin, requests=asked, engine=engine))["decode"] == "k"
        return
    with pytest.raises(Refused) as caught:
        plan_on("h100", plugin, requests=asked, engine=engine)
    assert caught.value.verdicts[0].code == "mask"
    if wants != "none":
        assert f"needs a {wants} mask" in caught.value.message


def test_the_error_names_what_the_engine_supplies() -> None:
    """Engine with 2d alone, kernel wanting 4d_bool, in MLA as in MHA."""
    for family, model in (({}, default_model()), (MLA, model_of("mla"))):
        plugin = fake_plugin("p", [kernel("k", mask_format="4d_bool", **family)])
        with pytest.raises(Refused, match="needs a 4d_bool mask, got an engine that supplies 2d"):
            plan_on("h100", plugin, requests=Requests(decode_attention_backend="k"), engine=TWO_D, model=model)
