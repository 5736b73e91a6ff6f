"""Steps of SGLang's as the contract has them: rows, lengths, slots and masks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backstamp_sglang.step import Chains, Slots, batch_of, draft_batch

TABLE = torch.arange(4 * 16, dtype=torch.int32).view(4, 16)


def forward(*, decode: bool = False) -> SimpleNamespace:
    """Three rows: 9 tokens known of which 1 is new, 4 of which 4, 7 of which 5; or one new token each."""
    lens = torch.tensor([9, 4, 7])
    return SimpleNamespace(
        batch_size=3,
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens_cpu=None if decode else [1, 4, 5],
        req_pool_indices=torch.tensor([2, 0, 3]),
        out_cache_loc=torch.arange(3 if decode else 10),
    )


def test_a_step_is_sglangs_own_tensors() -> None:
    """Pages of one token: SGLang's own table is the index, and its lengths count this step's tokens."""
    batch = batch_of(forward(), "prefill", Slots(TABLE, 1), frozenset({"indirect", "page_table"}))
    assert batch.qo_indptr.tolist() == [0, 1, 5, 10]
    assert (batch.num_tokens, batch.max_q_len, batch.max_kv_len) == (10, 5, 9)
    assert batch.index.table is TABLE
    assert batch.kv_lens.tolist() == [9, 4, 7]
    decode = batch_of(forward(decode=True), "decode", Slots(TABLE, 1), frozenset({"indirect"}))
    assert (decode.phase, decode.num_decode_rows, decode.decode_q_len) == ("decode", 3, 1)
    assert decode.qo_indptr.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("page_size", [1, 4], ids=["slots", "pages"])
@pytest.mark.parametrize("form", ["page_table", "csr", "indirect"])
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "window"])
def test_every_index_form_names_the_same_pages(form: str, windowed: bool, page_size: int) -> None:
    """SGLang stores token slots; a page's id is its first token's slot over the page size, in the layer's own slots."""
    to_window = torch.arange(64).flip(0).view(16, 4).flip(1).flatten() if windowed else None
    batch = batch_of(forward(), "prefill", Slots(TABLE, page_size, to_window), frozenset({form}))
    for row, (source, length) in enumerate(zip([2, 0, 3], [9, 4, 7], strict=True)):
        firsts = TABLE[source, :length:page_size].long()
        wanted = (firsts if to_window is None else to_window[firsts]) // page_size
        count, index = len(wanted), batch.index
        assert index.page_size == page_size
        if form == "page_table":
            found = index.page_table[row, :count]
        elif form == "indirect":
            found = index.table[index.row_ids[row], :count]
        else:
            found = index.kv_indices[index.kv_indptr[row] : index.kv_indptr[row + 1]]
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("form", ["page_table", "indirect"])
@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "two-chains"])
def test_a_draft_step_sees_the_prefix_and_its_own_chain(topk: int, form: str) -> None:
    """Three slots a chain behind the prefix: a row skips those of the chains before its own."""
    step, forms = 1, frozenset({form})
    lens = torch.tensor([9, 4, 7])
    asked = SimpleNamespace(batch_size=3, seq_lens=lens, seq_lens_cpu=lens, req_pool_indices=torch.tensor([2, 0, 3]))
    batch = draft_batch(asked, step, Chains(topk, 3), Slots(TABLE, 1), forms)
    rows = [
        (source, length, chain) for source, length in zip([2, 0, 3], [9, 4, 7], strict=True) for chain in range(topk)
    ]
    assert batch.num_rows == batch.num_tokens == len(rows)
    assert (batch.num_decode_rows, batch.num_decode_tokens, batch.decode_q_len) == (len(rows), len(rows), 1)
    assert batch.kv_lens.tolist() == batch.kv_lens_host.tolist() == [length + 2 for _, length, _ in rows]
    for row, (source, length, chain) in enumerate(rows):
        first = length + 3 * chain
        wanted = [*TABLE[source, :length].tolist(), *TABLE[source, first : first + 2].tolist()]
        index = batch.index
        found = index.page_table[row] if form == "page_table" else index.table[index.row_ids[row]]
        assert found[: length + 2].tolist() == wanted


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_a_verify_step_counts_the_drafted_tokens(topk: int) -> None:
    """SGLang's lengths leave them out here; a tree's mask lies row after row, `[drafted, length]` each."""
    asked = forward(decode=True)
    mask = torch.zeros(3 * (12 + 7 + 10), dtype=torch.bool)
    asked.spec_info = SimpleNamespace(draft_token_num=3, topk=topk, custom_mask=mask)
    batch = batch_of(asked, "verify", Slots(TABLE, 1), frozenset({"indirect"}))
    assert batch.kv_lens.tolist() == batch.kv_lens_host.tolist() == [12, 7, 10]
    assert batch.qo_indptr.tolist() == [0, 3, 6, 9]
    if topk == 1:
        assert batch.tree is None
    else:
        assert batch.tree is not None
        assert batch.tree.buffer is mask
        assert batch.tree.indptr.tolist() == [0, 36, 57]
