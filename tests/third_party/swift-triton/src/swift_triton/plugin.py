"""What this plugin declares: a kernel by the name of another distribution's, `triton`."""

from __future__ import annotations

from backstamp.declarations import ANY, Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

__all__ = ["backstamp_aliases", "backstamp_offers"]

SWIFT = Offer(
    kernel="triton",
    factory="swift_triton.backend:build",
    family="mha",
    device="cuda",
    # compiled on the host it runs on
    archs=ANY,
    requires=("triton>=3.6", "torch>=2.11"),
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp16", "bf16", "fp32"}),
    # what `tl.arange` spans
    head_dims=(16, 32, 64, 128, 256),
    page_sizes=PageSizes(preferred=16, multiple_of=1),
    prefix=True,
    features=frozenset({"window", "softcap", "topk"}),
    mask_format="internal_causal",
    priority=90,
)


@hookimpl
def backstamp_offers() -> tuple[Offer, ...]:
    """The one row."""
    return (SWIFT,)


@hookimpl
def backstamp_aliases() -> tuple[Alias, ...]:
    """None: the kernel's own name is the key."""
    return ()
