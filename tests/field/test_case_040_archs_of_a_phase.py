"""Case 40, SGLang #14842: a phase with archs of its own is refused by naming them."""

from __future__ import annotations

import pytest

from backstamp.errors import Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import MLA, model_of, plan_on
from tests.resolving import kernel


def test_the_refusal_of_a_phase_with_other_archs_names_the_archs() -> None:
    """The refusal of a phase with other archs names the archs."""
    rows = [
        kernel("m", archs=("10.0", "10.3", "12.0"), phases=frozenset({"decode"}), **MLA),
        kernel("m", archs=("10.0", "10.3"), phases=frozenset({"prefill"}), **MLA),
    ]
    with pytest.raises(Refused) as caught:
        plan_on(
            "rtx5090", fake_plugin("p", rows), requests=Requests(prefill_attention_backend="m"), model=model_of("mla")
        )
    assert "10.3" in caught.value.needed
    assert "SM120" in caught.value.found
