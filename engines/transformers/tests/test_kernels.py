"""What is built for a model: kept for each dtype and device it runs in, let go when it runs something else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import backstamp_transformers
from backstamp_transformers.admission import served_for
from backstamp_transformers.errors import NotServed
from backstamp_transformers.kernels import Bounds
from backstamp_transformers.rows import Rows
from backstamp_transformers.served import Served, numbered
from backstamp_transformers.step import Rule, Step
from engines.transformers.tests.small_models import generate, padded_prompts, small_model

CPU = torch.device("cpu")
STEP = Bounds(1, 1, 1, 1)


def built(served: Served) -> object:
    """The kernel of the first layer's prefill."""
    return served.now.places["prefill", 0].backend


def test_a_layer_unlike_the_last_of_its_step_is_fitted_anew() -> None:
    """Layers of one forward that are alike are asked once; a longer cache, or another dtype, is asked about again."""
    with backstamp_transformers.use(small_model("llama"), "torch_native") as handle:
        served = handle.served
        step = Step(served, Rows([1], [4], [0], None), Rule(True, -1), CPU)
        spec = served.spec(0)
        q = torch.randn(1, spec.num_qo_heads, 1, spec.head_dim)
        fitted = []
        for length, dtype in ((8, torch.float32), (8, torch.float32), (9, torch.float32), (9, torch.bfloat16)):
            kv = torch.randn(1, spec.num_kv_heads, length, spec.head_dim, dtype=dtype)
            step.attend(q.to(dtype), kv, kv, 0)
            fitted.append(step.fitted)
        assert fitted[0] is fitted[1]
        assert [of[0][0] for of in fitted] == [8, 8, 9, 9]
        assert fitted[2][1] is fitted[0][1]
        assert fitted[3][1].plan.dtype == "bf16"


def test_kernels_of_a_dtype_are_built_once() -> None:
    """Layers of two dtypes take turns in every step: each finds its kernels where they were."""
    with backstamp_transformers.use(small_model("llama"), "torch_native") as handle:
        served = handle.served
        first = built(served)
        served.fit(STEP, torch.bfloat16, CPU)
        second = built(served)
        assert handle.plan.dtype == "bf16"
        for _ in range(2):
            served.fit(STEP, torch.float32, CPU)
            assert built(served) is first
            assert handle.plan.dtype == "fp32"
            served.fit(STEP, torch.bfloat16, CPU)
            assert built(served) is second
    assert first is not second


def test_a_device_has_one_set_of_kernels_under_all_its_names() -> None:
    """To torch `cpu` and `cpu:0`, and `cuda` and `cuda:0`, are two devices each."""
    with backstamp_transformers.use(small_model("llama"), "torch_native") as handle:
        first = built(handle.served)
        kernels = handle.served.fit(STEP, torch.float32, torch.device("cpu:0"))
        assert kernels is handle.served.fit(STEP, torch.float32, CPU)
        assert built(handle.served) is first
    assert numbered(torch.device("cuda")) == numbered(torch.device("cuda:0")) == torch.device("cuda:0")
    assert numbered(torch.device("cuda:1")) == torch.device("cuda:1")


def test_kernels_of_a_dtype_grow_and_leave_others_as_they_are() -> None:
    """A larger step builds anew what serves it, and nothing else."""
    with backstamp_transformers.use(small_model("llama"), "torch_native") as handle:
        served, small = handle.served, built(handle.served)
        served.fit(Bounds(64, 1, 1, 1), torch.bfloat16, CPU)
        served.fit(STEP, torch.float32, CPU)
        assert built(served) is small
        served.fit(Bounds(64, 1, 1, 1), torch.float32, CPU)
        assert built(served) is not small
        assert served.now.bounds == Bounds(rows=64)


@pytest.mark.parametrize("former", ["eager", "ours"])
def test_released_kernels_are_let_go(former: str) -> None:
    """Nothing of ours keeps a kernel and its workspaces: no handle, no copy's hook, no mask of the caller's own."""
    model = small_model("llama")
    if former == "ours":
        model.set_attn_implementation(backstamp_transformers.implementation("torch_native"))
    mask = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    with backstamp_transformers.use(model, "torch_native") as handle:
        with torch.inference_mode():
            model(padded_prompts()[0], attention_mask=mask, use_cache=False)
        kernel = weakref.ref(built(handle.served))
        assert handle.stamps
    gc.collect()
    assert kernel() is None
    assert handle.stamps == {}
    assert handle.plan.phase("prefill").kernel == "torch_native"


def test_kernels_of_a_released_hybrid_model_are_let_go() -> None:
    """Linear ones too, and where a copy of the model took hooks along."""
    model = small_model("qwen3_next")
    with backstamp_transformers.use(model, "torch_native") as handle:
        generate(model)
        kernel = weakref.ref(handle.served.now.linear_places["prefill", 0])
        other = copy.deepcopy(model)
        assert all(layer.linear_attn._forward_pre_hooks for layer in model.model.layers[::2])
    gc.collect()
    assert kernel() is None
    assert handle.linear_stamps == {}
    assert not any(layer.linear_attn._forward_pre_hooks for layer in model.model.layers[::2])
    other.set_attn_implementation("eager")
    generate(other)


def test_a_model_loaded_by_name_and_set_elsewhere_lets_its_kernels_go() -> None:
    """And builds them again when it comes back."""
    model, name = small_model("llama"), backstamp_transformers.implementation("torch_native")
    wanted = generate(model)
    model.set_attn_implementation(name)
    assert generate(model) == wanted
    kernel = weakref.ref(built(served_for(model.config)))
    model.set_attn_implementation("eager")
    gc.collect()
    assert kernel() is None
    model.set_attn_implementation(name)
    assert generate(model) == wanted
    assert built(served_for(model.config)) is not None


def test_a_released_name_is_not_taken_again() -> None:
    """What it stood for is gone."""
    model = small_model("llama")
    with backstamp_transformers.use(model, "torch_native") as handle:
        pass
    with pytest.raises(NotServed, match="not in use"):
        model.set_attn_implementation(handle.name)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_is_neither_copied_nor_pickled(copied: Callable[[object], object]) -> None:
    """Two handles would each release one model, and a plan's kernels belong to a process."""
    with (
        backstamp_transformers.use(small_model("llama"), "torch_native") as handle,
        pytest.raises(NotServed, match=f"handle '{handle.name}': needs one handle, .*got a copy or a pickle of it"),
    ):
        copied(handle)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_served_model_is_told_what_it_is(copied: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    """It carries the name and no kernels, and may be served on its own."""
    model = small_model("llama")
    wanted = generate(model)
    with backstamp_transformers.use(model, "torch_native"):
        other = copied(model)
        with pytest.raises(NotServed, match=r"got a copy of one.*Give it to backstamp_transformers\.use"):
            generate(other)
        with backstamp_transformers.use(other, "torch_native"):
            assert generate(other) == wanted
