"""DeepSeek V4 attention through the Ascend operators, which walk page tables themselves.

In: a `BuildRequest`, then batches, queries and caches as `csa.py` has them. Out: attention in `out`. The calls are
bound from a caller, not from the library: SGLang 0.5.23, python/sglang/srt/hardware_backend/npu/attention/
ascend_dsv4_backend.py:54-55 (operators), :1972-2026 (metadata), :2105-2134 and :2177-2214 (attention). Not yet run on
hardware.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch_npu  # noqa: F401  registers the device
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.errors import NotInstalled
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, refusal
from backstamp_dsa.csa import compress_rate, sinks_of
from backstamp_dsa.queries import nothing_seen, store_answer
from backstamp_dsa.slots import INDEX_SPACE

__all__ = ["AscendStep", "AscendV4"]

#: Mask modes of the operators: a causal window over plain entries, causal over compressed ones.
_WINDOW_MASK, _CAUSAL_MASK = 4, 3
_OPERATORS = ("npu_sparse_attn_sharedkv", "npu_sparse_attn_sharedkv_metadata")


@dataclass(slots=True)
class AscendStep:
    """A planned step, and the operators' own metadata by what a layer is made of.

    Attributes:
        batch: the batch it was planned with.
        ends: `[T]` i32, how many keys of its row a token may look at; 0 for padding tokens.
        seen: `[T]` bool, tokens of a row that has keys. What the operators leave in the others is not known.
        metadata: by heads, window, rate and choices of a layer.
    """

    batch: Batch
    ends: Tensor
    seen: Tensor
    metadata: dict[tuple[int, ...], object] = field(default_factory=dict)


class AscendV4:
    """The attention object of kernel `dsv4` on an Ascend NPU; the operator chooses a window's entries itself."""

    def __init__(self, request: BuildRequest) -> None:
        _load_operators(request)
        self.index_space = INDEX_SPACE
        self._request = request
        self._check_call = CallChecks(request)
        self._zero = torch.zeros((), dtype=torch.bfloat16, device=request.device)

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing: the row declares no graph."""

    def plan(self, batch: Batch, *, state: AscendStep | None = None, capture: bool = False) -> AscendStep:
        """Check the batch. Raises an `UnsupportedBatch` for what the row does not declare."""
        check_batch(self._request, batch, capture=capture)
        stops = batch.qo_indptr[1 : batch.num_rows + 1]
        at = torch.arange(batch.num_tokens, dtype=stops.dtype, device=stops.device)
        # the row of a token: how many rows end at or before it; past the last row lie padding tokens
        row = torch.searchsorted(stops, at, right=True)
        none = batch.kv_lens.new_zeros(1)
        lens = torch.cat([batch.kv_lens[: batch.num_rows], none])[row]
        ends = lens - torch.cat([stops, none])[row] + at + 1
        return AscendStep(batch, torch.where(lens > 0, ends, 0), lens > 0)

    def replan(self, state: AscendStep) -> None:
        """Nothing: the row declares no graph."""

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: AscendStep,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer over its window and its compressed entries."""
        batch = state.batch
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        if kv is None or layer.window_left < 0 or q_rope is not None:
            found = f"kv {kv is not None}, window_left {layer.window_left}, q_rope {q_rope is not None}"
            raise refusal(self._request, "layer", "a cache, a window, and queries in one tensor", found)
        rate = compress_rate(self._request, kv, indices)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        topk = 0 if indices is None else indices.shape[1]
        # an engine's buffers may be longer than the step
        count, table = batch.num_rows, batch.index.page_table
        assert table is not None, "the row declares page tables alone"
        rows = {"cu_seqlens_q": batch.qo_indptr[: count + 1], "seqused_kv": batch.kv_lens[:count]}
        window = {"ori_mask_mode": _WINDOW_MASK, "ori_win_left": layer.window_left, "ori_win_right": 0}
        layout = {"layout_q": "TND", "layout_kv": "PA_ND"}
        far: dict[str, object] = {}
        if kv.v is not None:
            chosen = None if indices is None else _bounded(indices, state.ends // rate)[:, None]
            far = {
                "cmp_mask_mode": _CAUSAL_MASK,
                "cmp_kv": kv.v,
                "cmp_block_table": table[:count],
                "cmp_sparse_indices": chosen,
            }
        found, _ = torch.ops.custom.npu_sparse_attn_sharedkv(
            q,
            **rows,
            **window,
            **layout,
            ori_kv=kv.k,
            ori_block_table=table[:count],
            sinks=sinks_of(layer),
            metadata=self._metadata(state, layer, rate, topk, kv.v is not None, rows | window | layout),
            softmax_scale=layer.scale,
            cmp_ratio=rate,
            **far,
        )
        store_answer(found, None, state.seen, self._zero, out, None)
        return out

    def _metadata(
        self, state: AscendStep, layer: LayerSpec, rate: int, topk: int, far: bool, common: dict[str, object]
    ) -> object:
        """The operators' metadata of one kind of layer, made once a step."""
        key = (layer.num_qo_heads, layer.window_left, rate, topk, int(far))
        if key not in state.metadata:
            chosen = {"cmp_topk": topk} if topk else {}
            state.metadata[key] = torch.ops.custom.npu_sparse_attn_sharedkv_metadata(
                **common,
                cmp_ratio=rate,
                cmp_mask_mode=_CAUSAL_MASK,
                batch_size=state.batch.num_rows,
                num_heads_q=layer.num_qo_heads,
                num_heads_kv=layer.num_kv_heads,
                head_dim=layer.head_dim,
                has_ori_kv=True,
                has_cmp_kv=far,
                **chosen,
            )
        return state.metadata[key]


def _load_operators(request: BuildRequest) -> None:
    """Import the package that registers the operators; one without them is as good as none."""
    try:
        # Source: SGLang 0.5.23, hardware_backend/npu/utils.py:211
        import custom_ops  # noqa: F401
    except ImportError as cause:
        raise _lacking(request, f"custom_ops does not import: {cause}") from cause
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.custom, name)]
    if missing:
        raise _lacking(request, f"custom_ops without {' and '.join(missing)}")


def _lacking(request: BuildRequest, found: str) -> NotInstalled:
    return NotInstalled(
        f"attention kernel {request.kernel!r} on {request.device}",
        needed=f"the operators torch.ops.custom.{' and '.join(_OPERATORS)}",
        found=found,
        fix="Install the custom_ops wheel and the CANN operators it calls, from the releases of sgl-kernel-npu",
    )


def _bounded(indices: Tensor, ends: Tensor) -> Tensor:
    """Choices `[T, topk]` i32 with -1 for each that is past a token's `ends [T]`: the operators check no bounds."""
    return torch.where((indices >= 0) & (indices < ends[:, None]), indices, -1)
