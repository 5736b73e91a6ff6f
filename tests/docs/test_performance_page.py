"""What the page of kernel speed claims is what the record holds: a figure nobody measured cannot stay on it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text("utf-8")
RECORD = json.loads((ROOT / "bench" / "results" / "h200.json").read_text("utf-8"))
#: A library's name where the column is of several, microseconds, and the speed beside the fastest of the shape.
FIGURE = re.compile(r"(?:(?P<name>.+): )?(?P<us>[0-9.]+) \((?P<ratio>[01]\.[0-9]{2})\)")
#: Kernels of a column, where its head is no kernel's name.
COLUMNS = {"`xqa`, `fmha_v2`": ("xqa", "fmha_v2"), "`flashmla`": ("flashmla", "dsa")}


#: Columns of the speed of `triton` beside a copy: of as many bytes, and of 1 GiB.
COPY = "copy"
SHARES = "memory"


def _cells() -> list[tuple[str, str, str]]:
    """Work and shape, head of the column, and what the cell says: of every table of figures, where it says anything."""
    found: list[tuple[str, str, str]] = []
    heads: list[str] = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] == "work and shape":
            heads = cells
        elif not cells:
            heads = []
        elif heads and not line.startswith("|---"):
            found += [(cells[0], head, cell) for head, cell in zip(heads[1:], cells[1:], strict=True) if cell]
    return found


def _figures() -> list[tuple[str, tuple[str, ...], str, str]]:
    """Work and shape, the kernels a figure may be of, microseconds, ratio: each cell that is no share."""
    found = []
    for place, head, cell in _cells():
        if head in (COPY, SHARES):
            continue
        told = FIGURE.fullmatch(cell)
        assert told is not None, cell
        kernels = (told["name"],) if told["name"] else COLUMNS.get(head, (head.strip("`"),))
        if head == "`triton`" and place.startswith("sparse"):
            kernels = ("dsa, Triton inside",)
        found.append((place, kernels, told["us"], told["ratio"]))
    return found


def test_the_table_has_figures() -> None:
    """A table written another way would pass for want of anything to hold."""
    assert len(_figures()) > 150


@pytest.mark.parametrize(("place", "kernels", "us", "ratio"), _figures())
def test_a_figure_of_the_table_is_in_the_record(place: str, kernels: tuple[str, ...], us: str, ratio: str) -> None:
    """In its own line and column: the time and the ratio of that kernel at that shape, rounded as they are told."""
    work, _, shape = place.partition(" ")
    decimals = len(us.partition(".")[2])
    rows = [
        (f"{row['us']:.{decimals}f}", f"{row['ratio_to_best'] or 0:.2f}")
        for row in RECORD["results"]
        if (row["work"], row["shape"]) == (work, shape) and row["kernel"] in kernels
    ]
    assert rows == [(us, ratio)]


@pytest.mark.parametrize(("place", "share"), [(place, cell) for place, head, cell in _cells() if head == SHARES])
def test_a_share_of_the_table_is_in_the_record(place: str, share: str) -> None:
    """Rounded as it is told, and of what bounds the shape in that run."""
    work, _, shape = place.partition(" ")
    rows = [row for row in RECORD["results"] if (row["work"], row["shape"], row["kernel"]) == (work, shape, "triton")]
    assert [(f"{row['share']:.2f}", row["bound"]) for row in rows] == [(share, "memory")]


@pytest.mark.parametrize(("place", "beside"), [(place, cell) for place, head, cell in _cells() if head == COPY])
def test_a_speed_beside_a_copy_is_in_the_record(place: str, beside: str) -> None:
    """Rounded as it is told, of a copy in the same rounds."""
    work, _, shape = place.partition(" ")
    rows = [row for row in RECORD["results"] if (row["work"], row["shape"], row["kernel"]) == (work, shape, "triton")]
    assert [f"{row['copy_us'] / row['us']:.2f}" for row in rows] == [beside]


#: Lines of the table of host times: work, kernel, what `forward` and `plan` add, and what `forward` stands beside.
HOST = re.compile(r"\| (\w+) \| `(\w+)`(, Triton inside)? \| ([-+][0-9.]+) \| ([^|]+) \| ([-+][0-9.]+) \|")


@pytest.mark.parametrize(("work", "kernel", "inside", "forward", "beside", "plan"), HOST.findall(PAGE))
def test_a_host_time_is_in_the_record(work, kernel, inside, forward, beside, plan) -> None:
    """Rounded as it is told, beside the call that was measured."""
    rows = [row for row in RECORD["dispatch"] if (row["work"], row["kernel"]) == (work, kernel + inside)]
    told = [row for row in rows if "forward_over_us" in row]
    found = [(f"{row['forward_over_us']:+.1f}", row["direct"], f"{row['plan_over_us']:+.1f}") for row in told]
    assert found == [(forward, beside, plan)]


def test_the_table_of_host_times_has_lines() -> None:
    """One written another way would pass for want of anything to hold, and so would a line of it."""
    head = "| work | kernel | `forward` | beside | `plan` |\n|---|---|---|---|---|\n"
    table = PAGE.partition(head)[2].partition("\n\n")[0].splitlines()
    assert len(table) > 15
    assert [line for line in table if HOST.fullmatch(line) is None] == []
    assert len(HOST.findall(PAGE)) == len(table)


def test_a_line_of_the_table_is_of_one_run() -> None:
    """Ratios across runs compare machines, not kernels."""
    for place in {figure[0] for figure in _figures()}:
        work, _, shape = place.partition(" ")
        runs = {row["run"] for row in RECORD["results"] if (row["work"], row["shape"]) == (work, shape)}
        assert len(runs) == 1, place


def test_what_the_page_links_is_there() -> None:
    """Plots and records are committed with the page."""
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert target.startswith("http") or (ROOT / "docs" / target).exists(), target
