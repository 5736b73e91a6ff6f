"""The declarations: what the rows say, the factories answer; what no row says is refused by name."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from backstamp.attention import KVIndex, LayerSpec, PagedKV, TreeMask
from backstamp.declarations import Offer
from backstamp.errors import UnsupportedBatch
from backstamp.testing.batches import MadeStep, make_batch
from backstamp_trtllm.plugin import (
    CUTEDSL_MLA,
    FMHA_V2,
    TOKENSPEED_MLA,
    TRTLLM_MHA,
    TRTLLM_MHA_FP8,
    TRTLLM_MLA,
    XQA,
    XQA_FP8,
    backstamp_aliases,
    backstamp_offers,
)
from tests.announced import catch_announcements
from tests.plugins.trtllm.cases import Case, build, install, make

OFFERS = backstamp_offers()
KERNELS = (TRTLLM_MHA, XQA, FMHA_V2, TRTLLM_MLA, CUTEDSL_MLA, TOKENSPEED_MLA)
BY_KERNEL = pytest.mark.parametrize("offer", KERNELS, ids=lambda offer: offer.kernel)
LACKING = [
    pytest.param(offer, feature, id=f"{offer.kernel}-{feature}")
    for offer in KERNELS
    for feature in ("head_dim", "window", "softcap", "sinks", "alibi", "cross")
    if feature not in offer.features
]


def named(offer: Offer) -> str:
    """A row, for a test's name."""
    return f"{offer.kernel}-{'-'.join(sorted(offer.kv_dtypes | offer.kv_forms))}"


def step_for(offer: Offer, **changes: Any) -> MadeStep:
    """A step of one token a row in a phase the offer serves."""
    phase = "decode" if "decode" in offer.phases else "prefill"
    return make(Case(((1, 9), (1, 40)), phase=phase, page_size=64, heads=(8, 2), mla=offer.family == "mla", **changes))


def test_declaring_imports_neither_torch_nor_a_library() -> None:
    """Any machine can ask what the plugin offers."""
    libraries = "{'torch', 'flashinfer', 'tokenspeed_mla'}"
    code = f"import sys, backstamp_trtllm.plugin; sys.exit(bool({libraries} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("offer", OFFERS, ids=named)
def test_the_factory_is_there_and_answers_the_declared_name(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Construction compares the built name with the declared one."""
    install(monkeypatch)
    dims = offer.head_dims[0] if isinstance(offer.head_dims[0], tuple) else (offer.head_dims[0],) * 2
    layer = LayerSpec(layer_id=0, num_qo_heads=4, num_kv_heads=1, head_dim=dims[0], v_head_dim=dims[1], scale=1.0)  # type: ignore[arg-type]
    kv_dtype = min(offer.kv_dtypes)
    step = MadeStep(
        q=torch.empty(0, 4, 1, dtype=torch.bfloat16),
        batch=make(Case(((1, 1),), page_size=offer.page_sizes.preferred)).batch,
        kv=PagedKV(k=torch.empty(0), v=None),
        layer=layer,
        pages=(),
    )
    assert build(offer, step, kv_dtype=kv_dtype) is not None


def test_only_the_kernels_own_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer's kernels build where tokenspeed-mla is not installed, and the reverse."""
    install(monkeypatch)
    for missing, offers in (("tokenspeed_mla", [XQA, TRTLLM_MLA, CUTEDSL_MLA]), ("flashinfer", [TOKENSPEED_MLA])):
        with monkeypatch.context() as without:
            for name in [name for name in sys.modules if name.split(".")[0] in (missing, "backstamp_trtllm")]:
                without.delitem(sys.modules, name)
            without.setitem(sys.modules, missing, None)
            for offer in offers:
                assert build(offer, step_for(offer)) is not None


def test_the_aliases_lead_to_the_kernels_that_run() -> None:
    """A kernel that serves less than its key is followed by those that serve the rest."""
    assert {alias.key: alias.kernels for alias in backstamp_aliases()} == {
        "trtllm_mha": ("trtllm_mha", "xqa", "fmha_v2"),
        "cutedsl_mla": ("cutedsl_mla", "trtllm_mla"),
    }


def test_every_library_is_named_with_a_floor_and_a_ceiling() -> None:
    """Signatures were read from one version."""
    for offer in OFFERS:
        assert offer.requires[0].startswith(("flashinfer-python>=0.7.4,<", "tokenspeed-mla>=2.0.4,<"))


def test_no_row_declares_fp8_keys_on_sm90() -> None:
    """Its kernel multiplies slots nobody wrote."""
    assert [offer.kernel for offer in OFFERS if "e4m3fn" in offer.kv_dtypes and "9.0" in offer.archs] == []
    assert {offer.kernel for offer in OFFERS if "e4m3fn" in offer.kv_dtypes} == {TRTLLM_MHA_FP8.kernel, XQA_FP8.kernel}


@BY_KERNEL
@pytest.mark.parametrize(
    ("changes", "field"),
    [({"dtype": "fp32"}, "dtype"), ({"kv_dtype": "e5m2"}, "kv_dtype"), ({"page_size": 48}, "page_size"),
     ({"layout": "fp8_ds_mla"}, "layout")],
    ids=["dtype", "kv_dtype", "page_size", "layout"],
)  # fmt: skip
def test_a_build_outside_the_row_is_refused(
    offer: Offer, changes: dict[str, object], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is allocated."""
    install(monkeypatch)
    with pytest.raises(UnsupportedBatch, match=field):
        build(offer, step_for(offer), **changes)


@pytest.mark.parametrize(("offer", "feature"), LACKING)
def test_a_layer_outside_the_row_is_refused(offer: Offer, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window, softcap or sink the row lacks is named, never dropped."""
    install(monkeypatch)
    step = step_for(offer)
    changes: dict[str, Any] = {
        "head_dim": {"head_dim": 80},
        "window": {"window_left": 3},
        "softcap": {"softcap": 9.0},
        "sinks": {"sinks": torch.zeros(8)},
        "alibi": {"alibi": torch.zeros(8)},
        "cross": {"attn_type": "cross"},
    }[feature]
    layer = replace(step.layer, **changes)
    with pytest.raises(UnsupportedBatch, match=feature):
        build(offer, replace(step, layer=layer))
    backend = build(offer, step)
    with pytest.raises(UnsupportedBatch, match=feature):
        backend.forward(step.q, step.kv, layer, backend.plan(step.batch))


@BY_KERNEL
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("phase", lambda batch: {"phase": "decode" if batch.phase == "prefill" else "none"}),
        ("causal", lambda batch: {"causal": torch.ones(2, dtype=torch.int32)}),
        ("kv_starts", lambda batch: {"kv_starts": torch.zeros(2, dtype=torch.int32)}),
        ("page_size", lambda batch: {"index": replace(batch.index, page_size=16)}),
        ("index", lambda batch: {"index": KVIndex(page_size=64, kv_indptr=torch.zeros(3, dtype=torch.int32),
                                                  kv_indices=torch.zeros(2, dtype=torch.int32))}),
        ("max_kv_len", lambda batch: {"max_kv_len": 1 << 20}),
        ("kv_lens", lambda batch: {"kv_lens": batch.kv_lens.long()}),
        ("tree", lambda batch: {"tree": TreeMask(kind="qlen", buffer=torch.ones(2, 1, 1, dtype=torch.bool))}),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)  # fmt: skip
def test_a_batch_outside_the_row_is_refused_at_plan(
    offer: Offer, field: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each names its field; only XQA reads trees."""
    install(monkeypatch)
    step = step_for(offer)
    backend = build(offer, step)
    batch = replace(step.batch, **change(step.batch))
    if field == "tree" and offer is XQA:
        backend.plan(batch)
        return
    with pytest.raises(UnsupportedBatch, match=field):
        backend.plan(batch)


@BY_KERNEL
def test_tensors_outside_the_row_are_refused_before_the_launch(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query dtype and shape, cache dtype, scales, ragged keys and selections."""
    libraries = install(monkeypatch)
    step = step_for(offer)
    backend = build(offer, step)
    state = backend.plan(step.batch)
    indices = torch.zeros(2, 4, dtype=torch.int32)
    for q, kv, more, field in (
        (step.q.half(), step.kv, {}, "q"),
        (step.q[:1], step.kv, {}, "q"),
        (step.q, replace(step.kv, k=step.kv.k.float()), {}, "kv.k"),
        (step.q, replace(step.kv, k_scale=0.5), {}, "kv.k_scale"),
        (step.q, None, {}, "kv"),
        (step.q, step.kv, {"indices": indices}, "indices"),
    ):
        with pytest.raises(UnsupportedBatch, match=field):
            backend.forward(q, kv, step.layer, state, **more)
    assert [call for call in libraries.flashinfer.calls if "utils" not in call.path] == []
    assert libraries.tokenspeed.calls == []


def test_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object was built for one device."""
    install(monkeypatch)
    step = step_for(XQA)
    backend = build(XQA, step)
    with pytest.raises(UnsupportedBatch, match="device"):
        backend.plan(replace(step.batch, kv_lens=step.batch.kv_lens.to("meta")))


def test_a_first_launch_of_each_variant_is_announced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module is compiled for is said before the compile, and never again."""
    install(monkeypatch)
    told = catch_announcements(monkeypatch)
    plain, drafts = step_for(XQA), make(Case(((4, 9),), phase="verify", page_size=64, heads=(8, 2)))
    backend = build(XQA, plain)
    for step in (plain, plain, drafts, drafts):
        backend.forward(step.q, step.kv, step.layer, backend.plan(step.batch))
    assert [kernel for kernel, _ in told] == ["xqa"] * 3
    assert "page 64 head_dim 64 group 4 no window drafts 0" in told[0][1]
    assert told[1][1] == "tokens 1 draft words"
    assert "drafts 8" in told[2][1]


def test_capture_is_refused_where_no_graph_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """FMHA v2 lays out pages from host lengths."""
    install(monkeypatch)
    step = step_for(FMHA_V2)
    with pytest.raises(UnsupportedBatch, match="capture"):
        build(FMHA_V2, step).plan(step.batch, capture=True)


def test_a_page_table_of_wide_rows_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first columns of a wider table are read in place, as rows of the wider one."""
    libraries = install(monkeypatch)
    step = make_batch((1, 1), (9, 40), phase="decode", layer=make(Case(((1, 1),))).layer, dtype=torch.bfloat16)
    wide = torch.full((2, 16), -1, dtype=torch.int32)
    assert step.batch.index.page_table is not None
    width = step.batch.index.page_table.shape[1]
    wide[:, :width] = step.batch.index.page_table
    index = replace(step.batch.index, page_table=wide[:, :width])
    backend = build(XQA, step)
    backend.forward(step.q, step.kv, step.layer, backend.plan(replace(step.batch, index=index)))
    (call,) = libraries.flashinfer.called("flashinfer.decode:xqa_batch_decode_with_kv_cache")
    assert call["block_tables"].data_ptr() == wide.data_ptr()
    assert tuple(call["block_tables"].shape) == (2, 16)
