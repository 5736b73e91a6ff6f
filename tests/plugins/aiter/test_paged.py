"""Paged MHA through AITER's `unified_attention`, held against its signature and against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.declarations import PHASES
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import SMALL_LAYER, make_batch, make_tree, split_new
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_aiter.backend import build_paged
from backstamp_aiter.plugin import PAGED
from tests.announced import catch_announcements
from tests.libraries.fake import FakeLibrary
from tests.plugins.aiter.behave import unified_attention

PATH = "aiter.ops.triton.attention.unified_attention:unified_attention"
BOUND = 5e-3
LAYER = replace(SMALL_LAYER, head_dim=64, v_head_dim=64)
BF16 = torch.bfloat16


@pytest.fixture
def library(monkeypatch):
    """AITER's recorded functions, computing with torch."""
    library = FakeLibrary("amd-aiter", monkeypatch)
    library.on(PATH, unified_attention)
    return library


def build(**changes):
    return build_paged(request_for(PAGED, **({"dtype": "bf16"} | changes))).backend


def run(backend, step, layer=LAYER, **options):
    return backend.forward(step.q, step.kv, layer, backend.plan(step.batch), **options)


STEPS = {
    "prefill": {"q_lens": [5, 1, 3, 17], "kv_lens": [37, 64, 3, 17]},
    "decode": {"q_lens": [1, 1, 1], "kv_lens": [37, 1, 300], "phase": "decode"},
    "empty-rows": {"q_lens": [0, 4, 1, 0], "kv_lens": [0, 20, 17, 9]},
    "decode-with-a-hole": {"q_lens": [1, 0, 1], "kv_lens": [30, 0, 41], "phase": "decode"},
    "pad-tokens": {"q_lens": [2, 2], "kv_lens": [18, 33], "pad_tokens": 3, "phase": "verify"},
}
LAYERS = {
    "plain": {},
    "window": {"window_left": 7},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])},
    "alibi": {"alibi": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "mqa": {"num_kv_heads": 1},
}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("step", STEPS)
def test_every_step_of_every_layer_equals_the_reference(step, layer, page_size, library):
    """What the library is handed comes to the contract's answer."""
    spec = replace(LAYER, **LAYERS[layer])
    made = make_batch(**STEPS[step], layer=spec, page_size=page_size, dtype=BF16)
    truth, _ = reference_attention(made.q, made.kv, spec, made.batch)
    assert relative_error(run(build(page_size=page_size), made, spec), truth) < BOUND
    assert len(library.called(PATH)) == 1


@pytest.mark.parametrize("cache_form", ["nhd", "hnd", "interleaved"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_every_head_dim_and_every_stride_goes_to_the_library_as_it_is(head_dim, cache_form, library):
    """The kernel takes four strides of each cache; nothing is copied."""
    spec = replace(LAYER, head_dim=head_dim, v_head_dim=head_dim, scale=head_dim**-0.5)
    made = make_batch([3, 1], [20, 9], layer=spec, dtype=BF16, cache_form=cache_form)
    truth, _ = reference_attention(made.q, made.kv, spec, made.batch)
    assert relative_error(run(build(), made, spec), truth) < BOUND
    (call,) = library.called(PATH)
    assert call["k"].data_ptr() == made.kv.k.data_ptr()
    assert call["k"].stride() == made.kv.k.stride()
    assert call["block_table"] is made.batch.index.page_table


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_served_in_fp16_too(phase, library):
    """Draft phases follow their halves."""
    made = make_batch([1, 1], [8, 19], layer=LAYER, phase=phase, dtype=torch.float16)
    truth, _ = reference_attention(made.q, made.kv, LAYER, made.batch)
    assert relative_error(run(build(dtype="fp16"), made), truth) < BOUND


@pytest.mark.parametrize(
    ("q_lens", "told"),
    [([1, 1, 1], 1), ([1, 0, 1], 2), ([0, 1, 1], 2), ([3, 1], 3)],
    ids=["one-each", "hole", "hole-first", "ragged"],
)
def test_the_library_is_told_one_query_a_row_only_where_token_i_is_row_i(q_lens, told, library):
    """At 1 it takes the program's number for the token's and never reads the offsets."""
    made = make_batch(q_lens, [9] * len(q_lens), layer=LAYER, phase="decode", dtype=BF16)
    run(build(), made)
    assert library.called(PATH)[0]["max_seqlen_q"] == told


def test_without_host_lengths_the_batch_itself_says_that_each_row_has_its_token(library):
    """A captured decode has no host mirror; its leading rows do."""
    made = make_batch([1, 1], [9, 20], layer=LAYER, phase="decode", dtype=BF16, host_lens=False)
    run(build(), made)
    batch = replace(made.batch, num_decode_rows=2, num_decode_tokens=2, decode_q_len=1)
    run(build(), replace(made, batch=batch))
    assert [call["max_seqlen_q"] for call in library.called(PATH)] == [2, 1]


def test_a_window_counts_keys_before_self(library):
    """The library adds one to the left side and calls what is then not positive no window."""
    made = make_batch([1], [9], layer=LAYER, dtype=BF16)
    backend = build()
    run(backend, made, replace(LAYER, window_left=0))
    run(backend, made, replace(LAYER, window_left=-1))
    assert [call["window_size"] for call in library.called(PATH)] == [(0, 0), (-1, -1)]


def test_a_step_without_rows_or_tokens_calls_nothing_and_leaves_zeros(library):
    """Zero rows come back at once, and so do rows that are all pads."""
    backend = build()
    empty = make_batch([], [], layer=LAYER, dtype=BF16, pad_tokens=2)
    out = torch.full((2, 4, 64), float("nan"), dtype=BF16)
    assert run(backend, empty, out=out) is out
    assert torch.equal(out, torch.zeros_like(out))
    pads = make_batch([0, 0], [0, 0], layer=LAYER, dtype=BF16, pad_tokens=2)
    out.fill_(float("nan"))
    assert torch.equal(run(backend, pads, out=out), torch.zeros_like(out))
    assert library.calls == []


def decode(lens=(9, 20), width=4, **changes):
    """A decode step whose table has room for more than its rows fill."""
    made = make_batch([1] * len(lens), list(lens), layer=LAYER, phase="decode", dtype=BF16, **changes)
    table = torch.full((len(lens), width), -1, dtype=torch.int32)
    table[:, : made.batch.index.page_table.shape[1]] = made.batch.index.page_table
    index = replace(made.batch.index, page_table=table)
    return replace(made, batch=replace(made.batch, index=index, max_kv_len=16 * width))


def test_a_replay_reads_new_values_at_the_recorded_addresses(library):
    """A graph has the first plan's tensors; another batch's lie elsewhere, and are copied into them."""
    backend = build(graph="uniform")
    first, second = decode(), decode((31, 12), seed=3)
    assert not torch.equal(first.batch.index.page_table, second.batch.index.page_table)
    state = backend.plan(first.batch, capture=True)
    backend.forward(first.q, first.kv, LAYER, state)
    assert backend.plan(second.batch, state=state) is state
    assert backend.replan(state) is None
    (recorded,) = library.called(PATH)
    for name, at, wanted in (
        ("cu_seqlens_q", first.batch.qo_indptr, second.batch.qo_indptr),
        ("seqused_k", first.batch.kv_lens, second.batch.kv_lens),
        ("block_table", first.batch.index.page_table, second.batch.index.page_table),
    ):
        assert recorded[name].data_ptr() == at.data_ptr()
        assert torch.equal(recorded[name], wanted)
    truth, _ = reference_attention(second.q, second.kv, LAYER, second.batch)
    assert relative_error(backend.forward(second.q, second.kv, LAYER, state), truth) < BOUND


def test_a_replay_reads_the_offsets_of_its_rows(library):
    """Where the library is told that rows have more than one query, it goes by them."""
    backend = build(graph="uniform")
    first, second = (
        make_batch(lens, [9, 20], layer=LAYER, phase="verify", dtype=BF16, seed=lens[0]) for lens in ([2, 2], [1, 3])
    )
    state = backend.plan(replace(first.batch, max_q_len=3), capture=True)
    backend.plan(second.batch, state=state)
    truth, _ = reference_attention(second.q, second.kv, LAYER, second.batch)
    assert relative_error(backend.forward(second.q, second.kv, LAYER, state), truth) < BOUND
    assert library.called(PATH)[0]["max_seqlen_q"] == 3


@pytest.mark.parametrize("captured", [True, False])
def test_what_a_graph_recorded_counts_no_tokens_on_the_host(captured, library):
    """A step outside graphs clears the tokens of no row; a recorded one writes as many as it did."""
    backend = build(graph="uniform")
    of = {"kv_lens": [9, 20], "layer": LAYER, "phase": "verify", "dtype": BF16}
    state = backend.plan(make_batch([2, 2], **of).batch, capture=captured)
    backend.plan(make_batch([2, 1], pad_tokens=1, **of).batch, state=state)
    assert state.tokens == (4 if captured else 3)


def test_a_replay_at_the_engines_own_addresses_copies_nothing(library):
    """What it keeps in place is up to date; the rows of a table may lie apart, but not otherwise than recorded."""
    backend = build(graph="uniform")
    made = decode()
    state = backend.plan(made.batch, capture=True)
    made.batch.kv_lens.copy_(torch.tensor([12, 31], dtype=torch.int32))
    assert backend.plan(made.batch, state=state) is state
    assert made.batch.kv_lens.tolist() == [12, 31]
    memory = torch.zeros(4, 4, dtype=torch.int32)
    near, far = memory[:2], memory[::2]
    state = backend.plan(with_table(made.batch, near), capture=True)
    with pytest.raises(UnsupportedBatch, match=r"needs index\.page_table: rows 4 apart, as planned, got 8"):
        backend.plan(replace(with_table(made.batch, far), kv_lens=made.batch.kv_lens - 1), state=state)
    # refused whole
    assert made.batch.kv_lens.tolist() == [12, 31]


def with_table(batch, table):
    return replace(batch, index=replace(batch.index, page_table=table))


ANOTHER = {
    "num_rows": decode((9, 20, 5)).batch,
    "num_tokens": replace(decode().batch, num_tokens=4),
    "max_q_len": replace(decode(host_lens=False).batch, max_q_len=1),
    "max_kv_len": replace(decode().batch, max_kv_len=65),
    "index.page_table": with_table(decode().batch, torch.zeros(2, 4, dtype=torch.int32)),
}


@pytest.mark.parametrize("named", ANOTHER)
def test_another_launch_than_the_planned_one_is_refused(named, library):
    """Rows and tokens are the launch, the longest row its grid; a recorded table has no more columns than it has."""
    first = decode().batch
    before = first.kv_lens.clone()
    backend = build(graph="uniform")
    narrow = with_table(first, first.index.page_table[:, :2])
    state = backend.plan(narrow if named == "index.page_table" else first, capture=True)
    with pytest.raises(UnsupportedBatch, match=f"needs {named}: .*as planned"):
        backend.plan(ANOTHER[named], state=state)
    assert torch.equal(first.kv_lens, before)


def test_entries_of_a_row_that_lie_apart_are_refused(library):
    """The library takes the stride of a row and none within it."""
    made = make_batch([5, 1], [37, 64], layer=LAYER, dtype=BF16)
    batch, table = made.batch, made.batch.index.page_table
    apart = torch.stack([batch.kv_lens, batch.kv_lens], 1)[:, 0]
    for named, changed in {
        r"index\.page_table: a last stride of 1": with_table(batch, table.T.contiguous().T),
        r"index\.page_table: torch\.int32": with_table(batch, table.long()),
        "kv_lens: ": replace(batch, kv_lens=apart),
        "qo_indptr: ": replace(batch, qo_indptr=torch.stack([batch.qo_indptr] * 2, 1)[:, 0]),
    }.items():
        with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
            build().plan(changed)
    wide = torch.zeros(2, 9, dtype=torch.int32)
    wide[:, : table.shape[1]] = table
    truth, _ = reference_attention(made.q, made.kv, LAYER, batch)
    rows_apart = replace(made, batch=with_table(batch, wide[:, : table.shape[1]]))
    assert relative_error(run(build(), rows_apart), truth) < BOUND
    assert library.calls != []


REFUSED = {
    "non_causal": ({"q_lens": [3], "kv_lens": [9], "causal": False}, "causal"),
    "per_row": ({"q_lens": [3], "kv_lens": [9], "causal": [True]}, "causal"),
    "left_padding": ({"q_lens": [3], "kv_lens": [9], "kv_starts": [2]}, "kv_starts"),
    "csr": ({"q_lens": [3], "kv_lens": [9], "index_form": "csr"}, "index"),
    "tree": ({"q_lens": [3], "kv_lens": [9], "tree": make_tree([3], [9], "qlen"), "phase": "verify"}, "tree"),
    "page_size": ({"q_lens": [3], "kv_lens": [9], "page_size": 64}, "page_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_is_not_declared_is_refused_in_plan(case, library):
    """Nothing is dropped, and the library is not asked."""
    fields, named = REFUSED[case]
    made = make_batch(**fields, layer=LAYER, dtype=BF16)
    with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
        build().plan(made.batch)
    assert library.calls == []


def test_a_call_that_is_not_declared_is_refused_in_forward(library):
    """LSE, new tokens, another dtype, an output the kernel cannot stride."""
    made = make_batch([3], [9], layer=LAYER, dtype=BF16)
    backend = build()
    _kv, new = split_new(made)
    wide = torch.empty(3, 4, 128, dtype=BF16)[..., ::2]
    for named, options in {
        "lse": {"lse": torch.empty(3, 4)},
        "new": {"new": new},
        "q_rope: None": {"q_rope": made.q},
        "indices": {"indices": torch.zeros(3, 2, dtype=torch.int32)},
        "out: a last stride": {"out": wide},
    }.items():
        with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
            run(backend, made, **options)
    with pytest.raises(UnsupportedBatch, match="needs q: bf16"):
        run(backend, make_batch([3], [9], layer=LAYER))
    assert library.calls == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "fp32"}, "dtype"),
        ({"kv_dtype": "e4m3fnuz"}, "kv_dtype"),
        ({"page_size": 24}, "page_size"),
        ({"layers": (replace(LAYER, head_dim=72, v_head_dim=72),)}, "head_dim"),
        ({"layers": (replace(LAYER, attn_type="encoder"),)}, "encoder"),
    ],
)
def test_a_build_that_is_not_declared_is_refused_without_the_library(changes, named):
    """The library is imported last: there is none here."""
    with pytest.raises(UnsupportedBatch, match=f"needs {named}"):
        build(**changes)


def test_each_kernel_the_library_compiles_is_announced_once(library, monkeypatch):
    """It compiles through Triton at the first call of a kind: layers of another kind and decode are announced apart."""
    announced = catch_announcements(monkeypatch)
    backend = build()
    prefill = make_batch([3, 1], [20, 9], layer=LAYER, dtype=BF16)
    decode = make_batch([1, 1], [20, 9], layer=LAYER, dtype=BF16, phase="decode")
    for _ in range(2):
        run(backend, prefill)
        run(backend, decode)
        for layer in ("window", "softcap", "sinks", "alibi"):
            run(backend, prefill, replace(LAYER, **LAYERS[layer]))
    begun = "paged bf16 4/2 heads d64"
    kinds = [f"{begun} ragged rows", f"{begun} one token a row"]
    kinds += [f"{begun} ragged rows {layer}" for layer in ("window", "softcap", "sinks", "alibi")]
    assert announced == [("aiter", kind) for kind in kinds]
