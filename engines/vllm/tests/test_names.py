"""Which names there are, what becomes of one at a process border, and what vLLM's log says of what nobody reads."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator

import pytest
import vllm
from vllm.config import VllmConfig
from vllm.model_executor.custom_op import op_registry_oot
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp_vllm import names, offered, offered_prefill
from backstamp_vllm.names import is_ours, offer_names


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """What an arrival overrides is vLLM's again after."""
    offer_names()
    yield
    AttentionBackendEnum.CPU_ATTN.clear_override()
    register_backend(AttentionBackendEnum.CUSTOM, "backstamp_vllm.offered.CUSTOM")
    op_registry_oot.clear()


@pytest.fixture
def unoffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has offered nothing yet, where three keys are installed: two are one name, one is no name."""
    offers = [cpu_offer("one-two", "p"), cpu_offer("one_two", "p"), cpu_offer("three", "p")]
    monkeypatch.setattr(names, "_asked", {})
    monkeypatch.setattr(names, "_asked_of_prefill", {})
    monkeypatch.setattr(names, "FIRST_PARTY", ())
    monkeypatch.setattr(names, "catalogue_here", lambda: catalogue_of(fake_plugin("p", offers)))
    # a member once made stays one for good
    monkeypatch.setattr(names, "register_backend", lambda member, path: None)
    monkeypatch.setattr(names, "register_mla_prefill_backend", lambda member, path: None)


def test_a_name_survives_a_process_border() -> None:
    """vLLM's enum is pickled by value; ours by name, so that a process that knows no name yet can look it up."""
    assert b"was_asked" in pickle.dumps(AttentionBackendEnum["TORCH_NATIVE"])
    assert b"was_asked" not in pickle.dumps(AttentionBackendEnum["FLEX_ATTENTION"])


@pytest.mark.parametrize("cpu", [True, False])
def test_where_a_name_arrives_the_cpu_platform_answers_with_it(cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's CPU knows one backend; any other platform asks the name itself."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: cpu)
    member = AttentionBackendEnum["TORCH_NATIVE"]
    assert pickle.loads(pickle.dumps(member)) is member
    assert AttentionBackendEnum.CPU_ATTN.is_overridden() is cpu
    assert list(op_registry_oot) == ["QwenGatedDeltaNetAttention"]


@pytest.mark.parametrize("name", ["CUSTOM", "TORCH_NATIVE"])
def test_a_name_that_another_plugin_took_since_is_its_own(name: str) -> None:
    """Its config arrives as the other's: neither the platform's member nor a layer is replaced."""
    member = AttentionBackendEnum[name]
    assert is_ours(member)
    register_backend(member, "another.plugin.Backend")
    try:
        assert pickle.loads(pickle.dumps(member)) is member
        assert not is_ours(member)
        assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
        assert not op_registry_oot
    finally:
        member.clear_override()


def test_no_layer_of_an_untested_vllm_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused where the name is looked up, before more of it is read."""
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    pickle.loads(pickle.dumps(AttentionBackendEnum["TORCH_NATIVE"]))
    assert not op_registry_oot


@pytest.mark.usefixtures("unoffered")
def test_keys_that_would_share_a_name_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a better answer than the other."""
    made: list[str] = []
    monkeypatch.setattr(names, "_offer", lambda name, asked: made.append(name))
    monkeypatch.setattr(names, "_offer_prefill", lambda name, asked: None)
    AttentionBackendEnum.CUSTOM.clear_override()
    offer_names()
    assert made == ["THREE", "CUSTOM"]


@pytest.mark.usefixtures("unoffered")
def test_custom_is_left_to_who_has_it(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    """Another plugin was first: the log says so."""
    made: list[str] = []
    monkeypatch.setattr(names, "_offer", lambda name, asked: made.append(name))
    monkeypatch.setattr(names, "_offer_prefill", lambda name, asked: None)
    register_backend(AttentionBackendEnum.CUSTOM, "another.plugin.Backend")
    offer_names()
    assert made == ["THREE"]
    assert "Backstamp leaves CUSTOM to another.plugin.Backend" in log.text


@pytest.mark.usefixtures("unoffered")
def test_nothing_is_offered_where_no_request_could_arrive(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """In one process, vLLM's CPU would answer with its own backend in silence; elsewhere it is asked by name."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made: list[str] = []
    monkeypatch.setattr(names, "_offer", lambda name, asked: made.append(name))
    monkeypatch.setattr(names, "_offer_prefill", lambda name, asked: None)
    offer_names()
    assert not made
    assert "on the CPU it needs VLLM_ENABLE_V1_MULTIPROCESSING=1" in log.text
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    offer_names()
    assert "THREE" in made


@pytest.mark.parametrize("door", [offered, offered_prefill])
def test_what_is_no_name_is_no_backend(door: object) -> None:
    """Python asks a module for more than names."""
    with pytest.raises(AttributeError, match="no attribute 'torch_native'"):
        door.torch_native  # noqa: B018


ASKED = {"backstamp": {"decode_attention_backend": "torch_native"}}


@pytest.mark.parametrize(
    ("backend", "extra", "said"),
    [
        ("CPU_ATTN", ASKED, "got CPU_ATTN"),
        (None, ASKED, "got none"),
        ("TORCH_NATIVE", ASKED, ""),
        ("CUSTOM", ASKED, ""),
        ("CPU_ATTN", {"another": {}}, ""),
        ("CPU_ATTN", {}, ""),
    ],
    ids=["another", "none", "ours", "custom", "another-section", "no-section"],
)
def test_a_request_that_nobody_reads_is_told(
    backend: str | None, extra: object, said: str, config: VllmConfig, log: pytest.LogCaptureFixture
) -> None:
    """Once, where vLLM's engine logs its config; beside one of our names it is read."""
    offer_names()
    config.additional_config = extra
    config.attention_config.backend = None if backend is None else AttentionBackendEnum[backend]
    engine = logging.getLogger("vllm.v1.engine.core")
    engine.info("Initializing a V1 LLM engine (v%s) with config: %s", vllm.__version__, config)
    engine.info("%(no)s config", {"no": "another"})
    engine.info("no config")
    found = [record.getMessage() for record in log.records if record.name == "vllm.backstamp"]
    assert len(found) == bool(said)
    for text in found:
        assert "Backstamp is asked for {'decode_attention_backend': 'torch_native'} in --additional-config" in text
        assert text.endswith(said)


def test_of_an_untested_vllms_config_nothing_more_is_read(
    config: VllmConfig, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts with its own backend, wherever it holds its choice."""
    offer_names()
    config.additional_config = ASKED
    monkeypatch.setattr(vllm, "__version__", "0.40.0")
    monkeypatch.delattr(config, "attention_config")
    record = logging.LogRecord("vllm.v1.engine.core", logging.INFO, "", 0, "%s", (config,), None)
    assert logging.getLogger("vllm.v1.engine.core").filter(record)
    assert "Backstamp is asked" not in log.text
