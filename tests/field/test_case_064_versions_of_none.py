"""Case 64, flashinfer #3044: a version that is not there is unknown, and no exception."""

from __future__ import annotations

from backstamp.host import parse_host
from backstamp.testing.fakes import fake_plugin
from tests.building import host_of, plan_on
from tests.resolving import kernel, kernels


def test_a_version_of_none_in_a_host_file_is_unknown() -> None:
    """A version of none in a host file is unknown."""
    host = parse_host({"device": "cuda", "arch": "9.0", "libraries": {"flashinfer-python": None}}, "box")
    plugin = fake_plugin(
        "p", [kernel("flashinfer", requires=("flashinfer-python>=0.6",), priority=90), kernel("triton")]
    )
    plan = plan_on(host, plugin)
    assert kernels(plan)["decode"] == "triton"
    (verdict,) = [item for item in plan.phase("decode").verdicts if item.kernel == "flashinfer"]
    assert verdict.code == "library_unknown"


def test_a_version_of_none_in_facts_is_unknown_not_missing() -> None:
    """A version of none in facts is unknown not missing."""
    host = host_of("h100", libraries=(("flashinfer-python", None),))
    plugin = fake_plugin(
        "p", [kernel("flashinfer", requires=("flashinfer-python>=0.6",), priority=90), kernel("triton")]
    )
    (verdict,) = [item for item in plan_on(host, plugin).phase("decode").verdicts if item.kernel == "flashinfer"]
    assert verdict.code == "library_unknown"
