"""The mini engine serves ragged requests as a dense recomputation would, and shows it when attention is wrong."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV
from backstamp.errors import BadInput, BadModel
from backstamp.testing.decoder import Decoder, DecoderConfig
from backstamp.testing.kv_pool import KVPool
from backstamp.testing.mini_engine import MiniEngine
from backstamp.testing.reference import reference_attention
from backstamp.testing.runner import PhaseErrors, Runner

LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 256, "model_type": "llama"}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0},
    "rms_norm_eps": 1e-5,
}
GEMMA2 = {
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 13,
    # the real cap is 50; a tighter one bends more logits of so small a model
    "attn_logit_softcapping": 10.0,
}
MODELS = {"llama": LLAMA, "gpt-oss": GPT_OSS, "gemma2": GEMMA2}
PROMPT_LENS = (1, 5, 17, 26, 9, 12, 3, 14)
NEW_TOKENS = (12, 8, 10, 7, 5, 9, 14, 1)


@dataclass
class ReferenceBackend:
    """Serves the contract by float64 reference; `spoil` alters what it is asked, to see the tests red."""

    spoil: Callable[[Batch, LayerSpec], tuple[Batch, LayerSpec]] = lambda batch, layer: (batch, layer)
    gain: float = 1.0
    batches: list[Batch] = field(default_factory=list)

    def plan(self, batch: Batch, *, state: object = None, capture: bool = False) -> Batch:
        self.batches.append(batch)
        return batch

    def forward(self, q: Tensor, kv: PagedKV, layer: LayerSpec, state: Batch, *, out: Tensor) -> Tensor:
        batch, layer = self.spoil(state, layer)
        return out.copy_(self.gain * reference_attention(q, kv, layer, batch)[0])

    def serving_attention_backend(self, phase: str) -> ReferenceBackend:
        return self


def decoder(model: str, layers: int = 2) -> Decoder:
    config = DecoderConfig.from_config(MODELS[model], layers=layers, hidden=64, vocab=128, max_window_tokens=6)
    return Decoder(config, seed=1)


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(128) for _ in range(length)] for length in PROMPT_LENS]


def runner(
    model: Decoder, backend: object = None, *, num_pages: int = 48, page_size: int = 4, **more: object
) -> Runner:
    pool = KVPool.for_layers(model.layer_specs, num_pages, page_size)
    return Runner(decoder=model, pool=pool, backends=backend or ReferenceBackend(), **more)


def dense_attend(q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec) -> Tensor:
    """Whole-sequence attention with one masked softmax: no cache, no batch, no contract."""
    share = layer.num_qo_heads // layer.num_kv_heads
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    if layer.softcap:
        logits = layer.softcap * (logits / layer.softcap).tanh()
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    if layer.window_left >= 0:
        seen = seen.triu(-layer.window_left)
    logits = logits.masked_fill(~seen, float("-inf"))
    if layer.sinks is not None:
        logits = torch.cat([logits, layer.sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., : len(q)], v)


def dense_tokens(model: Decoder, new_tokens: tuple[int, ...] = NEW_TOKENS) -> list[list[int]]:
    answers = []
    for prompt, limit in zip(prompts(), new_tokens, strict=True):
        tokens = list(prompt)
        for _ in range(limit):
            logits = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), dense_attend)
            tokens.append(int(logits[-1].argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def without_causal(batch: Batch, layer: LayerSpec) -> tuple[Batch, LayerSpec]:
    return dataclasses.replace(batch, causal=False), layer


def without(**fact: object) -> Callable[[Batch, LayerSpec], tuple[Batch, LayerSpec]]:
    return lambda batch, layer: (batch, dataclasses.replace(layer, **fact))


@pytest.mark.parametrize("model", MODELS)
def test_plain_generation_equals_a_dense_recomputation(model: str) -> None:
    """Paging, batching and the cache change no token."""
    target = decoder(model)
    assert MiniEngine(runner(target)).generate(prompts(), NEW_TOKENS) == dense_tokens(target)


@pytest.mark.parametrize("page_size", [1, 3, 16], ids="page-{}".format)
@pytest.mark.parametrize("chunk_size", [1, 5, 16], ids="chunk-{}".format)
def test_chunked_prefill_equals_whole_prompts(chunk_size: int, page_size: int) -> None:
    """A prompt read in parts, at any page size, gives the same tokens; all requests share the step's budget."""
    target, backend = decoder("gpt-oss"), ReferenceBackend()
    engine = MiniEngine(runner(target, backend, num_pages=160, page_size=page_size), chunk_size=chunk_size)
    assert engine.generate(prompts(), NEW_TOKENS) == dense_tokens(target)
    assert max(batch.num_tokens for batch in backend.batches if batch.phase == "prefill") == chunk_size


def test_too_few_pages_delay_requests_and_change_no_token() -> None:
    """A pool that holds one long request at a time still serves all, and gets every page back."""
    target = decoder("llama")
    served = runner(target, num_pages=8)
    assert MiniEngine(served).generate(prompts(), NEW_TOKENS) == dense_tokens(target)
    assert served.pool.num_free == 8


@pytest.mark.parametrize("max_rows", [1, 3], ids="rows-{}".format)
def test_no_step_has_more_rows_than_asked(max_rows: int) -> None:
    """`max_rows` bounds every step and changes no token."""
    target, backend = decoder("llama"), ReferenceBackend()
    assert MiniEngine(runner(target, backend), max_rows=max_rows).generate(prompts(), NEW_TOKENS) == dense_tokens(
        target
    )
    assert max(batch.num_rows for batch in backend.batches) == max_rows


def test_a_mixed_step_runs_decode_rows_and_prompt_chunks_on_their_own_backends() -> None:
    """Requests that arrive late share steps with requests that decode; each phase has its own batch."""
    steps: list[list[str]] = [[]]

    def observe(phase: str, layer: LayerSpec, q: Tensor, kv: PagedKV, batch: Batch, out: Tensor) -> None:
        assert phase == batch.phase
        assert len(q) == batch.num_tokens == int(batch.qo_indptr[-1]) == len(batch.slot_mapping)
        assert batch.max_q_len == 1 or phase == "prefill"
        steps[-1].append(phase)

    target = decoder("llama", layers=1)
    engine = MiniEngine(runner(target, observe=observe), wave=2, chunk_size=8, progress=lambda count: steps.append([]))
    engine.generate(prompts(), NEW_TOKENS)
    assert ["decode", "prefill"] in steps
    assert all(step in ([], ["decode"], ["prefill"], ["decode", "prefill"]) for step in steps)


@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
def test_each_kv_group_is_planned_once_a_step(model: str) -> None:
    """Layers of one window share a plan; a model with two windows plans twice."""
    target, backend = decoder(model, layers=4), ReferenceBackend()
    MiniEngine(runner(target, backend)).generate([[1, 2, 3]], 4)
    groups = len({layer.window_left for layer in target.layer_specs})
    assert len(backend.batches) == groups * 4


@pytest.mark.parametrize("form", ["page_table", "csr", "indirect"])
def test_every_index_form_serves_the_same_tokens(form: str) -> None:
    """A kernel that reads one form only finds its rows there, in mixed steps too."""
    keeps = {"page_table": ("page_table",), "csr": ("kv_indptr", "kv_indices"), "indirect": ("table", "row_ids")}[form]

    def only_this_form(batch: Batch, layer: LayerSpec) -> tuple[Batch, LayerSpec]:
        index = KVIndex(page_size=batch.index.page_size, **{name: getattr(batch.index, name) for name in keeps})
        return dataclasses.replace(batch, index=index), layer

    target = decoder("llama")
    served = runner(target, ReferenceBackend(only_this_form), index_forms=(form,))
    assert MiniEngine(served, wave=3, chunk_size=8).generate(prompts(), NEW_TOKENS) == dense_tokens(target)


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
    assert MiniEngine(runner(target, backend)).generate(prompts(), NEW_TOKENS) != dense_tokens(target)


def test_a_backend_that_reads_one_token_too_many_is_caught() -> None:
    """The slot after a row's last token holds NaN, and NaN in the logits is an error."""

    def one_more(batch: Batch, layer: LayerSpec) -> tuple[Batch, LayerSpec]:
        return dataclasses.replace(batch, kv_lens=batch.kv_lens + 1), layer

    served = runner(decoder("llama"), ReferenceBackend(one_more))
    with pytest.raises(FloatingPointError, match="prefill step are not finite"):
        MiniEngine(served).generate([[1, 2, 3, 4, 5]], 4)


def test_a_backend_that_does_not_write_its_output_is_caught() -> None:
    """`out` is written in place; an answer that is only returned is lost, and shows as NaN."""

    class Forgetful(ReferenceBackend):
        def forward(self, q: Tensor, kv: PagedKV, layer: LayerSpec, state: Batch, *, out: Tensor) -> Tensor:
            return super().forward(q, kv, layer, state, out=out.clone())

    with pytest.raises(FloatingPointError, match="not finite"):
        MiniEngine(runner(decoder("llama"), Forgetful())).generate([[1, 2, 3]], 4)


def test_pages_are_scattered_and_hold_nan_until_written_and_after_release() -> None:
    """Neighbouring tokens lie on unrelated pages; an unwritten or released slot cannot pass for a key."""
    pool = KVPool(16, 4, 2, 1, 8, 6)
    pages = pool.allocate(6)
    assert all(abs(after - before) != 1 for before, after in pairwise(pages))
    kv = pool.paged(1)
    assert kv.v is not None
    assert (kv.k.shape, kv.v.shape, kv.k.stride(-1)) == ((16, 4, 1, 8), (16, 4, 1, 6), 1)
    assert kv.k.isnan().all()
    assert kv.v.isnan().all()
    slots = pool.slots(pages, 3, 9)
    pool.write(1, torch.ones(6, 1, 8), torch.full((6, 1, 6), 2.0), slots)
    assert kv.k.flatten(0, 1)[slots].eq(1).all()
    assert kv.v.flatten(0, 1)[slots].eq(2).all()
    assert pool.paged(0).k.isnan().all()
    pool.release(pages)
    assert kv.k.isnan().all()
    assert pool.num_free == 16


def test_tokens_move_in_every_layer_even_onto_themselves() -> None:
    """Overlapping copies read everything before they write."""
    pool = KVPool(4, 4, 2, 1, 2, 2)
    pages = pool.allocate(2)
    marks = torch.arange(6.0)[:, None, None].expand(-1, 1, 2)
    for layer in (0, 1):
        pool.write(layer, marks, marks, pool.slots(pages, 0, 6))
    pool.copy_tokens(pool.slots(pages, 2, 6), pool.slots(pages, 1, 5))
    for layer in (0, 1):
        assert pool.paged(layer).k.flatten(0, 1)[pool.slots(pages, 0, 6), 0, 0].tolist() == [0, 2, 3, 4, 5, 5]


def test_a_table_ends_in_minus_one_and_forms_nobody_asked_for_are_absent() -> None:
    """Entries past a row's tokens are no page; an adapter builds only the forms its kernels read."""
    index = KVPool(8, 4, 1, 1, 8, 8).index([[5, 2, 7], [3]], [9, 4], ("page_table",))
    assert index.page_table is not None
    assert index.page_table.tolist() == [[5, 2, 7], [3, -1, -1]]
    assert index.kv_indptr is index.kv_indices is index.table is index.row_ids is None


def test_more_pages_than_are_free_are_refused() -> None:
    """The pool never hands a page out twice."""
    pool = KVPool(4, 4, 1, 1, 8, 8)
    pool.allocate(3)
    with pytest.raises(BadInput, match="needs 2 free pages, got 1"):
        pool.allocate(2)


@pytest.mark.parametrize(
    ("requests", "limits", "message"),
    [
        pytest.param([[1], []], 4, "request 1: needs one or more tokens in 0..127, got an empty prompt", id="empty"),
        pytest.param([[1, 128]], 4, "request 0: needs one or more tokens in 0..127, got tokens 1 to 128", id="vocab"),
        pytest.param([[1]], 0, "request 0: needs at least one new token, got 0", id="no-new-token"),
        pytest.param([[1], [2]], [3], "needs 2 limits of new tokens, got 1", id="limits"),
        pytest.param([[1], [2] * 20], 14, "request 1: needs 9 KV pages, got a pool of 8", id="pages"),
    ],
)
def test_a_request_that_can_not_run_is_refused(requests: list[list[int]], limits: int, message: str) -> None:
    """One clear line names the request at fault, before any step runs."""
    backend = ReferenceBackend()
    with pytest.raises(BadInput, match=message):
        MiniEngine(runner(decoder("llama"), backend, num_pages=8)).generate(requests, limits)
    assert not backend.batches


@pytest.mark.parametrize("setting", ["chunk_size", "max_rows", "wave"])
def test_an_engine_that_could_never_move_is_refused(setting: str) -> None:
    """A bound of zero would loop forever."""
    with pytest.raises(BadInput, match="1 or more"):
        MiniEngine(runner(decoder("llama")), **{setting: 0})


def test_no_request_needs_no_step() -> None:
    """An empty request list answers an empty list."""
    backend = ReferenceBackend()
    assert MiniEngine(runner(decoder("llama"), backend)).generate([], 4) == []
    assert not backend.batches


def test_progress_hears_of_every_token() -> None:
    """The counts a progress bar gets add up to the tokens asked for."""
    counts: list[int] = []
    MiniEngine(runner(decoder("llama")), progress=counts.append).generate(prompts(), NEW_TOKENS)
    assert sum(counts) == sum(NEW_TOKENS)
    assert len(counts) > max(NEW_TOKENS)


def test_phase_errors_keep_the_worst_of_each_phase() -> None:
    """A backend that is a tenth too loud in decode only is seen there and only there."""

    class LoudDecode(ReferenceBackend):
        def serving_attention_backend(self, phase: str) -> ReferenceBackend:
            return ReferenceBackend(gain=1.1) if phase == "decode" else self

    errors = PhaseErrors(calls_per_phase=6)
    MiniEngine(runner(decoder("llama"), LoudDecode(), observe=errors)).generate(prompts(), NEW_TOKENS)
    assert errors.worst["decode"] == pytest.approx(0.1, rel=1e-4)
    assert errors.worst["prefill"] < 1e-6


def test_phase_errors_hold_on_to_nan_and_stop_after_their_sample() -> None:
    """NaN is the worst error there is; calls past the sample are not compared."""
    errors = PhaseErrors(calls_per_phase=2)
    layer = LayerSpec(layer_id=0, num_qo_heads=1, num_kv_heads=1, head_dim=4, v_head_dim=4, scale=0.5)
    served = runner(decoder("llama"))
    batch = Batch(
        phase="decode",
        num_rows=1,
        num_tokens=1,
        max_q_len=1,
        max_kv_len=1,
        qo_indptr=torch.tensor([0, 1]),
        kv_lens=torch.tensor([1]),
        index=served.pool.index([[0]], [1], ()),
    )
    kv = PagedKV(k=torch.ones(1, 4, 1, 4), v=torch.ones(1, 4, 1, 4))
    for answer in (float("nan"), 1.0, 9.0):
        errors("decode", layer, torch.ones(1, 1, 4), kv, batch, torch.full((1, 1, 4), answer))
    assert errors.worst["decode"] != errors.worst["decode"]
    errors = PhaseErrors(calls_per_phase=1)
    for answer in (1.0, 9.0):
        errors("decode", layer, torch.ones(1, 1, 4), kv, batch, torch.full((1, 1, 4), answer))
    assert errors.worst == {"decode": 0.0}


def test_a_scaled_config_keeps_what_attention_sees() -> None:
    """Head dim, heads ratio, sinks, window kinds and rotary base are the model's own; sizes are not."""
    config = DecoderConfig.from_config(GPT_OSS, layers=3)
    assert (config.num_qo_heads, config.num_kv_heads, config.head_dim) == (16, 2, 64)
    assert config.windows == (23, -1, 23)
    assert (config.sinks, config.softcap, config.rope_theta, config.scale) == (True, 0.0, 150000.0, 0.125)
    gemma = DecoderConfig.from_config({**GEMMA2, "query_pre_attn_scalar": 144})
    assert (gemma.softcap, gemma.scale) == (10.0, pytest.approx(1 / 12))


def test_a_kind_of_layer_that_comes_late_is_kept() -> None:
    """Five sliding layers for one full layer still give a full layer when four are kept."""
    types = [*["sliding_attention"] * 5, "full_attention"] * 3
    config = DecoderConfig.from_config({**GEMMA2, "layer_types": types}, layers=4)
    assert config.windows == (23, 23, 23, -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"kv_lora_rank": 512}, r"needs multi-head attention, got kv_lora_rank 512", id="mla"),
        pytest.param({"layer_types": ["linear_attention"]}, "got linear_attention", id="linear"),
        pytest.param({"num_attention_heads": None}, "'num_attention_heads' of 1 or more, got None", id="missing"),
        pytest.param({"num_attention_heads": "8"}, "got '8'", id="text"),
        pytest.param({"num_key_value_heads": 3}, "got 8 and 3", id="ratio"),
        pytest.param({"head_dim": 33}, "even head_dim", id="odd"),
        pytest.param({"rms_norm_eps": float("nan")}, "finite number 'rms_norm_eps'", id="nan"),
    ],
)
def test_a_config_the_decoder_can_not_be_is_refused(change: dict[str, object], message: str) -> None:
    """Malformed facts and other attention families give one clear line."""
    with pytest.raises(BadModel, match=message):
        DecoderConfig.from_config({**LLAMA, **change})


@pytest.mark.parametrize("layers", [0, 3])
def test_a_draft_has_some_of_the_targets_layers(layers: int) -> None:
    """A draft of no layer, or of more than there are, is refused."""
    with pytest.raises(BadModel, match="needs 1 to 2 draft layers"):
        Decoder.draft_of(decoder("llama"), layers)


def test_weights_depend_on_the_seed_alone() -> None:
    """The same seed gives the same model, in any dtype; another seed another model."""
    config = decoder("llama").config
    first, again, other = Decoder(config, 3), Decoder(config, 3, dtype=torch.float16), Decoder(config, 4)
    assert torch.equal(first.layers[1].q.half(), again.layers[1].q)
    assert not torch.equal(first.layers[1].q, other.layers[1].q)
