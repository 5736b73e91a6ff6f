"""Launching the portable sparse attention on this chip: the calls around `attend.py`.

In: queries, cache rows and slots. Out: the answer in the caller's `out` and `lse`. It reads shapes and host sizes; it
holds a workspace for shares, never a batch.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from backstamp.attention import LayerSpec, PagedKV
from backstamp.factories import BuildRequest
from backstamp.relaunch import alignments, launch
from backstamp.step_checks import refusal
from backstamp_dsa.attend import attend_slots, merge_shares
from backstamp_dsa.configs import HOPPER, HOPPER_REGISTERS, INTERPRETER, SparseConfig, attend_config, share_count
from backstamp_dsa.queries import rows_per_page
from backstamp_dsa.steps import Slots, SparseLaunch, SparseStep

__all__ = [
    "LOG2_E",
    "PortableRows",
    "PortableSparse",
    "chip_of",
    "hopper_kernel",
    "merge_two",
    "suits_hopper",
]

LOG2_E = 1.4426950408889634
#: Multiprocessors assumed in the interpreter, where there are none: few, so that small tests split too.
INTERPRETER_PROCESSORS = 4


def chip_of(request: BuildRequest) -> tuple[str, int]:
    """The launch table's name of the request's device, and its multiprocessors.

    Raises:
        UnsupportedBatch: a device Triton has no code for, outside its interpreter.
    """
    device = torch.device(request.device)
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        arch = facts.gcnArchName.split(":")[0] if torch.version.hip else f"{facts.major}.{facts.minor}"
        return arch, facts.multi_processor_count
    if isinstance(attend_slots, triton.runtime.JITFunction):
        fix = "Set TRITON_INTERPRET=1 before triton is imported to run on a CPU"
        raise refusal(request, "device", "a CUDA or ROCm GPU, or Triton's interpreter", str(device), fix=fix)
    return INTERPRETER, INTERPRETER_PROCESSORS


def hopper_kernel(arch: str) -> triton.runtime.JITFunction | None:
    """The kernel written for SM90, on that chip."""
    if arch != "9.0":
        return None
    # Gluon is part of every Triton this plugin asks for, and of no use on other chips
    from backstamp_dsa.hopper import attend_chosen

    return attend_chosen


def suits_hopper(q: Tensor, q_rope: Tensor | None, cache: Tensor, layer: LayerSpec) -> bool:
    """Whether the SM90 kernel takes a call: two-byte numbers, a latent of 512 and 64, rows it can copy by 16 bytes."""
    queries = (q,) if q_rope is None else (q, q_rope)
    return (
        (layer.head_dim, layer.v_head_dim) == (576, 512)
        and q.element_size() == 2
        and all(t.data_ptr() % 16 == 0 for t in (*queries, cache))
        and all(t.stride(0) % 16 == 0 and t.stride(1) % 16 == 0 for t in queries)
        and cache.stride(1) % 16 == 0
    )


class PortableSparse:
    """Sparse attention by our own kernels; calls of one object may follow one another on one stream."""

    def __init__(self, request: BuildRequest) -> None:
        self._arch, self._processors = chip_of(request)
        # a call is split only where its programs do not fill the chip once, so twice the chip holds every share
        most = 2 * self._processors * max(config.block_h for config in self._configs(request))
        latent = max((layer.v_head_dim for layer in request.layers), default=512)
        self._shares = torch.empty(most * latent, dtype=torch.float32, device=request.device)
        self._share_lse = torch.empty(most, dtype=torch.float32, device=request.device)
        self._hopper = hopper_kernel(self._arch)

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        cache: Tensor,
        chosen: Slots,
        layer: LayerSpec,
        step: SparseStep,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend `q [T, Hq, Dk]` over the rows of `cache [P, page_size, 1, Dk]` at `chosen`."""
        tokens, heads, latent = out.shape
        width = chosen.slots.shape[1]
        q_strides, out_strides, row_stride = q.stride(), out.stride(), cache.stride(1)
        rope_strides = (0, 0) if q_rope is None else q_rope.stride()[:2]
        lse_strides = (0, 0) if lse is None else lse.stride()
        like = (
            *("attend", heads, layer.head_dim, latent, width),
            *(q_strides, rope_strides, row_stride, out_strides, lse_strides),
            alignments(q, q_rope, cache, out, lse),
        )
        found = step.launches.get(like)
        if found is None:
            found = step.launches[like] = self._launch_of(q, q_rope, cache, layer, tokens, width)
        split = found.splits > 1
        shares, share_lse = (self._shares, self._share_lse) if split else (None, None)
        given = (
            *(q, q_rope, cache, *chosen, out, lse, shares, share_lse),
            # no sinks
            None,
            width,
            *q_strides[:2],
            *rope_strides,
            row_stride,
            *out_strides[:2],
            *lse_strides,
            layer.scale * LOG2_E,
        )
        if found.hopper:
            assert self._hopper is not None, "it suits where it is there"
            launch(
                self._hopper,
                step.codes,
                like,
                found.grid,
                given,
                lambda: {"HEADS": heads, "SPLIT": split},
                num_warps=HOPPER.num_warps,
                maxnreg=HOPPER_REGISTERS,
            )
        else:
            launch(
                attend_slots,
                step.codes,
                like,
                found.grid,
                given,
                lambda: {
                    "HEADS": heads,
                    "D0": latent,
                    "D1": layer.head_dim - latent,
                    "SPLIT": split,
                    "BLOCK_H": found.config.block_h,
                    "BLOCK_N": found.config.block_n,
                },
                num_warps=found.config.num_warps,
                num_stages=found.config.num_stages,
            )
        if split:
            count = tokens * heads * found.splits
            part = self._shares[: count * latent].view(tokens, heads, found.splits, latent)
            part_lse = self._share_lse[:count].view(tokens, heads, found.splits)
            _merge(part, part_lse, step, out, lse, None, base_2=True)

    def _launch_of(
        self, q: Tensor, q_rope: Tensor | None, cache: Tensor, layer: LayerSpec, tokens: int, width: int
    ) -> SparseLaunch:
        heads = layer.num_qo_heads
        hopper = self._hopper is not None and suits_hopper(q, q_rope, cache, layer)
        config = HOPPER if hopper else attend_config(self._arch, q.element_size(), heads)
        blocks = -(-heads // config.block_h)
        splits = share_count(tokens * blocks, self._processors, -(-width // config.block_n))
        grid = (tokens * blocks, splits, 1) if hopper else (tokens, blocks, splits)
        return SparseLaunch(hopper, config, grid, splits)

    def _configs(self, request: BuildRequest) -> list[SparseConfig]:
        """The launch shapes of a request's layers; those of any head count where it names none."""
        heads = [layer.num_qo_heads for layer in request.layers] or [16, 128]
        return [attend_config(self._arch, 2 if request.dtype != "fp32" else 4, count) for count in heads]


class PortableRows:
    """Our own kernels over a plain cache."""

    def __init__(self, request: BuildRequest) -> None:
        self._sparse = PortableSparse(request)
        self._request = request

    def slots_per_page(self, kv: PagedKV) -> int:
        """Rows between two pages."""
        return rows_per_page(self._request, "kv.k", kv.k)

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        kv: PagedKV,
        chosen: Slots,
        layer: LayerSpec,
        step: SparseStep,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """See `SparseKernel`."""
        self._sparse.attend(q, q_rope, kv.k, chosen, layer, step, out, lse)


def merge_two(
    part: Tensor, part_lse: Tensor, step: SparseStep, out: Tensor, lse: Tensor | None, sinks: Tensor | None
) -> None:
    """Merge `part [2, T, Hq, Dv]` by natural-log `part_lse [2, T, Hq]` into `out`; the sink joins once."""
    _merge(part.permute(1, 2, 0, 3), part_lse.permute(1, 2, 0), step, out, lse, sinks, base_2=False)


def _merge(
    part: Tensor,
    part_lse: Tensor,
    step: SparseStep,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    *,
    base_2: bool,
) -> None:
    tokens, heads, shares, latent = part.shape
    strides = (
        *(*part.stride()[:3], *part_lse.stride(), *out.stride()[:2]),
        *((0, 0) if lse is None else lse.stride()),
    )
    launch(
        merge_shares,
        step.codes,
        ("merge", base_2, shares, latent, strides, alignments(part, part_lse, out, lse, sinks)),
        (tokens, heads, 1),
        (part, part_lse, out, lse, sinks, shares, *strides),
        lambda: {"BASE_2": base_2, "D": latent},
        num_warps=4,
    )
