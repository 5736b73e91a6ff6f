"""Lists of entry classes: however one is written its classes are compared, or it is told that it was not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entry_trees import GATE, TARGET, parity_of, told

DRAFT = "class AcmeForCausalLMNextN: ...\n"
LACKS = ("AcmeForCausalLMNextN", "AcmeForCausalLM", GATE, "draft")
#: A table of vLLM's form, with the target's row.
TABLE = '_TEXT_MODELS = {"AcmeForCausalLM": ("acme", "AcmeForCausalLM")}\n'

READ = {
    "append": "EntryClass = []\nEntryClass.append(AcmeForCausalLMNextN)",
    "extend": "EntryClass = []\nEntryClass.extend([AcmeForCausalLMNextN])",
    "append-to-another-name": "_all = []\n_all.append(AcmeForCausalLMNextN)\nEntryClass = _all",
    "added-to-a-name": "_all = []\nEntryClass = _all\nEntryClass += [AcmeForCausalLMNextN]",
    "in-the-branch-not-taken-last": "if flag:\n    EntryClass = []\nelse:\n    EntryClass = [AcmeForCausalLMNextN]",
    "on-one-platform": "if is_rocm():\n    EntryClass = [AcmeForCausalLMNextN]",
    "imported-as": "from draft import AcmeForCausalLMNextN as EntryClass",
    "registered-by-keyword": (
        'ModelRegistry.register_model(model_arch="AcmeForCausalLMNextN", model_cls=AcmeForCausalLMNextN)'
    ),
}


@pytest.mark.parametrize("listed", READ.values(), ids=READ)
def test_a_draft_is_compared_however_its_list_came_by_it(listed: str, tmp_path: Path) -> None:
    """A draft that a list was given after its first line is compared like any other."""
    parity = parity_of(tmp_path, {"acme.py": TARGET, "draft.py": f"{DRAFT}{listed}\n"}, hooks=[GATE])
    assert (told(parity.violations), parity.troubles) == ([LACKS], ())


UNREAD = {
    "comprehension": "EntryClass = [kind for kind in (AcmeForCausalLMNextN,)]",
    "call": "EntryClass = list([AcmeForCausalLMNextN])",
    "conditional": "EntryClass = [AcmeForCausalLMNextN] if flag else []",
    "insert": "EntryClass = []\nEntryClass.insert(0, AcmeForCausalLMNextN)",
    "loop": "EntryClass = []\nfor kind in (AcmeForCausalLMNextN,):\n    EntryClass.append(kind)",
    "slice": "EntryClass = []\nEntryClass[:] = [AcmeForCausalLMNextN]",
    "unpacked": "EntryClass, other = [AcmeForCausalLMNextN], 1",
    "part-of-a-sum": "EntryClass = [] + made()",
    "in-a-function": "EntryClass = []\ndef add(kind):\n    EntryClass.append(kind)\nadd(AcmeForCausalLMNextN)",
    "registered-in-a-loop": "for arch, path in rows():\n    ModelRegistry.register_model(arch, path)",
    "table-comprehension": '_MORE_MODELS = {name: ("draft", name) for name in names}',
    "table-row": TABLE + '_TEXT_MODELS["AcmeForCausalLMNextN"] = row("draft")',
    "table-update": TABLE + "_TEXT_MODELS.update(AcmeForCausalLMNextN=row)",
    "table-spread": '_TEXT_MODELS = {"AcmeForCausalLM": ("acme", "AcmeForCausalLM"), **more()}',
    "table-loop": TABLE + "for name in names:\n    _TEXT_MODELS[name] = (name, name)",
}


@pytest.mark.parametrize("listed", UNREAD.values(), ids=UNREAD)
def test_a_list_that_is_not_read_whole_is_a_fault(listed: str, tmp_path: Path) -> None:
    """Its drafts would be lost in silence: the file and the line of the statement are told."""
    parity = parity_of(tmp_path, {"acme.py": TARGET, "draft.py": f"{DRAFT}{listed}\n"})
    (trouble,) = parity.troubles
    assert (trouble.rule, trouble.file) == ("unread-list", "draft.py")
    assert trouble.line > 1
    assert trouble.text.startswith("needs a list that can be read, got ")


TABLES = {
    "row-set": TABLE + '_TEXT_MODELS["AcmeForCausalLMNextN"] = ("draft", "AcmeForCausalLMNextN")',
    "update": TABLE + '_TEXT_MODELS.update({"AcmeForCausalLMNextN": ("draft", "AcmeForCausalLMNextN")})',
    "union": TABLE + '_ALL_MODELS = _TEXT_MODELS | {"AcmeForCausalLMNextN": ("draft", "AcmeForCausalLMNextN")}',
    "spread": TABLE + '_ALL_MODELS = {**_TEXT_MODELS, "AcmeForCausalLMNextN": ("draft", "AcmeForCausalLMNextN")}',
    "in-try": "try:\n    _MODELS = {'AcmeForCausalLMNextN': ('draft', 'AcmeForCausalLMNextN')}\nfinally:\n    pass",
}


@pytest.mark.parametrize("listed", TABLES.values(), ids=TABLES)
def test_a_row_that_a_table_is_given_later_is_read(listed: str, tmp_path: Path) -> None:
    """vLLM's form: a row is compared wherever at the top level it was written."""
    parity = parity_of(tmp_path, {"acme.py": TARGET, "draft.py": DRAFT, "registry.py": f"{listed}\n"})
    assert "AcmeForCausalLMNextN" in parity.classes
    assert parity.troubles == ()


QUIET = {
    "imported": "from acme import EntryClass",
    "never-run": "if False:\n    EntryClass = made()",
    "rows-of-another-table": TABLE
    + "_SOME_MODELS = {**{k: (m, c) for k, (m, c) in _TEXT_MODELS.items() if c}, 'B': ('acme', 'AcmeForCausalLM')}",
    "versions": '_OLD_MODELS = {"AcmeForCausalLM": "0.9.2"}',
    "names": '_DENSE_MODELS = [name for name in ("acme",)]',
    "asked": "def of(module):\n    return module.EntryClass",
    "of-another-registry": "registry.register_model(name, kind)",
    "none": "EntryClass = None",
}


@pytest.mark.parametrize("text", QUIET.values(), ids=QUIET)
def test_what_lists_no_class_is_no_fault(text: str, tmp_path: Path) -> None:
    """Names that only look like a list of entry classes."""
    assert parity_of(tmp_path, {"acme.py": TARGET, "other.py": f"{text}\n"}).troubles == ()
