"""Factories and the backend: validates a step in `plan`, launches the tile kernel in `forward`.

In: a `BuildRequest`, then the call contract's `Batch`, caches and layers. Out: `Built("triton", backend)`. `plan` does
no device work and reads no device value, so there is nothing for `replan` to do and every step can be captured. The
backend holds workspaces and per-layer constants, never the current batch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest, Built
from backstamp_triton.combine import combine_splits
from backstamp_triton.configs import resident_tiles, split_count, tile_config
from backstamp_triton.layers import PreparedLayer, prepare_layer
from backstamp_triton.steps import Launch, Step, check_batch, refresh, refuse
from backstamp_triton.tile import attend_tile

__all__ = ["TritonAttention", "build_attention", "build_mla"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
#: Rows (tokens times query heads) of shares the workspace holds for each multiprocessor: eight tiles of 16.
SHARE_ROWS_PER_PROCESSOR = 128
#: Multiprocessors assumed in the interpreter, where there are none.
INTERPRETER_PROCESSORS = 8


def build_attention(request: BuildRequest) -> Built:
    """Build the MHA/GQA/MQA object for all asked phases. Raises an `UnsupportedBatch` for a layer it cannot serve."""
    return Built("triton", TritonAttention(request, v_in_k=False))


def build_mla(request: BuildRequest) -> Built:
    """Build the absorbed-MLA object: values are the first `v_head_dim` numbers of each cached key."""
    return Built("triton", TritonAttention(request, v_in_k=True))


class TritonAttention:
    """All five phases over a paged cache (MHA: or ragged keys and values) with one tile kernel.

    Steps may alternate, on one stream: split shares pass through one workspace.
    """

    def __init__(self, request: BuildRequest, *, v_in_k: bool) -> None:
        self._who = f"triton attention ({request.role}, {request.family})"
        self._request = request
        self._v_in_k = v_in_k
        if request.dtype not in DTYPES:
            raise refuse(self._who, "dtype", "fp16, bf16 or fp32", request.dtype)
        if request.kv_dtype not in {"same", request.dtype}:
            raise refuse(self._who, "kv_dtype", f"the query's own, {request.dtype}", request.kv_dtype)
        if request.layout != "rows":
            raise refuse(self._who, "layout", "'rows'", repr(request.layout))
        if request.page_size < 1:
            raise refuse(self._who, "page_size", "at least 1", str(request.page_size))
        self._dtype = DTYPES[request.dtype]
        device = torch.device(request.device)
        self._arch, self._processors = self._chip(device)
        self._layers = {spec.layer_id: self._prepare(spec) for spec in request.layers}
        self._share_rows = self._processors * SHARE_ROWS_PER_PROCESSOR
        self._widest = max((spec.v_head_dim for spec in request.layers), default=256)
        self._shares = torch.empty(self._share_rows * self._widest, dtype=torch.float32, device=device)
        self._share_lse = torch.empty(self._share_rows, dtype=torch.float32, device=device)

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: steps refer to the batch's own tensors, the workspace has its final size."""

    def plan(self, batch: Batch, *, state: Step | None = None, capture: bool = False) -> Step:
        """Check the batch and note what a launch needs; with `state`, bring its tensors up to date in place.

        Raises an `UnsupportedBatch` naming the field, what it must be and what it is.
        """
        step = check_batch(self._who, self._request, batch)
        return step if state is None else refresh(self._who, state, step)

    def replan(self, state: Step) -> None:
        """Nothing to do on the device: kernels read the batch's tensors themselves."""

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: Step,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer; see `backstamp.attention.AttentionBackend.forward`."""
        known = self._layers.get(layer.layer_id)
        if known is None or known.spec is not layer:
            known = self._layers[layer.layer_id] = self._prepare(layer)
        if indices is not None:
            raise refuse(self._who, "indices", "None", "a selection of keys")
        if lse is not None and layer.sinks is not None:
            raise refuse(
                self._who, "lse", "a layer without sinks", "a layer with sinks", "Add the sink after the merge"
            )
        batch = state.batch
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return out
        if new is None and kv is not None:
            k, v = self._paged(kv, state)
            index, page_size, page_ids, page_rows = (
                state.index,
                self._request.page_size,
                state.page_ids,
                state.page_rows,
            )
        else:
            k, v = self._ragged(kv, new)
            index, page_size, page_ids, page_rows = "ragged", 1, None, new.kv_indptr
        if q.dtype is not self._dtype or k.dtype is not self._dtype or v.dtype is not self._dtype:
            raise refuse(self._who, "dtype", f"{self._dtype} as built", f"q {q.dtype}, k {k.dtype}, v {v.dtype}")
        d0, d1, v0, v1 = known.dims
        if q.shape[-1] != (layer.head_dim if q_rope is None else d0) or (q_rope is not None and not self._v_in_k):
            rope = "no q_rope" if q_rope is None else f"q_rope {list(q_rope.shape)}"
            raise refuse(self._who, "q", f"head dim {layer.head_dim}", f"{list(q.shape)} and {rope}")
        if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1 or out.stride(-1) != 1:
            raise refuse(self._who, "strides", "a last stride of 1 in q, k, v and out", "another")
        launch = state.launches.get(known.shape)
        if launch is None:
            launch = state.launches[known.shape] = self._launch(known, batch, state.one_token)
        config, splits = launch.config, launch.splits
        shares, share_lse = (self._shares, self._share_lse) if splits > 1 else (None, None)
        tree = batch.tree
        tree_bytes = None if tree is None else tree.buffer.view(torch.uint8)
        qlen_tree = state.tree == "qlen"
        lse_strides = (0, 0) if lse is None else lse.stride()
        attend_tile[(launch.slots, layer.num_kv_heads * known.head_blocks, splits)](
            q,
            q_rope,
            k,
            v,
            out,
            lse,
            shares,
            share_lse,
            layer.sinks,
            batch.qo_indptr,
            batch.kv_lens,
            batch.kv_starts,
            batch.causal if state.causal == "rows" else None,
            page_ids,
            page_rows,
            tree_bytes,
            None if tree is None else tree.indptr,
            batch.num_rows,
            batch.num_tokens,
            page_ids.stride(0) if page_ids is not None else 0,
            q.stride(0),
            q.stride(1),
            0 if q_rope is None else q_rope.stride(0),
            0 if q_rope is None else q_rope.stride(1),
            k.stride(0),
            k.stride(1),
            k.stride(-2),
            v.stride(0),
            v.stride(1),
            v.stride(-2),
            out.stride(0),
            out.stride(1),
            lse_strides[0],
            lse_strides[1],
            tree_bytes.stride(0) if qlen_tree else 0,
            tree_bytes.stride(1) if qlen_tree else 0,
            known.logit_scale,
            known.softcap_log2,
            known.window_left,
            GROUP=layer.num_qo_heads // layer.num_kv_heads,
            PACK=known.pack,
            D0=d0,
            D1=d1,
            V0=v0,
            V1=v1,
            V_IN_K=self._v_in_k,
            PAGE_SIZE=page_size,
            INDEX=index,
            CAUSAL=state.causal,
            TREE=state.tree,
            ONE_TOKEN=state.one_token,
            SPLIT=splits > 1,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if splits > 1:
            combine_splits[(batch.num_tokens, layer.num_qo_heads)](
                shares,
                share_lse,
                out,
                lse,
                layer.sinks,
                splits,
                out.stride(0),
                out.stride(1),
                lse_strides[0],
                lse_strides[1],
                V_DIM=layer.v_head_dim,
                BLOCK_V=triton.next_power_of_2(layer.v_head_dim),
                BLOCK_S=min(16, triton.next_power_of_2(splits)),
                num_warps=4,
            )
        return out

    def _paged(self, kv: PagedKV, state: Step) -> tuple[Tensor, Tensor]:
        if kv.layout != "rows":
            raise refuse(self._who, "kv.layout", "'rows'", repr(kv.layout))
        if kv.k_sf is not None or kv.v_sf is not None or kv.k_scale not in {None, 1.0} or kv.v_scale not in {None, 1.0}:
            raise refuse(self._who, "kv scales", "none, or 1.0", "scaled keys or values")
        if state.index == "ragged":
            raise refuse(self._who, "index", "page_table, kv_indptr with kv_indices, or table with row_ids", "none")
        if kv.k.shape[1] != self._request.page_size:
            raise refuse(self._who, "kv.k", f"pages of {self._request.page_size} tokens, as built", str(kv.k.shape[1]))
        if (kv.v is None) is not self._v_in_k:
            raise refuse(
                self._who, "kv.v", "None" if self._v_in_k else "a tensor", "None" if kv.v is None else "a tensor"
            )
        return kv.k, kv.k if kv.v is None else kv.v

    def _ragged(self, kv: PagedKV | None, new: RaggedKV | None) -> tuple[Tensor, Tensor]:
        if new is None:
            raise refuse(self._who, "kv", "a cache, or `new` keys and values", "neither")
        if kv is not None:
            raise refuse(self._who, "new", "keys and values in the cache, or all of them in `new`", "both")
        if self._v_in_k:
            raise refuse(self._who, "new", "a latent cache", "ragged keys and values")
        return new.k, new.v

    def _launch(self, known: PreparedLayer, batch: Batch, one_token: bool) -> Launch:
        """Blocks, splits and slots for one layer shape, from host sizes alone."""
        num_qo_heads, num_kv_heads, head_dim, v_head_dim = known.shape
        rows = known.pack * max(batch.max_q_len, 1)
        size = self._dtype.itemsize
        config = tile_config(self._arch, size, head_dim, v_head_dim, rows, self._v_in_k)
        tokens = config.block_m // known.pack
        if one_token:
            slots = row_tiles = max(batch.num_rows, batch.num_tokens)
        else:
            # each row may leave its last tile part empty, and the padding tokens form one more row
            row_tiles = -(-batch.num_tokens // tokens)
            slots = row_tiles + batch.num_rows + 1
        tiles = row_tiles * num_kv_heads * known.head_blocks
        places = self._processors * resident_tiles(self._arch, config, size, head_dim, v_head_dim, self._v_in_k)
        splits = 1
        if one_token or tiles < places:
            blocks = -(-batch.max_kv_len // config.block_n)
            most = self._share_rows * self._widest // (batch.num_tokens * num_qo_heads * v_head_dim)
            splits = split_count(
                tiles, blocks, places, min(most, self._share_rows // (batch.num_tokens * num_qo_heads))
            )
        return Launch(config, splits, slots)

    def _prepare(self, spec: LayerSpec) -> PreparedLayer:
        return prepare_layer(
            f"{self._who}, layer {spec.layer_id}", self._arch, self._dtype.itemsize, spec, self._v_in_k
        )

    def _chip(self, device: torch.device) -> tuple[str, int]:
        """The launch table's name of a device, and its multiprocessors."""
        if device.type == "cuda":
            facts = torch.cuda.get_device_properties(device)
            arch = facts.gcnArchName.split(":")[0] if torch.version.hip else f"{facts.major}.{facts.minor}"
            return arch, facts.multi_processor_count
        if isinstance(attend_tile, triton.runtime.JITFunction):
            raise refuse(
                self._who,
                "device",
                "a CUDA or ROCm GPU, or Triton's interpreter",
                str(device),
                "Set TRITON_INTERPRET=1 before triton is imported to run on a CPU",
            )
        return "interpreter", INTERPRETER_PROCESSORS
