"""The report of a parity check: rules, levels and what counts as a pass; findings as every form of report has them."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from backstamp import parity
from backstamp import parity_report as module
from backstamp.entry_classes import comparing, reading, sources, tables, tree
from backstamp.findings import Finding
from backstamp.parity import Gate
from backstamp.parity_report import RULES, parity_report
from tests.entry_trees import GATE, TARGET, parity_of

DRAFT = "class AcmeForCausalLMNextN: ...\nEntryClass = [AcmeForCausalLMNextN]\n"


def findings(folder: Path, files: dict[str, str]) -> tuple[Finding, ...]:
    """Every finding of the report over a tree."""
    return parity_report(parity_of(folder, files)).findings


def test_a_violation_is_a_fault_of_the_pair(tmp_path: Path) -> None:
    """Its subject is the pair, its place the class that lacks the hook, its fix the class to give it to."""
    (found,) = findings(tmp_path, {"acme.py": TARGET, "draft.py": DRAFT})
    assert (found.level, found.rule, found.file, found.line) == ("fault", "hook-parity", "draft.py", 1)
    assert found.subject == "AcmeForCausalLMNextN (draft of AcmeForCausalLM)"
    assert f"the draft needs {GATE}, which its target has, got none" in found.text
    assert found.fix == "Give it to AcmeForCausalLMNextN; it may delegate to AcmeForCausalLM's"


def test_a_missing_gate_is_a_fault_of_its_own_rule(tmp_path: Path) -> None:
    """A class may be nobody's draft and still build gated layers."""
    text = (
        "from engine import get_num_fused_shared_experts\n"
        "class OtherForCausalLM:\n    n = get_num_fused_shared_experts()\nEntryClass = OtherForCausalLM\n"
    )
    gated = DRAFT.replace("...", f"\n    def {GATE}(self): ...")
    (found,) = findings(tmp_path, {"acme.py": TARGET, "draft.py": gated, "other.py": text})
    assert (found.level, found.rule, found.subject) == ("fault", "gate-coverage", "OtherForCausalLM")
    assert (found.file, found.line) == ("other.py", 2)
    assert f"so it needs {GATE}, got none" in found.text


def test_an_unpaired_draft_is_a_note_and_counts_as_skipped(tmp_path: Path) -> None:
    """It fails nothing beside a pair that was compared, and passes nothing alone."""
    gated = DRAFT.replace("...", f"\n    def {GATE}(self): ...")
    loose = "class DFlashDraftModel: ...\nEntryClass = DFlashDraftModel\n"
    report = parity_report(parity_of(tmp_path / "both", {"acme.py": TARGET, "draft.py": gated, "loose.py": loose}))
    (found,) = report.findings
    assert (found.level, found.rule, found.fix) == ("note", "unpaired-draft", "--pair DFlashDraftModel=TARGET")
    assert (report.passed, report.count("skipped")) == (True, 1)
    alone = parity_report(parity_of(tmp_path / "alone", {"loose.py": loose}))
    assert not alone.passed
    assert [item.rule for item in alone.findings if item.level == "fault"] == ["nothing-paired"]


def test_names_of_outcomes_are_unique(tmp_path: Path) -> None:
    """A report in XML names a test by them."""
    text = f"class BForCausalLM:\n    def {GATE}(self): ...\nclass BMTP: ...\nEntryClass = [BForCausalLM, BMTP]\n"
    gated = "class C:\n    x = layer()\nEntryClass = C\n"
    files = {"acme.py": TARGET, "draft.py": DRAFT, "b.py": text, "c.py": gated, "d.py": "def ("}
    gates = [Gate(hook, frozenset({"layer"})) for hook in ("one", "two")]
    report = parity_report(parity_of(tmp_path, files, gates=gates))
    names = [(outcome.check, outcome.name) for outcome in report.outcomes]
    assert len(names) == len(set(names)) == 4
    assert [item.subject for item in report.findings if item.rule == "gate-coverage"] == ["C", "C"]


def test_every_rule_is_explained() -> None:
    """Whoever reads one finding in code scanning never saw the rule: each has words, and no words are left over."""
    at = {"Finding": 1, "Trouble": 0}
    calls = [
        node
        for source in (module, parity, comparing, reading, sources, tables, tree)
        for node in ast.walk(ast.parse(inspect.getsource(source)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in at
    ]
    said = {ast.literal_eval(call.args[at[call.func.id]]) for call in calls if _is_text(call.args[at[call.func.id]])}
    assert said == set(RULES)


def test_a_report_explains_its_rules(tmp_path: Path) -> None:
    """To every form of report that has a place for it."""
    assert parity_report(parity_of(tmp_path, {"acme.py": TARGET, "draft.py": DRAFT})).rules == RULES


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
