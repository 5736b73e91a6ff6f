"""What only `torch_native` does: absorbed MLA, ALiBi, draft phases, slices of long rows, rows that run alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.declarations import PHASES
from backstamp.testing.batches import SMALL_LAYER, make_batch, make_tree, split_new
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_cpu import native
from backstamp_cpu.backend import build_torch_native, build_torch_native_rows_alone
from backstamp_cpu.plugin import NATIVE, NATIVE_MLA, backstamp_offers

BOUND = 1e-5
MLA = replace(SMALL_LAYER, num_qo_heads=8, num_kv_heads=1, head_dim=36, v_head_dim=32, scale=36**-0.5)
FACTORIES = {"grouped": build_torch_native, "rows-alone": build_torch_native_rows_alone}


def build(how="grouped", *, family="mha", dtype="fp32", page_size=16):
    """One built backend for all five phases."""
    request = request_for(
        NATIVE if family == "mha" else NATIVE_MLA, role="draft", dtype=dtype, kv_dtype=dtype, page_size=page_size
    )
    return FACTORIES[how](request).backend


@pytest.mark.parametrize("how", FACTORIES)
@pytest.mark.parametrize("query", ["joined", "q-rope-apart"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_absorbed_mla_reads_its_values_inside_the_keys(how, query, dtype):
    """`v` None: the values are the latent part of the key rows, whichever way the query comes."""
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    step = make_batch([3, 1, 1, 4], [9, 33, 16, 4], layer=MLA, cache_form="latent", dtype=torch_dtype)
    truth, true_lse = reference_attention(step.q, step.kv, MLA, step.batch)
    backend = build(how, family="mla", dtype=dtype)
    q, q_rope = (step.q, None) if query == "joined" else (step.q[..., :32], step.q[..., 32:])
    bound = {"fp32": BOUND, "bf16": 1.5e-2}[dtype]
    out = backend.forward(q, step.kv, MLA, backend.plan(step.batch), q_rope=q_rope)
    assert relative_error(out, truth) < bound
    lse = torch.empty(step.q.shape[:2])
    again = backend.forward(q, step.kv, MLA, backend.plan(step.batch), q_rope=q_rope, lse=lse)
    assert relative_error(again, truth) < bound
    assert relative_error(lse, true_lse) < bound


def test_absorbed_mla_with_new_tokens_beside_the_cache_equals_the_whole():
    """The cached values come from inside the keys, the new ones from `new.v`."""
    step = make_batch([3, 1, 4], [9, 33, 4], layer=MLA, cache_form="latent")
    truth, _ = reference_attention(step.q, step.kv, MLA, step.batch)
    kv, new = split_new(step)
    backend = build(family="mla")
    assert relative_error(backend.forward(step.q, kv, MLA, backend.plan(step.batch), new=new), truth) < BOUND


def test_mla_verify_of_a_tree_equals_the_reference():
    """The folded query heads of MLA see the tree of their own token."""
    tree = make_tree([5, 5], [20, 31], "qlen")
    step = make_batch([5, 5], [20, 31], layer=MLA, cache_form="latent", phase="verify", tree=tree)
    truth, _ = reference_attention(step.q, step.kv, MLA, step.batch)
    backend = build(family="mla")
    assert relative_error(backend.forward(step.q, step.kv, MLA, backend.plan(step.batch)), truth) < BOUND


@pytest.mark.parametrize("window_left", [-1, 6])
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_slopes_count_from_each_tokens_position(window_left, causal):
    """The bias is slope times key position less query position."""
    layer = replace(SMALL_LAYER, alibi=torch.tensor([0.5, 0.25, 0.1, 0.0]), window_left=window_left)
    step = make_batch([5, 1, 1], [17, 40, 23], layer=layer, causal=causal)
    truth, _ = reference_attention(step.q, step.kv, layer, step.batch)
    backend = build()
    assert relative_error(backend.forward(step.q, step.kv, layer, backend.plan(step.batch)), truth) < BOUND


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_served(phase):
    """The embedded default runs targets and drafts alone."""
    step = make_batch([1, 2], [8, 19], phase=phase)
    truth, _ = reference_attention(step.q, step.kv, step.layer, step.batch)
    backend = build()
    assert relative_error(backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch)), truth) < BOUND


@pytest.mark.parametrize("softcap", [0.0, 4.0], ids=["sdpa", "explicit"])
def test_a_long_row_runs_in_slices_of_its_queries(softcap, monkeypatch):
    """Logits of a product stay bounded, and where a slice ends makes no difference to what it sees."""
    monkeypatch.setattr(native, "MAX_LOGITS", 4 * 50 * 7)
    layer = replace(SMALL_LAYER, softcap=softcap, alibi=torch.linspace(0, 1, 4) if softcap else None)
    step = make_batch([40, 3], [50, 3], layer=layer)
    truth, true_lse = reference_attention(step.q, step.kv, layer, step.batch)
    backend = build()
    lse = torch.empty(step.q.shape[:2]) if softcap else None
    assert relative_error(backend.forward(step.q, step.kv, layer, backend.plan(step.batch), lse=lse), truth) < BOUND
    # a slice with another's distances would shift all its logits alike: only the LSE shows it
    assert lse is None or relative_error(lse, true_lse) < BOUND


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("softcap", [0.0, 4.0], ids=["sdpa", "explicit"])
def test_a_row_that_runs_alone_has_the_same_bits_in_any_batch(dtype, softcap):
    """Declared deterministic: row 0's outputs do not change with what shares its batch, nor with where it stands."""
    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    layer = replace(SMALL_LAYER, softcap=softcap)
    q_lens, kv_lens = [1, 3, 1, 1, 40, 1], [300, 21, 517, 600, 77, 411]
    step = make_batch(q_lens, kv_lens, layer=layer, dtype=torch_dtype)
    backend = build("rows-alone", dtype=dtype)
    whole = backend.forward(step.q, step.kv, layer, backend.plan(step.batch))
    starts = step.batch.qo_indptr.tolist()
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        table = step.batch.index.page_table
        indptr, kv = torch.tensor([0, q_len], dtype=torch.int32), torch.tensor([kv_len], dtype=torch.int32)
        batch = replace(
            step.batch,
            num_rows=1,
            num_tokens=q_len,
            qo_indptr=indptr,
            qo_indptr_host=indptr,
            kv_lens=kv,
            kv_lens_host=kv,
            index=replace(step.batch.index, page_table=table[row : row + 1]),
        )
        tokens = slice(starts[row], starts[row + 1])
        alone = backend.forward(step.q[tokens], step.kv, layer, backend.plan(batch))
        assert torch.equal(alone, whole[tokens]), f"row {row}"


@pytest.mark.parametrize("softcap", [0.0, 30.0], ids=["sdpa", "explicit"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["mha", "mla"])
def test_prefill_cut_at_the_declared_alignment_has_the_bits_of_an_uncut_one(family, dtype, softcap):
    """SGLang #28063: a deterministic launch truncates prefill at the alignment, and chunks must not change a bit."""
    (alignment,) = {
        offer.alignment_tokens for offer in backstamp_offers() if offer.deterministic and offer.device == "cpu"
    }
    layer = replace(MLA if family == "mla" else SMALL_LAYER, softcap=softcap)
    tokens = 2 * alignment + 300
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    form = {"cache_form": "latent"} if family == "mla" else {}
    step = make_batch([tokens], [tokens], layer=layer, dtype=torch_dtype, **form)
    backend = build("rows-alone", family=family, dtype=dtype)
    whole = backend.forward(step.q, step.kv, layer, backend.plan(step.batch))
    parts = []
    for start in range(0, tokens, alignment):
        stop = min(start + alignment, tokens)
        cut = torch.tensor([0, stop - start], dtype=torch.int32)
        seen = torch.tensor([stop], dtype=torch.int32)
        sizes = {"num_tokens": stop - start, "max_q_len": stop - start, "max_kv_len": stop}
        host = {"qo_indptr_host": cut, "kv_lens_host": seen, "slot_mapping": None, "token_rows": None}
        batch = replace(step.batch, qo_indptr=cut, kv_lens=seen, **sizes, **host)
        parts.append(backend.forward(step.q[start:stop], step.kv, layer, backend.plan(batch)))
    assert torch.equal(torch.cat(parts), whole)
