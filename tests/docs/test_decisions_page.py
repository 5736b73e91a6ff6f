"""docs/decisions.md says which half each question asks: each of its examples is run, and its table is whole."""

from __future__ import annotations

import doctest
import inspect
import re

from backstamp import decisions
from tests.documents import ROOT

PAGE = ROOT / "docs" / "decisions.md"


def test_every_example_of_the_page_holds() -> None:
    """The examples share one namespace, as a reader would type them."""
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 25
    assert failed == 0


def test_every_decision_is_on_the_page_and_no_other() -> None:
    """A decision that is added or renamed is added to the table."""
    table, _, rest = PAGE.read_text("utf-8").partition("For a question of your own: ")
    named = re.findall(r"`(\w+)` \|$", table, re.MULTILINE) + re.findall(r"`(\w+)`", rest.partition("\n")[0])
    public = [name for name in decisions.__all__ if inspect.isfunction(getattr(decisions, name))]
    assert sorted(named) == sorted(public)
