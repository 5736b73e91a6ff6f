"""Case 64, flashinfer #3044, transformers #43060: a version nobody can read is a state, not an exception."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from backstamp.discovery import discover
from backstamp.errors import Refused
from backstamp.probes import installed_libraries
from backstamp.testing.dists import write_plugin
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.resolving import kernel
from tests.sites import ask

UNREADABLE = ["None", "N/A", "0.0.0+unknown", "unknown", "", "0.0.0"]
CATALOGUE = catalogue_of(
    fake_plugin("p", [kernel("odd", requires=("flashinfer-python>=0.6",), priority=80), kernel("fine")])
)


@pytest.mark.parametrize("version", UNREADABLE)
def test_the_kernel_is_unavailable_with_that_reason_and_others_are_fine(version: str) -> None:
    """flashinfer #3044: the check itself never raises."""
    plan = ask(CATALOGUE, host="h100", libraries={"flashinfer-python": version})
    assert plan.phase("decode").kernel == "fine"
    (verdict,) = [item for item in plan.phase("decode").verdicts if item.kernel == "odd"]
    assert verdict.code == "library_unknown"
    with pytest.raises(Refused) as caught:
        ask(CATALOGUE, "odd", host="h100", libraries={"flashinfer-python": version})
    assert "version" in caught.value.found


METADATA = {
    "no-version": ("flashinfer_python.egg-info", "PKG-INFO", "Name: flashinfer-python\n"),
    "empty-version": ("flashinfer_python.egg-info", "PKG-INFO", "Name: flashinfer-python\nVersion:\n"),
    "not-available": ("flashinfer_python.egg-info", "PKG-INFO", "Name: flashinfer-python\nVersion: N/A\n"),
    "none": ("flashinfer_python-None.dist-info", "METADATA", "Name: flashinfer-python\nVersion: None\n"),
    "no-folder-version": ("flashinfer_python.dist-info", "METADATA", "Name: flashinfer-python\n"),
    "unknown": ("flashinfer_python-0.0.0+unknown.dist-info", "METADATA", "Name: flashinfer-python\n"),
}


@pytest.mark.parametrize("damage", METADATA)
def test_an_installed_library_without_a_version_is_recorded_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """transformers #43060: such a library is unknown to the kernel that needs it, not missing."""
    folder, name, text = METADATA[damage]
    (tmp_path / folder).mkdir()
    (tmp_path / folder / name).write_text(f"Metadata-Version: 2.1\n{text}", "utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    libraries = dict(installed_libraries())
    assert set(libraries) == {"flashinfer-python"}
    plan = ask(CATALOGUE, host="h100", libraries=libraries)
    assert plan.phase("decode").kernel == "fine"
    assert {item.code for item in plan.phase("decode").verdicts if item.kernel == "odd"} == {"library_unknown"}


def test_a_plugin_without_a_version_is_found_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer #3044: its version reads `unknown`, wherever it is printed."""
    site = tmp_path / "site-packages"
    write_plugin(site, "bare", kernel="bare", carries_json=True)
    metadata = site / "bare-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text("utf-8").replace("Version: 1.0\n", ""), "utf-8")
    (found,) = discover([str(site)]).found
    assert found.plugin == ("bare", "bare", "unknown")
