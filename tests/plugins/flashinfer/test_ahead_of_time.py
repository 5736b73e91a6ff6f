"""The page list kernel compiles for every kind of chip, once for all addresses and sizes; no GPU is needed."""

from __future__ import annotations

import pytest

from tests.ahead import Job, compile_ahead

ARCHS = (80, 90, 100, 120)
FORMS = {"page_table": ("*i32", None), "csr": ("*i64", "*i32"), "indirect": ("*i32", "*i64")}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict:
    """The answers by form of index."""
    jobs = [
        Job(
            "backstamp_flashinfer.page_list:gather_pages",
            ARCHS,
            {"ids": ids, "starts": starts, "indptr": "*i32", "pages": "*i32", "stride": "i32"},
            {"FORM": form, "BLOCK": 512},
        )
        for form, (ids, starts) in FORMS.items()
    ]
    return dict(zip(FORMS, compile_ahead(jobs, tmp_path_factory.mktemp("triton-cache")), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_compiles(form, compiled):
    """Machine code for each chip is there."""
    assert sorted(map(int, compiled[form]["code"])) == sorted(ARCHS)
    assert min(compiled[form]["code"].values()) > 0


@pytest.mark.parametrize("form", FORMS)
def test_no_argument_is_compiled_for(form, compiled):
    """Code at hand is found by form and dtypes alone: an address or a stride that Triton looked at would be missed."""
    assert compiled[form]["looked_at"] == []
