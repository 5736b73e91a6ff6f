"""A kernel reads the index form it declares: each form addresses the same keys, in every cache of Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import backstamp
import backstamp_transformers
from backstamp.declarations import Offer
from backstamp.hookspecs import hookimpl
from backstamp_cpu.plugin import NATIVE
from backstamp_transformers.batches import index_of_runs
from backstamp_transformers.step import dense_slots
from engines.transformers.tests import wrong_kernels
from engines.transformers.tests.small_models import generate, small_model
from engines.transformers.tests.test_continuous import serve

FORMS = ("page_table", "csr", "indirect")


class OneForm:
    """`torch_native` once for each form, reading that one alone."""

    @hookimpl
    def backstamp_offers(self) -> tuple[Offer, ...]:
        """`auto` never takes the lowest priority."""
        row = replace(NATIVE, factory=f"{wrong_kernels.__name__}:build", priority=0)
        return tuple(replace(row, kernel=f"{form}_alone", index_forms=frozenset({form})) for form in FORMS)


@pytest.fixture
def one_form() -> Iterator[None]:
    """The plugin, installed for one test."""
    backstamp.register("one_form", OneForm())
    yield
    backstamp.unregister("one_form")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("one_form")
def test_a_kernel_that_reads_one_form_gives_eager_tokens(form: str) -> None:
    """Padded rows over dense and static caches, and mixed steps over the paged one, windows in both."""
    model = small_model("gemma3")
    wanted = generate(model), generate(model, cache_implementation="static"), serve(model)
    with backstamp_transformers.use(model, f"{form}_alone") as handle:
        assert {place.index_form for place in handle.served.now.places.values()} == {form}
        assert (generate(model), generate(model, cache_implementation="static"), serve(model)) == wanted


def dense(layout: str) -> tuple[Tensor, Tensor]:
    """A cache `[2, 3, 5, 4]` in a memory layout of its own."""
    draw = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, 3, 5, 4, generator=draw)
    return {
        "contiguous": lambda: (k, v),
        "tokens-first": lambda: tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)),
        "dim-apart": lambda: tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v)),
        "k-apart": lambda: (k.transpose(2, 3).contiguous().transpose(2, 3), v),
        "two-strides": lambda: (torch.cat([k, k], 2)[:, :, :5], v),
        "rows-apart": lambda: tuple(pad(x.flatten(1), (0, 1))[:, :60].view(x.shape) for x in (k, v)),
        "one-row": lambda: (k[:1], v[:1]),
        "one-token": lambda: (k[:, :, :1], v[:, :, :1]),
        # contiguous to torch, whatever the stride of a dimension of one; with memory behind it, a wrong one reads that
        "one-token-apart": lambda: (k[:, :, :1].clone(), v[:, :, :1].transpose(1, 2).contiguous().transpose(1, 2)),
        "one-token-within": lambda: (
            k[:, :, :1].clone(),
            torch.stack([v[:, :, :1].transpose(1, 2), -v[:, :, :1].transpose(1, 2)])[0].transpose(1, 2),
        ),
        "expanded": lambda: (k[:, :, :1].expand(-1, -1, 5, -1), v[:, :, :1].expand(-1, -1, 5, -1)),
    }[layout]()


LAYOUTS = ("contiguous", "tokens-first", "dim-apart", "k-apart", "two-strides", "rows-apart", "one-row", "one-token")


@pytest.mark.parametrize("layout", [*LAYOUTS, "one-token-apart", "one-token-within", "expanded"])
def test_a_slot_is_the_token_of_its_row_in_every_layout(layout: str) -> None:
    """Slot `b * row_stride + s` holds token s of row b, whatever the strides; keys lie unit by unit."""
    k, v = dense(layout)
    found_k, found_v, stride = dense_slots(k, v)
    rows, _, length, _ = k.shape
    for row in range(rows):
        for token in range(length):
            assert torch.equal(found_k[row * stride + token, 0], k[row, :, token])
            assert torch.equal(found_v[row * stride + token, 0], v[row, :, token])
    assert found_k.stride(-1) == found_v.stride(-1) == 1


@pytest.mark.parametrize("layout", ["contiguous", "tokens-first", "one-row"])
def test_a_cache_whose_strides_say_where_keys_lie_is_not_copied(layout: str) -> None:
    """Keys are read in place, at every step."""
    k, v = dense(layout)
    found = dense_slots(k, v)
    assert (found.k.data_ptr(), found.v.data_ptr()) == (k.data_ptr(), v.data_ptr())


def test_rows_of_one_token_without_a_cache_answer_as_in_eager() -> None:
    """Position embeddings leave keys in another layout than values, and each row is one token long."""
    model, ids = small_model("llama"), torch.tensor([[5], [9], [77]])
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).logits
        with backstamp_transformers.use(model, "torch_native"):
            found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["page_table", "indirect"])
def test_rows_without_a_key_have_a_table_all_the_same(form: str) -> None:
    """A kernel takes its address; no key of it is read."""
    index = index_of_runs([0, 0], [0, 0], form, torch.device("cpu"))
    table = index.page_table if form == "page_table" else index.table
    assert table.shape == (2, 1)
