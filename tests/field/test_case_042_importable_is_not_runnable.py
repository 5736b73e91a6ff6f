"""Case 42, transformers #47926, nanochat #853, autoresearch #3: a kernel runs where it has an image."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.discovery import Found
from backstamp.errors import Refused
from backstamp.host import HostFacts
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import SPEC, host_of, plan_on
from tests.resolving import kernel, kernels

#: Installed and importable everywhere.
LIBRARIES = (("flash-attn", "2.8.3"),)
SM86 = host_of("a100", name="a10", arch="8.6")
SM89, SM103, SM120 = host_of("l40s"), host_of("gb300"), host_of("rtx5090")


def plugin(forward: str = "no", images: tuple[str, ...] = ("8.0", "9.0a")) -> Found:
    """The kernel with its images, and sdpa everywhere."""
    fa2 = kernel("fa2", archs=images, forward_archs=forward, requires=("flash-attn>=2",), priority=90)
    return fake_plugin("p", [fa2, kernel("sdpa", device="any", archs=("any",), priority=1)])


def taken(host: HostFacts, forward: str = "no", images: tuple[str, ...] = ("8.0", "9.0a")) -> str | None:
    """What auto takes where the library is installed."""
    return kernels(plan_on(replace(host, libraries=LIBRARIES), plugin(forward, images)))["decode"]


@pytest.mark.parametrize(
    ("host", "runs"),
    [
        pytest.param(host_of("t4"), False, id="sm75-too-old"),
        pytest.param(host_of("a100"), True, id="sm80"),
        pytest.param(host_of("h100"), True, id="sm90-by-its-90a-image"),
        pytest.param(SM120, False, id="sm120-no-image"),
        pytest.param(SM86, False, id="sm86-no-claim"),
        pytest.param(SM89, False, id="sm89-no-claim"),
    ],
)
def test_a_kernel_runs_where_it_has_an_image(host: HostFacts, runs: bool) -> None:
    """transformers #47926: images {80, 90a}; elsewhere sdpa, although the package is installed and imports."""
    assert taken(host) == ("fa2" if runs else "sdpa")


@pytest.mark.parametrize(
    ("host", "runs"),
    [
        pytest.param(SM86, True, id="sm86"),
        pytest.param(SM89, True, id="sm89"),
        pytest.param(host_of("t4"), False, id="sm75"),
        pytest.param(SM103, False, id="sm103"),
        pytest.param(SM120, False, id="sm120"),
    ],
)
def test_a_same_major_claim_reaches_sm86_and_no_other_major(host: HostFacts, runs: bool) -> None:
    """karpathy/nanochat #853: SM86 only where the plugin says so; a floor is not a ceiling left open."""
    assert taken(host, "major") == ("fa2" if runs else "sdpa")


@pytest.mark.parametrize(
    ("images", "host", "runs"),
    [
        pytest.param(("9.0a",), host_of("b200"), False, id="90a-claims-nothing-newer"),
        pytest.param(("10.0f",), host_of("b200"), True, id="100f-on-its-own"),
        pytest.param(("10.0f",), SM103, True, id="100f-on-its-family"),
        pytest.param(("10.0f",), SM120, False, id="100f-on-another-major"),
        pytest.param(("8.0", "9.0a"), SM120, True, id="ptx-of-80"),
    ],
)
def test_an_image_with_a_letter_goes_no_further_than_its_letter(
    images: tuple[str, ...], host: HostFacts, runs: bool
) -> None:
    """The relatives: arch-specific and family-specific images under the widest claim."""
    assert taken(host, "any", images) == ("fa2" if runs else "sdpa")


@pytest.mark.parametrize("host", [host_of("t4"), SM120, SM86], ids=["sm75", "sm120", "sm86"])
def test_the_fallback_says_why(host: HostFacts) -> None:
    """autoresearch #3: auto runs sdpa and the plan holds the reason, in every phase that runs; asked for, it raises."""
    plan = plan_on(replace(host, libraries=LIBRARIES), plugin(), requests=SPEC)
    for row in plan.running:
        assert row.kernel == "sdpa"
        (verdict,) = [item for item in row.verdicts if item.kernel == "fa2"]
        assert (verdict.code, verdict.wanted) == ("arch", "SM80 (8.0), SM90a (9.0a)")
        assert host.arch in verdict.have
    with pytest.raises(Refused, match="SM90a"):
        plan_on(replace(host, libraries=LIBRARIES), plugin(), requests=Requests(attention_backend="fa2"))
