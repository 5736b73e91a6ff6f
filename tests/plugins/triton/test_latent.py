"""The Hopper latent kernel: which calls it takes, what it is launched with, and that it compiles for SM90.

Gluon has no interpreter: numbers are held on a GPU by `bench/checks.py`. Here the choice and the launch are held.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from backstamp.jit_notice import Announcer
from backstamp_triton import latent_launch, tile_launch
from backstamp_triton.backend import TritonAttention
from backstamp_triton.configs import SHARED_BYTES
from backstamp_triton.latent_launch import LatentKernel, box_of, latent_rows
from backstamp_triton.launches import Chip, launch_of
from backstamp_triton.layers import prepare_layer
from backstamp_triton.steps import new_step
from tests.children import compiled_by
from tests.plugins.triton import latent_ahead
from tests.plugins.triton.cases import Case, build_attention, build_mla, make, run
from tests.plugins.triton.latent_ahead import Job
from tests.plugins.triton.recorders import Recorder

DECODE = Case("decode", ((1, 70), (0, 0), (1, 2)), mla=True, heads=(4, 1), dims=(576, 512), phase="decode")
PREFILL = dataclasses.replace(DECODE, rows=((5, 70), (3, 20)), phase="prefill")
JOBS = [
    Job(extras=("lse_ptr",)),
    Job(step="split", index="csr", page_size=16),
    Job("fp16", 16, "causal", "indirect", 128, ("q_rope_ptr", "lse_ptr")),
    Job("fp16", 20, "decode", "csr", 32, ("sinks_ptr",)),
    Job("bf16", 96, "causal", "page_table", 192),
    Job("fp16", 64, "split", "indirect", 64, ("q_rope_ptr",)),
    Job("bf16", 128, "split", "csr", 1),
    Job("fp16", 16, "causal", "page_table", 48, ("lse_ptr",)),
]


@pytest.fixture
def kernel():
    """One for 132 multiprocessors."""
    rows = 132 * 128
    chip = Chip("9.0", 132, "bf16", 2, True, rows, rows * 512)
    return LatentKernel(chip, torch.empty(rows * 512), torch.empty(rows), Announcer("triton"))


def _call(case):
    """What `forward` would hand to the kernel."""
    drawn = make(case)
    known = prepare_layer(drawn.request, "9.0", drawn.q.element_size(), drawn.layer, True)
    return drawn.q, drawn.q_rope, drawn.kv.k, known, new_step(drawn.request, drawn.batch, case.index)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"index": "csr", "page_size": 32},
        {"index": "indirect", "page_size": 64, "split_rope": True},
        {"page_size": 192, "sinks": True},
        {"page_size": 1, "index": "csr"},
        {"page_size": 48},
        {"rows": PREFILL.rows, "phase": "prefill"},
        {"rows": PREFILL.rows, "phase": "prefill", "causal": False, "lse": True},
        # one token a row sees every key, whatever the rule of its row
        {"causal": (1, 0, 1)},
    ],
    ids=str,
)
def test_a_call_the_kernel_has_everything_for_is_served(kernel, changes):
    """Any index form, queries in one part or two, causal or not, sinks or LSE."""
    assert kernel.rows_of(*_call(dataclasses.replace(DECODE, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"window_left": 4},
        {"softcap": 2.0},
        {"starts": (1, 0), "rows": PREFILL.rows, "phase": "prefill"},
        {"causal": (1, 0), "rows": PREFILL.rows, "phase": "prefill"},
        {"tree": "qlen", "rows": ((4, 20), (4, 9)), "phase": "verify"},
    ],
    ids=str,
)
def test_a_call_with_what_the_kernel_lacks_falls_to_the_tile_kernel(kernel, changes):
    """Window, softcap, left padding, a rule by row, a tree."""
    assert not kernel.rows_of(*_call(dataclasses.replace(DECODE, **changes)))


def test_a_cache_that_is_no_rows_falls_to_the_tile_kernel(kernel):
    """What `latent_rows` refuses is not served."""
    q, q_rope, cache, *rest = _call(DECODE)
    apart = torch.zeros(cache.shape[0], 16 * 576 + 16, dtype=q.dtype).as_strided(
        cache.shape, (16 * 576 + 16, 576, 576, 1)
    )
    assert kernel.rows_of(q, q_rope, cache, *rest)
    assert not kernel.rows_of(q, q_rope, apart, *rest)


@pytest.mark.parametrize(
    ("page_size", "box"),
    [(1, None), (8, None), (16, [16, 64]), (32, [32, 64]), (48, None), (64, [64, 64]), (96, None), (256, [64, 64])],
)
def test_a_box_holds_no_page_border(page_size, box):
    """Blocks of 64 keys are whole boxes, and boxes whole parts of a page; other pages are gathered row by row."""
    assert box_of(page_size) == box


def test_queries_off_16_bytes_fall_to_the_tile_kernel(kernel):
    """Queries are copied 16 bytes at a time: neither an odd address nor an odd stride, in either part."""
    q, _, *rest = _call(DECODE)
    wide = torch.zeros(q.shape[0], q.shape[1], 600, dtype=q.dtype)
    assert not kernel.rows_of(wide[..., :576], None, *rest)
    odd = torch.zeros(q.numel() + 8, dtype=q.dtype)[1:][: q.numel()].view_as(q)
    assert not kernel.rows_of(odd, None, *rest)
    assert kernel.rows_of(q[..., :512], q[..., 512:], *rest)
    assert not kernel.rows_of(q[..., :512], wide[..., 512:576], *rest)


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "rows"),
    [
        ((4, 16, 1, 576), (16 * 576, 576, 576, 1), 0, (64, 16)),
        # padded token rows, and pages of several layers side by side
        ((4, 16, 1, 576), (16 * 640, 640, 640, 1), 0, (64, 16)),
        ((4, 16, 1, 576), (3 * 16 * 576, 576, 576, 1), 0, (160, 48)),
        ((1, 16, 1, 576), (7, 576, 576, 1), 0, (16, 16)),
        ((4, 16, 1, 576), (16 * 576 + 8, 576, 576, 1), 0, None),
        ((4, 16, 1, 576), (16 * 584, 584, 584, 1), 0, None),
        ((4, 16, 1, 576), (16 * 576, 576, 576, 1), 4, None),
        ((4, 16, 1, 576), (16 * 512, 512, 512, 1), 0, None),
        ((4, 16, 1, 576), (0, 0, 576, 1), 0, None),
        ((0, 16, 1, 576), (16 * 576, 576, 576, 1), 0, None),
    ],
)
def test_a_cache_is_read_as_rows_or_not_at_all(shape, strides, offset, rows):
    """The copy engine takes rows of 16-byte multiples, pages a whole number of them apart, and at least one."""
    cache = torch.zeros(300_000, dtype=torch.float16).as_strided(shape, strides, offset)
    found = latent_rows(cache)
    assert (found and found[:2]) == rows
    if rows is not None:
        flat, per_page = rows
        last = cache[shape[0] - 1, 15, 0].data_ptr() - cache.data_ptr()
        assert last == ((shape[0] - 1) * per_page + 15) * strides[1] * 2 == (flat - 1) * strides[1] * 2


def test_more_rows_than_32_bits_count_are_not_served():
    """Rows are named by 32-bit numbers: a cache with more of them is the tile kernel's."""
    base = torch.empty(1, dtype=torch.float16, device="meta")
    assert latent_rows(base.as_strided((1 << 25, 64, 1, 576), (64 * 576, 576, 576, 1))) is None
    assert latent_rows(base.as_strided(((1 << 25) - 1, 64, 1, 576), (64 * 576, 576, 576, 1))) is not None


@pytest.mark.parametrize("heads", [1, 16, 20, 64, 96, 128])
@pytest.mark.parametrize(
    "rows", [((1, 9000),), ((1, 70),) * 40, ((5, 70), (0, 0), (64, 900))], ids=["1", "40", "ragged"]
)
def test_slots_hold_every_tile_and_shares_fit_the_workspace(kernel, heads, rows):
    """As the kernel counts: a row's tiles begin at its first token over the tokens of a tile, plus its number."""
    decode = max(q for q, _ in rows) == 1
    case = dataclasses.replace(DECODE, heads=(heads, 1), rows=rows, phase="decode" if decode else "prefill")
    _, _, _, known, step = _call(case)
    launch = launch_of("latent", kernel._chip, known, step)
    slots, splits = launch.slots, launch.splits
    tokens = 64 // known.pack
    assert known.pack * tokens <= 64
    assert known.pack * known.head_blocks >= heads
    begin = 0
    for number, (q_len, _) in enumerate(rows):
        tiles = -(-q_len // tokens)
        last = number if decode else begin // tokens + number + tiles - 1
        assert last < slots
        begin += q_len
    assert splits * begin * heads <= 132 * 128


@pytest.mark.parametrize(
    ("build", "case", "arch", "there"),
    [
        (build_mla, DECODE, "9.0", True),
        (build_mla, DECODE, "10.0", False),
        (build_mla, DECODE, "8.0", False),
        (build_mla, dataclasses.replace(DECODE, dtype="fp32"), "9.0", False),
        (build_attention, Case("mha", ((1, 9),), phase="decode"), "9.0", False),
    ],
    ids=["sm90", "sm100", "sm80", "fp32", "mha"],
)
def test_only_a_latent_cache_of_two_byte_numbers_on_sm90_has_the_kernel(monkeypatch, build, case, arch, there):
    """Its copies and products are SM90's own, for fp16 and bf16."""
    drawn = make(case)
    backend = build(drawn.request).backend
    monkeypatch.setattr(backend, "_chip", dataclasses.replace(backend._chip, arch=arch))
    assert (backend._latent_kernel() is not None) is there


class _Recorder:
    """Serves what it is told to, and notes that it did."""

    def __init__(self, serves: bool) -> None:
        self._serves = serves
        self.calls = 0

    def rows_of(self, q, q_rope, cache, known, step):
        return latent_rows(cache) if self._serves else None

    def attend(self, q, q_rope, cache, rows, known, step, out, lse):
        self.calls += 1
        out.zero_()


@pytest.mark.parametrize("serves", [True, False])
def test_the_backend_runs_one_kernel_a_call(serves):
    """The latent kernel where it serves the call, else the tile kernel: never both, never neither."""
    drawn = make(DECODE)
    backend = build_mla(drawn.request).backend
    backend._latent = recorder = _Recorder(serves)
    out, _ = run(DECODE, drawn, backend)
    assert recorder.calls == int(serves)
    assert bool((out == 0).all()) is serves


@pytest.fixture
def recorded(monkeypatch):
    """A backend's launches as on an H100: of the latent kernel, and of the merge of its shares."""
    recorders = Recorder(latent_launch.attend_latent), Recorder(tile_launch.combine_splits)
    monkeypatch.setattr(TritonAttention, "_find_chip", lambda self, device: ("9.0", 132))
    monkeypatch.setattr(latent_launch, "attend_latent", recorders[0])
    monkeypatch.setattr(tile_launch, "combine_splits", recorders[1])
    return recorders


@pytest.mark.parametrize("changes", [{}, {"lse": True}, {"sinks": True}, {"split_rope": True}], ids=str)
def test_few_rows_share_their_keys_and_shares_are_merged(changes, recorded):
    """Sinks and LSE of a split step are the merge's: the kernel writes shares."""
    case = dataclasses.replace(DECODE, rows=((1, 5000), (1, 64)), dtype="bf16", **changes)
    run(case, make(case))
    (launch,), (merge,) = (recorder.launches for recorder in recorded)
    assert launch["grid"][1] == merge["num_splits"] > 1
    assert launch["part_ptr"] is merge["part_ptr"]
    assert launch["sinks_ptr"] is launch["lse_ptr"] is None
    assert (merge["sinks_ptr"] is not None) == ("sinks" in changes)
    assert (merge["lse_ptr"] is not None) == ("lse" in changes)
    assert merge["grid"] == (2, 4, 1)


@pytest.mark.parametrize("extra", ["lse", "sinks"])
def test_rows_of_one_block_write_their_outputs_at_once(extra, recorded):
    """No share, no merge: what the merge would do, the kernel does."""
    case = dataclasses.replace(DECODE, rows=((1, 64),) * 8, dtype="bf16", **{extra: True})
    run(case, make(case))
    (launch,), merges = (recorder.launches for recorder in recorded)
    assert (launch["grid"][1], launch["part_ptr"], merges) == (1, None, [])
    assert (launch["lse_ptr"] is not None, launch["sinks_ptr"] is not None) == (extra == "lse", extra == "sinks")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    """The answers of one child process by job."""
    answers = compiled_by(latent_ahead.__file__, JOBS, tmp_path_factory.mktemp("triton-cache"))
    return dict(zip(map(str, JOBS), answers, strict=True))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_the_kernel_compiles_to_warpgroup_products_and_fits_the_chip(job, compiled):
    """36 products score a block, four a half fold it; nine panels are copied in boxes, or rows are gathered."""
    answer = compiled[str(job)]
    assert answer["cubin"] > 0
    assert answer["shared_bytes"] <= SHARED_BYTES["9.0"]
    assert answer["products"] == 36 + 4 + 4
    box = box_of(job.page_size)
    assert answer["copies"] == (0 if box is None else 9 * 64 // box[0])
    # the merge of shares begins when the last program has ended: earlier it is slower
    assert answer["waits"] == []
