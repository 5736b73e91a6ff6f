"""Steps for the flashinfer tests: a layer, a made batch, the built object, and the check against float64.

In: lengths and what a step needs. Out: a `Run` with outputs compared to `reference_attention`. Outputs start as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from backstamp.attention import LayerSpec, PagedKV, RaggedKV
from backstamp.declarations import Offer
from backstamp.factories import BuildRequest
from backstamp.testing.batches import MadeStep, make_batch, make_tree
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_flashinfer.plugin import MHA, MHA_SINKS, MLA

__all__ = [
    "CHAIN",
    "LATENT",
    "LAYER",
    "MIXED",
    "ONE",
    "SINK",
    "Run",
    "build",
    "draw",
    "forward",
    "held",
    "request_of",
    "with_lens",
]

LAYER = LayerSpec(layer_id=0, num_qo_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=64**-0.5)
LATENT = LayerSpec(layer_id=0, num_qo_heads=8, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5)
#: The same with an extra logit a head.
SINK = replace(LAYER, sinks=torch.randn(4, generator=torch.Generator().manual_seed(1)))
#: (query tokens, KV tokens): ragged rows, a lone token, a row without queries, one without either.
MIXED = ((5, 5), (1, 40), (0, 17), (0, 0), (9, 33), (3, 64))
#: One token a row.
ONE = ((1, 1), (1, 17), (1, 64), (1, 150))
#: Rows of a verify step.
CHAIN = ((4, 4), (4, 40), (4, 29))

BOUND = 2e-3


def draw(
    rows: tuple[tuple[int, int], ...], layer: LayerSpec = LAYER, *, tree: str | None = None, **options: Any
) -> MadeStep:
    """A step in fp16, its tree drawn over the same rows."""
    q_lens, kv_lens = zip(*rows, strict=True)
    made = None if tree is None else make_tree(q_lens, kv_lens, tree)  # type: ignore[arg-type]
    options.setdefault("dtype", torch.float16)
    if layer.head_dim == 576:
        options.setdefault("cache_form", "latent")
    return make_batch(q_lens, kv_lens, layer=layer, tree=made, **options)


def request_of(step: MadeStep, offer: Offer | None = None, **changes: Any) -> BuildRequest:
    """A request for the row that serves the step's layer."""
    layer = step.layer
    if offer is None:
        offer = MLA if layer.head_dim == 576 else MHA if layer.sinks is None else MHA_SINKS
    dtype = {torch.float16: "fp16", torch.bfloat16: "bf16"}[step.q.dtype]
    changes = {"dtype": dtype, "page_size": step.batch.index.page_size, **changes}
    return request_for(offer, changes.pop("layers", (layer,)), **changes)


def build(step: MadeStep, *, hopper: bool = False, offer: Offer | None = None, **changes: Any) -> Any:
    """The plugin's object, imported against the stand-in."""
    request = request_of(step, offer, **changes)
    if request.family == "mla":
        from backstamp_flashinfer.mla import FlashInferMLA

        return FlashInferMLA(request, hopper=hopper)
    from backstamp_flashinfer.attention import FlashInferAttention

    return FlashInferAttention(request, hopper=hopper)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one `forward` wrote."""

    out: Tensor
    lse: Tensor | None


def forward(
    backend: Any,
    step: MadeStep,
    state: Any = None,
    *,
    lse: bool = False,
    kv: PagedKV | str | None = "cache",
    new: RaggedKV | None = None,
    q_rope: Tensor | None = None,
    out: Tensor | None = None,
) -> Run:
    """Plan unless a state is given, and attend one layer into NaN."""
    layer, batch = step.layer, step.batch
    if out is None:
        shape = (batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        out = torch.full(shape, float("nan"), dtype=step.q.dtype)
    total = torch.full((batch.num_tokens, layer.num_qo_heads), float("nan")) if lse else None
    state = backend.plan(batch) if state is None else state
    cache = step.kv if isinstance(kv, str) else kv
    answer = backend.forward(step.q, cache, layer, state, out=out, lse=total, new=new, q_rope=q_rope)
    assert answer is out
    return Run(out=out, lse=total)


def held(run: Run, step: MadeStep, *, q_rope: Tensor | None = None) -> None:
    """The outputs are finite and within the bound of fp16; the LSE is natural, -inf where nothing is seen."""
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, step.batch, q_rope=q_rope)
    assert bool(torch.isfinite(run.out).all())
    assert relative_error(run.out, truth) < BOUND
    if run.lse is not None:
        torch.testing.assert_close(run.lse.double(), true_lse, atol=BOUND, rtol=BOUND)


def with_lens(step: MadeStep, kv_lens: list[int]) -> MadeStep:
    """The same step with other, shorter rows."""
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    return replace(step, batch=replace(step.batch, kv_lens=lens, kv_lens_host=lens.clone()))
