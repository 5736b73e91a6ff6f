"""What `bench/kernels.py` lists: every group of work, names that are unique, and what each shape costs at least."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.bench_modules import bench_modules


@pytest.fixture(scope="module")
def bench():
    """The modules of shapes."""
    with bench_modules("shapes", "shape_list") as modules:
        yield modules


@pytest.mark.parametrize("which", ["SHAPES", "TINY"])
def test_every_work_is_listed_and_no_name_is_given_twice(bench, which: str) -> None:
    """A record knows a shape by its work and its name."""
    shapes, listed = bench[0], getattr(bench[1], which)
    assert {shape.work for shape in listed} == set(shapes.WORKS)
    assert [name for name, count in Counter((of.work, of.label) for of in listed).items() if count > 1] == []


@pytest.mark.parametrize(
    ("work", "label"),
    [
        *(("prefill", f"b2 q8192 kv8192 {form}") for form in ("ragged", "page16", "page64", "page128")),
        *(("prefill", f"b1 q{length} kv{length} page64") for length in (512, 65536)),
        *(("decode", f"b64 q1 kv8192 page{page}") for page in (16, 64)),
        *(("decode", f"b{rows} q1 kv{kv} page16") for rows, kv in ((8, 32768), (128, 1024), (1, 8192), (1, 131072))),
        ("mla_decode", "b128 q1 kv8192 page64"),
        ("sparse_mla_prefill", "b1 q4096 kv32768 page64 top2048"),
        *(("gdn_prefill", label) for label in ("b4 t8192", "b1 t32768")),
        *(("gdn_decode", f"b{rows} t1") for rows in (1, 32, 128, 512)),
        *(("kda_prefill", label) for label in ("b1 t32768", "b1 t32768 bounded", "b4 t8192 bounded")),
    ],
)
def test_the_shapes_that_claims_are_made_of_are_listed(bench, work: str, label: str) -> None:
    """They are those other libraries were measured at."""
    assert (work, label) in {(shape.work, shape.label) for shape in bench[1].SHAPES}


def test_decode_is_listed_over_the_whole_grid_that_fits(bench) -> None:
    """Batches of 1 to 256 over 1k to 128k tokens, up to 8 Mi of them."""
    seen = {(len(shape.rows), shape.rows[0][1]) for shape in bench[1].DECODE}
    grid = {(rows, kv * 1024) for rows in (1, 8, 64, 256) for kv in (1, 8, 128) if rows * kv <= 8192}
    assert len(grid) == 11
    assert grid <= seen


def test_verify_is_listed_with_and_without_a_tree_from_4_to_64_tokens(bench) -> None:
    """A tree of as many tokens is another kernel's best case."""
    for tree in (False, True):
        tokens = {shape.rows[0][0] for shape in bench[1].VERIFY if shape.tree is tree}
        assert (min(tokens), max(tokens)) == (4, 64)


COSTS = [
    # (1 + 2 + 3) pairs, two products of 4 numbers, 2 heads; queries and outputs of 3 tokens, 3 keys and values
    pytest.param({"work": "prefill", "rows": ((3, 3),), "page_size": 16}, 6 * 2 * 2 * 8, 3 * 2 * 8 * 2 + 3 * 8 * 2),
    # 2 of 5 tokens are new: they see 4 and 5
    pytest.param({"work": "extend", "rows": ((2, 5),), "page_size": 16}, 9 * 2 * 2 * 8, 2 * 2 * 8 * 2 + 5 * 8 * 2),
    # a cache of one byte a number
    pytest.param(
        {"work": "decode", "rows": ((1, 5), (1, 7)), "page_size": 16, "kv_dtype": "e4m3fn"},
        12 * 2 * 2 * 8,
        2 * 2 * 8 * 2 + 12 * 8,
    ),
    # values inside keys: read once
    pytest.param(
        {"work": "mla_decode", "rows": ((1, 5),), "page_size": 64, "dims": (6, 4)},
        5 * 2 * 2 * 10,
        2 * 10 * 2 + 5 * 6 * 2,
    ),
    # 2 of 5 keys are chosen
    pytest.param(
        {"work": "sparse_mla_decode", "rows": ((1, 5),), "page_size": 64, "dims": (6, 4), "topk": 2},
        2 * 2 * 2 * 10,
        2 * 10 * 2 + 2 * 6 * 2,
    ),
    # a packed token is 656 bytes
    pytest.param(
        {"work": "sparse_mla_decode", "rows": ((1, 5),), "page_size": 64, "dims": (6, 4), "topk": 2}
        | {"kv_dtype": "fp8_ds_mla"},
        2 * 2 * 2 * 10,
        2 * 10 * 2 + 2 * 656,
    ),
    # one value head of a 4 x 4 state, 6 for each number; 2 key heads, tokens of 2 bytes, raw gates, state in and out
    pytest.param(
        {"work": "gdn_decode", "rows": ((1, 1),), "heads": (2, 1)},
        6 * 16,
        (2 * 2 * 4 + 2 * 4) * 2 + 2 * 2 + 16 * 4 * 2,
    ),
    # gates of each channel, fp32; the state is only written
    pytest.param(
        {"work": "kda_prefill", "rows": ((3, 3),), "heads": (1, 1)},
        3 * 6 * 16,
        3 * ((2 * 4 + 2 * 4) * 2 + 5 * 4) + 16 * 4,
    ),
]


@pytest.mark.parametrize(("made", "flops", "size"), COSTS)
def test_a_shape_knows_what_must_be_computed_and_moved(bench, made: dict[str, object], flops: int, size: int) -> None:
    """Shares of the machine's limits are made of these."""
    shape = bench[0].Shape(**{"heads": (2, 1), "dims": (4, 4)} | made)
    assert shape.flops == flops
    assert shape.bytes == size
