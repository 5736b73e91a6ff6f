"""A step's later sparse layers run the code of its first one, where Triton would have compiled the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp_dsa.portable import LOG2_E, PortableSparse, merge_two
from backstamp_dsa.slots import find_slots
from backstamp_dsa.steps import SparseStep
from tests.compiled_code import apart, constants_of, shifted
from tests.plugins.dsa.cases import latent_step
from tests.plugins.dsa.launched import KERNELS, ROWS, TOPK, Call, counts, stand_in


@pytest.fixture
def kernels(monkeypatch):
    """Every kernel of a layer, as on an H100."""
    return stand_in(monkeypatch)


@pytest.mark.parametrize("name", KERNELS)
def test_a_later_layer_runs_the_first_ones_code(name, kernels):
    """With its own tensors, and with the constants of the first launch: slots, attention and merge."""
    call = Call(name)
    call.run()
    for field in ("q", "q_rope", "k", "indices", "out", "lse"):
        tensor = getattr(call, field)
        setattr(call, field, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_())
    call.layer = replace(call.layer, layer_id=4, scale=0.25)
    call.run()
    assert [counts(kernels[at]) for at in (name, "merge", "slots")] == [(1, 1)] * 3
    for at in (name, "merge", "slots"):
        (first,), (again,) = kernels[at].first, kernels[at].again
        assert constants_of(again) == constants_of(first)
    (slot,), (attend,), (merge,) = (kernels[at].again for at in ("slots", name, "merge"))
    assert slot["indices_ptr"] is call.indices
    assert all(attend[at] is slot[at] for at in ("slots_ptr", "ends_ptr", "seen_ptr"))
    assert attend["q_ptr"] is call.q
    assert attend["q_rope_ptr"] is call.q_rope
    assert attend["rows_ptr"] is call.k
    assert attend["logit_scale"] == 0.25 * LOG2_E
    assert attend["out_ptr"] is merge["out_ptr"] is call.out
    assert attend["lse_ptr"] is merge["lse_ptr"] is call.lse


#: What a later layer may have otherwise, and which kernels are compiled for it: attention, merge, slots.
UNLIKE = {
    "q tokens": (lambda call: {"q": apart(call.q)}, "a"),
    "q heads": (lambda call: {"q": apart(call.q, 1)}, "a"),
    "q address": (lambda call: {"q": shifted(call.q)}, "a"),
    "q_rope tokens": (lambda call: {"q_rope": apart(call.q_rope)}, "a"),
    "q_rope heads": (lambda call: {"q_rope": apart(call.q_rope, 1)}, "a"),
    "q_rope address": (lambda call: {"q_rope": shifted(call.q_rope)}, "a"),
    "no q_rope": (lambda call: {"q": call.whole[:, :4], "q_rope": None}, "a"),
    "cache rows": (lambda call: {"k": apart(apart(call.k), 1)}, "a"),
    "cache address": (lambda call: {"k": shifted(call.k)}, "a"),
    "cache pages": (lambda call: {"k": apart(call.k)}, "s"),
    "indices tokens": (lambda call: {"indices": apart(call.indices)}, "s"),
    "indices address": (lambda call: {"indices": shifted(call.indices)}, "s"),
    "fewer indices": (lambda call: {"indices": call.choices[:, :512]}, "ams"),
    "out tokens": (lambda call: {"out": apart(call.out)}, "am"),
    "out heads": (lambda call: {"out": apart(call.out, 1)}, "am"),
    "out address": (lambda call: {"out": shifted(call.out)}, "am"),
    "lse tokens": (lambda call: {"lse": apart(call.lse)}, "am"),
    "lse heads": (lambda call: {"lse": apart(call.lse, 1)}, "am"),
    "lse address": (lambda call: {"lse": shifted(call.lse)}, "am"),
    "no lse": (lambda call: {"lse": None}, "am"),
    "more heads": (
        lambda call: {
            "layer": replace(call.layer, num_qo_heads=8),
            "q": call.whole[..., :512],
            "q_rope": call.whole[..., 512:],
            "out": call.outs,
            "lse": call.lses,
        },
        "am",
    ),
}


@pytest.mark.parametrize("unlike", UNLIKE)
@pytest.mark.parametrize("name", KERNELS)
def test_what_triton_would_compile_anew_is_not_run_by_other_code(name, unlike, kernels):
    """Strides, addresses, absent tensors and sizes that code is cut to; what a kernel does not read is no matter."""
    call = Call(name)
    call.run()
    change, compiled = UNLIKE[unlike]
    for field, value in change(call).items():
        setattr(call, field, value)
    call.run()
    anew, alike = (2, 0), (1, 1)
    # what the SM90 kernel cannot copy by 16 bytes is the tile kernel's, which has other shares to merge
    left = name == "hopper" and unlike in ("q address", "q_rope address", "cache address")
    assert counts(kernels[name]) == ((1, 0) if left else anew if "a" in compiled else alike)
    assert counts(kernels["tile"]) == ((1, 0) if left else counts(kernels[name]) if name == "tile" else (0, 0))
    assert counts(kernels["merge"]) == (anew if "m" in compiled or left else alike)
    assert counts(kernels["slots"]) == (anew if "s" in compiled else alike)


@pytest.mark.parametrize("unlike", ["head_dim", "v_head_dim"])
def test_attention_is_cut_to_its_head_dims(unlike, kernels):
    """The same tensors by their addresses and strides, read otherwise."""
    call = Call("tile")
    sparse, step = PortableSparse(call.request), call.state
    chosen = find_slots(step, indices=call.indices, width=TOPK, entries_per_page=16, slots_per_page=32)
    sparse.attend(call.q, call.q_rope, call.k, chosen, call.layer, step, call.out, call.lse)
    out = call.out if unlike == "head_dim" else call.out[..., :256]
    layer = replace(call.layer, **{unlike: getattr(call.layer, unlike) // 2})
    sparse.attend(call.q, call.q_rope, call.k, chosen, layer, step, out, call.lse)
    assert counts(kernels["tile"]) == (2, 0)
    assert counts(kernels["merge"]) == ((1, 1) if unlike == "head_dim" else (2, 0))


def test_another_step_has_its_own_code(kernels):
    """A step of other sizes may be cut otherwise."""
    call = Call("hopper")
    call.run()
    call.state = call.backend.plan(call.step.batch)
    call.run()
    assert [counts(kernels[at]) for at in ("hopper", "merge", "slots")] == [(2, 0)] * 3


#: What a merge of two parts is handed, each a view of a tensor with room.
MERGED = {
    "part": lambda: torch.zeros(2, 3, 8, 512)[:, :, :4],
    "part_lse": lambda: torch.zeros(2, 3, 8)[:, :, :4],
    "out": lambda: torch.zeros(3, 8, 512)[:, :4],
    "lse": lambda: torch.zeros(3, 8)[:, :4],
    "sinks": lambda: torch.zeros(4),
}
UNLIKE_MERGES = {
    **{f"{name} {dim}": (name, lambda t, dim=dim: apart(t, dim)) for name in ("part", "part_lse") for dim in range(3)},
    **{f"{name} {dim}": (name, lambda t, dim=dim: apart(t, dim)) for name in ("out", "lse") for dim in range(2)},
    **{f"{name} address": (name, shifted) for name in MERGED},
    **{f"no {name}": (name, lambda t: None) for name in ("lse", "sinks")},
}


@pytest.mark.parametrize("unlike", [None, *UNLIKE_MERGES])
def test_a_merge_is_cut_to_its_tensors(unlike, kernels):
    """Parts, outputs, LSE and sinks: where they lie, how far apart, and whether they are there."""
    step = SparseStep(latent_step(ROWS).batch, "page_table")
    merge_two(step=step, **{name: make() for name, make in MERGED.items()})
    given = {name: make() for name, make in MERGED.items()}
    if unlike is not None:
        name, change = UNLIKE_MERGES[unlike]
        given[name] = change(given[name])
    merge_two(step=step, **given)
    assert counts(kernels["merge"]) == ((1, 1) if unlike is None else (2, 0))
    last = (kernels["merge"].again or kernels["merge"].first)[-1]
    assert all(last[f"{name}_ptr"] is given[name] for name in ("out", "lse", "sinks"))
    assert last["part_ptr"].data_ptr() == given["part"].data_ptr()


def test_a_merge_is_cut_to_how_many_numbers_it_adds(kernels):
    """The same tensors by their addresses and strides, the first half of each row."""
    step, given = SparseStep(latent_step(ROWS).batch, "page_table"), {name: make() for name, make in MERGED.items()}
    merge_two(step=step, **given)
    merge_two(step=step, **given | {name: given[name][..., :256] for name in ("part", "out")})
    assert counts(kernels["merge"]) == (2, 0)


def test_a_merge_is_cut_to_the_base_of_its_logarithms(kernels):
    """Two parts laid as our own two shares are, and weighed by natural logarithms where ours are base 2."""
    call = Call("hopper")
    call.indices = call.choices[:, :512]
    call.run()
    (ours,) = kernels["merge"].first
    assert (ours["num_shares"], ours["BASE_2"]) == (2, True)
    part, part_lse = torch.zeros(2, 4, 2, 512).permute(2, 0, 1, 3), torch.zeros(2, 4, 2).permute(2, 0, 1)
    merge_two(part, part_lse, call.state, call.out, call.lse, None)
    strides = [name for name in ours if "stride" in name]
    assert counts(kernels["merge"]) == (2, 0)
    assert [kernels["merge"].first[1][name] for name in strides] == [ours[name] for name in strides]
