"""What the parity check tells and does not hold against anybody: places it could not read, hooks nobody answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.entry_trees import GATE, TARGET, parity_of, told

DRAFT = "class AcmeForCausalLMNextN: ...\nEntryClass = [AcmeForCausalLMNextN]\n"
LACKS = ("AcmeForCausalLMNextN", "AcmeForCausalLM", GATE, "draft")

GIVEN = {
    "loop": (f"for kind in made():\n    kind.{GATE} = print\n", 4, "it may give a class"),
    "loop-over-a-slice": (f"for kind, hook in zip(EntryClass[:1], [print]):\n    kind.{GATE} = hook\n", 4, "a class"),
    "rows-of-another-length": (f"for kind, hook in [made()]:\n    kind.{GATE} = hook\n", 4, "a class"),
    "setattr": ("setattr(AcmeForCausalLMNextN, made(), print)\n", 3, "it may give AcmeForCausalLMNextN a hook"),
}


@pytest.mark.parametrize(("text", "line", "words"), GIVEN.values(), ids=GIVEN)
def test_a_place_that_may_give_a_hook_is_told(text: str, line: int, words: str, tmp_path: Path) -> None:
    """Which class, or which hook, could not be read: the finding stands, and a note names the place."""
    parity = parity_of(tmp_path, {"acme.py": TARGET, "draft.py": DRAFT + text})
    assert told(parity.violations) == [LACKS]
    (note,) = parity.notes
    assert (note.rule, note.file, note.line) == ("unread-assignment", "draft.py", line)
    assert words in note.text


def test_a_place_that_gives_no_class_a_hook_is_not_told(tmp_path: Path) -> None:
    """Other names in a loop, and attributes of what is no class, are nobody's hooks."""
    text = "for one in made():\n    one.other = print\nimport settings\nsetattr(settings, made(), 1)\n"
    assert parity_of(tmp_path, {"acme.py": TARGET, "draft.py": DRAFT + text}).notes == ()


def test_a_hook_that_no_class_answers_is_told(tmp_path: Path) -> None:
    """`--hook post_laod_weights` compares nothing, which would read as parity."""
    parity = parity_of(tmp_path, {"acme.py": TARGET, "draft.py": DRAFT}, hooks=["post_laod_weights", GATE])
    (note,) = parity.notes
    assert (note.rule, note.subject) == ("unanswered-hook", "post_laod_weights")


@pytest.mark.parametrize(("decorator", "noted"), [("fused(1)", True), ("support_torch_compile", False)])
def test_a_decorator_that_may_give_a_hook_is_told(decorator: str, noted: bool, tmp_path: Path) -> None:
    """On a class of a pair; those that engines put on every model are known to give none."""
    classes = f"@{decorator}\nclass AcmeForCausalLM: ...\n@{decorator}\nclass Other: ...\n"
    text = f"{classes}EntryClass = [AcmeForCausalLM, Other]\n"
    parity = parity_of(tmp_path, {"acme.py": text, "draft.py": DRAFT})
    assert [(note.rule, note.subject, note.file) for note in parity.notes] == [
        ("unread-decorator", "AcmeForCausalLM", "acme.py")
    ] * noted
