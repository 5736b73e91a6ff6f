"""Case 96, TransformerEngine #2285: the machine-readable form has what the text has."""

from __future__ import annotations

import json

import pytest

from backstamp.errors import NoKernel
from backstamp.testing.fakes import fake_plugin
from tests.building import plan_on
from tests.resolving import kernel


def test_the_machine_readable_form_has_every_reason_of_a_candidate() -> None:
    """The machine readable form has every reason of a candidate."""
    plugin = fake_plugin("p", [kernel("many", archs=("10.0",), dtypes=frozenset({"fp16"}))])
    with pytest.raises(NoKernel) as caught:
        plan_on("h100", plugin)
    text = json.dumps(caught.value.as_json()["error"]["verdicts"])
    assert "SM100" in text
    assert "fp16" in text
