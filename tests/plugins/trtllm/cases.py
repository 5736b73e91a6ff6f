"""Steps for the trtllm bindings, the libraries' stand-ins under them, and the check against float64.

In: a `Case`, a few numbers. Out: the library calls it made, after the answer was held against the reference. Slots no
query may read hold NaN, page ids no row uses are -1, and outputs start as NaN.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch

from backstamp.attention import LayerSpec
from backstamp.declarations import Offer
from backstamp.testing.batches import MadeStep, make_batch, make_tree
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from tests.libraries.fake import FakeLibrary
from tests.plugins.trtllm import flashinfer_mha, flashinfer_mla, tokenspeed

__all__ = ["BOUND", "Case", "Libraries", "build", "check", "install", "make"]

#: Rounding of a bf16 output alone is 2e-3.
BOUND = 6e-3


@dataclass(frozen=True)
class Libraries:
    """Both stand-ins."""

    flashinfer: FakeLibrary
    tokenspeed: FakeLibrary


@dataclass(frozen=True)
class Case:
    """One step of (q_len, kv_len) rows, over a layer of (Hq, Hk) heads of `dim`."""

    rows: tuple[tuple[int, int], ...]
    phase: str = "decode"
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    page_size: int = 16
    window: int = -1
    softcap: float = 0.0
    sinks: str = ""
    tree: str | None = None
    cache: str = "nhd"
    dtype: str = "bf16"
    pad_tokens: int = 0
    mla: bool = False
    lse: bool = False
    strided_out: bool = False
    host_lens: bool = True
    q_len: int | None = None

    def __str__(self) -> str:
        changed = [
            f"{name}={value}"
            for name, value in ((field, getattr(self, field)) for field in self.__dataclass_fields__)
            if value != self.__dataclass_fields__[name].default and name != "rows"
        ]
        return " ".join(changed) or "plain"


def install(monkeypatch: pytest.MonkeyPatch) -> Libraries:
    """Both libraries as stand-ins, and the binding modules imported anew over them."""
    flashinfer, speed = FakeLibrary("flashinfer-python", monkeypatch), FakeLibrary("tokenspeed-mla", monkeypatch)
    for library, behaviours in (
        (flashinfer, flashinfer_mha.BEHAVIOURS | flashinfer_mla.BEHAVIOURS),
        (speed, tokenspeed.BEHAVIOURS),
    ):
        for path, behaviour in behaviours.items():
            library.on(path, behaviour)
    for name in [name for name in sys.modules if name.startswith("backstamp_trtllm.")]:
        monkeypatch.delitem(sys.modules, name)
    return Libraries(flashinfer, speed)


def make(case: Case, seed: int = 0) -> MadeStep:
    """The case's tensors."""
    q_lens, kv_lens = zip(*case.rows, strict=True) if case.rows else ((), ())
    hq, hk = (case.heads[0], 1) if case.mla else case.heads
    dims = (576, 512) if case.mla else (case.dim, case.dim)
    sinks = {"": None, "fp32": torch.float32, "bf16": torch.bfloat16}[case.sinks]
    layer = LayerSpec(
        layer_id=0,
        num_qo_heads=hq,
        num_kv_heads=hk,
        head_dim=dims[0],
        v_head_dim=dims[1],
        scale=0.11 if case.mla else 0.17,
        window_left=case.window,
        softcap=case.softcap,
        sinks=None if sinks is None else torch.linspace(-1.0, 2.0, hq).to(sinks),
    )
    step = make_batch(
        q_lens,
        kv_lens,
        layer=layer,
        phase=case.phase,  # type: ignore[arg-type]
        page_size=case.page_size,
        dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype],
        cache_form="latent" if case.mla else case.cache,  # type: ignore[arg-type]
        tree=None if case.tree is None else make_tree(q_lens, kv_lens, case.tree),  # type: ignore[arg-type]
        pad_tokens=case.pad_tokens,
        host_lens=case.host_lens,
        seed=seed,
    )
    if case.q_len is None:
        return step
    rows = step.batch.num_rows
    return replace(
        step, batch=replace(step.batch, decode_q_len=case.q_len, num_decode_rows=rows, num_decode_tokens=len(step.q))
    )


def build(offer: Offer, step: MadeStep, **changes: object) -> Any:
    """The object the declared factory answers for a row and a step's layer."""
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[step.q.dtype]
    page_size = step.batch.index.page_size
    request = request_for(offer, (step.layer,), **{"dtype": dtype, "page_size": page_size, **changes})
    module, name = offer.factory.split(":")
    built = getattr(import_module(module), name)(request)
    assert built.kernel == offer.kernel
    return built.backend


def check(offer: Offer, case: Case) -> None:
    """Plan and run one step, and hold output and LSE against float64."""
    step = make(case)
    backend = build(offer, step)
    state = backend.plan(step.batch)
    compare(backend, state, step, case)


def compare(backend: Any, state: Any, step: MadeStep, case: Case) -> None:
    """One `forward` over outputs that start as NaN."""
    shape = (step.q.shape[0], step.layer.num_qo_heads, step.layer.v_head_dim)
    out = torch.full(shape, float("nan"), dtype=step.q.dtype)
    lse = torch.full(shape[:2], float("nan")) if case.lse else None
    if case.strided_out:
        out = out.transpose(0, 1).contiguous().transpose(0, 1)
        lse = None if lse is None else lse.t().contiguous().t()
    answer = backend.forward(step.q, step.kv, step.layer, state, out=out, lse=lse)
    assert answer is out
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, step.batch)
    error = relative_error(out, truth)
    assert error <= BOUND, error
    if lse is not None:
        torch.testing.assert_close(lse.double(), true_lse, rtol=1e-3, atol=1e-3)
