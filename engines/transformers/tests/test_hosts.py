"""What Transformers supplies, asked of machines that are not here: which keys serve pages of one token."""

from __future__ import annotations

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import Refused
from backstamp.host import load_host
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp_transformers.engine_facts import ENGINE


def planned(host: str, key: str) -> Plan:
    """The plan of the default model under one key."""
    launch = make_launch(Requests(attention_backend=key))
    return resolve(launch, ENGINE, default_model(), load_host(host), build_catalogue(discover()))


@pytest.mark.parametrize("key", ["fa3", "fa4", "flashinfer", "triton", "flex_attention"])
def test_hopper_keys_resolve_on_pages_of_one_token(key: str) -> None:
    """Both halves are served, outside CUDA graphs."""
    plan = planned("h200", key)
    assert [plan.phase("prefill").kernel, plan.phase("decode").kernel] == [key, key]
    assert (plan.page_size, plan.graph) == (1, "never")


def test_a_kernel_of_larger_pages_is_refused_by_its_pages() -> None:
    """No page but one of a single token fits a cache that grows by a token: the refusal says so."""
    with pytest.raises(Refused, match=r"page size .*, got 1"):
        planned("b200", "trtllm_mha")
