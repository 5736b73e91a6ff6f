"""FlashAttention as its libraries document it, in float64, and as they fail: what the fakes of the builds compute.

In: a library's own arguments. Out: its own answers. Where a real kernel leaves something undefined this one leaves NaN:
tokens of no row, and whole pages loaded for a tile of keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from backstamp.declarations import Offer
from backstamp.factories import BuildRequest
from backstamp_fa3 import backend, plugin
from tests.libraries.fake import FakeLibrary
from tests.plugins.fa3.operators import FOLDER, fake_operator

ROWS: dict[str, Offer] = {
    "flash-attn-3": plugin.FLASH_ATTN_3,
    "tokenspeed-fa3": plugin.TOKENSPEED_FA3,
    "fa3-fwd": plugin.FA3_FWD,
    "sglang-kernel": plugin.SGLANG_KERNEL,
    "sgl-kernel": plugin.SGL_KERNEL,
    "flash-attn-3-mla": plugin.FLASH_ATTN_3_MLA,
    "sglang-kernel-mla": plugin.SGLANG_KERNEL_MLA,
    "sgl-kernel-mla": plugin.SGL_KERNEL_MLA,
    "mate": plugin.MUSA,
    "tokenspeed-fa4": plugin.FA4_HOPPER,
    "tokenspeed-fa4-blackwell": plugin.FA4_BLACKWELL,
    "flash-attn-4": plugin.FLASH_ATTN_4_HOPPER,
    "flash-attn-4-blackwell": plugin.FLASH_ATTN_4_BLACKWELL,
}
MODULES = {
    "flash-attn-3": "flash_attn_interface",
    "tokenspeed-fa3": "flash_attn_interface",
    "fa3-fwd": "fa3_fwd_interface",
    "sglang-kernel": "sgl_kernel.flash_attn",
    "sgl-kernel": "sgl_kernel.flash_attn",
}
FA4 = "flash_attn.cute.interface:flash_attn_varlen_func"
MATE = "flash_attn_interface:flash_attn_with_kvcache"
SCHEDULE = "flash_attn_interface:get_scheduler_metadata"


def library_of(row: str) -> str:
    """The distribution a row of `ROWS` is over."""
    return row.removesuffix("-mla").removesuffix("-blackwell")


def factory_of(offer: Offer) -> Any:
    """The callable a row names."""
    return getattr(backend, offer.factory.partition(":")[2])


@contextmanager
def built(row: str, request: BuildRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[Any]]]:
    """A row's backend over a fake of its library, and the calls the library gets, as arguments by name."""
    name = library_of(row)
    with ExitStack() as stack:
        if name in MODULES:
            calls = stack.enter_context(fake_operator(name, MODULES[name], monkeypatch, fa3_forward))
        else:
            library = FakeLibrary(name, monkeypatch)
            if name == "mate":
                library.on(SCHEDULE, lambda **arguments: ("schedule", arguments["batch_size"]))
                library.on(MATE, mate_forward)
            else:
                library.on(FA4, fa4_forward)
            calls = library.calls
        made = factory_of(request.offer)(request)
        assert made.kernel == request.offer.kernel
        yield made.backend, calls


def fa3_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, **rest: Any) -> tuple[Any, ...]:
    """`fwd` of every FA3 build: writes `out`, answers the LSE as `[H, T]`."""
    assert rest["seqused_q"] is None
    assert rest["k_new"] is None
    for integers in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "leftpad_k"):
        tensor = rest[integers]
        assert tensor is None or (tensor.dtype is torch.int32 and tensor.stride(-1) == 1), integers
    left, right = rest["window_size_left"], rest["window_size_right"]
    table = rest["page_table"]
    # a page of a multiple of a tile's keys is loaded whole, unless there is left padding
    whole = table is not None and k.shape[1] % 64 == 0 and rest["leftpad_k"] is None
    answer, lse = attend(
        q, k, v, rest["cu_seqlens_q"], rest["seqused_k"], rest["cu_seqlens_k"], table, rest["q_v"],
        scale=rest["softmax_scale"], causal=rest["is_causal"], left=left, right=right, softcap=rest["softcap"],
        sinks=rest.get("sinks"), whole=whole, max_q_len=rest["max_seqlen_q"],
    )  # fmt: skip
    out.copy_(answer)
    return out, lse, q.new_empty(0), q.new_empty(0)


def fa4_forward(q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> tuple[Any, Any]:
    """`flash_attn_varlen_func` of FA4: None is no bound of a window, and sinks keep their dtype."""
    left, right = (-1 if side is None else side for side in rest["window_size"])
    assert rest["window_size"] != (-1, -1)
    sinks = rest["learnable_sink"]
    table = rest["page_table"]
    assert (rest["cu_seqlens_k"] is None) is (rest["seqused_k"] is not None)
    answer, lse = attend(
        q, k, v, rest["cu_seqlens_q"], rest["seqused_k"], rest["cu_seqlens_k"], table, None,
        scale=rest["softmax_scale"], causal=rest["causal"], left=left, right=right, softcap=rest["softcap"],
        sinks=sinks, whole=table is not None and k.shape[1] == 128, max_q_len=rest["max_seqlen_q"], keyless=True,
        sink_dtypes=(torch.float16, torch.bfloat16, torch.float32),
    )  # fmt: skip
    return answer.to(q.dtype), lse if rest["return_lse"] else None


def mate_forward(q: Tensor, k_cache: Tensor, v_cache: Tensor, **rest: Any) -> Any:
    """`flash_attn_with_kvcache` as its caller shows it; it must be handed the step's schedule."""
    assert rest["scheduler_metadata"] == ("schedule", rest["cache_seqlens"].shape[0])
    assert q.is_contiguous()
    left, right = rest["window_size"]
    answer, lse = attend(
        q, k_cache, v_cache, rest["cu_seqlens_q"], rest["cache_seqlens"], None, rest["page_table"], None,
        scale=rest["softmax_scale"], causal=rest["causal"], left=left, right=right, softcap=rest["softcap"],
        sinks=rest["sinks"], whole=False, max_q_len=rest["max_seqlen_q"], keyless=True,
    )  # fmt: skip
    return (answer.to(q.dtype), lse) if rest["return_softmax_lse"] else answer.to(q.dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, used_k: Tensor | None, cu_k: Tensor | None, table: Tensor | None,
    q_v: Tensor | None, *, scale: float, causal: bool, left: int, right: int, softcap: float, sinks: Tensor | None,
    whole: bool, max_q_len: int, keyless: bool = False,
    sink_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs `[T, H, Dv]` and LSE `[H, T]`; bottom-right aligned, as every FlashAttention is.

    `keyless` leaves NaN and 0 for tokens of a row without keys.
    """
    assert sinks is None or (sinks.dtype in sink_dtypes and sinks.is_contiguous())
    out = torch.full((q.shape[0], q.shape[1], v.shape[-1]), float("nan"), dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), float("nan"))
    share = q.shape[1] // k.shape[-2]
    for row in range(cu_q.shape[0] - 1):
        start, stop = int(cu_q[row]), int(cu_q[row + 1])
        assert stop - start <= max_q_len
        keys, values, spare = _row(row, k, v, used_k, cu_k, table, whole)
        length = keys.shape[0] - spare
        keys, values = keys.repeat_interleave(share, 1).double(), values.repeat_interleave(share, 1).double()
        logits = torch.einsum("qhd,khd->hqk", q[start:stop].double(), keys)
        if q_v is not None:
            logits = logits + torch.einsum("qhd,khd->hqk", q_v[start:stop].double(), values)
        logits = logits * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        places = torch.arange(stop - start)[:, None] + length - (stop - start)
        others = torch.arange(keys.shape[0])[None, :]
        seen = others < length
        if causal:
            seen = seen & (others <= places)
        if left >= 0:
            seen = seen & (others >= places - left)
        if right >= 0:
            seen = seen & (others <= places + right)
        logits = logits.masked_fill(~seen, float("-inf"))
        total = torch.logsumexp(logits, -1)
        lse[:, start:stop] = total.float()
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double()[:, None])
        weights = torch.exp(logits - total[..., None]).nan_to_num(0.0)
        # 0 times a NaN that was loaded is NaN
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values)
        if keyless and length == 0:
            out[start:stop], lse[:, start:stop] = float("nan"), 0.0
    return out, lse


def _row(
    row: int, k: Tensor, v: Tensor, used_k: Tensor | None, cu_k: Tensor | None, table: Tensor | None, whole: bool
) -> tuple[Tensor, Tensor, int]:
    """One row's keys and values, and how many of them were loaded though they are not its own."""
    if cu_k is not None:
        start, stop = int(cu_k[row]), int(cu_k[row + 1])
        return k[start:stop], v[start:stop], 0
    assert used_k is not None
    assert table is not None
    length, size = int(used_k[row]), k.shape[1]
    pages = table[row, : -(-length // size)].long()
    assert int(pages.min()) >= 0 if len(pages) else True
    keys, values = k[pages].flatten(0, 1), v[pages].flatten(0, 1)
    return (keys, values, keys.shape[0] - length) if whole else (keys[:length], values[:length], 0)


def recorded(distribution: str) -> dict[str, Any]:
    """A library's record."""
    answer: dict[str, Any] = json.loads((FOLDER / f"{distribution}.json").read_text("utf-8"))
    return answer
