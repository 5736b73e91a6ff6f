"""A planned step given another batch's values: what may change under a recorded launch, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from backstamp.testing.requests import request_for
from backstamp.testing.sparse_reference import reference_sparse
from backstamp_dsa.backend import build_dsa_triton
from backstamp_dsa.plugin import DSA_TRITON
from tests.plugins.dsa.cases import DSA, check, chosen_keys, latent_step, nan_out

ROWS = ((3, 30), (2, 40))


def planned(rows=ROWS, phase="verify", **changes):
    """A step, its object, and the state of a graph over it."""
    step = latent_step(rows, dtype=torch.float16, phase=phase, **changes)
    backend = build_dsa_triton(request_for(DSA_TRITON, (DSA,), dtype="fp16", page_size=16)).backend
    return step, backend, backend.plan(step.batch, capture=True)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("num_rows", {"num_rows": 1}),
        ("num_tokens", {"num_tokens": 4}),
        ("max_q_len", {"max_q_len": 4}),
        ("max_kv_len", {"max_kv_len": 41}),
        ("phase", {"phase": "decode"}),
    ],
)
def test_a_batch_that_needs_another_launch_is_refused(field, change):
    """Sizes, bounds and the phase decide which kernel runs over how much."""
    step, backend, state = planned()
    with pytest.raises(UnsupportedBatch, match=f"{field}.*as planned before"):
        backend.plan(replace(step.batch, **change), state=state)


def test_shorter_rows_than_planned_are_taken():
    """The bounds are bounds."""
    step, backend, state = planned()
    assert backend.plan(replace(step.batch, max_q_len=2, max_kv_len=39), state=state) is state


def test_an_index_of_another_form_is_refused():
    """A recorded launch walks one form."""
    _, backend, state = planned()
    other = latent_step(ROWS, dtype=torch.float16, phase="verify", index_form="csr")
    with pytest.raises(UnsupportedBatch, match=r"index.*page_table, as planned before.*csr"):
        backend.plan(other.batch, state=state)


def test_an_index_larger_than_planned_is_refused():
    """There is no room at the recorded address."""
    step, backend, state = planned()
    wide = torch.zeros(2, step.batch.index.page_table.shape[1] + 1, dtype=torch.int32)
    with pytest.raises(UnsupportedBatch, match=r"index\.page_table.*at most \[2, 5\]"):
        backend.plan(replace(step.batch, index=replace(step.batch.index, page_table=wide)), state=state)


@pytest.mark.parametrize("index_form", ["page_table", "csr", "indirect"])
def test_buffers_longer_than_the_step_are_taken(index_form):
    """An engine may hand its whole buffers over: rows past the step's are not read."""
    step, backend, state = planned(index_form=index_form)
    index, longer = step.batch.index, {}
    for name in ("page_table", "kv_indptr", "row_ids"):
        tensor = getattr(index, name)
        if tensor is not None:
            longer[name] = torch.cat([tensor, torch.zeros_like(tensor)])
    lens = torch.cat([step.batch.kv_lens - 1, torch.zeros(3, dtype=torch.int32)])
    offsets = torch.cat([step.batch.qo_indptr, torch.full((3,), 5, dtype=torch.int32)])
    again = replace(step.batch, kv_lens=lens, qo_indptr=offsets, index=replace(index, **longer))
    assert backend.plan(again, state=state) is state
    assert state.batch.kv_lens.tolist() == [29, 39]


def test_another_view_of_the_same_memory_is_copied():
    """One address with other strides holds other values; views that overlap are read whole before they are written."""
    step, backend, _ = planned()
    memory = torch.arange(16, dtype=torch.int32)
    tables = [memory.as_strided((2, 5), (stride, 1)) for stride in (5, 8)]
    lens = torch.tensor([30, 17, 40], dtype=torch.int32)

    def batch_of(table, kv_lens):
        return replace(step.batch, kv_lens=kv_lens, index=replace(step.batch.index, page_table=table))

    state = backend.plan(batch_of(tables[0], lens[:2]), capture=True)
    backend.plan(batch_of(tables[1], lens[1:]), state=state)
    assert state.batch.index.page_table.tolist() == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12]]
    assert state.batch.kv_lens.tolist() == [17, 40]


def test_a_choice_between_forms_is_no_choice_of_what_is_renewed():
    """Of a batch that carries two forms of index, the one that is walked is renewed; the other may be gone."""
    step, _, _ = planned()
    csr = latent_step(ROWS, dtype=torch.float16, phase="verify", index_form="csr").batch.index
    backend = planned()[1]
    both = replace(step.batch.index, kv_indptr=csr.kv_indptr, kv_indices=csr.kv_indices)
    state = backend.plan(replace(step.batch, index=both), capture=True)
    form = state.form
    alone = step.batch.index if form == "page_table" else csr
    assert backend.plan(replace(step.batch, index=alone), state=state) is state


def test_padding_tokens_of_a_step_without_rows_are_zeros():
    """Nothing is launched, and nothing else would write them."""
    step, backend, state = planned((), pad_tokens=3)
    out, lse = nan_out(step), torch.zeros(3, 4)
    backend.forward(step.q, step.kv, DSA, state, out=out, lse=lse, indices=chosen_keys(step, 8))
    assert out.shape == (3, 4, 512)
    assert bool((out == 0).all())
    assert bool(torch.isneginf(lse).all())


def test_a_renewed_step_answers_with_its_new_values():
    """Ragged rows under one recorded launch."""
    first, backend, state = planned()
    lens = torch.tensor([12, 33], dtype=torch.int32)
    backend.plan(replace(first.batch, kv_lens=lens), state=state)
    step = replace(first, batch=replace(first.batch, kv_lens=lens))
    indices, out = chosen_keys(step, 20), nan_out(step)
    backend.forward(step.q, step.kv, DSA, state, out=out, indices=indices)
    check(step, out, reference_sparse(step.q, step.kv, DSA, step.batch, indices)[0])
