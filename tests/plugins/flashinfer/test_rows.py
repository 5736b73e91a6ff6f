"""The host half of a step: what `plan` counts of each row from its mirrors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.testing.batches import make_batch
from backstamp.testing.requests import request_for
from backstamp_flashinfer.plugin import MHA
from backstamp_flashinfer.rows import read_rows


def test_a_pad_row_of_negative_length_has_no_page():
    """Engines pad with any length; a page list that went backwards would be read out of bounds."""
    request = request_for(MHA, page_size=16, dtype="bf16")
    batch = replace(
        make_batch([1, 1, 1], [20, 16, 5]).batch,
        qo_indptr_host=torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        kv_lens_host=torch.tensor([20, 16, -20], dtype=torch.int32),
    )
    rows = read_rows(request, batch, paged=False)
    assert rows.page_indptr.tolist() == [0, 2, 3, 3]
    assert rows.last_page_len.tolist() == [4, 16, 0]


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [2, 1, 3]])
def test_a_mirror_is_read_once(q_lens, paged):
    """Layers planned late read the rows after the engine has written the next step into its buffers."""
    request = request_for(MHA, page_size=16, dtype="bf16")
    batch = make_batch(q_lens, [20, 16, 5]).batch
    rows = read_rows(request, batch, paged=paged)
    before = [tensor.clone() for tensor in (rows.qo_indptr, rows.kv_lens)]
    batch.qo_indptr_host.fill_(7)
    batch.kv_lens_host.fill_(7)
    assert all(map(torch.equal, (rows.qo_indptr, rows.kv_lens), before))
