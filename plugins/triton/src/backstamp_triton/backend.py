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
from backstamp.jit_notice import Announcer
from backstamp.step_checks import check_batch, check_build, check_call, refusal
from backstamp_triton.combine import combine_splits
from backstamp_triton.configs import resident_tiles, split_count, tile_config
from backstamp_triton.layers import PreparedLayer, prepare_layer
from backstamp_triton.steps import Launch, Step, new_step, refresh
from backstamp_triton.tile import attend_tile

__all__ = ["TritonAttention", "build_attention", "build_mla"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
#: Rows (tokens times query heads) of shares the workspace holds for each multiprocessor: eight tiles of 16.
SHARE_ROWS_PER_PROCESSOR = 128
#: Multiprocessors assumed in the interpreter, where there are none.
INTERPRETER_PROCESSORS = 8


def build_attention(request: BuildRequest) -> Built:
    """Build the MHA/GQA/MQA object for all asked phases.

    Raises:
        UnsupportedBatch: what the row does not declare.
    """
    return Built("triton", TritonAttention(request, v_in_k=False))


def build_mla(request: BuildRequest) -> Built:
    """Build the absorbed-MLA object: values are the first `v_head_dim` numbers of each cached key.

    Raises:
        UnsupportedBatch: what the row does not declare.
    """
    return Built("triton", TritonAttention(request, v_in_k=True))


class TritonAttention:
    """All five phases over a paged cache (MHA: or ragged keys and values) with one tile kernel.

    Steps may alternate, on one stream: split shares pass through one workspace.
    """

    def __init__(self, request: BuildRequest, *, v_in_k: bool) -> None:
        check_build(request)
        if request.page_size < 1:
            raise refusal(request, "page_size", "at least 1", str(request.page_size))
        self._request = request
        self._v_in_k = v_in_k
        self._compiles = Announcer("triton")
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

        Raises:
            UnsupportedBatch: what the row does not declare, half an index, a tree with gaps, or another launch than the
                recorded one.
        """
        form = check_batch(self._request, batch, capture=capture, row_causal=True, left_padding=True)
        step = new_step(self._request, batch, form)
        return step if state is None else refresh(self._request, state, step)

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
        """Attend one layer; see `backstamp.attention.AttentionBackend.forward`.

        Raises:
            UnsupportedBatch: what the row does not declare.
        """
        batch = state.batch
        check_call(self._request, q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        known = self._layers.get(layer.layer_id)
        if known is None or known.spec is not layer:
            known = self._layers[layer.layer_id] = self._prepare(layer)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return out
        index: str = state.form
        if kv is not None:
            k, v = kv.k, kv.k if kv.v is None else kv.v
            page_size, page_ids, page_rows = self._request.page_size, state.page_ids, state.page_rows
        else:
            assert new is not None, "check_call refuses a call without keys"
            k, v = new.k, new.v
            index, page_size, page_ids, page_rows = "ragged", 1, None, new.kv_indptr
        d0, d1, v0, v1 = known.dims
        launch = state.launches.get(known.shape)
        if launch is None:
            launch = state.launches[known.shape] = self._launch(known, state)
        config, splits = launch.config, launch.splits
        shares, share_lse = (self._shares, self._share_lse) if splits > 1 else (None, None)
        tree = batch.tree
        tree_bytes = None if tree is None else tree.buffer.view(torch.uint8)
        qlen_tree = state.tree == "qlen"
        lse_strides = (0, 0) if lse is None else lse.stride()
        with_lse = "" if lse is None else "lse"
        with self._compiles.first(launch.what, index, known.features, "" if q_rope is None else "q_rope", with_lse):
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
            block_s = min(16, triton.next_power_of_2(splits))
            with self._compiles.first(
                "merge of", launch.what, block_s, "" if layer.sinks is None else "sinks", with_lse
            ):
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
                    BLOCK_S=block_s,
                    num_warps=4,
                )
        return out

    def _launch(self, known: PreparedLayer, state: Step) -> Launch:
        """Blocks, splits and slots for one layer shape, from host sizes alone."""
        batch, one_token = state.batch, state.one_token
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
        shape = f"{self._request.dtype} {num_qo_heads}/{num_kv_heads} heads d{head_dim}x{v_head_dim}"
        tile = f"tiles of {config.block_m}x{config.block_n}"
        return Launch(config, splits, slots, f"{shape} {state.what}{' split' if splits > 1 else ''}, {tile}")

    def _prepare(self, spec: LayerSpec) -> PreparedLayer:
        return prepare_layer(self._request, self._arch, self._dtype.itemsize, spec, self._v_in_k)

    def _chip(self, device: torch.device) -> tuple[str, int]:
        """The launch table's name of a device, and its multiprocessors."""
        if device.type == "cuda":
            facts = torch.cuda.get_device_properties(device)
            arch = facts.gcnArchName.split(":")[0] if torch.version.hip else f"{facts.major}.{facts.minor}"
            return arch, facts.multi_processor_count
        if isinstance(attend_tile, triton.runtime.JITFunction):
            fix = "Set TRITON_INTERPRET=1 before triton is imported to run on a CPU"
            needed = "a CUDA or ROCm GPU, or Triton's interpreter"
            raise refusal(self._request, "device", needed, str(device), fix=fix)
        return "interpreter", INTERPRETER_PROCESSORS
