"""Case 96, TransformerEngine #2285, #2354, #1821, verl #3381, xformers #1263: the first error holds every reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from backstamp.declarations import Offer
from backstamp.engine import EngineFacts
from backstamp.errors import NoKernel
from backstamp.launch import Requests
from backstamp.model import ModelFacts, default_model, group_layers
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, model_of, plan_on
from tests.resolving import kernel

B200 = {"archs": ("10.0",)}
#: Ragged (packed) rows of unlike head dims, as a trainer hands them over.
ENGINE = EngineFacts(
    name="a trainer", kv_forms=frozenset({"ragged"}), layouts=frozenset({"packed"}), prefix_cache=False
)
SERVES = {
    "head_dims": ((192, 128),),
    "layouts": ("packed",),
    "kv_forms": frozenset({"ragged", "paged"}),
    "features": frozenset({"window", "backward"}),
}
TRAINING = Requests(training=True)
OFFERS = [
    kernel("fa3", archs=("9.0",), **SERVES),
    kernel("fa2", **B200, **{**SERVES, "head_dims": (64, 128)}),
    kernel("cudnn", **B200, **{**SERVES, "layouts": ("rows",)}),
    kernel("half", **B200, **SERVES, dtypes=frozenset({"fp16"})),
    kernel("latent", **B200, **{**SERVES, "family": "mla"}),
    kernel("amd", device="rocm", archs=("gfx942",), **SERVES),
    kernel("paged", **B200, **{**SERVES, "kv_forms": frozenset({"paged"})}),
    kernel("inference", **B200, **{**SERVES, "features": frozenset({"window"})}),
]
#: kernel → fact, wanted, actual.
REASONS = {
    "fa3": ("arch", "SM90 (9.0)", "SM100 (10.0)"),
    "fa2": ("head_dim", "head dim 64, 128", "192/128"),
    "cudnn": ("layout", "KV layout rows", "packed"),
    "half": ("dtype", "fp16", "bf16"),
    "latent": ("family", "an MLA model", "mha"),
    "amd": ("device", "rocm", "cuda (10.0)"),
    "paged": ("kv_form", "paged KV", "ragged KV"),
    "inference": ("feature", "a kernel that declares backward", "window"),
}


def unequal() -> ModelFacts:
    """dqk 192, dv 128."""
    model = default_model()
    layers = tuple((replace(facts, head_dim=192, v_head_dim=128),) for (facts,) in model.layers)
    return replace(model, layers=layers, groups=group_layers(layers))


def refused(offers: Sequence[Offer] = tuple(OFFERS)) -> NoKernel:
    """The first error of a launch nothing serves."""
    with pytest.raises(NoKernel) as caught:
        plan_on("b200", fake_plugin("p", offers), requests=TRAINING, model=unequal(), engine=ENGINE)
    return caught.value


def test_the_first_error_has_a_line_for_every_candidate() -> None:
    """TransformerEngine #2285: fact, wanted and actual of each, without a second run."""
    error = refused()
    lines = error.considered.split("; ")
    assert sorted(lines) == sorted(f"{name}: needs {wanted}, got {have}" for name, (_, wanted, have) in REASONS.items())
    for word in ("192/128", "bf16", "b200", "SM100 (10.0)"):
        assert word in error.message


def test_a_candidate_that_fails_on_several_facts_says_all_of_them() -> None:
    """TransformerEngine #2354: what is mended first must not only bring up the next reason."""
    many = kernel("many", archs=("9.0",), **{**SERVES, "head_dims": (64,)}, dtypes=frozenset({"fp16"}))
    for fact in ("SM90 (9.0), got SM100 (10.0)", "fp16, got bf16", "head dim 64, got 192/128"):
        assert f"needs {fact}" in refused([many]).considered


def test_there_is_a_form_for_machines() -> None:
    """verl #3381: the same reasons as JSON, each with its code and both sides."""
    error = json.loads(json.dumps(refused().as_json()))["error"]
    assert error["code"] == "no_kernel"
    told = {item["kernel"]: (item["code"], item["wanted"], item["have"]) for item in error["verdicts"]}
    assert told == REASONS
    assert not any(item["accepted"] for item in error["verdicts"])


@pytest.mark.parametrize("alone", sorted(REASONS))
def test_each_candidate_says_the_same_alone(alone: str) -> None:
    """xformers #1263: a reason does not depend on who else is installed."""
    (offer,) = [offer for offer in OFFERS if offer.kernel == alone]
    (verdict,) = refused([offer]).verdicts
    assert (verdict.code, verdict.wanted, verdict.have) == REASONS[alone]


def test_the_linear_slot_tells_every_reason_too() -> None:
    """The relative: no linear kernel of a hybrid model."""
    offers = [
        kernel("fla", archs=("9.0",), **GDN),
        kernel("half", **B200, **GDN, dtypes=frozenset({"fp16"})),
        kernel("full", **B200, head_dims=(256,)),
    ]
    with pytest.raises(NoKernel) as caught:
        plan_on("b200", fake_plugin("p", offers), model=model_of("hybrid"))
    assert caught.value.considered == "fla: needs SM90 (9.0), got SM100 (10.0); half: needs fp16, got bf16"


def test_with_one_candidate_that_serves_there_is_no_error() -> None:
    """The near miss: one kernel for this launch, and the reasons of the others are in its plan."""
    good = kernel("good", **B200, **SERVES, phases=frozenset({"prefill"}))
    decodes = kernel("decodes", **B200, **SERVES, phases=frozenset({"decode"}))
    engine = replace(ENGINE, kv_forms=frozenset({"ragged", "paged"}))
    others = [offer for offer in OFFERS if offer.kernel != "paged"]
    plan = plan_on(
        "b200", fake_plugin("p", [good, decodes, *others]), requests=TRAINING, model=unequal(), engine=engine
    )
    assert plan.phase("prefill").kernel == "good"
    refusals = {item.kernel: item.code for item in plan.phase("prefill").verdicts if not item.accepted}
    assert refusals == {**{name: code for name, (code, _, _) in REASONS.items() if name != "paged"}, "decodes": "phase"}
