"""`backstamp-lint.toml`: one file may break one rule, for a reason, and the list can only shrink."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from backstamp.source_lint import lint_source
from backstamp.source_lint.allow_list import LIST_NAME
from tests.linted import ENTRY, READS, found, write


def test_a_listed_file_may_and_no_other(tmp_path: Path) -> None:
    """One rule, one file."""
    tree = write(tmp_path, {"a.py": READS, "b.py": READS, LIST_NAME: ENTRY})
    assert found(lint_source(tree)) == [("base-field", "b.py", 2)]


@pytest.mark.parametrize(
    ("entry", "needed"),
    [
        (ENTRY.replace("a.py", "gone.py"), "a file that is there"),
        (ENTRY.replace("a.py", "clean.py"), "a file that breaks base-field"),
        (ENTRY.replace("base-field", "none-is-yes"), "a file that breaks none-is-yes"),
        (ENTRY.replace("base-field", "no-such-rule"), "a rule (unreadable, base-field"),
        (ENTRY.replace("base-field", "allow-list"), "a rule (unreadable, base-field"),
        (ENTRY.replace("makes the pair", " "), "the reason why the file may"),
        (ENTRY.replace('reason = "makes the pair"\n', ""), "rule, file, reason and nothing else"),
        (ENTRY + 'line = 3\n', "rule, file, reason and nothing else"),
        (ENTRY.replace('"makes the pair"', "3"), "text for each key"),
        (ENTRY.replace("a.py", "*.py"), "a file that is there"),
        (ENTRY.replace("a.py", "./a.py"), "the path of one file below"),
        (ENTRY.replace("a.py", "x/../a.py"), "the path of one file below"),
        (ENTRY.replace("a.py", "/a.py"), "the path of one file below"),
        (ENTRY.replace('"a.py"', "'x\\a.py'"), "the path of one file below"),
        (ENTRY.replace("a.py", "x"), "a file that is there"),
    ],
)  # fmt: skip
def test_an_entry_that_allows_nothing_is_a_fault_in_the_list(tmp_path: Path, entry: str, needed: str) -> None:
    """The list only shrinks: gone, clean, unknown, without a reason, or a pattern; each at its own line."""
    tree = write(tmp_path, {"a.py": READS, "clean.py": "", "x/b.py": "", LIST_NAME: f"# ours\n\n{ENTRY}\n{entry}"})
    (finding,) = lint_source(tree).findings
    assert (finding.level, finding.rule, finding.file, finding.line) == ("fault", "allow-list", LIST_NAME, 8)
    assert f"needs {needed}" in finding.text


def test_a_second_entry_for_a_file_and_a_rule_is_a_fault(tmp_path: Path) -> None:
    """One would stay behind when the other goes."""
    (finding,) = lint_source(write(tmp_path, {"a.py": READS, LIST_NAME: ENTRY + "\n" + ENTRY})).findings
    assert (finding.rule, finding.line) == ("allow-list", 6)
    assert "needs one entry for a rule and a file, got a second for base-field in a.py" in finding.text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[[allow]\n", 1),
        (ENTRY + "x = [\n", 0),
        ("allow = 3", 0),
        ("[allow]\nrule = 'base-field'", 0),
        ("allow = [1]", 0),
        ("version = 1", 0),
        (b"\xff", 0),
    ],
)
def test_a_list_that_is_no_list_is_a_fault(tmp_path: Path, text: str | bytes, line: int) -> None:
    """It never stands for an empty one in silence."""
    report = lint_source(write(tmp_path, {"a.py": "", LIST_NAME: text}))
    assert {(finding.level, finding.rule, finding.file) for finding in report.findings} == {
        ("fault", "allow-list", LIST_NAME)
    }
    assert report.findings[0].line == line or not line


def test_a_list_is_utf_8_whatever_wrote_it(tmp_path: Path) -> None:
    """With a byte order mark and the line ends of another system too."""
    text = codecs.BOM_UTF8 + ENTRY.replace("a.py", "é.py").replace("\n", "\r\n").encode()
    assert lint_source(write(tmp_path, {"é.py": READS, LIST_NAME: text})).passed


def test_a_list_may_be_written_in_line(tmp_path: Path) -> None:
    """Its entries are as good; a fault of one is a fault of the file."""
    entries = ", ".join(f'{{rule = "base-field", file = "{file}", reason = "x"}}' for file in ("a.py", "b.py"))
    text = f"allow = [{entries}]"
    assert found(lint_source(write(tmp_path, {"a.py": READS, "b.py": "", LIST_NAME: text}))) == [
        ("allow-list", LIST_NAME, 0)
    ]


def test_the_list_of_the_repository_is_found_from_below(tmp_path: Path) -> None:
    """And files are named from where it stands, so that a finding can be copied into it."""
    entry = ENTRY.replace("a.py", "src/engine/a.py")
    tree = write(tmp_path, {".git/HEAD": "", LIST_NAME: entry, "src/engine/a.py": READS, "src/engine/b.py": READS})
    assert found(lint_source(tree / "src" / "engine")) == [("base-field", "src/engine/b.py", 2)]
    assert lint_source(tree / "src" / "engine" / "a.py").passed


def test_an_entry_of_a_file_that_was_not_read_is_not_stale(tmp_path: Path) -> None:
    """Part of a tree tells nothing about the rest, but that a file is gone."""
    tree = write(tmp_path, {".git/HEAD": "", LIST_NAME: ENTRY, "a.py": "", "src/b.py": ""})
    assert lint_source(tree / "src").passed
    (tree / "a.py").unlink()
    assert [finding.rule for finding in lint_source(tree / "src").findings] == ["allow-list"]


def test_a_list_above_the_repository_is_not_ours(tmp_path: Path) -> None:
    """Nor, without a repository, one above the path."""
    tree = write(tmp_path, {LIST_NAME: ENTRY.replace("a.py", "in/a.py"), "in/.git": "gitdir: x", "in/a.py": READS})
    assert [rule for rule, _, _ in found(lint_source(tree / "in"))] == ["base-field"]
    (tree / "in" / ".git").unlink()
    assert [rule for rule, _, _ in found(lint_source(tree / "in"))] == ["base-field"]


def test_a_list_may_stand_elsewhere(tmp_path: Path) -> None:
    """`--config`: it is read in place of the one that would be found, and its files are those below it."""
    tree = write(tmp_path, {"in/a.py": READS, f"in/{LIST_NAME}": "", "ours.toml": ENTRY.replace("a.py", "in/a.py")})
    assert lint_source(tree / "in", config=tree / "ours.toml").passed
    assert found(lint_source(tree / "in")) == [("base-field", "a.py", 2)]


def test_an_unreadable_file_may_be_listed(tmp_path: Path) -> None:
    """A template that is no Python yet; of other rules nothing is known there, so no entry of it is stale."""
    other = ENTRY.replace("makes", "also makes")
    entry = ENTRY.replace("base-field", "unreadable")
    assert lint_source(write(tmp_path, {"a.py": "def (", "b.py": "", LIST_NAME: entry + other})).passed
    assert [rule for rule, _, _ in found(lint_source(write(tmp_path, {"a.py": ""})))] == ["allow-list", "allow-list"]
