"""Which distribution owns each first-party name, and whose word about other people's kernels counts.

In: a name, or a distribution and the operator's policy. Out: an owner, or whether it is trusted. Installing is not
consenting: a distribution that is neither first-party nor named by the operator speaks for its own kernels only.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from backstamp.text import canonical

if TYPE_CHECKING:
    from backstamp.policy import Policy

__all__ = ["FIRST_PARTY", "FIRST_PARTY_DISTRIBUTIONS", "is_trusted"]

#: Distributions that own the first-party names, so that "not installed" can say what to install.
FIRST_PARTY: Final[Mapping[str, str]] = {
    "torch_native": "backstamp-cpu",
    "flex_attention": "backstamp-cpu",
    "intel_amx": "backstamp-cpu",
    "triton": "backstamp-triton",
    "flashinfer": "backstamp-flashinfer",
    "fa3": "backstamp-fa3",
    "fa4": "backstamp-fa3",
    "trtllm_mha": "backstamp-trtllm",
    "xqa": "backstamp-trtllm",
    "fmha_v2": "backstamp-trtllm",
    "trtllm_mla": "backstamp-trtllm",
    "cutedsl_mla": "backstamp-trtllm",
    "tokenspeed_mla": "backstamp-trtllm",
    "dsa": "backstamp-dsa",
    "nsa": "backstamp-dsa",
    "dsv4": "backstamp-dsa",
    "flashmla": "backstamp-dsa",
    "hybrid_linear_attn": "backstamp-linear-attn",
    "aiter": "backstamp-aiter",
    "ascend": "backstamp-ascend",
}
#: The plugins above and the engine adapters, which speak for the model families their engines serve.
FIRST_PARTY_DISTRIBUTIONS: Final = frozenset(FIRST_PARTY.values()) | {
    "backstamp-transformers",
    "backstamp-vllm",
    "backstamp-sglang",
}


def is_trusted(distribution: str, policy: Policy) -> bool:
    """Whether a distribution may speak for kernels that are not its own: first-party, or allowed by the operator."""
    name = canonical(distribution)
    return name in FIRST_PARTY_DISTRIBUTIONS or name in policy.allow
