"""What `backstamp new` writes, installed by pip in a fresh virtual environment and never edited: it holds, as it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from backstamp.new_plugin import write_plugin_project
from backstamp.testing.conformance import CHECKS
from tests.children import ordinary_environment
from tests.documents import ROOT
from tests.sites import command

NAME, PACKAGE = "zephyr-kernels", "zephyr_kernels"
KERNEL = f"{PACKAGE}_naive"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it was written."""
    folder = tmp_path_factory.mktemp("new")
    done = command("new", NAME, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / NAME


@pytest.fixture(scope="module")
def python(project: Path) -> Path:
    """The interpreter of a fresh environment in which it is installed with its `test` extra.

    What it requires is found where this process finds it: nothing is downloaded, and what is missing is an error.
    """
    folder = project.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # `addsitedir` reads the .pth files there too: packages under development are installed that way
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "everything_else.pth").write_text(line, "utf-8")
    interpreter = folder / "bin" / "python"
    options = ("--no-build-isolation", "--no-index", "--disable-pip-version-check")
    program = [sys.executable, "-m", "pip", "--python", interpreter, "install", *options, f"{project}[test]"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=project.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Successfully installed {NAME}-0.1.0" in done.stdout
    return interpreter


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """One program of the fresh environment, on a wide terminal; it must succeed."""
    kept = {name: value for name, value in ordinary_environment().items() if name != "PYTHONPATH"}
    environment = {**kept, "COLUMNS": "200", "NO_COLOR": "1"}
    program = [str(python), "-m", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_it_is_listed_and_read_without_being_imported(python: Path, tmp_path: Path) -> None:
    """Its wheel carries its declarations, which say what its module says."""
    listing = json.loads(run(python, "backstamp", "list", "--json", cwd=tmp_path).stdout)
    owners = {row["kernel"]: row["plugin"]["distribution"] for row in listing["kernels"] if row["slot"] == "attention"}
    assert owners[KERNEL] == NAME
    (origin,) = [row["origin"] for row in listing["plugins"] if row["distribution"] == NAME]
    assert origin.startswith("data ")
    assert origin.endswith(f"{PACKAGE}/backstamp.json")


@pytest.fixture(scope="module")
def reports(project: Path, python: Path) -> Path:
    """What the steps of its workflow leave behind, each of which exits 0 where the project lies."""
    workflow = yaml.safe_load((project / ".github" / "workflows" / "backstamp.yml").read_text("utf-8"))
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    checks = [step for step in steps if step.startswith(("backstamp check", "backstamp lint", "pytest"))]
    assert len(checks) == 3
    for step in checks:
        run(python, *step.split(), cwd=project)
    return project / "reports"


@pytest.mark.parametrize("name", ["check", "pytest"])
def test_it_passes_the_kit_unedited(name: str, reports: Path) -> None:
    """As a command and as its own test of three lines: nothing failed, and only what was not declared was left out."""
    root = ElementTree.parse(reports / f"{name}.xml").getroot()
    suites = list(root.iter("testsuite"))
    words = ("tests", "failures", "errors", "skipped")
    tests, failures, errors, skipped = (sum(int(suite.get(word)) for suite in suites) for word in words)
    assert (failures, errors) == (0, 0)
    assert tests - skipped > 100
    assert [one.get("message") for one in root.iter("skipped") if "declares no" not in one.get("message")] == []
    # of every check of the kit, numbers among them
    assert len(suites) >= (len(CHECKS) - 1 if name == "check" else 1)


def test_its_source_has_none_of_the_faults_of_the_field(reports: Path) -> None:
    """Neither a fault nor a note for code scanning to show."""
    (scan,) = json.loads((reports / "lint.sarif").read_text("utf-8"))["runs"]
    assert scan["invocations"][0]["executionSuccessful"] is True
    assert scan["results"] == []


@pytest.mark.parametrize(
    ("role", "phases"),
    [("target", {"prefill", "decode", "verify"}), ("draft", {"prefill", "draft_decode", "draft_extend"})],
)
def test_its_key_builds_its_kernel_in_every_phase(role: str, phases: set[str], python: Path, tmp_path: Path) -> None:
    """The stamps are its own."""
    flags = ("--attention-backend", PACKAGE, "--role", role, "--speculative-algorithm", "STANDALONE")
    built = json.loads(run(python, "backstamp", "build", "--fake", *flags, "--json", cwd=tmp_path).stdout)
    stamps = {phase: row["stamp"] for phase, row in built["phases"].items() if row["stamp"]}
    assert set(stamps) == phases
    assert {stamp["kernel"] for stamp in stamps.values()} == {KERNEL}
    assert {stamp["plugin"]["distribution"] for stamp in stamps.values()} == {NAME}


def test_the_demo_runs_on_it_and_equals_float64(python: Path, tmp_path: Path) -> None:
    """Target and draft, every phase, speculative output against plain."""
    flags = ("--attention-backend", PACKAGE, "--draft-attention-backend", PACKAGE, "--speculative-topk", "1")
    report = json.loads(run(python, "backstamp", "demo", *flags, "--json", cwd=tmp_path).stdout)
    assert report["equal"] is True
    assert len(report["errors"]) == 6
    assert max(report["errors"].values()) < report["error_bound"]


def test_a_core_from_a_wheel_writes_the_same_project(tmp_path: Path) -> None:
    """The wheel carries the template, hidden files too; what an installer compiled beside it is no part of it."""
    source = tmp_path / "core"
    # a copy: building leaves its traces beside the sources
    shutil.copytree(ROOT / "core", source, ignore=shutil.ignore_patterns("*.egg-info", "build", "__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    program = [sys.executable, "-m", "pip", "install", *options, "--target", tmp_path / "site", source]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    package = tmp_path / "site" / "backstamp"
    assert list((package / "template").rglob("*.pyc"))
    done = command("new", NAME, "--json", path=package.parent, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = write_plugin_project(NAME, tmp_path / "ours")
    assert json.loads(done.stdout)["files"] == list(ours.files)
    assert all((tmp_path / NAME / file).read_bytes() == (ours.folder / file).read_bytes() for file in ours.files)
