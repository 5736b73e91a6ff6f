"""Reports as other tools read them: JSON, JUnit XML, GitHub annotations, SARIF 2.1.0.

In: a `Report`. Out: text, complete, with a newline at its end; empty where a form has nothing to say. Nothing here
decides or prints.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from backstamp.findings import Report
from backstamp.formats.github import as_github
from backstamp.formats.junit import as_junit
from backstamp.formats.plain_json import as_json
from backstamp.formats.sarif import as_sarif

__all__ = ["FORMATS", "as_github", "as_json", "as_junit", "as_sarif"]

#: Every form `--report` knows, by the name an operator types.
FORMATS: Final[dict[str, Callable[[Report], str]]] = {
    "json": as_json,
    "junit": as_junit,
    "github": as_github,
    "sarif": as_sarif,
}
