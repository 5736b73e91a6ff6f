"""What this plugin declares: PyTorch attention for every device, as data.

In: nothing. Out: offers. Imports only `backstamp`; the kernels are in `backend.py`, imported when one is built.
"""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import ANY, Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

_SHARED_FEATURES = frozenset(
    {"window", "softcap", "sinks", "tree_mask", "topk", "non_causal", "lse", "split_kv", "cross", "encoder"}
)

NATIVE = Offer(
    kernel="torch_native",
    factory="backstamp_cpu.backend:build_torch_native",
    family="mha",
    device="any",
    archs=ANY,
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp16", "bf16", "fp32"}),
    kv_dtypes=frozenset({"same", "e4m3fn", "e4m3fnuz", "e5m2"}),
    head_dims=ANY,
    page_sizes=PageSizes(preferred=16, multiple_of=1),
    kv_forms=frozenset({"paged", "ragged"}),
    index_forms=frozenset({"page_table", "csr", "indirect"}),
    prefix=True,
    mask_format="internal_causal",
    features=_SHARED_FEATURES | {"alibi"},
    priority=10,
    requires=("torch>=2.11",),
    forward_archs="any",
    # converted to fp32 before they are added
    sink_dtypes=frozenset({"fp16", "bf16", "fp32"}),
)

# the same kernel over an absorbed latent cache: values lie inside the keys
NATIVE_MLA = replace(NATIVE, family="mla")

# the same rows and masks over bf16 products on AMX tiles
AMX = replace(
    NATIVE,
    kernel="intel_amx",
    factory="backstamp_cpu.backend:build_intel_amx",
    device="cpu",
    archs=("x86_64",),
    forward_archs="no",
    # what oneDNN asks of a CPU before it takes tiles for bf16
    # Source: oneDNN developer guide, "CPU Dispatcher Control", AVX512_CORE_AMX
    cpu_features=frozenset({"amx_tile", "amx_bf16"}),
    dtypes=frozenset({"bf16"}),
    kv_dtypes=frozenset({"same"}),
    priority=30,
)
AMX_MLA = replace(AMX, family="mla")

# delta rules, one token at a time: the answer of a host where nothing else serves, and what others are compared with
NATIVE_GDN = Offer(
    kernel="torch_native",
    slot="linear",
    factory="backstamp_cpu.backend:build_torch_native_linear",
    family="gdn",
    device="any",
    archs=ANY,
    forward_archs="any",
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp16", "bf16", "fp32"}),
    head_dims=ANY,
    # a recurrence has states, no pages
    page_sizes=PageSizes(preferred=1, multiple_of=1),
    mask_format="internal_causal",
    features=frozenset({"tree_mask"}),
    state_layouts=("vk", "kv"),
    reference=True,
    priority=10,
    requires=("torch>=2.11",),
)
NATIVE_KDA = replace(NATIVE_GDN, family="kda", features=NATIVE_GDN.features | {"bounded_gates"})

FLEX_CPU = replace(
    NATIVE,
    kernel="flex_attention",
    factory="backstamp_cpu.backend:build_flex_attention",
    device="cpu",
    # targets only; a draft's few tokens a step would recompile and gather for nothing
    draft_phases=frozenset(),
    features=_SHARED_FEATURES - {"topk"},
    # eager on the CPU: right, and slower than torch_native
    priority=5,
)

FLEX_CUDA = replace(
    FLEX_CPU,
    device="cuda",
    archs=("8.0",),
    # compiled tiles: powers of two, and what pads to one
    head_dims=(16, 32, 64, 80, 96, 128, 192, 256, (192, 128)),
    phases=frozenset({"prefill", "verify"}),
    priority=20,
)
# one query a row leaves its tiles empty: on an H200 decode took 1.6 times torch_native's time (bench/results/h200.json)
FLEX_CUDA_DECODE = replace(
    FLEX_CUDA, phases=frozenset({"decode"}), features=FLEX_CUDA.features - {"tree_mask"}, priority=5
)

FLEX_ROCM = replace(FLEX_CUDA, device="rocm", archs=("gfx942", "gfx950"), forward_archs="no")
FLEX_ROCM_DECODE = replace(FLEX_CUDA_DECODE, device="rocm", archs=("gfx942", "gfx950"), forward_archs="no")


def _rows_alone(offer: Offer, **where: object) -> Offer:
    """The row a launch that asks for determinism gets: each row attended by itself."""
    factory = "backstamp_cpu.backend:build_torch_native_rows_alone"
    return replace(offer, factory=factory, deterministic=True, **where)  # type: ignore[arg-type]


# SDPA and BLAS on the CPU add keys up in blocks of 512: a prefill cut elsewhere changes last bits, one cut there none
# (tests/plugins/cpu/test_native.py). An H200 keeps them at 512 for MHA and at no cut for MLA; other chips were not
# measured. There determinism is claimed for the phases that are never cut.
_NEVER_CUT = frozenset({"decode", "verify"})
ALONE = (
    _rows_alone(NATIVE, device="cpu", alignment_tokens=512),
    _rows_alone(NATIVE_MLA, device="cpu", alignment_tokens=512),
    _rows_alone(NATIVE, device="cuda", archs=("9.0",), forward_archs="no", alignment_tokens=512),
    _rows_alone(NATIVE, phases=_NEVER_CUT),
    _rows_alone(NATIVE_MLA, phases=_NEVER_CUT),
)


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The grouped rows first: a launch that does not ask for determinism takes them."""
    return (
        NATIVE,
        NATIVE_MLA,
        *ALONE,
        AMX,
        AMX_MLA,
        NATIVE_GDN,
        NATIVE_KDA,
        FLEX_CPU,
        FLEX_CUDA,
        FLEX_CUDA_DECODE,
        FLEX_ROCM,
        FLEX_ROCM_DECODE,
    )


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """None: each kernel is asked for by its own name."""
    return ()
