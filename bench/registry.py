"""What the registry costs, side by side with peers in one run: import, discovery, resolve.

    python bench/registry.py [--json] [--rounds N]

Peers: `import pluggy`; `importlib_metadata.entry_points(group=...)` itself and stevedore on the same tree. Read the
ratios: the times are this machine's. TokenSpeed's selection without reasons took 55 us on the machine the target was
set on; it is quoted, not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import importlib_metadata
import packaging.requirements  # noqa: F401  (imports are done before discovery is timed)
from stevedore import ExtensionManager

import backstamp.hookspecs  # noqa: F401
from backstamp.catalogue import Catalogue
from backstamp.compiled import compile_for
from backstamp.declarations import PageSizes
from backstamp.discovery import GROUP, discover
from backstamp.engine import EngineFacts
from backstamp.host import load_host
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.resolution import resolve_on
from backstamp.testing.dists import cpu_offer, write_distribution, write_plugin
from backstamp.testing.fakes import catalogue_of, fake_plugin

DISTRIBUTIONS, PLUGINS, CANDIDATES = 300, 10, 20


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows = [*imports(options.rounds), *discovery(options.rounds), *resolves(options.rounds)]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'what':56} {'time':>12} {'ratio':>7}  {'target':>7}  beside")
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
        print(f"{row['what']:56} {row['us']:>9.1f} us {ratio:>7}  {row['target']:>7}  {row['beside']}")
    return 0


def imports(rounds: int) -> list[dict[str, object]]:
    """Fresh processes, alternating; what an empty interpreter costs is taken off both."""
    programs = {
        "nothing": "pass",
        "pluggy": "import pluggy",
        "backstamp": "import backstamp",
        "first": (
            "import backstamp as b;"
            "c = b.build_catalogue(b.discover());"
            "b.resolve(b.make_launch(b.Requests()), b.EngineFacts(), b.default_model(), b.load_host('h100'), c)"
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            times[name].append((time.perf_counter() - begin) * 1e6)
    floor = min(times["nothing"])
    own, peer, first = (min(times[name]) - floor for name in ("backstamp", "pluggy", "first"))
    return [
        row("import backstamp", own, own / peer, "<= 1", "import pluggy"),
        row("import pluggy", peer),
        row("import, discover and first resolve, one process", first, first / peer, "", "import pluggy"),
    ]


def discovery(rounds: int) -> list[dict[str, object]]:
    """Cold: metadata caches dropped before every round; imports already done; declarations read as data."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        for at in range(DISTRIBUTIONS - PLUGINS):
            points = f"[console_scripts]\ntool{at} = pkg{at}.cli:main\n" if at % 3 == 0 else ""
            write_distribution(site, f"library-{at}", requires=("numpy", "rich"), entry_points=points)
        for at in range(PLUGINS):
            write_plugin(site, f"kernels-{at}", carries_json=True)
        # the tree alone beside the standard library, for every competitor
        standard = [item for item in sys.path if "python3" in item and "site-" not in item]
        path, sys.path = sys.path, [str(site), *standard]
        try:
            timed = alternate(
                rounds,
                {
                    "own": lambda: expect(len(discover().found), PLUGINS),
                    "peer": lambda: expect(len(importlib_metadata.entry_points(group=GROUP)), PLUGINS),
                    "stevedore": lambda: expect(len(stevedore_names()), PLUGINS),
                },
                before=drop_caches,
            )
        finally:
            sys.path = path
    own, peer, other = timed["own"], timed["peer"], timed["stevedore"]
    size = f"{DISTRIBUTIONS} distributions, {PLUGINS} plugins"
    return [
        row(f"discover, {size}", own, own / peer, "<= 1.2", "importlib_metadata.entry_points"),
        row("importlib_metadata.entry_points(group=...)", peer),
        row("stevedore, plugins imported before", other, other / peer, "", "importlib_metadata.entry_points"),
    ]


def stevedore_names() -> list[str]:
    """stevedore's manager on the group; it imports each plugin, the first round only, and keeps a cache on disk."""
    ExtensionManager.ENTRY_POINT_CACHE.clear()
    return list(ExtensionManager(GROUP).names())


def resolves(rounds: int) -> list[dict[str, object]]:
    """A full resolve with every verdict, catalogue compiled for the host."""
    host = compile_for(candidates(), load_host("h100"))
    engine, model = EngineFacts(), default_model()
    plain = make_launch(Requests())
    drafted = make_launch(Requests(speculative_algorithm="EAGLE"))
    target = resolve_on(host, drafted, engine, model)

    def five() -> None:
        """Target and draft of one launch: prefill, decode, verify; the draft's loop and extend (and its prefill)."""
        plan = resolve_on(host, drafted, engine, model)
        resolve_on(host, drafted, engine, model, role="draft", target=plan)

    timed = alternate(
        rounds,
        {
            "two": lambda: repeat(lambda: resolve_on(host, plain, engine, model)),
            "three": lambda: repeat(lambda: resolve_on(host, drafted, engine, model)),
            "draft": lambda: repeat(lambda: resolve_on(host, drafted, engine, model, role="draft", target=target)),
            "five": lambda: repeat(five),
        },
    )
    two, three, draft, both = (timed[name] / REPEATS for name in ("two", "three", "draft", "five"))
    return [
        row(f"resolve, {CANDIDATES} candidates, 2 phases", two, two / 55, "60 us", "TokenSpeed, 55 us (quoted)"),
        row(f"resolve, {CANDIDATES} candidates, 3 phases", three, three / 55, "", "TokenSpeed, 55 us (quoted)"),
        row(f"resolve a draft, {CANDIDATES} candidates, 3 phases", draft, draft / 55, "", "TokenSpeed, 55 us (quoted)"),
        row(
            f"resolve target and draft, {CANDIDATES} candidates, 5 phases",
            both,
            both / 55,
            "300 us",
            "TokenSpeed, 55 us (quoted)",
        ),
    ]


REPEATS = 200


def candidates() -> Catalogue:
    """Twenty kernels over four plugins, a third of them refused by the machine, a third by the model."""
    plugins = []
    for plugin in range(4):
        offers = []
        for at in range(CANDIDATES // 4):
            number = plugin * 5 + at
            base = cpu_offer(f"kernel{number}", f"plugin{plugin}")
            offers.append(
                replace(
                    base,
                    device="cuda",
                    archs=("9.0",) if number % 3 else ("10.0",),
                    head_dims=(64, 128) if number % 4 else (64,),
                    priority=number,
                    page_sizes=PageSizes(preferred=16, multiple_of=1),
                )
            )
        plugins.append(fake_plugin(f"plugin{plugin}", offers))
    return catalogue_of(*plugins)


def repeat(call: Callable[[], object]) -> None:
    """Call often enough for the clock."""
    for _ in range(REPEATS):
        call()


def alternate(
    rounds: int, calls: dict[str, Callable[[], object]], before: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Median microseconds of each call, the competitors taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before()
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def drop_caches() -> None:
    """Forget what importlib_metadata remembers of folders it listed."""
    importlib.invalidate_caches()


def expect(found: int, wanted: int) -> None:
    """A bench that measures the wrong thing is stopped."""
    if found != wanted:
        raise SystemExit(f"found {found} of {wanted} plugins")


def row(what: str, us: float, ratio: float = 0.0, target: str = "", beside: str = "") -> dict[str, object]:
    """One line of the report."""
    return {"what": what, "us": us, "ratio": ratio, "target": target, "beside": beside}


if __name__ == "__main__":
    raise SystemExit(main())
