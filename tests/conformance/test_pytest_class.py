"""The kit as pytest runs it: a class of three lines, and an option that needs no file at all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import ordinary_environment
from tests.conformance.site import install

THREE_LINES = """\
from backstamp.testing.conformance import PluginConformance


class TestConformance(PluginConformance):
    distribution = "{name}"
"""
#: A kernel that drops the tree mask, so that five tests fail.
BROKEN = (
    ("backend.py", "from backstamp.factories", "from dataclasses import replace\n\nfrom backstamp.factories"),
    ("backend.py", "layer, state, new=new)", "layer, replace(state, tree=None), new=new)"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound plugin, a broken one, and one for hardware that is not here; no two claim a name."""
    folder = tmp_path_factory.mktemp("pytest")
    elsewhere = [("plugin.py", 'device="any"', 'device="npu"')]
    for name, changes in (("sound", ()), ("broken", BROKEN), ("npu", elsewhere)):
        own = [(file, old, f"{name}_{old}") for file, old in (("plugin.py", "echo"), ("plugin.py", "loopback"))]
        own += [("backend.py", "loopback", f"{name}_loopback")]
        install(folder, f"{name}-attention", (*changes, *own))
    return folder


def run(folder: Path, site: Path, *options: str) -> tuple[int, str]:
    """Exit status and output of pytest in a folder of its own."""
    program = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", *options]
    done = subprocess.run(
        program, capture_output=True, text=True, cwd=folder, env=ordinary_environment(site), check=False
    )
    return done.returncode, done.stdout + done.stderr


def written(tmp_path: Path, name: str) -> Path:
    """A folder with the three-line test of a distribution."""
    (tmp_path / "test_conformance.py").write_text(THREE_LINES.format(name=name), "utf-8")
    return tmp_path


def test_three_lines_check_a_plugin(tmp_path: Path, site: Path) -> None:
    """Every job is a test, named for its check, its row and its case; worker processes make no difference."""
    status, output = run(written(tmp_path, "sound-attention"), site, "-n", "2", "-v")
    assert status == 0, output
    assert int(re.search(r"(\d+) passed", output).group(1)) > 200
    assert "numerics-sound_loopback row 0 (mha, any): verify, tree mask, packed" in output


def test_a_broken_plugin_fails_as_tests_with_their_reason(tmp_path: Path, site: Path) -> None:
    """What is wrong is the failure's text, without a traceback through the kit."""
    status, output = run(written(tmp_path, "broken-attention"), site, "-k", "tree and numerics")
    assert status == 1
    assert "5 failed" in output
    assert "verify, tree mask, qlen: output is off by" in output
    assert "Traceback" not in output


def test_a_plugin_that_cannot_run_here_fails(tmp_path: Path, site: Path) -> None:
    """Skips alone would be green."""
    status, output = run(written(tmp_path, "npu-attention"), site)
    assert status == 1
    assert "no kernel of npu-attention runs on this machine: needs npu, got cpu" in output


def test_a_class_without_a_distribution_is_told_what_it_lacks(tmp_path: Path, site: Path) -> None:
    """And one whose plugin is not installed."""
    (tmp_path / "test_it.py").write_text(THREE_LINES.format(name="").replace('    distribution = ""', "    pass"))
    status, output = run(tmp_path, site)
    assert status != 0
    assert 'needs a line distribution = "..."' in output
    (tmp_path / "test_it.py").write_text(
        THREE_LINES.format(name="sound-attention") + '    checks = ("numbers",)\n', "utf-8"
    )
    status, output = run(tmp_path, site)
    assert status != 0
    assert "needs checks among declarations" in output
    (tmp_path / "test_it.py").unlink()
    status, output = run(written(tmp_path, "sound-atention"), site)
    assert status != 0
    assert "Did you mean sound-attention?" in output


def test_the_option_needs_no_file(tmp_path: Path, site: Path) -> None:
    """Alone it is all that runs; beside a path both do."""
    status, output = run(tmp_path, site, "--conformance", "sound-attention", "-k", "stamps")
    assert status == 0, output
    assert "7 passed" in output
    status, output = run(written(tmp_path, "broken-attention"), site, "--conformance", "sound-attention",
                         "test_conformance.py", "-k", "stamps")  # fmt: skip
    assert status == 0, output
    assert "14 passed" in output
