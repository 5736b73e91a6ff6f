"""docs/ci.md: its workflow is the one new projects get, it is YAML, and it runs commands that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from backstamp.cli.app import app
from backstamp.formats import FORMATS
from backstamp.new_plugin import write_plugin_project
from tests.documents import FENCE, GUIDE_PLUGIN, ROOT, blocks

PAGE = "docs/ci.md"
WORKFLOW = ".github/workflows/backstamp.yml"
((_, TEXT),) = blocks(PAGE, f"yaml file={WORKFLOW}")
((_, GITLAB),) = blocks(PAGE, "yaml gitlab")
COMMANDS = typer.main.get_command(app).commands


def command_lines() -> list[str]:
    """Every `backstamp` command of the page's blocks, those inside YAML among them."""
    bodies = [match["body"] for match in FENCE.finditer((ROOT / PAGE).read_text("utf-8"))]
    return [line for body in bodies for line in re.findall(r"^[ -]*(?:run: )?(backstamp .*)$", body, re.MULTILINE)]


def test_the_workflow_is_the_one_a_new_project_gets(tmp_path: Path) -> None:
    """To the letter: whoever copies it has what `backstamp new` writes."""
    made = write_plugin_project(GUIDE_PLUGIN, tmp_path / "new")
    assert (made.folder / WORKFLOW).read_text("utf-8") == TEXT


def test_the_workflow_is_yaml_that_github_takes() -> None:
    """One job of steps that each run or use something; what is uploaded is what the steps wrote."""
    workflow = yaml.safe_load(TEXT)
    # YAML 1.1 reads the word `on` as true
    assert {"name", True, "permissions", "jobs"} == set(workflow)
    (job,) = workflow["jobs"].values()
    assert job["runs-on"]
    assert all(("run" in step) is not ("uses" in step) for step in job["steps"])
    written = {path for step in job["steps"] for path in re.findall(r"=(\w+)/[\w.]+", step.get("run", ""))}
    uses = {step["uses"].partition("@")[0]: step.get("with", {}) for step in job["steps"] if "uses" in step}
    assert written == {"reports"}
    assert uses["github/codeql-action/upload-sarif"]["sarif_file"] == "reports"
    assert uses["actions/upload-artifact"]["path"] == "reports"
    assert workflow["permissions"]["security-events"] == "write"
    # a step that did not run because an earlier one failed would hide what it finds
    checks = [step for step in job["steps"] if re.match("backstamp|pytest", step.get("run", ""))]
    assert len(checks) == 4
    assert all("success() || failure()" in step["if"] for step in checks[1:])


def test_the_gitlab_job_runs_the_same_checks_and_keeps_their_reports() -> None:
    """JUnit files land where the artifacts are looked for."""
    (job,) = yaml.safe_load(GITLAB).values()
    files = re.findall(r"junit=(\S+)", "\n".join(job["script"]))
    assert len(files) == 2
    assert all(re.fullmatch(r"reports/\w+\.xml", file) for file in files)
    assert job["artifacts"] == {"when": "always", "reports": {"junit": "reports/*.xml"}}


def test_the_page_names_every_form_of_a_report() -> None:
    """The table and `--report` know the same ones."""
    section = (ROOT / PAGE).read_text("utf-8").partition("## Reports")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(FORMATS)


@pytest.mark.parametrize("line", command_lines())
def test_every_command_of_the_page_exists_with_its_flags(line: str) -> None:
    """And every form it asks for is one there is."""
    _, name, *words = shlex.split(line)
    known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known
    forms = {word.partition("=")[0] for at, word in enumerate(words) if words[at - 1] == "--report"}
    assert forms <= set(FORMATS)


def test_the_page_runs_every_check_that_takes_reports() -> None:
    """A page without commands would hold whatever it said."""
    assert {line.split()[1] for line in command_lines()} == {"check", "lint", "parity", "lock", "diff"}
