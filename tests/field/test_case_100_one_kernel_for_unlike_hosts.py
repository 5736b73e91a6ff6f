"""Case 100, flashinfer #3186: each rank chose for itself and a collective hung."""

from __future__ import annotations

import pytest

from backstamp.declarations import Offer
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest, NoKernel, Refused
from backstamp.job import resolve_job
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel

HOPPER = kernel("fa3", archs=("9.0",), priority=90)
DESKTOP = kernel("xqa", archs=("12.0",), priority=80)
BOTH = kernel("triton", archs=("9.0", "12.0"), priority=10)
LIBRARY = kernel("lib", archs=("9.0", "12.0"), requires=("lib>=1",))


def plans(offers: list[Offer], requests: Requests | None = None, **policy: bool) -> tuple[Plan, ...]:
    """A job of an SM90 rank 0 and an SM120 rank 1."""
    launch = make_launch(requests or Requests(), policy=Policy(**policy))
    hosts = [described_host("h100"), described_host("rtx5090")]
    return resolve_job(launch, EngineFacts(), default_model(), hosts, catalogue_of(fake_plugin("p", offers)))


def test_unlike_hosts_get_one_kernel_that_serves_on_both() -> None:
    """Not each its own best."""
    found = plans([HOPPER, DESKTOP, BOTH])
    assert [plan.phase("decode").kernel for plan in found] == ["triton", "triton"]
    assert [plan.host for plan in found] == ["h100", "rtx5090"]
    assert len({plan.digest for plan in found}) == 1


def test_no_common_kernel_is_an_error_that_names_the_host() -> None:
    """Each candidate's reason says on which host."""
    with pytest.raises(NoKernel) as caught:
        plans([HOPPER, DESKTOP])
    assert "fa3: needs SM90 (9.0), got SM120 (12.0) on rtx5090" in caught.value.considered
    assert "xqa: needs SM120 (12.0), got SM90 (9.0) on h100" in caught.value.considered


def test_an_explicit_kernel_must_serve_every_rank() -> None:
    """What binds, binds on all hosts."""
    with pytest.raises(Refused, match="on rtx5090"):
        plans([HOPPER, BOTH], Requests(attention_backend="fa3"))


def test_a_kernel_a_rank_is_shown_only_where_the_policy_allows_it() -> None:
    """With per_rank each host has its own, and every plan says so."""
    found = plans([HOPPER, DESKTOP, BOTH], per_rank=True)
    assert [plan.phase("decode").kernel for plan in found] == ["fa3", "xqa"]
    for plan in found:
        assert [item.text for item in plan.warnings if item.code == "per_rank"] == [
            "ranks run unlike kernels: h100: fa3; rtx5090: xqa"
        ]


def test_two_versions_of_a_library_are_two_kernels() -> None:
    """One kernel name over unlike libraries is refused before it hangs."""
    hosts = [described_host("h100", libraries={"lib": "1.0"}), described_host("rtx5090", libraries={"lib": "1.1"})]
    catalogue = catalogue_of(fake_plugin("p", [LIBRARY]))
    with pytest.raises(NoKernel, match=r"needs lib 1\.0, as on h100, got lib 1\.1 on rtx5090"):
        resolve_job(make_launch(Requests()), EngineFacts(), default_model(), hosts, catalogue)


def test_hosts_that_read_one_kv_dtype_in_two_forms_are_refused() -> None:
    """fp8_e4m3 is fnuz on gfx942 and fn on gfx950: their caches are not each other's."""
    launch = make_launch(Requests(kv_cache_dtype="fp8_e4m3"))
    hosts = [described_host("mi300x"), described_host("mi355x")]
    with pytest.raises(ConflictingRequest, match="e4m3fn on mi355x and e4m3fnuz on mi300x"):
        resolve_job(launch, EngineFacts(), default_model(), hosts, catalogue_of(fake_plugin("p", [BOTH])))
