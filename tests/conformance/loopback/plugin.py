"""The loopback plugin: attention by the kit's own reference, which keeps the kit itself tested."""

from backstamp.declarations import ANY, Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

LOOPBACK = Offer(
    kernel="loopback",
    factory="PACKAGE.backend:build",
    family="mha",
    device="any",
    archs=ANY,
    requires=("torch>=2.11",),
    priority=0,
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp32", "bf16"}),
    head_dims=(64, 96),
    page_sizes=PageSizes(preferred=16, multiple_of=1),
    kv_forms=frozenset({"paged", "ragged"}),
    index_forms=frozenset({"page_table", "csr"}),
    prefix=True,
    features=frozenset({"window", "softcap", "sinks", "tree_mask", "topk", "non_causal", "lse", "split_kv"}),
    sink_dtypes=frozenset({"fp32", "bf16"}),
    deterministic=True,
    alignment_tokens=1,
    reference=True,
    mask_format="internal_causal",
)


@hookimpl
def backstamp_offers():
    return (LOOPBACK,)


@hookimpl
def backstamp_aliases():
    return (Alias(key="echo", kernels=("loopback",)),)
