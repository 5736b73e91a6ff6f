"""MLA over the latent cache and over ragged keys: trtllm-gen, CuTe DSL and tokenspeed-mla, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import LayerSpec, RaggedKV
from backstamp.declarations import Offer
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import make_batch, split_new
from backstamp.testing.reference import reference_attention, relative_error
from backstamp_trtllm.plugin import (
    CUTEDSL_MLA,
    TOKENSPEED_MLA,
    TOKENSPEED_MLA_RAGGED,
    TRTLLM_MLA,
    TRTLLM_MLA_RAGGED,
)
from tests.plugins.trtllm.cases import BOUND, Case, build, check, compare, install, make

PATH = "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla"
SPEED = "tokenspeed_mla:tokenspeed_mla_decode"
PREFILL = ((30, 30), (1, 40), (0, 17), (9, 129), (4, 0))
ONE = ((1, 1), (1, 17), (1, 200))
SOME = ((1, 5), (0, 0), (1, 0), (1, 70))
CHAIN = ((4, 4), (4, 40), (4, 130))
RAGGED = ((1, 20), (3, 3), (0, 9), (5, 130), (2, 0))


def latent(rows: tuple[tuple[int, int], ...], phase: str, page_size: int = 64, **more: object) -> Case:
    """A case over a latent cache."""
    return Case(rows, phase=phase, page_size=page_size, heads=(8, 1), mla=True, **more)  # type: ignore[arg-type]


def served(offer: Offer) -> list[tuple[Offer, Case]]:
    """Every phase a row declares, with rows of equal length, ragged and empty ones."""
    small = min(offer.page_sizes.exact)
    cases = [
        latent(PREFILL, "prefill", lse=True, pad_tokens=2),
        latent(PREFILL, "prefill", small),
        latent(ONE, "decode", lse=True),
        latent(ONE, "decode", small, q_len=1, strided_out=True, lse=True),
        latent(SOME, "decode", lse=True, pad_tokens=1),
        latent(SOME, "decode", host_lens=False),
        latent(CHAIN, "verify", lse=True),
        latent(RAGGED, "verify", small),
        latent(ONE, "draft_decode", lse=True),
        latent(RAGGED, "draft_extend", host_lens=False, lse=True),
    ]
    return [(offer, case) for case in cases if case.phase in offer.all_phases]


ALL = [*served(TRTLLM_MLA), *served(CUTEDSL_MLA), *served(TOKENSPEED_MLA)]


@pytest.mark.parametrize(("offer", "case"), ALL, ids=lambda item: item.kernel if isinstance(item, Offer) else str(item))
def test_every_declared_phase_is_right(offer: Offer, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent outputs and natural-log LSE; tokens that see nothing get zeros and -inf."""
    install(monkeypatch)
    check(offer, case)


def test_the_backend_in_the_call_is_the_kernel_on_the_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to the library's own choice."""
    libraries = install(monkeypatch)
    check(TRTLLM_MLA, latent(ONE, "decode"))
    check(CUTEDSL_MLA, latent(ONE, "decode"))
    first, second = libraries.flashinfer.called(PATH)
    assert (first["backend"], second["backend"]) == ("trtllm-gen", "cute-dsl")


@pytest.mark.parametrize("offer", [TRTLLM_MLA, CUTEDSL_MLA, TOKENSPEED_MLA], ids=lambda offer: offer.kernel)
def test_a_query_in_two_parts_is_the_same(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 latent and 64 rotary."""
    install(monkeypatch)
    step = make(latent(ONE, "decode"))
    backend = build(offer, step)
    state = backend.plan(step.batch)
    whole = backend.forward(step.q, step.kv, step.layer, state)
    parts = backend.forward(step.q[..., :512], step.kv, step.layer, state, q_rope=step.q[..., 512:])
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("offer", [TRTLLM_MLA, CUTEDSL_MLA, TOKENSPEED_MLA], ids=lambda offer: offer.kernel)
@pytest.mark.parametrize("q_len", [1, None])
def test_a_captured_step_serves_later_lengths_at_the_same_addresses(
    offer: Offer, q_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal rows, and rows whose lengths nobody told the host."""
    libraries = install(monkeypatch)
    case = latent(((1, 30), (1, 150)), "decode", q_len=q_len)
    first, second = make(case), make(replace(case, rows=((1, 9), (1, 0))), seed=3)
    backend = build(offer, first)
    state = backend.plan(first.batch, capture=True)
    compare(backend, state, first, case)
    assert backend.plan(second.batch, state=state) is state
    compare(backend, state, second, case)
    backend.replan(state)
    compare(backend, state, second, case)
    library, path = (libraries.tokenspeed, SPEED) if offer.kernel == "tokenspeed_mla" else (libraries.flashinfer, PATH)
    calls = library.called(path)
    for name in ("block_tables", "seq_lens", "workspace_buffer"):
        assert calls[0][name].data_ptr() == calls[1][name].data_ptr(), name


def test_ragged_rows_with_lse_go_to_trtllm_gen_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library refuses LSE of ragged rows; without LSE they stay packed."""
    libraries = install(monkeypatch)
    check(TRTLLM_MLA, latent(RAGGED, "verify", lse=True))
    check(TRTLLM_MLA, latent(RAGGED, "verify"))
    tokens, packed = libraries.flashinfer.called(PATH)
    assert tuple(tokens["query"].shape[:2]) == (11, 1)
    assert tuple(packed["query"].shape[:2]) == (11, 8)
    assert packed["max_q_len"] == 5


@pytest.mark.parametrize(
    ("offer", "heads"),
    [(TRTLLM_MLA, 96), (TRTLLM_MLA, 256), (CUTEDSL_MLA, 256), (TOKENSPEED_MLA, 192)],
    ids=lambda item: item.kernel if isinstance(item, Offer) else str(item),
)
def test_head_counts_without_a_tile_are_refused(offer: Offer, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At build time."""
    install(monkeypatch)
    with pytest.raises(UnsupportedBatch, match=f"num_qo_heads of layer 0.*{heads}"):
        build(offer, make(replace(latent(ONE, "decode"), heads=(heads, 1))))


RAGGED_OFFERS = pytest.mark.parametrize(
    "offer", [TRTLLM_MLA_RAGGED, TOKENSPEED_MLA_RAGGED], ids=lambda offer: offer.kernel
)
DIMS = LayerSpec(layer_id=0, num_qo_heads=4, num_kv_heads=4, head_dim=192, v_head_dim=128, scale=0.09)


@RAGGED_OFFERS
@pytest.mark.parametrize("pads", [0, 3])
def test_ragged_prefill_is_right(offer: Offer, pads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty rows, pads, and LSE of whichever base the library has."""
    install(monkeypatch)
    lens = (30, 0, 1, 77)
    step = make_batch(lens, lens, layer=DIMS, page_size=64, dtype=torch.bfloat16, pad_tokens=pads)
    _, new = split_new(step)
    backend = build(offer, step)
    state = backend.plan(step.batch)
    out = torch.full((step.q.shape[0], 4, 128), float("nan"), dtype=torch.bfloat16)
    lse = torch.full(out.shape[:2], float("nan"))
    assert backend.forward(step.q, None, step.layer, state, out=out, lse=lse, new=new) is out
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, step.batch)
    assert relative_error(out, truth) <= BOUND
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-3, atol=1e-3)


@RAGGED_OFFERS
def test_ragged_prefill_of_nothing_launches_nothing(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokens, or pads alone."""
    libraries = install(monkeypatch)
    for pads in (0, 2):
        step = make_batch((0,), (0,), layer=DIMS, page_size=64, dtype=torch.bfloat16, pad_tokens=pads)
        backend = build(offer, step)
        empty = RaggedKV(k=step.q[:0, :, :192], v=step.q[:0, :, :128], kv_indptr=step.batch.qo_indptr)
        out = backend.forward(step.q, None, step.layer, backend.plan(step.batch), new=empty)
        assert tuple(out.shape) == (pads, 4, 128)
        assert not out.any()
    assert libraries.flashinfer.called("flashinfer.prefill:trtllm_ragged_attention_deepseek") == []
    assert libraries.tokenspeed.called("tokenspeed_mla:tokenspeed_mla_prefill") == []
