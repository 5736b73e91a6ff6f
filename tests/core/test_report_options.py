"""`--report`: where each form of a report goes, what is refused, and the exit status."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer

from backstamp.cli import app as cli
from backstamp.cli.report_options import Reports, emit
from backstamp.errors import BadInput
from backstamp.findings import Finding, Outcome, Report

PASSED = Outcome(check="rows", name="acme")
FAILED = Outcome(check="rows", name="other", findings=(Finding("fault", "row", "acme", "needs a row, got none"),))
SKIPPED = Outcome(check="numerics", name="acme", reason="needs a GPU")


def report(*outcomes: Outcome) -> Report:
    """A report of `backstamp check`."""
    return Report(tool="backstamp check", subject="acme", outcomes=outcomes)


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [((PASSED,), 0), ((PASSED, SKIPPED), 0), ((PASSED, FAILED), 1), ((SKIPPED,), 1), ((), 1)],
    ids=["passed", "some-skipped", "failed", "skips-alone", "nothing"],
)
def test_the_status_is_0_where_something_ran_and_nothing_failed(outcomes: tuple[Outcome, ...], status: int) -> None:
    """Nothing ran is no pass."""
    assert emit(report(*outcomes), None) == status


def test_several_forms_go_to_several_files_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in a folder that is made for it; the text stays on the terminal."""
    xml, sarif = tmp_path / "reports" / "junit.xml", tmp_path / "other" / "deep" / "check.sarif"
    assert emit(report(FAILED), [f"junit={xml}", f"sarif={sarif}"]) == 1
    assert ET.parse(xml).getroot().get("failures") == "1"
    assert json.loads(sarif.read_text("utf-8"))["version"] == "2.1.0"
    assert "0 passed, 1 failed" in capsys.readouterr().out


def test_one_form_may_take_the_place_of_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside files; `--json` is short for `--report json`, asked for twice it is asked for once."""
    assert emit(report(PASSED), [f"junit={tmp_path / 'a.xml'}", "json"], json_flag=True) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_a_name_with_an_equals_sign_is_a_file(tmp_path: Path) -> None:
    """The form ends at the first."""
    emit(report(PASSED), [f"json={tmp_path / 'a=b.json'}"])
    assert (tmp_path / "a=b.json").is_file()


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        (["html"], "one of json, junit, github, sarif"),
        (["junit="], "a file after the ="),
        (["junit", "json"], "one form for standard output"),
        (["junit=a.xml", "sarif=./a.xml"], "one form for a.xml"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    asked: list[str], needed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a usage error, which exits 2, and before anything is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as caught:
        emit(report(PASSED), asked)
    assert caught.value.needed == needed
    assert list(tmp_path.iterdir()) == []


def test_a_form_nobody_knows_is_refused_before_anything_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of minutes must not end in a typing error."""
    app = typer.Typer()

    @app.command()
    def check(reports: Reports = None) -> None:
        print("checked")

    with pytest.raises(BadInput, match="html"):
        app(["--report", "html"], standalone_mode=False)
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_loses_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text is printed and the other files are there before the refusal."""
    (tmp_path / "taken").write_text("", "utf-8")
    with pytest.raises(BadInput, match="a file that can be written"):
        emit(report(FAILED), [f"junit={tmp_path / 'taken' / 'a.xml'}", f"json={tmp_path / 'a.json'}"])
    assert "1 failed" in capsys.readouterr().out
    assert (tmp_path / "a.json").is_file()


def test_the_refusal_of_a_report_exits_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Usage, like any flag that cannot be read."""
    app = typer.Typer()
    app.command()(lambda: emit(report(PASSED), ["html"]))
    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as caught:
        cli.run([])
    assert caught.value.code == 2
