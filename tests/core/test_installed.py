"""Metadata folders: seen twice, half removed, in the current directory, and entries of every shape."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp.discovery import discover
from backstamp.installed import entries_of, list_installed
from backstamp.testing.dists import write_plugin
from tests.sites import along, fresh_site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty site folder on the path."""
    yield from fresh_site(tmp_path, monkeypatch)


def entries(site: Path, lines: str) -> tuple[list[tuple[str, str]], list[str]]:
    """What a group's lines come to: name and target, and the notes."""
    write_plugin(site, "dist", points=f"[console_scripts]\nx = y:z\n\n[backstamp.plugins]\n{lines}\n[other]\na = b\n")
    notes: list[str] = []
    (installed,) = list_installed([str(site)]).plugins
    return [(entry.name, entry.fault or entry.target) for entry in entries_of(installed, notes)], notes


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("k = dist.plugin", "dist.plugin"),
        ("k=dist.plugin:Plugin", "dist.plugin:Plugin"),
        ("k = dist.plugin : Plugin.inner", "dist.plugin:Plugin.inner"),
        ("k = dist.plugin [cuda]", "dist.plugin"),
        ("k = dist.plugin:Plugin [cuda, rocm]", "dist.plugin:Plugin"),
    ],
)
def test_a_target_is_read_without_its_extras(site: Path, line: str, target: str) -> None:
    """`module [extra]` is the same module."""
    assert entries(site, line) == ([("k", target)], [])


@pytest.mark.parametrize("value", ["", "!", "dist plugin", "dist.plugin:", "../evil", "dist.plugin; import os"])
def test_a_value_that_is_no_target_is_a_fault_of_that_name_alone(site: Path, value: str) -> None:
    """The entry beside it is read."""
    found, _ = entries(site, f"bad = {value}\ngood = dist.plugin")
    assert found[1] == ("good", "dist.plugin")
    assert "is not readable" in found[0][1]


def test_two_entries_of_one_name_are_a_fault_of_that_name(site: Path) -> None:
    """Both targets are named, and neither wins by its place in the file."""
    assert entries(site, "k = dist.a\nk = dist.b\nj = dist.c") == (
        [("k", "two entries of this name: dist.a and dist.b"), ("j", "dist.c")],
        [],
    )
    assert "two entries of this name" in discover([str(site)]).failures[1].cause


def test_the_same_entry_twice_is_noted(site: Path) -> None:
    """One target, one plugin."""
    found, notes = entries(site, "k = dist.a\nk = dist.a")
    assert found == [("k", "dist.a")]
    assert "listed twice" in notes[0]


def test_a_half_removed_folder_gives_way_to_a_whole_one(site: Path, tmp_path: Path) -> None:
    """An interrupted upgrade leaves entry points without metadata first on the path; the plugin is not lost."""
    write_plugin(site, "mine", kernel="mine")
    torn = tmp_path / "torn"
    shutil.copytree(site / "mine-1.0.dist-info", torn / "mine-0.9.dist-info")
    (torn / "mine-0.9.dist-info" / "METADATA").unlink()
    discovery = discover([str(torn), str(site)])
    assert [found.plugin.version for found in discovery.found] == ["1.0"]
    assert discovery.failures == ()
    assert "mine-0.9.dist-info" in discovery.notes[0]


def test_what_an_interrupted_uninstall_leaves_is_not_read(site: Path) -> None:
    """pip renames a folder to `~ame` before it deletes it; that is no second distribution."""
    write_plugin(site, "mine", kernel="mine")
    shutil.copytree(site / "mine-1.0.dist-info", site / "~ine-1.0.dist-info")
    discovery = discover([str(site)])
    assert len(discovery.found) == 1
    assert [note for note in discovery.notes if "interrupted uninstall" in note and "~ine-1.0" in note]


def test_an_empty_folder_is_nobody(site: Path) -> None:
    """And stops nobody."""
    (site / "empty-1.0.dist-info").mkdir()
    (site / "other.egg-info").mkdir()
    write_plugin(site, "mine", kernel="mine")
    discovery = discover([str(site)])
    assert [found.plugin.name for found in discovery.found] == ["mine"]
    assert discovery.notes == ()


def test_metadata_cannot_take_another_distributions_name(site: Path) -> None:
    """A folder is named by the installer: whoever claims another's name inside is read under his own."""
    write_plugin(site, "honest", kernel="honest")
    write_plugin(site, "aaa", kernel="aaa")
    metadata = site / "aaa-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text("utf-8").replace("Name: aaa", "Name: honest"), "utf-8")
    discovery = discover([str(site)])
    assert [found.plugin.distribution for found in discovery.found] == ["aaa", "honest"]
    assert "claims the name 'honest'" in discovery.notes[0]


@pytest.mark.parametrize("way", ["empty", "dot", "relative", "linked", "real", "below"])
def test_nothing_is_loaded_through_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """However the path spells the folder somebody stands in, standing there is no consent."""
    here = tmp_path / "here"
    write_plugin(here / "below" if way == "below" else here, "local", source="raise SystemExit('must not run')")
    (tmp_path / "link").symlink_to(here, target_is_directory=True)
    monkeypatch.chdir(here)
    spelled = {
        "empty": "",
        "dot": ".",
        "relative": os.path.join("..", "here"),
        "linked": str(tmp_path / "link"),
        "real": str(here),
        "below": "below",
    }
    discovery = discover([spelled[way]])
    assert discovery.found == ()
    assert discovery.failures == ()
    (note,) = discovery.notes
    assert "found through the current directory" in note
    assert "not loaded" in note


def test_a_folder_called_site_packages_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name does not make the current directory an installation."""
    site = tmp_path / "site-packages"
    write_plugin(site, "local", source="raise SystemExit('must not run')")
    monkeypatch.chdir(site)
    discovery = discover([str(site)])
    assert (discovery.found, discovery.failures) == ((), ())


def test_a_site_folder_elsewhere_is_loaded_wherever_one_stands(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the folder itself is refused."""
    write_plugin(site, "mine", kernel="mine")
    monkeypatch.chdir(tmp_path)
    assert ("attention", "mine") in along(site).rows
