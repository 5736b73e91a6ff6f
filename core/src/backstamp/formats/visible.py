"""Characters that a terminal obeys or an XML file may not hold, made visible.

In: any text, a plugin's own words among it. Out: the same text with those characters as escapes (`\\x1b`); line ends
and tabs stay. Nothing is cut, and no other character is touched.

.. versionadded:: 0.2
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["visible"]

# Source: XML 1.0, production 2 (Char), less the C1 controls, which terminals obey
_UNSEEN: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def visible(text: str) -> str:
    """The text without control characters, halves of surrogate pairs and what is no character at all."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
