"""The tensors of one shape, made on the device: scattered pages or state slots, random values.

In: a `Shape` and a device. Out: an `AttentionStep` or a `LinearStep`. Made once a shape and read by every kernel; only
a recurrence's states change, and `restore` puts them back.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import (
    Batch,
    ComputedGates,
    KVIndex,
    LayerSpec,
    LinearBatch,
    PagedKV,
    RaggedKV,
    RawGates,
    StatePool,
)
from backstamp.linear_gates import computed_gates
from backstamp.testing.batches import make_tree
from backstamp.testing.packed_latent import FORMATS, pack
from shapes import LATENT, Shape, family_of

__all__ = ["AttentionStep", "LinearStep", "attention_step", "linear_step"]

#: Size of the numbers of a latent cache and of its queries: logits of about 1 at a width of 576.
_LATENT_SIZE, _LATENT_QUERY = 0.3, 2.0
#: Rows of choices that are unlike; the others repeat them.
_CHOICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """One step of one layer; `kv` or `new` is None, and `indices [T, topk]` are set in sparse attention alone."""

    shape: Shape
    q: Tensor
    batch: Batch
    layer: LayerSpec
    kv: PagedKV | None
    new: RaggedKV | None
    indices: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStep:
    """One step of one recurrent layer, with its states as they were before any kernel ran."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    gates: RawGates | ComputedGates
    batch: LinearBatch
    layer: LayerSpec
    pool: StatePool
    before: Tensor

    def restore(self) -> None:
        """Put the states back."""
        self.pool.ssm.copy_(self.before)


def attention_step(shape: Shape, device: str, seed: int = 0) -> AttentionStep:
    """Queries, and keys in pages of random order or in no cache."""
    torch.manual_seed(seed)
    latent = family_of(shape) in LATENT
    (heads, kv_heads), (dk, dv) = shape.heads, shape.dims
    layer = LayerSpec(
        layer_id=0,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dk,
        v_head_dim=dv,
        # of a latent's heads before absorption
        scale=(192 if latent else dk) ** -0.5,
    )
    q = torch.randn(shape.num_tokens, heads, dk, device=device, dtype=torch.bfloat16)
    batch, pages = _batch(shape, device)
    if not shape.page_size:
        k, v = (torch.randn(shape.num_kv_tokens, kv_heads, d, device=device, dtype=torch.bfloat16) for d in (dk, dv))
        new = RaggedKV(k=k, v=v, kv_indptr=batch.qo_indptr)
        return AttentionStep(shape=shape, q=q, batch=batch, layer=layer, kv=None, new=new, indices=None)
    kv = _latent_cache(shape, pages, device) if latent else _cache(shape, pages, device)
    return AttentionStep(
        shape=shape,
        q=q * _LATENT_QUERY if latent else q,
        batch=batch,
        layer=layer,
        kv=kv,
        new=None,
        indices=_choices(shape, device) if shape.topk else None,
    )


def linear_step(shape: Shape, device: str, seed: int = 0) -> LinearStep:
    """Tokens as a short convolution leaves them, gates, and fp32 states in slots of random order, order `vk`."""
    torch.manual_seed(seed)
    (keys, values), (dk, dv), total, rows = shape.heads, shape.dims, shape.num_tokens, len(shape.rows)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    channels = (dk,) if family_of(shape) == "kda" else ()
    gates: RawGates | ComputedGates = RawGates(
        a=random(total, values, *channels),
        b=random(total, values),
        # decays of some tens of tokens down to a few, as trained models have
        A_log=torch.randn(values, device=device) - 1,
        dt_bias=torch.randn(values, *channels, device=device) / 2,
        lower_bound=shape.lower_bound,
    )
    # engines compute the gates of a prefill, and hand raw ones to decode and where the decay has a bound: SGLang 0.5.23
    # gdn_backend.py, kda_backend.py
    gates = gates if shape.raw_gates else computed_gates(gates)
    offsets = _offsets([q for q, _ in shape.rows])
    batch = LinearBatch(
        phase=shape.phase,
        num_rows=rows,
        num_tokens=total,
        qo_indptr=offsets.to(device),
        slots=torch.randperm(2 * rows)[:rows].to(device, torch.int32),
        has_state=torch.full((rows,), shape.phase == "decode", device=device),
        qo_indptr_host=offsets,
        max_q_len=max(q for q, _ in shape.rows),
    )
    layer = LayerSpec(layer_id=0, num_qo_heads=keys, num_kv_heads=values, head_dim=dk, v_head_dim=dv, scale=dk**-0.5)
    states = torch.randn(2 * rows, values, dv, dk, device=device)
    return LinearStep(
        shape=shape,
        q=random(total, keys, dk),
        k=random(total, keys, dk),
        v=random(total, values, dv),
        gates=gates,
        batch=batch,
        layer=layer,
        pool=StatePool(ssm=states.clone(), order="vk"),
        before=states,
    )


def _batch(shape: Shape, device: str) -> tuple[Batch, int]:
    """The batch over pages in random order, and how many there are."""
    q_lens, kv_lens = [q for q, _ in shape.rows], [kv for _, kv in shape.rows]
    qo_indptr, lens = _offsets(q_lens), torch.tensor(kv_lens, dtype=torch.int32)
    index, pages = KVIndex(page_size=64), 0
    if shape.page_size:
        indptr = _offsets([-(-kv // shape.page_size) for kv in kv_lens])
        pages = int(indptr[-1])
        order = torch.randperm(pages, device=device).int()
        width = int(indptr.diff().max())
        at = indptr[:-1, None] + torch.arange(width, dtype=torch.int32)
        # entries past a row's own pages are another row's: stale, and never read
        table = order[at.clamp_max(pages - 1).to(device).long()]
        index = KVIndex(page_size=shape.page_size, page_table=table, kv_indptr=indptr.to(device), kv_indices=order)
    batch = Batch(
        phase=shape.phase,
        num_rows=len(shape.rows),
        num_tokens=shape.num_tokens,
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        decode_q_len=q_lens[0] if shape.phase != "prefill" and shape.uniform else None,
        qo_indptr=qo_indptr.to(device),
        kv_lens=lens.to(device),
        index=index,
        qo_indptr_host=qo_indptr,
        kv_lens_host=lens,
        tree=make_tree(q_lens, kv_lens, "qlen", device=device) if shape.tree else None,
    )
    return batch, pages


def _cache(shape: Shape, pages: int, device: str) -> PagedKV:
    """K and V of a page side by side."""
    (_, heads), (dk, dv) = shape.heads, shape.dims
    assert dk == dv, "one tensor holds both"
    both = torch.randn(pages, 2, shape.page_size, heads, dk, device=device, dtype=torch.bfloat16)
    if shape.kv_dtype == "same":
        return PagedKV(k=both[:, 0], v=both[:, 1])
    numbers = both.to(torch.float8_e4m3fn)
    return PagedKV(k=numbers[:, 0], v=numbers[:, 1], k_scale=0.5, v_scale=2.0)


def _latent_cache(shape: Shape, pages: int, device: str) -> PagedKV:
    rows = torch.randn(pages, shape.page_size, 1, shape.dims[0], device=device, dtype=torch.bfloat16) * _LATENT_SIZE
    if shape.kv_dtype not in FORMATS:
        return PagedKV(k=rows, v=None)
    return PagedKV(k=pack(rows, shape.kv_dtype), v=None, layout=shape.kv_dtype)


def _choices(shape: Shape, device: str) -> Tensor:
    """Distinct keys of its own row for each token, all before the row's first query."""
    of_rows = []
    for q_len, kv_len in shape.rows:
        seen = kv_len - q_len + 1
        some = torch.rand(min(q_len, _CHOICES), seen, device=device).argsort(-1)[:, : shape.topk].int()
        of_rows.append(some.repeat(-(-q_len // _CHOICES), 1)[:q_len])
    return torch.cat(of_rows).contiguous()


def _offsets(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
