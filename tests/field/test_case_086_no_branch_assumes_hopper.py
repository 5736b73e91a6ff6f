"""Case 86, sglang #10618 and gpustack #4777: hybrid_linear_attn has no else-branch; an unknown arch is no Hopper."""

from __future__ import annotations

import pytest

from backstamp.declarations import Alias, Offer
from backstamp.discovery import Found
from backstamp.errors import NoKernel, NotInstalled, Refused
from backstamp.host import HostFacts
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, built_from, host_of, model_of, plan_on, stamps_of
from tests.resolving import kernel

WIDE = {"head_dims": (256,)}
LISTED = ("8.0", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
ALIAS = Alias(key="hybrid_linear_attn", kernels=("fa3", "triton"))
FA3 = kernel("fa3", priority=90, **WIDE)
TRITON = kernel("triton", archs=LISTED, **WIDE)
LINEAR = kernel("triton", device="any", archs=("any",), **GDN)
HYBRID = model_of("hybrid")
ROLES = [
    pytest.param({}, "target", id="auto"),
    pytest.param({"attention_backend": "hybrid_linear_attn"}, "target", id="base"),
    pytest.param({"decode_attention_backend": "hybrid_linear_attn"}, "target", id="decode"),
    pytest.param({"draft_attention_backend": "hybrid_linear_attn"}, "draft", id="draft"),
    pytest.param({}, "draft", id="auto-draft"),
]


def plugin(*offers: Offer) -> Found:
    """Kernels behind the alias, and a linear kernel for any host."""
    return fake_plugin("p", [*offers, LINEAR], [ALIAS])


@pytest.mark.parametrize(
    ("host", "stamp"),
    [
        pytest.param("l40s", "triton", id="sm89"),
        pytest.param("rtx5090", "triton", id="sm120"),
        pytest.param("h100", "fa3", id="sm90"),
        pytest.param("h200", "fa3", id="sm90-h200"),
        pytest.param("gb10", "triton", id="sm121"),
        pytest.param("gb300", "triton", id="sm103"),
        pytest.param("a100", "triton", id="sm80"),
    ],
)
@pytest.mark.parametrize(("requests", "role"), ROLES)
def test_each_host_gets_what_is_declared_for_it(host: str, stamp: str, requests: dict[str, str], role: str) -> None:
    """sglang #10618: SM89 and SM120 never build what only SM90 runs."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    plan = plan_on(host, plugin(FA3, TRITON), requests=asked, model=HYBRID, role=role)
    assert set().union(*stamps_of(built_from(plan, plugin(FA3, TRITON))).values()) == {stamp}


@pytest.mark.parametrize(
    "host",
    [
        pytest.param(host_of("h100", arch="13.0"), id="sm130"),
        pytest.param(host_of("h100", arch="9.9"), id="another-minor"),
        pytest.param(host_of("h100", arch="unknown"), id="no-arch-read"),
        pytest.param(host_of("t4"), id="sm75"),
        pytest.param(host_of("mi300x"), id="rocm"),
    ],
)
@pytest.mark.parametrize(("requests", "role"), ROLES)
def test_an_unknown_arch_gets_a_kernel_that_declares_it_or_an_error(
    host: HostFacts, requests: dict[str, str], role: str
) -> None:
    """gpustack #4777: fa3 is never the default branch; a kernel that declares the arch is, where there is one."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    with pytest.raises((Refused, NoKernel)) as caught:
        plan_on(host, plugin(FA3, TRITON), requests=asked, model=HYBRID, role=role)
    assert "fa3" in {item.kernel for item in caught.value.verdicts}
    anywhere = kernel("triton", device="any", archs=("any",), **WIDE)
    plan = plan_on(host, plugin(FA3, anywhere), requests=asked, model=HYBRID, role=role)
    assert {row.kernel for row in plan.running} == {"triton"}


def test_without_the_kernel_for_this_host_the_alias_is_an_error_not_fa3() -> None:
    """SM89 with fa3 alone: refused with its arch, asked for or by auto."""
    for requests in (Requests(), Requests(attention_backend="hybrid_linear_attn")):
        with pytest.raises((Refused, NotInstalled, NoKernel)) as caught:
            plan_on("l40s", plugin(FA3), requests=requests, model=HYBRID)
        assert "SM90 (9.0)" in str(caught.value)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_kernel_off_the_list_is_taken_by_auto_alone_where_it_declares_the_arch(role: str) -> None:
    """SM75: nothing on the list fits; auto may take another kernel, the key may not."""
    native = kernel("torch_native", device="any", archs=("any",), priority=1, **WIDE)
    plan = plan_on("t4", plugin(FA3, TRITON, native), model=HYBRID, role=role)
    assert {row.kernel for row in plan.running} == {"torch_native"}
    flag = "draft_attention_backend" if role == "draft" else "attention_backend"
    with pytest.raises(Refused, match="SM75"):
        plan_on("t4", plugin(FA3, TRITON, native), model=HYBRID, role=role, requests=Requests(**{flag: ALIAS.key}))
