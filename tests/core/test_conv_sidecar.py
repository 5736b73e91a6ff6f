"""The wrapper of a draft with short convolutions: its numbers, its stamp, and that forwards are held to stamps."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch

from backstamp.attention import Batch, KVIndex
from backstamp.construction import RunnerBackends
from backstamp.conv_sidecar import ConvSidecar, wrap_with_convolutions
from backstamp.declarations import Phase
from backstamp.errors import BadInput, BuiltMismatch, Unstamped, UnsupportedBatch
from backstamp.forward import check_entry
from backstamp.model import DraftFacts, default_model
from backstamp.plan import Plan
from backstamp.stamp import read_stamp
from backstamp.testing.fakes import fake_plugin
from tests.building import SPEC, built_from, plan_on
from tests.resolving import kernel

PHASES: frozenset[Phase] = frozenset({"prefill", "decode", "verify", "draft_decode", "draft_extend"})
KERNELS = fake_plugin("kernels", [kernel("one", phases=PHASES, features=frozenset({"window", "tree_mask"}))])


def _draft(conv_sidecar: bool) -> tuple[Plan, RunnerBackends]:
    """The draft runner of an EAGLE pair, one step deep."""
    draft = replace(default_model(), draft=DraftFacts(conv_sidecar=conv_sidecar))
    requests = replace(SPEC, speculative_num_steps=1, speculative_topk=1)
    plan = plan_on("h100", KERNELS, requests=requests, model=draft, role="draft")
    return plan, built_from(plan, KERNELS)


def _batch(lengths: list[int]) -> Batch:
    """Rows of these many new tokens; the cache is not read here."""
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    index = KVIndex(page_size=1, page_table=torch.zeros(len(lengths), 1, dtype=torch.int32))
    return Batch(
        phase="draft_extend",
        qo_indptr=indptr,
        kv_lens=indptr.diff(),
        max_q_len=max(lengths, default=0),
        max_kv_len=max(lengths, default=0),
        num_rows=len(lengths),
        num_tokens=sum(lengths),
        index=index,
    )


def _loop(x, weight, bias, lengths, windows, slots):
    """The same, a token at a time."""
    out, windows, at = torch.zeros_like(x), windows.clone(), 0
    for length, slot in zip(lengths, slots.tolist(), strict=True):
        row = torch.cat([windows[slot] if slot >= 0 else torch.zeros_like(windows[0]), x[at : at + length].T], 1)
        for token in range(length):
            out[at + token] = (row[:, token : token + weight.shape[1]] * weight).sum(1) + bias
        if slot >= 0:
            windows[slot] = row[:, row.shape[1] - windows.shape[2] :]
        at += length
    return out, windows


@pytest.mark.parametrize("lengths", [[3, 1, 5], [1, 0, 2, 0], [0, 0], [], [7], [2, 4]])
@pytest.mark.parametrize("taps", [2, 4])
def test_convolutions_are_those_of_a_loop_over_tokens(lengths: list[int], taps: int) -> None:
    """Ragged rows, rows without tokens, pads and no rows at all: outputs and the windows left behind."""
    torch.manual_seed(len(lengths) + taps)
    x, weight, bias = torch.randn(sum(lengths), 6), torch.randn(6, taps), torch.randn(6)
    windows, slots = torch.randn(8, 6, taps - 1), torch.randperm(8)[: len(lengths)].to(torch.int32)
    if len(slots) > 2:
        slots[1] = -1
    want, moved = _loop(x, weight, bias, lengths, windows, slots)
    got = ConvSidecar(object()).convolve(x, weight, _batch(lengths), windows, slots, bias)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(windows, moved)


def test_a_weight_without_a_window_is_refused() -> None:
    """One tap looks at no earlier token."""
    wrapper = ConvSidecar(object())
    with pytest.raises(UnsupportedBatch, match="at least 2 taps"):
        wrapper.convolve(torch.ones(1, 2), torch.ones(2, 1), _batch([1]), torch.ones(1, 2, 0), torch.zeros(1))


def test_only_the_draft_extend_of_a_draft_with_convolutions_is_wrapped_and_the_wrapper_is_stamped() -> None:
    """SGLang #33023: one wrapper, around one backend, with the stamp of what it wraps."""
    plan, backends = _draft(conv_sidecar=True)
    assert plan.conv_sidecar
    built = backends.serving_attention_backend("draft_extend")
    assert isinstance(built, ConvSidecar)
    assert read_stamp(built) == read_stamp(built.inner)
    assert not isinstance(backends.serving_attention_backend("prefill"), ConvSidecar)
    plan, backends = _draft(conv_sidecar=False)
    assert not isinstance(backends.serving_attention_backend("draft_extend"), ConvSidecar)


def test_what_was_never_stamped_is_not_wrapped() -> None:
    """A wrapper has no stamp of its own to give."""
    with pytest.raises(Unstamped):
        wrap_with_convolutions(object())


def test_a_forward_is_held_to_the_stamp_of_what_serves_it() -> None:
    """What was swapped in without a stamp, or was built for another phase, is refused on entry."""
    _, backends = _draft(conv_sidecar=False)
    built = backends.serving_attention_backend("draft_extend")
    assert check_entry(built, "draft_extend").kernel == "one"
    with pytest.raises(Unstamped, match="swapped in later"):
        check_entry(object(), "draft_extend")
    with pytest.raises(BuiltMismatch, match="forward mode target_verify: needs a backend built for verify"):
        check_entry(built, "target_verify")
    with pytest.raises(BadInput, match="forward mode"):
        check_entry(built, "warmup")


def test_built_objects_carry_the_resolved_pair_beside_their_stamp() -> None:
    """Under the names engines read."""
    steps = kernel("steps", phases=PHASES - {"prefill"}, features=frozenset({"window", "tree_mask"}))
    split = fake_plugin("kernels", [kernel("reads", phases=frozenset({"prefill"})), steps])
    requests = replace(SPEC, prefill_attention_backend="reads", decode_attention_backend="steps")
    plan = plan_on("h100", split, requests=requests)
    backends = built_from(plan, split)
    pairs = {
        (built.prefill_attention_backend_str, built.decode_attention_backend_str)  # type: ignore[attr-defined]
        for built in backends.objects.values()
    }
    assert pairs == {("reads", "steps")} == {backends.attention_backends()}
