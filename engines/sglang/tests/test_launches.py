"""What the launched process settles: a question for the resolver, pages, graphs, drafts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
from sglang.srt.server_args import ServerArgs

from backstamp.errors import Refused
from backstamp_sglang import launch
from backstamp_sglang.admitted import adjust
from backstamp_sglang.asked import is_asked
from backstamp_sglang.facts import question_of
from backstamp_sglang.launch import settle_launch
from engines.sglang.tests.launches import KEY, arguments


def test_a_launch_is_resolved_once_and_its_pages_are_sglangs(model: Path) -> None:
    """The plan's page size where nobody asked, the operator's where one did, and a marker for what is spawned."""
    asked = arguments(model)
    asked.resolve_once()
    assert resolved_view(asked).page_size == 16
    paged = arguments(model, page_size=32)
    paged.resolve_once()
    assert resolved_view(paged).page_size == 32


@pytest.mark.parametrize("decode", [KEY, "backstamp"], ids=["one", "pair"])
def test_a_model_of_a_list_of_sglangs_names_starts_beside_ours(decode: str, sinks: Path) -> None:
    """SGLang asserts names of its own for GPT-OSS; what was asked for is asked for again after that."""
    server = arguments(sinks, decode_attention_backend=decode)
    server.resolve_once()
    assert attention_backends_of(resolved_view(server)) == (KEY, decode)
    assert server._backstamp.plugins == ("backstamp-cpu",)


def test_another_models_step_sees_what_was_asked_for(model: Path, sinks: Path) -> None:
    """Only a model of such a list is adjusted as beside SGLang's Triton."""
    seen = []
    for folder in (model, sinks):
        adjust(arguments(folder), lambda server: seen.append(attention_backends_of(resolved_view(server))))
    assert seen == [(KEY, KEY), ("triton", "triton")]


def test_such_a_list_still_holds_for_sglangs_own_names(sinks: Path) -> None:
    """Its own backend for a CPU drops sinks: nothing stands in for it."""
    with pytest.raises(AssertionError, match="GptOssForCausalLM requires one of"):
        arguments(sinks, attention_backend="torch_native").resolve_once()


def test_graphs_are_switched_off_with_a_name_of_ours(model: Path) -> None:
    """Nothing of ours is captured: a graph over a step would replay the first one's lengths."""
    asked = arguments(model, device="cuda")
    asked.resolve_once()
    graphs = resolved_view(asked).cuda_graph_config
    assert (graphs.decode.backend, graphs.prefill.backend) == ("disabled", "disabled")


def test_a_drafts_name_without_a_draft_asks_for_nothing(model: Path) -> None:
    """SGLang reads it nowhere then: no plan, no graph switched off, nothing for the processes it spawns."""
    asked = {"attention_backend": "triton", "speculative_draft_attention_backend": "backstamp_flex_attention"}
    server = arguments(model, device="cuda", **asked)
    server.resolve_once()
    assert resolved_view(server).cuda_graph_config.decode.backend != "disabled"
    assert "_backstamp" not in vars(server)


@pytest.mark.parametrize(
    ("architecture", "asked", "pages"),
    [
        ("Qwen3ForCausalLM", {"speculative_num_steps": 3, "speculative_eagle_topk": 2}, 1),
        ("Qwen3ForCausalLM", {"speculative_num_steps": 3, "speculative_eagle_topk": 1}, None),
        ("Qwen3ForCausalLM", {}, None),
        # SGLang chooses four side by side for it
        ("LlamaForCausalLM", {}, 1),
        ("LlamaForCausalLM", {"page_size": 16}, 16),
    ],
    ids=["tree", "chain", "chosen-chain", "chosen-tree", "asked"],
)
def test_drafts_side_by_side_have_pages_of_one_token(
    architecture: str, asked: dict[str, object], pages: int | None, model: Path
) -> None:
    """SGLang ends a launch of drafts side by side in longer pages: a kernel's preferred size is not asked for then."""
    server = arguments(model, speculative_algorithm="EAGLE", speculative_draft_model_path=str(model), **asked)
    config = model_config_of(server)
    config.hf_config.architectures = [architecture]
    assert question_of(server, config).launch.page_size == pages


def test_prefix_caching_of_final_states_has_pages_of_one_token(hybrid: Path) -> None:
    """SGLang's cache asserts it when weights are loaded; where it keeps no prefix, the kernel's size is asked for."""
    for others, pages in (({}, 1), ({"disable_radix_cache": True}, 16)):
        server = arguments(hybrid, disable_overlap_schedule=True, **others)
        server.resolve_once()
        assert resolved_view(server).page_size == pages


def test_linear_names_are_choices_and_their_plan_is_asked_for(hybrid: Path) -> None:
    """A hybrid model's plan has a linear slot where its linear kernels were asked for, and else none."""
    for linear, families in ((KEY, {"gdn", "mha"}), ("triton", {"mha"})):
        server = arguments(hybrid, linear_attn_backend=linear)
        question = question_of(server, model_config_of(server))
        assert {group.facts.family for group in question.model.groups} == families


def test_a_launch_is_asked_for_in_sglangs_numbers(model: Path) -> None:
    """Heads are shared out over the ranks of one replica of attention; what nobody set stays unset."""
    server = arguments(
        model,
        tp_size=8,
        attn_dp_size=4,
        chunked_prefill_size=64,
        enable_deterministic_inference=True,
        speculative_algorithm="EAGLE",
        speculative_attention_mode="decode",
        speculative_num_steps=5,
        speculative_eagle_topk=3,
    )
    asked = question_of(server, model_config_of(server)).launch
    assert (asked.tp_size, asked.chunked_prefill_size, asked.deterministic) == (2, 64, True)
    assert (asked.speculative_algorithm, asked.speculative_attention_mode) == ("EAGLE", "decode")
    assert (asked.speculative_num_steps, asked.speculative_topk) == (5, 3)
    plain = question_of(arguments(model), model_config_of(arguments(model))).launch
    assert (plain.deterministic, plain.speculative_algorithm, plain.speculative_attention_mode) == (False, None, None)


@pytest.mark.parametrize(
    ("asked", "cached"),
    [
        ({"chunked_prefill_size": 64, "disable_radix_cache": True}, True),
        ({"chunked_prefill_size": -1, "disable_radix_cache": True}, False),
        ({"disable_radix_cache": True}, False),
        ({"chunked_prefill_size": -1}, True),
    ],
    ids=["chunks", "neither", "unset", "radix"],
)
def test_chunks_and_radix_caching_ask_for_cached_prefixes(asked: dict[str, object], cached: bool, model: Path) -> None:
    """A later chunk reads the earlier ones from the cache, whatever else is kept there."""
    server = arguments(model, **asked)
    question = question_of(server, model_config_of(server))
    assert question.engine.prefix_cache == cached
    assert question.engine.graph == "never"


def test_facts_are_of_what_sglang_keeps(model: Path, sinks: Path) -> None:
    """The dtype is the launch's, and sinks are bfloat16 beside any."""
    for folder, kept in ((model, None), (sinks, "bf16")):
        server = arguments(folder)
        facts = question_of(server, model_config_of(server)).model
        assert facts.dtype == "fp32"
        assert {group.facts.sinks for group in facts.groups} == {kept}


def test_a_draft_is_refused_with_the_launch(model: Path) -> None:
    """Its own key, on the draft's own config: told before anything is spawned."""
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(model)}
    with pytest.raises(Refused, match="draft decode attention backend 'flex_attention'"):
        arguments(
            model,
            attention_backend="torch_native",
            speculative_draft_attention_backend="backstamp_flex_attention",
            **draft,
        ).resolve_once()


def test_a_draft_has_its_own_name_or_the_targets(model: Path) -> None:
    """Unset, SGLang's draft runs what its target does; beside a target of SGLang's, its name alone is the request."""
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(model)}
    inherited = arguments(model, **draft)
    alone = arguments(model, attention_backend="triton", speculative_draft_attention_backend=KEY, **draft)
    other = arguments(model, speculative_draft_attention_backend="triton", **draft)
    for server, asked in ((inherited, (True, True)), (alone, (False, True)), (other, (True, False))):
        server.resolve_once()
        assert server._backstamp.names == (KEY,)
        view = resolved_view(server)
        assert (is_asked(view, "target"), is_asked(view, "draft")) == asked


@pytest.mark.parametrize("apart", [True, False], ids=["a-checkpoint-of-its-own", "layers-of-the-target"])
def test_a_draft_is_resolved_by_its_own_config(apart: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang will read it: the draft's checkpoint and revision, or the draft layers of its target's."""
    seen: list[dict[str, object]] = []

    def read(server: ServerArgs, **asked: object) -> ModelConfig:
        seen.append(asked)
        return model_config_of(server)

    monkeypatch.setattr(launch, "ModelConfig", SimpleNamespace(from_server_args=read))
    own = {"speculative_draft_model_path": "draft", "speculative_draft_model_revision": "its"} if apart else {}
    asked = {"revision": "targets", "speculative_algorithm": "STANDALONE", "cuda_graph_config": CudaGraphConfig()}
    settle_launch(arguments(model, **asked, **own))
    path, revision = ("draft", "its") if apart else (str(model), "targets")
    assert seen == [{"model_path": path, "model_revision": revision, "is_draft_model": True}]


@pytest.mark.parametrize("part", ["", "prefill_", "decode_", "verify_"])
def test_linear_kernels_beside_sglangs_attention_are_refused_with_the_launch(part: str, hybrid: Path) -> None:
    """Whichever of the flags asks, and SGLang's own backend for attention would not."""
    asked = {"attention_backend": "torch_native", "disable_overlap_schedule": True}
    server = arguments(hybrid, **asked, **{f"linear_attn_{part}backend": KEY})
    with pytest.raises(Refused, match="both halves from Backstamp, got torch_native"):
        server.resolve_once()


def test_a_pair_is_asked_for_half_by_half(model: Path) -> None:
    """One key twice is a base request; two keys, or none for one half, are split requests."""
    one = question_of(arguments(model), model_config_of(arguments(model))).launch
    assert {name: asked.value for name, asked in one.keys.items()} == {"attention_backend": "torch_native"}
    server = arguments(model, attention_backend="backstamp", decode_attention_backend=KEY)
    two = question_of(server, model_config_of(server)).launch
    assert {name: asked.value for name, asked in two.keys.items()} == {"decode_attention_backend": "torch_native"}
