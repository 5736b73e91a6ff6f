"""A run's figures for people, on 80 columns: a block a shape, the fastest first; then what was not run, and why.

In: a record and the rows to tell. Out: text. It computes nothing that the record does not hold.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from records import Row
from shapes import Shape

__all__ = ["not_run_lines", "shapes_table", "table"]

_WIDTH: Final = 80
_NAME: Final = 30
_HEAD: Final = f"  {'kernel':{_NAME}}{'us':>9}{'TFLOP/s':>8}{'TB/s':>7}{'limit':>6}{'best':>6}{'peer':>6}{'err':>6}"
_KEY: Final = (
    "* called without us. limit: share of what bounds the shape, as measured in this run. best: speed beside the "
    "fastest of the shape; peer: beside the fastest of another library, above 1 where ahead. err: worst relative error."
)


def table(record: Mapping[str, Any], rows: Sequence[Row], not_run: Sequence[Row]) -> str:
    """What a run measured, with the machine and its limits above and what has no figure below."""
    of_runs = {entry["run"]: entry["limits"] for entry in record["runs"]}
    # another bench may have begun a run since
    limits = of_runs[rows[0]["run"]] if rows else record["limits"]
    lines = [f"{record['host']}: copy {limits['copy_tbps']} TB/s, bf16 product {limits['bf16_tflops']} TFLOP/s"]
    lines += textwrap.wrap(", ".join(f"{name} {version}" for name, version in record["versions"].items()), _WIDTH)
    for (work, shape), of in groupby(rows, key=lambda row: (row["work"], row["shape"])):
        told = list(of)
        lines += ["", f"{work}  {shape}  (bound by {told[0]['bound']})", _HEAD]
        # beside replays of graphs, a call that could not be recorded pays for its launches
        mixed = len({row.get("timed") for row in told}) > 1
        lines += [_line(row, " (eager)" if mixed and row.get("timed") == "eager" else "") for row in told]
    if rows:
        lines += ["", *textwrap.wrap(_KEY, _WIDTH)]
    lines += not_run_lines(not_run)
    return "\n".join(lines)


def not_run_lines(not_run: Sequence[Row]) -> list[str]:
    """A paragraph a kernel and reason, with the shapes it is of."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for row in not_run:
        shapes.setdefault((row.get("kernel", ""), row["reason"]), []).append(f"{row['work']} {row['shape']}")
    lines = [""] if shapes else []
    for (kernel, reason), of in shapes.items():
        where = of[0] if len(of) == 1 else f"{len(of)} shapes, {of[0]} the first"
        text = f"not run: {kernel + ': ' if kernel else ''}{reason} ({where})"
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def shapes_table(shapes: Sequence[Shape]) -> str:
    """What is listed, and how much work each shape is at least."""
    lines = [f"{'work':20}{'shape':44}{'GFLOP':>8}{'MB':>8}"]
    lines += [f"{of.work:20}{of.label:44}{of.flops / 1e9:>8.0f}{of.bytes / 1e6:>8.0f}" for of in shapes]
    return "\n".join(lines)


def _line(row: Row, how: str) -> str:
    name = f"{'*' if row['direct'] else ' '} {row['kernel']}{how}"
    numbers = f"{_short(row['us']):>9}{_short(row['tflops']):>8}{_short(row['tbps']):>7}{row['share']:>6.2f}"
    numbers += f"{_ratio(row['ratio_to_best']):>6}{_ratio(row['ratio_to_peer']):>6}{row['rel_error']:>6.0e}"
    if len(name) <= _NAME + 2:
        return f"{name:{_NAME + 2}}{numbers.rjust(_WIDTH - _NAME - 2)[1:]}"
    return f"{name}\n{numbers.rjust(_WIDTH - 1)}"


def _short(number: float) -> str:
    """At most five characters of figures where it can be."""
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}" if number >= 1 else f"{number:.3f}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
