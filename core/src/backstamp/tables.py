"""The alias x host table as Markdown, for READMEs and docs.

In: the cells of a matrix. Out: Markdown text. It judges nothing.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence

from backstamp.explanation import MatrixCell

__all__ = ["markdown_matrix"]

_SHORT = {"prefill": "P", "decode": "D", "verify": "V", "draft_decode": "dd", "draft_extend": "de"}


def markdown_matrix(cells: Sequence[MatrixCell]) -> str:
    """One row a host, one column a key; a cell is the kernel where all phases agree, else kernel by phase."""
    aliases = list(dict.fromkeys(cell.alias for cell in cells))
    hosts = list(dict.fromkeys(cell.host for cell in cells))
    lines = [f"| host | {' | '.join(f'`{alias}`' for alias in aliases)} |", "|---" * (len(aliases) + 1) + "|"]
    for host in hosts:
        row = [_cell([cell for cell in cells if cell.host == host and cell.alias == alias]) for alias in aliases]
        lines.append(f"| {host} | {' | '.join(row)} |")
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
