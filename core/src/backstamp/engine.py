"""What an engine supplies and needs, as facts: the inputs it hands a kernel, its caches, its graphs.

In: an adapter's own statement, or a JSON file (`--engine FILE`). Out: a frozen `EngineFacts`. It never inspects a
running engine.

.. versionadded:: 0.1
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from backstamp.declarations import GRAPH_LEVELS, GraphLevel
from backstamp.errors import BadInput

__all__ = ["EngineFacts", "load_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """One engine.

    Attributes:
        name: for messages.
        index_forms: KV index forms it can build ("page_table", "csr", "indirect").
        kv_forms: "paged", "ragged".
        inputs: extra inputs it supplies ("host_lens", "token_rows").
        mask_formats: masks it can hand over ("2d", "4d_bool"); causal kernels need none.
        layouts: KV layout ids its caches can have.
        graph: the CUDA-graph level it would like to capture decode at.
        replay_hook: whether it can run host code before a graph replay; without it only `plan: device` fits.
        prefix_cache: whether prefill attends over tokens cached by earlier requests or chunks.
        page_size: the page size of its cache where that is fixed, else None.
        components: components whose attention it hands over ("main", "vision", "audio", "cross_attention"); None all.
        tracked_states: whether linear kernels must write the states in between, as caching prefixes of a hybrid does.

    Raises:
        BadInput: a value of another type, an unknown graph level or no page size.
    """

    name: str = "any engine"
    index_forms: frozenset[str] = frozenset({"page_table", "csr", "indirect"})
    kv_forms: frozenset[str] = frozenset({"paged", "ragged"})
    inputs: frozenset[str] = frozenset({"host_lens", "token_rows"})
    mask_formats: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset({"rows"})
    graph: GraphLevel = "never"
    replay_hook: bool = True
    prefix_cache: bool = True
    page_size: int | None = None
    components: frozenset[str] | None = None
    tracked_states: bool = False

    def __post_init__(self) -> None:
        for item in fields(self):
            value: object = getattr(self, item.name)
            needed = _needed(item.name, value)
            if needed:
                raise BadInput(f"engine facts, field {item.name}", needed=needed, found=repr(value))


_SETS: Final = ("index_forms", "kv_forms", "inputs", "mask_formats", "layouts")


def load_engine(path: str) -> EngineFacts:
    """Read engine facts from a JSON object whose keys are the fields of `EngineFacts`.

    Raises:
        BadInput: the file is missing, is not a JSON object, or a field is unknown or of the wrong type.
    """
    who = f"engine file {path}"
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise BadInput(who, needed="a readable JSON file", found=str(cause)) from cause
    if not isinstance(data, dict):
        raise BadInput(who, needed="a JSON object", found=type(data).__name__)
    known = [item.name for item in fields(EngineFacts)]
    changes: dict[str, object] = {}
    for name, value in data.items():
        if name not in known:
            raise BadInput(who, needed=f"fields among {', '.join(known)}", found=repr(name))
        changes[name] = _from_json(value)
        needed = _needed(name, changes[name])
        if needed:
            raise BadInput(f"{who}, field {name}", needed=needed, found=repr(value))
    return replace(EngineFacts(), **changes)  # type: ignore[arg-type]


def _from_json(value: object) -> object:
    """A list of words as the set it stands for; whatever else it holds is left for the check."""
    words = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return frozenset(value) if words and isinstance(value, list) else value


def _needed(name: str, value: object) -> str:
    """What a field needs and does not have; empty where it has it."""
    if name in _SETS or name == "components":
        words = isinstance(value, Set) and all(isinstance(item, str) for item in value)
        return "" if words or (name == "components" and value is None) else "a list of words"
    if name == "graph":
        return "" if value in GRAPH_LEVELS else "one of " + ", ".join(GRAPH_LEVELS)
    if name == "name":
        return "" if isinstance(value, str) else "a word"
    if name == "page_size":
        number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return "" if number or value is None else "a whole number >= 1 or null"
    return "" if isinstance(value, bool) else "true or false"
