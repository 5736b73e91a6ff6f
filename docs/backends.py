"""The page of backends: every declared row with its library, where it runs, and what was measured of it.

In: the catalogue, and the records `bench/kernels.py --check` wrote. Out: Markdown. A row nobody ran says so: the
words come from the records alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from backstamp.catalogue import Catalogue
from backstamp.declarations import ANY, PHASES, Offer, Slot
from backstamp.hostfit import archs_fit

__all__ = ["NOT_RUN", "backend_rows", "measured", "read_records"]

NOT_RUN = "not yet run on hardware"
_SLOTS: tuple[Slot, ...] = ("attention", "linear")
_HEAD = "| kernel | family | phases | features | runs on | library | measured |\n|---|---|---|---|---|---|---|\n"


def read_records(folder: Path) -> list[Mapping[str, Any]]:
    """The records of every machine that has checks."""
    records = (json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json")))
    return [record for record in records if "checks" in record]


def backend_rows(catalogue: Catalogue, records: Sequence[Mapping[str, Any]], distribution: str) -> str:
    """The table of one distribution's rows."""
    kernels = [rows for slot in _SLOTS for (at, _), rows in catalogue.rows.items() if at == slot]
    lines = (
        _line(row.offer, index, records)
        for rows in kernels
        for index, row in enumerate(rows)
        if row.plugin.distribution == distribution
    )
    return _HEAD + "".join(lines)


def measured(offer: Offer, index: int, records: Sequence[Mapping[str, Any]]) -> str:
    """What the checks of each machine say of one row, the `index`th of its kernel: cases and worst error, or what
    failed, or that none was run.

    Phases are named where not all that the row serves were run.
    """
    told = []
    for record in records:
        # one case may have been reached by two keys
        served = (line for line in record["checks"] if _is_of(offer, index, line, record))
        lines = list({(line["phase"], line["case"]): line for line in served}.values())
        wrong = [line for line in lines if line["status"] != "ok"]
        errors = [line["rel_error"] for line in lines if isinstance(line.get("rel_error"), float)]
        if wrong:
            told.append(f"{record['host']}: {len(wrong)} of {len(lines)} cases wrong")
        elif lines:
            seen = [phase for phase in PHASES if phase in {line["phase"] for line in lines}]
            where = "" if set(seen) == offer.all_phases else f" in {_words(seen)}"
            told.append(f"{record['host']}: {_cases(lines)}{where}, error up to {max(errors, default=0.0):.1e}")
    return "; ".join(told) or NOT_RUN


def _is_of(offer: Offer, index: int, line: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether one case was served by this row. A line names it by number, and by what the row still has to say."""
    if line["status"] == "refused" or line.get("row") != index:
        return False
    if (line["kernel"], line.get("family")) != (offer.kernel, offer.family):
        return False
    library = line.get("library")
    built_on = None if library is None else library["distribution"]
    return (
        line.get("phase") in offer.all_phases
        and built_on == (Requirement(offer.requires[0]).name if offer.requires else None)
        and offer.device in (record["device"], "any")
        and archs_fit(offer.archs, record["arch"], offer.forward_archs)
    )


def _line(offer: Offer, index: int, records: Sequence[Mapping[str, Any]]) -> str:
    slot = "" if offer.slot == "attention" else f" ({offer.slot})"
    phases = _words(phase for phase in PHASES if phase in offer.all_phases)
    library = _words(f"`{name}`" for name in offer.requires) or "PyTorch"
    features = [*sorted(offer.features), *(["deterministic"] if offer.deterministic else [])]
    features += [f"{dtype} cache" for dtype in sorted(offer.kv_dtypes - {"same"})]
    run = measured(offer, index, records)
    cells = (f"`{offer.kernel}`{slot}", offer.family, phases, _words(features), _where(offer), library, run)
    return f"| {' | '.join(cells)} |\n"


def _where(offer: Offer) -> str:
    """Device and archs as people say them."""
    if offer.device == "any":
        return "any device"
    newer = {"no": "", "major": " and newer minors", "any": " and newer"}[offer.forward_archs]
    archs = "" if offer.archs == ANY else f" {_words(offer.archs)}{newer}"
    features = f" with {_words(sorted(offer.cpu_features))}" if offer.cpu_features else ""
    return f"{offer.device}{archs}{features}"


def _cases(lines: Sequence[object]) -> str:
    return "1 case" if len(lines) == 1 else f"{len(lines)} cases"


def _words(items: Iterable[str]) -> str:
    return ", ".join(items)
