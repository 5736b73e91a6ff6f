"""The refusals of this plugin's kernels: what a batch or a layer asks for that a kernel does not serve.

In: what an engine handed to `plan` or `forward`. Out: nothing, or an `UnsupportedBatch` naming needed and found. Never
drops a request in silence, and never reads a tensor's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.declarations import Phase
from backstamp.errors import BadInput, UnsupportedBatch
from backstamp.factories import BuildRequest
from backstamp_cpu.rows import StepRows

__all__ = ["DTYPES", "Limits", "limits_of"]

#: Torch dtypes by their canonical name; the float8 ones are read as caches only.
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one built object serves, checked each step (`check_batch`) and each layer (`check_call`)."""

    kernel: str
    role: str
    phases: tuple[Phase, ...]
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    alibi: bool

    def check_batch(self, batch: Batch, capture: bool) -> None:
        """Refuse a step this object was not built for.

        Raises:
            UnsupportedBatch: graph capture, a phase or page size that was not asked for, no readable index, or a
                malformed tree.
        """
        if capture:
            raise self._refusal(
                batch.phase, "graph=never", "a graph capture", "plan this kernel outside of CUDA graphs"
            )
        if batch.phase not in self.phases:
            raise self._refusal(
                batch.phase, f"one of the phases it was built for ({', '.join(self.phases)})", batch.phase
            )
        index = batch.index
        if index.page_size != self.page_size:
            raise self._refusal(batch.phase, f"page size {self.page_size}", str(index.page_size))
        forms = (
            index.page_table is not None,
            index.kv_indptr is not None and index.kv_indices is not None,
            index.table is not None and index.row_ids is not None,
        )
        if not any(forms):
            needed = "page_table, kv_indptr with kv_indices, or table with row_ids"
            raise self._refusal(batch.phase, needed, "an index with none of them")
        if isinstance(batch.causal, Tensor) and batch.causal.shape != (batch.num_rows,):
            raise self._refusal(batch.phase, f"causal [{batch.num_rows}]", f"causal {list(batch.causal.shape)}")
        if batch.tree is not None:
            self._check_tree(batch)

    def check_call(
        self,
        q: Tensor,
        head_dim: int,
        kv: PagedKV | None,
        layer: LayerSpec,
        batch: Batch,
        rows: StepRows,
        *,
        out: Tensor | None,
        lse: Tensor | None,
        new: RaggedKV | None,
        indices: Tensor | None,
    ) -> None:
        """Refuse a layer's call; `head_dim` is the query's, its rotary part included.

        Raises:
            UnsupportedBatch: a shape, dtype, layout or option the kernel does not serve.
        """
        heads, v_dim = layer.num_qo_heads, layer.v_head_dim
        query = (q.dtype, q.shape[0], q.shape[1], head_dim)
        wanted = (self.dtype, batch.num_tokens, heads, layer.head_dim)
        if query != wanted:
            raise self._refusal(batch.phase, f"q of (dtype, T, Hq, Dk) {wanted}", str(query))
        if out is not None and (out.dtype, *out.shape) != (self.dtype, batch.num_tokens, heads, v_dim):
            answer = (self.dtype, batch.num_tokens, heads, v_dim)
            raise self._refusal(batch.phase, f"out of (dtype, T, Hq, Dv) {answer}", str((out.dtype, *out.shape)))
        if lse is not None:
            if (lse.dtype, *lse.shape) != (torch.float32, batch.num_tokens, heads):
                shape = (torch.float32, batch.num_tokens, heads)
                raise self._refusal(batch.phase, f"lse of (dtype, T, Hq) {shape}", str((lse.dtype, *lse.shape)))
            if layer.sinks is not None:
                fix = "ask for the LSE without sinks and add the sink once, after the last merge"
                raise self._refusal(
                    batch.phase, "no sinks where the LSE is returned", "a layer with sinks and lse", fix
                )
        if indices is not None:
            raise self._refusal(batch.phase, "indices None", "a per-token selection of keys")
        if kv is None and new is None:
            raise self._refusal(batch.phase, "kv, new or both", "neither")
        if kv is not None:
            self._check_cache(kv, layer, batch)
        if new is not None and (*new.k.shape[1:], *new.v.shape[1:]) != (
            layer.num_kv_heads,
            layer.head_dim,
            layer.num_kv_heads,
            v_dim,
        ):
            needed = f"new.k [N, {layer.num_kv_heads}, {layer.head_dim}] and new.v [N, {layer.num_kv_heads}, {v_dim}]"
            raise self._refusal(batch.phase, needed, f"{list(new.k.shape)} and {list(new.v.shape)}")
        if layer.alibi is not None and not self.alibi:
            raise self._refusal(batch.phase, "alibi None", "alibi slopes")
        # a layer that looks both ways over a causal batch would silently lose half of its keys
        if layer.attn_type != "decoder" and any(rows.causal):
            raise self._refusal(batch.phase, f"causal False for {layer.attn_type} attention", "causal rows")

    def check_tree_size(self, batch: Batch, max_q_len: int) -> None:
        """Refuse a qlen tree smaller than the longest row of the step."""
        tree = batch.tree
        if tree is not None and tree.kind == "qlen" and min(tree.buffer.shape[1:]) < max_q_len:
            needed = f"a qlen tree of at least {max_q_len} tokens a row"
            raise self._refusal(batch.phase, needed, str(list(tree.buffer.shape)))

    def cached_lens(self, batch: Batch, rows: StepRows, has_cache: bool, new_starts: Sequence[int] | None) -> list[int]:
        """How many tokens of each row the cache holds; `new_starts` is the host form of `RaggedKV.kv_indptr`.

        Raises:
            UnsupportedBatch: a row with more new tokens than `kv_len`, or with fewer and no cache.
        """
        if new_starts is None:
            return rows.kv_lens
        if len(new_starts) <= batch.num_rows:
            raise self._refusal(batch.phase, f"new.kv_indptr [{batch.num_rows + 1}]", f"[{len(new_starts)}]")
        cached = []
        for row, kv_len in enumerate(rows.kv_lens):
            new_len = new_starts[row + 1] - new_starts[row]
            # a pad row may carry a query and nothing to read
            if kv_len > 0 and (new_len > kv_len or (not has_cache and new_len != kv_len)):
                needed = f"{'at most' if has_cache else 'exactly'} {kv_len} new tokens in row {row}"
                raise self._refusal(batch.phase, needed, str(new_len))
            cached.append(max(0, kv_len - new_len))
        return cached

    def _check_cache(self, kv: PagedKV, layer: LayerSpec, batch: Batch) -> None:
        found = (kv.layout, kv.k.dtype, *kv.k.shape[1:], kv.k.stride(-1))
        wanted = ("rows", self.kv_dtype, self.page_size, layer.num_kv_heads, layer.head_dim, 1)
        if found != wanted:
            raise self._refusal(batch.phase, f"a K cache of (layout, dtype, page, Hk, Dk, stride) {wanted}", str(found))
        if kv.v is not None:
            found = (kv.layout, kv.v.dtype, *kv.v.shape[1:], kv.v.stride(-1))
            wanted = ("rows", self.kv_dtype, self.page_size, layer.num_kv_heads, layer.v_head_dim, 1)
            if found != wanted:
                raise self._refusal(
                    batch.phase, f"a V cache of (layout, dtype, page, Hk, Dv, stride) {wanted}", str(found)
                )
        if kv.k_sf is not None or kv.v_sf is not None:
            raise self._refusal(batch.phase, "k_sf and v_sf None", "block scale factors")
        for name, scale in (("k_scale", kv.k_scale), ("v_scale", kv.v_scale)):
            if isinstance(scale, Tensor) and scale.numel() != 1:
                raise self._refusal(batch.phase, f"{name} as one number", f"{name} {list(scale.shape)}")

    def _check_tree(self, batch: Batch) -> None:
        tree = batch.tree
        assert tree is not None
        if tree.kind not in ("full", "qlen", "packed"):
            raise self._refusal(batch.phase, "a tree of kind full, qlen or packed", str(tree.kind))
        if tree.kind == "qlen" and (tree.buffer.dim() != 3 or tree.buffer.shape[0] < batch.num_rows):
            needed = f"a qlen tree [{batch.num_rows}, S, S]"
            raise self._refusal(batch.phase, needed, str(list(tree.buffer.shape)))
        if tree.kind != "qlen" and tree.indptr is None:
            raise self._refusal(batch.phase, f"indptr beside a {tree.kind} tree", "None")
        wanted = torch.uint8 if tree.kind == "packed" else torch.bool
        if tree.buffer.dtype != wanted:
            raise self._refusal(batch.phase, f"a {tree.kind} tree of {wanted}", str(tree.buffer.dtype))

    def _refusal(self, phase: str, needed: str, found: str, fix: str = "") -> UnsupportedBatch:
        who = f"{self.role} {phase} attention kernel '{self.kernel}' (plugin cpu)"
        return UnsupportedBatch(who, needed=needed, found=found, fix=fix)


def limits_of(request: BuildRequest, *, alibi: bool) -> Limits:
    """What a build request lets its object serve.

    Raises:
        BadInput: a dtype or a KV layout this plugin does not know.
    """
    kv_name = request.dtype if request.kv_dtype in ("same", "auto") else request.kv_dtype
    who = f"{request.role} attention kernel '{request.kernel}' (plugin cpu)"
    for field, name in (("dtype", request.dtype), ("KV dtype", kv_name)):
        if name not in DTYPES:
            raise BadInput(who, needed=f"a {field} of {', '.join(DTYPES)}", found=name)
    if request.layout != "rows":
        raise BadInput(who, needed="KV layout rows", found=request.layout)
    return Limits(
        kernel=request.kernel,
        role=request.role,
        phases=request.phases,
        page_size=request.page_size,
        dtype=DTYPES[request.dtype],
        kv_dtype=DTYPES[kv_name],
        alibi=alibi,
    )
