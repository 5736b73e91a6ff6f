"""Factories and the backend: validates a step in `plan`, launches the tile kernel in `forward`.

In: a `BuildRequest`, then the call contract's `Batch`, caches and layers. Out: `Built("triton", backend)`. `plan` does
no device work and reads no device value, so there is nothing for `replan` to do and every step can be captured. The
backend holds workspaces and per-layer constants, never the current batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest, Built
from backstamp.jit_notice import Announcer
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, check_build, refusal
from backstamp_triton.launches import Chip, launch_of
from backstamp_triton.layers import PreparedLayer, prepare_layer
from backstamp_triton.prefill_launch import attend_views, view_keys_and_values
from backstamp_triton.steps import Step, new_step, refresh
from backstamp_triton.tile import attend_tile
from backstamp_triton.tile_launch import attend_tiles, merge_shares

if TYPE_CHECKING:
    from backstamp_triton.latent_launch import LatentKernel

__all__ = ["TritonAttention", "build_attention", "build_mla"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
#: Rows (tokens times query heads) of shares the workspace holds for each multiprocessor: eight tiles of 16.
SHARE_ROWS_PER_PROCESSOR = 128
#: The chip of `latent_tile.py`: its copy engine and warpgroup products are those of SM90.
LATENT_ARCH = "9.0"
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
    """All five phases over a paged cache (MHA: or ragged keys and values); Hopper has kernels of its own, for
    prefill and for a latent cache.

    Steps may alternate, on one stream: split shares pass through one workspace.
    """

    def __init__(self, request: BuildRequest, *, v_in_k: bool) -> None:
        check_build(request)
        if request.page_size < 1:
            raise refusal(request, "page_size", "at least 1", str(request.page_size))
        self._request = request
        self._check_call = CallChecks(request)
        self._compiles = Announcer("triton")
        device = torch.device(request.device)
        arch, processors = self._find_chip(device)
        rows = processors * SHARE_ROWS_PER_PROCESSOR
        numbers = rows * max((spec.v_head_dim for spec in request.layers), default=256)
        itemsize = DTYPES[request.dtype].itemsize
        self._chip = Chip(arch, processors, request.dtype, itemsize, v_in_k, rows, numbers)
        self._layers = {spec.layer_id: self._prepare(spec) for spec in request.layers}
        self._shares = torch.empty(numbers, dtype=torch.float32, device=device)
        self._share_lse = torch.empty(rows, dtype=torch.float32, device=device)
        self._latent = self._latent_kernel()

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
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        known = self._layers.get(layer.layer_id)
        if known is None or known.spec is not layer:
            known = self._layers[layer.layer_id] = self._prepare(layer)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return out
        latent = self._latent
        if latent is not None and kv is not None:
            rows = latent.rows_of(q, q_rope, kv.k, known, state)
            if rows is not None:
                latent.attend(q, q_rope, kv.k, rows, known, state, out, lse)
                return out
        form: str = state.form
        if kv is not None:
            k, v = kv.k, kv.k if kv.v is None else kv.v
            page_size, page_ids, page_rows = self._request.page_size, state.page_ids, state.page_rows
        else:
            assert new is not None, "check_call refuses a call without keys"
            k, v = new.k, new.v
            form, page_size, page_ids, page_rows = "ragged", 0, None, new.kv_indptr
        index = (form, page_ids, page_rows, page_size)
        views = view_keys_and_values(k, v, known, state, page_size)
        launch = launch_of("tile" if views is None else "prefill", self._chip, known, state)
        shares = (self._shares, self._share_lse) if launch.splits > 1 else None
        with_lse = "" if lse is None else "lse"
        with self._compiles.first(launch.what, form, known.features, "" if q_rope is None else "q_rope", with_lse):
            if views is None:
                attend_tiles(q, q_rope, k, v, out, lse, shares, index, known, state, launch)
            else:
                attend_views(q, views, out, lse, shares, index, known, state, launch, self._chip.processors)
        if shares is not None:
            sinks = "" if layer.sinks is None else "sinks"
            with self._compiles.first("merge of", launch.what, launch.merged_at_once, sinks, with_lse):
                merge_shares(shares, out, lse, known, state, launch)
        return out

    def _prepare(self, spec: LayerSpec) -> PreparedLayer:
        return prepare_layer(self._request, self._chip.arch, self._chip.itemsize, spec, self._chip.v_in_k)

    def _latent_kernel(self) -> LatentKernel | None:
        """The faster kernel for a latent cache, on the chip it is written for."""
        if not self._chip.v_in_k or self._chip.arch != LATENT_ARCH or self._chip.itemsize != 2:
            return None
        # Gluon is part of every Triton this plugin asks for, and of no use on other chips
        from backstamp_triton.latent_launch import LatentKernel

        return LatentKernel(self._chip, self._shares, self._share_lse, self._compiles)

    def _find_chip(self, device: torch.device) -> tuple[str, int]:
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
