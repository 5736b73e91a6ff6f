"""A step's later layers are launched by the code of its first one, where Triton would have compiled the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backstamp.attention import PagedKV
from backstamp_triton import latent_launch, prefill_hopper, tile_launch
from backstamp_triton.backend import TritonAttention
from tests.compiled_code import Kernel, apart, constants_of, shifted
from tests.plugins.triton.cases import Case, build_attention, build_mla, make

CASES = {
    "decode": Case("d", ((1, 5000), (1, 64)), heads=(8, 2), dims=(128, 128), dtype="bf16", phase="decode"),
    "prefill": Case("p", ((200, 200), (56, 500)), heads=(8, 2), dims=(128, 128), dtype="bf16"),
    "latent": Case("l", ((1, 5000),) * 2, mla=True, heads=(16, 1), dims=(576, 512), dtype="bf16", phase="decode"),
}
#: A latent cache for the tile kernel: the latent one takes no softcap.
LATENT_TILES = dataclasses.replace(CASES["latent"], softcap=30.0)
#: Rows too short to be split.
SHORT_LATENT = dataclasses.replace(CASES["latent"], rows=((1, 64),) * 2)


@pytest.fixture
def kernels(monkeypatch):
    """The attention kernels and the merge, as on an H100."""
    monkeypatch.setattr(TritonAttention, "_find_chip", lambda self, device: ("9.0", 132))
    tile, prefill = Kernel(tile_launch.attend_tile), Kernel(prefill_hopper.attend_prefill)
    latent, merge = Kernel(latent_launch.attend_latent), Kernel(tile_launch.combine_splits)
    monkeypatch.setattr(tile_launch, "attend_tile", tile)
    monkeypatch.setattr(tile_launch, "combine_splits", merge)
    monkeypatch.setattr(prefill_hopper, "attend_prefill", prefill)
    monkeypatch.setattr(latent_launch, "attend_latent", latent)
    return {"decode": tile, "prefill": prefill, "latent": latent, "merge": merge}


def _planned(case):
    drawn = make(case)
    backend = (build_mla if case.mla else build_attention)(drawn.request).backend
    return drawn, backend, backend.plan(drawn.batch)


@pytest.mark.parametrize("name", CASES)
def test_a_later_layer_runs_the_first_ones_code(name, kernels):
    """With its own tensors, and with the constants of the first launch."""
    drawn, backend, state = _planned(CASES[name])
    backend.forward(drawn.q, drawn.kv, drawn.layer, state)
    second = dataclasses.replace(drawn.layer, layer_id=1, scale=0.25)
    kv = PagedKV(k=drawn.kv.k.clone(), v=None if drawn.kv.v is None else drawn.kv.v.clone())
    q, out = drawn.q.clone(), torch.empty(*drawn.q.shape[:2], drawn.layer.v_head_dim, dtype=drawn.q.dtype)
    backend.forward(q, kv, second, state, out=out)
    kernel = kernels[name]
    (first,), (again,) = kernel.first, kernel.again
    assert again["q_ptr"] is q
    assert again["out_ptr"] is out
    assert again["logit_scale"] != first["logit_scale"]
    assert constants_of(again) == constants_of(first)
    assert len(kernels["merge"].first) == len(kernels["merge"].again) == 1


@pytest.mark.parametrize(
    "unlike",
    [f"{tensor} {how}" for tensor in ("q", "k", "v", "out") for how in ("apart", "shifted")]
    + ["lse", "window", "softcap", "sinks"],
)
@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_what_triton_would_compile_anew_is_not_run_by_other_code(name, unlike, kernels):
    """Strides, addresses, absent tensors and numbers that code is cut to."""
    drawn, backend, state = _planned(CASES[name])
    q, kv, layer = drawn.q, drawn.kv, dataclasses.replace(drawn.layer, layer_id=1)
    out, lse = torch.empty_like(q), None
    backend.forward(q, kv, drawn.layer, state)
    what, _, how = unlike.partition(" ")
    change = apart if how == "apart" else shifted
    if what in ("q", "out"):
        q, out = (change(q), out) if what == "q" else (q, change(out))
    elif what in ("k", "v"):
        kv = dataclasses.replace(kv, **{what: change(getattr(kv, what))})
    elif what == "lse":
        lse = torch.empty(q.shape[:2])
    else:
        changes = {"window": {"window_left": 40}, "softcap": {"softcap": 30.0}, "sinks": {"sinks": torch.zeros(8)}}
        layer = dataclasses.replace(layer, **changes[what])
    backend.forward(q, kv, layer, state, out=out, lse=lse)
    assert kernels[name].again == []
    # what the copy engine cannot bring is another kernel's
    kernel = kernels["decode"] if unlike in ("k shifted", "v shifted") else kernels[name]
    assert len(kernel.first) == (1 if kernel is not kernels[name] else 2)
    # the merge knows of outputs, LSE and sinks alone
    merge = kernels["merge"]
    if kernel is kernels[name]:
        assert (len(merge.first), len(merge.again)) == ((2, 0) if what in ("out", "lse", "sinks") else (1, 1))


@pytest.mark.parametrize("unlike", ["q apart", "q shifted", "out apart", "out shifted", "lse", "cache apart"])
def test_latent_code_is_cut_to_its_tensors_too(unlike, kernels):
    """As above, of the kernel for a latent cache; queries that cannot be copied by 16 bytes leave it to the tiles."""
    drawn, backend, state = _planned(CASES["latent"])
    q, kv, layer = drawn.q, drawn.kv, drawn.layer
    out, lse = torch.empty(*q.shape[:2], 512, dtype=q.dtype), None
    backend.forward(q, kv, layer, state)
    what, _, how = unlike.partition(" ")
    change = apart if how == "apart" else shifted
    if what == "lse":
        lse = torch.empty(q.shape[:2])
    elif what == "cache":
        kv = PagedKV(k=apart(kv.k), v=None)
    else:
        q, out = (change(q), out) if what == "q" else (q, change(out))
    backend.forward(q, kv, layer, state, out=out, lse=lse)
    assert kernels["latent"].again == []
    kernel = kernels["decode" if unlike == "q shifted" else "latent"]
    assert len(kernel.first) == (1 if unlike == "q shifted" else 2)


@pytest.mark.parametrize("change", [apart, shifted])
@pytest.mark.parametrize("name", CASES)
def test_an_lse_that_lies_otherwise_is_other_code(name, change, kernels):
    """Of the kernel, and of the merge after it."""
    drawn, backend, state = _planned(CASES[name])
    lse = torch.empty(drawn.q.shape[:2])
    for at in (lse, change(lse)):
        backend.forward(drawn.q, drawn.kv, drawn.layer, state, lse=at)
    for kernel in (kernels[name], kernels["merge"]):
        assert (len(kernel.first), kernel.again) == (2, [])


@pytest.mark.parametrize(
    ("case", "name"),
    [*((case, name) for name, case in CASES.items()), (SHORT_LATENT, "latent")],
    ids=[*CASES, "latent-unsplit"],
)
def test_sinks_that_lie_otherwise_are_other_code(case, name, kernels):
    """Of the kernel, and of the merge where there is one."""
    drawn, backend, state = _planned(case)
    sinks = torch.zeros(case.heads[0])
    for layer_id, at in enumerate((sinks, shifted(sinks))):
        layer = dataclasses.replace(drawn.layer, layer_id=layer_id, sinks=at)
        backend.forward(drawn.q, drawn.kv, layer, state)
    merges = 0 if case is SHORT_LATENT else 2
    assert (len(kernels[name].first), kernels[name].again) == (2, [])
    assert (len(kernels["merge"].first), kernels["merge"].again) == (merges, [])


# the latent kernel takes no rotary part that is not at 16 bytes
@pytest.mark.parametrize(
    ("name", "unlike"),
    [("decode", "apart"), ("decode", "shifted"), ("decode", "there"), ("latent", "apart"), ("latent", "there")],
)
def test_a_rotary_part_that_lies_otherwise_is_other_code(name, unlike, kernels):
    """And one that is there, though every stride says as much as of none; the merge knows of no queries."""
    drawn, backend, state = _planned(CASES["latent"] if name == "latent" else LATENT_TILES)
    q, rope = drawn.q.split((512, 64), -1)
    if unlike == "there":
        calls = [(drawn.q, None), (q, rope[:1, :1].expand_as(rope))]
    else:
        calls = [(q, rope), (q, (apart if unlike == "apart" else shifted)(rope))]
    for query, part in calls:
        backend.forward(query, drawn.kv, drawn.layer, state, q_rope=part)
    assert (len(kernels[name].first), kernels[name].again) == (2, [])
    assert (len(kernels["merge"].first), len(kernels["merge"].again)) == (1, 1)


def test_another_step_has_its_own_code(kernels):
    """A step of other sizes may be cut otherwise."""
    drawn, backend, state = _planned(CASES["decode"])
    backend.forward(drawn.q, drawn.kv, drawn.layer, state)
    backend.forward(drawn.q, drawn.kv, drawn.layer, backend.plan(drawn.batch))
    assert (len(kernels["decode"].first), kernels["decode"].again) == (2, [])
