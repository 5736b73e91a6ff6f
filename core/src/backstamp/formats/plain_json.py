"""A report as JSON, and how every JSON form here is written.

In: a `Report`. Out: JSON text that UTF-8 can hold, whatever bytes a file name was made of.

.. versionadded:: 0.2
"""

from __future__ import annotations

import json

from backstamp.findings import Report

__all__ = ["as_json", "json_text"]


def as_json(report: Report) -> str:
    """The report as JSON."""
    return json_text(report.as_json())


def json_text(value: object) -> str:
    """A value as JSON that people can read too."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # half a surrogate pair, as in the name of a file that is no UTF-8, becomes JSON's own escape of it
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
