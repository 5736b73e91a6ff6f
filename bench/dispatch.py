"""What a built backend costs beyond its library, a call: host time, waits for the device, and graph replay.

    python bench/dispatch.py [--kernels NAME ...] [--output FILE] [--json] [--profile]

`forward` is compared with the same library call on the same tensors, `plan` with the library's own where it has one.
Times are of the host, over calls made in a row while the device has little to do; medians of turns taken by both.
Targets: `forward` within 1 us, `plan` within 10 us of the library's. On a machine without a GPU it measures our own
layers over torch_native. The figures are the part `dispatch` of this machine's record of `bench/kernels.py`. Exit 1
where a kernel failed, waited or replayed otherwise; 2 where nothing was begun.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import BadInput
from backstamp.host import this_host
from built import Here, Serving, candidates, serve
from direct_calls import direct_call, direct_plan
from dispatch_checks import graph_replay, waits_in
from measuring import DeviceLost, is_asked, is_lost, missing_of
from record_file import Owner, update
from records import Row
from shapes import Shape
from steps import AttentionStep, LinearStep, attention_step, linear_step

__all__ = ["host_us", "measure"]

#: Microseconds that `forward` and `plan` may cost beyond the library.
FORWARD_US: Final = 1.0
PLAN_US: Final = 10.0
#: Calls in a row, few enough to fill no queue of launches, and how often.
_CALLS: Final = 20
_TURNS: Final = 60
_PROFILE_SECONDS: Final = 0.5
#: Little work for the device: one step of each kind.
_LATENT: Final[dict[str, Any]] = {"page_size": 64, "heads": (64, 1), "dims": (576, 512)}
SMALL: Final = (
    Shape("decode", ((1, 128),) * 4, 16),
    Shape("prefill", ((32, 32),) * 2, 16),
    Shape("verify", ((4, 128),) * 4, 16),
    Shape("mla_decode", ((1, 128),) * 4, **_LATENT),
    Shape("mla_prefill", ((16, 16),) * 2, **_LATENT),
    Shape("sparse_mla_decode", ((1, 256),) * 4, topk=128, **_LATENT),
    Shape("sparse_mla_prefill", ((16, 256),) * 2, topk=128, **_LATENT),
    Shape("gdn_decode", ((1, 1),) * 4, heads=(4, 8)),
    Shape("gdn_prefill", ((64, 64),) * 2, heads=(4, 8)),
    Shape("kda_decode", ((1, 1),) * 4, heads=(4, 4)),
    Shape("kda_prefill", ((64, 64),) * 2, heads=(4, 4)),
)
#: On a CPU the work itself must be next to nothing.
TINY: Final = (
    Shape("decode", ((1, 16),) * 2, 16, heads=(2, 1), dims=(16, 16)),
    Shape("gdn_decode", ((1, 1),) * 2, heads=(1, 1), dims=(16, 16)),
)


def main() -> int:
    """Measure, and print what is over its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--output", type=Path, help="put the figures into this record")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes in forward and plan")
    options = parser.parse_args()
    here = Here(this_host(), build_catalogue(discover()))
    owner = Owner.of(here.host)
    rows: list[Row] = []
    try:
        if options.output is not None:
            update(options.output, owner)
        for row in _measured(here, options.kernels, options.profile):
            rows.append(row)
            if options.output is not None:
                # what a later kernel ends or stalls is not lost with it
                update(options.output, owner, lambda before: with_rows(before, rows))
            if not options.json:
                print(_line(row), flush=True)
    except BadInput as refused:
        print(f"bench/dispatch.py: {refused.message}", file=sys.stderr)
        return 2
    if not rows:
        print(f"bench/dispatch.py: no kernel of {', '.join(options.kernels) or 'any name'} runs here", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(rows, indent=1))
    return int(any(map(_is_bad, rows)))


def with_rows(before: Row, rows: Sequence[Row]) -> Row:
    """A record with these rows in place of all older ones of their kernels and shapes."""
    now = {_place(row) for row in rows}
    return {**before, "dispatch": [*(row for row in before.get("dispatch", ()) if _place(row) not in now), *rows]}


def _measured(here: Here, asked: Sequence[str], profile: bool) -> Iterator[Row]:
    for shape in SMALL if here.host.device != "cpu" else TINY:
        try:
            yield from measure(shape, here, asked, profile)
        except DeviceLost as lost:
            print(f"bench/dispatch.py: nothing runs after it: {lost}", file=sys.stderr)
            return


def measure(shape: Shape, here: Here, asked: Sequence[str] = (), profile: bool = False) -> Iterator[Row]:
    """Lines of each kernel that runs the shape here; `status` and `reason` where it failed.

    Raises:
        DeviceLost: behind the line of a kernel that left nothing to run on.
    """
    step: AttentionStep | LinearStep
    step = linear_step(shape, here.device) if shape.linear else attention_step(shape, here.device)
    for candidate in candidates(shape, here):
        if not is_asked(candidate.kernel, asked):
            continue
        row: Row = {"work": shape.work, "shape": shape.label, "kernel": candidate.kernel}
        kernel, inside = candidate.kernel.partition(", Triton inside")[:2]
        asks = {f"dsa_{half}_backend": "triton" for half in ("prefill", "decode")} if inside else {}
        try:
            serving = serve(kernel, step, here, asks)
            yield row | {"library": serving.library} | _costs(serving, kernel, step)
            if profile:
                _profile(serving)
            if here.host.device != "cpu":
                graph = serve(kernel, step, here, asks, "uniform" if serving.offer.graph != "never" else "never")
                yield row | {"library": serving.library} | _holds(serving, graph, step)
        except Exception as cause:
            told = missing_of(cause)
            if told["status"] == "refused":
                print(f"{row['work']} {candidate.kernel}: {told['reason']}"[:200], file=sys.stderr)
                continue
            yield {**row, **told}
            if is_lost(cause):
                raise DeviceLost(told["reason"]) from cause


def _costs(serving: Serving, kernel: str, step: AttentionStep | LinearStep) -> Row:
    state = serving.plan()
    direct, own = direct_call(serving, kernel, step), direct_plan(serving)
    runs: dict[str, Callable[[], object]] = {"forward_us": lambda: serving.forward(state), "plan_us": serving.plan}
    if direct is not None:
        runs["direct_us"] = direct.run
    if own is not None:
        runs["library_plan_us"] = own.run
    times = host_us(runs)
    row: Row = {name: round(us, 2) for name, us in times.items()}
    if direct is not None:
        row |= {"direct": direct.what, "forward_over_us": round(times["forward_us"] - times["direct_us"], 2)}
    return row | {"plan_over_us": round(times["plan_us"] - times.get("library_plan_us", 0.0), 2)}


def _holds(serving: Serving, graph: Serving, step: AttentionStep | LinearStep) -> Row:
    """Waits that are not declared, and graph replay."""
    parts = ("forward",) if serving.offer.plan == "host" else ("plan", "forward")
    waits = {part: words for part in parts if (words := waits_in(serving, part))}
    return {"waits": waits, "plan_waits": waits_in(serving, "plan"), "replay": graph_replay(graph, step)}


def host_us(runs: dict[str, Callable[[], object]], calls: int = _CALLS, turns: int = _TURNS) -> dict[str, float]:
    """Host microseconds of one call of each, in turn: the median of calls made in a row over an idle device."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns):
        for name, run in runs.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            run()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - began) / calls * 1e6)
    return {name: statistics.median(of) for name, of in times.items()}


def _profile(serving: Serving) -> None:
    """Where the host's time goes, the dearest functions first."""
    state = serving.plan()
    for name, run in (("forward", lambda: serving.forward(state)), ("plan", serving.plan)):
        profile = cProfile.Profile()
        profile.enable()
        began = time.perf_counter()
        while time.perf_counter() - began < _PROFILE_SECONDS:
            run()
        profile.disable()
        print(f"-- {name}")
        pstats.Stats(profile).sort_stats("tottime").print_stats(14)


def _place(row: Row) -> tuple[Any, ...]:
    return row["work"], row["shape"], row["kernel"]


def _is_bad(row: Row) -> bool:
    return "status" in row or bool(row.get("waits")) or "differ" in row.get("replay", "")


def _line(row: Row) -> str:
    name = f"{row['work']:20}{row['kernel']:22}"
    if "status" in row:
        return f"{name}{row['status']}: {row['reason']}"
    if "waits" in row:
        waits = "; ".join(f"{part} waits: {words}" for part, words in row["waits"].items()) or "no wait"
        return f"{name}{waits}; replay: {row['replay']}"
    over = row.get("forward_over_us")
    forward = "" if over is None else f"{over:+.2f} over {row['direct']}{' !' if over > FORWARD_US else ''}"
    late = " !" if row["plan_over_us"] > PLAN_US else ""
    plan = f"plan {row['plan_us']:.1f} us {row['plan_over_us']:+.1f}{late}"
    return f"{name}forward {row['forward_us']:.1f} us {forward}; {plan}"


if __name__ == "__main__":
    raise SystemExit(main())
