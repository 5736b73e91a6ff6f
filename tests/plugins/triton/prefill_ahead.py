"""Compiles the Hopper prefill kernel where there is no such chip; run as a program, outside the interpreter.

In: jobs as JSON on standard input (see `Job`). Out: one JSON object a job on standard output: shared memory, bytes of
machine code, and what the assembly holds.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

__all__ = ["Job", "compile_job"]

POINTERS = {
    "lse_ptr": "*fp32", "part_ptr": "*fp32", "part_lse_ptr": "*fp32", "sinks_ptr": "*fp32", "qo_indptr": "*i32",
    "kv_lens": "*i32", "causal_rows": "*i32", "page_ids": "*i32", "page_rows": "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One variant of the kernel; `extras` names optional tensors and numbers, `page_size` is 0 for ragged keys."""

    dtype: str = "bf16"
    dims: tuple[int, int] = (128, 128)
    group: int = 4
    pack: int = 1
    index: str = "page_table"
    causal: str = "yes"
    page_size: int = 64
    extras: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = "x".join(map(str, self.dims))
        return "-".join((self.dtype, name, str(self.pack), self.index, self.causal, str(self.page_size), *self.extras))


def compile_job(job: Job) -> dict[str, object]:
    """Compile one variant with the launcher's own constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from backstamp_triton.configs import prefill_block
    from backstamp_triton.launches import PREFILL_STAGES
    from backstamp_triton.prefill_hopper import attend_prefill
    from backstamp_triton.prefill_launch import PANEL, piece_rows

    block = prefill_block("9.0", 2, *job.dims)
    rows = piece_rows(job.page_size, block)
    constants = {
        "HEADS": 8 * -(-job.group // job.pack), "GROUP": job.group, "PACK": job.pack, "DK": job.dims[0],
        "DV": job.dims[1], "PAGE_SIZE": max(job.page_size, 1), "ROWS": rows, "INDEX": job.index, "CAUSAL": job.causal,
        "BLOCK_N": block, "STAGES": PREFILL_STAGES,
    }  # fmt: skip
    present = {"qo_indptr", "kv_lens", *job.extras}
    present |= {"page_ids"} if job.index != "ragged" else set()
    present |= {"page_rows"} if job.index != "page_table" else set()
    present |= {"causal_rows"} if job.causal == "rows" else set()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    signature, attributes, fixed = {}, {}, dict(constants)
    for at, name in enumerate(attend_prefill.arg_names):
        if name in {"k_desc", "v_desc"}:
            signature[name] = f"tensordesc<{job.dtype}[{rows}, {PANEL}],{layout!r}>"
        elif name in {"q_ptr", "out_ptr"}:
            signature[name] = f"*{job.dtype}"
        elif name in POINTERS and name in present:
            signature[name] = POINTERS[name]
        elif name == "logit_scale" or (name == "softcap_log2" and name in present):
            signature[name] = "fp32"
        elif name in constants:
            signature[name] = "constexpr"
        elif name in POINTERS or name in {"softcap_log2", "window_left"} - present:
            signature[name] = "constexpr"
            fixed[name] = None
        else:
            signature[name] = "i32"
        # what the launcher finds out by itself: addresses and strides are multiples of 16
        if signature[name].startswith("*") or "stride_" in name:
            attributes[(at,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(attend_prefill, signature, fixed, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = compiled.asm["ptx"]
    return {
        "job": asdict(job),
        "cubin": len(compiled.asm["cubin"]),
        "shared_bytes": compiled.metadata.shared,
        "products": ptx.count("wgmma.mma_async"),
        "copies": ptx.count("cp.async.bulk.tensor"),
        "pieces": block // rows,
    }


if __name__ == "__main__":
    for fields in json.load(sys.stdin):
        fields["extras"], fields["dims"] = tuple(fields["extras"]), tuple(fields["dims"])
        print(json.dumps(compile_job(Job(**fields))), flush=True)
