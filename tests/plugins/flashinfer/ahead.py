"""Compiles the page list kernel for chips that are not here; run as a program, outside the interpreter.

Out: one JSON object on standard output: bytes of machine code by chip, form of index and dtype of ids, and the kernel's
parameters that Triton would compile for the value of.
"""

from __future__ import annotations

import json

__all__ = ["ARCHS", "FORMS"]

ARCHS = (80, 90, 100, 120)
FORMS = ("page_table", "csr", "indirect")


def main() -> None:
    """Compile for every chip."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from backstamp_flashinfer.page_list import BLOCK, gather_pages

    code = {}
    for at, arch in enumerate(ARCHS):
        for form in FORMS:
            ids, starts = ("*i32", "*i64") if at % 2 else ("*i64", "*i32")
            signature = {"ids": ids, "starts": starts, "indptr": "*i32", "pages": "*i32", "stride": "i32"}
            constants = {"FORM": form, "BLOCK": BLOCK}
            if form == "page_table":
                constants["starts"] = None
            signature |= dict.fromkeys(constants, "constexpr")
            source = ASTSource(gather_pages, {name: signature[name] for name in gather_pages.arg_names}, constants, {})
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
            code[f"{arch} {form}"] = len(compiled.asm["cubin"])
    looked_at = [one.name for one in gather_pages.params if not (one.is_constexpr or one.do_not_specialize)]
    print(json.dumps({"code": code, "looked_at": looked_at}))


if __name__ == "__main__":
    main()
