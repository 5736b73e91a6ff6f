"""Hybrid models: gated delta rules on the resolved linear kernel, states kept by Transformers' own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next

import backstamp
import backstamp_transformers
from backstamp.declarations import Offer
from backstamp.hookspecs import hookimpl
from backstamp_cpu.plugin import NATIVE_GDN
from backstamp_transformers.admission import served_for
from backstamp_transformers.errors import NotServed
from engines.transformers.tests import wrong_kernels
from engines.transformers.tests.small_models import generate, padded_prompts, small_model
from engines.transformers.tests.wrong_kernels import WRONG_LINEAR


def test_the_plan_names_a_linear_kernel_and_it_is_stamped() -> None:
    """Both slots are planned, built and stamped, each under its own name."""
    model = small_model("qwen3_next")
    with backstamp_transformers.use(model, "flex_attention", linear="torch_native") as handle:
        assert {stamp.kernel for stamp in handle.stamps.values()} == {"flex_attention"}
        assert {(stamp.kernel, stamp.slot) for stamp in handle.linear_stamps.values()} == {("torch_native", "linear")}


def test_states_are_carried_through_chunks_and_decode() -> None:
    """A prompt in chunks, then tokens one by one: each starts from the state the last one left."""
    model = small_model("qwen3_next")
    prompts = padded_prompts(rows=1, length=40)
    wanted = generate(model, prompts)
    with backstamp_transformers.use(model, "torch_native"):
        assert generate(model, prompts, prefill_chunk_size=7) == wanted


def test_a_first_token_alone_is_prefill() -> None:
    """It starts from no state; decode continues from one."""
    model = small_model("qwen3_next")
    first = padded_prompts()[0].clamp(min=2)[:, :1]
    with backstamp_transformers.use(model, "torch_native") as handle, torch.inference_mode():
        places = handle.served.now.linear_places
        handle.served.now.linear_places = {at: place for at, place in places.items() if at[0] == "prefill"}
        cache = model(first, use_cache=True).cache
        with pytest.raises(KeyError, match="decode"):
            model(first, cache=cache, use_cache=True)


@pytest.mark.parametrize("wrong", WRONG_LINEAR)
@pytest.mark.usefixtures("wrong_kernels")
def test_a_wrong_rule_changes_the_tokens(wrong: str) -> None:
    """The kernel runs, and what it leaves in the states is what the next token starts from."""
    model = small_model("qwen3_next")
    wanted = generate(model)
    with backstamp_transformers.use(model, "torch_native", linear=wrong):
        assert generate(model) != wanted


@pytest.mark.usefixtures("wrong_kernels")
def test_another_hybrid_model_keeps_its_own_rule() -> None:
    """Transformers' rule is one function for all models: only the served model's layers reach ours."""
    ours, theirs = small_model("qwen3_next", seed=1), small_model("qwen3_next", seed=2)
    wanted = generate(ours), generate(theirs)
    with backstamp_transformers.use(ours, "torch_native", linear="linear_zeros"):
        assert generate(ours) != wanted[0]
        assert generate(theirs) == wanted[1]
    assert generate(ours) == wanted[0]


@contextmanager
def inside(model: PreTrainedModel, act: Callable[[], object]) -> Iterator[None]:
    """Something else happens while the first linear layer of a model runs."""
    hook = model.model.layers[0].linear_attn.in_proj_ba.register_forward_hook(lambda *call: (act(), None)[1])
    yield
    hook.remove()


@pytest.mark.usefixtures("wrong_kernels")
def test_another_model_that_runs_inside_a_served_layer_keeps_its_own_rule() -> None:
    """Whose layer is running is the call's own to know, as it is with two threads."""
    ours, theirs = small_model("qwen3_next", seed=1), small_model("qwen3_next", seed=2)
    wanted, found = generate(theirs), []
    served = backstamp_transformers.use(ours, "torch_native", linear="linear_zeros")
    with served, inside(ours, lambda: found.append(generate(theirs))), torch.inference_mode():
        ours(padded_prompts()[0].clamp(min=2))
    assert found == [wanted]


@pytest.mark.usefixtures("wrong_kernels")
def test_a_served_layer_that_is_interrupted_leaves_other_models_their_rule() -> None:
    """Control-C is no Exception, and torch calls no hook after it."""
    ours, theirs = small_model("qwen3_next", seed=1), small_model("qwen3_next", seed=2)
    wanted = generate(theirs)

    def stop() -> None:
        raise KeyboardInterrupt

    with backstamp_transformers.use(ours, "torch_native", linear="linear_zeros"):
        with inside(ours, stop), pytest.raises(KeyboardInterrupt):
            generate(ours)
        assert generate(theirs) == wanted


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[Tensor, Tensor | None]]]:
    """What the served layers' rule answers, called with other keywords than the layer's own."""

    def ask(model: PreTrainedModel, **changes: object) -> list[tuple[Tensor, Tensor | None]]:
        found: list[tuple[Tensor, Tensor | None]] = []
        ids = padded_prompts()[0].clamp(min=2)

        def changed(*parts: Tensor, **given: object) -> tuple[Tensor, Tensor | None]:
            found.append(rule(*parts, **{**given, **changes}))
            return found[-1]

        with torch.inference_mode(), monkeypatch.context() as patch:
            model(ids, use_cache=False)
            rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
            patch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", changed)
            model(ids, use_cache=False)
        return found

    return ask


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"use_qk_l2norm_in_kernel": False}, "use_qk_l2norm_in_kernel=False"),
        ({"cu_seqlens": torch.tensor([0, 6, 12])}, "packed rows"),
    ],
    ids=["norm", "packed"],
)
def test_a_rule_no_kernel_is_told_of_is_refused(ask, changes: dict[str, object], got: str) -> None:
    """Rows packed into one, and keys that are not to be normalised."""
    model = small_model("qwen3_next")
    with backstamp_transformers.use(model, "torch_native"), pytest.raises(NotServed, match=f"layer 0: .*{got}"):
        ask(model, **changes)


@pytest.mark.parametrize("part", ["query", "key", "value", "g", "beta", "initial_state"])
def test_a_part_of_a_rule_that_requires_gradients_is_refused(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The kernels write in place and have no backward, whichever part is trained."""
    model, ids = small_model("qwen3_next").requires_grad_(False), padded_prompts()[0].clamp(min=2)

    def asking(query: Tensor, key: Tensor, value: Tensor, **given: object) -> tuple[Tensor, Tensor | None]:
        parts = {**given, "query": query, "key": key, "value": value, "initial_state": torch.zeros(3, 4, 16, 16)}
        parts[part] = parts[part].clone().requires_grad_(torch.is_grad_enabled())
        return rule(parts.pop("query"), parts.pop("key"), parts.pop("value"), **parts)

    with backstamp_transformers.use(model, "torch_native"):
        model(ids, use_cache=False)
        rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
        monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", asking)
        with pytest.raises(NotServed, match=f"rule, layer 0: needs a call without gradients, got {part} with them"):
            model(ids, use_cache=False)
        with torch.no_grad():
            model(ids, use_cache=False)


def test_a_decay_that_is_trained_alone_is_refused() -> None:
    """It reaches the rule as a gate, and nothing else of the layer requires gradients."""
    model = small_model("qwen3_next").requires_grad_(False)
    model.model.layers[0].linear_attn.A_log.requires_grad_()
    with backstamp_transformers.use(model, "torch_native"), pytest.raises(NotServed, match="got g with them"):
        model(padded_prompts()[0].clamp(min=2), use_cache=False)


@pytest.mark.parametrize("order", ["vk", "kv"])
def test_states_that_are_handed_in_stay_as_they_are(ask, order: str) -> None:
    """A kernel writes in place; the caller's tensor is the caller's, and the new states are answered if asked for."""
    model = small_model("qwen3_next")
    states = torch.randn(3, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    before = states.clone()
    backstamp.register("one_order", OneOrder(order))
    try:
        with backstamp_transformers.use(model, "torch_native", linear="one_order") as handle:
            assert dict(handle.plan.layouts)["linear"] == order
            _, after = ask(model, initial_state=states, output_final_state=True)[0]
            _, none = ask(model, initial_state=states, output_final_state=False)[0]
    finally:
        backstamp.unregister("one_order")
    assert torch.equal(states, before)
    assert not torch.equal(after, before)
    assert none is None


class OneOrder:
    """`torch_native`'s rule over states of one order."""

    def __init__(self, order: str) -> None:
        self._order = order

    @hookimpl
    def backstamp_offers(self) -> tuple[Offer, ...]:
        """`auto` never takes the lowest priority."""
        factory = f"{wrong_kernels.__name__}:build_linear"
        layouts = (self._order,)
        return (replace(NATIVE_GDN, kernel="one_order", factory=factory, state_layouts=layouts, priority=0),)


def test_a_loaded_hybrid_model_runs_its_linear_kernel(tmp_path: object) -> None:
    """`from_pretrained` resolves both slots, and the first step finds the linear layers."""
    small_model("qwen3_next").save_pretrained(tmp_path)
    wanted = generate(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"))
    name = backstamp_transformers.implementation("torch_native")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name)
    assert generate(model) == wanted
    assert len(served_for(model.config).hooks) == len(served_for(model.config).linear_layers) == 2
