"""How strictly a launch is read: only words and switches that mean something."""

from __future__ import annotations

import pytest

from backstamp.errors import BadInput
from backstamp.policy import Policy


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        pytest.param({"layers": "perlayer"}, "--layers", id="layers"),
        pytest.param({"layers": None}, "--layers", id="no-layers"),
        pytest.param({"strict": "yes"}, "--strict", id="strict"),
        pytest.param({"keep_graph": 1}, "--keep-graph", id="keep-graph"),
        pytest.param({"per_rank": None}, "policy, per_rank", id="per-rank"),
        pytest.param({"allow": "fake-p"}, "--allow", id="allow-word"),
        pytest.param({"deny": frozenset({5})}, "--deny", id="deny-number"),
        pytest.param({"deny": frozenset({""})}, "--deny", id="deny-nothing"),
        pytest.param({"duplicates": ("a:b",)}, "--duplicate", id="duplicates-tuple"),
        pytest.param({"duplicates": frozenset({"ab"})}, "--duplicate", id="duplicates-form"),
        pytest.param({"bypass": ["companion"]}, "--bypass", id="bypass-list"),
        pytest.param({"bypass": frozenset({"arch"})}, "--bypass", id="bypass-arch"),
    ],
)
def test_nonsense_names_its_flag(changes: dict[str, object], flag: str) -> None:
    """A misspelt word would act as another one, and a word where a set belongs as its letters."""
    with pytest.raises(BadInput) as caught:
        Policy(**changes)
    assert caught.value.who == flag
    assert caught.value.found


def test_distributions_are_kept_in_one_spelling() -> None:
    """A set of either kind does."""
    assert Policy(allow={"My_Dist"}).allow == frozenset({"my-dist"})  # type: ignore[arg-type]
