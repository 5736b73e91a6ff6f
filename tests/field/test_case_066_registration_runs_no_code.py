"""Case 66, edutelligence #862, networkx #7672: being installed runs nothing."""

from __future__ import annotations

from pathlib import Path

from backstamp.testing.dists import PLUGIN_SOURCE, write_plugin
from tests.sites import command, python

PATCH = "import backstamp\nimport backstamp.stamp\nbackstamp.stamp.read_stamp = backstamp.stamp.put_stamp\n"
PROGRAM = """\
import sys
import backstamp as b
import backstamp.stamp
before = backstamp.stamp.read_stamp
catalogue = b.build_catalogue(b.discover())
asked = b.make_launch(b.Requests(attention_backend="other"))
plan = b.resolve(asked, b.EngineFacts(), b.default_model(), b.load_host("epyc"), catalogue)
assert plan.phase("decode").kernel == "other"
assert ("attention", "patches") in catalogue.rows
assert backstamp.stamp.read_stamp is before
assert not [name for name in sys.modules if name.partition(".")[0] in ("patches", "other")]
"""


def patching(tmp_path: Path) -> Path:
    """A site with a plugin that patches core when it is imported, and another."""
    site = tmp_path / "site-packages"
    write_plugin(site, "other", kernel="other", carries_json=True)
    package = write_plugin(site, "patches", kernel="patches", carries_json=True)
    source = PATCH + PLUGIN_SOURCE.format(kernel="patches", package=package)
    (site / package / "plugin.py").write_text(source, "utf-8")
    (site / package / "backend.py").write_text("", "utf-8")
    return site


def test_a_patching_plugin_is_not_imported_and_what_it_declares_is_known(tmp_path: Path) -> None:
    """edutelligence #862: resolving another key leaves it alone; its capabilities are read from its metadata."""
    child = python(PROGRAM, patching(tmp_path))
    assert child.returncode == 0, child.stderr


def test_a_plugin_that_imports_core_at_its_top_is_no_circle(tmp_path: Path) -> None:
    """networkx #7672: discovery imports it while core is in use, and it may import all of core."""
    site = tmp_path / "site-packages"
    names = "import backstamp\nfrom backstamp import Plan, build, discover, resolve\n"
    source = names + PLUGIN_SOURCE.format(kernel="circle", package="circle")
    write_plugin(site, "circle", source=source)
    program = "import backstamp\nassert 'circle' in [f.plugin.name for f in backstamp.discover().found]\n"
    for line in ("", "import circle.plugin\n"):
        child = python(line + program, site)
        assert child.returncode == 0, child.stderr


def test_doctor_names_the_one_that_patches(tmp_path: Path) -> None:
    """edutelligence #862: in a child of its own it is imported, and what it changed is named."""
    child = command("doctor", path=patching(tmp_path))
    (line,) = [line for line in child.stdout.splitlines() if "changes Backstamp itself" in line]
    assert line.startswith("fault")
    assert "patches (patches 1.0)" in line
    assert "backstamp.stamp:read_stamp" in line
    assert child.returncode == 1
