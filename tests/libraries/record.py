"""Record the real signatures of a library's functions as JSON, read with `ast` from its wheel or a folder of it.

    python -m tests.libraries.record WHEEL_OR_FOLDER -o tests/libraries/NAME.json MODULE:QUALNAME ...

Nothing of the library is imported or run. Each record keeps the file and the line it was read at. Records of a call
that only a caller shows are written by hand into the same file, with "source" saying so.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from email import message_from_string
from pathlib import Path

FROM_LIBRARY = "from the library"
FROM_CALLER = "from a caller, not from the library"


def main(arguments: list[str]) -> int:
    """Write or extend one library's record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", type=Path, help="a wheel, or a folder that holds the packages and their dist-info")
    parser.add_argument("paths", nargs="+", metavar="MODULE:QUALNAME")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--distribution", help="whose dist-info to read, where the folder holds several")
    options = parser.parse_args(arguments)
    read = read_wheel if options.where.suffix == ".whl" else read_folder
    files = dict(read(options.where))
    name, version = identity(files, options.distribution)
    record = json.loads(options.output.read_text("utf-8")) if options.output.exists() else {"functions": {}}
    record |= {"distribution": name, "version": version}
    for path in options.paths:
        record["functions"][path] = signature(files, path)
    record["functions"] = dict(sorted(record["functions"].items()))
    options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


def read_wheel(path: Path) -> Iterator[tuple[str, str]]:
    """The texts of a wheel that matter here, by name."""
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if name.endswith((".py", ".pyi", ".dist-info/METADATA")):
                yield name, wheel.read(name).decode("utf-8", "replace")


def read_folder(path: Path) -> Iterator[tuple[str, str]]:
    """The same of an unpacked one."""
    for file in [*path.rglob("*.py"), *path.rglob("*.pyi"), *path.glob("*.dist-info/METADATA")]:
        yield str(file.relative_to(path)), file.read_text("utf-8", "replace")


def identity(files: dict[str, str], distribution: str | None) -> tuple[str, str]:
    """Name and version out of the metadata."""
    for name, text in files.items():
        if name.endswith(".dist-info/METADATA"):
            fields = message_from_string(text)
            if distribution in (None, fields["Name"]):
                return fields["Name"], fields["Version"]
    raise SystemExit(f"no dist-info of {distribution or 'any distribution'} in it")


def signature(files: dict[str, str], path: str) -> dict[str, object]:
    """One function's parameters as `[name, kind, default or null]`, with where they were read."""
    module, _, qualname = path.partition(":")
    stem = module.replace(".", "/")
    for name in (f"{stem}.py", f"{stem}/__init__.py", f"{stem}.pyi"):
        if name not in files:
            continue
        node = find(ast.parse(files[name]), qualname.split("."))
        if node is not None:
            return {"source": FROM_LIBRARY, "file": name, "line": node.lineno, "parameters": parameters(node.args)}
    raise SystemExit(f"{path}: no such function in it")


def find(tree: ast.AST, names: list[str]) -> ast.FunctionDef | None:
    """The definition a qualified name leads to; the last one, as an import would leave it."""
    for node in reversed(list(ast.walk(tree))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == names[0]:
            if len(names) > 1:
                found = find(node, names[1:])
                if found is not None:
                    return found
            elif isinstance(node, ast.FunctionDef):
                return node
    return None


def parameters(args: ast.arguments) -> list[list[str | None]]:
    """Parameters in order, by the names `inspect.Parameter` gives their kinds."""
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    rows: list[list[str | None]] = []
    for arg, default in zip(positional, defaults, strict=True):
        kind = "POSITIONAL_ONLY" if arg in args.posonlyargs else "POSITIONAL_OR_KEYWORD"
        rows.append([arg.arg, kind, default and ast.unparse(default)])
    if args.vararg:
        rows.append([args.vararg.arg, "VAR_POSITIONAL", None])
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        rows.append([arg.arg, "KEYWORD_ONLY", default and ast.unparse(default)])
    if args.kwarg:
        rows.append([args.kwarg.arg, "VAR_KEYWORD", None])
    return rows


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
