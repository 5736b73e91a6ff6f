"""The version floor of a kernel library applies wherever some phase of some runner runs on it.

Incident: SGLang #34264, where it never fired for a launch that named the library in a split field.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.decisions import (
    floor_applies,
)
from backstamp.launch import Requests
from tests.resolving import kernel, plan_of
from tests.scenes import DENSE, GATED, GDN, model_with
from tests.splits import OTHER, SPEC, built

ON_LIBRARY = kernel("flashinfer", requires=("flashinfer-python>=0.6",), priority=1)


@pytest.mark.parametrize(
    "field",
    [
        *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
        *("verify_attention_backend", "draft_attention_backend"),
    ],
)
def test_a_floor_applies_wherever_the_library_was_named(field: str) -> None:
    """In a split field alone, in a draft field alone; spelled as anybody spells a distribution."""
    asked = Requests(**{field: "flashinfer"}, **SPEC)
    target = plan_of([OTHER, ON_LIBRARY], asked)
    runners = [target, plan_of([OTHER, ON_LIBRARY], asked, role="draft", target=target)]
    answer = floor_applies(runners, "FlashInfer_Python")
    assert answer
    assert "flashinfer" in answer.reason
    assert bool(floor_applies([target], "flashinfer-python")) is (field != "draft_attention_backend")
    assert floor_applies([built(plan, [OTHER, ON_LIBRARY]) for plan in runners], "flashinfer-python")
    assert not floor_applies(runners, "sglang-kernel")


def test_a_floor_applies_where_nobody_named_the_library() -> None:
    """`auto` took it, in the linear slot too; a kernel that needs it beside its own library is named by the caller."""
    assert floor_applies([plan_of([replace(ON_LIBRARY, priority=99), OTHER])], "flashinfer-python")
    model = model_with((3, GATED), (1, DENSE))
    linear = kernel("gated", requires=("flashinfer-python>=0.6",), **GDN)
    answer = floor_applies([plan_of([OTHER, linear], model=model)], "flashinfer-python")
    assert answer.reason.startswith("flashinfer-python runs target linear decode (gated)")
    plan = plan_of([OTHER])
    assert floor_applies([plan], "flashinfer-python", kernels={"other"})
    assert not floor_applies([plan], "flashinfer-python", kernels={"mine"})
    assert floor_applies([plan], "flashinfer-python").reason == "nothing runs on flashinfer-python"
