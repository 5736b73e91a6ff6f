"""Versions: which of them say that nobody knew, and which of them are one."""

from __future__ import annotations

import pytest

from backstamp.installation import installation_of
from tests.resolving import kernel

UNKNOWN = ["0", "0.0", "0.0.0", "0.0.0.dev0", "0.0.0rc0", "0+unknown", "0.0.0+unknown", "0+untagged.1.gabc", "0.post1"]
BELOW = kernel("k", requires=("foo<3",))
BESIDE = kernel("k", requires=("foo>=0.6",), companions=("foo-cubin",))


@pytest.mark.parametrize("version", UNKNOWN)
def test_a_version_of_zeros_is_unknown_even_where_a_range_would_hold_it(version: str) -> None:
    """setuptools-scm and versioneer write these where they find no tag; below 3 they are not."""
    _, (refusal,) = installation_of(BELOW, {"foo": version})
    assert (refusal.code, refusal.have) == ("library_unknown", f"foo with unknown version {version}")


@pytest.mark.parametrize("version", ["0.0.1", "0.1.dev3", "2.0+unknown", "2"])
def test_a_version_that_says_something_is_known(version: str) -> None:
    """Whatever else is odd about it."""
    _, refusals = installation_of(kernel("k", requires=("foo",)), {"foo": version})
    assert refusals == ()


@pytest.mark.parametrize("companion", ["0.6.14", "v0.6.14", "0.6.14.0", "0.6.14+cu130", "0.6.14.0+cu130"])
@pytest.mark.parametrize("library", ["0.6.14", "v0.6.14", "0.6.14+cu129"])
def test_one_version_may_be_written_in_many_ways(library: str, companion: str) -> None:
    """They are compared as packaging compares versions; the tag of a build is no other version."""
    assert installation_of(BESIDE, {"foo": library, "foo-cubin": companion})[1] == ()


@pytest.mark.parametrize("companion", ["0.6.13", "0.6.14.1", "0.6.14rc1", "0.6.14.post1", "N/A", "", None])
def test_another_version_beside_the_library_is_refused(companion: str | None) -> None:
    """So is one that cannot be read."""
    _, (refusal,) = installation_of(BESIDE, {"foo": "0.6.14", "foo-cubin": companion})
    assert (refusal.code, refusal.field) == ("companion", "foo-cubin")
