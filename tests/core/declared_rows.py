"""Rows that declare one thing or another, and a small step to hold against them."""

from __future__ import annotations

from dataclasses import replace

import torch

from backstamp.attention import LayerSpec
from backstamp.declarations import Offer, PageSizes
from backstamp.step_checks import check_batch, check_call
from backstamp.testing.batches import SMALL_LAYER, MadeStep, make_batch
from backstamp.testing.requests import request_for

__all__ = [
    "ABLE", "BAD_HEADS", "COMPRESSED", "FLOAT8", "HOST", "LATENT", "META", "ONES", "PLAIN", "READING", "SINKS",
    "SPARSE", "STEP", "WRITING", "called", "changed", "layer", "planned",
]  # fmt: skip

PLAIN = Offer(
    kernel="plain",
    factory="acme.backend:build",
    family="mha",
    device="any",
    archs=("any",),
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp32"}),
    head_dims=(32,),
    page_sizes=PageSizes(preferred=16, exact=(16,)),
    index_forms=frozenset({"page_table"}),
    mask_format="internal_causal",
)
ABLE = replace(
    PLAIN,
    features=frozenset(
        {"window", "softcap", "sinks", "alibi", "tree_mask", "non_causal", "lse", "split_kv", "encoder", "cross"}
    ),
    kv_forms=frozenset({"paged", "ragged"}),
    index_forms=frozenset({"csr", "page_table", "indirect"}),
    kv_dtypes=frozenset({"same", "e4m3fn"}),
    graph="any",
    sink_dtypes=frozenset({"fp32"}),
)
HOST = replace(PLAIN, inputs=frozenset({"host_lens"}))
LATENT = replace(PLAIN, family="mla", head_dims=((32, 16), (48, 16)))
FLOAT8 = replace(ABLE, kv_dtypes=frozenset({"e4m3fn"}))
#: What only some kernels read: rows of tokens, and slots to write.
READING = replace(PLAIN, inputs=frozenset({"token_rows"}))
WRITING = replace(PLAIN, features=frozenset({"fused_write"}))
SPARSE = replace(LATENT, family="sparse_mla")
COMPRESSED = replace(PLAIN, family="csa", features=frozenset({"window", "indices"}))
STEP = make_batch([2, 3], [9, 30])
SINKS = torch.zeros(4)
#: Sinks or slopes no kernel can read.
BAD_HEADS = (SINKS[:3], SINKS[None], SINKS.int(), torch.zeros(8)[::2], SINKS.to("meta"))
META = torch.empty(3, dtype=torch.int32, device="meta")
ONES = torch.ones(2, dtype=torch.int32)


def layer(**changes: object) -> LayerSpec:
    """The small layer with changes."""
    return replace(SMALL_LAYER, **changes)


def planned(offer: Offer, step: MadeStep = STEP, *, request: dict[str, object] | None = None, **options: bool) -> str:
    """Check a step against a row."""
    return check_batch(request_for(offer, **(request or {})), step.batch, **options)


def called(offer: Offer, step: MadeStep = STEP, **tensors: object) -> None:
    """Check a layer call against a row; `tensors` replace the step's own."""
    kv, q, spec = tensors.pop("kv", step.kv), tensors.pop("q", step.q), tensors.pop("layer", step.layer)
    stored = "e4m3fn" if offer is FLOAT8 else "same"
    check_call(request_for(offer, kv_dtype=stored), q, kv, spec, step.batch, **tensors)


def changed(**changes: object) -> MadeStep:
    """The plain step with another batch."""
    return replace(STEP, batch=replace(STEP.batch, **changes))
