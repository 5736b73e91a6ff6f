"""Distributions on disk that discovery can find: metadata, a package, and what its plugin module says.

In: a folder and what to write. Out: an installed-looking tree to put on `sys.path`. Real files, so that discovery is
tested on what it really reads.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from backstamp.declarations import ANY, Offer, PageSizes
from backstamp.declared import Declared, declared_to_json

__all__ = ["PLUGIN_SOURCE", "cpu_offer", "write_distribution", "write_plugin", "write_record"]

#: A plugin module that declares one kernel; format with `kernel` and `package`.
PLUGIN_SOURCE = """\
from backstamp.declarations import ANY, Offer, PageSizes
from backstamp.hookspecs import hookimpl


@hookimpl
def backstamp_offers():
    return (
        Offer(
            kernel="{kernel}",
            factory="{package}.backend:build",
            family="mha",
            device="cpu",
            archs=ANY,
            phases=frozenset({{"prefill", "decode", "verify"}}),
            dtypes=frozenset({{"bf16", "fp32"}}),
            head_dims=ANY,
            page_sizes=PageSizes(preferred=16, multiple_of=1),
            prefix=True,
            mask_format="internal_causal",
        ),
    )
"""


def cpu_offer(kernel: str, package: str) -> Offer:
    """The offer `PLUGIN_SOURCE` declares, as a value."""
    return Offer(
        kernel=kernel,
        factory=f"{package}.backend:build",
        family="mha",
        device="cpu",
        archs=ANY,
        phases=frozenset({"prefill", "decode", "verify"}),
        dtypes=frozenset({"bf16", "fp32"}),
        head_dims=ANY,
        page_sizes=PageSizes(preferred=16, multiple_of=1),
        prefix=True,
        mask_format="internal_causal",
    )


def write_distribution(
    site: Path, name: str, *, version: str = "1.0", requires: tuple[str, ...] = (), entry_points: str = ""
) -> Path:
    """Write one `dist-info` folder into a site folder and return it."""
    stem = name.replace("-", "_")
    info = site / f"{stem}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n", "utf-8")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points, "utf-8")
    return info


def write_plugin(
    site: Path,
    name: str,
    *,
    kernel: str | None = None,
    source: str | None = None,
    entry: str | None = None,
    target: str | None = None,
    carries_json: bool = False,
    version: str = "1.0",
    requires: tuple[str, ...] = ("backstamp>=0.2,<0.3",),
    record: bool = True,
    points: str | None = None,
) -> str:
    """Write a plugin distribution `name` and return its package name.

    `source` is the text of plugin.py (default: one CPU kernel), `target` the entry point's value, `carries_json`
    writes `backstamp.json` beside it as a wheel would, `record` lists what was installed as an installer would (an
    editable install has no such list), `points` is the text of entry_points.txt where one entry will not do.
    """
    package = name.replace("-", "_")
    kernel = kernel if kernel is not None else package
    folder = site / package
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text("", "utf-8")
    text = PLUGIN_SOURCE.format(kernel=kernel, package=package) if source is None else source
    (folder / "plugin.py").write_text(text, "utf-8")
    if carries_json:
        declared = Declared(offers=(cpu_offer(kernel, package),))
        (folder / "backstamp.json").write_text(declared_to_json(declared), "utf-8")
    if points is None:
        points = f"[backstamp.plugins]\n{entry or package} = {target or f'{package}.plugin'}\n"
    info = write_distribution(site, name, version=version, requires=requires, entry_points=points)
    if record:
        write_record(info, [f"{package}/{path.name}" for path in sorted(folder.iterdir()) if path.is_file()])
    return package


def write_record(info: Path, files: Sequence[str]) -> None:
    """Write the list of installed files of a `dist-info` folder."""
    own = [f"{info.name}/{path.name}" for path in sorted(info.iterdir())]
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in (*files, *own, f"{info.name}/RECORD")), "utf-8")
