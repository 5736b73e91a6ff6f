"""Both kernels against the float64 reference, over the features they share, and the rules the call contract sets."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV, RaggedKV
from backstamp.testing.batches import SMALL_LAYER, MadeStep, make_batch, make_tree, split_new
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_cpu.backend import build_flex_attention, build_torch_native, build_torch_native_rows_alone
from backstamp_cpu.plugin import FLEX_CPU, NATIVE

FACTORIES = {
    "torch_native": build_torch_native,
    "torch_native-rows-alone": build_torch_native_rows_alone,
    "flex_attention": build_flex_attention,
}
BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.5e-2}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

kernels = pytest.mark.parametrize("kernel", FACTORIES)
devices = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.skipif(
                    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
                    reason="needs a CUDA or ROCm device, and Triton compiled (pytest --noconftest)",
                ),
                # inductor's own imports use what torch has deprecated
                pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
            ],
        ),
    ],
)


@cache
def build(kernel, *, page_size=16, dtype="fp32", kv_dtype="same", device="cpu"):
    """One built backend for a target's three phases, shared by the tests: a backend holds no batch."""
    built = FACTORIES[kernel](
        request_for(
            NATIVE if kernel.startswith("torch_native") else FLEX_CPU,
            phases=("prefill", "decode", "verify"),
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            device=device,
        )
    )
    assert built.kernel == kernel.removesuffix("-rows-alone")
    return built.backend


def answer(backend, step: MadeStep, **changes):
    """The step's output."""
    kv = changes.pop("kv", step.kv)
    return backend.forward(step.q, kv, step.layer, backend.plan(step.batch), **changes)


def check_against_reference(backend, step: MadeStep, bound: float, *, kv=None, new=None):
    """Output, and LSE where the layer has no sinks, within `bound` of float64; -inf and zeros where nothing is seen."""
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, step.batch)
    kv = step.kv if kv is None else kv
    out = answer(backend, step, kv=kv, new=new).cpu()
    assert out.dtype == step.q.dtype
    assert relative_error(out, truth) < bound
    assert not out[true_lse.isinf().all(-1)].any()
    if step.layer.sinks is None:
        lse = torch.full(true_lse.shape, float("nan"), dtype=torch.float32, device=step.q.device)
        assert relative_error(answer(backend, step, kv=kv, new=new, lse=lse), truth) < bound
        lse = lse.cpu()
        assert torch.equal(lse.isinf(), true_lse.isinf())
        seen = ~true_lse.isinf()
        assert relative_error(lse[seen], true_lse[seen]) < bound


def layer(heads=(4, 2), dims=(32, 32), sinks=False, **changes) -> LayerSpec:
    """A small layer; `sinks` True gives each head another sink."""
    return replace(
        SMALL_LAYER,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dims[0],
        v_head_dim=dims[1],
        scale=dims[0] ** -0.5,
        sinks=torch.linspace(-1.0, 2.0, heads[0]) if sinks else None,
        **changes,
    )


@dataclass(frozen=True)
class Case:
    """One row of the pairwise matrix."""

    q_lens: list[int]
    kv_lens: list[int]
    layer: LayerSpec = field(default_factory=layer)
    options: dict = field(default_factory=dict)
    tree: str | None = None

    def step(self, dtype: str, device: str) -> MadeStep:
        tree = make_tree(self.q_lens, self.kv_lens, self.tree, device=device) if self.tree else None
        sinks = None if self.layer.sinks is None else self.layer.sinks.to(device)
        return make_batch(
            self.q_lens,
            self.kv_lens,
            layer=replace(self.layer, sinks=sinks),
            dtype=DTYPES[dtype],
            tree=tree,
            device=device,
            **self.options,
        )


RAGGED = ([5, 1, 0, 17, 3, 2], [5, 40, 0, 17, 33, 16])
DECODE = ([1, 1, 1, 1, 1], [1, 16, 17, 63, 64])
VERIFY = ([4, 4, 4], [4, 21, 33])
CASES = {
    "prefill": Case(*RAGGED),
    "decode-csr-hnd": Case(
        *DECODE, layer((6, 2)), {"phase": "decode", "index_form": "csr", "cache_form": "hnd", "host_lens": False}
    ),
    "window-page1-indirect": Case(*RAGGED, layer(window_left=7), {"page_size": 1, "index_form": "indirect"}),
    "softcap-sinks-page3-interleaved": Case(
        *RAGGED, layer(softcap=5.0, sinks=True), {"page_size": 3, "index_form": "csr", "cache_form": "interleaved"}
    ),
    "non-causal-page64-mixed-dims": Case(*RAGGED, layer(dims=(32, 16)), {"page_size": 64, "causal": False}),
    "non-causal-window": Case(*RAGGED, layer((4, 4), window_left=3), {"causal": False, "cache_form": "hnd"}),
    "row-causal-left-padding-window": Case(
        *RAGGED,
        layer((4, 1), window_left=11),
        {"causal": [True, False, True, False, True, False], "kv_starts": [2, 30, 0, 9, 33, 0]},
    ),
    "left-padding-sinks": Case(
        *RAGGED, layer(sinks=True), {"kv_starts": [0, 39, 0, 16, 32, 16], "index_form": "indirect"}
    ),
    "decode-window-sinks": Case(
        *DECODE, layer((4, 1), sinks=True, window_left=20), {"phase": "decode", "cache_form": "interleaved"}
    ),
    "decode-window0-softcap-page3": Case(
        *DECODE, layer((4, 4), softcap=30.0, window_left=0), {"phase": "decode", "page_size": 3}
    ),
    "pads": Case([1, 0, 3, 1, 1], [9, 0, 5, 0, 17], layer(dims=(16, 32)), {"pad_tokens": 3, "host_lens": False}),
    "tree-full": Case(*VERIFY, layer((4, 4)), {"phase": "verify", "page_size": 3}, "full"),
    "tree-qlen-window-softcap": Case(
        *VERIFY, layer(window_left=2, softcap=8.0), {"phase": "verify", "index_form": "csr"}, "qlen"
    ),
    "tree-packed-ragged-left-padding": Case(
        [3, 7, 1, 7], [9, 7, 40, 18], layer(), {"phase": "verify", "kv_starts": [1, 0, 3, 12]}, "packed"
    ),
    "tree-full-window-sinks": Case(
        [7, 7, 5], [30, 7, 19], layer(window_left=4, sinks=True), {"phase": "verify", "cache_form": "hnd"}, "full"
    ),
    "tree-qlen-of-many-tokens": Case([20, 3], [25, 190], layer(window_left=9), {"phase": "verify"}, "qlen"),
    "tree-packed-window": Case([7, 6, 7], [30, 7, 19], layer(window_left=1), {"phase": "verify"}, "packed"),
}


@kernels
@devices
@pytest.mark.parametrize("case", CASES)
def test_a_step_in_fp32_equals_the_reference(kernel, case, device):
    """Every feature meets every other kind of step at least once; unread slots hold NaN."""
    step = CASES[case].step("fp32", device)
    backend = build(kernel, page_size=step.batch.index.page_size, device=device)
    check_against_reference(backend, step, BOUNDS["fp32"])


@kernels
@devices
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", ["decode-window-sinks", "tree-qlen-window-softcap", "non-causal-page64-mixed-dims"])
def test_a_step_in_half_precision_stays_within_its_bound(kernel, dtype, case, device):
    """fp16 within 2e-3 and bf16 within 1.5e-2 of float64."""
    step = CASES[case].step(dtype, device)
    backend = build(kernel, page_size=step.batch.index.page_size, dtype=dtype, device=device)
    check_against_reference(backend, step, BOUNDS[dtype])


@devices
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256)], ids=str)
def test_flex_attention_serves_the_head_dims_it_declares(dims, device):
    """Compiled kernels pad a head dim to a power of two; short and long queries take unlike layouts."""
    for q_lens, kv_lens in (([1, 1, 1], [200, 130, 300]), ([150, 40, 1], [150, 300, 129])):
        step = make_batch(q_lens, kv_lens, layer=layer((8, 2), dims), dtype=torch.bfloat16, device=device)
        check_against_reference(build("flex_attention", dtype="bf16", device=device), step, BOUNDS["bf16"])


@kernels
@pytest.mark.parametrize("kv_dtype", ["e4m3fn", "e5m2", "e4m3fnuz"])
def test_a_float8_cache_is_read_with_its_scales(kernel, kv_dtype):
    """Keys and values are multiplied by k_scale and v_scale, a number or a scalar tensor."""
    dtype = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz}[kv_dtype]
    step = make_batch(*RAGGED, kv_dtype=dtype)
    step = replace(step, kv=replace(step.kv, k_scale=0.5, v_scale=torch.tensor([2.0])))
    check_against_reference(build(kernel, kv_dtype=kv_dtype), step, BOUNDS["fp32"])


@kernels
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_three_index_forms_give_the_same_bits(kernel, page_size):
    """Page table, CSR and indirect table are three spellings of one thing."""
    backend = build(kernel, page_size=page_size)
    outs = [
        answer(backend, make_batch(*RAGGED, page_size=page_size, index_form=form))
        for form in ("page_table", "csr", "indirect")
    ]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@kernels
@pytest.mark.parametrize("window_left", [-1, 4])
def test_new_tokens_beside_the_cache_equal_the_whole(kernel, window_left):
    """This step's tokens in `new`, NaN where the cache would hold them: the answer is that of a written cache."""
    step = make_batch(*RAGGED, layer=layer(window_left=window_left))
    kv, new = split_new(step)
    check_against_reference(build(kernel), step, BOUNDS["fp32"], kv=kv, new=new)


@kernels
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_tokens_alone_need_no_cache(kernel, causal):
    """`kv` None: every key is in `new`, and no index entry is read."""
    lens = [5, 1, 0, 17]
    step = make_batch(lens, lens, causal=causal, layer=layer(dims=(32, 16)))
    _, new = split_new(step)
    index = KVIndex(page_size=16, page_table=torch.empty(4, 0, dtype=torch.int32))
    bare = replace(step, batch=replace(step.batch, index=index))
    truth, _ = reference_attention(step.q, None, step.layer, step.batch, new=new)
    assert relative_error(answer(build(kernel), bare, kv=None, new=new), truth) < BOUNDS["fp32"]


@kernels
def test_cross_attention_reads_another_sequence(kernel):
    """More queries than keys, none of them causal, from `RaggedKV` of its own lengths."""
    q_lens, kv_lens = [7, 2, 3], [3, 9, 0]
    step = make_batch(q_lens, kv_lens, causal=False, layer=layer(attn_type="cross"))
    k, v = torch.randn(12, 2, 32), torch.randn(12, 2, 32)
    new = RaggedKV(k=k, v=v, kv_indptr=torch.tensor([0, 3, 12, 12], dtype=torch.int32))
    truth, _ = reference_attention(step.q, None, step.layer, step.batch, new=new)
    assert relative_error(answer(build(kernel), step, kv=None, new=new), truth) < BOUNDS["fp32"]
    check_against_reference(build(kernel), step, BOUNDS["fp32"])


@kernels
def test_parts_merged_by_their_lse_equal_the_whole(kernel):
    """Cached prefix without mask, new tokens causal, merged by natural-log LSE; the sink is added once, at the end."""
    q_lens, kv_lens = [4, 6, 2], [20, 6, 37]
    step = make_batch(q_lens, kv_lens, layer=layer(sinks=True))
    truth, _ = reference_attention(step.q, step.kv, step.layer, step.batch)
    bare = replace(step, layer=replace(step.layer, sinks=None))
    prefix_lens = torch.tensor([kv - q for q, kv in zip(q_lens, kv_lens, strict=True)], dtype=torch.int32)
    prefix = replace(bare, batch=replace(bare.batch, kv_lens=prefix_lens, kv_lens_host=prefix_lens, causal=False))
    now = torch.tensor(q_lens, dtype=torch.int32)
    fresh = replace(bare, batch=replace(bare.batch, kv_lens=now, kv_lens_host=now))
    _, new = split_new(step)
    backend = build(kernel)
    lse_prefix, lse_fresh = torch.empty(12, 4), torch.empty(12, 4)
    out_prefix = answer(backend, prefix, lse=lse_prefix)
    out_fresh = answer(backend, fresh, kv=None, new=new, lse=lse_fresh)
    total = torch.logaddexp(torch.logaddexp(lse_prefix, lse_fresh), step.layer.sinks)
    merged = out_prefix * torch.exp(lse_prefix - total)[..., None] + out_fresh * torch.exp(lse_fresh - total)[..., None]
    assert relative_error(merged, truth) < BOUNDS["fp32"]


@kernels
def test_out_and_lse_are_written_in_place_through_any_strides(kernel):
    """`out` comes back as the same object; pad tokens of a reused buffer do not keep old numbers."""
    step = make_batch(*RAGGED, pad_tokens=2)
    truth, true_lse = reference_attention(step.q, step.kv, step.layer, step.batch)
    out = torch.full((4, step.q.shape[0], 64), float("nan")).transpose(0, 1)[..., :32]
    lse = torch.full((4, step.q.shape[0]), float("nan")).t()
    assert answer(build(kernel), step, out=out, lse=lse) is out
    assert relative_error(out, truth) < BOUNDS["fp32"]
    assert relative_error(lse[:-2], true_lse[:-2]) < BOUNDS["fp32"]
    assert (lse[-2:] == -math.inf).all()


@kernels
@pytest.mark.parametrize("index_form", ["page_table", "csr", "indirect"])
def test_zero_rows_return_at_once(kernel, index_form):
    """An empty batch answers an empty output."""
    step = make_batch([], [], index_form=index_form)
    lse = torch.empty(0, 4)
    assert answer(build(kernel), step, lse=lse).shape == (0, 4, 32)


@kernels
def test_a_negative_kv_len_is_a_pad_row(kernel):
    """One engine marks pad rows by kv_len -1: their outputs are zeros."""
    step = make_batch([1, 1], [9, 0], phase="decode")
    lens = torch.tensor([9, -1], dtype=torch.int32)
    pad = replace(step, batch=replace(step.batch, kv_lens=lens, kv_lens_host=None))
    assert torch.equal(answer(build(kernel), pad), answer(build(kernel), step))


@kernels
def test_inexact_host_lengths_are_not_believed(kernel):
    """With `host_exact` False the mirrors are upper bounds, so the device tensors are read."""
    step = make_batch(*DECODE, phase="decode")
    bound = replace(step.batch, kv_lens_host=torch.full((5,), 64, dtype=torch.int32), host_exact=False)
    assert torch.equal(answer(build(kernel), replace(step, batch=bound)), answer(build(kernel), step))


@kernels
def test_a_tree_filled_after_plan_is_the_one_that_counts(kernel):
    """The tree kernel runs between `plan` and the first `forward`."""
    tree = make_tree(*VERIFY, "qlen")
    step = make_batch(*VERIFY, phase="verify", tree=tree)
    truth, _ = reference_attention(step.q, step.kv, step.layer, step.batch)
    filled = tree.buffer.clone()
    tree.buffer.zero_()
    backend = build(kernel)
    state = backend.plan(step.batch)
    tree.buffer.copy_(filled)
    assert relative_error(backend.forward(step.q, step.kv, step.layer, state), truth) < BOUNDS["fp32"]


@kernels
def test_a_window_counts_from_logical_positions_of_keys_too(kernel):
    """Token 4 sees 0, 2, 3 and itself: key 2 is two logical positions before it, and its index two less as well."""
    tree = make_tree([5], [12], "qlen")
    tree.buffer.copy_(torch.eye(5, dtype=torch.bool))
    tree.buffer[0, 1:, 0] = tree.buffer[0, 3:, 2] = tree.buffer[0, 4, 3] = True
    step = make_batch([5], [12], phase="verify", tree=tree, layer=layer(window_left=1))
    check_against_reference(build(kernel), step, BOUNDS["fp32"])


@kernels
def test_a_tree_replaces_the_causal_rule_even_where_there_is_none(kernel):
    """`causal` False beside a tree: this step's tokens still see by the tree alone."""
    tree = make_tree([4, 4], [20, 20], "full")
    step = make_batch([4, 4], [20, 20], phase="verify", tree=tree, causal=False)
    check_against_reference(build(kernel), step, BOUNDS["fp32"])


@kernels
def test_a_tree_key_no_token_sees_may_hold_anything(kernel):
    """NaN in an unseen tree token's key and value reaches no output; a token that sees nothing gets zeros."""
    tree = make_tree([3], [8], "qlen")
    tree.buffer[:, :, 1] = False
    tree.buffer[:, 1] = False
    step = make_batch([3], [8], phase="verify", tree=tree, layer=layer(window_left=1))
    page = step.pages[0][0]
    # position 6 is the tree token nobody sees; positions up to 3 are behind every window, and 4 behind all but one
    step.kv.k[page, [0, 1, 2, 6]] = float("nan")
    step.kv.v[page, [0, 1, 2, 6]] = float("nan")
    check_against_reference(build(kernel), step, BOUNDS["fp32"])


@kernels
def test_keys_behind_every_window_of_a_tree_may_hold_anything(kernel):
    """A shorter row of a tree step has pad queries beside it, and these must not count as seeing a key."""
    tree = make_tree([3, 5], [8, 9], "qlen")
    step = make_batch([3, 5], [8, 9], phase="verify", tree=tree, layer=layer(window_left=1))
    step.kv.k[step.pages[0][0], :4] = step.kv.v[step.pages[0][0], :4] = float("nan")
    check_against_reference(build(kernel), step, BOUNDS["fp32"])


@kernels
def test_a_page_behind_the_window_may_hold_anything(kernel):
    """Engines hand freed pages of a sliding window to a null block whose contents are garbage."""
    step = make_batch([2, 1], [40, 33], layer=layer(window_left=5))
    truth, _ = reference_attention(step.q, step.kv, step.layer, step.batch)
    for pages in step.pages:
        step.kv.k[pages[0]] = step.kv.v[pages[0]] = float("nan")
    assert relative_error(answer(build(kernel), step), truth) < BOUNDS["fp32"]


@kernels
def test_a_reused_state_serves_the_new_step(kernel):
    """`plan(batch, state=...)` gives the same object with nothing of the old step in it."""
    backend = build(kernel)
    first, second = make_batch([2, 3], [20, 9]), make_batch([4, 1], [7, 30], seed=1)
    state = backend.plan(first.batch)
    backend.forward(first.q, first.kv, first.layer, state)
    assert backend.plan(second.batch, state=state) is state
    truth, _ = reference_attention(second.q, second.kv, second.layer, second.batch)
    assert relative_error(backend.forward(second.q, second.kv, second.layer, state), truth) < BOUNDS["fp32"]


@kernels
def test_two_states_of_one_backend_do_not_meet(kernel):
    """vLLM keeps the metadata of several micro-batches alive at once."""
    backend = build(kernel)
    steps = [make_batch([2, 3], [20, 9]), make_batch([4, 1], [7, 30], seed=1)]
    states = [backend.plan(step.batch) for step in steps]
    for step, state in zip(steps, states, strict=True):
        truth, _ = reference_attention(step.q, step.kv, step.layer, step.batch)
        assert relative_error(backend.forward(step.q, step.kv, step.layer, state), truth) < BOUNDS["fp32"]


@kernels
def test_layers_of_unlike_windows_share_a_state(kernel):
    """A group's layers may differ in their window; one plan serves them all."""
    step = make_batch(*RAGGED)
    backend = build(kernel)
    state = backend.plan(step.batch)
    for window_left in (-1, 3, -1):
        local = layer(window_left=window_left)
        truth, _ = reference_attention(step.q, step.kv, local, step.batch)
        assert relative_error(backend.forward(step.q, step.kv, local, state), truth) < BOUNDS["fp32"]


rows = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=6)
shapes = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 3, 16]),
        "index_form": st.sampled_from(["page_table", "csr", "indirect"]),
        "cache_form": st.sampled_from(["nhd", "hnd", "interleaved"]),
        "causal": st.booleans(),
        "seed": st.integers(0, 9),
    }
)


@pytest.mark.parametrize("kernel", ["torch_native", "torch_native-rows-alone"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=rows, shape=shapes, window_left=st.integers(-1, 9), softcap=st.sampled_from([0.0, 3.0]), data=st.data())
def test_any_ragged_step_equals_the_reference(kernel, rows, shape, window_left, softcap, data):
    """Random lengths, zero among them, over random pools."""
    q_lens, prefixes = [q for q, _ in rows], [prefix for _, prefix in rows]
    kv_lens = [q + prefix for q, prefix in rows]
    starts = data.draw(st.none() | st.tuples(*(st.integers(0, prefix + 1) for prefix in prefixes)))
    starts = None if starts is None else [min(start, kv) for start, kv in zip(starts, kv_lens, strict=True)]
    step = make_batch(q_lens, kv_lens, layer=layer(window_left=window_left, softcap=softcap), kv_starts=starts, **shape)
    check_against_reference(build(kernel, page_size=shape["page_size"]), step, BOUNDS["fp32"])


def test_the_builder_hides_nothing_from_a_careless_kernel():
    """A pool really has NaN in every slot no row may read, and index entries that lead there."""
    step = make_batch([2, 1], [5, 17])
    assert isinstance(step.batch, Batch)
    assert isinstance(step.kv, PagedKV)
    used = {page for pages in step.pages for page in pages}
    table = step.batch.index.page_table
    assert step.kv.k[step.pages[0][0], 5:].isnan().all()
    assert table[0, 1] not in used
    assert step.kv.k[table[0, 1]].isnan().all()
    assert table[0, -1] == -1
