"""Case 62, vLLM #49804: a bypass is recorded where it skipped something."""

from __future__ import annotations

from backstamp.launch import Requests
from backstamp.policy import Policy
from backstamp.stamp import read_stamp
from backstamp.testing.fakes import fake_plugin
from tests.building import built_from, host_of, plan_on
from tests.resolving import kernel


def test_the_stamp_of_a_kernel_nothing_was_skipped_for_says_nothing() -> None:
    """The stamp of a kernel nothing was skipped for says nothing."""
    library = {"requires": ("flashinfer-python>=0.6",), "companions": ("flashinfer-cubin",)}
    plugin = fake_plugin("p", [kernel("flashinfer", **library), kernel("triton")])
    apart = host_of("h100", libraries=(("flashinfer-cubin", "0.6.13"), ("flashinfer-python", "0.6.14")))
    asked = Requests(prefill_attention_backend="triton", decode_attention_backend="flashinfer")
    plan = plan_on(apart, plugin, requests=asked, policy=Policy(bypass=frozenset({"companion"})))
    backends = built_from(plan, plugin)
    assert read_stamp(backends.serving_attention_backend("decode")).skipped == ("companion",)
    assert read_stamp(backends.serving_attention_backend("prefill")).skipped == ()
