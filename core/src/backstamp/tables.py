"""The alias x host table as Markdown, for READMEs and docs.

In: the cells of a matrix. Out: Markdown text. It judges nothing.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from backstamp.explanation import MatrixCell

__all__ = ["markdown_matrix"]

_SHORT = {"prefill": "P", "decode": "D", "verify": "V", "draft_decode": "dd", "draft_extend": "de"}


def markdown_matrix(cells: Sequence[MatrixCell], rows: Literal["host", "alias"] = "host") -> str:
    """One row a host and one column a key, or the other way; a cell is the kernel where all phases agree, else kernel
    by phase."""
    grid: dict[tuple[str, str], list[MatrixCell]] = {}
    for cell in cells:
        grid.setdefault((cell.host, cell.alias) if rows == "host" else (cell.alias, cell.host), []).append(cell)
    across = list(dict.fromkeys(second for _, second in grid))
    names = [second if rows == "alias" else f"`{second}`" for second in across]
    lines = [f"| {'host' if rows == 'host' else 'key'} | {' | '.join(names)} |", "|---" * (len(across) + 1) + "|"]
    for first in dict.fromkeys(first for first, _ in grid):
        label = first if rows == "host" else f"`{first}`"
        lines.append(f"| {label} | {' | '.join(_cell(grid[first, second]) for second in across)} |")
    return "\n".join(lines) + "\n"


def _cell(cells: Sequence[MatrixCell]) -> str:
    kernels = {cell.kernel for cell in cells}
    if len(kernels) == 1:
        only = cells[0]
        return f"`{only.kernel}`" if only.kernel is not None else f"no ({only.code})"
    by_kernel: dict[str, list[str]] = {}
    for cell in cells:
        if cell.kernel is not None:
            by_kernel.setdefault(cell.kernel, []).append(_SHORT[cell.phase])
    return "; ".join(f"`{kernel}` ({' '.join(phases)})" for kernel, phases in by_kernel.items())
