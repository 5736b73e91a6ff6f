"""Whose package it is: what was installed counts before what is claimed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp.discovery import discover
from backstamp.testing.dists import PLUGIN_SOURCE, write_distribution, write_plugin, write_record
from tests.sites import along, fresh_site

ENTRY = "[backstamp.plugins]\nevil = {module}\n"
CONTRACT = ("backstamp>=0.2,<0.3",)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library `flashinfer-python`, installed as a wheel."""
    for folder in fresh_site(tmp_path, monkeypatch):
        (folder / "flashinfer").mkdir()
        (folder / "flashinfer" / "__init__.py").write_text("", "utf-8")
        write_record(write_distribution(folder, "flashinfer-python"), ["flashinfer/__init__.py"])
        yield folder


def intrude(site: Path, module: str, *, record: list[str] | None = None, top_level: str = "") -> None:
    """A distribution `evil` whose plugin is `module`; it must never be imported."""
    path = site.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.write_text("raise SystemExit('imported')", "utf-8")
    info = write_distribution(site, "evil", requires=CONTRACT, entry_points=ENTRY.format(module=module))
    if top_level:
        (info / "top_level.txt").write_text(top_level, "utf-8")
    if record is not None:
        write_record(info, record)


INTRUSIONS: dict[str, tuple[list[str] | None, str]] = {
    "file-in-a-strangers-package": (["flashinfer/evil.py"], ""),
    "claimed-in-top-level": (["evil/__init__.py"], "flashinfer\nevil\n"),
    "claimed-without-a-record": (None, "flashinfer\n"),
    "editable-that-says-nothing": (["__editable__.evil-1.0.pth"], ""),
    "no-metadata-of-its-own": (None, ""),
    "package-installed-over-another": (["flashinfer/__init__.py", "flashinfer/evil.py"], ""),
}


@pytest.mark.parametrize("intrusion", INTRUSIONS)
def test_a_plugin_in_a_strangers_package_is_refused_and_not_imported(site: Path, intrusion: str) -> None:
    """The owner is named, whatever the intruder's own metadata claims."""
    record, top_level = INTRUSIONS[intrusion]
    intrude(site, "flashinfer.evil", record=record, top_level=top_level)
    (failure,) = along(site).failures
    assert "needs its plugin module in a package of its own" in failure.cause
    assert "flashinfer is of flashinfer-python" in failure.cause


@pytest.mark.parametrize(("module", "owner"), [("backstamp.evil", "core's own"), ("json.evil", "of Python itself")])
def test_core_and_python_belong_to_nobody_else(site: Path, module: str, owner: str) -> None:
    """Not even where nothing on this path owns them."""
    intrude(site, module, top_level=module.partition(".")[0])
    (failure,) = along(site).failures
    assert owner in failure.cause


def test_a_package_claimed_beside_its_own_is_not_granted(site: Path) -> None:
    """A factory may not lie in it, although top_level.txt lists it and there is no record."""
    package = write_plugin(site, "evil", record=False, target="evil.plugin")
    (site / "evil-1.0.dist-info" / "top_level.txt").write_text("evil\nflashinfer\nos\n", "utf-8")
    source = PLUGIN_SOURCE.format(kernel="evil", package=package).replace("evil.backend:build", "flashinfer.jit:build")
    (site / package / "plugin.py").write_text(source, "utf-8")
    (found,) = discover([str(site)]).found
    assert found.packages == {"evil"}
    (failure,) = along(site).failures
    assert "lies outside its distribution's packages" in failure.cause


def test_an_editable_install_owns_what_nobody_else_does(site: Path) -> None:
    """Its record lists no module: its top_level.txt, else its entry point, speaks for it."""
    write_plugin(site, "mine", kernel="mine", record=False)
    write_plugin(site, "other-name", kernel="other", record=False)
    (site / "other_name-1.0.dist-info" / "top_level.txt").write_text("other_name\nother_lib\n", "utf-8")
    packages = {found.plugin.distribution: found.packages for found in discover([str(site)]).found}
    assert packages == {"mine": {"mine"}, "other-name": {"other_name", "other_lib"}}


def test_a_claim_to_a_package_does_not_take_it_from_whom_it_is_named_after(site: Path) -> None:
    """Two editable installs that claim one package: the one of that name keeps it."""
    write_plugin(site, "mine", kernel="mine", record=False)
    intrude(site, "mine.evil", top_level="mine\n")
    discovery = discover([str(site)])
    assert [found.plugin.distribution for found in discovery.found] == ["mine"]
    assert [failure.plugin.distribution for failure in discovery.failures] == ["evil"]


def test_a_namespace_is_shared(site: Path) -> None:
    """Two wheels below one package without an `__init__` are by design."""
    for name in ("acme-left", "acme-right"):
        half = name.partition("-")[2]
        folder = site / "acme" / half
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("", "utf-8")
        text = PLUGIN_SOURCE.format(kernel=half, package=f"acme.{half}")
        (folder / "plugin.py").write_text(text, "utf-8")
        points = f"[backstamp.plugins]\n{half} = acme.{half}.plugin\n"
        info = write_distribution(site, name, requires=CONTRACT, entry_points=points)
        write_record(info, [f"acme/{half}/__init__.py", f"acme/{half}/plugin.py"])
    assert sorted(kernel for _, kernel in along(site).rows) == ["left", "right"]
