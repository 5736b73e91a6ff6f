"""What a refusal says of a kernel over several libraries, where the one that serves is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.errors import Refused
from backstamp.launch import Requests
from tests.resolving import kernel, plan_of

PAGED = kernel("k", requires=("paged>=2", "beside"), priority=60)
RAGGED = replace(
    PAGED, requires=("ragged>=1",), kv_forms=frozenset({"ragged"}), index_forms=frozenset(), prefix=False, priority=59
)
OTHER_CHIP = replace(PAGED, requires=("other>=1",), archs=("10.0",))


def refusal(libraries: dict[str, str]) -> str:
    with pytest.raises(Refused) as cause:
        plan_of([PAGED, RAGGED, OTHER_CHIP], Requests(decode_attention_backend="k"), libraries=libraries)
    return cause.value.message


@pytest.mark.parametrize(
    ("libraries", "told"),
    [
        (
            {"ragged": "1.5"},
            "k over ragged 1.5, which is installed, needs attention over cached tokens, got a kernel that does not "
            "declare it and needs a kernel that reads paged KV, got ragged KV only",
        ),
        ({"other": "1.0"}, "k over other 1.0, which is installed, needs SM100 (10.0), got SM90 (9.0)"),
    ],
    ids=["reads-no-pages", "another-chip"],
)
def test_a_library_that_is_there_is_told_with_why_it_does_not_serve(libraries: dict[str, str], told: str) -> None:
    """What to install comes first; that another build is installed is no mystery then."""
    message = refusal(libraries)
    assert "needs paged>=2, got paged is not installed" in message
    assert told in message
    assert "Install paged>=2" in message


def test_what_the_refusal_says_already_is_not_said_twice() -> None:
    """The row that is told lacks a second library; its first is there."""
    message = refusal({"paged": "2.0"})
    assert message.count("beside is not installed") == 1
    assert "which is installed" not in message


def test_libraries_that_are_not_there_are_not_told() -> None:
    """What to install is all there is to say."""
    assert "which is installed" not in refusal({})
