"""Case 24, vLLM #41657: a pool shared on equal bytes alone; layouts asked for by key and dtypes of drafts count too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import Alias
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest
from backstamp.launch import Requests
from backstamp.model import DraftFacts, default_model, group_layers
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.building import plan_on
from tests.resolving import kernel

ENGINE_24 = EngineFacts(layouts=frozenset({"l1", "l2"}))


def test_a_shared_cache_has_one_dtype() -> None:
    """A shared cache has one dtype."""

    sharing = replace(default_model(), dtype="fp16", draft=DraftFacts(shares_kv=True))
    plugin = fake_plugin("p", [kernel("a", dtypes=frozenset({"bf16", "fp16"}))])
    requests = Requests(attention_backend="a", speculative_algorithm="EAGLE")
    target = plan_on("h100", plugin, requests=requests)
    with pytest.raises(ConflictingRequest):
        plan_on("h100", plugin, requests=requests, model=sharing, role="draft", target=target)


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(Requests(attention_backend="both"), id="one-key-two-kernels"),
        pytest.param(Requests(prefill_attention_backend="left", decode_attention_backend="right"), id="two-halves"),
    ],
)
def test_layers_asked_for_by_key_share_the_pool_too(requests: Requests) -> None:
    """The relative by request: layer by layer or half by half, two layouts in one pool are an error naming both."""
    facts = default_model().groups[0].facts
    layers = tuple((replace(facts, head_dim=dim, v_head_dim=dim),) for dim in (64, 128))
    model = replace(default_model(), layers=layers, groups=group_layers(layers))
    offers = [
        kernel("left", head_dims=(64,), layouts=("l1",)),
        kernel("right", head_dims=(128,), layouts=("l2",)),
        kernel("left", head_dims=(128,), layouts=("l1",), phases=frozenset({"prefill"})),
        kernel("right", head_dims=(64,), layouts=("l2",), phases=frozenset({"decode"})),
    ]
    plugin = fake_plugin(
        "p", offers[:2] if requests.attention_backend else offers, [Alias(key="both", kernels=("left", "right"))]
    )
    with pytest.raises(ConflictingRequest) as caught:
        plan_on("h100", plugin, model=model, engine=ENGINE_24, requests=requests, policy=Policy(layers="per_layer"))
    for word in ("left reads l1", "right reads l2"):
        assert word in caught.value.found
