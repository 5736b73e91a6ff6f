"""Compiles the Triton kernels for chips that are not here; run as a program, outside the interpreter.

In: jobs as JSON on standard input (see `Job`). Out: one JSON object a job on standard output: the kinds of code
compiled and shared memory. Launch shapes come from the table the launcher reads.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

__all__ = ["Job", "compile_job"]

POINTERS = {
    **dict.fromkeys(("indices_ptr", "slots_ptr", "ends_ptr", "qo_indptr", "kv_lens", "page_ids", "page_rows"), "*i32"),
    **dict.fromkeys(("lse_ptr", "part_lse_ptr", "sinks_ptr", "weights_ptr", "logits_ptr"), "*fp32"),
    **dict.fromkeys(("seen_ptr", "seen"), "*i1"),
    "rows": "*i64",
    "ids": "*i32",
    "lens": "*i32",
    "table": "*i32",
}


@dataclass(frozen=True)
class Job:
    """One kernel for one chip: "attend", "split", "merge", "parts" (two parts of a library's), "slots" or "logits".

    "dense" and "dense rows" fill a launch of all rows and of some. On SM90 also "hopper" and "hopper split".
    """

    arch: str
    kernel: str
    dtype: str = "bf16"
    heads: int = 128
    index: str = "page_table"
    source: str = "given"

    def __str__(self) -> str:
        return "-".join((self.arch, self.kernel, self.dtype, str(self.heads), self.index, self.source))


def compile_job(job: Job) -> dict[str, object]:
    """Compile one kernel with the launcher's own table."""
    from backstamp_dsa.attend import attend_slots, merge_shares
    from backstamp_dsa.configs import attend_config, logits_config
    from backstamp_dsa.dense_fill import BLOCK, fill_kernel
    from backstamp_dsa.indexer import index_logits
    from backstamp_dsa.slots import slot_kernel

    itemsize = 4 if job.dtype == "fp32" else 2
    split = job.kernel == "split"
    if job.kernel in ("attend", "split"):
        config = attend_config(job.arch, itemsize, job.heads)
        constants = {"HEADS": job.heads, "D0": 512, "D1": 64, "SPLIT": split}
        constants |= {"BLOCK_H": config.block_h, "BLOCK_N": config.block_n}
        absent = {"sinks_ptr", "q_rope_ptr"} | (set() if split else {"part_ptr", "part_lse_ptr"})
        return _compile(attend_slots, job, constants, absent, config.num_warps, config.num_stages)
    if job.kernel.startswith("hopper"):
        return _compile_hopper(job)
    if job.kernel in ("merge", "parts"):
        constants = {"BASE_2": job.kernel == "merge", "D": 512}
        absent = {"sinks_ptr"} if job.kernel == "merge" else {"lse_ptr"}
        return _compile(merge_shares, job, constants, absent, 4, 3)
    rows = set() if job.index != "page_table" else {"page_rows"}
    if job.kernel == "slots":
        constants = {"SOURCE": job.source, "INDEX": job.index, "CAUSAL": True, "BLOCK": 512}
        absent = rows if job.source == "given" else rows | {"indices_ptr"}
        return _compile(slot_kernel, job, constants, absent, 4, 3)
    if job.kernel.startswith("dense"):
        absent = set() if job.kernel == "dense rows" else {"rows"}
        looked_at = [one.name for one in fill_kernel.params if not (one.is_constexpr or one.do_not_specialize)]
        return _compile(fill_kernel, job, {"BLOCK": BLOCK}, absent, 4, 3) | {"looked_at": looked_at}
    config = logits_config(job.arch, itemsize)
    constants = {"HEADS": 64, "DIM": 128, "INDEX": job.index, "CAUSAL": True, "BLOCK_N": config.block_n}
    return _compile(index_logits, job, constants, rows, config.num_warps, config.num_stages)


def _compile_hopper(job: Job) -> dict[str, object]:
    from triton.experimental.gluon._runtime import GluonASTSource

    from backstamp_dsa.configs import HOPPER, HOPPER_REGISTERS
    from backstamp_dsa.hopper import attend_chosen

    split = job.kernel == "hopper split"
    absent = {"q_rope_ptr", "sinks_ptr"} if split else {"part_ptr", "part_lse_ptr", "lse_ptr"}
    given = _signature(attend_chosen, job, {"HEADS": job.heads, "SPLIT": split}, absent)
    options = {"num_warps": HOPPER.num_warps, "maxnreg": HOPPER_REGISTERS}
    return _machine_code(GluonASTSource(attend_chosen, *given), job, options)


def _compile(kernel, job: Job, constants, absent, num_warps: int, num_stages: int) -> dict[str, object]:
    from triton.compiler import ASTSource

    source = ASTSource(kernel, *_signature(kernel, job, constants, absent))
    return _machine_code(source, job, {"num_warps": num_warps, "num_stages": num_stages})


def _signature(kernel, job: Job, constants, absent):
    signature, attributes, fixed = {}, {}, dict(constants)
    for at, name in enumerate(kernel.arg_names):
        if name in constants or name in absent:
            signature[name] = "constexpr"
            fixed.setdefault(name, None)
        elif name == "part_ptr":
            signature[name] = "*bf16" if job.kernel == "parts" else "*fp32"
        elif name in POINTERS:
            signature[name] = POINTERS[name]
        elif name in {"q_ptr", "q_rope_ptr", "rows_ptr", "out_ptr"}:
            signature[name] = f"*{job.dtype}"
        else:
            signature[name] = "fp32" if name == "logit_scale" else "i32"
        # what the launcher finds out by itself: addresses and strides are multiples of 16
        if signature[name].startswith("*") or "stride" in name:
            attributes[(at,)] = [["tt.divisibility", 16]]
    return signature, fixed, attributes


def _machine_code(source, job: Job, options) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget

    amd = job.arch.startswith("gfx")
    target = GPUTarget("hip", job.arch, 64) if amd else GPUTarget("cuda", int(job.arch.replace(".", "")), 32)
    compiled = triton.compile(source, target=target, options=options)
    sizes = {kind: len(code) for kind, code in compiled.asm.items() if kind in {"cubin", "hsaco"}}
    products = compiled.asm.get("ptx", "").count("wgmma.mma_async")
    return {"job": asdict(job), "code": sizes, "shared_bytes": compiled.metadata.shared, "products": products}


if __name__ == "__main__":
    for fields in json.load(sys.stdin):
        print(json.dumps(compile_job(Job(**fields))), flush=True)
