"""Compiles this plugin's Triton kernels for chips that are not here; run as a program, outside the interpreter.

In: jobs as JSON on standard input (see `Job`). Out: one JSON object a job on standard output: the kinds of code
compiled and the registers and shared memory they take, where the compiler says.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

__all__ = ["Job", "compile_job"]

POINTERS = {
    "rate_ptr": "*fp32", "bias_ptr": "*fp32", "packed_ptr": "*fp32", "decay_ptr": "*fp32", "beta_ptr": "*fp32",
    "qo_indptr": "*i32", "ends_ptr": "*i32", "slots_ptr": "*i32", "table_ptr": "*i32", "accepted_ptr": "*i32",
    "parents_ptr": "*i32", "has_state_ptr": "*u8", "found_ptr": "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One kernel for one chip; `form` is `advance_rows`'s, or "load" or "store" of the states around a prefill,
    "prepare" of the tokens before one, or "tokens" of the slots of each."""

    arch: str
    dtype: str = "bf16"
    form: str = "slots"
    family: str = "gdn"
    dims: tuple[int, int] = (128, 128)
    order: str = "vk"
    raw: bool = True
    tree: bool = False
    state: str = "fp32"
    bounded: bool = False
    many: bool = False

    def __str__(self) -> str:
        words = [
            "raw" if self.raw else "computed",
            *(["tree"] if self.tree else []),
            *(["bounded"] if self.bounded else []),
        ]
        words += ["many"] if self.many else []
        return "-".join((self.arch, self.dtype, self.form, self.family, "x".join(map(str, self.dims)), *words))


def compile_job(job: Job) -> dict[str, object]:
    """Compile one kernel as its launcher would launch it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from backstamp_linear_attn import prepare, recurrence, rows, states, token_slots

    key, value = job.dims
    warps = 4
    if job.form in ("load", "store"):
        kernel = states._load if job.form == "load" else states._store
        constants = {"HEADS": 32, "SIZE": key * value, "WIDTH": key, "BLOCK": states._BLOCK}
        present = set(kernel.arg_names)
    elif job.form == "tokens":
        kernel, warps, constants = token_slots._of_tokens, 1, {}
        present = set(kernel.arg_names)
    elif job.form == "prepare":
        kernel = prepare._prepare
        constants = {
            "HEADS": 16, "VALUE_HEADS": 32, "K": key, "V": value, "EACH": prepare._HEADS, "GATES": 2 * prepare._HEADS,
            "BLOCK_K": triton.next_power_of_2(key), "BLOCK_V": triton.next_power_of_2(value),
            "BLOCK_GATES": 2 * prepare._HEADS, "RAW": job.raw,
        }  # fmt: skip
        present = {name for name in kernel.arg_names if name.endswith("_ptr")}
        present -= set() if job.raw else {"rate_ptr", "bias_ptr"}
    else:
        kernel = recurrence.advance_rows
        block_k, block_v, warps = rows.blocks_of(key, value, job.order)
        constants = {
            "HEADS": 32, "SHARED": 2, "K": key, "V": value, "BLOCK_K": block_k, "BLOCK_V": block_v,
            "V_FIRST": job.order == "vk", "CHANNELS": job.family == "kda", "RAW": job.raw, "BOUNDED": job.bounded,
            "FORM": job.form, "TREE": job.tree, "MANY": job.many,
        }  # fmt: skip
        present = {"q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "out_ptr", "pool_ptr", "qo_indptr", "slots_ptr"}
        present |= {"rate_ptr", "bias_ptr"} if job.raw else set()
        present |= {"kept_ptr"} if job.form == "intermediate" else set()
        present |= {"table_ptr", "accepted_ptr"} if job.form == "slot_table" else set()
        present |= {"parents_ptr"} if job.tree else set()
    signature, attributes, fixed = {}, {}, dict(constants)
    for at, name in enumerate(kernel.arg_names):
        pointer = name.endswith("_ptr") or name == "qo_indptr"
        if name in constants:
            signature[name] = "constexpr"
        elif pointer and name not in present:
            signature[name] = "constexpr"
            fixed[name] = None
        elif pointer:
            states_of = job.state if name in ("pool_ptr", "kept_ptr") else job.dtype
            signature[name] = POINTERS.get(name, f"*{states_of}")
        else:
            signature[name] = "fp32" if name in ("scale", "bound") else "i32"
        # what the launcher finds out by itself: addresses and strides are multiples of 16
        if signature[name].startswith("*") or "stride" in name:
            attributes[(at,)] = [["tt.divisibility", 16]]
    amd = job.arch.startswith("gfx")
    target = GPUTarget("hip", job.arch, 64) if amd else GPUTarget("cuda", int(job.arch.replace(".", "")), 32)
    source = ASTSource(kernel, signature, fixed, attributes)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    sizes = {kind: len(code) for kind, code in compiled.asm.items() if kind in {"cubin", "hsaco"}}
    return {"code": sizes, "shared_bytes": compiled.metadata.shared}


if __name__ == "__main__":
    for fields in json.load(sys.stdin):
        fields["dims"] = tuple(fields["dims"])
        print(json.dumps(compile_job(Job(**fields))), flush=True)
