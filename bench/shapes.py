"""The work `bench/kernels.py` measures: shapes, their tensors, and the check against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV
from backstamp.testing.reference import gather_row, relative_error

HEADS, KV_HEADS, DIM = 32, 8, 128
MLA_HEADS, LATENT, ROTARY = 128, 512, 64


class Shape(NamedTuple):
    """One piece of work: `rows` requests of `q_len` queries over `kv_len` tokens in pages of `page_size`."""

    work: str
    rows: int
    q_len: int
    kv_len: int
    page_size: int

    @property
    def label(self) -> str:
        """How the record names the shape."""
        return f"b{self.rows} q{self.q_len} kv{self.kv_len} page{self.page_size}"


@dataclass(frozen=True)
class Data:
    """One shape's tensors: scattered pages, random values."""

    shape: Shape
    q: Tensor
    kv: PagedKV
    batch: Batch
    layer: LayerSpec

    @property
    def flops(self) -> float:
        """Floating-point operations that must be done; a causal prefill does half the square."""
        shape, layer = self.shape, self.layer
        pairs = shape.rows * shape.q_len * shape.kv_len * (0.5 if shape.q_len > 1 else 1.0)
        return 2 * pairs * layer.num_qo_heads * (layer.head_dim + layer.v_head_dim)

    @property
    def bytes(self) -> float:
        """Bytes that must move: the cache once, queries in, outputs out."""
        shape, layer = self.shape, self.layer
        per_token = layer.head_dim * (1 if self.kv.v is None else 2) * layer.num_kv_heads
        cache = shape.rows * shape.kv_len * per_token
        ends = shape.rows * shape.q_len * layer.num_qo_heads * (layer.head_dim + layer.v_head_dim)
        return 2.0 * (cache + ends)


def mha_data(shape: Shape) -> Data:
    """Grouped-query tensors; K and V of a page side by side, pages in random order."""
    pages = shape.rows * shape.kv_len // shape.page_size
    cache = torch.randn(pages, 2, shape.page_size, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(shape.rows * shape.q_len, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    layer = LayerSpec(
        layer_id=0, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, v_head_dim=DIM, scale=DIM**-0.5
    )
    return Data(shape, q, PagedKV(k=cache[:, 0], v=cache[:, 1]), batch_of(shape, pages), layer)


def mla_data(shape: Shape) -> Data:
    """Absorbed MLA tensors over a latent cache."""
    pages = shape.rows * shape.kv_len // shape.page_size
    cache = torch.randn(pages, shape.page_size, 1, LATENT + ROTARY, device="cuda", dtype=torch.bfloat16) * 0.3
    q = torch.randn(shape.rows, MLA_HEADS, LATENT + ROTARY, device="cuda", dtype=torch.bfloat16) * 0.3
    layer = LayerSpec(
        layer_id=0,
        num_qo_heads=MLA_HEADS,
        num_kv_heads=1,
        head_dim=LATENT + ROTARY,
        v_head_dim=LATENT,
        scale=192**-0.5,
    )
    return Data(shape, q, PagedKV(k=cache, v=None), batch_of(shape, pages), layer)


def batch_of(shape: Shape, pages: int) -> Batch:
    """A uniform batch over pages in random order."""
    table = torch.randperm(pages, device="cuda").int().view(shape.rows, -1)
    qo_indptr = torch.arange(shape.rows + 1, dtype=torch.int32) * shape.q_len
    kv_lens = torch.full((shape.rows,), shape.kv_len, dtype=torch.int32)
    per_row = shape.kv_len // shape.page_size
    return Batch(
        phase="decode" if shape.q_len == 1 else "prefill",
        num_rows=shape.rows,
        num_tokens=shape.rows * shape.q_len,
        max_q_len=shape.q_len,
        max_kv_len=shape.kv_len,
        decode_q_len=1 if shape.q_len == 1 else None,
        qo_indptr=qo_indptr.cuda(),
        kv_lens=kv_lens.cuda(),
        index=KVIndex(
            page_size=shape.page_size,
            page_table=table,
            kv_indptr=torch.arange(shape.rows + 1, dtype=torch.int32, device="cuda") * per_row,
            kv_indices=table.view(-1),
        ),
        qo_indptr_host=qo_indptr,
        kv_lens_host=kv_lens,
    )


def sampled_error(out: Tensor, data: Data) -> float:
    """Relative error against float64 on sampled tokens of the first and the last row, all heads."""
    shape, layer = data.shape, data.layer
    answers, truths = [], []
    for row in (0, shape.rows - 1):
        k = gather_row(data.kv.k, data.batch.index, row, shape.kv_len).double()
        v = (
            k[..., : layer.v_head_dim]
            if data.kv.v is None
            else gather_row(data.kv.v, data.batch.index, row, shape.kv_len).double()
        )
        share = layer.num_qo_heads // layer.num_kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        for at in sorted({0, shape.q_len // 2, shape.q_len - 1}):
            token = row * shape.q_len + at
            seen = shape.kv_len - shape.q_len + at + 1
            logits = torch.einsum("hd,khd->hk", data.q[token].double(), k[:seen]) * layer.scale
            answers.append(out[token])
            truths.append(torch.einsum("hk,khd->hd", logits.softmax(-1), v[:seen]))
    return relative_error(torch.stack(answers), torch.stack(truths))
