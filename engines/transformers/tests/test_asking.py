"""What is asked wrongly is refused at once, in the words it was asked in."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import backstamp_transformers
from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.discovery import discover
from backstamp.errors import BackstampError, BadInput
from backstamp.testing.dists import write_plugin
from backstamp_transformers.admission import served_for
from backstamp_transformers.errors import ImplementationConflict, KeyNotInstalled, NoKernelForModel, NotServed
from engines.transformers.tests.small_models import config_of, small_model

GPT2 = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=128)


class Fixed(Qwen3ForCausalLM):
    """A model with attention of its own making."""

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"backend": "fa33"}, "prefill attention backend 'fa33', asked for with argument backend"),
        (
            {"backend": "torch_native", "decode": "nope"},
            "^decode .*'nope', asked for with argument decode",
        ),
        ({"prefill": "fa3"}, "asked for with argument prefill: needs cuda"),
        ({"linear": "torch_native"}, "^argument linear: needs a model with linear.* Leave these arguments out"),
        ({"backend": 5}, "^argument backend: needs a key, got 5"),
        ({"backend": "torch_native", "prefill": ""}, "^argument prefill: .*Leave the argument out"),
    ],
    ids=["both", "half", "device", "linear", "number", "empty"],
)
def test_a_refusal_names_what_the_caller_typed(asked: dict[str, object], said: str) -> None:
    """Core calls a request by its flag; nobody typed one here."""
    with pytest.raises(BackstampError, match=said) as refused:
        backstamp_transformers.use(small_model("qwen3"), **asked)
    assert "--" not in str(refused.value)


def test_a_plan_names_what_the_caller_typed() -> None:
    """Each half under the argument that set it."""
    with backstamp_transformers.use(small_model("qwen3"), "torch_native", decode="flex_attention") as handle:
        settings = [handle.plan.phase(phase).setting for phase in ("prefill", "decode")]
    assert settings == ["argument backend", "argument decode"]


def test_what_is_no_key_is_refused_before_a_model_is_there() -> None:
    """A name would only put the refusal off."""
    with pytest.raises(BadInput, match="argument decode: needs a key, got 5"):
        backstamp_transformers.implementation(decode=5)


@pytest.mark.parametrize("device", ["bogus", "", 5])
def test_a_device_nobody_knows_is_refused_at_once(device: object) -> None:
    """Not as torch's own RuntimeError, and not when a model is loaded."""
    with pytest.raises(NotServed, match=f"argument device: needs a torch device, .*got {device!r}"):
        backstamp_transformers.implementation("torch_native", device=device)


@pytest.mark.parametrize(("device", "got"), [("cuda:99", "needs a (cuda|rocm) device 99"), ("meta", "got 'meta'")])
def test_a_device_that_is_not_here_is_refused_before_weights_load(device: str, got: str) -> None:
    """A plan for this machine's CPU would say nothing of it."""
    name = backstamp_transformers.implementation("torch_native", device=device)
    with pytest.raises(NotServed, match=f"model qwen3 on {device}.*{got}") as refused:
        AutoModelForCausalLM.from_config(config_of("qwen3"), attn_implementation=name)
    assert "--" not in str(refused.value)


def test_modules_that_attend_in_their_own_way_are_refused_before_weights_load() -> None:
    """GPT-2's modules do not say what ours read of them."""
    got = r"model gpt2, layer 0: needs an attention module with layer_idx and num_key_value_groups"
    name = backstamp_transformers.implementation("torch_native")
    with torch.device("meta"), pytest.raises(NotServed, match=got):
        AutoModelForCausalLM.from_config(GPT2, attn_implementation=name)
    with pytest.raises(NotServed, match=got):
        backstamp_transformers.use(GPT2LMHeadModel(GPT2), "torch_native")


def test_a_model_that_calls_no_attention_function_is_refused_before_its_modules_are_made() -> None:
    """Transformers would warn and run the model's own attention."""
    got = "needs a model that calls attention through Transformers' AttentionInterface, got Fixed"
    with pytest.raises(NotServed, match=got):
        backstamp_transformers.use(Fixed(config_of("qwen3")), "torch_native")
    falcon = AutoConfig.for_model("falcon", num_hidden_layers=1, hidden_size=64, num_attention_heads=4)
    name = backstamp_transformers.implementation("torch_native")
    with torch.device("meta"), pytest.raises(NotServed, match="AttentionInterface, got FalconForCausalLM"):
        AutoModelForCausalLM.from_config(falcon, attn_implementation=name)


def test_modules_of_other_heads_than_the_configs_are_refused_before_weights_load() -> None:
    """JetMoe's experts share KV heads in a way its config does not say."""
    config = AutoConfig.for_model("jetmoe", num_hidden_layers=1, hidden_size=64, num_key_value_heads=2, kv_channels=16)
    name = backstamp_transformers.implementation("torch_native")
    with torch.device("meta"), pytest.raises(NotServed, match="query heads a KV head, as the config says"):
        AutoModelForCausalLM.from_config(config, attn_implementation=name)


class OtherNet(Qwen3NextGatedDeltaNet):
    """A gated delta net of a module that has no rule of Transformers'."""


@pytest.mark.parametrize("kind", ["none", "other"])
def test_a_linear_layer_of_another_rule_is_refused_by_use(kind: str) -> None:
    """Not at its first step."""
    model = small_model("qwen3_next")
    net = torch.nn.Identity() if kind == "none" else OtherNet(model.config, 0)
    model.model.layers[0].linear_attn = net
    with pytest.raises(NotServed, match="layer 0: needs a gated delta net"):
        backstamp_transformers.use(model, "torch_native")


def test_a_composite_model_without_its_language_model_is_refused() -> None:
    """Nothing in it is ours to serve."""
    config = LlavaConfig(text_config=config_of("llama").to_dict(), vision_config=CLIPVisionConfig(num_hidden_layers=1))
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)
    model.model.language_model = torch.nn.Identity()
    with pytest.raises(NotServed, match="model llava: needs a language model in it, got none"):
        backstamp_transformers.use(model, "torch_native")


def test_a_part_that_outlives_the_model_it_was_served_with_is_refused() -> None:
    """Its layers were that model's."""
    model = small_model("qwen3")
    model.set_attn_implementation(backstamp_transformers.implementation("torch_native"))
    part = model.model
    del model
    gc.collect()
    with torch.inference_mode(), pytest.raises(NotServed, match="model qwen3: needs the model in memory, got none"):
        part(torch.ones(1, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("model_type", "changes", "got"),
    [
        ("whisper", {"num_hidden_layers": 2}, "got cross-attention layers"),
        ("qwen3", {"dtype": torch.float64}, "needs one of torch.float32, .*got torch.float64"),
    ],
)
def test_facts_no_kernel_is_called_for_are_refused_before_weights_load(
    model_type: str, changes: dict[str, object], got: str
) -> None:
    """Attention to another model's tokens, and a dtype that no kernel is asked for."""
    config = AutoConfig.for_model(model_type, **changes)
    name = backstamp_transformers.implementation("torch_native")
    with torch.device("meta"), pytest.raises(NotServed, match=got):
        AutoModelForCausalLM.from_config(config, attn_implementation=name)


def plugins(folder: Path, *names: str) -> Catalogue:
    """A catalogue of plugins that are there, and of no other; each declares the kernel `alone`."""
    for name in names:
        write_plugin(folder, name, kernel="alone", carries_json=True)
    return build_catalogue(discover([str(folder)]))


@pytest.mark.parametrize(
    ("key", "names", "error", "builtin"),
    [
        ("fa3", ("one",), KeyNotInstalled, ImportError),
        (None, (), NoKernelForModel, ValueError),
        ("alone", ("one", "two"), ImplementationConflict, ValueError),
    ],
    ids=["not-installed", "no-kernel", "conflict"],
)
def test_a_lookup_error_of_the_catalogue_is_one_that_transformers_lets_through(
    key: str | None, names: tuple[str, ...], error: type[Exception], builtin: type[Exception], tmp_path: Path
) -> None:
    """Whoever loads models catches `ValueError` and `ImportError`."""
    with pytest.raises(error) as refused:
        backstamp_transformers.use(small_model("qwen3"), key, catalogue=plugins(tmp_path, *names))
    assert isinstance(refused.value, builtin)


def test_a_refused_request_leaves_no_name_behind() -> None:
    """Neither with Transformers nor with us."""
    before = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    with pytest.raises(BackstampError):
        backstamp_transformers.use(small_model("qwen3"), "fa3")
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == before


@pytest.mark.parametrize(("dtype", "planned"), [(torch.bfloat16, "bf16"), (None, "fp32")])
def test_a_model_is_resolved_in_the_dtype_of_its_config(dtype: torch.dtype | None, planned: str) -> None:
    """Or in torch's default, where the config has none."""
    model = Qwen3ForCausalLM(config_of("qwen3", dtype=dtype))
    model.set_attn_implementation(backstamp_transformers.implementation("torch_native"))
    assert served_for(model.config).now.plan.dtype == planned


def test_a_model_is_resolved_once_and_its_plan_told(caplog: pytest.LogCaptureFixture) -> None:
    """Its inner model shares its config and comes second; the plan's warnings are told too."""
    name = backstamp_transformers.implementation("torch_native")
    config = config_of("qwen3_next", dtype=torch.bfloat16)
    with torch.device("meta"), caplog.at_level(logging.INFO, "backstamp_transformers"):
        AutoModelForCausalLM.from_config(config, attn_implementation=name)
    assert len([text for text in caplog.messages if text.startswith("Backstamp plan for qwen3_next")]) == 1
    assert any(text.startswith("Backstamp plan, slow_path: ") for text in caplog.messages)
