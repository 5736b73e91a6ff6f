"""What this plugin declares: one kernel, `acme`, which is also its key."""

from __future__ import annotations

from backstamp.declarations import ANY, Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

ACME = Offer(
    kernel="acme",
    factory="acme_attention.backend:build",
    family="mha",
    device="any",
    archs=ANY,
    requires=("torch>=2.11",),
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp16", "bf16", "fp32"}),
    head_dims=ANY,
    page_sizes=PageSizes(preferred=16, multiple_of=1),
    prefix=True,
    # a mask a row says both; softcap, sinks and trees are not SDPA's
    features=frozenset({"window", "non_causal", "topk"}),
    mask_format="internal_causal",
    inputs=frozenset({"host_lens"}),
    # below everything that is made for speed
    priority=1,
)


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The one row."""
    return (ACME,)


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """None: the kernel's own name is the key."""
    return ()
