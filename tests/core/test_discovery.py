"""Discovery over real files: isolation, causes, duplicates, and declarations read as data."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import AliasConflict, PluginFailed
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.resolution import resolve
from backstamp.testing.dists import PLUGIN_SOURCE, write_distribution, write_plugin
from backstamp.testing.hosts import described_host
from tests.sites import fresh_site

BROKEN = {
    "bad_import": "import nothing_of_this_name",
    "bad_native": "raise ImportError('lib.so: undefined symbol: _Z3foo')",
    "exits": "raise SystemExit(3)",
    "raises": "raise RuntimeError('driver\\n::error:: [red]down[/red]')",
    "syntax": "def broken(:",
    "no_hooks": "VALUE = 1",
    "bad_hook": "from backstamp.hookspecs import hookimpl\n@hookimpl\ndef backstamp_offers(engine):\n    return ()",
    "unknown_hook": "from backstamp.hookspecs import hookimpl\n@hookimpl\ndef backstamp_kernels():\n    return ()",
    "bad_rows": "from backstamp.hookspecs import hookimpl\n@hookimpl\ndef backstamp_offers():\n    return ('k',)",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site folder on the path; modules imported from it are forgotten afterwards."""
    yield from fresh_site(tmp_path, monkeypatch)


@pytest.mark.parametrize("fault", BROKEN)
def test_one_broken_plugin_leaves_the_others_alone(site: Path, fault: str) -> None:
    """xarray #5136: a plugin that raises, exits or declares nonsense is listed with its cause, the rest resolve."""
    write_plugin(site, "good-kernels", kernel="good")
    write_plugin(site, f"{fault}-kernels", kernel=fault, source=BROKEN[fault])
    catalogue = build_catalogue(discover([str(site)]))
    assert ("attention", "good") in catalogue.rows
    assert [failure.plugin.distribution for failure in catalogue.failures] == [f"{fault}-kernels"]
    assert catalogue.failures[0].cause


@pytest.mark.parametrize("fault", ["bad_import", "exits", "raises"])
def test_asking_for_a_failed_plugins_key_raises_its_first_cause(site: Path, fault: str) -> None:
    """The failure is remembered: its key is refused with the cause chained, never as unknown."""
    write_plugin(site, "good-kernels", kernel="good")
    write_plugin(site, "acme", entry=fault, source=BROKEN[fault])
    catalogue = build_catalogue(discover([str(site)]))
    launch = make_launch(Requests(attention_backend=fault))
    with pytest.raises(PluginFailed) as caught:
        resolve(launch, EngineFacts(), default_model(), described_host("epyc"), catalogue)
    assert caught.value.__cause__ is catalogue.failures[0].error
    assert "acme" in caught.value.message


def test_auto_resolves_beside_a_failed_plugin_and_warns(site: Path) -> None:
    """vllm #48277: a swallowed plugin failure put a server on the CPU for hours; every auto plan carries it."""
    write_plugin(site, "good-kernels", kernel="good")
    write_plugin(site, "accel", source=BROKEN["bad_import"])
    catalogue = build_catalogue(discover([str(site)]))
    plan = resolve(make_launch(Requests()), EngineFacts(), default_model(), described_host("epyc"), catalogue)
    assert plan.phase("decode").kernel == "good"
    (warning,) = [warning for warning in plan.warnings if warning.code == "failed"]
    assert "accel" in warning.text
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in warning.text


def test_a_failed_plugin_owns_the_names_its_source_shows(site: Path) -> None:
    """A kernel named differently from its entry point is still told apart from an unknown key."""
    source = "import nothing_of_this_name\n" + PLUGIN_SOURCE.format(kernel="acme_attn", package="acme")
    write_plugin(site, "acme", source=source)
    assert "acme_attn" in build_catalogue(discover([str(site)])).failures[0].names


def test_a_source_that_is_no_table_is_not_read_for_names(site: Path) -> None:
    """A failed plugin's module of megabytes would be parsed at every discovery; a pipe would be waited for."""
    named = "import nothing_of_this_name\n" + PLUGIN_SOURCE.format(kernel="huge_attn", package="huge")
    write_plugin(site, "huge", source=named + "#" * (2 << 20))
    write_plugin(site, "piped", target="piped.pipe")
    os.mkfifo(site / "piped" / "pipe.py")
    (site / "piped" / "pipe").mkdir()
    (site / "piped" / "pipe" / "__init__.py").write_text("raise ImportError('no')", "utf-8")
    names = {failure.plugin.name: failure.names for failure in discover([str(site)]).failures}
    assert names == {"huge": {"huge"}, "piped": {"piped"}}


def test_a_missing_attribute_is_a_failure(site: Path) -> None:
    """An entry point `module:attr` that names nothing is listed with its cause."""
    write_plugin(site, "acme", target="acme.plugin:Missing")
    (failure,) = discover([str(site)]).failures
    assert "AttributeError" in failure.cause
    assert "Missing" in failure.cause


def test_keyboard_interrupt_passes(site: Path) -> None:
    """Isolation never swallows the operator's own interrupt."""
    write_plugin(site, "acme", source="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover([str(site)])


def test_carried_json_is_read_without_importing(site: Path) -> None:
    """Declarations are data: with backstamp.json present no plugin module runs at discovery."""
    write_plugin(site, "carried", kernel="carried", carries_json=True)
    found = discover([str(site)]).found
    assert [offer.kernel for offer in found[0].declared.offers] == ["carried"]
    assert "carried.plugin" not in sys.modules
    assert "carried" not in sys.modules


def test_two_distributions_with_one_kernel_poison_that_name_only(site: Path) -> None:
    """A conflict names both distributions; every other name resolves."""
    write_plugin(site, "left", kernel="same")
    write_plugin(site, "right", kernel="same")
    write_plugin(site, "good-kernels", kernel="good")
    catalogue = build_catalogue(discover([str(site)]))
    launch = make_launch(Requests(attention_backend="same"))
    with pytest.raises(AliasConflict) as caught:
        resolve(launch, EngineFacts(), default_model(), described_host("epyc"), catalogue)
    assert "left, right" in caught.value.message
    qualified = make_launch(Requests(attention_backend="left:same"))
    prefill = resolve(qualified, EngineFacts(), default_model(), described_host("epyc"), catalogue).phase("prefill")
    assert (prefill.kernel, prefill.plugin.distribution) == ("same", "left")
    plan = resolve(make_launch(Requests()), EngineFacts(), default_model(), described_host("epyc"), catalogue)
    assert plan.phase("prefill").kernel == "good"
    assert [warning.code for warning in plan.warnings if "left and right" in warning.text] == ["shadowed"]


def test_the_same_distribution_twice_counts_once(site: Path, tmp_path: Path) -> None:
    """importlib_metadata #410: two metadata folders of one name are one distribution, and both paths are noted."""
    second = tmp_path / "second" / "site-packages"
    write_plugin(site, "twice", kernel="twice")
    write_plugin(second, "twice", kernel="twice")
    discovery = discover([str(site), str(second)])
    assert len(discovery.found) == 1
    assert str(second) in discovery.notes[0]
    assert not build_catalogue(discovery).conflicts


def test_a_distribution_in_the_current_directory_is_listed_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installing is consent; standing in a folder is not."""
    write_plugin(tmp_path, "local", source="raise SystemExit('must not run')")
    monkeypatch.chdir(tmp_path)
    discovery = discover([str(tmp_path)])
    assert not discovery.found
    assert not discovery.failures
    assert "current directory" in discovery.notes[0]


def test_a_marker_that_holds_is_a_contract(site: Path) -> None:
    """A requirement on backstamp may carry a marker."""
    write_plugin(site, "marked", kernel="marked", requires=("backstamp>=0.2,<0.3; python_version>'3.0'",))
    assert [found.plugin.name for found in discover([str(site)]).found] == ["marked"]


@pytest.mark.parametrize(
    ("requires", "word"),
    [(("backstamp>=2,<3",), "needs contract"), ((), "declares no contract")],
    ids=["other-contract", "no-contract"],
)
def test_a_plugin_for_another_contract_is_not_imported(site: Path, requires: tuple[str, ...], word: str) -> None:
    """The contract range is the distribution's own requirement on backstamp; outside it nothing runs."""
    write_plugin(site, "other", source="raise SystemExit('must not run')", requires=requires)
    (failure,) = discover([str(site)]).failures
    assert word in failure.cause


def test_causes_cannot_write_on_the_console(site: Path) -> None:
    """Control characters and CI command prefixes in an exception reach no console as such."""
    write_plugin(site, "loud", source=BROKEN["raises"])
    (failure,) = discover([str(site)]).failures
    assert "\n" not in failure.cause
    assert "::" not in failure.cause


def test_distributions_without_plugins_are_passed_over(site: Path) -> None:
    """Most of a site folder is no plugin, and costs no parsing."""
    write_distribution(site, "library", entry_points="[console_scripts]\nx = y:z\n")
    write_distribution(site, "metadata-only")
    assert discover([str(site)]) == type(discover([]))(found=(), failures=(), notes=())


METADATA = {
    "empty": b"",
    "no-name": b"Metadata-Version: 2.1\nVersion: 1.0\nRequires-Dist: backstamp>=0.2,<0.3\n",
    "no-version": b"Metadata-Version: 2.1\nName: odd\nRequires-Dist: backstamp>=0.2,<0.3\n",
    "binary": b"\xff\xfe\x00",
    "missing": None,
}


@pytest.mark.parametrize("damage", METADATA)
def test_damaged_metadata_stops_nobody_else(site: Path, damage: str) -> None:
    """An empty, cut or missing METADATA file is that distribution's affair: the others resolve."""
    write_plugin(site, "good-kernels", kernel="good")
    write_plugin(site, "odd", kernel="odd")
    path = site / "odd-1.0.dist-info" / "METADATA"
    path.unlink()
    if METADATA[damage] is not None:
        path.write_bytes(METADATA[damage])
    catalogue = build_catalogue(discover([str(site)]))
    assert ("attention", "good") in catalogue.rows
    owners = {found.plugin.distribution for found in catalogue.found} | {
        failure.plugin.distribution for failure in catalogue.failures
    }
    assert "odd" in owners


def test_unreadable_entry_points_are_noted(site: Path) -> None:
    """A binary entry_points.txt is told, and the others resolve."""
    write_plugin(site, "good-kernels", kernel="good")
    write_plugin(site, "odd", kernel="odd")
    (site / "odd-1.0.dist-info" / "entry_points.txt").write_bytes(b"[backstamp.plugins]\n\xff\xfe = x")
    discovery = discover([str(site)])
    assert [found.plugin.distribution for found in discovery.found] == ["good-kernels"]
    assert "odd-1.0.dist-info" in discovery.notes[0]


def test_what_a_plugin_prints_at_import_is_no_output_of_ours(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chatty plugin must not land in somebody's JSON."""
    write_plugin(site, "chatty", source="print('hello')\n" + PLUGIN_SOURCE.format(kernel="chatty", package="chatty"))
    assert [found.plugin.name for found in discover([str(site)]).found] == ["chatty"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err


@pytest.mark.parametrize("entry", ["bad-name", "a b", "ünïcode"])
def test_odd_entry_names_are_no_danger(site: Path, entry: str) -> None:
    """networkx #8115: an entry name that is no identifier is carried as text."""
    write_plugin(site, "odd", kernel="odd", entry=entry)
    write_plugin(site, "good-kernels", kernel="good")
    catalogue = build_catalogue(discover([str(site)]))
    assert ("attention", "good") in catalogue.rows
    assert ("attention", "odd") in catalogue.rows
