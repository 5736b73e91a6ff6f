"""Case 37, vllm #14320: a key that is valid on another host says where it is valid and what is valid here."""

from __future__ import annotations

import pytest

from backstamp.declarations import Alias
from backstamp.errors import Refused, UnknownKey
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, model_of, plan_on
from tests.resolving import kernel

CPU = {"device": "cpu", "archs": ("any",)}
PLUGIN = fake_plugin(
    "p",
    [kernel("torch_sdpa", **CPU), kernel("fa3"), kernel("flashinfer"), kernel("fa4", archs=("10.0",))],
    [Alias(key="eager", kernels=("torch_sdpa",))],
)


@pytest.mark.parametrize(
    ("requests", "role", "phase"),
    [
        pytest.param({"attention_backend": "torch_sdpa"}, "target", "prefill", id="base"),
        pytest.param({"decode_attention_backend": "torch_sdpa"}, "target", "decode", id="decode"),
        pytest.param({"verify_attention_backend": "torch_sdpa"}, "target", "verify", id="verify"),
        pytest.param({"draft_attention_backend": "torch_sdpa"}, "draft", "prefill", id="draft"),
        pytest.param({"attention_backend": "eager"}, "target", "prefill", id="through-an-alias"),
    ],
)
def test_a_key_for_cpu_hosts_says_so_on_sm90(requests: dict[str, str], role: str, phase: str) -> None:
    """vllm #14320: a known key, valid on CPU; this host is SM90; valid here: the list, without what is not."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    with pytest.raises(Refused) as caught:
        plan_on("h100", PLUGIN, requests=asked, role=role)
    error = caught.value
    assert not isinstance(error, UnknownKey)
    assert next(iter(requests.values())) in error.who
    assert "needs cpu" in error.message
    assert "got cuda" in error.message
    assert "SM90 (9.0)" in error.found
    assert f"Keys that resolve for {phase} here: fa3, flashinfer" in error.fix
    assert "fa4" not in error.fix


def test_the_same_key_is_valid_where_it_says() -> None:
    """On a CPU host the key binds, and the CUDA keys are the ones refused."""
    plan = plan_on("epyc", PLUGIN, requests=Requests(attention_backend="torch_sdpa"))
    assert plan.phase("decode").kernel == "torch_sdpa"
    with pytest.raises(Refused, match="needs cuda, got cpu"):
        plan_on("epyc", PLUGIN, requests=Requests(attention_backend="fa3"))


def test_a_linear_key_for_another_host_is_told_alike() -> None:
    """The relative in the linear slot: where it is valid, where this is, what is valid here."""
    linear = fake_plugin("l", [kernel("amx_gdn", **CPU, **GDN), kernel("triton", **GDN)])
    attention = fake_plugin("a", [kernel("fa3", head_dims=(256,))])
    with pytest.raises(Refused) as caught:
        plan_on(
            "h100", linear, attention, requests=Requests(linear_attn_decode_backend="amx_gdn"), model=model_of("hybrid")
        )
    assert "needs cpu, got cuda" in caught.value.message
    assert "Keys that resolve for decode here: triton" in caught.value.fix
