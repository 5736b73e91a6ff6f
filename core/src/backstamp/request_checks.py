"""Whether one value that was asked for is a word, a switch or a number, as the first look at a launch takes it.

In: a flag and the value that came through it. Out: nothing, or one `BadInput` that names the flag. It changes no value:
a blank that was cut off in silence, or a 1 taken for true, would be printed as something nobody asked for.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from backstamp.errors import BadInput
from backstamp.text import plain

__all__ = ["check_flag", "check_number", "check_word", "named"]


def check_word(flag: str, value: object, *, optional: bool = True) -> None:
    """Refuse what is no word, or has blanks around it; None is unset.

    Raises:
        BadInput: so it is.
    """
    if value is None and optional:
        return
    if not isinstance(value, str) or not value.strip():
        fix = "Leave the flag out to resolve by auto" if isinstance(value, str) else ""
        raise BadInput(flag, needed="a key" if "backend" in flag else "a word", found=_shown(value), fix=fix)
    if value != value.strip():
        raise BadInput(flag, needed="a word without blanks around it", found=_shown(value))


def check_flag(flag: str, value: object, *, optional: bool = True) -> None:
    """Refuse what is neither true nor false; None is unset.

    Raises:
        BadInput: so it is.
    """
    if not isinstance(value, bool) and not (value is None and optional):
        raise BadInput(flag, needed="true or false", found=plain(repr(value)))


def check_number(flag: str, value: object, least: int) -> None:
    """Refuse what is no whole number of at least `least`; None is unset.

    Raises:
        BadInput: so it is.
    """
    # True counts as 1 to Python, and to nobody else
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise BadInput(flag, needed=f"a whole number >= {least}", found=plain(repr(value)))


def named(flag: str, values: object) -> Iterator[tuple[str, object]]:
    """What was asked for by name; None is nothing.

    Raises:
        BadInput: it is no mapping, or one of its names is no word.
    """
    if values is not None and not isinstance(values, Mapping):
        raise BadInput(flag, needed="values by name", found=plain(repr(values)))
    for name, value in (values or {}).items():
        check_word(f"{flag} NAME", name, optional=False)
        yield name, value


def _shown(value: object) -> str:
    # a word is shown with the blanks it has
    return repr(value) if isinstance(value, str) else plain(repr(value))
