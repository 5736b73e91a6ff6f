"""Case 100, flashinfer #3186: each rank chose for itself and a collective hung."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.adoption import adopt
from backstamp.declarations import Offer, PageSizes
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest, NoKernel, Refused
from backstamp.host import HostFacts, Probe
from backstamp.job import resolve_job
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel
from tests.scenes import DENSE, GATED, model_with

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


def job(hosts: list[HostFacts], offers: list[Offer], requests: Requests | None = None) -> tuple[Plan, ...]:
    """A job of these hosts."""
    launch = make_launch(requests or Requests())
    return resolve_job(launch, EngineFacts(), default_model(), hosts, catalogue_of(fake_plugin("p", offers)))


PAIR = [described_host("h100"), described_host("rtx5090")]
PER_ARCH = [kernel("t", archs=("12.0",)), kernel("t", archs=("9.0",))]


def test_a_kernel_with_a_row_for_each_host_serves_both() -> None:
    """Rows that differ in where they run answer alike; each rank's plan names its own."""
    found = job(PAIR, PER_ARCH)
    assert [[group.row for group in plan.phase("decode").groups] for plan in found] == [[1], [0]]
    assert len({plan.digest for plan in found}) == 1
    for plan, host in zip(found, PAIR, strict=True):
        assert adopt(plan.as_json(), host, catalogue_of(fake_plugin("p", PER_ARCH))) == plan


def test_rows_of_two_devices_are_one_kernel_too() -> None:
    """CUDA and ROCm, each with a library of its own; the digest differs in that library alone."""
    cuda = kernel("t", archs=("9.0",), requires=("lib>=1",))
    rocm = kernel("t", device="rocm", archs=("gfx942",), requires=("other>=2",))
    hosts = [described_host("h100", libraries={"lib": "1.0"}), described_host("mi300x", libraries={"other": "2.0"})]
    found = job(hosts, [cuda, rocm])
    libraries = [plan.phase("decode").library for plan in found]
    assert [library and library.distribution for library in libraries] == ["lib", "other"]
    assert [plan.device for plan in found] == ["cuda", "rocm"]
    for plan, host in zip(found, hosts, strict=True):
        assert adopt(plan.as_json(), host, catalogue_of(fake_plugin("p", [cuda, rocm]))) == plan
    with pytest.raises(ConflictingRequest, match="e4m3fn on h100 and e4m3fnuz on mi300x"):
        job(hosts, [cuda, rocm], Requests(kv_cache_dtype="fp8_e4m3"))


def test_linear_rows_are_joined_as_well() -> None:
    """The slot of a hybrid model follows the same rule."""
    rows = [
        kernel("g", slot="linear", family="gdn", archs=(arch,), head_dims=("any",), state_layouts=("s",))
        for arch in ("9.0", "12.0")
    ]
    catalogue = catalogue_of(fake_plugin("p", [BOTH, *rows]))
    found = resolve_job(make_launch(Requests()), EngineFacts(), model_with((3, GATED), (1, DENSE)), PAIR, catalogue)
    linear = [plan.linear.decode.groups[0].row for plan in found if plan.linear is not None]
    assert linear == [0, 1]


def test_rows_that_answer_differently_are_not_joined() -> None:
    """Another page size is another kernel for whoever shares its cache."""
    other = PageSizes(preferred=64, exact=(64,))
    with pytest.raises(NoKernel, match="on rtx5090"):
        job(PAIR, [PER_ARCH[1], replace(PER_ARCH[0], page_sizes=other)])


def test_a_host_without_any_of_the_rows_is_the_one_named() -> None:
    """What another row makes good elsewhere is no reason."""
    with pytest.raises(NoKernel) as caught:
        job([*PAIR, described_host("b200")], PER_ARCH)
    considered = caught.value.considered
    assert "on b200" in considered
    assert "on h100" not in considered
    assert "on rtx5090" not in considered


def test_a_row_that_serves_everywhere_stands_before_one_for_each_host() -> None:
    """One library on all ranks where there is one."""
    one = kernel("t", archs=("9.0",), requires=("only>=1",))
    both = kernel("t", archs=("9.0", "12.0"), requires=("lib>=1",))
    hosts = [
        described_host("h100", libraries={"lib": "1.0", "only": "1.0"}),
        described_host("rtx5090", libraries={"lib": "1.0"}),
    ]
    found = job(hosts, [one, both])
    assert [[group.row for group in plan.phase("decode").groups] for plan in found] == [[1], [1]]
    assert len({plan.digest for plan in found}) == 1


@pytest.mark.parametrize("listed_first", [True, False])
def test_an_assumed_library_beside_a_listed_one_is_said_in_words(listed_first: bool) -> None:
    """A version nobody knows is not the version None."""
    hosts = [described_host("h100", libraries={"lib": "1.0"}), described_host("rtx5090")]
    with pytest.raises(NoKernel) as caught:
        job(hosts if listed_first else hosts[::-1], [LIBRARY])
    found = "needs lib at one version, got 1.0 on h100 and an unknown one on rtx5090, which has no library list"
    assert found in caught.value.considered


def test_every_host_of_a_job_warns_of_itself() -> None:
    """A failed probe and a missing library list are told whatever the rank."""
    probe = Probe(name="device order", ok=False, reason="orders differ")
    hosts = [described_host("h100", libraries={}), replace(described_host("rtx5090"), probes=(probe,))]
    for of in (hosts, hosts[::-1]):
        for plan in job(of, [BOTH]):
            assert [warning.text for warning in plan.warnings if warning.code == "device_order"] == ["orders differ"]
    for plan in job([described_host("h100", libraries=None), described_host("rtx5090")], [LIBRARY]):
        assert {item.text.split()[1] for item in plan.warnings if item.code == "assumed"} == {"h100", "rtx5090"}
