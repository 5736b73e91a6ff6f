"""Case 81, sglang #35743, #34389 and #36907: a global request is a preference for every component but the main one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import FamilyDefault
from backstamp.errors import NoKernel, Refused, StrictViolation
from backstamp.launch import Requests
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import DENSE, groups_of, model_with, plan_with, texts_of

ENCODER = frozenset({"encoder"})
SAGE, SDPA, FA = (
    kernel(name, features=ENCODER, priority=priority) for name, priority in (("sage", 50), ("sdpa", 10), ("fa", 90))
)
DIT = replace(DENSE, attn_type="encoder", causal=False, component="dit", num_kv_heads=32)
VAE, TEXT = replace(DIT, component="vae", num_qo_heads=8), replace(DIT, component="text_encoder", num_qo_heads=16)
MODEL = model_with((4, DIT), (1, VAE), (2, TEXT), name="video")
RULES = fake_plugin(
    "sglang",
    family_defaults=[
        FamilyDefault(model_type="video", component="dit", allowed=frozenset({"sage", "sdpa"})),
        FamilyDefault(model_type="video", component="vae", kernels=("sdpa",), allowed=frozenset({"fa", "sdpa"})),
        FamilyDefault(model_type="video", component="text_encoder", allowed=frozenset({"sdpa"})),
    ],
    distribution="backstamp-sglang",
)
ALL = (SAGE, SDPA, FA, RULES)
GLOBAL = Requests(attention_backend="sage")


def test_each_component_takes_the_wish_or_what_it_declares() -> None:
    """sglang #35743: DiT sage, VAE its default sdpa though fa ranks higher, text encoder sdpa because nothing else."""
    plan = plan_with(ALL, GLOBAL, model=MODEL)
    assert {name: (group.kernel, group.source) for name, group in groups_of(plan).items()} == {
        "dit": ("sage", "operator"),
        "vae": ("sdpa", "family"),
        "text_encoder": ("sdpa", "auto"),
    }


@pytest.mark.parametrize("component", ["vae", "text_encoder"])
def test_the_reason_is_in_the_plan(component: str) -> None:
    """sglang #34389: what was asked, what runs, and the set the component allows."""
    (text,) = [text for text in texts_of(plan_with(ALL, GLOBAL, model=MODEL), "changed") if component in text]
    assert "'sage' cannot serve it, sdpa does" in text
    assert f"family video ({component}) allows" in text


def test_strict_mode_is_the_policy_that_refuses_instead() -> None:
    """sglang #36907: strict names both components that could not follow."""
    with pytest.raises(StrictViolation, match=r"(?s)vae.*text_encoder"):
        plan_with(ALL, GLOBAL, model=MODEL, policy=Policy(strict=True))


def test_a_component_nothing_serves_is_an_error() -> None:
    """A preference is left only for something else that serves."""
    with pytest.raises(NoKernel, match="component text_encoder"):
        plan_with((SAGE, FA, RULES), GLOBAL, model=model_with((4, DIT), (2, TEXT), name="video"))


@pytest.mark.parametrize("component", ["vae", "text_encoder"])
@pytest.mark.parametrize("source", ["operator", "embedder"])
def test_a_request_scoped_to_the_component_binds(component: str, source: str) -> None:
    """sglang #36907: VAE=sage is an error with the allowed set, whoever asks."""
    scoped = Requests(component_backends={component: "sage"})
    asked = {"requests": scoped} if source == "operator" else {"embedder": scoped}
    with pytest.raises(Refused, match=rf"component {component} 'sage'.*allows \(.*sdpa\), got sage"):
        plan_with(ALL, model=MODEL, **asked)


def test_a_scoped_request_that_fits_is_served_beside_a_global_one() -> None:
    """The narrower word wins in its own scope, without a warning."""
    asked = replace(GLOBAL, component_backends={"vae": "fa", "text_encoder": "sdpa"})
    plan = plan_with(ALL, asked, model=MODEL)
    assert {name: group.kernel for name, group in groups_of(plan).items()} == {
        "dit": "sage",
        "vae": "fa",
        "text_encoder": "sdpa",
    }
    assert texts_of(plan, "changed") == []


def test_an_embedders_scoped_word_yields_to_the_operators_global_one_where_that_serves() -> None:
    """Who asked outranks how narrowly; where the operator's wish cannot serve, the embedder's word comes next."""
    embedder = Requests(component_backends={"dit": "sdpa", "vae": "fa"})
    plan = plan_with(ALL, GLOBAL, embedder=embedder, model=MODEL)
    assert {name: (group.kernel, group.source) for name, group in groups_of(plan).items()} == {
        "dit": ("sage", "operator"),
        "vae": ("fa", "embedder"),
        "text_encoder": ("sdpa", "auto"),
    }
    # without the family's sets the wish serves the VAE, and the embedder's word is not needed
    unruled = plan_with((SAGE, SDPA, FA), GLOBAL, embedder=embedder, model=MODEL)
    assert groups_of(unruled)["vae"].kernel == "sage"


def test_a_default_without_a_global_request_is_taken_silently() -> None:
    """Nothing was asked, so nothing was changed."""
    plan = plan_with(ALL, model=MODEL)
    assert groups_of(plan)["vae"].kernel == "sdpa"
    assert texts_of(plan, "changed") == []


def test_a_reference_kernel_in_a_side_component_is_told_too() -> None:
    """What auto takes for want of better is slow, whichever component runs it."""
    slow = replace(SDPA, reference=True)
    plan = plan_with((SAGE, slow, FA, RULES), GLOBAL, model=MODEL)
    assert any("sdpa" in text for text in texts_of(plan, "slow_path"))
