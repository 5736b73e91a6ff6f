"""Record functions that a library declares as torch operators: their schemas, read from its wheel's YAML, as JSON.

    python -m tests.libraries.record_schema WHEEL YAML -o tests/libraries/NAME.json --module torch_npu FUNCTION ...

The schema is what the call is bound against, so a parameter before `*` is positional or by name, one after it by name
alone. Nothing of the library is imported or run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from pathlib import Path

from tests.libraries.record import FROM_LIBRARY, identity, read_wheel

#: "Tensor? beta=None", "Tensor(a!) state", "float scale=1.0".
_PARAMETER = re.compile(r"^(?:.*\s)?(?P<name>\w+)(?:=(?P<default>.+))?$")


def main(arguments: list[str]) -> int:
    """Write or extend one library's record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("yaml", help="path inside the wheel")
    parser.add_argument("functions", nargs="+")
    parser.add_argument("--module", required=True, help="where Python finds the functions")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    name, version = identity(dict(read_wheel(options.wheel)), None)
    lines = read_text(options.wheel, options.yaml).splitlines()
    record = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {"functions": {}}
    record |= {"distribution": name, "version": version}
    for function in options.functions:
        line, parameters = schema(lines, function)
        found = {"source": FROM_LIBRARY, "file": options.yaml, "line": line, "parameters": parameters}
        record["functions"][f"{options.module}:{function}"] = found
    record["functions"] = dict(sorted(record["functions"].items()))
    options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


def read_text(wheel: Path, name: str) -> str:
    """One file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode("utf-8")


def schema(lines: list[str], function: str) -> tuple[int, list[list[str | None]]]:
    """The line of a function's schema, and its parameters as `[name, kind, default or null]`."""
    for number, line in enumerate(lines, 1):
        _, found, rest = line.partition(f"func: {function}(")
        if found:
            return number, parameters(rest.rpartition(") ->")[0])
    raise SystemExit(f"{function}: no such schema in it")


def parameters(text: str) -> list[list[str | None]]:
    """The parameters of a schema, by the names `inspect.Parameter` gives their kinds."""
    rows: list[list[str | None]] = []
    kind = "POSITIONAL_OR_KEYWORD"
    for part in text.split(", "):
        if part == "*":
            kind = "KEYWORD_ONLY"
            continue
        match = _PARAMETER.match(part)
        assert match is not None, part
        rows.append([match["name"], kind, match["default"]])
    return rows


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
