"""Two distributions that are not ours, installed for real: one adds a key, one replaces a kernel where it is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import ordinary_environment
from tests.sites import command
from tests.third_party.installing import install_third_parties

HERE = Path(__file__).parent
PHASES = {"prefill", "decode", "verify", "draft_decode", "draft_extend"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both of them, installed by pip into a folder of their own."""
    return install_third_parties(tmp_path_factory.mktemp("third-party"), "acme-attention", "swift-triton")


def served(site: Path, *arguments: str) -> dict[str, object]:
    """What `served.py` says of a key; Triton kernels run in its interpreter."""
    environment = {**ordinary_environment(site), "TRITON_INTERPRET": "1"}
    program = [sys.executable, str(HERE / "served.py"), *arguments]
    child = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def stamps(report: dict[str, object]) -> set[tuple[str, str, str]]:
    """(kernel, distribution, version) over every phase."""
    rows = [phase["stamp"] for phase in report.values()]
    return {(row["kernel"], row["plugin"]["distribution"], row["plugin"]["version"]) for row in rows}


def test_what_is_installed_is_listed_with_its_distribution(site: Path) -> None:
    """`backstamp list` says whose each kernel is, and which name two distributions claim."""
    child = command("list", "--json", path=site)
    assert child.returncode == 0, child.stdout + child.stderr
    listing = json.loads(child.stdout)
    owners = {row["kernel"]: row["plugin"]["distribution"] for row in listing["kernels"] if row["slot"] == "attention"}
    assert owners["acme"] == "acme-attention"
    assert owners["swift-triton:triton"] == "swift-triton"
    assert owners["backstamp-triton:triton"] == "backstamp-triton"
    assert "triton" not in owners
    contested = [row for row in listing["conflicts"] if row["slot"] == "attention"]
    assert contested == [{"name": "triton", "slot": "attention", "distributions": ["backstamp-triton", "swift-triton"]}]
    # read from the wheel's own file: installed, and never imported
    origins = {row["distribution"]: row["origin"] for row in listing["plugins"]}
    assert origins["swift-triton"] == f"data {site / 'swift_triton' / 'backstamp.json'}"


def test_a_third_party_key_builds_its_own_kernel_in_every_phase(site: Path) -> None:
    """The stamp names the distribution and the kernel that ran; every phase equals float64."""
    report = served(site, "acme")
    assert set(report) == PHASES
    assert stamps(report) == {("acme", "acme-attention", "1.4.0")}
    assert all(phase["kernels"] == ["acme"] for phase in report.values())
    assert "acme_attention/backend.py" in report["decode"]["stamp"]["origin"]
    assert max(phase["error"] for phase in report.values()) < 1e-5


def test_a_name_two_distributions_claim_is_refused_and_both_are_named(site: Path) -> None:
    """Installing is not consenting: neither the first nor the faster of them wins."""
    report = served(site, "triton")
    assert report["error"] == "AliasConflict"
    assert "backstamp-triton" in report["message"]
    assert "swift-triton" in report["message"]


def test_the_explicit_form_binds_the_replacement(site: Path) -> None:
    """`distribution:kernel`: the stamp still says `triton`, and whose."""
    report = served(site, "swift-triton:triton")
    assert set(report) == PHASES
    assert stamps(report) == {("triton", "swift-triton", "0.9.0")}
    assert all(phase["kernels"] == ["triton"] for phase in report.values())
    assert "swift_triton/backend.py" in report["decode"]["stamp"]["origin"]
    assert max(phase["error"] for phase in report.values()) < 1e-5


def test_the_explicit_form_binds_the_replaced_one_too(site: Path) -> None:
    """Who wants ours says so."""
    report = served(site, "backstamp-triton:triton")
    assert {row[:2] for row in stamps(report)} == {("triton", "backstamp-triton")}
    assert max(phase["error"] for phase in report.values()) < 1e-5


def test_a_policy_may_say_once_whose_the_name_is(site: Path) -> None:
    """After `--duplicate swift-triton:triton` the bare key is the replacement's."""
    assert stamps(served(site, "triton", "swift-triton:triton")) == {("triton", "swift-triton", "0.9.0")}


def test_what_nobody_contests_is_untouched(site: Path) -> None:
    """The conflict poisons one name: the rest of the catalogue serves as before."""
    report = served(site, "torch_native")
    assert {row[:2] for row in stamps(report)} == {("torch_native", "backstamp-cpu")}
