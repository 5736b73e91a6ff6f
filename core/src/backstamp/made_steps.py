"""Steps of random numbers for whoever runs a plan without an engine: `backstamp.warm` and `backstamp.tune`.

In: a plan, a declared row and a layer's facts. Out: the layer as an engine would describe it, a step its kernel reads,
or why random numbers cannot stand for what it reads. It runs nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from backstamp.attention import LayerSpec
from backstamp.declarations import Offer, Phase, Slot
from backstamp.device_check import torch_device
from backstamp.model import LayerFacts
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan

if TYPE_CHECKING:
    from backstamp.testing.batches import CacheForm, IndexForm, MadeStep

__all__ = ["cannot", "layer_spec", "random_step"]

_LATENT: Final = frozenset({"mla", "sparse_mla", "csa"})
_FORMS: Final[tuple[IndexForm, ...]] = ("page_table", "csr", "indirect")


def cannot(slot: Slot, group: GroupPlan, offer: Offer) -> str:
    """Why random tensors cannot stand for what a row reads; empty where they can."""
    if slot == "linear":
        known = group.family in ("gdn", "kda")
        return "" if known else f"states of a {group.family} layer are the engine's own to make"
    if group.family == "csa":
        return "its compressed caches are the engine's own to make"
    if offer.layouts[0] != "rows":
        return f"a cache of layout {offer.layouts[0]} is the engine's own to make"
    return ""


def layer_spec(facts: LayerFacts, layer_id: int, component: str, device: str) -> LayerSpec:
    """A layer as an engine would describe it, with the sinks its model has."""
    spec = LayerSpec(
        layer_id=layer_id,
        num_qo_heads=facts.num_qo_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        v_head_dim=facts.v_head_dim,
        scale=facts.head_dim**-0.5,
        window_left=facts.window_left,
        softcap=facts.softcap,
        attn_type=facts.attn_type,
        component=component,
    )
    if facts.sinks is None:
        return spec
    import torch

    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    return replace(spec, sinks=torch.zeros(facts.num_qo_heads, dtype=getattr(torch, names[facts.sinks]), device=device))


def random_step(phase: Phase, spec: LayerSpec, offer: Offer, plan: Plan, rows: Sequence[tuple[int, int]]) -> MadeStep:
    """One step of a phase: rows of (query tokens, KV tokens) in the forms a row of a kernel reads."""
    import torch

    from backstamp.testing.batches import make_batch, make_tree

    names = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "e5m2": "float8_e5m2"}
    own = plan.kv_dtype in ("same", plan.dtype)
    q_lens, kv_lens = zip(*rows, strict=True)
    device = torch_device(plan.device)
    form: IndexForm = next((form for form in _FORMS if form in offer.index_forms), "page_table")
    cache: CacheForm = "latent" if offer.family in _LATENT else "nhd"
    tree = None
    if phase == "verify" and plan.topk > 1:
        tree = make_tree(q_lens, kv_lens, "qlen", device=device)
    # what looks across at another sequence sees all of it
    causal = spec.attn_type == "decoder"
    return make_batch(
        q_lens,
        kv_lens,
        layer=spec,
        phase=phase,
        page_size=plan.page_size,
        dtype=getattr(torch, names[plan.dtype]),
        kv_dtype=None if own else getattr(torch, names.get(plan.kv_dtype, f"float8_{plan.kv_dtype}")),
        index_form=form,
        cache_form=cache,
        causal=causal,
        tree=tree,
        device=device,
    )
