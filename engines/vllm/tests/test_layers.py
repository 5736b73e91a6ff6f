"""One layer without an engine around it: what a kernel is told of it, what is refused, and which kernel is its own."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from backstamp.attention import LayerSpec
from backstamp.errors import BuiltMismatch, Refused
from backstamp_vllm.builder import _spec_of
from backstamp_vllm.impl import BackstampImpl
from backstamp_vllm.living import Living
from backstamp_vllm.names import offer_names
from backstamp_vllm.runner import halves_of, offers_of_name, runner_of


def layer_of(impl: BackstampImpl, **changes: object) -> SimpleNamespace:
    """A layer of vLLM's as it holds our side of it."""
    said = {"impl": impl, "head_size": 32, "head_size_v": 24, "kv_sharing_target_layer_name": None}
    return SimpleNamespace(**{**said, **changes})


def test_a_kernel_is_told_all_that_vllm_says_of_a_layer(config: VllmConfig) -> None:
    """Heads, dims, scale, window, softcap, sinks and whose cache it reads; what is dropped is attended without."""
    sinks = torch.arange(4.0)
    with set_current_vllm_config(config):
        impl = BackstampImpl(4, 32, 0.25, 2, None, 8, "auto", 30.0, "decoder", None, sinks)
        plain = BackstampImpl(4, 32, 0.25)
    layer = layer_of(impl, kv_sharing_target_layer_name="model.layers.1.attn")
    assert _spec_of("model.layers.3.attn", layer) == LayerSpec(
        layer_id=3,
        num_qo_heads=4,
        num_kv_heads=2,
        head_dim=32,
        v_head_dim=24,
        scale=0.25,
        # vLLM's eight tokens are the token itself and seven before it
        window_left=7,
        softcap=30.0,
        sinks=sinks,
        shares_kv_of=1,
    )
    told = _spec_of("model.layers.0.attn", layer_of(plain))
    assert (told.num_kv_heads, told.window_left, told.softcap) == (4, -1, 0.0)
    assert told.sinks is told.shares_kv_of is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"attn_type": "encoder_only"}, "needs decoder layers, got encoder_only"),
        ({"alibi_slopes": [0.5] * 4}, "needs layers without slopes, got alibi slopes"),
    ],
    ids=["encoder", "alibi"],
)
def test_a_layer_that_its_models_config_does_not_tell_of_is_refused(
    asked: dict[str, object], said: str, config: VllmConfig
) -> None:
    """The plan was made without it."""
    with set_current_vllm_config(config), pytest.raises(Refused, match=said):
        BackstampImpl(4, 32, 0.25, **asked)


def test_a_run_that_measures_memory_answers_zeros(config: VllmConfig) -> None:
    """vLLM hands it no step, and a buffer with whatever was there."""
    with set_current_vllm_config(config):
        impl = BackstampImpl(4, 32, 0.25)
    q, out = torch.ones(3, 4, 32), torch.full((3, 4, 32), float("nan"))
    assert impl.forward(None, q, q, q, torch.empty(0), None, out) is out
    assert not out.any()


def test_layers_are_of_the_plan_and_one_page_size_is_built_once(
    config: VllmConfig, log: pytest.LogCaptureFixture
) -> None:
    """A layer that the model's config does not have runs nothing; what is built says so in the log."""
    runner = runner_of(config)
    spec = LayerSpec(layer_id=0, num_qo_heads=4, num_kv_heads=2, head_dim=32, v_head_dim=32, scale=0.25)
    backends = runner.build((spec,), 16, "cpu")
    assert runner.build((spec,), 16, "cpu") is backends
    assert runner.build((spec,), 32, "cpu") is not backends
    assert [record.getMessage().rpartition(", ")[2] for record in log.records if "built" in record.getMessage()] == [
        "pages of 16",
        "pages of 32",
    ]
    halves = halves_of(backends, 2)
    assert halves.prefill is halves.decode
    with pytest.raises(BuiltMismatch, match="layer 3 of qwen3: needs a layer of the plan, got one its config does not"):
        halves_of(backends, 3)
    with pytest.raises(BuiltMismatch, match="layer 0 of qwen3: needs a layer of the plan, got one its config does not"):
        runner.linear_backend("decode", 0)


def test_a_name_stands_for_the_rows_of_its_plan(config: VllmConfig) -> None:
    """Before there is a plan, for those its key has on this host; CUSTOM, which has no key, for every row here."""
    gc.collect()
    here = offers_of_name("TORCH_NATIVE")
    assert {offer.kernel for offer in here} == {"torch_native"}
    assert {"torch_native", "flex_attention"} <= {offer.kernel for offer in offers_of_name("CUSTOM")}
    assert offers_of_name("FA3") == ()
    # its rows for GPUs are no answer here
    assert {offer.device for offer in offers_of_name("BACKSTAMP_FLEX_ATTENTION")} == {"cpu"}
    runner = runner_of(config)
    assert offers_of_name("TORCH_NATIVE") == runner.offers
    assert len(runner.offers) < len(here)


class Told:
    """A runner that counts what it says."""

    name = "TOLD"

    def __init__(self, config: VllmConfig) -> None:
        self.config, self.times = config, 0

    def tell_plan(self) -> None:
        """Count."""
        self.times += 1


def test_a_config_has_one_runner_which_its_layers_keep_alive(config: VllmConfig) -> None:
    """Its plan is told once; a config that nobody serves any more leaves nothing behind."""
    living = Living(Told)
    assert living.named("TOLD") is None
    runner = living.of(config)
    assert living.of(config) is runner
    assert living.named("TOLD") is runner
    assert living.named("ANOTHER") is None
    assert runner.times == 1
    del runner
    gc.collect()
    assert living.named("TOLD") is None


offer_names()
