"""Case 31, SGLang #34264: a deprecated key is told in every slot."""

from __future__ import annotations

from backstamp.declarations import Alias
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, model_of, plan_on
from tests.resolving import kernel


def test_a_deprecated_key_of_the_linear_slot_warns() -> None:
    """A deprecated key of the linear slot warns."""
    plugin = fake_plugin(
        "p",
        [kernel("triton", **GDN), kernel("full", head_dims=(256,))],
        [Alias(key="old", kernels=("triton",), deprecated="triton", slot="linear")],
    )
    plan = plan_on("h100", plugin, requests=Requests(linear_attn_backend="old"), model=model_of("hybrid"))
    assert "deprecated" in {item.code for item in plan.warnings}
