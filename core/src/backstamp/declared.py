"""One plugin's declarations as a value, and its JSON form `backstamp.json`.

In: what the hooks answered, or the JSON a wheel carries. Out: `Declared`, equal whichever way it came. Reading JSON
imports nothing of the plugin; a malformed file is a `DeclarationError` naming the field.

.. versionadded:: 0.1
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import cast

from backstamp.declarations import (
    Alias,
    EntryPair,
    FamilyDefault,
    FeatureDefault,
    Offer,
    PageSizes,
    RetiredSetting,
)
from backstamp.errors import DeclarationError
from backstamp.text import plain

__all__ = ["JSON_NAME", "SCHEMA", "Declared", "carried_text", "declared_from_json", "declared_to_json"]

SCHEMA = 1
JSON_NAME = "backstamp.json"
#: A hundred rows come to 100 KB.
_LIMIT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Everything one plugin module declares."""

    offers: tuple[Offer, ...] = ()
    aliases: tuple[Alias, ...] = ()
    entry_classes: tuple[EntryPair, ...] = ()
    retired_settings: tuple[RetiredSetting, ...] = ()
    family_defaults: tuple[FamilyDefault, ...] = ()
    feature_defaults: tuple[FeatureDefault, ...] = ()


_ROWS: Mapping[str, Callable[..., object]] = {
    "offers": Offer,
    "aliases": Alias,
    "entry_classes": EntryPair,
    "retired_settings": RetiredSetting,
    "family_defaults": FamilyDefault,
    "feature_defaults": FeatureDefault,
}
_SETS = frozenset(
    {
        "phases",
        "draft_phases",
        "dtypes",
        "kv_dtypes",
        "kv_forms",
        "index_forms",
        "cpu_features",
        "features",
        "needs",
        "excludes",
        "inputs",
        "build_settings",
        "sink_dtypes",
        "allowed",
    }
)


def declared_to_json(declared: Declared) -> str:
    """The canonical text of `backstamp.json`: sorted keys, defaults left out, one trailing newline."""
    tables = {name: [_row_to_json(row) for row in getattr(declared, name)] for name in _ROWS if getattr(declared, name)}
    return json.dumps({"schema": SCHEMA, **tables}, indent=1, sort_keys=True) + "\n"


def carried_text(path: Path, root: str, who: str) -> str | None:
    """The text of a `backstamp.json` that a distribution under `root` carries; None where it carries none.

    Raises:
        DeclarationError: the file is a link out of its distribution, or larger than any declarations are.
    """
    if not path.is_file():
        return None
    real = path.resolve()
    # an installer may link every file of a wheel to its cache: then plugin.py lies beside it there too
    beside = path.with_name("plugin.py").resolve().parent
    if not real.is_relative_to(root) and real.parent != beside:
        raise DeclarationError(
            who, needed=f"{JSON_NAME} inside its own distribution", found=f"a link to {plain(str(real))}", fix=_FIX
        )
    size = path.stat().st_size
    if size > _LIMIT_BYTES:
        found = f"{size} bytes"
        raise DeclarationError(who, needed=f"{JSON_NAME} of at most {_LIMIT_BYTES} bytes", found=found, fix=_FIX)
    return path.read_text("utf-8")


def declared_from_json(text: str, who: str) -> Declared:
    """Read `backstamp.json`.

    Raises:
        DeclarationError: the text is not JSON, has another schema, or a row has an unknown or missing field.
    """
    try:
        data = json.loads(text)
    # a few thousand brackets are deep enough for RecursionError
    except (ValueError, RecursionError) as cause:
        raise DeclarationError(who, needed="backstamp.json to be JSON", found=str(cause), fix=_FIX) from cause
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise DeclarationError(who, needed=f"backstamp.json with schema {SCHEMA}", found=repr(found), fix=_FIX)
    tables: dict[str, tuple[object, ...]] = {}
    for name, kind in _ROWS.items():
        rows = data.get(name, [])
        if not isinstance(rows, list):
            raise DeclarationError(who, needed=f"{name} to be a list", found=type(rows).__name__, fix=_FIX)
        tables[name] = tuple(_row_from_json(kind, row, f"{who}, {name}[{at}]") for at, row in enumerate(rows))
    return _declared(tables)


_FIX = "Write it anew with `backstamp declare`"


def _declared(tables: Mapping[str, tuple[object, ...]]) -> Declared:
    return Declared(
        offers=cast("tuple[Offer, ...]", tables["offers"]),
        aliases=cast("tuple[Alias, ...]", tables["aliases"]),
        entry_classes=cast("tuple[EntryPair, ...]", tables["entry_classes"]),
        retired_settings=cast("tuple[RetiredSetting, ...]", tables["retired_settings"]),
        family_defaults=cast("tuple[FamilyDefault, ...]", tables["family_defaults"]),
        feature_defaults=cast("tuple[FeatureDefault, ...]", tables["feature_defaults"]),
    )


def _row_to_json(row: Offer | Alias | EntryPair | RetiredSetting | FamilyDefault | FeatureDefault) -> dict[str, object]:
    written: dict[str, object] = {}
    for field in fields(row):
        value = getattr(row, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if value != default:
            written[field.name] = _value_to_json(value)
    return written


def _value_to_json(value: object) -> object:
    if isinstance(value, PageSizes):
        return {"preferred": value.preferred, "exact": list(value.exact), "multiple_of": value.multiple_of}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_value_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _value_to_json(item) for key, item in value.items()}
    return value


def _row_from_json(kind: Callable[..., object], row: object, who: str) -> object:
    if not isinstance(row, dict):
        raise DeclarationError(who, needed="a JSON object", found=type(row).__name__, fix=_FIX)
    try:
        return kind(**{name: _value_from_json(name, value) for name, value in row.items()})
    except KeyError as cause:
        raise DeclarationError(who, needed=f"the field {cause}", found="no such field", fix=_FIX) from cause
    except (TypeError, ValueError) as cause:
        raise DeclarationError(who, needed=f"the fields of {kind.__name__}", found=str(cause), fix=_FIX) from cause


def _value_from_json(name: str, value: object) -> object:
    if name == "page_sizes" and isinstance(value, dict):
        exact = tuple(value.get("exact", ()))
        return PageSizes(preferred=value["preferred"], exact=exact, multiple_of=value.get("multiple_of", 0))
    if name in _SETS and isinstance(value, list):
        return frozenset(value)
    if isinstance(value, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    if name == "by_phase" and isinstance(value, dict):
        return {phase: tuple(kernels) if isinstance(kernels, list) else kernels for phase, kernels in value.items()}
    if name in ("phase_inputs", "sub_settings") and isinstance(value, dict):
        return {key: frozenset(words) if isinstance(words, list) else words for key, words in value.items()}
    return value
