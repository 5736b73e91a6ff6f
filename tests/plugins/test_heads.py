"""How many heads a kernel takes is asked when a launch is resolved, not first when it is built."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import Refused
from backstamp.launch import Requests, make_launch
from backstamp.model import ModelFacts, model_from_config
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.testing.hosts import described_host
from tests.models import config

#: Key, host and model; heads of a rank that are refused, the words, and heads that are taken.
LIMITS = [
    ("aiter", "mi300x", "mla", 32, "16 or 128 query heads a KV head, got 32", 16),
    ("trtllm_mla", "b200", "mla", 96, "1 to 64 or 128 query heads a KV head, got 96", 128),
    ("tokenspeed_mla", "b200", "mla", 256, "1 to 128 query heads a KV head, got 256", 96),
    ("ascend", "ascend910b", "mla", 48, "8, 16, 32, 64 or 128 query heads a KV head, got 48", 64),
    ("dsv4", "h100", "dsv4", 256, "1 to 128 query heads a KV head, got 256", 128),
]


def model_of(name: str, heads: int, kv_heads: int | None = None) -> ModelFacts:
    """A known model with another number of heads."""
    model = model_from_config(config(name))
    changed = {"num_qo_heads": heads} | ({} if kv_heads is None else {"num_kv_heads": kv_heads})
    groups = tuple(replace(group, facts=replace(group.facts, **changed)) for group in model.groups)  # type: ignore[arg-type]
    return replace(model, groups=groups)


def plan_of(host: str, model: ModelFacts, **asked: str | int) -> Plan:
    """The plan of a launch on a described host."""
    launch = make_launch(Requests(**asked))  # type: ignore[arg-type]
    return resolve(launch, EngineFacts(), model, described_host(host), build_catalogue(discover()))


@pytest.mark.parametrize(
    ("key", "host", "model", "refused", "said", "taken"), LIMITS, ids=lambda value: str(value)[:12]
)
def test_heads_a_kernel_has_no_tile_for_are_refused(
    key: str, host: str, model: str, refused: int, said: str, taken: int
) -> None:
    """A latent cache has one KV head, so its groups are all the query heads of a rank."""
    with pytest.raises(Refused, match=f"needs .*{said}"):
        plan_of(host, model_of(model, refused), attention_backend=key)
    assert plan_of(host, model_of(model, taken), attention_backend=key).running


def test_a_group_of_queries_that_fits_no_tile_is_refused() -> None:
    """XQA keeps the queries of one KV head in one tile."""
    with pytest.raises(Refused, match="needs 1 to 32 query heads a KV head, got 64"):
        plan_of("h100", model_of("mha", 64, 1), decode_attention_backend="xqa")
    assert plan_of("h100", model_of("mha", 32, 1), decode_attention_backend="xqa").running


def test_auto_passes_over_a_kernel_that_could_not_be_built() -> None:
    """32 of 128 heads are left on each of four ranks: our own kernels take them, aiter's do not."""
    model = model_from_config(config("mla"))
    kernels = {ranks: {row.kernel for row in plan_of("mi300x", model, tp_size=ranks).running} for ranks in (1, 4, 8)}
    assert "aiter" not in kernels[4]
    assert "aiter" in kernels[1] & kernels[8]


def test_sparse_attention_of_more_heads_falls_to_our_own_kernels() -> None:
    """They have no limit of their own."""
    plans = {heads: plan_of("h100", model_of("dsa", heads), attention_backend="dsa") for heads in (128, 256)}
    libraries = {
        heads: {group.library.distribution for phase in plan.running for group in phase.groups if group.library}
        for heads, plan in plans.items()
    }
    assert libraries == {128: {"sgl-flash-mla"}, 256: {"triton"}}
