"""Case 70, SGLang #33915: the cap comes from the model, whatever the runner says of its layers."""

from __future__ import annotations

import pytest

from backstamp.errors import BackstampError, BuiltMismatch
from backstamp.testing.fakes import fake_plugin
from tests.building import built_from, model_of, plan_on
from tests.field.test_case_070_softcap_is_compiled_in import CAPPED, PLUGIN, layers
from tests.resolving import kernel


def test_a_softcap_model_is_not_built_uncapped_where_the_runner_names_no_layers() -> None:
    """A softcap model is not built uncapped where the runner names no layers."""
    plugin = fake_plugin(
        "p",
        [
            kernel(
                "k", features=frozenset({"window", "softcap"}), head_dims=(256,), build_settings=frozenset({"softcap"})
            )
        ],
    )
    plan = plan_on("h100", plugin, model=model_of("softcap"))
    try:
        backends = built_from(plan, plugin)
    except BackstampError:
        return
    assert backends.serving_attention_backend("decode").request.settings == {"softcap": 50.0}


def test_layers_that_disagree_with_the_model_are_refused() -> None:
    """Layers that disagree with the model are refused."""
    plan = plan_on("h100", PLUGIN, model=CAPPED)
    with pytest.raises(BuiltMismatch):
        built_from(plan, PLUGIN, layers=layers(0.0))
