"""Stand-ins for Triton kernels whose chip is not here: they keep what a launch would be given, bound as it would be.

In: a kernel. Out: its launches, arguments by name. An argument the kernel does not have, or a missing one, is an error
here as it would be there.
"""

from __future__ import annotations

import inspect

__all__ = ["Recorder"]

#: What a launch may be given beside the kernel's own arguments.
OPTIONS = {"num_warps", "num_stages", "maxnreg", "launch_pdl"}


class Recorder:
    """Keeps the grid and, by name, the arguments of each launch."""

    def __init__(self, kernel) -> None:
        self.signature = inspect.signature(kernel.fn)
        self.launches: list[dict[str, object]] = []

    def __getitem__(self, grid):
        def launch(*args, **named):
            options = {name: named.pop(name) for name in OPTIONS & named.keys()}
            bound = self.signature.bind(*args, **named)
            self.launches.append({"grid": grid, **bound.arguments, **options})

        return launch
