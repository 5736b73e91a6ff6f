"""What vLLM is told without serving: names, capability answers, refusals of a config, and a step's tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from backstamp.declarations import Offer, PageSizes
from backstamp.errors import NotInstalled, UnknownKey
from backstamp.testing.dists import cpu_offer
from backstamp_vllm import backend
from backstamp_vllm.facts import check_vllm
from backstamp_vllm.impl import BackstampImpl, _write_rows
from backstamp_vllm.names import catalogue_here, offer_names
from backstamp_vllm.runner import runner_of
from backstamp_vllm.step import batch_of


def test_every_key_is_a_name_and_vllms_own_names_stay_its_own() -> None:
    """A key whose name vLLM has gets a prefix; the backend behind vLLM's name is vLLM's."""
    offer_names()
    members = AttentionBackendEnum.__members__
    for key in catalogue_here().keys("attention"):
        name = key.upper() if members[key.upper()].get_path().startswith("backstamp") else f"BACKSTAMP_{key.upper()}"
        assert members[name].get_path() == f"backstamp_vllm.offered.{name}"
        assert members[name].get_class().get_name() == name
    assert members["FLEX_ATTENTION"].get_path().startswith("vllm.")
    assert not members["CPU_ATTN"].is_overridden()


ROW = replace(cpu_offer("fake", "fake"), head_dims=(64, 128), dtypes=frozenset({"fp32"}))


@pytest.mark.parametrize(
    ("rows", "answers"),
    [
        ((ROW,), {"window": False, "sinks": False, "fp32": True, "bf16": False, "64": True, "32": False, "same": True}),
        ((replace(ROW, features=frozenset({"window", "sinks"})),), {"window": True, "sinks": True}),
        ((replace(ROW, features=frozenset({"window"})), ROW), {"window": False}),
        ((replace(ROW, deterministic=True, alignment_tokens=1),), {"invariant": True}),
        ((ROW,), {"invariant": False}),
        ((replace(ROW, kv_dtypes=frozenset({"e4m3fn"})),), {"same": False}),
        ((), {"window": False, "fp32": False, "64": False, "same": False, "invariant": False}),
    ],
    ids=["plain", "features", "one-of-two", "deterministic", "not-deterministic", "fp8-only", "no-row"],
)
def test_capabilities_are_what_every_row_declares(
    rows: tuple[Offer, ...], answers: dict[str, bool], config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's questions, asked of rows: undeclared means no."""
    monkeypatch.setattr(backend, "offers_of_name", lambda name: rows)
    asked = backend.class_of("TORCH_NATIVE")
    with set_current_vllm_config(config):
        same = asked.supports_kv_cache_dtype("auto")
    found = {
        "window": asked.supports_sliding_window(),
        "sinks": asked.supports_sink(),
        "fp32": asked.supports_dtype(torch.float32),
        "bf16": asked.supports_dtype(torch.bfloat16),
        "64": asked.supports_head_size(64),
        "32": asked.supports_head_size(32),
        "same": same,
        "invariant": asked.supports_batch_invariance(),
    }
    assert {name: found[name] for name in answers} == answers
    assert not asked.is_mla()
    assert not asked.supports_attn_type("encoder_only")


@pytest.mark.parametrize(
    ("pages", "sizes"),
    [
        ((PageSizes(preferred=16, multiple_of=8),), [MultipleOf(8)]),
        ((PageSizes(preferred=64, exact=(32, 64)),), [32, 64]),
        ((PageSizes(preferred=16, multiple_of=8), PageSizes(preferred=16, multiple_of=12)), [MultipleOf(24)]),
        ((PageSizes(preferred=16, multiple_of=16), PageSizes(preferred=64, exact=(24, 64))), [64]),
    ],
    ids=["multiple", "exact", "two-multiples", "multiple-and-exact"],
)
def test_block_sizes_are_those_every_row_reads(
    pages: tuple[PageSizes, ...], sizes: list[int | MultipleOf], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cache serves both halves."""
    monkeypatch.setattr(backend, "offers_of_name", lambda name: tuple(replace(ROW, page_sizes=size) for size in pages))
    assert backend.class_of("TORCH_NATIVE").get_supported_kernel_block_sizes() == sizes


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_a_vllm_outside_the_tested_range_is_refused(version: str) -> None:
    """vLLM's attention contract changes between minor versions."""
    with pytest.raises(NotInstalled, match=rf"needs vllm >=0.32,<0.33, got {version}"):
        check_vllm(version)


def test_such_a_vllm_is_refused_where_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a module of ours reads what may have moved."""
    offer_names()
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    with pytest.raises(NotInstalled, match=r"backstamp-vllm: needs vllm >=0.32,<0.33, got 0.40.0"):
        AttentionBackendEnum["TORCH_NATIVE"].get_class()


def test_a_patch_of_the_tested_vllm_is_taken() -> None:
    """A patch release changes no contract."""
    check_vllm("0.32.4")
    check_vllm("0.32.1rc1+cpu")


def test_the_plan_is_of_vllms_own_config(config: VllmConfig) -> None:
    """A config that can be served has no reason against it, and its plan is kept for its layers."""
    with set_current_vllm_config(config):
        runner = runner_of(config)
        assert runner_of(config) is runner
        assert {row.kernel for row in runner.plan.running} == {"torch_native"}
        assert runner.plan.dtype == "fp32"


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"has_sliding_window": True, "has_sink": True}, []),
        ({"use_mla": True}, ["MLA not supported"]),
        ({"dtype": torch.float64}, ["dtype not supported"]),
        ({"use_adaptive_verification": True}, ["device-cpu query lens mismatch not supported"]),
    ],
    ids=["served", "window-and-sinks", "mla", "dtype", "lengths-of-the-device-alone"],
)
def test_where_there_is_a_plan_vllms_own_questions_are_answered(
    changes: dict[str, object], reasons: list[str], config: VllmConfig
) -> None:
    """vLLM on a GPU asks for every reason against a name."""
    asked = {
        "head_size": 32,
        "dtype": torch.float32,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "attn_type": "decoder",
        "device_capability": None,
        **dict.fromkeys(("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "use_per_head_quant_scales"), False),
    }
    offer_names()
    with set_current_vllm_config(config):
        found = backend.class_of("TORCH_NATIVE").validate_configuration(**{**asked, **changes})
    assert [reason.partition(",")[0] for reason in found] == reasons


def test_a_key_nobody_has_is_not_blamed_on_a_named_one(config: VllmConfig) -> None:
    """The plugin of the name is here; the other half asks for what no plugin has."""
    config.additional_config = {"backstamp": {"decode_attention_backend": "no_such_kernel"}}
    with pytest.raises(UnknownKey, match="no_such_kernel"):
        runner_of(config)


def test_a_cache_is_read_through_views() -> None:
    """vLLM's `[P, Hk, page, Dk + Dv]` in any order of memory: not a byte is copied."""
    impl = object.__new__(BackstampImpl)
    impl.head_size, impl._cache = 8, None
    for order in [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)]:
        inverse = [order.index(at) for at in range(4)]
        memory = torch.arange(5 * 2 * 4 * 16, dtype=torch.float32).view([(5, 2, 4, 16)[at] for at in order])
        cache = memory.permute(inverse)
        kv = impl._views(cache)
        assert kv.k.shape == kv.v.shape == (5, 4, 2, 8)
        assert kv.k.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
        assert torch.equal(kv.v[3, 1, 1], cache[3, 1, 1, 8:])
        assert impl._views(cache) is kv


def test_a_slot_of_padding_is_not_written() -> None:
    """vLLM pads slots with -1, which would be the last token of the last page."""
    k, v = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    key = torch.ones(4, 2, 8)
    _write_rows(key, 2 * key, k, v, torch.tensor([5, -1, 0]))
    assert k[1, 1].eq(1).all()
    assert v[0, 0].eq(2).all()
    assert k.count_nonzero() == v.count_nonzero() == 2 * 16


def test_a_step_is_vllms_own_tensors_with_its_decode_rows_first() -> None:
    """Two rows that decode and one prompt: nothing is copied, and the split is read from host lengths."""
    starts, lens = torch.tensor([0, 1, 2, 7], dtype=torch.int32), torch.tensor([9, 4, 5], dtype=torch.int32)
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=3,
        num_actual_tokens=7,
        max_query_len=5,
        max_seq_len=9,
        block_table_tensor=table,
        slot_mapping=torch.arange(7),
        seq_lens_cpu_upper_bound=lens,
    )
    batch = batch_of(step, 4)
    assert (batch.phase, batch.num_decode_rows, batch.num_decode_tokens, batch.decode_q_len) == ("prefill", 2, 2, 1)
    assert batch.index.page_table is not None
    assert batch.index.page_table.data_ptr() == table.data_ptr()
    assert batch.kv_lens.data_ptr() == lens.data_ptr()
    ones = torch.arange(4, dtype=torch.int32)
    decode = replace(step, query_start_loc=ones, query_start_loc_cpu=ones, num_actual_tokens=3, max_query_len=1)
    assert batch_of(decode, 4).phase == "decode"
