"""Case 85, tokenspeed #502: wanted and actual, for each fact."""

from __future__ import annotations

import pytest

from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, host_of, model_of, plan_on
from tests.resolving import kernel


def test_every_fact_is_told_wanted_and_actual() -> None:
    """Every fact is told wanted and actual."""
    newest = {"archs": ("10.0",), "runtimes": ("cuda>=13",)}
    plugin = fake_plugin("only", [kernel("blackwell", **newest, **GDN), kernel("full", head_dims=(256,))])
    for requests in (Requests(), Requests(linear_attn_backend="blackwell")):
        with pytest.raises((NoKernel, Refused)) as caught:
            plan_on(host_of("h100", runtimes=(("cuda", "12.8"),)), plugin, requests=requests, model=model_of("hybrid"))
        for word in ("SM100 (10.0)", "SM90 (9.0)", "cuda>=13", "12.8"):
            assert word in caught.value.message
