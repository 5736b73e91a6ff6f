"""A plugin in memory whose kernels are the sparse references, for tests that break them one way at a time.

In: a `BuildRequest`. Out: `Built` objects that hold every call against their row, then answer by the reference. The
rows are small: what is asked of them costs a CPU little.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backstamp.attention import PagedKV
from backstamp.declarations import ANY, Offer, PageSizes
from backstamp.discovery import Discovery
from backstamp.factories import BuildRequest, Built
from backstamp.host import this_host
from backstamp.step_checks import check_batch, check_build, check_call
from backstamp.testing.conformance.subject import Subject
from backstamp.testing.fakes import fake_plugin
from backstamp.testing.packed_latent import FORMATS, unpack
from backstamp.testing.sparse_reference import (
    reference_compressed,
    reference_indexer,
    reference_sparse,
    reference_topk,
)

__all__ = ["COMPRESSED", "PACKED", "SPARSE", "ReferenceIndexer", "ReferenceKernel", "build", "subject_of"]

SPARSE = Offer(
    kernel="reference_sparse",
    factory="tests.sparse_rows:build",
    family="sparse_mla",
    device="any",
    archs=ANY,
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp32"}),
    head_dims=((96, 64),),
    group_sizes=((1, 16),),
    page_sizes=PageSizes(preferred=16, exact=(16,)),
    index_forms=frozenset({"page_table", "csr"}),
    prefix=True,
    mask_format="internal_causal",
    features=frozenset({"indices", "lse", "topk", "non_causal"}),
)
PACKED = replace(
    SPARSE,
    dtypes=frozenset({"bf16"}),
    head_dims=((576, 512),),
    page_sizes=PageSizes(preferred=64, exact=(64,)),
    kv_dtypes=frozenset({"fp8_ds_mla"}),
    kv_dtype_names={"fp8_e4m3": "fp8_ds_mla", "fp8_ds_mla": "fp8_ds_mla"},
    layouts=("fp8_ds_mla",),
)
COMPRESSED = replace(
    SPARSE,
    kernel="reference_compressed",
    family="csa",
    head_dims=((64, 64),),
    page_sizes=PageSizes(preferred=128, exact=(128,)),
    features=frozenset({"window", "sinks", "indices", "topk"}),
    sink_dtypes=frozenset({"fp32"}),
)


def subject_of(*offers: Offer) -> Subject:
    """The plugin with these rows, on this machine."""
    found = fake_plugin("reference", offers)
    return Subject(found=found, host=this_host(), discovery=Discovery(found=(found,), failures=()))


class ReferenceIndexer:
    """Chooses by the reference."""

    def select(self, q, weights, keys, state, topk):
        """Of float64 logits, the best."""
        return reference_topk(reference_indexer(q, weights, keys, state), topk)


class ReferenceKernel:
    """Attends by the reference; a step's state is its batch."""

    def __init__(self, request: BuildRequest) -> None:
        check_build(request)
        self.request = request
        self.indexer = ReferenceIndexer()

    def plan(self, batch, *, state=None, capture=False):
        """Check the batch."""
        check_batch(self.request, batch, capture=capture)
        return batch

    def forward(self, q, kv, layer, state, *, out=None, lse=None, new=None, q_rope=None, indices=None):
        """Attend, and write what the reference answers."""
        named = {"out": out, "lse": lse, "new": new, "q_rope": q_rope, "indices": indices}
        check_call(self.request, q, kv, layer, state, **named)
        truth, true_lse = self.attend(q, self.read(kv), layer, state, indices, q_rope)
        out.copy_(truth)
        if lse is not None:
            lse.copy_(true_lse)
        return out

    def read(self, kv: PagedKV) -> PagedKV:
        """What the bytes of a cache mean."""
        if kv.layout not in FORMATS:
            return kv
        return PagedKV(k=unpack(kv.k, kv.layout), v=None if kv.v is None else unpack(kv.v, kv.layout))

    def attend(self, q, kv, layer, batch, indices, q_rope):
        """Outputs and LSE."""
        q = q if q_rope is None else torch.cat([q, q_rope], dim=-1)
        if self.request.family == "csa":
            return reference_compressed(q, kv, layer, batch, indices)
        return reference_sparse(q, kv, layer, batch, indices)


def build(request: BuildRequest) -> Built:
    """The factory of every row."""
    if request.family == "csa":
        return Built("reference_compressed", ReferenceKernel(request))
    return Built("reference_sparse", ReferenceKernel(request))
