"""What pytest gains where backstamp is installed: `--conformance NAME` checks a plugin without a test file.

In: the option, repeatable, by distribution, plugin or module. Out: the jobs of the kit as tests. Every pytest run of
every environment with backstamp loads this module, so it imports nothing of the kit before it is asked to.

.. versionadded:: 0.2
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import pytest

__all__ = ["asked_for", "pytest_addoption", "pytest_configure"]

#: The test module that has one class for each name that was asked for.
_MODULE: Final = Path(__file__).parent / "conformance" / "asked_for.py"
_NAMES: Final[list[str]] = []


def asked_for() -> tuple[str, ...]:
    """The names that `--conformance` was given."""
    return tuple(_NAMES)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    group = parser.getgroup("backstamp")
    group.addoption(
        "--conformance",
        action="append",
        default=[],
        metavar="NAME",
        help="check a Backstamp plugin against its declarations, by distribution, plugin or module; repeatable",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect the kit beside what pytest was pointed at; alone, where it was pointed at nothing."""
    _NAMES[:] = config.getoption("--conformance")
    if _NAMES:
        pointed = config.args_source is config.ArgsSource.ARGS
        config.args[:] = [*(config.args if pointed else ()), str(_MODULE)]
