"""A call like the last right one is let through on a few comparisons, and no call is that `check_call` refuses."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from backstamp import repeated_calls
from backstamp.attention import PagedKV
from backstamp.errors import UnsupportedBatch
from backstamp.repeated_calls import CallChecks
from backstamp.testing.batches import SMALL_LAYER, make_batch, split_new
from backstamp.testing.requests import request_for
from tests.core.declared_rows import PLAIN, STEP

ABLE = replace(
    PLAIN,
    kv_forms=frozenset({"paged", "ragged"}),
    features=frozenset({"lse", "sinks", "alibi", "encoder", "non_causal"}),
    sink_dtypes=frozenset({"fp32"}),
)
LATENT = replace(ABLE, family="mla", head_dims=((48, 16),), kv_forms=frozenset({"paged"}))
LONGER = make_batch([4, 3], [9, 30])
LATENT_LAYER = replace(SMALL_LAYER, num_kv_heads=1, head_dim=48, v_head_dim=16)


def shaped(tensor: torch.Tensor, **changes: object) -> torch.Tensor:
    """Zeros like a tensor's, with another shape, dtype or device."""
    asked = {"dtype": tensor.dtype, "device": tensor.device, **changes}
    size = asked.pop("size", tuple(tensor.shape))
    return torch.zeros(size, **asked)


def uneven(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape with a last stride of 2."""
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])[..., ::2]


OUT = torch.zeros(5, SMALL_LAYER.num_qo_heads, SMALL_LAYER.v_head_dim)
LSE = torch.zeros(5, SMALL_LAYER.num_qo_heads)
#: Changes to a right call, with the field that the refusal names.
WRONG = {
    "q-tokens": ("q", {"q": shaped(STEP.q, size=(6, *STEP.q.shape[1:]))}),
    "q-heads": ("q", {"q": shaped(STEP.q, size=(5, 2, 32))}),
    "q-dtype": ("q", {"q": shaped(STEP.q, dtype=torch.float16)}),
    "q-stride": ("q", {"q": uneven(STEP.q)}),
    "q-device": ("q device", {"q": shaped(STEP.q, device="meta")}),
    "out-shape": ("out", {"out": shaped(OUT, size=(5, 4, 16))}),
    "out-dtype": ("out", {"out": shaped(OUT, dtype=torch.float16)}),
    "out-stride": ("out", {"out": uneven(OUT)}),
    "out-device": ("out device", {"out": shaped(OUT, device="meta")}),
    "lse-shape": ("lse", {"lse": shaped(LSE, size=(4, 4))}),
    "lse-dtype": ("lse", {"lse": shaped(LSE, dtype=torch.float64)}),
    "lse-device": ("lse device", {"lse": shaped(LSE, device="meta")}),
    "q_rope": ("q_rope", {"q_rope": shaped(STEP.q)}),
    "indices": ("indices", {"indices": torch.zeros(5, 4, dtype=torch.int32)}),
    "kv-gone": ("kv", {"kv": None}),
    "kv-other": ("kv.k", {"kv": replace(STEP.kv, k=STEP.kv.k[:, :8])}),
    "both-keys": ("new", {"new": split_new(STEP)[1]}),
    "layer": ("window", {"layer": replace(SMALL_LAYER, window_left=4)}),
    "step": ("q", {"batch": LONGER.batch}),
}


def call(checks: CallChecks, **changes: object) -> None:
    """One layer's call, right but for the changes."""
    given = {"q": STEP.q, "kv": STEP.kv, "layer": STEP.layer, "batch": STEP.batch, "out": OUT, "lse": LSE, **changes}
    checks(given.pop("q"), given.pop("kv"), given.pop("layer"), given.pop("batch"), **given)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers whose calls were checked whole, in order."""
    seen: list[int] = []
    check_call = repeated_calls.check_call

    def counted(request, q, kv, layer, batch, **tensors):
        seen.append(layer.layer_id)
        check_call(request, q, kv, layer, batch, **tensors)

    monkeypatch.setattr(repeated_calls, "check_call", counted)
    return seen


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_after_a_right_one_is_refused(wrong: str) -> None:
    """The memory of a right call lets no other pass: each field is refused as in a first call."""
    field, changes = WRONG[wrong]
    checks = CallChecks(request_for(ABLE))
    call(checks)
    with pytest.raises(UnsupportedBatch) as refused:
        call(checks, **changes)
    assert refused.value.needed.startswith(f"{field}:")
    # the refused call left nothing behind either
    with pytest.raises(UnsupportedBatch):
        call(checks, **changes)
    call(checks)


@pytest.mark.parametrize("part", ["q", "q_rope"])
@pytest.mark.parametrize(
    "change", [{"size": (6, 4, 16)}, {"size": (5, 4, 8)}, {"dtype": torch.float16}, {"device": "meta"}, None], ids=str
)
def test_both_parts_of_a_latent_query_are_compared(part: str, change: dict[str, object] | None) -> None:
    """A rotary part of another shape, dtype, stride or device is no call that was right before."""
    checks = CallChecks(request_for(LATENT, (LATENT_LAYER,)))
    kv = replace(STEP.kv, k=torch.zeros(4, 16, 1, 48), v=None)
    query = {"q": torch.zeros(5, 4, 16), "q_rope": torch.zeros(5, 4, 32)}
    given = {"kv": kv, "layer": LATENT_LAYER, "out": torch.zeros(5, 4, 16), "lse": None}
    call(checks, **given, **query)
    call(checks, **given, **query)
    with pytest.raises(UnsupportedBatch):
        call(
            checks, **given, **query | {part: uneven(query[part]) if change is None else shaped(query[part], **change)}
        )
    with pytest.raises(UnsupportedBatch):
        call(checks, **given, **query | {"q_rope": None})


CHOSEN = torch.zeros(5, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    "wrong",
    [
        shaped(CHOSEN, size=(6, 4)),
        CHOSEN[..., None],
        shaped(CHOSEN, dtype=torch.int64),
        shaped(CHOSEN, device="meta"),
        CHOSEN.T.contiguous().T,
        None,
    ],
    ids=lambda wrong: (
        "None" if wrong is None else f"{tuple(wrong.shape)} {wrong.stride()} {wrong.dtype} {wrong.device}"
    ),
)
def test_chosen_keys_are_compared_in_every_call(wrong: torch.Tensor | None, whole: list[int]) -> None:
    """A right choice of another step is let through, another shape, dtype, stride, device or none is refused."""
    checks = CallChecks(request_for(replace(LATENT, family="sparse_mla"), (LATENT_LAYER,)))
    kv = replace(STEP.kv, k=torch.zeros(4, 16, 1, 48), v=None)
    given = {"q": torch.zeros(5, 4, 48), "kv": kv, "layer": LATENT_LAYER, "out": torch.zeros(5, 4, 16), "lse": None}
    call(checks, **given, indices=CHOSEN)
    call(checks, **given, indices=shaped(CHOSEN, size=(5, 8)))
    assert whole == [0]
    with pytest.raises(UnsupportedBatch, match="indices"):
        call(checks, **given, indices=wrong)


def test_one_chosen_key_has_no_stride_to_hold(whole: list[int]) -> None:
    """A choice `[T, 1]` may be cut from one that lies keys first."""
    checks = CallChecks(request_for(replace(LATENT, family="sparse_mla"), (LATENT_LAYER,)))
    kv = replace(STEP.kv, k=torch.zeros(4, 16, 1, 48), v=None)
    given = {"q": torch.zeros(5, 4, 48), "kv": kv, "layer": LATENT_LAYER, "out": torch.zeros(5, 4, 16), "lse": None}
    one = CHOSEN.T.contiguous().T[:, :1]
    assert one.stride() == (1, 5)
    call(checks, **given, indices=one)
    call(checks, **given, indices=one)
    assert whole == [0, 0]


def test_a_layer_is_checked_whole_once(whole: list[int]) -> None:
    """Later calls, of the same step and of other steps and sizes, are compared alone; a new step is checked once."""
    checks = CallChecks(request_for(ABLE))
    second = replace(STEP.layer, layer_id=1)
    for layer in (STEP.layer, second, STEP.layer, second):
        call(checks, layer=layer)
    assert whole == [0, 1]
    longer = {"batch": LONGER.batch, "q": shaped(STEP.q, size=(7, 4, 32)), "out": None, "lse": None}
    for layer in (STEP.layer, second, second):
        call(checks, layer=layer, **longer)
    assert whole == [0, 1, 0]
    call(checks, out=None)
    assert whole == [0, 1, 0, 0]


def test_another_cache_like_the_last_is_not_checked_whole(whole: list[int]) -> None:
    """An engine whose cache grows hands in new tensors in every step: more pages, and other distances between them."""
    checks = CallChecks(request_for(ABLE))
    call(checks)
    k, v = (torch.zeros(9, 2, *half.shape[1:])[:, 0] for half in (STEP.kv.k, STEP.kv.v))
    call(checks, kv=PagedKV(k=k, v=v))
    assert whole == [0]


@pytest.mark.parametrize("half", ["k", "v"])
@pytest.mark.parametrize(
    "change",
    [{"size": (9, 8, 2, 32)}, {"size": (9, 16, 1, 32)}, {"dtype": torch.float16}, {"device": "meta"}, None],
    ids=str,
)
def test_another_cache_is_refused_for_what_it_is(half: str, change: dict[str, object] | None) -> None:
    """Another page size, head count, dtype, stride or device of either half."""
    checks = CallChecks(request_for(ABLE))
    call(checks)
    own = getattr(STEP.kv, half)
    with pytest.raises(UnsupportedBatch, match=f"kv.{half}"):
        call(checks, kv=replace(STEP.kv, **{half: uneven(own) if change is None else shaped(own, **change)}))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"v": torch.zeros(1, 16, 2, 32)}, "kv.v"),
        ({"v": None}, "kv.v"),
        ({"layout": "packed"}, "kv.layout"),
        ({"k_scale": 0.5}, "kv.k_scale"),
        ({"v_scale": 0.5}, "kv.v_scale"),
        ({"k_sf": torch.zeros(1)}, "kv.k_sf"),
        ({"v_sf": torch.zeros(1)}, "kv.k_sf"),
    ],
    ids=str,
)
def test_another_cache_is_refused_for_what_it_brings(change: dict[str, object], field: str) -> None:
    """Halves of different lengths, a half too few, another layout, scales."""
    checks = CallChecks(request_for(ABLE))
    call(checks)
    with pytest.raises(UnsupportedBatch, match=field):
        call(checks, kv=replace(STEP.kv, **change))


def test_an_lse_is_checked_whole_the_first_time(whole: list[int]) -> None:
    """A call without one says nothing of a row that declares none."""
    checks = CallChecks(request_for(replace(ABLE, features=frozenset())))
    call(checks, lse=None)
    with pytest.raises(UnsupportedBatch, match="the row declares no LSE"):
        call(checks)
    assert whole == [0, 0]


@pytest.mark.parametrize(
    "changes", [{"sinks": torch.zeros(4)}, {"alibi": torch.zeros(4)}, {"attn_type": "encoder"}], ids=str
)
def test_what_may_change_under_a_layer_is_checked_whole(changes: dict[str, object], whole: list[int]) -> None:
    """Sinks and slopes may be moved after a call, and a layer that looks both ways is wrong in a causal step alone."""
    checks = CallChecks(request_for(ABLE))
    layer = replace(SMALL_LAYER, **changes)
    both_ways = replace(STEP.batch, causal=False)
    for _ in range(2):
        call(checks, layer=layer, batch=both_ways, lse=None)
    assert whole == [0, 0]


def test_a_causal_step_is_refused_by_a_layer_that_looks_both_ways() -> None:
    """Though another layer of the same step was right, and this one in an earlier step."""
    checks = CallChecks(request_for(ABLE))
    encoder = replace(SMALL_LAYER, layer_id=1, attn_type="encoder")
    call(checks, layer=encoder, batch=replace(STEP.batch, causal=False))
    call(checks)
    with pytest.raises(UnsupportedBatch, match="causal"):
        call(checks, layer=encoder)


def test_neither_cache_nor_step_is_kept_alive() -> None:
    """An engine that frees its cache gets the memory back while the object lives."""
    checks = CallChecks(request_for(ABLE))
    kv, batch = replace(STEP.kv), replace(STEP.batch)
    call(checks, kv=kv, batch=batch)
    seen = weakref.ref(kv), weakref.ref(batch)
    del kv, batch
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
    # what is gone is nothing that may be handed in
    with pytest.raises(UnsupportedBatch, match="kv"):
        call(checks, kv=None)
    call(checks)


def test_a_call_without_a_cache_is_refused_after_the_cache_has_gone() -> None:
    """The step still lives: a dead reference answers None, as the call does."""
    checks = CallChecks(request_for(ABLE))
    kv = replace(STEP.kv)
    call(checks, kv=kv)
    del kv
    gc.collect()
    with pytest.raises(UnsupportedBatch, match="kv"):
        call(checks, kv=None)
