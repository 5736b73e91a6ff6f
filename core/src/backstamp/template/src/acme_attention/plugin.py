"""What this plugin declares: read on any machine, so it imports backstamp alone."""

from backstamp.declarations import ANY, Alias, Offer, PageSizes
from backstamp.hookspecs import hookimpl

NAIVE = Offer(
    # the name on the stamp
    kernel="acme_attention_naive",
    factory="acme_attention.backend:build",
    family="mha",
    device="any",
    # written out: an empty tuple accepts nothing
    archs=ANY,
    # the first is the library the stamp names
    requires=("torch>=2.11",),
    # `auto` prefers almost anything else
    priority=1,
    # draft phases follow their halves
    phases=frozenset({"prefill", "decode", "verify"}),
    dtypes=frozenset({"fp32", "bf16", "fp16"}),
    head_dims=ANY,
    page_sizes=PageSizes(preferred=16, multiple_of=1),
    index_forms=frozenset({"page_table"}),
    # queries may attend over tokens of earlier steps
    prefix=True,
    mask_format="internal_causal",
    # what is not here is never asked of it: windows, softcap, sinks, tree masks
    features=frozenset({"lse"}),
    # lengths on the CPU too, so that no step waits for the device
    inputs=frozenset({"host_lens"}),
)


@hookimpl
def backstamp_offers():
    """The rows of every kernel."""
    return (NAIVE,)


@hookimpl
def backstamp_aliases():
    """The keys an operator types, each with the kernels it stands for, in order."""
    return (
        Alias(
            key="acme_attention",
            kernels=("acme_attention_naive",),
        ),
    )
