"""Compiles the Triton kernels for chips that are not here; run as a program, outside the interpreter.

In: jobs as JSON on standard input (see `Job`). Out: one JSON object a job on standard output: the kinds of code
compiled, shared memory, what the code says to other launches and awaits of them, and the launch shape. Launch shapes
come from the table the launcher reads.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass

__all__ = ["Job", "compile_job"]

PAGE_SIZE = 16
POINTERS = {
    "lse_ptr": "*fp32", "part_ptr": "*fp32", "part_lse_ptr": "*fp32", "sinks_ptr": "*fp32", "tree_ptr": "*u8",
    "qo_indptr": "*i32", "kv_lens": "*i32", "kv_starts": "*i32", "causal_rows": "*i32", "page_ids": "*i32",
    "page_rows": "*i32", "tree_indptr": "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One kernel for one chip; `step` is "prefill", "verify" or "decode" (split), `extras` the optional tensors."""

    arch: str
    dtype: str
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (32, 8)
    step: str = "prefill"
    index: str = "page_table"
    causal: str = "yes"
    tree: str = "no"
    extras: tuple[str, ...] = ()
    page_size: int = PAGE_SIZE

    def __str__(self) -> str:
        name = "x".join(map(str, self.dims))
        return "-".join((self.arch, self.dtype, name, self.step, self.index, self.causal, self.tree, *self.extras))


def compile_job(job: Job) -> dict[str, object]:
    """Compile the tile kernel, and `combine_splits` for a split step, with the launcher's own table."""
    from backstamp.attention import LayerSpec
    from backstamp_triton.combine import combine_splits
    from backstamp_triton.configs import merged_at_once, overlaps_launches, tile_config
    from backstamp_triton.layers import prepare_layer
    from backstamp_triton.tile import attend_tile

    mla = job.dims == (576, 512)
    itemsize = 4 if job.dtype == "fp32" else 2
    spec = LayerSpec(
        layer_id=0, num_qo_heads=job.heads[0], num_kv_heads=job.heads[1], head_dim=job.dims[0],
        v_head_dim=job.dims[1], scale=1.0,
    )  # fmt: skip
    known = prepare_layer("ahead of time", job.arch, itemsize, spec, mla)
    tokens = {"prefill": 4096, "verify": 4, "decode": 1}[job.step]
    config = tile_config(job.arch, itemsize, *job.dims, known.pack * tokens, mla, tokens == 1)
    decode = job.step == "decode"
    constants = {
        "GROUP": job.heads[0] // job.heads[1], "PACK": known.pack, "V_IN_K": mla, "PAGE_SIZE": job.page_size,
        "INDEX": job.index, "CAUSAL": "no" if decode else job.causal, "TREE": job.tree, "ONE_TOKEN": decode,
        "SPLIT": decode, "OVERLAP": overlaps_launches(job.arch), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
        **dict(zip(("D0", "D1", "V0", "V1"), known.dims, strict=True)),
    }  # fmt: skip
    present = {"qo_indptr", "kv_lens", "page_ids", *job.extras}
    present |= {"part_ptr", "part_lse_ptr"} if decode else set()
    present |= {"page_rows"} if job.index != "page_table" else set()
    present |= {"causal_rows"} if constants["CAUSAL"] == "rows" else set()
    present |= {"tree_ptr"} if job.tree != "no" else set()
    present |= {"tree_indptr"} if job.tree in {"full", "packed"} else set()
    tile = _compile(attend_tile, job, constants, present, config.num_warps, config.num_stages)
    answer = {"job": asdict(job), "config": asdict(config), **tile}
    if decode:
        block = 1 << (job.dims[1] - 1).bit_length()
        merge = {
            "V_DIM": job.dims[1],
            "BLOCK_V": block,
            "BLOCK_S": merged_at_once(64, job.dims[1]),
            "OVERLAP": overlaps_launches(job.arch),
        }
        answer["combine"] = _compile(combine_splits, job, merge, {"part_ptr", "part_lse_ptr", *job.extras}, 4, 3)
    return answer


def _compile(kernel, job: Job, constants, present, num_warps: int, num_stages: int) -> dict[str, object]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes, fixed = {}, {}, dict(constants)
    for at, name in enumerate(kernel.arg_names):
        if name in {"q_ptr", "k_ptr", "v_ptr", "out_ptr"} or (name == "q_rope_ptr" and name in present):
            signature[name] = f"*{job.dtype}"
        elif name in POINTERS and name in present:
            signature[name] = POINTERS[name]
        elif name in {"logit_scale", "softcap_log2"} and (name in present or name == "logit_scale"):
            signature[name] = "fp32"
        elif name in constants:
            signature[name] = "constexpr"
        elif name.startswith("num_") or "stride" in name or name in present:
            signature[name] = "i32"
        else:
            signature[name] = "constexpr"
            fixed[name] = None
        # what the launcher finds out by itself: addresses and strides are multiples of 16
        if signature[name].startswith("*") or "stride" in name:
            attributes[(at,)] = [["tt.divisibility", 16]]
    amd = job.arch.startswith("gfx")
    target = GPUTarget("hip", job.arch, 64) if amd else GPUTarget("cuda", int(job.arch.replace(".", "")), 32)
    source = ASTSource(kernel, signature, fixed, attributes)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": num_stages})
    sizes = {kind: len(code) for kind, code in compiled.asm.items() if kind in {"cubin", "ptx", "hsaco", "amdgcn"}}
    waits = re.findall(r"griddepcontrol\.\w+", compiled.asm.get("ptx", ""))
    return {"code": sizes, "shared_bytes": compiled.metadata.shared, "waits": waits}


if __name__ == "__main__":
    for fields in json.load(sys.stdin):
        fields["dims"], fields["heads"] = tuple(fields["dims"]), tuple(fields["heads"])
        fields["extras"] = tuple(fields["extras"])
        print(json.dumps(compile_job(Job(**fields))), flush=True)
