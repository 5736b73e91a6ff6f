"""Case 54, networkx #8115 and #8160: an entry name is text; what cannot be one is skipped or read by a written rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import PluginFailed
from backstamp.testing.dists import write_plugin
from tests.sites import ask, fresh_site, python

ODD = "[backstamp.plugins]\nbad-name = odd.plugin\n = odd.plugin\na b = odd.plugin\n- = odd.plugin\ngood = odd.plugin\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One distribution with every odd name, and a well-behaved one."""
    for folder in fresh_site(tmp_path, monkeypatch):
        write_plugin(folder, "odd", kernel="odd", points=ODD)
        write_plugin(folder, "good-kernels", kernel="good")
        yield folder


def test_core_imports_and_the_good_one_works(site: Path) -> None:
    """networkx #8115: nothing is generated from names, so that no name stops an import."""
    program = "import backstamp; print(len(backstamp.discover().found))"
    child = python(program, site)
    assert child.returncode == 0, child.stderr
    assert ask(build_catalogue(discover([str(site)])), "good").phase("decode").kernel == "good"


def test_each_odd_name_has_one_note(site: Path) -> None:
    """networkx #8160: normalised by the rule of `entries_of`, or skipped where nothing is left."""
    discovery = discover([str(site)])
    assert [found.plugin.name for found in discovery.found] == ["a_b", "bad_name", "good", "good_kernels"]
    for name, told in {"'bad-name'": "'bad_name'", "''": "skipped", "'a b'": "'a_b'", "'-'": "skipped"}.items():
        (note,) = [note for note in discovery.notes if f"entry {name}" in note]
        assert told in note
    assert len(discovery.notes) == 4


def test_a_failed_plugin_is_known_by_the_name_as_it_is_written(site: Path) -> None:
    """networkx #8160: whoever types what the metadata says is told the cause, not that the key is unknown."""
    points = "[backstamp.plugins]\nbroken-name = broken.plugin\n"
    write_plugin(site, "broken", source="import nothing_of_this_name", points=points)
    for key in ("broken-name", "broken_name"):
        with pytest.raises(PluginFailed, match="nothing_of_this_name"):
            ask(build_catalogue(discover([str(site)])), key)
