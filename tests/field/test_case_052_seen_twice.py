"""Case 52, importlib_metadata #410, #481; setuptools #3649, #4170: one distribution seen twice is one distribution."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import AliasConflict
from backstamp.testing.dists import write_plugin
from tests.sites import along, ask, fresh_site

ENTRY = "[backstamp.plugins]\ntwice = twice.plugin\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed plugin `twice`."""
    for folder in fresh_site(tmp_path, monkeypatch):
        write_plugin(folder, "twice", kernel="twice")
        yield folder


def test_a_source_folder_stood_in_and_its_installation_are_one_backend(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """setuptools #3649: the egg-info of the current directory and the dist-info in site: no conflict, both noted."""
    source = tmp_path / "source"
    (source / "twice.egg-info").mkdir(parents=True)
    (source / "twice.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 0.9\n", "utf-8")
    (source / "twice.egg-info" / "entry_points.txt").write_text(ENTRY, "utf-8")
    monkeypatch.chdir(source)
    discovery = discover([str(source), str(site)])
    catalogue = build_catalogue(discovery)
    assert [item.plugin.version for item in discovery.found] == ["1.0"]
    assert not catalogue.conflicts
    assert ask(catalogue, "twice").phase("decode").kernel == "twice"
    (note,) = discovery.notes
    assert str(source) in note
    assert str(site / "twice-1.0.dist-info") in note


def test_an_editable_install_beside_a_regular_one_is_noted_with_both_paths(site: Path, tmp_path: Path) -> None:
    """importlib_metadata #410: two folders of one name are one distribution, the first on the path."""
    source = tmp_path / "elsewhere"
    shutil.copytree(site / "twice-1.0.dist-info", source / "twice.egg-info")
    (source / "twice.egg-info" / "METADATA").rename(source / "twice.egg-info" / "PKG-INFO")
    discovery = discover([str(site), str(source)])
    assert len(discovery.found) == 1
    (note,) = discovery.notes
    assert str(source / "twice.egg-info") in note
    assert str(site / "twice-1.0.dist-info") in note


def test_a_linked_lib64_is_no_second_folder(site: Path, tmp_path: Path) -> None:
    """importlib_metadata #481: the same real folder under another path is nothing to note."""
    link = tmp_path / "lib64"
    link.symlink_to(site, target_is_directory=True)
    discovery = discover([str(site), str(link)])
    assert len(discovery.found) == 1
    assert discovery.notes == ()


def test_one_name_from_two_distributions_is_a_conflict(site: Path) -> None:
    """setuptools #4170: two distributions that both say `same` are told, with both names."""
    write_plugin(site, "left", entry="same", kernel="same")
    write_plugin(site, "right", entry="same", kernel="same")
    catalogue = along(site)
    with pytest.raises(AliasConflict) as caught:
        ask(catalogue, "same")
    assert "left, right" in caught.value.message
    assert "plugin name 'same' is used by left and right" in catalogue.notes
    assert ask(catalogue, "twice").phase("decode").kernel == "twice"
