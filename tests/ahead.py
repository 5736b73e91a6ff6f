"""Compiles Triton kernels that specialize on no argument for chips that are not here; run as a program to do it.

In: `Job`s, as JSON on standard input of the program, which must not run in the interpreter. Out: for each the bytes of
machine code by chip, and the parameters that Triton would compile for the value or the address of.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.children import compiled_by

__all__ = ["Job", "compile_ahead"]


@dataclass(frozen=True)
class Job:
    """One kernel, `module:name`, for some CUDA chips: the types of its arguments (None: absent), and its constants."""

    kernel: str
    archs: Sequence[int]
    signature: Mapping[str, str | None]
    constants: Mapping[str, Any]


def compile_ahead(jobs: Sequence[Job], cache: Path) -> list[dict[str, Any]]:
    """Each job's `code` and `looked_at`, from a child process."""
    return compiled_by(__file__, jobs, cache)


def _compile(job: Job) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = job.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    absent = {name: None for name, kind in job.signature.items() if kind is None}
    constants = dict(job.constants) | absent
    signature = dict(job.signature) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, {name: signature[name] for name in kernel.arg_names}, constants, {})
    code = {}
    for arch in job.archs:
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
        code[str(arch)] = len(compiled.asm["cubin"])
    looked_at = [one.name for one in kernel.params if not (one.is_constexpr or one.do_not_specialize)]
    return {"code": code, "looked_at": looked_at}


if __name__ == "__main__":
    for fields in json.load(sys.stdin):
        print(json.dumps(_compile(Job(**fields))), flush=True)
