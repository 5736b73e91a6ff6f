"""Case 67, vLLM #14221: a recurrence is not asked about a KV cache it does not have."""

from __future__ import annotations

from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, model_of, plan_on
from tests.resolving import kernel


def test_recurrent_layers_of_a_hybrid_model_are_not_asked_about_the_kv_cache() -> None:
    """fp8 KV on Qwen3-Next: the linear slot has no KV cache, and its kernels say nothing about one."""
    plugin = fake_plugin(
        "p",
        [kernel("fa3", head_dims=(256,), kv_dtypes=frozenset({"same", "e4m3fn"})), kernel("triton", **GDN)],
    )
    plan = plan_on("h100", plugin, requests=Requests(kv_cache_dtype="fp8_e4m3"), model=model_of("hybrid"))
    assert plan.linear is not None
    assert plan.linear.decode.kernel == "triton"
