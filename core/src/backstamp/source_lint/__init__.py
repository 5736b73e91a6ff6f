"""A static check of anyone's source: the faults the field has met, found without importing what is read.

In: a path. Out: a `Report`. One module a rule: `base_field`, `alias_leaf`, `container_children`, `none_is_yes`;
`source` reads files, `allow_list` the exceptions, `linting` runs them all. (`backstamp.lint` checks declarations.)

.. versionadded:: 0.2
"""

from __future__ import annotations

from backstamp.source_lint.alias_leaf import aliases_of
from backstamp.source_lint.linting import BASE_FIELDS, RULES, lint_source

__all__ = ["BASE_FIELDS", "RULES", "aliases_of", "lint_source"]
