"""The mini engine serves ragged requests as a dense recomputation would, and shows it when attention is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV
from backstamp.errors import BadInput
from backstamp.testing.admission import Request
from backstamp.testing.mini_engine import MAX_ROWS, POOL_TOKENS, MiniEngine, Part, why
from tests.greedy import MODELS, NEW_TOKENS, ReferenceBackend, decoder, dense_tokens, engine, prompts


def without_causal(batch: Batch, layer: LayerSpec) -> tuple[Batch, LayerSpec]:
    return dataclasses.replace(batch, causal=False), layer


def without(**fact: object) -> Callable[[Batch, LayerSpec], tuple[Batch, LayerSpec]]:
    return lambda batch, layer: (batch, dataclasses.replace(layer, **fact))


@pytest.mark.parametrize("model", MODELS)
def test_plain_generation_equals_a_dense_recomputation(model: str) -> None:
    """Paging, batching and the cache change no token."""
    target = decoder(model)
    assert engine(target).generate(prompts(), NEW_TOKENS) == dense_tokens(target)


@pytest.mark.parametrize("page_size", [1, 3, 16], ids="page-{}".format)
@pytest.mark.parametrize("chunk_tokens", [1, 5, 16], ids="chunk-{}".format)
def test_chunked_prefill_equals_whole_prompts(chunk_tokens: int, page_size: int) -> None:
    """A prompt read in parts, at any page size, gives the same tokens; all requests share the step's budget."""
    target, backend = decoder("gpt-oss"), ReferenceBackend()
    served = engine(target, backend, page_size=page_size, chunk_tokens=chunk_tokens)
    assert served.generate(prompts(), NEW_TOKENS) == dense_tokens(target)
    assert max(batch.num_tokens for batch in backend.batches if batch.phase == "prefill") == chunk_tokens


def test_too_few_pages_delay_requests_and_change_no_token() -> None:
    """A cache that holds one long request at a time still serves all, and gets every page back, empty."""
    target = decoder("llama")
    served = engine(target, num_tokens=32)
    assert served.generate(prompts(), NEW_TOKENS) == dense_tokens(target)
    assert sorted(served.free) == list(range(8))
    assert served.cache.isnan().all()


def test_pages_are_scattered() -> None:
    """Neighbouring tokens of a request lie on unrelated pages."""
    served = engine(decoder("llama"), num_tokens=64)
    assert served.free != sorted(served.free)
    assert served.free != sorted(served.free, reverse=True)


@pytest.mark.parametrize("max_rows", [1, 3], ids="rows-{}".format)
def test_no_step_has_more_rows_than_asked(max_rows: int) -> None:
    """`max_rows` bounds every step and changes no token."""
    target, backend = decoder("llama"), ReferenceBackend()
    assert engine(target, backend, max_rows=max_rows).generate(prompts(), NEW_TOKENS) == dense_tokens(target)
    assert max(batch.num_rows for batch in backend.batches) == max_rows


def test_a_request_is_admitted_while_others_decode() -> None:
    """A request that comes late shares a step with those that decode, each phase with its own batch, decode first."""
    steps: list[list[Batch]] = []

    class Watched(MiniEngine):
        def forward(self, rows: Sequence[Request], parts: Sequence[Part]) -> Tensor:
            steps.append([part.batch for part in parts])
            return MiniEngine.forward(self, rows, parts)

    target = decoder("llama", layers=1)
    # a chunk holds every prompt, so that only admission can mix a step
    served = Watched(target, engine(target).backends, max_rows=3, chunk_tokens=64)
    assert served.generate(prompts(), NEW_TOKENS) == dense_tokens(target)
    phases = [[batch.phase for batch in step] for step in steps]
    assert ["decode", "prefill"] in phases
    assert all(step in (["decode"], ["prefill"], ["decode", "prefill"]) for step in phases)
    for batch in (batch for step in steps for batch in step):
        assert batch.num_tokens == int(batch.qo_indptr[-1]) == len(batch.slot_mapping)
        assert (batch.max_q_len, batch.decode_q_len) == (1, 1) or batch.phase == "prefill"


def test_a_chunk_attends_over_the_prefix_the_cache_holds() -> None:
    """Chunks after the first have fewer queries than keys; a kernel that forgets the prefix gives other tokens."""
    target, backend = decoder("llama"), ReferenceBackend()

    def forget(batch: Batch, layer: LayerSpec) -> tuple[Batch, LayerSpec]:
        starts = batch.kv_lens - batch.qo_indptr.diff()
        return (dataclasses.replace(batch, kv_starts=starts), layer) if batch.phase == "prefill" else (batch, layer)

    assert engine(target, backend, chunk_tokens=5).generate(prompts(), NEW_TOKENS) == dense_tokens(target)
    chunks = [batch for batch in backend.batches if batch.phase == "prefill"]
    assert any(batch.max_kv_len > batch.max_q_len for batch in chunks)
    wrong = engine(target, ReferenceBackend(forget), chunk_tokens=5)
    assert wrong.generate(prompts(), NEW_TOKENS) != dense_tokens(target)


@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
def test_each_kv_group_is_planned_once_a_step(model: str) -> None:
    """Layers of one window share a plan; a model with two windows plans twice."""
    target, backend = decoder(model, layers=4), ReferenceBackend()
    engine(target, backend).generate([[1, 2, 3]], 4)
    groups = len({layer.window_left for layer in target.layer_specs})
    assert len(backend.batches) == groups * 4


def test_each_group_of_layers_is_served_by_its_own_kernel() -> None:
    """Where no one kernel serves all layers, each layer calls the kernel its group was planned on."""
    target, full, windowed = decoder("gpt-oss", layers=4), ReferenceBackend(), ReferenceBackend()
    features = [frozenset({"sinks"}), frozenset({"sinks", "window"})]
    served = engine(target, full, windowed, features=features)
    assert served.generate(prompts(), NEW_TOKENS) == dense_tokens(target)
    assert (set(full.layers), set(windowed.layers)) == ({1, 3}, {0, 2})
    assert "prefill: kernel_1, kernel_0 (auto (per_layer))" in why(served.backends.plan)


@pytest.mark.parametrize(
    ("model", "backend"),
    [
        pytest.param("llama", ReferenceBackend(gain=0.0), id="attention-answers-zeros"),
        pytest.param("llama", ReferenceBackend(without_causal), id="causal-mask-dropped"),
        pytest.param("gpt-oss", ReferenceBackend(without(window_left=-1)), id="window-dropped"),
        pytest.param("gpt-oss", ReferenceBackend(without(window_left=6)), id="window-one-too-wide"),
        pytest.param("gpt-oss", ReferenceBackend(without(sinks=None)), id="sinks-dropped"),
        pytest.param("gemma2", ReferenceBackend(without(softcap=0.0)), id="softcap-dropped"),
    ],
)
def test_wrong_attention_changes_the_tokens(model: str, backend: ReferenceBackend) -> None:
    """Token equality is worth something: weights at init scale let every attention fact show."""
    target = decoder(model)
    assert engine(target, backend).generate(prompts(), NEW_TOKENS) != dense_tokens(target)


def test_a_backend_that_reads_one_token_too_many_is_caught() -> None:
    """The slot after a row's last token holds NaN, and NaN in the logits is an error."""

    def one_more(batch: Batch, layer: LayerSpec) -> tuple[Batch, LayerSpec]:
        return dataclasses.replace(batch, kv_lens=batch.kv_lens + 1), layer

    with pytest.raises(FloatingPointError, match="logits are not finite"):
        engine(decoder("llama"), ReferenceBackend(one_more)).generate([[1, 2, 3, 4, 5]], 4)


def test_a_backend_that_does_not_write_its_output_is_caught() -> None:
    """`out` is written in place; an answer that is only returned is lost, and shows as NaN."""

    class Forgetful(ReferenceBackend):
        def forward(self, q: Tensor, kv: PagedKV, layer: LayerSpec, state: Batch, *, out: Tensor) -> Tensor:
            return super().forward(q, kv, layer, state, out=out.clone())

    with pytest.raises(FloatingPointError, match="not finite"):
        engine(decoder("llama"), Forgetful()).generate([[1, 2, 3]], 4)


@pytest.mark.parametrize(
    ("requests", "limits", "message"),
    [
        pytest.param([[1], []], 4, "request 1: needs one or more tokens in 0..127, got an empty prompt", id="empty"),
        pytest.param([[1, 128]], 4, "request 0: needs one or more tokens in 0..127, got tokens 1 to 128", id="vocab"),
        pytest.param([[1]], 0, "request 0: needs at least one new token, got 0", id="no-new-token"),
        pytest.param([[1], [2]], [3], "needs 2 limits of new tokens, got 1", id="limits"),
    ],
)
def test_a_request_that_is_none_is_refused(requests: list[list[int]], limits: int, message: str) -> None:
    """One clear line names the request at fault, before any step runs."""
    backend = ReferenceBackend()
    with pytest.raises(BadInput, match=message):
        engine(decoder("llama"), backend).generate(requests, limits)
    assert not backend.batches


def test_a_request_larger_than_the_cache_is_refused() -> None:
    """It would wait for pages that never come free."""
    backend = ReferenceBackend()
    with pytest.raises(ValueError, match="request 1: needs 9 KV pages, got a cache of 8"):
        engine(decoder("llama"), backend, num_tokens=32).generate([[1], [2] * 20], 14)
    assert not backend.batches


@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"chunk_tokens": 0}, id="chunks-of-none"),
        pytest.param({"max_rows": 0}, id="no-rows"),
        pytest.param({"max_rows": MAX_ROWS + 1}, id="more-rows-than-built-for"),
        pytest.param({"chunk_tokens": POOL_TOKENS + 1}, id="more-tokens-than-built-for"),
        pytest.param({"num_tokens": POOL_TOKENS + 1}, id="more-pages-than-built-for"),
    ],
)
def test_an_engine_of_another_size_than_its_kernels_is_refused(knobs: dict[str, int]) -> None:
    """A bound of zero would loop forever, one above what the kernels were built for would overrun their buffers."""
    with pytest.raises(ValueError, match=r"needs 1\.\.10 rows, chunks and a cache of up to 2048 tokens, got"):
        engine(decoder("llama"), **knobs)


def test_no_request_needs_no_step() -> None:
    """An empty request list answers an empty list."""
    backend = ReferenceBackend()
    assert engine(decoder("llama"), backend).generate([], 4) == []
    assert not backend.batches
