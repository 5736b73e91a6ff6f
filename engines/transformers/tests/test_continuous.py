"""Continuous batching over Transformers' paged cache: the same tokens, and keys read where they lie."""

from __future__ import annotations

import pytest
import torch
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import continuous_api, initialization

import backstamp_transformers
from backstamp_transformers import attend
from backstamp_transformers.errors import NotServed
from backstamp_transformers.paged import PagedKeys
from engines.transformers.tests.small_models import ARCHITECTURES, NEW_TOKENS, small_model

#: Transformers 5.24 has no paged states: it refuses hybrid models whatever their attention is.
PAGED = sorted(ARCHITECTURES.keys() - {"qwen3_next"})


def requests() -> list[list[int]]:
    """Prompts from one token to longer than a window, a page and a step."""
    draw = torch.Generator().manual_seed(11)
    return [torch.randint(2, 128, (length,), generator=draw).tolist() for length in (1, 5, 9, 40, 17, 33, 2, 26)]


def serve(model: PreTrainedModel, **changes: object) -> list[list[int]]:
    """Greedy tokens of every request: small pages, and steps that cut prompts and mix them with decode rows."""
    options = {"page_size": 4, "max_batch_tokens": 16, "num_blocks": 256, "auto_switch_to_flash": False, **changes}
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found = model.generate_batch(
        inputs=requests(),
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**options),
        progress_bar=False,
    )
    return [found[key].generated_tokens for key in sorted(found, key=lambda key: int(key.rpartition("_")[2]))]


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What each paged call read: its query tokens, and the cache itself, new keys or gathered copies."""
    calls: list[tuple[int, str]] = []

    step = attend.paged_step

    def recording(served: object, cu_seq_lens_q: torch.Tensor) -> object:
        planned = step(served, cu_seq_lens_q)

        class Watched:
            def attend(self, q: torch.Tensor, keys: PagedKeys, *rest: object) -> torch.Tensor:
                # pages of keys and of values are one cache
                assert len(keys.k) == len(keys.v)
                calls.append((max(planned.q_lens), keys.where))
                return planned.attend(q, keys, *rest)

        return Watched()

    monkeypatch.setattr(attend, "paged_step", recording)
    return calls


@pytest.mark.parametrize("key", ["torch_native", "flex_attention"])
# Transformers' own paged attention on the CPU drops Gemma 2's softcap: that model is held against `generate` below
@pytest.mark.parametrize("name", sorted({*PAGED} - {"gemma2"}))
def test_requests_give_the_tokens_of_paged_eager(name: str, key: str) -> None:
    """Chunked prompts, mixed steps, sliding rings and sinks: each request's tokens are `eager`'s."""
    model = small_model(name)
    wanted = serve(model)
    with backstamp_transformers.use(model, key):
        assert serve(model) == wanted


def test_steps_that_a_compiled_model_pads_give_the_same_tokens() -> None:
    """Tokens past the rows, rows without a token and slots past the keys: none of them is read."""
    model = small_model("gemma3")
    wanted = serve(model)
    # padded as for a compiler that then does nothing
    with backstamp_transformers.use(model, "torch_native"), torch.compiler.set_stance("force_eager"):
        config = CompileConfig(backend="eager", mode=None, fullgraph=False)
        assert serve(model, varlen_compile_config=config) == wanted


@pytest.mark.parametrize("name", PAGED)
def test_requests_give_the_tokens_of_generate(name: str) -> None:
    """A request's tokens do not depend on what shares its steps."""
    model = small_model(name)
    with backstamp_transformers.use(model, "torch_native"):
        alone = [
            model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(ids) :].tolist()
            for ids in requests()
        ]
        assert serve(model) == alone


def test_full_attention_reads_the_cache_itself(where: list[tuple[int, str]]) -> None:
    """No key is copied: steps read the cache, or their own new keys where no row has any others."""
    model = small_model("qwen3")
    with backstamp_transformers.use(model, "torch_native"):
        serve(model)
    assert {kind for _, kind in where} == {"cache", "new"}


def test_a_ring_is_gathered_only_by_chunks_that_overwrite_it(where: list[tuple[int, str]]) -> None:
    """Decode steps read sliding rings in place; a chunk over a prefix has to read before it writes."""
    model = small_model("gemma3")
    with backstamp_transformers.use(model, "torch_native"):
        serve(model)
    assert {kind for longest, kind in where if longest == 1} == {"cache"}
    assert {kind for longest, kind in where if longest > 1} == {"cache", "new", "gathered"}


@pytest.mark.parametrize("wrong", ["zeros", "no_causal", "no_first_key"])
@pytest.mark.usefixtures("wrong_kernels")
def test_wrong_attention_changes_the_tokens(wrong: str) -> None:
    """The paged path shows what `generate` shows."""
    model = small_model("gemma3")
    wanted = serve(model)
    with backstamp_transformers.use(model, wrong):
        assert serve(model) != wanted


def test_two_models_are_served_each_by_its_own_kernel() -> None:
    """A model under Backstamp and one that is not keep their own caches and their own attention."""
    ours, theirs = small_model("qwen3", seed=1), small_model("qwen3", seed=2)
    wanted = serve(ours), serve(theirs)
    with backstamp_transformers.use(ours, "torch_native"):
        assert serve(theirs) == wanted[1]
        assert serve(ours) == wanted[0]
    assert serve(ours) == wanted[0]


@pytest.mark.parametrize("asked", [True, (True, False), (False, True)], ids=str)
def test_cuda_graphs_are_refused(asked: bool | tuple[bool, bool]) -> None:
    """A replay runs no host code, so what `plan` decided would be frozen: asked for, that is an error."""
    model = small_model("qwen3")
    with backstamp_transformers.use(model, "torch_native"), pytest.raises(NotServed, match="use_cuda_graph"):
        serve(model, use_cuda_graph=asked)


@pytest.mark.parametrize("asked", [None, False, (False, False)], ids=str)
def test_cuda_graphs_stay_off_where_transformers_would_choose(
    asked: bool | tuple[bool, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator with graphs, and padding that asks for them: not for a model of ours."""
    monkeypatch.setattr(initialization, "get_accelerator_graph_name", lambda: "CUDAGraph")
    model = small_model("qwen3")
    options = ContinuousBatchingConfig(use_cuda_graph=asked, q_padding_interval_size=8, max_memory_percent=0.5)

    def graphs() -> tuple[bool, bool]:
        resolve = continuous_api.resolve_continuous_batching_config
        device = torch.device("cpu")
        told = {"workload_hints": None, "has_logit_processors": False, "device": device}
        return resolve(config=model.config, cb_config=options, **told).use_cuda_graph

    with backstamp_transformers.use(model, "torch_native"):
        assert graphs() == (False, False)
    if asked is None:
        assert graphs() == (True, True)
    assert options.use_cuda_graph == asked
