"""The conformance kit: whether a plugin is what it declares, on the machine it is run on.

In: a plugin that is installed. Out: a pytest class of three lines, or a `Report` of `check_plugins`:

    from backstamp.testing.conformance import PluginConformance

    class TestConformance(PluginConformance):
        distribution = "acme-attention"

It needs torch (`backstamp[testing]`), and pytest for the class alone.

.. versionadded:: 0.2
"""

from __future__ import annotations

from backstamp.testing.conformance.pytest_class import PluginConformance
from backstamp.testing.conformance.suite import CHECKS, DECLARATION_CHECKS, check_plugins

__all__ = ["CHECKS", "DECLARATION_CHECKS", "PluginConformance", "check_plugins"]
