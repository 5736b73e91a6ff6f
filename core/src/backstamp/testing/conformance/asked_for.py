"""The test module behind `pytest --conformance NAME`: one class of the kit a name.

.. versionadded:: 0.2
"""

from __future__ import annotations

import re

from backstamp.testing.conformance.pytest_class import PluginConformance
from backstamp.testing.pytest_plugin import asked_for

__all__: list[str] = []

for _name in asked_for():
    _title = "Test_" + re.sub(r"\W", "_", _name)
    globals()[_title] = type(_title, (PluginConformance,), {"distribution": _name})
