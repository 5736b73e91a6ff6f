"""The MHA binding over a stand-in that computes what the library documents, held against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import PagedKV
from backstamp.testing.batches import MadeStep, split_new
from tests.libraries.fake import FakeLibrary
from tests.plugins.flashinfer.library import DECODE, PREFILL, RAGGED, SINKS
from tests.plugins.flashinfer.steps import (
    CHAIN,
    LATENT,
    LAYER,
    MIXED,
    ONE,
    SINK,
    build,
    draw,
    forward,
    held,
    request_of,
)

WINDOWED = replace(LAYER, window_left=6)


@pytest.mark.parametrize("form", ["csr", "page_table", "indirect"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_ragged_rows_are_attended_over_any_index_form(library: FakeLibrary, page_size: int, form: str) -> None:
    """Rows without queries or keys among them; stale pages and NaN slots are never read; the LSE is natural."""
    step = draw(MIXED, page_size=page_size, index_form=form)
    held(forward(build(step), step, lse=True), step)


@pytest.mark.parametrize(
    "layer",
    [
        LAYER,
        WINDOWED,
        replace(LAYER, softcap=5.0),
        replace(LAYER, window_left=0, softcap=5.0),
        SINK,
        replace(SINK, window_left=6),
        replace(LAYER, num_qo_heads=8, num_kv_heads=1, head_dim=128, v_head_dim=128),
    ],
    ids=["plain", "window", "softcap", "window-0-softcap", "sinks", "window-sinks", "mqa-d128"],
)
@pytest.mark.parametrize("rows", [MIXED, ONE], ids=["mixed", "one-token"])
def test_a_layer_gets_what_it_asks_of_the_logits(
    library: FakeLibrary, rows: tuple[tuple[int, int], ...], layer: object
) -> None:
    """Scale, window, softcap and sinks reach the kernel in every step shape."""
    step = draw(rows, layer)  # type: ignore[arg-type]
    held(forward(build(step), step), step)


def test_one_token_a_row_takes_the_decode_wrapper_with_tensor_cores(library: FakeLibrary) -> None:
    """A decode step and a draft step alike; the backend is named, so that no other library's kernel is picked."""
    for phase in ("decode", "draft_decode"):
        step = draw(ONE, phase=phase)
        held(forward(build(step), step, lse=True), step)
    for made in library.called(f"{DECODE}.__init__"):
        assert made["use_tensor_cores"] is True
        assert made["backend"] == "fa2"
    assert not library.called(f"{PREFILL}.__init__")


def test_non_causal_rows_see_every_key(library: FakeLibrary) -> None:
    """With a window, keys to the left only; the library does not split such steps right."""
    for layer in (LAYER, WINDOWED):
        step = draw(MIXED, layer, causal=False)
        held(forward(build(step), step), step)
    plain, windowed = library.called(f"{PREFILL}.plan")
    assert not plain["causal"]
    assert not plain["disable_split_kv"]
    assert windowed["disable_split_kv"]


@pytest.mark.parametrize("kind", ["qlen", "full", "packed"])
@pytest.mark.parametrize(
    "rows", [CHAIN, ((3, 3), (0, 9), (7, 40), (1, 1), (0, 0), (6, 130))], ids=["uniform", "ragged"]
)
@pytest.mark.parametrize("layer", [LAYER, WINDOWED, replace(LAYER, window_left=1)], ids=["plain", "window", "window-1"])
def test_a_tree_is_the_librarys_custom_mask(
    library: FakeLibrary, layer: object, rows: tuple[tuple[int, int], ...], kind: str
) -> None:
    """Every kind of mask buffer; windows count from a token's place in its tree, not from its slot."""
    step = draw(rows, layer, tree=kind, phase="verify")  # type: ignore[arg-type]
    held(forward(build(step), step, lse=True), step)


def test_a_tree_filled_after_plan_is_read_in_forward(library: FakeLibrary) -> None:
    """The engine's tree kernel writes the buffer between the two."""
    step = draw(CHAIN, tree="qlen", phase="verify")
    tree = step.batch.tree
    assert tree is not None
    wanted = tree.buffer.clone()
    tree.buffer.fill_(True)
    backend = build(step)
    state = backend.plan(step.batch)
    forward(backend, step, state)
    tree.buffer.copy_(wanted)
    held(forward(backend, step, state), step)


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no-index"])
def test_keys_in_no_cache_take_the_ragged_wrapper(library: FakeLibrary, indexed: bool) -> None:
    """A prompt before its keys are written, with or without an index beside it."""
    step = draw(((5, 5), (1, 1), (0, 0), (33, 33)))
    _, new = split_new(step)
    batch = step.batch if indexed else replace(step.batch, index=replace(step.batch.index, page_table=None))
    held(forward(build(step), replace(step, batch=batch), kv=None, new=new, lse=True), step)
    assert len(library.called(f"{RAGGED}.run")) == 1


def test_encoder_layers_see_all_their_keys(library: FakeLibrary) -> None:
    """No cache, no causal rule."""
    step = draw(((5, 5), (12, 12)), replace(LAYER, attn_type="encoder"), causal=False)
    _, new = split_new(step)
    held(forward(build(step), step, kv=None, new=new), step)


def test_pad_tokens_are_zero_and_minus_infinity(library: FakeLibrary) -> None:
    """Tokens that belong to no row."""
    step = draw(MIXED, pad_tokens=3)
    held(forward(build(step), step, lse=True), step)


@pytest.mark.parametrize("rows", [(), ((0, 9),), ((0, 0), (0, 0))], ids=["no-rows", "no-tokens", "empty-rows"])
def test_a_step_without_work_launches_nothing(library: FakeLibrary, rows: tuple[tuple[int, int], ...]) -> None:
    """It returns the output it was given."""
    whole = draw(((1, 9),))
    if rows:
        step = draw(rows)
    else:
        batch = replace(
            whole.batch, num_rows=0, num_tokens=0, max_q_len=0, qo_indptr=whole.batch.qo_indptr[:1],
            kv_lens=whole.batch.kv_lens[:0], qo_indptr_host=torch.zeros(1, dtype=torch.int32),
            kv_lens_host=torch.zeros(0, dtype=torch.int32),
        )  # fmt: skip
        step = replace(whole, q=whole.q[:0], batch=batch)
    assert forward(build(step), step, lse=True).out.shape[0] == 0
    assert not library.called(f"{PREFILL}.run") + library.called(f"{DECODE}.run")


@pytest.mark.parametrize("layer", [LAYER, LATENT], ids=["mha", "mla"])
def test_tokens_of_no_row_are_zero_where_there_is_no_row(library: FakeLibrary, layer: object) -> None:
    """A padded step of an engine that has nothing to do."""
    step = draw(((3, 9),), layer)  # type: ignore[arg-type]
    batch = replace(
        step.batch, num_rows=0, qo_indptr=step.batch.qo_indptr[:1], kv_lens=step.batch.kv_lens[:0],
        qo_indptr_host=torch.zeros(1, dtype=torch.int32), kv_lens_host=torch.zeros(0, dtype=torch.int32),
    )  # fmt: skip
    run = forward(build(step), replace(step, batch=batch), lse=True)
    assert torch.equal(run.out, torch.zeros_like(run.out))
    assert run.lse is not None
    assert torch.equal(run.lse, torch.full_like(run.lse, float("-inf")))


@pytest.mark.parametrize("form", ["hnd", "interleaved"])
def test_a_cache_is_read_through_its_own_strides(library: FakeLibrary, form: str) -> None:
    """Heads before tokens, and keys beside values."""
    step = draw(MIXED, cache_form=form)
    held(forward(build(step), step), step)


def test_an_output_with_gaps_is_written_through_a_dense_one(library: FakeLibrary) -> None:
    """The library writes dense rows whatever the strides say."""
    step = draw(MIXED)
    wide = torch.full((step.batch.num_tokens, 4, 80), float("nan"), dtype=torch.float16)
    held(forward(build(step), step, out=wide[..., :64]), step)


def test_a_query_between_vectors_is_copied_first(library: FakeLibrary) -> None:
    """Queries cut out of a fused projection at an odd place."""
    step = draw(MIXED)
    wide = torch.zeros(step.batch.num_tokens, 4, 67, dtype=torch.float16)
    wide[..., 3:] = step.q
    held(forward(build(step), replace(step, q=wide[..., 3:])), step)


def ran(backend: object, step: MadeStep) -> list[str]:
    """Run a step, hold it, and say which kernels its layers ran."""
    state = backend.plan(step.batch)  # type: ignore[attr-defined]
    held(forward(backend, step, state), step)
    return [planned.route.backend for planned in state.plans.values() if planned.ran]


def test_long_queries_on_hopper_take_fa3_and_short_ones_fa2(library: FakeLibrary) -> None:
    """FA3 where the library's own rule prefers it and its kernels can."""
    sinks = replace(SINK, window_left=6)
    for layer in (LAYER, sinks, replace(LAYER, softcap=5.0, window_left=6)):
        long, short = draw(((70, 90), (1, 8)), layer), draw(MIXED, layer)
        backend = build(long, hopper=True)
        assert ran(backend, long) == ["fa3"]
        assert ran(backend, short) == ["fa2"]
        assert ran(build(long), long) == ["fa2"]


def test_fa3_is_not_asked_for_what_it_cannot(library: FakeLibrary) -> None:
    """Trees, windows without the causal rule, and values whose strides differ from their keys'."""
    rows = ((70, 90), (1, 8))
    tree = draw(rows, tree="qlen", phase="verify")
    right = draw(rows, WINDOWED, causal=False)
    apart = draw(rows)
    values = torch.zeros(*apart.kv.k.shape[:3], 128, dtype=torch.float16)
    values[..., :64] = apart.kv.v
    apart = replace(apart, kv=PagedKV(k=apart.kv.k, v=values[..., :64]))
    for step in (tree, right, apart):
        assert ran(build(step, hopper=True), step) == ["fa2"]


def test_what_long_prompts_run_is_loaded_when_the_object_is_built(library: FakeLibrary) -> None:
    """On Hopper, where a warming step is too short for it; only for objects that serve prefill."""
    step = draw(MIXED)
    build(step, hopper=True)
    assert [made["backend"] for made in library.called(f"{PREFILL}.__init__")] == ["fa3"]
    assert len(library.called(f"{PREFILL}.plan")) == 1
    build(step, hopper=True, phases=("decode", "draft_decode"))
    build(step)
    assert len(library.called(f"{PREFILL}.plan")) == 1


def test_layers_of_two_windows_share_a_step(library: FakeLibrary) -> None:
    """One KV group may hold both; each is planned when it is first met."""
    step = draw(MIXED)
    other = replace(step, layer=replace(WINDOWED, layer_id=1))
    backend = build(step, layers=(LAYER, other.layer))
    state = backend.plan(step.batch)
    for _ in range(2):
        held(forward(backend, step, state), step)
        held(forward(backend, other, state), other)
    assert len(library.called(f"{PREFILL}.plan")) == 2


def test_two_steps_in_flight_have_a_wrapper_each(library: FakeLibrary) -> None:
    """An engine keeps several states alive; a dropped one gives its wrapper back."""
    first, second = draw(MIXED), draw(((2, 30), (8, 8)))
    backend = build(first)
    one, two = backend.plan(first.batch), backend.plan(second.batch)
    held(forward(backend, first, one), first)
    held(forward(backend, second, two), second)
    assert len(library.called(f"{PREFILL}.__init__")) == 2
    del one, two
    held(forward(backend, first, backend.plan(first.batch)), first)
    held(forward(backend, second, backend.plan(second.batch)), second)
    assert len(library.called(f"{PREFILL}.__init__")) == 2


def test_idle_wrappers_are_few(library: FakeLibrary) -> None:
    """Trees of many shapes leave a wrapper each, with 16 MiB; only some are kept."""
    from backstamp_flashinfer.wrappers import IDLE_WRAPPERS

    step = draw(CHAIN, tree="qlen", phase="verify")
    backend = build(step)
    for rows in range(1, IDLE_WRAPPERS + 4):
        made = draw(((2, 9),) * rows, tree="qlen", phase="verify")
        held(forward(backend, made), made)
    assert len(backend._pool._idle) == IDLE_WRAPPERS


def test_tokens_out_of_their_rows_place_are_no_uniform_step(library: FakeLibrary) -> None:
    """As many tokens as rows, but the last row's is the second token."""
    step = draw(((1, 9), (0, 5), (1, 20)), pad_tokens=1, phase="decode")
    held(forward(build(step), step, lse=True), step)


def test_strides_apart_share_the_plan_of_fa2(library: FakeLibrary) -> None:
    """Its kernels take strides of keys and values each, when they run."""
    step = draw(MIXED)
    values = torch.zeros(*step.kv.k.shape[:3], 128, dtype=torch.float16)
    values[..., :64] = step.kv.v
    backend = build(step)
    state = backend.plan(step.batch)
    held(forward(backend, replace(step, kv=PagedKV(k=step.kv.k, v=values[..., :64])), state), step)
    held(forward(backend, step, state), step)
    assert len(library.called(f"{PREFILL}.plan")) == 1


def test_sinks_of_another_dtype_are_widened(library: FakeLibrary) -> None:
    """The library reads floats; bf16 parameters lose nothing."""
    assert SINK.sinks is not None
    step = draw(MIXED, replace(SINK, sinks=SINK.sinks.bfloat16()))
    held(forward(build(step), step), step)
    assert request_of(step).offer.sink_conversion == "lossless"


def test_reloaded_sinks_are_converted_into_one_buffer(library: FakeLibrary) -> None:
    """`copy_` ticks the counter `plan` looks at, `param.data.copy_()` ticks nothing: the one needs a call."""
    assert SINK.sinks is not None
    step = draw(MIXED, replace(SINK, sinks=SINK.sinks.bfloat16()))
    backend, sinks = build(step), step.layer.sinks
    assert sinks is not None
    held(forward(backend, step), step)
    sinks.copy_(sinks + 3.0)
    held(forward(backend, step), step)
    before = forward(backend, step).out
    sinks.data.copy_(sinks - 6.0)
    assert torch.equal(forward(backend, step).out.nan_to_num(), before.nan_to_num())
    backend.refresh_parameters()
    held(forward(backend, step), step)
    read = [call["args"][0].data_ptr() for call in library.called(f"{SINKS}.run")]
    assert len(read) >= 4
    assert len(set(read)) == 1
