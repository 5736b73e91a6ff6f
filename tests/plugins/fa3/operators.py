"""Records and stands in for a library's PyTorch operators, whose schemas are strings in its image.

    python -m tests.plugins.fa3.operators WHEEL MEMBER NAMESPACE -o tests/libraries/NAME.json

In: a wheel and the shared object inside it. Out: the record of `tests/libraries`, with "operators"; and for a test, the
operators defined with exactly those schemas on the CPU, so that PyTorch itself refuses a wrong name, type or count.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email import message_from_string
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "libraries"


def main(arguments: list[str]) -> int:
    """Write one wheel's record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("member", help="the shared object's name inside the wheel")
    parser.add_argument("namespace", help="of the operators, as torch.ops has it")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    with zipfile.ZipFile(options.wheel) as wheel:
        metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        fields = message_from_string(wheel.read(metadata).decode())
        schema = schema_of(wheel.read(options.member))
    entry = {"source": f"string in {options.member}", "schema": schema}
    record = {
        "distribution": fields["Name"],
        "version": fields["Version"],
        "functions": {},
        "operators": {f"{options.namespace}::fwd": entry},
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


def schema_of(image: bytes) -> str:
    """The forward operator's schema, spaces made one."""
    found = re.search(rb"fwd\(Tensor\s+q,[^\0]+?->\s*\([^\0]+\)", image)
    if found is None:
        raise SystemExit("no forward operator in it")
    return re.sub(r"\s+", " ", found.group().decode().replace(",", ", "))


@contextmanager
def fake_operator(
    distribution: str, module: str, monkeypatch: pytest.MonkeyPatch, behaviour: Callable[..., tuple[Any, ...]]
) -> Iterator[list[dict[str, Any]]]:
    """Define one distribution's operator with its recorded schema, and an empty module that stands for its import.

    Yields the calls so far, as arguments by name; `behaviour(**arguments)` answers them.
    """
    record = json.loads((FOLDER / f"{distribution}.json").read_text("utf-8"))
    ((path, entry),) = record["operators"].items()
    namespace = path.partition("::")[0]
    calls: list[dict[str, Any]] = []

    def answer(*given: Any, **named: Any) -> tuple[Any, ...]:
        known = getattr(torch.ops, namespace).fwd.default._schema.arguments
        # the dispatcher leaves off what equals a default
        defaults = {argument.name: argument.default_value for argument in known if argument.has_default_value()}
        arguments = {**defaults, **dict(zip([argument.name for argument in known], given, strict=False)), **named}
        calls.append(arguments)
        return behaviour(**arguments)

    parent, _, child = module.rpartition(".")
    stand_in = ModuleType(module)
    if parent:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        setattr(sys.modules[parent], child, stand_in)
    monkeypatch.setitem(sys.modules, module, stand_in)
    library = torch.library.Library(namespace, "DEF")
    try:
        library.define(entry["schema"])
        library.impl("fwd", answer, "CPU")
        yield calls
    finally:
        library._destroy()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
