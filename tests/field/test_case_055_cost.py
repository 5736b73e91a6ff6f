"""Case 55, rdflib #952, papis #217, colcon-core #614, xarray #10937: nothing is scanned before it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstamp.testing.dists import write_distribution, write_plugin
from tests.sites import python

BACKEND = """\
from backstamp.factories import Built

class Backend:
    def plan(self, batch):
        return batch

    def forward(self, q, kv, layer, state):
        return q

def build(request):
    return Built(request.kernel, Backend())
"""
WATCH = """\
import sys
site = sys.argv[1]
touched = []
def hear(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and str(arguments[0]).startswith(site):
        touched.append(str(arguments[0]))
sys.addaudithook(hear)
def plugins():
    return sorted(name for name in sys.modules if name.startswith("kernels_") and name.endswith(".plugin"))
import backstamp as b
assert touched == [], touched
assert "importlib_metadata" not in sys.modules
"""
RESOLVE = """\
catalogue = b.build_catalogue(b.discover())
host = b.load_host("epyc")
def resolved():
    asked = b.make_launch(b.Requests(attention_backend="kernels_3"))
    return b.resolve(asked, b.EngineFacts(), b.default_model(), host, catalogue)
plan = resolved()
assert sum(found.plugin.distribution.startswith("kernels-") for found in catalogue.found) == 5, catalogue.failures
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 distributions, 5 of them plugins as wheels carry them."""
    folder = tmp_path_factory.mktemp("many") / "site-packages"
    for at in range(595):
        write_distribution(folder, f"library-{at}", entry_points="[console_scripts]\nx = y:z\n")
    for at in range(5):
        package = write_plugin(folder, f"kernels-{at}", carries_json=True)
        (folder / package / "backend.py").write_text(BACKEND, "utf-8")
    return folder


def run(site: Path, program: str) -> None:
    """Run a program under watch; it fails by assertion."""
    child = python(WATCH + program, site, str(site))
    assert child.returncode == 0, child.stderr


def test_importing_core_reads_no_metadata_and_no_plugin(site: Path) -> None:
    """papis #217: import costs what import must."""
    run(site, "assert plugins() == []")


def test_resolving_and_building_one_key_imports_one_plugin(site: Path) -> None:
    """xarray #10937: an explicit choice does not pay for the others."""
    end = "assert plugins() == [], plugins()\nb.build(plan, b.RunnerShape(), catalogue)\n"
    run(site, f"{RESOLVE}{end}assert plugins() == ['kernels_3.plugin'], plugins()\n")


def test_a_second_resolve_reads_no_disk(site: Path) -> None:
    """colcon-core #614: a catalogue is a snapshot."""
    run(site, f"{RESOLVE}assert touched\ntouched.clear()\nassert resolved() == plan\nassert touched == [], touched\n")


def test_what_is_installed_afterwards_is_seen_by_the_next_discovery(tmp_path: Path) -> None:
    """rdflib #952: nothing is cached past a change of the folder, so that refreshing is discovering again."""
    site = tmp_path / "site-packages"
    write_plugin(site, "first", kernel="first", carries_json=True)
    program = (
        "import sys\nfrom pathlib import Path\nimport backstamp as b\n"
        "from backstamp.testing.dists import write_plugin\n"
        "before = [found.plugin.name for found in b.discover().found]\n"
        "write_plugin(Path(sys.argv[1]), 'second', kernel='second', carries_json=True)\n"
        "after = [found.plugin.name for found in b.discover().found]\n"
        "assert set(after) - set(before) == {'second'}, (before, after)\n"
    )
    child = python(program, site, str(site))
    assert child.returncode == 0, child.stderr
