"""The factory contract: what a plugin's factory receives and what it answers.

In: one `BuildRequest` made from a plan and a runner. Out: one `Built`. A factory names the kernel it really built;
construction checks that name against the plan and the declarations before anything is stamped.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from backstamp.declarations import GraphLevel, Offer, Phase, Role

if TYPE_CHECKING:
    from backstamp.attention import LayerSpec
    from backstamp.linear import LinearAttnBackends

__all__ = ["BuildRequest", "Built"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """One kernel to build for one runner; a kernel that serves several phases is asked for once.

    Attributes:
        kernel: name the plan chose, within the slot.
        offer: the declared row the plan accepted; `backstamp.step_checks` holds batches and tensors against it.
        family: attention family of the layers, for example "mha" or "mla".
        phases: the phases this object will serve.
        layers: the layers it will serve.
        dtype, kv_dtype: canonical names such as "bf16", "e4m3fn".
        page_size: tokens a page.
        layout: layout id the plan settled on: of the KV cache, or in the linear slot of the states.
        device: torch device string, for example "cuda:0".
        topk, num_steps: the runner's speculative settings; 1 and 0 without speculation.
        max_rows, max_tokens, max_pages: upper bounds a step never exceeds.
        max_kv_len: longest row in tokens.
        graph: CUDA-graph level the plan settled on.
        sub_settings: what an operator asked of this kernel's insides, for example {"dsa_decode_backend": "flashmla"}.
        settings: build-time features to compile in, for example {"softcap": 50.0}; `Built.settings` reports them back.
        linear_attn_backends: the runner's linear-attention kernels, as stamped on it; None where nobody stamped it.
    """

    kernel: str
    offer: Offer
    family: str
    phases: tuple[Phase, ...]
    role: Role
    layers: tuple[LayerSpec, ...]
    dtype: str
    kv_dtype: str
    page_size: int
    layout: str
    device: str
    max_rows: int
    max_tokens: int
    max_pages: int
    max_kv_len: int
    topk: int = 1
    num_steps: int = 0
    graph: GraphLevel = "never"
    settings: Mapping[str, float] = field(default_factory=dict)
    sub_settings: Mapping[str, str] = field(default_factory=dict)
    linear_attn_backends: LinearAttnBackends | None = None


class Built(NamedTuple):
    """What a factory answers: the kernel it really built, the backend (None: no backend, nothing is stamped), and
    the build-time settings the object was compiled with."""

    kernel: str
    backend: object | None
    settings: Mapping[str, float] = MappingProxyType({})
