"""`attn_implementation=`: the model is resolved before its weights load, under a name that says nothing."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3ForCausalLM

import backstamp
import backstamp_transformers
from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.declarations import Offer
from backstamp.discovery import discover
from backstamp.errors import BackstampError, FactoryImportFailed, PluginFailed, Refused
from backstamp.hookspecs import hookimpl
from backstamp.testing.dists import write_plugin
from backstamp_cpu.plugin import NATIVE_GDN
from backstamp_transformers import engine_facts
from backstamp_transformers.admission import served_for
from backstamp_transformers.engine_facts import TESTED, check_release
from backstamp_transformers.errors import NotServed, UnknownImplementation, UntestedTransformers
from engines.transformers.tests.small_models import config_of, generate, padded_prompts, small_model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small Qwen3 on disk."""
    small_model("qwen3").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def weightless(saved: Path) -> Path:
    """The same with weights nobody can read: whatever is refused here is refused before they load."""
    (saved / "model.safetensors").write_bytes(b"no weights")
    return saved


def broken_catalogue(folder: Path) -> Catalogue:
    """What is installed, and a plugin whose module raises."""
    folder.mkdir()
    write_plugin(folder, "wreck", source="raise RuntimeError('boom')")
    return build_catalogue(discover([str(folder), *sys.path]))


def stamped(model: PreTrainedModel, name: str) -> set[str]:
    """The kernels a loaded model runs."""
    served = served_for(model.config)
    assert served.now.backends is not None
    return {built.backstamp_stamp.kernel for built in served.now.backends.objects.values()}


def test_a_model_loads_with_a_name_and_generates_as_in_eager(saved: Path) -> None:
    """`from_pretrained` takes the name, and the kernels are built at the first step."""
    wanted = generate(AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager"))
    name = backstamp_transformers.implementation(prefill="torch_native", decode="flex_attention")
    model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation=name)
    assert generate(model) == wanted
    assert stamped(model, name) == {"torch_native", "flex_attention"}


def test_no_name_contains_a_key() -> None:
    """A name with `flash` in it is taken for Transformers' own FlashAttention: ours say nothing."""
    name = backstamp_transformers.implementation(prefill="flashinfer", decode="flash_mla")
    assert name.startswith("backstamp_")
    assert name.removeprefix("backstamp_").isdigit()


def test_two_loaded_models_share_a_name_and_no_kernel(saved: Path) -> None:
    """One name serves many models; each has kernels of its own."""
    name = backstamp_transformers.implementation("torch_native")
    one = AutoModelForCausalLM.from_pretrained(saved, attn_implementation=name)
    other = AutoModelForCausalLM.from_pretrained(saved, attn_implementation=name)
    assert generate(one) == generate(other)
    assert served_for(one.config).now.backends is not served_for(other.config).now.backends


def test_a_model_that_moves_to_another_dtype_is_resolved_again(saved: Path) -> None:
    """The plan is of the dtype the model runs in, not of the one it was loaded in."""
    name = backstamp_transformers.implementation("torch_native")
    model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation=name)
    assert served_for(model.config).now.plan.dtype == "fp32"
    model.to(torch.bfloat16)
    generate(model)
    assert served_for(model.config).now.plan.dtype == "bf16"


def test_an_unknown_key_is_refused_before_weights_load(weightless: Path) -> None:
    """The error is a ValueError, as Transformers' own of an unknown implementation, and names what was asked."""
    name = backstamp_transformers.implementation("fa33")
    with pytest.raises(UnknownImplementation, match=r"'fa33'.*needs") as refused:
        AutoModelForCausalLM.from_pretrained(weightless, attn_implementation=name)
    assert isinstance(refused.value, ValueError)


def test_a_key_that_cannot_serve_here_is_refused_with_verdicts(weightless: Path) -> None:
    """A Hopper kernel on a CPU: the refusal carries each candidate's verdict."""
    name = backstamp_transformers.implementation("fa3", device="cpu")
    with pytest.raises(Refused, match="got cpu") as refused:
        AutoModelForCausalLM.from_pretrained(weightless, attn_implementation=name)
    assert isinstance(refused.value, ValueError)
    assert [verdict.kernel for verdict in refused.value.verdicts]
    assert not any(verdict.accepted for verdict in refused.value.verdicts)


@pytest.mark.parametrize(
    ("model_type", "changes", "got"),
    [
        ("deepseek_v3", {}, "got mla"),
        ("llama4_text", {}, "got chunks of"),
    ],
)
def test_attention_no_kernel_is_called_for_is_refused_at_the_config(
    model_type: str, changes: dict[str, object], got: str
) -> None:
    """Latents and chunks are refused when the model is made, not at its first step."""
    config = AutoConfig.for_model(model_type, num_hidden_layers=4, **changes)
    name = backstamp_transformers.implementation("torch_native")
    with torch.device("meta"), pytest.raises(NotServed, match=got):
        AutoModelForCausalLM.from_config(config, attn_implementation=name)


def test_a_plugin_that_is_broken_at_load_is_refused_with_its_cause(
    weightless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for a broken plugin's key raises an ImportError whose cause is the plugin's own."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    catalogue = broken_catalogue(tmp_path / "site")
    name = backstamp_transformers.implementation("wreck", catalogue=catalogue)
    with pytest.raises(PluginFailed, match="wreck") as refused:
        AutoModelForCausalLM.from_pretrained(weightless, attn_implementation=name)
    assert isinstance(refused.value, ImportError)
    assert "boom" in str(refused.value.__cause__)


@pytest.mark.parametrize(
    ("broken", "got"), [("plugin", "got RuntimeError: boom"), ("backend", "got ModuleNotFoundError")]
)
def test_a_plugin_that_breaks_where_its_factory_loads_is_refused_before_weights_load(
    broken: str, got: str, weightless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wheel declares a kernel as data, so nothing of it was imported before: it is, when a model is admitted."""
    site = tmp_path / "site"
    name = f"late_{broken}"
    source = "raise RuntimeError('boom')" if broken == "plugin" else None
    site.mkdir()
    write_plugin(site, name, source=source, carries_json=True)
    monkeypatch.syspath_prepend(str(site))
    key = backstamp_transformers.implementation(name, catalogue=build_catalogue(discover([str(site), *sys.path])))
    with pytest.raises(FactoryImportFailed, match=f"kernel '{name}' .*{got}") as refused:
        AutoModelForCausalLM.from_pretrained(weightless, attn_implementation=key)
    assert isinstance(refused.value, ImportError)
    assert refused.value.__cause__ is not None


def test_a_linear_kernel_that_breaks_where_its_factory_loads_is_refused_with_the_other_ones() -> None:
    """Both slots are looked at before any weight is there."""
    backstamp.register("late_linear", LateLinear())
    try:
        name = backstamp_transformers.implementation("torch_native", linear="late_linear")
        with torch.device("meta"), pytest.raises(FactoryImportFailed, match=r"'late_linear' .*no_such_module"):
            AutoModelForCausalLM.from_config(config_of("qwen3_next"), attn_implementation=name)
    finally:
        backstamp.unregister("late_linear")


class LateLinear:
    """`torch_native`'s delta rule, said to lie in a module that is not there."""

    @hookimpl
    def backstamp_offers(self) -> tuple[Offer, ...]:
        """`auto` never takes the lowest priority."""
        return (replace(NATIVE_GDN, kernel="late_linear", factory="no_such_module:build", priority=0),)


def test_a_name_nobody_was_given_is_refused(weightless: Path) -> None:
    """A name of ours that was released, or of another process, is not Transformers' to guess about."""
    name = backstamp_transformers.implementation("torch_native")
    with pytest.raises(NotServed, match="not in use"):
        AutoModelForCausalLM.from_pretrained(weightless, attn_implementation=name + "0000")


@pytest.mark.parametrize("version", ["5.23.1", "5.25.0", "6.0.0.dev0"])
def test_an_untested_release_is_refused(version: str) -> None:
    """An ImportError names the range and the release found."""
    with pytest.raises(UntestedTransformers, match=f"got {version}") as refused:
        check_release(version)
    assert str(TESTED) in str(refused.value)
    assert isinstance(refused.value, ImportError)


def test_both_calls_look_at_the_release_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untested release is refused by `use` and by `implementation`, before anything is registered."""
    monkeypatch.setattr(engine_facts, "TESTED", SpecifierSet("<5"))
    model = small_model("qwen3")
    with pytest.raises(UntestedTransformers):
        backstamp_transformers.use(model, "torch_native")
    with pytest.raises(UntestedTransformers):
        backstamp_transformers.implementation("torch_native")


def test_a_refused_use_leaves_the_model_as_it_was() -> None:
    """After a refusal the model still runs what it ran before."""
    model = small_model("qwen3")
    wanted = generate(model)
    with pytest.raises(BackstampError):
        backstamp_transformers.use(model, "fa3")
    assert model.config._attn_implementation == "eager"
    assert generate(model) == wanted


def test_two_models_of_one_config_object_are_refused() -> None:
    """The implementation's name lies on the config: a second model of it would run the first one's kernels."""
    config = config_of("qwen3")
    one, other = Qwen3ForCausalLM(config), Qwen3ForCausalLM(config)
    apart = Qwen3ForCausalLM(copy.deepcopy(config))
    with (
        backstamp_transformers.use(one, "torch_native"),
        backstamp_transformers.use(apart, "torch_native"),
        pytest.raises(NotServed, match="config of its own"),
    ):
        backstamp_transformers.use(other, "torch_native")
    backstamp_transformers.use(other, "torch_native").release()


def test_what_is_no_model_is_refused() -> None:
    """`use` takes a model of Transformers."""
    with pytest.raises(NotServed, match="needs a PreTrainedModel, got Linear"):
        backstamp_transformers.use(torch.nn.Linear(2, 2))


def test_a_config_set_by_hand_is_refused() -> None:
    """A name put on a config without a check of Transformers' has no kernels behind it."""
    model = small_model("qwen3")
    model.config._attn_implementation_internal = backstamp_transformers.implementation("torch_native")
    with pytest.raises(NotServed, match="a config set by hand"):
        generate(model, padded_prompts(rows=1))


def test_a_config_set_by_hand_to_another_name_is_refused(saved: Path) -> None:
    """A model keeps the kernels it was resolved for: another name on its config is not a request."""
    name = backstamp_transformers.implementation("torch_native")
    model = AutoModelForCausalLM.from_pretrained(saved, attn_implementation=name)
    model.config._attn_implementation_internal = backstamp_transformers.implementation("flex_attention")
    with pytest.raises(NotServed, match="a config set by hand"):
        generate(model, padded_prompts(rows=1))
