"""Speculative decoding gives plain greedy tokens, through all five phases, and shows it when a phase is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV
from backstamp.declarations import PHASES
from backstamp.draft import DraftSteps
from backstamp.errors import BadInput
from backstamp.testing.decoder import Decoder
from backstamp.testing.kv_pool import KVPool
from backstamp.testing.reference import reference_attention
from backstamp.testing.runner import PhaseErrors, Runner
from backstamp.testing.speculative import Speculated, SpeculativeEngine, branch_tree
from tests import greedy
from tests.greedy import MODELS, NEW_TOKENS, PROMPT_LENS, decoder, prompts

SHAPES = [pytest.param(4, 1, id="chain-4"), pytest.param(3, 3, id="tree-3x3"), pytest.param(1, 2, id="tree-1x2")]

Spoil = Callable[[Batch], Batch]


@dataclass
class ReferenceBackend:
    """Serves the contract by float64 reference; `spoil` alters the batches of some phases, to see the tests red."""

    spoil: Mapping[str, Spoil] = field(default_factory=dict)
    gain: Mapping[str, float] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)

    def plan(self, batch: Batch, *, state: object = None, capture: bool = False) -> Batch:
        self.batches.append(batch)
        return batch

    def forward(self, q: Tensor, kv: PagedKV, layer: LayerSpec, state: Batch, *, out: Tensor) -> Tensor:
        batch = self.spoil.get(state.phase, lambda batch: batch)(state)
        return out.copy_(self.gain.get(state.phase, 1.0) * reference_attention(q, kv, layer, batch)[0])

    def serving_attention_backend(self, phase: str) -> ReferenceBackend:
        return self


def plain_tokens(target: Decoder) -> list[list[int]]:
    return greedy.engine(target).generate(prompts(), NEW_TOKENS)


def engine(
    target: Decoder,
    draft: Decoder,
    num_steps: int,
    topk: int,
    *,
    on_target: ReferenceBackend | None = None,
    on_draft: ReferenceBackend | None = None,
    pages: tuple[int, int] = (96, 96),
    page_size: int = 4,
    observe: PhaseErrors | None = None,
) -> SpeculativeEngine:
    target_pool = KVPool.for_layers(target.layer_specs, pages[0], page_size)
    draft_pool = KVPool.for_layers(draft.layer_specs, pages[1], page_size, seed=7)
    on_target, on_draft = on_target or ReferenceBackend(), on_draft or ReferenceBackend()
    return SpeculativeEngine(
        Runner(decoder=target, pool=target_pool, backends=on_target, observe=observe),
        Runner(decoder=draft, pool=draft_pool, backends=on_draft, observe=observe),
        DraftSteps([on_draft] * (num_steps - 1)) if num_steps > 1 else None,
        on_draft,
        num_steps=num_steps,
        topk=topk,
    )


def speculate(model: str, num_steps: int, topk: int, draft_layers: int, **more: object) -> Speculated:
    target = decoder(model)
    draft = Decoder.draft_of(target, draft_layers)
    return engine(target, draft, num_steps, topk, **more).generate(prompts(), NEW_TOKENS)


def without_causal(batch: Batch) -> Batch:
    return dataclasses.replace(batch, causal=False)


def without_tree(batch: Batch) -> Batch:
    return dataclasses.replace(batch, tree=None)


def one_short(batch: Batch) -> Batch:
    return dataclasses.replace(batch, kv_lens=batch.kv_lens - 1)


@pytest.mark.parametrize(("num_steps", "topk"), SHAPES)
@pytest.mark.parametrize("model", MODELS)
def test_speculative_tokens_equal_plain_tokens(model: str, num_steps: int, topk: int) -> None:
    """A draft that is right in part changes how many steps the target takes, and no token."""
    answer = speculate(model, num_steps, topk, draft_layers=1)
    assert answer.tokens == plain_tokens(decoder(model))
    assert 1.0 < answer.accept_length < num_steps + 1


@pytest.mark.parametrize("page_size", [1, 4, 16], ids="page-{}".format)
@pytest.mark.parametrize(("num_steps", "topk"), SHAPES)
@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
def test_a_draft_that_is_the_target_is_always_right(model: str, num_steps: int, topk: int, page_size: int) -> None:
    """Every drafted token is accepted, so a wrong position, slot or length anywhere in the draft loop shows."""
    answer = speculate(model, num_steps, topk, draft_layers=2, pages=(320, 320), page_size=page_size)
    assert answer.tokens == plain_tokens(decoder(model))
    assert answer.accept_length == num_steps + 1


@pytest.mark.parametrize(
    ("phase", "spoil"),
    [
        pytest.param("draft_decode", one_short, id="draft-decode-misses-its-own-token"),
        pytest.param("draft_extend", one_short, id="draft-extend-misses-its-own-token"),
        pytest.param("prefill", without_causal, id="draft-prefill-sees-the-future"),
    ],
)
@pytest.mark.parametrize(("num_steps", "topk"), [pytest.param(4, 1, id="chain"), pytest.param(3, 3, id="tree")])
def test_a_wrong_draft_loses_accept_length_and_no_token(num_steps: int, topk: int, phase: str, spoil: Spoil) -> None:
    """The draft's attention decides how much is accepted, never what."""
    broken = ReferenceBackend(spoil={phase: spoil})
    answer = speculate("llama", num_steps, topk, draft_layers=2, on_draft=broken)
    assert answer.tokens == plain_tokens(decoder("llama"))
    assert answer.accept_length < num_steps + 1


@pytest.mark.parametrize(
    ("num_steps", "topk", "backend"),
    [
        pytest.param(4, 1, ReferenceBackend(gain={"verify": 0.0}), id="chain-zeros"),
        pytest.param(3, 3, ReferenceBackend(gain={"verify": 0.0}), id="tree-zeros"),
        pytest.param(4, 1, ReferenceBackend({"verify": without_causal}), id="chain-causal-mask-dropped"),
        pytest.param(3, 3, ReferenceBackend({"verify": without_tree}), id="tree-mask-dropped"),
        pytest.param(4, 1, ReferenceBackend({"prefill": without_causal}), id="prefill-causal-mask-dropped"),
    ],
)
def test_wrong_attention_on_the_target_changes_the_tokens(num_steps: int, topk: int, backend: ReferenceBackend) -> None:
    """Equality with plain decoding is seen red: a verify step that sees too much or nothing gives other tokens."""
    answer = speculate("llama", num_steps, topk, draft_layers=1, on_target=backend)
    assert answer.tokens != plain_tokens(decoder("llama"))


@pytest.mark.parametrize(("num_steps", "topk"), SHAPES[:2])
def test_every_phase_but_plain_decode_runs_and_is_compared_with_the_reference(num_steps: int, topk: int) -> None:
    """Each phase reaches a backend through the observed door, the last page and scratch pages included."""
    errors = PhaseErrors(calls_per_phase=4)
    target = decoder("llama")
    run = engine(target, Decoder.draft_of(target, 1), num_steps, topk, observe=errors)
    run.generate(prompts(), (12,) * len(PROMPT_LENS))
    assert set(errors.worst) == set(PHASES) - {"decode"}
    assert max(errors.worst.values()) < 1e-6


@pytest.mark.parametrize(("num_steps", "topk"), SHAPES[:2])
def test_batches_of_each_phase_have_their_shape(num_steps: int, topk: int) -> None:
    """Draft step i has B * topk rows of one query over prefix + i + 1 tokens; verify is uniform; extend is ragged."""
    on_target, on_draft = ReferenceBackend(), ReferenceBackend()
    speculate("llama", num_steps, topk, draft_layers=1, on_target=on_target, on_draft=on_draft)
    steps = [batch for batch in on_draft.batches if batch.phase == "draft_decode"]
    verifies = [batch for batch in on_target.batches if batch.phase == "verify"]
    assert len(steps) == len(verifies) * (num_steps - 1)
    nodes = 1 + num_steps * topk
    for number, verify in enumerate(verifies):
        assert verify.num_tokens == verify.num_rows * nodes
        assert (verify.tree is None) == (topk == 1)
        for step, batch in enumerate(steps[number * (num_steps - 1) : (number + 1) * (num_steps - 1)]):
            assert batch.num_rows == batch.num_tokens == verify.num_rows * topk
            prefix = (verify.kv_lens - nodes + 1).repeat_interleave(topk)
            assert torch.equal(batch.kv_lens, prefix + step + 1)
    extends = [batch.qo_indptr.diff().unique() for batch in on_draft.batches if batch.phase == "draft_extend"]
    assert any(len(q_lens) > 1 for q_lens in extends)


@pytest.mark.parametrize(("num_steps", "topk"), SHAPES)
def test_too_few_pages_delay_requests_and_every_page_comes_back(num_steps: int, topk: int) -> None:
    """Scratch pages of the branches are counted at admission and freed after each round."""
    target = decoder("llama")
    scratch = topk * 2 if num_steps > 1 else 0
    run = engine(target, Decoder.draft_of(target, 1), num_steps, topk, pages=(11, 9 + scratch))
    assert run.generate(prompts(), NEW_TOKENS).tokens == plain_tokens(target)
    assert (run.target.pool.num_free, run.draft.pool.num_free) == (11, 9 + scratch)


@pytest.mark.parametrize("phase", ["prefill", "verify"])
def test_a_backend_that_reads_one_token_too_many_is_caught(phase: str) -> None:
    """The slot after a row's last token holds NaN, and NaN in the logits is an error that names the phase."""
    broken = ReferenceBackend({phase: lambda batch: dataclasses.replace(batch, kv_lens=batch.kv_lens + 1)})
    with pytest.raises(FloatingPointError, match=f"logits of a {phase} step are not finite"):
        speculate("llama", 4, 1, draft_layers=1, on_target=broken, on_draft=broken)


def test_a_branch_never_writes_into_the_prefix() -> None:
    """Branches share full prefix pages and own the rest: no row reads a page another row writes."""
    on_draft = ReferenceBackend()
    speculate("llama", 3, 3, draft_layers=1, on_draft=on_draft)
    for batch in on_draft.batches:
        if batch.phase == "draft_decode":
            assert batch.slot_mapping is not None
            pages = (batch.slot_mapping // 4).tolist()
            assert len(set(pages)) == batch.num_rows
            table = batch.index.page_table
            assert table is not None
            assert all(int((table == page).sum()) == 1 for page in pages)


def test_a_tree_node_sees_the_root_its_branch_so_far_and_itself() -> None:
    """Two branches of two nodes, one mask a row."""
    tree = branch_tree(3, num_steps=2, topk=2, device="cpu")
    assert tree.kind == "qlen"
    assert tree.buffer.shape == (3, 5, 5)
    assert tree.buffer.is_contiguous()
    assert tree.buffer[2].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]


def test_a_tree_wins_more_than_its_best_first_token_alone() -> None:
    """The second and third branch are accepted too, where the target takes their way."""
    chain, tree = (speculate("llama", 3, topk, draft_layers=1).accept_length for topk in (1, 3))
    assert tree > chain


def test_no_request_needs_no_round() -> None:
    """An empty request list answers an empty list and no accept length."""
    target = decoder("llama")
    assert engine(target, target, 3, 1).generate([], 4) == Speculated([], 0.0)


def test_progress_hears_of_every_token() -> None:
    """Counts add up to the tokens asked for; tokens accepted past a limit are not counted."""
    counts: list[int] = []
    target = decoder("llama")
    run = engine(target, target, 3, 1)
    run.progress = counts.append
    run.generate(prompts(), NEW_TOKENS)
    assert sum(counts) == sum(NEW_TOKENS)


@pytest.mark.parametrize(
    ("num_steps", "topk", "steps", "message"),
    [
        pytest.param(3, 1, 1, "needs 2 draft decode backends, got 1", id="container-too-short"),
        pytest.param(1, 1, 2, "needs 0 draft decode backends, got 2", id="container-for-one-step"),
        pytest.param(0, 1, 0, "of 1 or more", id="no-steps"),
        pytest.param(2, 0, 1, "of 1 or more", id="no-branch"),
        pytest.param(2, 129, 1, "topk up to 128", id="more-branches-than-tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(num_steps: int, topk: int, steps: int, message: str) -> None:
    """The container must have one backend for each step after the first."""
    served = engine(decoder("llama"), decoder("llama"), 2, 1)
    container = DraftSteps([ReferenceBackend()] * steps)
    with pytest.raises(BadInput, match=message):
        SpeculativeEngine(served.target, served.draft, container, ReferenceBackend(), num_steps=num_steps, topk=topk)


def test_a_request_that_can_not_run_is_refused() -> None:
    """Verify nodes and scratch pages count; the error names the request and both needs."""
    target = decoder("llama")
    run = engine(target, target, 3, 3, pages=(10, 12))
    with pytest.raises(BadInput, match="request 1: needs 10 target and 14 draft KV pages, got pools of 10 and 12"):
        run.generate([[1], [2] * 20], 9)
