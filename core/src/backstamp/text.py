"""Strings that come from plugins, exceptions and files, made safe to print.

In: any text. Out: one line of printable text. It never interprets what it is given: terminal markup, control
characters and CI command prefixes (`::`, `##[`) reach no console as such.

.. versionadded:: 0.1
"""

from __future__ import annotations

import re

__all__ = ["canonical", "near", "plain", "qualified"]

_LIMIT_CHARACTERS = 400


def plain(text: str, most: int = _LIMIT_CHARACTERS) -> str:
    """One printable line of `most` characters: control characters become spaces, `::` and `##` lose their force."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    # one at a time: what follows a replaced pair may be a third colon
    line = re.sub(r":(?=:)|#(?=#)", r"\g<0> ", line)
    return line if len(line) <= most else line[: most - 3] + "..."


def canonical(distribution: str) -> str:
    """A distribution's name as packaging compares it: My_Dist and my-dist are one."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def qualified(key: str) -> str:
    """A key written `distribution:name`, with its distribution's name as packaging compares it."""
    distribution, colon, name = key.rpartition(":")
    return f"{canonical(distribution)}:{name}" if colon else key


def near(word: str, known: list[str]) -> str | None:
    """The known word closest to a mistyped one, if any is close."""
    import difflib

    matches = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return matches[0] if matches else None
