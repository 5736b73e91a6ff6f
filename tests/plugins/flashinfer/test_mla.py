"""The MLA binding over a stand-in that computes what the library documents, held against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from tests.libraries.fake import FakeLibrary
from tests.plugins.flashinfer.library import MLA
from tests.plugins.flashinfer.steps import LATENT, MIXED, ONE, build, draw, forward, held, with_lens


@pytest.mark.parametrize("form", ["csr", "page_table", "indirect"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_ragged_rows_are_attended_over_the_latent_cache(library: FakeLibrary, page_size: int, form: str) -> None:
    """Rows without queries or keys among them; the LSE is natural; query and cache go in two parts, as views."""
    step = draw(MIXED, LATENT, page_size=page_size, index_form=form)
    held(forward(build(step), step, lse=True), step)
    ckv, kpe = library.called(f"{MLA}.run")[0]["kv_cache"]
    assert ckv.data_ptr() == step.kv.k.data_ptr()
    assert kpe.data_ptr() == step.kv.k.data_ptr() + 1024


def test_one_token_a_row_is_planned_without_the_causal_rule(library: FakeLibrary) -> None:
    """It sees every key either way, and the library takes more head counts then."""
    step = draw(ONE, replace(LATENT, num_qo_heads=12), phase="decode")
    held(forward(build(step), step), step)
    assert library.called(f"{MLA}.plan")[0]["causal"] is False


def test_the_rotary_part_may_come_apart(library: FakeLibrary) -> None:
    """As engines hand an absorbed query."""
    step = draw(MIXED, LATENT)
    latent, rope = step.q[..., :512].contiguous(), step.q[..., 512:].contiguous()
    run = forward(build(step), replace(step, q=latent), q_rope=rope)
    held(run, step)


def test_non_causal_rows_see_every_key(library: FakeLibrary) -> None:
    """As declared."""
    step = draw(MIXED, LATENT, causal=False)
    held(forward(build(step), step), step)


def test_pad_tokens_are_zero_and_minus_infinity(library: FakeLibrary) -> None:
    """Tokens that belong to no row."""
    step = draw(MIXED, LATENT, pad_tokens=3)
    held(forward(build(step), step, lse=True), step)


def test_a_step_without_work_launches_nothing(library: FakeLibrary) -> None:
    """Rows without tokens are neither planned nor run."""
    step = draw(((0, 9), (0, 0)), LATENT)
    assert forward(build(step), step).out.shape[0] == 0
    assert not library.called(f"{MLA}.plan")


def test_hopper_runs_fa3_and_other_chips_fa2(library: FakeLibrary) -> None:
    """Named outright: "auto" may pick XQA or CUTLASS, and the stamp would lie."""
    step = draw(MIXED, LATENT)
    for hopper in (True, False):
        held(forward(build(step, hopper=hopper), step), step)
    assert [made["backend"] for made in library.called(f"{MLA}.__init__")] == ["fa3", "fa2"]


def test_an_output_between_vectors_is_written_through_another(library: FakeLibrary) -> None:
    """The kernels store vectors of 16 bytes."""
    step = draw(MIXED, LATENT)
    wide = torch.full((step.batch.num_tokens, 8, 513), float("nan"), dtype=torch.float16)
    held(forward(build(step), step, out=wide[..., 1:]), step)


def test_layers_of_two_scales_are_planned_each(library: FakeLibrary) -> None:
    """The scale is part of a plan."""
    other = replace(LATENT, layer_id=1, scale=0.05)
    step = draw(MIXED, LATENT)
    backend = build(step, layers=(LATENT, other))
    state = backend.plan(step.batch)
    for layer in (LATENT, other):
        held(forward(backend, replace(step, layer=layer), state), replace(step, layer=layer))
    with pytest.raises(UnsupportedBatch, match=r"layer.*scale 0\.07"):
        forward(backend, replace(step, layer=replace(LATENT, scale=0.07)), state)


@pytest.mark.parametrize("rows", [ONE, ((3, 30), (3, 17), (3, 3))], ids=["decode", "chain"])
def test_a_recorded_step_replays_with_other_lengths(library: FakeLibrary, rows: tuple[tuple[int, int], ...]) -> None:
    """The same wrapper and buffers, planned anew."""
    step = draw(rows, LATENT, phase="decode" if rows == ONE else "verify")
    step = replace(step, batch=replace(step.batch, max_kv_len=512))
    backend = build(step)
    backend.init_graphs(len(rows), step.batch.num_tokens)
    state = backend.plan(step.batch, capture=True)
    held(forward(backend, step, state), step)
    again = with_lens(step, [max(step.batch.max_q_len, kv - 9) for _, kv in rows])
    assert backend.plan(again.batch, state=state) is state
    held(forward(backend, again, state), again)
    assert len(library.called(f"{MLA}.__init__")) == 1


def test_what_the_librarys_planner_refuses_is_refused_at_plan(library: FakeLibrary) -> None:
    """Its own words are kept, before any launch."""

    def refuse(self: object, **given: object) -> None:
        raise ValueError("native execution would omit a visible key")

    library.on(f"{MLA}.plan", refuse)
    step = draw(MIXED, LATENT)
    with pytest.raises(UnsupportedBatch, match="native execution would omit a visible key"):
        build(step).plan(step.batch)
