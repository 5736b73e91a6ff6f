"""Case 33, sglang #10816: on a hybrid model the operator's full-attention choice binds, beside the linear default."""

from __future__ import annotations

import pytest

from backstamp.declarations import Alias
from backstamp.errors import Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, built_from, model_of, plan_on, stamps_of
from tests.resolving import kernel, kernels

WIDE = {"head_dims": (256,)}
PLUGIN = fake_plugin(
    "p",
    [
        kernel("fa3", **WIDE, priority=80),
        kernel("flashinfer", **WIDE),
        kernel("dense_only", priority=99),
        kernel("triton", **GDN, priority=60),
        kernel("flashinfer", **GDN),
    ],
    [Alias(key="hybrid_linear_attn", kernels=("fa3", "flashinfer"))],
)
HYBRID = model_of("hybrid")


def test_the_operators_full_attention_choice_binds_and_the_linear_layers_keep_their_default() -> None:
    """sglang #10816: full layers flashinfer, linear layers the GDN default, and fa3 is not built at all."""
    plan = plan_on("h100", PLUGIN, requests=Requests(attention_backend="flashinfer"), model=HYBRID)
    stamps = stamps_of(built_from(plan, PLUGIN))
    assert stamps == {"prefill": {"flashinfer"}, "decode": {"flashinfer"}}
    assert plan.linear is not None
    assert [row.kernel for row in (plan.linear.prefill, plan.linear.decode)] == ["triton", "triton"]
    assert plan.linear.decode.source == "auto"
    groups = plan.phase("decode").groups
    assert {(group.kernel, group.family, len(group.layers)) for group in groups} == {("flashinfer", "mha", 12)}


def test_without_a_flag_the_full_layers_run_the_aliass_kernel() -> None:
    """No flag: fa3 on SM90, which is the alias's first, not the highest priority."""
    plan = plan_on("h100", PLUGIN, model=HYBRID)
    assert stamps_of(built_from(plan, PLUGIN)) == {"prefill": {"fa3"}, "decode": {"fa3"}}


@pytest.mark.parametrize(
    ("flag", "pair"),
    [
        pytest.param("prefill_attention_backend", ("flashinfer", "fa3"), id="prefill-alone"),
        pytest.param("decode_attention_backend", ("fa3", "flashinfer"), id="decode-alone"),
    ],
)
def test_one_half_asked_for_leaves_the_other_to_the_alias(flag: str, pair: tuple[str, str]) -> None:
    """The relative: a split flag binds its half and no more."""
    plan = plan_on("h100", PLUGIN, requests=Requests(**{flag: "flashinfer"}), model=HYBRID)
    assert built_from(plan, PLUGIN).attention_backends() == pair


def test_a_linear_request_leaves_the_full_layers_alone() -> None:
    """The mirror: choosing the linear kernel does not choose the attention kernel."""
    plan = plan_on("h100", PLUGIN, requests=Requests(linear_attn_backend="flashinfer"), model=HYBRID)
    assert kernels(plan)["decode"] == "fa3"
    assert plan.linear is not None
    assert plan.linear.decode.kernel == "flashinfer"


def test_a_choice_that_cannot_serve_the_full_layers_is_refused_not_replaced() -> None:
    """An explicit kernel without these head dims is an error; the alias does not step in."""
    with pytest.raises(Refused, match="needs head dim 64, 128, got 256"):
        plan_on("h100", PLUGIN, requests=Requests(attention_backend="dense_only"), model=HYBRID)
