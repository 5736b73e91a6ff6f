"""`backstamp lint`: which files are read, the list of exceptions, the report, and the command."""

from __future__ import annotations

import ast
import codecs
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstamp.cli.app import run
from backstamp.errors import BadInput
from backstamp.findings import Finding, Report
from backstamp.source_lint import RULES, lint_source
from backstamp.source_lint.alias_leaf import alias_leaf, declared_in, untold
from backstamp.source_lint.allow_list import LIST_NAME
from backstamp.source_lint.base_field import base_field
from backstamp.source_lint.container_children import classes_of, container_children
from backstamp.source_lint.leaves import Leaves
from backstamp.source_lint.none_is_yes import none_is_yes
from backstamp.source_lint.source import Source, read_source
from tests.documents import ROOT

READS = "def decide(args):\n    return args.attention_backend == 'fa3'\n"
ENTRY = '[[allow]]\nrule = "base-field"\nfile = "a.py"\nreason = "makes the pair"\n'


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """A tree of files, and its folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def found(report: Report) -> list[tuple[str, str, int]]:
    """Rule, file and line of every finding."""
    return [(finding.rule, finding.file, finding.line) for finding in report.findings]


# which files


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


# the list


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


# the report and the command


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


# it never crashes


def every_rule(source: Source) -> list[Finding]:
    """All findings of all rules over one module."""
    functions = list(Leaves(source).functions)
    rules = [base_field(source, "attention_backend"), none_is_yes(source, "attention_backend")]
    rules += [alias_leaf(source, frozenset({"nsa"})), untold(source, [*functions, "build"])]
    assert all(isinstance(factory, str) for factory in declared_in(source))
    return [*(item for rule in rules for item in rule), *container_children(classes_of(source))]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_are_a_fault(data: bytes) -> None:
    """Whatever lies in a file with the name of Python."""
    source = read_source("a.py", data)
    if isinstance(source, Finding):
        assert source.level == "fault"
    else:
        every_rule(source)


WORDS = [
    "attention_backend",
    "prefill_attention_backend",
    "attn_backends",
    "nsa",
    "Built",
    "backend",
    "self",
    "num_steps",
]
NAMES = st.sampled_from(WORDS)
ATOMS = st.one_of(
    NAMES, NAMES.map(repr), st.sampled_from(["None", "True", "1", "b'x'", "...", "()", "self.attn_backends"])
)


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Expressions of expressions, in the forms the rules look at."""
    pair = st.tuples(inner, inner)
    forms = [
        "({} or {})", "({} and {})", "({} == {})", "({} != {})", "({} in {})", "({} not in [{}])", "({} is {})",
        "({}, {})", "({} if {} else 1)", "f({}, {})", "getattr({}, {})", "d.get({}, {})", "Built({}, {})",
        "[{} for num_steps in {}]", "({} + {})", "'%s' % ({}, {})", "(lambda backend={}: {})", "{{{}: {}}}",
        "'{{a}}'.format({}, *{})", "({} < 2 < {})", "Offer(factory={}, x={})", "setattr(self, {}, {})",
        "replace(*{}, **{})", "partial(Built, {}, {})",
    ]  # fmt: skip
    single = [
        "(not {})",
        "(x := {})",
        "({}).attention_backend",
        "vars()[{}]",
        "f'{{{}}}'",
        "Built._make({})",
        "({})[1:]",
    ]
    joined = st.tuples(st.sampled_from(forms), pair).map(lambda given: given[0].format(*given[1]))
    return joined | st.tuples(st.sampled_from(single), inner).map(lambda given: given[0].format(given[1]))


EXPRESSIONS = st.recursive(ATOMS, grown, max_leaves=8)
SHAPES = st.sampled_from(
    [
        "x = {0}", "{2}: {0} = {1}", "{2} += {0}", "del x[{0}]", "return {0}", "if {0}: return {1}", "assert {0}, {1}",
        "for {2} in {0}: self.{2}.append({1})", "raise {0}", "with {0} as {2}: return {1}", "while {0}: return {1}",
        "match {0}:\n    case {{{3!r}: {2}}}: return {1}", "class {2}MultiStepBackend({0}): x = {1}", "{0}",
        "def build({2}: {0} = {1}) -> bool: return {2}", "async def f(*, {2}={0}): return await {1}", "self.{2} = {0}",
        "try: return {0}\n  except Exception: raise", "from {2} import Built as {3}", "global {2}", "{2} = {3} = {0}",
    ]
)  # fmt: skip
STATEMENTS = st.builds(str.format, SHAPES, EXPRESSIONS, EXPRESSIONS, NAMES, NAMES)


@given(st.lists(STATEMENTS, max_size=5), st.sampled_from(["", "class A:\n", "async "]))
def test_any_python_is_looked_at_by_every_rule(statements: list[str], around: str) -> None:
    """Made of what the rules look for, put together in ways nobody writes."""
    indent = "  " if around.startswith("class") else ""
    body = "\n".join(f"{indent}  {line}" for line in statements) or f"{indent}  pass"
    text = f"{around if indent else ''}{indent}{around if not indent else ''}def build(self, backend=None):\n{body}\n"
    source = read_source("a.py", text.encode())
    if isinstance(source, Source):
        for finding in every_rule(source):
            assert finding.line > 0 or finding.text.startswith("needs Built")
            assert finding.text.startswith("needs ")
            assert "\n" not in finding.text
    else:
        with pytest.raises(SyntaxError):
            ast.parse(text)
