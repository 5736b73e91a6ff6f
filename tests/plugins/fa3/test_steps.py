"""What a step hands over is cut to its rows, however much longer the engine keeps its buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.testing.reference import reference_attention
from tests.plugins.fa3.kernels import ROWS, built
from tests.plugins.fa3.test_attention import Case, check, make, of_row, request


@pytest.mark.parametrize("host", [True, False], ids=["host-lens", "no-host-lens"])
@pytest.mark.parametrize("row", [row for row in ROWS if "paged" in ROWS[row].kv_forms and "mate" not in row])
def test_vectors_longer_than_the_rows_are_cut(row, host, monkeypatch):
    """Libraries count rows by the length of the offsets: what lies behind them is another step's."""
    case = of_row(row, Case(q_lens=(2, 3), kv_lens=(9, 30), host_lens=host))
    step = make(case)
    behind = torch.full((3,), 77, dtype=torch.int32)
    longer = {
        name: torch.cat([vector, behind])
        for name in ("qo_indptr", "kv_lens", "qo_indptr_host", "kv_lens_host")
        if (vector := getattr(step.batch, name)) is not None
    }
    out = torch.full((*step.q.shape[:2], case.layer.v_head_dim), float("nan"), dtype=torch.bfloat16)
    with built(row, request(row, case), monkeypatch) as (backend, _):
        backend.forward(step.q, step.kv, case.layer, backend.plan(replace(step.batch, **longer)), out=out)
    check(out, None, reference_attention(step.q, step.kv, case.layer, step.batch))
