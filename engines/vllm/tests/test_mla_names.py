"""MLA prefill by name: vLLM's registry and selector, capability answers, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.mla.prefill import get_mla_prefill_backend
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from vllm.v1.attention.backends.mla.rocm_aiter_mla import AiterMLAImpl
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from backstamp.declarations import Offer
from backstamp.errors import NotInstalled, Refused
from backstamp.model import LayerFacts, ModelFacts, model_from_config
from backstamp_vllm import mla_prefill, mla_runner
from backstamp_vllm.mla_prefill import class_of
from backstamp_vllm.mla_runner import prefill_runner_of
from backstamp_vllm.names import catalogue_here, offer_names
from engines.vllm.tests.models import prefill_config
from engines.vllm.tests.test_offered import ROW
from tests.models import config as config_of


def test_every_key_is_a_name_of_mla_prefill_too() -> None:
    """A key whose name vLLM has gets a prefix; vLLM's own names stay its own, and CUSTOM is left to others."""
    offer_names()
    members = MLAPrefillBackendEnum.__members__
    for key in catalogue_here().keys("attention"):
        name = key.upper() if members[key.upper()].get_path().startswith("backstamp") else f"BACKSTAMP_{key.upper()}"
        assert members[name].get_path() == f"backstamp_vllm.offered_prefill.{name}"
        assert members[name].get_class().get_name() == name
    assert members["FLASHINFER"].get_path().startswith("vllm.")
    assert not members["CPU"].is_overridden()
    assert not members["CUSTOM"].is_overridden()


def test_such_a_name_survives_a_process_border() -> None:
    """Ours are pickled by name; where it arrives on the CPU, the platform's member answers for it."""
    offer_names()
    sent = pickle.dumps(MLAPrefillBackendEnum["TORCH_NATIVE"])
    assert b"was_asked_of_prefill" in sent
    assert b"was_asked" not in pickle.dumps(MLAPrefillBackendEnum["FLASHINFER"])
    try:
        assert pickle.loads(sent) is MLAPrefillBackendEnum["TORCH_NATIVE"]
        assert MLAPrefillBackendEnum.CPU.get_path() == "backstamp_vllm.offered_prefill.TORCH_NATIVE"
    finally:
        for member in (MLAPrefillBackendEnum.CPU, MLAPrefillBackendEnum.ZEN_CPU):
            member.clear_override()


def test_such_a_name_that_another_plugin_took_since_is_its_own() -> None:
    """Its config arrives as the other's: the platform's member stays."""
    offer_names()
    member = MLAPrefillBackendEnum["TORCH_NATIVE"]
    register_mla_prefill_backend(member, "another.plugin.Prefill")
    try:
        assert pickle.loads(pickle.dumps(member)) is member
        assert not MLAPrefillBackendEnum.CPU.is_overridden()
    finally:
        member.clear_override()


UNFOLDED = MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


@pytest.mark.parametrize(
    ("rows", "answers"),
    [
        ((replace(ROW, head_dims=((192, 128),)),), (True, False, True)),
        ((replace(ROW, head_dims=(128, 192)),), (True, False, False)),
        ((replace(ROW, head_dims=((192, 128),), dtypes=frozenset({"bf16"})),), (False, True, True)),
        ((), (False, False, False)),
    ],
    ids=["unlike-dims", "like-dims", "bf16", "no-row"],
)
def test_capabilities_are_what_the_row_declares(
    rows: tuple[Offer, ...], answers: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's questions, asked of rows: undeclared means no."""
    monkeypatch.setattr(mla_prefill, "prefill_offers", lambda name: rows)
    asked = class_of("TORCH_NATIVE")
    found = asked.supports_dtype(torch.float32), asked.supports_dtype(torch.bfloat16)
    assert (*found, asked.supports_mla_dimensions(UNFOLDED)) == answers


def test_the_selector_takes_a_name_of_ours(latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own selector: by the platform's member on the CPU, by the request elsewhere."""
    asked = class_of("TORCH_NATIVE")
    # the config was copied on its way, which is an arrival
    pickle.loads(pickle.dumps(latent_config.attention_config.mla_prefill_backend))
    assert get_mla_prefill_backend(latent_config) is asked
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with set_current_vllm_config(latent_config):
        assert get_mla_prefill_backend(latent_config) is asked


def test_the_selector_quotes_our_refusal(latent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM asks a name for its reasons, it is told all of ours."""
    offer_names()
    config = prefill_config(latent, "intel_amx")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with set_current_vllm_config(config), pytest.raises(ValueError, match=r"INTEL_AMX is not valid .* got fp32"):
        get_mla_prefill_backend(config)


def test_a_vllm_outside_the_tested_range_is_refused_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a name is looked up, before a module of ours reads what may have moved."""
    offer_names()
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    with pytest.raises(NotInstalled, match=r"backstamp-vllm: needs vllm >=0.32,<0.33, got 0.40.0"):
        MLAPrefillBackendEnum["TORCH_NATIVE"].get_class()


def test_the_plan_is_of_prefill_alone(latent_config: VllmConfig) -> None:
    """Decode over the latent cache is vLLM's: no kernel is chosen, built or stamped for it."""
    runner = prefill_runner_of(latent_config)
    assert prefill_runner_of(latent_config) is runner
    assert [(row.phase, row.kernel, row.source) for row in runner.plan.running] == [
        ("prefill", "torch_native", "operator")
    ]


def test_a_model_without_mla_is_refused(models: dict[str, Path]) -> None:
    """vLLM asks no such backend of it; whoever does is told."""
    offer_names()
    config = prefill_config(models["full"], "torch_native")
    with pytest.raises(Refused, match="needs MLA layers, all alike, got layers of family mha"):
        prefill_runner_of(config)


KIMI = model_from_config(config_of("kda"), "kimi", "fp32")


def changed(layers: Iterable[tuple[LayerFacts, ...]]) -> ModelFacts:
    """Kimi Linear with other layers."""
    return replace(KIMI, layers=tuple(layers))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (KIMI, None),
        (changed(mixers for mixers in KIMI.layers if mixers[0].family == "kda"), "got 0 kinds of MLA layers"),
        (
            changed(
                (replace(mixers[0], num_qo_heads=mixers[0].num_qo_heads + at),) for at, mixers in enumerate(KIMI.layers)
            ),
            "got 7 kinds of MLA layers",
        ),
        (
            changed(
                (replace(mixers[0], family="sparse_mla") if at % 4 == 0 else mixers[0],)
                for at, mixers in enumerate(KIMI.layers)
            ),
            "got layers of family sparse_mla",
        ),
    ],
    ids=["beside-kda", "none", "unlike", "beside-sparse"],
)
def test_one_plan_is_for_mla_layers_that_are_alike(
    model: ModelFacts, said: str | None, latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks one backend for all of them; recurrences beside them are vLLM's."""
    monkeypatch.setattr(mla_runner, "model_from_config", lambda *asked: model)
    if said is None:
        assert len(prefill_runner_of(latent_config).plan.phase("prefill").groups[0].layers) == 7
        return
    with pytest.raises(Refused, match=f"needs MLA layers, all alike, {said}"):
        prefill_runner_of(latent_config)


def test_a_row_without_lse_serves_whole_prompts_alone(latent_config: VllmConfig) -> None:
    """Parts of a prompt are merged by LSE."""
    runner = prefill_runner_of(latent_config)
    row = catalogue_here().row("attention", runner.plan.phase("prefill").groups[0])
    assert row is not None
    without = row._replace(offer=replace(row.offer, features=row.offer.features - {"lse"}))
    runner._check_row(without)
    runner.in_parts = True
    with pytest.raises(Refused, match="needs LSE, by which parts of a prompt are merged"):
        runner._check_row(without)


def test_parts_ask_for_a_row_without_the_causal_rule(
    latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came before a step's tokens is seen by all of them."""
    assert prefill_runner_of(latent_config)._model("torch_native").groups[0].facts.causal
    monkeypatch.setattr(latent_config.cache_config, "enable_prefix_caching", True)
    runner = type(prefill_runner_of(latent_config))(latent_config)
    assert runner.in_parts
    assert not runner._model("torch_native").groups[0].facts.causal


@pytest.mark.parametrize(
    ("kind", "by_itself"),
    [(AMXMLAImpl, None), (AiterMLAImpl, True), (AiterMLAImpl, False), (CPUMLAImpl, None), (TritonMLAImpl, None)],
    ids=["amx", "aiter-quantised", "aiter", "cpu", "triton"],
)
def test_an_mla_backend_that_prefills_by_itself_is_refused(
    kind: type, by_itself: bool | None, latent_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that no prompt would reach is no answer: for the layer, and as a reason for vLLM's selector."""
    layer = object.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    layer.impl = object.__new__(kind)
    if by_itself is not None:
        # what AITER's settles at construction: whether the cache is quantised, and the machine has the kernels
        layer.impl._fp8_prefill_enabled = by_itself
    monkeypatch.setitem(latent_config.compilation_config.static_forward_context, "layers.0.attn", layer)
    asked = class_of("TORCH_NATIVE")
    needed = r"needs an MLA backend around it that asks it for every prompt, in layers\.0\.attn, got "
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with set_current_vllm_config(latent_config):
        if by_itself or kind is AMXMLAImpl:
            with pytest.raises(Refused, match=needed + kind.__name__):
                asked(4, 0.1, 512, 32, 64, 48, latent_config)
            with pytest.raises(ValueError, match=needed + kind.__name__):
                get_mla_prefill_backend(latent_config)
        else:
            asked(4, 0.1, 512, 32, 64, 48, latent_config)
            assert get_mla_prefill_backend(latent_config) is asked
