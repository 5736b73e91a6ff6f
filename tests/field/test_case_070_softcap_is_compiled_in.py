"""Case 70, sglang #33915 and vllm-metal #665: softcap is a build-time property, handed over and reported back."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from backstamp.attention import LayerSpec
from backstamp.catalogue import Catalogue, Row
from backstamp.construction import Factory
from backstamp.errors import BuiltMismatch, NoKernel, Refused
from backstamp.factories import Built
from backstamp.launch import Requests
from backstamp.testing.fakes import RecordingBackend, fake_plugin
from tests.building import SPEC, built_from, model_of, plan_on
from tests.resolving import kernel, kernels

CAPPED, PLAIN = model_of("softcap"), model_of("mha")
WIDE = {"head_dims": (128, 256)}
FEATURES = frozenset({"window", "softcap"})
BUILDS_IN = kernel("builds_in", features=FEATURES, build_settings=frozenset({"softcap"}), priority=90, **WIDE)
NONE = kernel("uncapped", features=frozenset({"window"}), priority=99, **WIDE)
PLUGIN = fake_plugin("p", [BUILDS_IN, NONE])


def layers(softcap: float, head_dim: int = 256, count: int = 26) -> list[LayerSpec]:
    """The runner's layers."""
    return [
        LayerSpec(
            layer_id=at,
            num_qo_heads=8,
            num_kv_heads=4,
            head_dim=head_dim,
            v_head_dim=head_dim,
            scale=1.0,
            softcap=softcap,
        )
        for at in range(count)
    ]


def reporting(settings: Mapping[str, float]) -> object:
    """A loader whose factory reports these build-time settings back."""

    def load(row: Row, catalogue: Catalogue) -> Factory:
        return lambda request: Built(row.offer.kernel, RecordingBackend(request), settings)

    return load


@pytest.mark.parametrize(
    ("role", "phase"),
    [("target", "prefill"), ("target", "decode"), ("target", "verify"), ("draft", "draft_extend")],
)
def test_the_build_receives_the_cap_and_answers_it_back(role: str, phase: str) -> None:
    """sglang #33915: a model with 50 is built with 50, in every phase of both roles."""
    plan = plan_on("h100", PLUGIN, requests=SPEC, model=CAPPED, role=role)
    assert {row.kernel for row in plan.running} == {"builds_in"}
    backends = built_from(plan, PLUGIN, layers=layers(50.0))
    assert backends.serving_attention_backend(phase).request.settings == {"softcap": 50.0}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        pytest.param({}, "softcap not reported", id="missing"),
        pytest.param({"softcap": 0.0}, "softcap 0.0", id="zero"),
        pytest.param({"softcap": 30.0}, "softcap 30.0", id="another"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_report_that_is_missing_or_wrong_is_an_error(settings: dict[str, float], word: str, role: str) -> None:
    """vllm-metal #665: a hard-coded zero is found when it is built, not when the text is read."""
    plan = plan_on("h100", PLUGIN, requests=SPEC, model=CAPPED, role=role)
    with pytest.raises(BuiltMismatch) as caught:
        built_from(plan, PLUGIN, layers=layers(50.0), load=reporting(settings))
    assert caught.value.needed == "softcap 50.0 compiled in"
    assert caught.value.found == word
    assert "'builds_in'" in caught.value.who


def test_a_kernel_without_softcap_is_refused() -> None:
    """sglang #33915: uncapped is not an answer; asked for it is an error, alone it is no kernel."""
    with pytest.raises(Refused) as caught:
        plan_on("h100", PLUGIN, requests=Requests(attention_backend="uncapped"), model=CAPPED)
    assert "softcap" in caught.value.needed
    with pytest.raises(NoKernel, match="softcap"):
        plan_on("h100", fake_plugin("p", [NONE]), model=CAPPED)


def test_a_model_without_a_cap_takes_any() -> None:
    """Softcap 0: the kernel without it is as good, and the one with it is built without a setting."""
    assert kernels(plan_on("h100", PLUGIN, model=PLAIN))["decode"] == "uncapped"
    plan = plan_on("h100", PLUGIN, requests=Requests(attention_backend="builds_in"), model=PLAIN)
    backends = built_from(plan, PLUGIN, layers=layers(0.0, 128, 32))
    assert backends.serving_attention_backend("decode").request.settings == {}


def test_layers_with_unlike_caps_are_not_built_as_one() -> None:
    """The relative: one compiled value cannot follow two layers."""
    unlike = [*layers(50.0)[:25], layers(30.0)[25]]
    plan = plan_on("h100", PLUGIN, model=CAPPED)
    with pytest.raises(BuiltMismatch, match=r"needs softcap 50\.0, as the model says"):
        built_from(plan, PLUGIN, layers=unlike)


def test_a_kernel_that_takes_the_cap_with_each_call_is_built_without_it() -> None:
    """The near miss: only what is declared as build-time must be reported back."""
    plugin = fake_plugin("p", [kernel("by_call", features=FEATURES, **WIDE)])
    plan = plan_on("h100", plugin, model=CAPPED)
    backends = built_from(plan, plugin, layers=layers(50.0), load=reporting({}))
    assert backends.attention_backends() == ("by_call", "by_call")
