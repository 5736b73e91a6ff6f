"""Entry classes, read from source or taken live, and the drafts among them beside their targets.

In: a folder, an installed engine or plugin, or live classes. Out: one `EntryClass` for each, with the loader hooks it
answers. `backstamp.parity` compares them. Reading source imports nothing of what it reads.

.. versionadded:: 0.2
"""

from __future__ import annotations
