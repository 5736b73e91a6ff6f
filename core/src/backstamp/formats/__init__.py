"""Reports as other tools read them: JSON, JUnit XML, GitHub annotations, SARIF 2.1.0.

In: a `Report`. Out: text, complete, with a newline at its end. Nothing here decides or prints.

.. versionadded:: 0.2
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from backstamp.findings import Report

__all__ = ["FORMATS", "as_json"]


def as_json(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n"


#: Every form `--report` knows, by the name an operator types.
FORMATS: Final[dict[str, Callable[[Report], str]]] = {"json": as_json}
