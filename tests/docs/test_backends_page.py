"""What docs/backends.md says was measured is what the records say: right, wrong, or never run."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from tests.documents import ROOT
from tests.resolving import kernel

OFFER = kernel("fast", requires=("fast-kernels>=1.0",), archs=("9.0",))
DECODER = replace(OFFER, phases=frozenset({"decode"}), draft_phases=frozenset())
LINE = {
    "kernel": "fast",
    "family": "mha",
    "phase": "decode",
    "case": "ragged",
    "row": 0,
    "status": "ok",
    "rel_error": 2e-3,
    "library": {"distribution": "fast-kernels", "version": "1.2"},
}


def record(*lines: dict[str, object], arch: str = "9.0") -> dict[str, object]:
    """What one machine's run left."""
    return {"host": "NVIDIA H200", "device": "cuda", "arch": arch, "checks": list(lines)}


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch):
    """The module that writes the page; docs/ is no package."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import backends

    yield backends
    sys.modules.pop("backends", None)


def test_cases_are_counted_with_their_worst_error(page) -> None:
    """Of the cases of this row alone."""
    lines = (LINE, {**LINE, "case": "page 1", "rel_error": 3e-3})
    assert page.measured(DECODER, 0, [record(*lines)]) == "NVIDIA H200: 2 cases, error up to 3.0e-03"


def test_a_case_two_keys_led_to_is_one_case(page) -> None:
    """A kernel is checked under its own name and under the keys that lead to it."""
    told = page.measured(DECODER, 0, [record({**LINE, "key": "fast"}, {**LINE, "key": "alias"})])
    assert told == "NVIDIA H200: 1 case, error up to 2.0e-03"


def test_phases_are_named_where_not_all_were_run(page) -> None:
    """A row that was run in prefill alone is not measured in decode."""
    told = page.measured(OFFER, 0, [record(LINE, {**LINE, "phase": "prefill"})])
    assert told == "NVIDIA H200: 2 cases in prefill, decode, error up to 2.0e-03"


def test_a_wrong_case_is_told(page) -> None:
    """Before anything else: the row is not right there."""
    told = page.measured(OFFER, 0, [record(LINE, {**LINE, "case": "page 1", "status": "wrong"})])
    assert told == "NVIDIA H200: 1 of 2 cases wrong"


@pytest.mark.parametrize(
    "other",
    [
        {"row": 1},
        {"kernel": "slow"},
        {"family": "mla"},
        {"phase": "verify"},
        {"status": "refused"},
        {"library": None},
        {"library": {"distribution": "other-build", "version": "1.2"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_another_row_ran_is_not_this_rows(page, other: dict[str, object]) -> None:
    """Another kernel, family, phase or library, and what was refused."""
    assert page.measured(DECODER, 0, [record({**LINE, **other})]) == page.NOT_RUN


def test_a_machine_the_row_does_not_run_on_measured_nothing_of_it(page) -> None:
    """Nor does no record at all."""
    assert page.measured(OFFER, 0, [record(LINE, arch="10.0")]) == page.NOT_RUN
    assert page.measured(OFFER, 0, []) == page.NOT_RUN
