"""`triton` in prefill over fla-core's recorded signatures: what it is handed, and numbers against float64."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from backstamp.errors import UnsupportedBatch
from backstamp.testing.linear_batches import linear_layer
from backstamp_linear_attn.backend import build_fla_prefill
from backstamp_linear_attn.plugin import PREFILL_GDN, PREFILL_KDA
from tests.linear_steps import PREFILL, compare, forward, reference, request_for, run, step
from tests.plugins.linear_attn import behave

# small heads: the states are carried in Triton's interpreter
OFFERS = {family: replace(of, head_dims=("any",)) for family, of in (("gdn", PREFILL_GDN), ("kda", PREFILL_KDA))}
FP16 = {"dtype": torch.float16}
BUILT = {"dtype": "fp16", "phases": ("prefill",)}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """fla-core as recorded."""
    return behave.fla_core(monkeypatch)


@pytest.mark.parametrize("order", ["vk", "kv"])
@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("of", [pytest.param(of, id=name) for name, of in PREFILL.items()])
def test_it_equals_the_recurrence(of, family, order):
    """Outputs and the pool; states of fresh rows and slots of others are NaN and stay out of it."""
    made = step("prefill", of, family=family, order=order, **FP16)
    wanted = reference(made)
    assert compare(made, run(build_fla_prefill, OFFERS[family], made, **BUILT), wanted) < 1e-3


def test_the_library_is_handed_log_gates_packed_states_and_offsets_of_both_kinds(library):
    """Its defaults are no norm, the order kv, and no final state."""
    made = step("prefill", PREFILL["pad-tokens"], family="kda", order="vk", **FP16)
    run(build_fla_prefill, OFFERS["kda"], made, **BUILT)
    (called,) = library.called(behave.CHUNK_KDA)
    assert called["q"].shape == (1, 9, 2, 16)
    assert called["v"].shape == (1, 9, 4, 32)
    assert torch.equal(called["g"][0], made.gates.g[:9])
    assert torch.equal(called["beta"][0], made.gates.beta[:9])
    assert called["initial_state"].shape == (2, 4, 32, 16)
    assert called["cu_seqlens"].tolist() == called["cu_seqlens_cpu"].tolist() == [0, 3, 9]
    given = [called[name] for name in ("state_v_first", "use_qk_l2norm_in_kernel", "output_final_state", "scale")]
    assert given == [True, True, True, made.layer.scale]
    assert library.called(behave.CHUNK_GDN) == []


def test_each_plan_has_offsets_of_its_own():
    """The library remembers what it derived from offsets by the identity of their tensors."""
    made = step("prefill", PREFILL["ragged"], **FP16)
    # of the width the library reads, so that nothing needs to be converted
    offsets = made.batch.qo_indptr.long()
    made = replace(made, batch=replace(made.batch, qo_indptr=offsets, qo_indptr_host=offsets.clone()))
    backend = build_fla_prefill(request_for(OFFERS["gdn"], made, **BUILT)).backend
    first = backend.plan(made.batch)
    kept = first.cu_seqlens.tolist()
    made.batch.qo_indptr.zero_()
    made.batch.qo_indptr_host.zero_()
    second = backend.plan(made.batch)
    assert first.cu_seqlens.tolist() == first.cu_seqlens_cpu.tolist() == kept
    assert second.cu_seqlens is not first.cu_seqlens


def test_bf16_states_are_gathered_to_fp32_and_rounded_once():
    """The library takes no others."""
    made = step("prefill", PREFILL["ragged"], state_dtype=torch.bfloat16, **FP16)
    wanted = reference(made)
    assert compare(made, run(build_fla_prefill, OFFERS["gdn"], made, **BUILT), wanted) < 4e-3


def test_a_strided_pool_and_output_are_used_where_they_lie():
    """Pages of other layers lie between the slots."""
    made = step("prefill", PREFILL["empty-and-pads"], **FP16)
    wanted = reference(made)
    wide = torch.full((made.pool.ssm.shape[0], 2, *made.pool.ssm.shape[1:]), float("nan"))
    wide[:, 1] = made.pool.ssm
    strided = replace(made, pool=replace(made.pool, ssm=wide[:, 1]))
    buffer = torch.full((made.v.shape[0], 2, *made.v.shape[1:]), float("nan"), dtype=torch.float16)
    backend = build_fla_prefill(request_for(OFFERS["gdn"], made, **BUILT)).backend
    out = forward(backend, strided, backend.plan(made.batch), out=buffer[:, 1])
    assert out.data_ptr() == buffer[:, 1].data_ptr()
    assert compare(strided, out, wanted) < 1e-3
    assert bool(wide[:, 0].isnan().all())
    assert bool(buffer[:, 0].isnan().all())


def test_a_layer_may_have_slots_of_its_own():
    """`forward`'s slots count, not the batch's."""
    made = step("prefill", {"q_lens": [3, 2]}, **FP16)
    other = replace(made, batch=replace(made.batch, slots=made.batch.slots.flip(0)))
    wanted = reference(other)
    backend = build_fla_prefill(request_for(OFFERS["gdn"], made, **BUILT)).backend
    out = forward(backend, made, backend.plan(made.batch), slots=made.batch.slots.flip(0))
    assert compare(made, out, wanted) < 1e-3


def test_no_tokens_call_nothing(library):
    """Outputs of pads are zero."""
    made = step("prefill", {"q_lens": [0, 0], "pad_tokens": 3}, **FP16)
    assert run(build_fla_prefill, OFFERS["gdn"], made, **BUILT).abs().max() == 0
    assert library.calls == []


CHANGES = [
    pytest.param({"qo_indptr_host": None}, "qo_indptr_host", id="no-host-offsets"),
    pytest.param({"phase": "decode"}, "phase", id="phase"),
    pytest.param({"num_tokens": 5000}, "num_rows and num_tokens", id="too-many-tokens"),
]


@pytest.mark.parametrize(("change", "field"), CHANGES)
def test_a_step_it_does_not_take_is_refused_at_plan(change, field):
    """Before any launch."""
    made = step("prefill", PREFILL["ragged"], **FP16)
    backend = build_fla_prefill(request_for(OFFERS["gdn"], made, **BUILT)).backend
    with pytest.raises(UnsupportedBatch) as caught:
        backend.plan(replace(made.batch, **change))
    assert caught.value.needed.startswith(field)


def test_capture_is_refused():
    """Chunks are counted on the host."""
    made = step("prefill", PREFILL["ragged"], **FP16)
    backend = build_fla_prefill(request_for(OFFERS["gdn"], made, **BUILT)).backend
    with pytest.raises(UnsupportedBatch, match="capture"):
        backend.plan(made.batch, capture=True)


BUILDS = [
    pytest.param({"dtype": "fp32"}, "dtype", id="dtype"),
    pytest.param({"layout": "other"}, "state layout", id="layout"),
    pytest.param({"layers": (linear_layer(2, 4, 48, 48),)}, "head_dim", id="head-dim"),
]


@pytest.mark.parametrize(("changes", "field"), BUILDS)
def test_a_build_it_does_not_declare_is_refused(changes, field):
    """The declared row's own dims."""
    made = step("prefill", PREFILL["ragged"], layer=linear_layer(2, 4, 64, 64), **FP16)
    with pytest.raises(UnsupportedBatch) as caught:
        build_fla_prefill(request_for(PREFILL_GDN, made, **{**BUILT, **changes}))
    assert caught.value.needed.startswith(field)


def test_a_package_that_would_run_in_its_place_is_refused(tmp_path, monkeypatch):
    """The stamp would say `triton` of another library's kernel."""
    (tmp_path / "flash_qla").mkdir()
    (tmp_path / "flash_qla" / "__init__.py").write_text("", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    request = request_for(OFFERS["gdn"], step("prefill", PREFILL["ragged"], **FP16), **BUILT)
    with pytest.raises(UnsupportedBatch, match="flash_qla, which fla-core would run in their place"):
        build_fla_prefill(request)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    assert build_fla_prefill(request).kernel == "triton"
    monkeypatch.delenv("FLA_FLASH_QLA")
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert build_fla_prefill(request).kernel == "triton"


@pytest.mark.parametrize("bound", [None, -5.0, -7.5])
def test_kimi_delta_attention_is_never_handed_to_another_package(bound, library):
    """fla-core hands a call to FlashKDA where the library may compute beta; here it never may."""
    made = step("prefill", PREFILL["ragged"], family="kda", lower_bound=bound, **FP16)
    wanted = reference(made)
    assert compare(made, run(build_fla_prefill, OFFERS["kda"], made, **BUILT), wanted) < 1e-3
    (called,) = library.called(behave.CHUNK_KDA)
    assert called["beta"].dtype == torch.float32
    assert "use_beta_sigmoid_in_kernel" not in called
    assert called.get("lower_bound") == bound
    assert called.get("safe_gate", False) is (bound == -5.0)


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_raw_gates_reach_the_library_as_they_are(family, library):
    """Written out in fp32, those of Kimi delta attention would cost more than the recurrence."""
    made = step("prefill", PREFILL["ragged"], family=family, **FP16)
    run(build_fla_prefill, OFFERS[family], made, **BUILT)
    (called,) = library.called(behave.CHUNK_KDA if family == "kda" else behave.CHUNK_GDN)
    assert {**called, **called["kwargs"]}["use_gate_in_kernel"] is True
    assert called["g"].data_ptr() == made.gates.a.data_ptr()


def test_an_output_nobody_gave_is_the_librarys_own(library):
    """A copy of it would be read and written once more."""
    made = step("prefill", PREFILL["ragged"], **FP16)
    given = []
    library.on(behave.CHUNK_GDN, lambda **of: given.append(behave.fla_chunk(**of)) or given[0])
    out = run(build_fla_prefill, OFFERS["gdn"], made, **BUILT)
    assert out.data_ptr() == given[0][0].data_ptr()


def test_every_kernel_of_a_call_compiles_inside_its_announcement(monkeypatch):
    """Those that carry states in and out are compiled on first use as the library's are."""
    module, notice, seen = import_module("backstamp_linear_attn.fla_prefill"), import_module("backstamp.jit_notice"), []

    @contextmanager
    def compiling(kernel, what):
        seen.append(f"{kernel}: {what}")
        yield
        seen.append("done")

    def noted(name):
        real = getattr(module, name)
        return lambda *arguments: seen.append(name) or real(*arguments)

    for name in ("load_states", "store_states"):
        monkeypatch.setattr(module, name, noted(name))
    monkeypatch.setattr(notice, "compiling", compiling)
    run(build_fla_prefill, OFFERS["gdn"], step("prefill", PREFILL["ragged"], **FP16), **BUILT)
    assert seen == ["triton: gdn prefill fp16 d16/32", "load_states", "store_states", "done"]
