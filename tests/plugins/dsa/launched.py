"""Calls of kernel `dsa` whose launches are kept and not run, as on an H100.

In: a monkeypatch. Out: stand-ins of every kernel, and a layer's call over them whose tensors a test changes one by one.
"""

from __future__ import annotations

import pytest
import torch

from backstamp.attention import PagedKV
from backstamp.testing.requests import request_for
from backstamp_dsa import portable, slots
from backstamp_dsa.attend import attend_slots, merge_shares
from backstamp_dsa.backend import build_dsa_triton
from backstamp_dsa.hopper import attend_chosen
from backstamp_dsa.plugin import DSA_TRITON
from tests.compiled_code import Kernel
from tests.plugins.dsa.cases import dsa_layer, latent_step

__all__ = ["KERNELS", "ROWS", "TOPK", "Call", "counts", "stand_in"]

#: Two tokens do not fill a chip: keys enough for each to be shared out.
ROWS = ((1, 600), (1, 40))
TOPK = 1024
#: Our own kernel for SM90 takes two-byte numbers; others are the tile kernel's.
KERNELS = {"hopper": torch.bfloat16, "tile": torch.float32}


def stand_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    """Put a stand-in where each kernel is."""
    made = {
        "hopper": Kernel(attend_chosen),
        "tile": Kernel(attend_slots),
        "merge": Kernel(merge_shares),
        "slots": Kernel(slots.slot_kernel),
    }
    monkeypatch.setattr(portable, "chip_of", lambda request: ("9.0", 132))
    monkeypatch.setattr(portable, "hopper_kernel", lambda arch: made["hopper"])
    monkeypatch.setattr(portable, "attend_slots", made["tile"])
    monkeypatch.setattr(portable, "merge_shares", made["merge"])
    monkeypatch.setattr(slots, "slot_kernel", made["slots"])
    return made


def counts(kernel: Kernel) -> tuple[int, int]:
    """Launches that were compiled for, and launches of code at hand."""
    return len(kernel.first), len(kernel.again)


class Call:
    """A layer's call; views of tensors with room, so that a layer may differ in one thing alone."""

    def __init__(self, name: str) -> None:
        dtype = KERNELS[name]
        self.step = latent_step(ROWS, dsa_layer(4), dtype=dtype, phase="decode")
        spelt = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        self.request = request_for(DSA_TRITON, (self.step.layer,), dtype=spelt, page_size=16)
        self.backend = build_dsa_triton(self.request).backend
        self.state = self.backend.plan(self.step.batch)
        self.layer, self.whole = self.step.layer, torch.zeros(2, 8, 576, dtype=dtype)
        self.outs, self.lses = torch.zeros(2, 8, 512, dtype=dtype), torch.zeros(2, 8)
        self.q, self.q_rope = self.whole[:, :4, :512], self.whole[:, :4, 512:]
        self.k = torch.zeros(self.step.kv.k.shape[0], 32, 1, 576, dtype=dtype)[:, :16]
        self.choices = torch.zeros(2, TOPK, dtype=torch.int32)
        self.indices, self.out, self.lse = self.choices, self.outs[:, :4], self.lses[:, :4]

    def run(self) -> None:
        """Attend with what the call now holds."""
        self.backend.forward(
            self.q,
            PagedKV(k=self.k, v=None),
            self.layer,
            self.state,
            out=self.out,
            lse=self.lse,
            q_rope=self.q_rope,
            indices=self.indices,
        )
