"""Case 51, vllm #43987: stale metadata first on the path hides nothing, and a list that names nobody is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover, distributions_of, unmatched
from backstamp.testing.dists import write_plugin
from tests.sites import ask, fresh_site


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """src/mybk.egg-info without entry points, then site-packages with the entry."""
    for site in fresh_site(tmp_path, monkeypatch):
        stale = tmp_path / "src" / "mybk.egg-info"
        stale.mkdir(parents=True)
        (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mybk\nVersion: 0.1\n", "utf-8")
        write_plugin(site, "mybk", kernel="mybk")
        yield [str(tmp_path / "src"), str(site)]


def test_the_plugin_is_found_from_the_second_and_the_shadowing_path_is_told(paths: list[str]) -> None:
    """vllm #43987: the note names the folder that comes first and the one that is used."""
    discovery = discover(paths)
    assert [(item.plugin.name, item.plugin.version) for item in discovery.found] == [("mybk", "1.0")]
    (note,) = [note for note in discovery.notes if "stale" in note]
    assert str(Path(paths[0]) / "mybk.egg-info") in note
    assert str(Path(paths[1]) / "mybk-1.0.dist-info") in note
    assert ask(build_catalogue(discovery), "mybk").phase("decode").kernel == "mybk"


def test_metadata_in_the_other_order_shadows_nothing(paths: list[str]) -> None:
    """vllm #43987: what comes second on the path is no news."""
    assert discover(paths[::-1]).notes == ()


def test_a_listed_name_that_nothing_found_has_is_told_with_what_was_found(paths: list[str]) -> None:
    """vllm #43987: `nosuch` is named, and so is what there is, for a discovery and for its catalogue."""
    discovery = discover(paths)
    for plugins in (discovery, build_catalogue(discovery)):
        assert unmatched(plugins, ["nosuch", "MyBK"]) == ("nosuch",)
        assert distributions_of(plugins) == ("mybk",)
