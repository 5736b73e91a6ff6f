"""Contract versions: which range is read by which version, what is refused, and how older rows are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import backstamp
from backstamp import API_VERSION, API_VERSIONS
from backstamp.contract import contract_of, note_of, upgrade
from backstamp.declared import Declared, declared_from_json, declared_to_json
from backstamp.discovery import discover, import_plugin, read_again
from backstamp.testing.dists import PLUGIN_SOURCE, cpu_offer, write_plugin
from tests.sites import fresh_site

READ = {
    ">=0.2,<0.3": "0.2",
    ">=0.1": "0.2",
    ">=0.1,<0.3": "0.2",
    "~=0.2.0": "0.2",
    "==0.2.*": "0.2",
    ">=0.1,<0.2": "0.1",
    ">=0.1.4,<0.2": "0.1",
    "==0.1.3": "0.1",
    "<0.2": "0.1",
    "(>=0.1,<0.2)": "0.1",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty site folder on the path."""
    yield from fresh_site(tmp_path, monkeypatch)


def test_the_present_version_comes_first_and_two_are_read() -> None:
    """N and N-1, and the version of core is of the present contract."""
    assert API_VERSIONS == (API_VERSION, "0.1")
    assert backstamp.__version__.startswith(f"{API_VERSION}.")


@pytest.mark.parametrize(("written", "version"), READ.items(), ids=list(READ))
def test_a_range_is_read_by_the_newest_version_it_reaches(written: str, version: str) -> None:
    """A range that holds the present contract is of the present contract, whatever else it holds."""
    assert contract_of([f"backstamp {written}"], "plugin p") == version


@pytest.mark.parametrize("written", [">=2,<3", ">=0.3", "<0.1", "==0.0.9", ">=0.2.1,<0.2.2"])
def test_a_range_that_reaches_neither_is_refused_with_both_sides(written: str) -> None:
    """The text is the author's own."""
    with pytest.raises(ImportError) as caught:
        contract_of([f"backstamp{written}"], "plugin p (d 1)")
    assert str(caught.value) == f"plugin p (d 1) needs contract backstamp{written}, this core has {API_VERSION}"


@pytest.mark.parametrize(
    "requires", [(), ("backstamp",), ("backstamp-cpu>=0.2",), ("backstamp>=0.2; python_version<'3'",)]
)
def test_no_range_that_holds_here_is_no_contract(requires: tuple[str, ...]) -> None:
    """A name without a range promises nothing, nor does a requirement of another distribution or Python."""
    with pytest.raises(ImportError, match="declares no contract"):
        contract_of(requires, "plugin p")


def test_several_requirements_hold_together() -> None:
    """Two lines are one range, and extras and case do not hide the name."""
    assert contract_of(["Backstamp[cli]>=0.1", "backstamp<0.2"], "plugin p") == "0.1"


def test_only_an_older_contract_has_a_note() -> None:
    """The note says until when it is read."""
    assert note_of("plugin p", API_VERSION) is None
    assert note_of("plugin p", "0.1") == "plugin p: written for contract 0.1, which is read until backstamp 0.3"


def test_the_older_default_is_filled_in_and_nothing_that_was_said_is_changed() -> None:
    """0.1 meant `internal_causal` where a row said nothing; 0.2 takes rows as they are."""
    offer = replace(cpu_offer("k", "p"), mask_format=None)
    masked = replace(offer, mask_format="2d")
    declared = Declared(offers=(offer, masked))
    assert [row.mask_format for row in upgrade(declared, "0.1").offers] == ["internal_causal", "2d"]
    assert upgrade(declared, API_VERSION) == declared


def test_a_carried_file_and_its_module_are_read_by_one_contract(site: Path) -> None:
    """An older wheel's backstamp.json and its plugin.py say the same, read again at build too."""
    package = write_plugin(site, "older", requires=("backstamp>=0.1,<0.2",), carries_json=True)
    source = PLUGIN_SOURCE.format(kernel="older", package=package).replace('mask_format="internal_causal",', "")
    (site / package / "plugin.py").write_text(source, "utf-8")
    bare = Declared(offers=(replace(cpu_offer("older", package), mask_format=None),))
    (site / package / "backstamp.json").write_text(declared_to_json(bare), "utf-8")
    assert declared_from_json(declared_to_json(bare), "p") == bare
    (found,) = discover([str(site)]).found
    assert found.declared.offers[0].mask_format == "internal_causal"
    assert read_again(found) == found.declared
    assert import_plugin(found.module) == bare
