"""Compiles the Hopper latent kernel for SM90 where there is none; run as a program, outside the interpreter.

In: jobs as JSON on standard input (see `Job`). Out: one JSON object a job on standard output: shared memory, bytes of
machine code, and how many warpgroup products and tensor copies the code holds.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass

__all__ = ["Job", "compile_job"]

POINTERS = {
    "lse_ptr": "*fp32", "part_ptr": "*fp32", "part_lse_ptr": "*fp32", "sinks_ptr": "*fp32", "qo_indptr": "*i32",
    "kv_lens": "*i32", "page_ids": "*i32", "page_rows": "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One variant of the kernel; `step` is "decode", "split" or "causal", `extras` the optional tensors."""

    dtype: str = "bf16"
    heads: int = 128
    step: str = "decode"
    index: str = "page_table"
    page_size: int = 64
    extras: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.dtype, str(self.heads), self.step, self.index, str(self.page_size), *self.extras))


def compile_job(job: Job) -> dict[str, object]:
    """Compile one variant with the launcher's own constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from backstamp_triton.configs import pack_heads
    from backstamp_triton.latent_launch import REGISTERS, box_of
    from backstamp_triton.latent_parts import PANEL
    from backstamp_triton.latent_tile import attend_latent

    constants = {
        "HEADS": job.heads, "PACK": pack_heads("9.0", 2, job.heads, True), "PAGE_SIZE": job.page_size,
        "INDEX": job.index, "CAUSAL": job.step == "causal", "ONE_TOKEN": job.step != "causal",
        "SPLIT": job.step == "split",
    }  # fmt: skip
    present = {"qo_indptr", "kv_lens", "page_ids", *job.extras}
    present |= {"part_ptr", "part_lse_ptr"} if job.step == "split" else set()
    present |= {"page_rows"} if job.index != "page_table" else set()
    box = box_of(job.page_size)
    present |= {"rows_ptr"} if box is None else {"rows_desc"}
    signature, attributes, fixed = {}, {}, dict(constants)
    for at, name in enumerate(attend_latent.arg_names):
        if name == "rows_desc" and name in present:
            signature[name] = f"tensordesc<{job.dtype}[{box[0]}, {box[1]}],{PANEL.value!r}>"
        elif name in {"q_ptr", "out_ptr"} or (name in {"q_rope_ptr", "rows_ptr"} and name in present):
            signature[name] = f"*{job.dtype}"
        elif name in POINTERS and name in present:
            signature[name] = POINTERS[name]
        elif name in constants:
            signature[name] = "constexpr"
        elif name == "logit_scale":
            signature[name] = "fp32"
        elif name.startswith("num_") or "stride" in name or name == "rows_per_page":
            signature[name] = "i32"
        else:
            signature[name] = "constexpr"
            fixed[name] = None
        # what the launcher finds out by itself: addresses and strides are multiples of 16
        if signature[name].startswith("*") or "stride" in name:
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(attend_latent, signature, fixed, attributes)
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    return {
        "job": asdict(job),
        "cubin": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        "products": ptx.count("wgmma.mma_async"),
        "copies": ptx.count("cp.async.bulk.tensor"),
        "waits": re.findall(r"griddepcontrol\.\w+", ptx),
    }


if __name__ == "__main__":
    for fields in json.load(sys.stdin):
        fields["extras"] = tuple(fields["extras"])
        print(json.dumps(compile_job(Job(**fields))), flush=True)
