"""Case 18, vLLM #48162: prefill and decode share what they wrote; a recurrence shares states, and has no KV cache."""

from __future__ import annotations

import pytest

from backstamp.declarations import PageSizes
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, model_of, plan_on
from tests.resolving import kernel


def test_linear_state_layouts_of_prefill_and_decode_must_meet() -> None:
    """Linear state layouts of prefill and decode must meet."""
    rows = [
        kernel("pre", phases=frozenset({"prefill"}), state_layouts=("k_first",), **GDN),
        kernel("dec", phases=frozenset({"decode", "verify"}), state_layouts=("v_first",), **GDN),
        kernel("full", head_dims=(256,)),
    ]
    with pytest.raises(ConflictingRequest) as caught:
        plan_on("h100", fake_plugin("p", rows), model=model_of("hybrid"))
    assert "k_first" in caught.value.message
    assert "v_first" in caught.value.message


def test_a_flexible_linear_kernel_follows_the_hard_one() -> None:
    """A flexible linear kernel follows the hard one."""
    rows = [
        kernel("pre", phases=frozenset({"prefill"}), state_layouts=("k_first", "v_first"), **GDN),
        kernel("dec", phases=frozenset({"decode", "verify"}), state_layouts=("v_first",), **GDN),
        kernel("full", head_dims=(256,)),
    ]
    plan = plan_on("h100", fake_plugin("p", rows), model=model_of("hybrid"))
    assert [item for item in plan.layouts if item[0] == "linear"] == [("linear", "v_first")]


def test_recurrent_layers_are_not_asked_about_kv_layouts_forms_or_pages() -> None:
    """Recurrent layers are not asked about kv layouts forms or pages."""

    plugin = fake_plugin(
        "p",
        [
            kernel("fa3", head_dims=(256,), layouts=("hnd",), page_sizes=PageSizes(preferred=64, exact=(64,))),
            kernel("triton", **GDN),
        ],
    )
    engine = EngineFacts(layouts=frozenset({"hnd"}))
    plan = plan_on("h100", plugin, requests=Requests(page_size=64), model=model_of("hybrid"), engine=engine)
    assert plan.linear is not None
    assert plan.linear.decode.kernel == "triton"
