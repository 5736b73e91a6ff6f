"""`backstamp lint`: which files are read, the report, and the command."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from backstamp.cli.app import run
from backstamp.errors import BadInput
from backstamp.source_lint import RULES, lint_source
from backstamp.source_lint.allow_list import LIST_NAME
from tests.documents import ROOT
from tests.linted import ENTRY, READS, found, write


def test_our_own_tree_passes_with_nothing_left_to_note() -> None:
    """Core, plugins, tests, benches and documents; what may is in backstamp-lint.toml, each with its reason."""
    report = lint_source(ROOT, aliases=frozenset({"nsa", "hybrid_linear_attn"}))
    assert report.findings == ()
    assert report.passed


def test_every_python_file_below_is_read_and_no_other(tmp_path: Path) -> None:
    """No hidden folder, no cache, no virtual environment, no other kind of file."""
    names = [
        "a.py",
        "x/y/b.py",
        ".hidden/c.py",
        "__pycache__/d.py",
        "env/lib/e.py",
        "node_modules/f.py",
        "g.txt",
        "h.pyi",
    ]
    write(tmp_path, {**dict.fromkeys(names, READS), "env/pyvenv.cfg": ""})
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "folder.py").mkdir()
    assert found(lint_source(tmp_path)) == [("base-field", "a.py", 2), ("base-field", "x/y/b.py", 2)]


def test_a_single_file_is_read_whatever_its_name(tmp_path: Path) -> None:
    """A script has no suffix."""
    write(tmp_path, {"serve": READS, "b.py": READS})
    assert found(lint_source(tmp_path / "serve")) == [("base-field", "serve", 2)]


def test_where_there_is_no_python_nothing_ran(tmp_path: Path) -> None:
    """An empty folder is no pass, whatever its list says."""
    report = lint_source(write(tmp_path, {"readme.md": "", LIST_NAME: ""}))
    assert not report.ran
    assert not report.passed
    assert {outcome.reason for outcome in report.outcomes} == {"needs Python files, got none"}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (codecs.BOM_UTF8 + READS.encode(), 0),
        (b"# -*- coding: latin-1 -*-\nx = '\xe9'\n" + READS.encode(), 0),
        (READS.replace("\n", "\r\n").encode(), 0),
        ("café = 1\n".encode() + READS.encode(), 0),
        (b"def f(:\n  pass", 1),
        (b"x = 1\n\xff\xfe", 1),
        (b"# -*- coding: klingon -*-\n", 0),
        (codecs.BOM_UTF8 + b"# -*- coding: latin-1 -*-\n", 0),
        (b"x = 1\x00", 1),
        (b"print 'two'", 1),
        (b"x = " + b"(" * 500 + b")" * 500, 1),
        (b"x = " + b"-" * 100_000 + b"1", 0),
        (b"getattr(args, " + b"'a'+" * 2000 + b"'a')", 0),
    ],
    ids=["bom", "latin-1", "crlf", "utf-8", "syntax", "not-utf-8", "unknown-encoding", "bom-and-another", "null",
         "python-2", "parentheses", "signs", "a-text-too-deep-to-follow"],
)  # fmt: skip
def test_a_file_is_read_as_python_reads_it_or_is_a_fault(tmp_path: Path, data: bytes, line: int) -> None:
    """A byte order mark and an encoding line are followed; what cannot be parsed is a fault with its place."""
    report = lint_source(write(tmp_path, {"a.py": data, "b.py": ""}))
    (finding,) = report.findings
    assert finding.file == "a.py"
    if finding.rule == "unreadable":
        assert finding.level == "fault"
        assert "can parse" in finding.text
        assert finding.line >= min(line, 1) or "null" in finding.text
    else:
        assert data.endswith((b"'fa3'\n", b"'fa3'\r\n"))


def test_a_file_that_cannot_be_opened_is_a_fault(tmp_path: Path) -> None:
    """Not to be read is not to be clean; what every account is refused is the memory of a process."""
    (tmp_path / "a.py").symlink_to("/proc/self/mem")
    (finding,) = lint_source(write(tmp_path, {"b.py": ""})).findings
    assert (finding.level, finding.rule, finding.file) == ("fault", "unreadable", "a.py")
    assert "got Input/output error" in finding.text


def test_nothing_of_what_is_read_is_run_or_warned_about(tmp_path: Path) -> None:
    """No import, no side effect, and a file's own invalid escapes are not our warnings."""
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\nimport no_such_module\nx = '\\d'\nx is 'y'\n"
    assert lint_source(write(tmp_path, {"a.py": text})).passed
    assert not (tmp_path / "ran").exists()


def test_a_note_alone_passes(tmp_path: Path) -> None:
    """A fault fails the report, a note does not."""
    report = lint_source(write(tmp_path, {"a.py": "def f(backend): return backend != 'fa3'"}))
    assert [finding.level for finding in report.findings] == ["note"]
    assert report.passed


def test_every_rule_is_an_outcome(tmp_path: Path) -> None:
    """Whether or not it found something; the list is one where there is one."""
    report = lint_source(write(tmp_path, {"a.py": READS}))
    assert [outcome.name for outcome in report.outcomes] == list(RULES)
    assert [outcome.name for outcome in report.outcomes if outcome.status == "failed"] == ["base-field"]
    again = lint_source(write(tmp_path, {LIST_NAME: ""}))
    assert [outcome.name for outcome in again.outcomes] == [*RULES, "allow-list"]


@pytest.mark.parametrize(
    ("arguments", "who"),
    [
        ({"path": "nowhere"}, "lint"),
        ({"config": "nowhere.toml"}, "list"),
        ({"fields": ()}, "--field"),
        ({"fields": ("a.b",)}, "--field"),
        ({"aliases": frozenset({" "})}, "--alias"),
    ],
)
def test_what_is_not_there_is_bad_input(tmp_path: Path, arguments: dict[str, object], who: str) -> None:
    """Usage, not a finding."""
    with pytest.raises(BadInput) as caught:
        lint_source(**{"path": tmp_path, **arguments})  # type: ignore[arg-type]
    assert caught.value.who.startswith(who)


def lint(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int | str | None, str]:
    """Run the command; its exit status and what it printed."""
    with pytest.raises(SystemExit) as caught:
        run(["lint", *map(str, arguments)])
    return caught.value.code, capsys.readouterr().out


def test_the_command_says_where_why_and_what_to_do_in_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1; every line fits a terminal."""
    code, text = lint(capsys, write(tmp_path, {"engine/scheduler/a.py": READS, LIST_NAME: ENTRY}))
    assert code == 1
    for part in ("fault engine/scheduler/a.py:2 decide", "needs the half", "Ask the resolved pair", f"{LIST_NAME}:1"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_commands_exit_is_0_1_or_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Clean, nothing there to read, and no such path."""
    assert lint(capsys, write(tmp_path / "clean", {"a.py": ""}))[0] == 0
    empty = tmp_path / "empty"
    empty.mkdir()
    code, text = lint(capsys, empty)
    assert code == 1
    assert "nothing ran" in " ".join(text.split())
    assert lint(capsys, tmp_path / "nowhere")[0] == 2
    assert lint(capsys, tmp_path / "clean", "--config", tmp_path / "nowhere.toml")[0] == 2


def test_the_commands_json_is_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For tools, on standard output or in a file."""
    tree = write(tmp_path / "in", {"a.py": "flag = cfg.attn\nx = Built\nreturned = lambda: ('key', make())\n"})
    code, text = lint(capsys, tree, "--json", "--field", "attn", "--alias", "key")
    said = json.loads(text)
    assert (code, said["tool"], said["passed"]) == (1, "backstamp lint", False)
    assert [(row["rule"], row["line"]) for row in said["findings"]] == [("base-field", 1), ("alias-leaf", 3)]
    assert lint(capsys, tree, "--report", f"json={tmp_path / 'out.json'}")[0] == 0
    assert json.loads((tmp_path / "out.json").read_text())["passed"]


def test_the_command_knows_the_aliases_that_are_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`nsa` names `dsa` and no kernel."""
    code, text = lint(capsys, write(tmp_path, {"a.py": "def create(self): return 'nsa', Backend()"}))
    assert code == 1
    assert "the alias 'nsa'" in " ".join(text.split())


def test_a_report_explains_every_rule(tmp_path: Path) -> None:
    """Whoever meets one finding in code scanning never saw the rule: why it is one, and what to do."""
    explained = lint_source(write(tmp_path, {"a.py": READS})).rules
    assert set(explained) == {*RULES, "allow-list"}
    assert explained["base-field"].startswith("A launch that sets one half")
    assert explained["allow-list"] == "The list of exceptions only shrinks. Drop what nothing needs."
