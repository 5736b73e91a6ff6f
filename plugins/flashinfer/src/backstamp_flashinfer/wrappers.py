"""The library's wrappers: made once, planned for a step, run for a layer, and used again.

In: a `Route` and the host half of a step. Out: a `Planned`, which runs one layer into the caller's output. A wrapper
stages its schedule in pinned memory of its own, so it is planned again only after its last copy has left the host.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from flashinfer.attention import BatchAttentionWithAttentionSinkWrapper
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from torch import Tensor

from backstamp.jit_notice import Announcer
from backstamp_flashinfer.routes import LayerKind, Route, window_of
from backstamp_flashinfer.rows import HostRows
from backstamp_flashinfer.trees import MaskBuffers, make_mask_buffers

__all__ = ["WORKSPACE_BYTES", "Fence", "Planned", "WrapperPool"]

#: The library's own recommendation. Source: flashinfer 0.7.4 prefill.py, decode.py (float_workspace_buffer)
WORKSPACE_BYTES = 128 << 20
#: The largest query tile of FA2, in packed (token, head) rows. Source: utils.cuh:FA2DetermineCtaTileQ
QUERY_TILE = 128
#: Idle wrappers kept; each holds 8 MiB of device and 8 MiB of pinned memory. Source: prefill.py (__init__)
IDLE_WRAPPERS = 16


class Fence:
    """A point of the stream: work on the host waits here until the device has passed it."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        """Set the point after everything queued so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return when the device has passed the point."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(slots=True, kw_only=True, eq=False)
class Planned:
    """One wrapper and what it is planned for.

    `mask` are the buffers of a custom mask. `ran`: a layer has run it since it was made for this step. `mask_layer`:
    the layer that wrote the mask first since the plan; it writes it anew whenever it comes again.
    """

    route: Route
    kind: LayerKind
    wrapper: object
    fence: Fence
    mask: MaskBuffers | None = None
    ran: bool = False
    mask_layer: int | None = None


class WrapperPool:
    """Idle wrappers. One workspace for all: what it holds lives for one launch, and a stream runs in order."""

    def __init__(self, device: torch.device, dtype: torch.dtype, page_size: int) -> None:
        self._device, self._dtype, self._page_size = device, dtype, page_size
        self._compiles = Announcer("flashinfer")
        # zeros, as the library asks of a first use
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._idle: deque[Planned] = deque()
        self._returned: deque[Planned] = deque()

    def reserve(self, kind: LayerKind, rows: int, tokens: int) -> None:
        """Make room for the shares of a step with fixed sizes, which are reserved for its worst split."""
        group = kind.num_qo_heads // kind.num_kv_heads
        shares = tokens + rows * -(-QUERY_TILE // group)
        # Source: scheduler.cuh:PrefillPlanImpl, batch_prefill_tmp_v and batch_prefill_tmp_s, f32
        size = kind.num_qo_heads * shares * 4 * (kind.v_head_dim + 1) + 64
        if size > self._workspace.numel():
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._device)

    def take(self, route: Route, kind: LayerKind) -> Planned:
        """A wrapper for a route: the one that has been idle longest, or a new one."""
        self._settle()
        for idle in self._idle:
            if idle.route == route:
                self._idle.remove(idle)
                return Planned(route=route, kind=kind, wrapper=idle.wrapper, fence=idle.fence, mask=idle.mask)
        mask = None
        if route.entry == "tree":
            mask = make_mask_buffers(route.rows, route.q_len, route.kv_len, self._device)
        if route.fixed:
            self.reserve(kind, route.rows, route.tokens)
        # the module with sinks is compiled when its wrapper is made
        with self._compiles.first(*self._what(route, kind)):
            wrapper = self._make(route, kind, mask)
        return Planned(route=route, kind=kind, wrapper=wrapper, fence=Fence(self._device), mask=mask)

    def give(self, planned: Planned) -> None:
        """Take a wrapper back. Nothing more: the garbage collector may call this, at any time and in any thread."""
        self._returned.append(planned)

    def trim(self) -> None:
        """Let the oldest go of more than a few idle wrappers; waits until the device has passed their last copies."""
        self._settle()
        while len(self._idle) > IDLE_WRAPPERS:
            # its pinned memory may be reused once it is gone
            self._idle.popleft().fence.wait()

    def plan(self, planned: Planned, rows: HostRows, pages: Tensor | None, *, causal: bool) -> None:
        """Plan one wrapper for a step: host work and copies to the device.

        Waits only for the copies of the wrapper's last plan, where the device has not passed them.
        `pages [num_pages]` i32 on the device; None for keys that lie in no cache.
        """
        route, kind, wrapper = planned.route, planned.kind, planned.wrapper
        planned.fence.wait()
        common: dict[str, object] = {
            "sm_scale": kind.scale,
            "window_left": window_of(kind, route),
            "logits_soft_cap": kind.softcap or None,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        heads = (kind.num_qo_heads, kind.num_kv_heads, kind.head_dim)
        paged = (rows.page_indptr, pages, rows.last_page_len, *heads, self._page_size)
        if route.entry != "decode":
            # split keys end one query tile to the right of a window: a step that looks further is not split.
            # Source: scheduler.cuh:PrefillSplitQOKVIndptr (effective_kv_len_arr)
            looks_right = route.entry == "tree" or not causal
            common |= {
                "head_dim_vo": kind.v_head_dim,
                "causal": not looks_right,
                "disable_split_kv": kind.window_left >= 0 and looks_right,
                "uniform_q_len": rows.q_len if route.fixed else None,
            }
        with self._compiles.first(*self._what(route, kind)):
            if route.entry == "decode":
                wrapper.plan(*paged, **common)
            elif route.entry == "ragged":
                wrapper.plan(rows.qo_indptr, _offsets(rows.kv_lens), *heads, **common)
            else:
                wrapper.plan(rows.qo_indptr, *paged, **common)
        if planned.mask is not None:
            planned.mask.kv_lens.copy_(rows.kv_lens, non_blocking=True)
            planned.mask_layer = None
        planned.fence.mark()

    def _settle(self) -> None:
        """Move what came back to the idle ones, which nobody else touches."""
        while self._returned:
            self._idle.append(self._returned.popleft())

    def _make(self, route: Route, kind: LayerKind, mask: MaskBuffers | None) -> object:
        space = self._workspace
        if route.entry == "ragged":
            return BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend=route.backend)
        indptr, pages, last = (
            self._ints(route, size) for size in (route.rows + 1, max(1, route.pages), max(1, route.rows))
        )
        if route.entry == "decode":
            return BatchDecodeWithPagedKVCacheWrapper(
                space,
                "NHD",
                use_cuda_graph=route.fixed,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=pages,
                paged_kv_last_page_len_buffer=last,
                backend=route.backend,
            )
        buffers: dict[str, object] = {
            "use_cuda_graph": route.fixed,
            "qo_indptr_buf": self._ints(route, route.rows + 1) if mask is None else mask.qo_indptr,
            "paged_kv_indptr_buf": indptr,
            "paged_kv_indices_buf": pages,
            "paged_kv_last_page_len_buf": last,
            "backend": route.backend,
        }
        if route.entry == "sinks":
            return BatchAttentionWithAttentionSinkWrapper(
                space,
                "NHD",
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                head_dim_qk=kind.head_dim,
                head_dim_vo=kind.v_head_dim,
                window_left=kind.window_left,
                **buffers,
            )
        if mask is not None:
            # a wrapper that owns a mask buffer reads it in every run; `plan` is given no mask and leaves it alone
            buffers |= {"custom_mask_buf": mask.bytes, "mask_indptr_buf": mask.indptr}
        most = route.tokens if route.fixed else None
        return BatchPrefillWithPagedKVCacheWrapper(space, "NHD", max_total_num_rows=most, **buffers)

    def _ints(self, route: Route, size: int) -> Tensor | None:
        return torch.zeros(size, dtype=torch.int32, device=self._device) if route.fixed else None

    def _what(self, route: Route, kind: LayerKind) -> tuple[str, ...]:
        """The module that is compiled: entries of one backend share it, but for sinks."""
        dtype, dim = str(self._dtype).removeprefix("torch."), f"head_dim {kind.head_dim}"
        window, softcap = "window" if kind.window_left >= 0 else "", "softcap" if kind.softcap > 0 else ""
        return "attention", route.backend, dtype, dim, window, softcap, "sinks" if kind.sinks else ""


def _offsets(lens: Tensor) -> Tensor:
    offsets = torch.zeros(len(lens) + 1, dtype=torch.int32)
    offsets[1:] = torch.cumsum(lens, 0)
    return offsets
