"""What this plugin declares: torch-npu's attention on Ascend 910B, full and linear, as data.

In: nothing. Out: offers. Imports only `backstamp`; torch-npu is imported by `backend.py` when a kernel is built.
"""

from __future__ import annotations

from dataclasses import replace

from backstamp.declarations import Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

# one call for all rows, whatever their lengths: layout TND of npu_fused_infer_attention_score_v2
# Source: torch-npu 2.14.0 _op_plugin_docs.py:8577, "TND" (bf16 only; equal head dims of 128 or 192 over pages; sparse
# modes 0, 3 and 4), "learnable_sink" (bf16, values of at most 128), "page attention" (blocks of 128 to 512)
PACKED = Offer(
    kernel="ascend",
    factory="backstamp_ascend.backend:build_packed",
    family="mha",
    device="npu",
    # "Atlas A2"; its A3 is documented alike, and no host of it was described yet
    archs=("ascend910b",),
    # the oldest wheel read: it has the function with `learnable_sink`, and both delta rules
    requires=("torch-npu>=2.11",),
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"bf16"}),
    head_dims=(128,),
    group_sizes=((1, 64),),
    page_sizes=PageSizes(preferred=128, exact=(128, 256, 384, 512)),
    index_forms=frozenset({"page_table", "indirect"}),
    prefix=True,
    # no tree mask: with TND a mask is the library's own triangle; no softcap and no slopes anywhere
    features=frozenset({"window", "sinks", "topk", "non_causal", "lse"}),
    sink_dtypes=frozenset({"bf16"}),
    mask_format="internal_causal",
    # lengths are lists of host numbers, frozen into whatever records the call
    inputs=frozenset({"host_lens"}),
    plan="host",
    priority=60,
)
PACKED_192 = replace(PACKED, head_dims=(192,), features=PACKED.features - {"sinks"}, sink_dtypes=frozenset({"same"}))

# every other head dim, and fp16: layout BSND, a call for each row of several queries
# Source: as above, "input_layout" and "Q_S"; there a row of one query takes neither a window nor sinks
ROWS = replace(
    PACKED_192,
    factory="backstamp_ascend.backend:build_rows",
    dtypes=frozenset({"fp16", "bf16"}),
    head_dims=(64, 80, 96, 112, 128, 192, 256),
    features=frozenset({"topk", "non_causal", "lse"}),
    priority=55,
)

# Source: as above, "query_rope" with a query of 512: pages of 16 or 128, at most 16 queries a row, one key head
LATENT = replace(
    PACKED_192,
    factory="backstamp_ascend.backend:build_latent",
    family="mla",
    dtypes=frozenset({"fp16", "bf16"}),
    head_dims=((576, 512),),
    group_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
    page_sizes=PageSizes(preferred=128, exact=(16, 128)),
    features=frozenset({"topk"}),
    # apart as the library takes them, or one row of both, whose live pages are copied apart in every layer
    layouts=("latent_rope", "rows"),
)

# gated delta nets, in the linear slot: bf16 tokens over bf16 states [., HV, V, K], chains of at most 8 tokens
# Source: torch-npu 2.14.0 _op_plugin_docs.py:6726, npu_recurrent_gated_delta_rule; it has no parents of tokens
DELTA_ROWS = Offer(
    kernel="ascend",
    slot="linear",
    factory="backstamp_ascend.backend:build_delta_rows",
    family="gdn",
    device="npu",
    archs=("ascend910b",),
    requires=("torch-npu>=2.11",),
    phases=frozenset({"decode", "verify"}),
    draft_phases=frozenset(),
    dtypes=frozenset({"bf16"}),
    # any up to 256; these are the ones models have
    head_dims=(64, 128, 256, (64, 128), (96, 192), (128, 256)),
    # a recurrence has states, no pages
    page_sizes=PageSizes(preferred=1, multiple_of=1),
    mask_format="internal_causal",
    inputs=frozenset({"host_lens"}),
    plan="host",
    state_layouts=("vk",),
    priority=60,
)
# Source: torch-npu 2.14.0 _op_plugin_docs.py:12085, npu_chunk_gated_delta_rule: keys and values of 128
DELTA_PREFILL = replace(
    DELTA_ROWS,
    factory="backstamp_ascend.backend:build_delta_prefill",
    phases=frozenset({"prefill"}),
    head_dims=(128,),
)


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The rows of the kernel `ascend`, of both slots."""
    return (PACKED, PACKED_192, ROWS, LATENT, DELTA_ROWS, DELTA_PREFILL)


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """None: a kernel's own name is its alias."""
    return ()
