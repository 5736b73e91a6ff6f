"""docs/resolution.md says what the resolver does: each of its examples is run."""

from __future__ import annotations

import doctest

from tests.documents import ROOT


def test_every_example_of_the_page_holds() -> None:
    """The examples share one namespace, as a reader would type them."""
    failed, tried = doctest.testfile(str(ROOT / "docs" / "resolution.md"), module_relative=False)
    assert tried > 60
    assert failed == 0
