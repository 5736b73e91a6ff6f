"""Case 43, FreeToken #442: an explicit choice that cannot run is refused by naming its flag."""

from __future__ import annotations

import pytest

from backstamp.errors import Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import plan_on
from tests.resolving import kernel


@pytest.mark.parametrize(
    ("field", "flag", "role"),
    [
        ("attention_backend", "--attention-backend", "target"),
        ("decode_attention_backend", "--decode-attention-backend", "target"),
        ("verify_attention_backend", "--verify-attention-backend", "target"),
        ("draft_attention_backend", "--draft-attention-backend", "draft"),
    ],
)
def test_the_error_names_the_flag(field: str, flag: str, role: str) -> None:
    """The error names the flag."""
    plugin = fake_plugin("p", [kernel("fa", archs=("9.0", "10.0")), kernel("triton", archs=("8.9",))])
    with pytest.raises(Refused) as caught:
        plan_on("l40s", plugin, requests=Requests(speculative_algorithm="EAGLE", **{field: "fa"}), role=role)
    assert flag in caught.value.message
