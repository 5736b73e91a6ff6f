"""Pictures of a record, as SVG and PNG: where each shape lies under the machine's roof, and who is how fast at it.

In: a record and a folder; needs matplotlib (requirements/bench.txt), and no GPU. Out: `roofline` and one `ratios-WORK`
for each work with figures. What is drawn is what the record says: no number is computed here but an intensity.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from records import Row
from shapes import WORKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot"]

#: Works drawn alike in the roofline, with a colour each of Okabe and Ito's palette, which tells them apart to all eyes.
_GROUPS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "prefill, extend": ("#0072B2", ("prefill", "extend")),
    "decode": ("#D55E00", ("decode",)),
    "verify": ("#CC79A7", ("verify",)),
    "MLA": ("#009E73", ("mla_prefill", "mla_decode")),
    "sparse MLA": ("#E69F00", ("sparse_mla_prefill", "sparse_mla_decode")),
    "linear": ("#000000", ("gdn_prefill", "gdn_decode", "kda_prefill", "kda_decode")),
}
_OURS: Final = "triton"
#: Intensities nearer than this would be drawn upon each other.
_ALIKE: Final = 1.08
_STYLE: Final[dict[str, object]] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "backstamp",
    "figure.facecolor": "white",
}


def plot(record: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw a record; the files, in order.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("--plot needs matplotlib: pip install -r requirements/bench.txt") from missing
    folder.mkdir(parents=True, exist_ok=True)
    results: list[Row] = record["results"]
    written = []
    with matplotlib.rc_context(_STYLE):
        written += _save(_roofline(record, results), folder, "roofline")
        for work in WORKS:
            rows = [row for row in results if row["work"] == work and row.get("ratio_to_best") is not None]
            if rows:
                written += _save(_ratios(record, work, rows), folder, f"ratios-{work}")
    return written


def _save(figure: Figure, folder: Path, name: str) -> list[Path]:
    paths = [folder / f"{name}.{form}" for form in ("svg", "png")]
    # no date: the same record draws the same file
    figure.savefig(paths[0], bbox_inches="tight", metadata={"Date": None})
    figure.savefig(paths[1], bbox_inches="tight", dpi=160)
    return paths


def _roofline(record: Mapping[str, Any], results: Sequence[Row]) -> Figure:
    """Each shape's fastest of ours, and of all others, above each other at the shape's intensity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.2))
    axes = figure.add_subplot()
    copy, product = record["limits"]["copy_tbps"], record["limits"]["bf16_tflops"]
    for shape, x in _places(results).items():
        rows = [row for row in results if (row["work"], row["shape"]) == shape]
        _draw_shape(axes, rows, x, next(colour for colour, works in _GROUPS.values() if shape[0] in works))
    low, high = _reach(results)
    ridge = product / copy
    axes.plot([low, ridge, max(high, 2 * ridge)], [low * copy, product, product], color="0.35", lw=1.4, zorder=1)
    words = {"textcoords": "offset points", "color": "0.25", "bbox": {"fc": "white", "ec": "none", "pad": 1.0}}
    middle = (low * ridge) ** 0.5
    axes.annotate(f"copy {copy:g} TB/s", (middle, middle * copy), (-10, 8), ha="right", **words)  # type: ignore[arg-type]
    end = (max(high, 2 * ridge), product)
    axes.annotate(f"bf16 product {product:g} TFLOP/s", end, (0, 6), ha="right", **words)  # type: ignore[arg-type]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP a byte that must move (shapes of one intensity are drawn side by side)",
        ylabel="TFLOP/s",
    )
    axes.set_ylim(top=3 * product)
    axes.set_title(f"{record['host']}: the work under the roof of the machine", loc="left", fontsize=10)
    axes.grid(True, which="major", color="0.9", lw=0.6)
    _explain(axes, {group: colour for group, (colour, works) in _GROUPS.items() if _has(results, works)})
    return figure


def _places(results: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Where each shape is drawn: at its intensity, beside the others that have it too."""
    intensity = {
        (row["work"], row["shape"]): row["tflops"] / row["tbps"] for row in results if row["tbps"] and row["tflops"]
    }
    heaps: list[list[tuple[str, str]]] = []
    for shape in sorted(intensity, key=lambda at: intensity[at]):
        if heaps and intensity[shape] < _ALIKE * intensity[heaps[-1][0]]:
            heaps[-1].append(shape)
        else:
            heaps.append([shape])
    return {
        shape: intensity[shape] * _ALIKE ** ((2 * at - len(heap) + 1) / max(1, len(heap) - 1) * min(4, len(heap) / 2))
        for heap in heaps
        for at, shape in enumerate(heap)
    }


def _draw_shape(axes: Axes, rows: Sequence[Row], x: float, colour: str) -> None:
    ours = min((row for row in rows if row["library"] == _OURS), key=lambda row: row["us"], default=None)
    others = min((row for row in rows if row["library"] != _OURS), key=lambda row: row["us"], default=None)
    heights = [row["tflops"] for row in (ours, others) if row is not None]
    axes.plot([x] * len(heights), heights, color=colour, lw=0.9, alpha=0.6, zorder=2)
    if ours is not None:
        axes.plot(x, ours["tflops"], marker="o", ms=5, mfc=colour, mec=colour, zorder=3)
    if others is not None:
        axes.plot(x, others["tflops"], marker="D", ms=4.5, mfc="none", mec=colour, zorder=4)


def _explain(axes: Axes, colours: Mapping[str, str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, lw=3, label=group) for group, colour in colours.items()]
    handles.append(Line2D([], [], color="0.3", lw=0, marker="o", mfc="0.3", label="our Triton kernels"))
    handles.append(Line2D([], [], color="0.3", lw=0, marker="D", mfc="white", ms=4.5, label="the fastest other"))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _reach(results: Sequence[Row]) -> tuple[float, float]:
    """The least and the greatest intensity, with room beside them."""
    seen = [row["tflops"] / row["tbps"] for row in results if row["tbps"] > 0 and row["tflops"] > 0]
    return (min(seen) / 2, max(seen) * 2) if seen else (0.1, 1000.0)


def _has(results: Sequence[Row], works: Sequence[str]) -> bool:
    return any(row["work"] in works for row in results)


def _ratios(record: Mapping[str, Any], work: str, rows: Sequence[Row]) -> Figure:
    """A table of shapes by kernels: the speed of each beside the fastest of its shape, in the same run."""
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    kernels = _kernels(rows)
    ratios = {(row["shape"], row["kernel"]): row["ratio_to_best"] for row in rows}
    figure = Figure(figsize=(2.6 + 0.62 * len(kernels), 1.3 + 0.3 * len(shapes)))
    axes = figure.add_subplot()
    grid = [[ratios.get((shape, kernel), float("nan")) for kernel, _ in kernels] for shape in shapes]
    image = axes.imshow(grid, cmap="cividis", vmin=0.0, vmax=1.0, aspect="auto")
    image.cmap.set_bad("0.93")
    for y, line in enumerate(grid):
        for x, ratio in enumerate(line):
            known = ratio == ratio
            ink = "0.45" if not known else "black" if ratio > 0.55 else "white"
            weight = "bold" if known and ratio >= 0.9995 else "normal"
            axes.text(
                x, y, f"{ratio:.2f}" if known else "-", ha="center", va="center", color=ink, fontsize=8, weight=weight
            )
    axes.set_yticks(range(len(shapes)), shapes)
    names = [f"{kernel} *" if direct else kernel for kernel, direct in kernels]
    axes.set_xticks(range(len(kernels)), names, rotation=35, ha="left", rotation_mode="anchor")
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.set_xticks([x - 0.5 for x in range(1, len(kernels))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(1, len(shapes))], minor=True)
    axes.grid(which="minor", color="white", lw=1.5)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    words = f"{work} on {record['host']}: speed beside the fastest of the shape in the same run; * called without us"
    axes.set_xlabel(words, fontsize=8, loc="left", labelpad=8)
    return figure


def _kernels(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """Kernels and whether they are called directly: built ones first, the faster before the slower."""
    ratios: dict[tuple[str, bool], list[float]] = {}
    for row in rows:
        ratios.setdefault((row["kernel"], row.get("direct", False)), []).append(row["ratio_to_best"])
    return sorted(ratios, key=lambda name: (name[1], -statistics.median(ratios[name]), name[0]))
