"""Phases that follow another, runners that share a cache, and requests that mean nothing alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from backstamp.attention import LayerSpec
from backstamp.construction import RunnerShape, build
from backstamp.declarations import Alias, PageSizes
from backstamp.engine import EngineFacts
from backstamp.errors import BadInput, BuiltMismatch, ConflictingRequest, NoKernel, Refused, StrictViolation
from backstamp.explanation import matrix
from backstamp.launch import Requests, make_launch
from backstamp.model import DraftFacts, default_model, model_from_config
from backstamp.policy import Policy
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from backstamp.testing.hosts import described_host
from tests.core.test_construction import planned
from tests.models import config
from tests.resolving import kernel, plan_of

EAGLE = Requests(speculative_algorithm="EAGLE")


def test_verify_by_mode_never_falls_through_an_alias() -> None:
    """A half that runs `tr` verifies with `tr` or not at all, though `tr` is also a key with a second kernel."""
    offers = [kernel("tr", phases=frozenset({"prefill", "decode"})), kernel("xqa")]
    alias = Alias(key="tr", kernels=("tr", "xqa"))
    asked = replace(EAGLE, attention_backend="tr", speculative_attention_mode="prefill")
    with pytest.raises(Refused) as caught:
        plan_of(offers, asked, aliases=[alias])
    assert caught.value.needed == "a kernel for verify"


def test_verify_follows_a_half_layer_by_layer() -> None:
    """Unlike layers with unlike kernels verify with those kernels."""
    gemma = model_from_config(config("gemma4"))
    offers = [
        kernel("a256", head_dims=(256,), features=frozenset({"window", "softcap"})),
        kernel("b512", head_dims=(512,), features=frozenset({"softcap"})),
    ]
    plan = plan_of(offers, EAGLE, model=gemma)
    prefill, verify = plan.phase("prefill"), plan.phase("verify")
    assert [group.kernel for group in verify.groups] == [group.kernel for group in prefill.groups]
    assert len({group.kernel for group in verify.groups}) == 2


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"layouts": ("nhd",)}, "nhd pages of 64"),
        ({"layouts": ("hnd",), "page_sizes": PageSizes(preferred=16, exact=(16,))}, "hnd pages of 16"),
    ],
)
def test_a_draft_that_shares_its_targets_cache_reads_its_layout(changes: dict[str, object], found: str) -> None:
    """vllm #41657: two index orders over one cache degenerate on long prompts; here it is an error naming both."""
    engine = EngineFacts(layouts=frozenset({"hnd", "nhd"}))
    pages = PageSizes(preferred=64, multiple_of=64)
    target = plan_of([kernel("t", layouts=("hnd",), page_sizes=pages)], EAGLE, engine=engine)
    model = replace(default_model(), draft=DraftFacts(shares_kv=True))
    other = kernel("d", **{"page_sizes": pages, **changes})
    asked = Requests(draft_attention_backend="d")
    with pytest.raises(ConflictingRequest) as caught:
        plan_of([other], asked, role="draft", model=model, target=target, engine=engine)
    assert caught.value.needed == "bf16 hnd pages of 64, as t of the target lays it out"
    assert caught.value.found == f"bf16 {found} of d"
    same = kernel("d", layouts=("hnd",), page_sizes=pages)
    assert plan_of([same], asked, role="draft", model=model, target=target, engine=engine).page_size == 64


@pytest.mark.parametrize("field", ["verify_attention_backend", "draft_attention_backend"])
def test_a_request_for_a_phase_nobody_runs_is_told(field: str) -> None:
    """Nothing drafts: the flag is a row of the plan, an error in strict mode, never ignored in silence."""
    asked = Requests(**{field: "a"})
    (warning,) = [warning for warning in plan_of([kernel("a")], asked).warnings if warning.code == "unused"]
    assert field.replace("_", "-") in warning.text
    with pytest.raises(StrictViolation):
        plan_of([kernel("a")], asked, policy=Policy(strict=True))


def test_only_checks_of_an_installation_may_be_bypassed() -> None:
    """A bypass that switches nothing off is a mistake, and arch is not negotiable."""
    for code in ("nonsense", "arch"):
        with pytest.raises(BadInput, match="companion"):
            Policy(bypass=frozenset({code}))


def test_a_page_size_the_engine_fixed_is_not_overridden() -> None:
    """The operator's page size and the engine's differ: an error naming both, not the operator's in silence."""
    with pytest.raises(ConflictingRequest, match="page size 16, which mine has fixed, got --page-size 64"):
        plan_of([kernel("a")], Requests(page_size=64), engine=EngineFacts(name="mine", page_size=16))


def layer(at: int, softcap: float) -> LayerSpec:
    """One layer of the default model."""
    dims = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    return LayerSpec(layer_id=at, scale=0.1, softcap=softcap, **dims)


def test_unlike_softcaps_are_not_compiled_as_one() -> None:
    """A compiled-in softcap serves layers of that softcap only."""
    offer = replace(cpu_offer("one", "fake"), features=frozenset({"softcap"}), build_settings=frozenset({"softcap"}))
    plan, catalogue = planned(offer)
    runner = RunnerShape(layers=(layer(0, 50.0), layer(1, 0.0)))
    with pytest.raises(BuiltMismatch, match=r"got layers with softcap 0\.0, 50\.0"):
        build(plan, runner, catalogue, load=recording_factory)


def test_a_runner_without_the_planned_layers_is_refused() -> None:
    """A plan of 32 layers is not built for a runner whose layers are others."""
    plan, catalogue = planned()
    with pytest.raises(BuiltMismatch, match="got layers 99"):
        build(plan, RunnerShape(layers=(layer(99, 0.0),)), catalogue, load=recording_factory)


def test_the_matrix_shows_a_key_whose_kernel_nobody_has() -> None:
    """One alias over a plugin that is not installed is a cell, not the end of the table."""
    alias = Alias(key="absent", kernels=("nowhere",))
    catalogue = catalogue_of(fake_plugin("p", [kernel("here")], [alias]))
    launch = make_launch(EAGLE)
    cells = matrix(catalogue, [described_host("h100")], launch, EngineFacts(), default_model())
    assert {cell.code for cell in cells if cell.alias == "absent"} == {"not_installed"}
    assert {cell.kernel for cell in cells if cell.alias == "here"} == {"here"}


def test_a_plan_is_the_same_bytes_whatever_the_hash_seed() -> None:
    """Sets iterate in another order in every process; verdicts and JSON may not."""
    program = (
        "import json\n"
        "from tests.resolving import kernel, plan_of\n"
        "from backstamp.model import model_from_config\n"
        "from tests.models import config\n"
        "rows = [kernel('two', head_dims=(256,), features=frozenset({f})) for f in ('window', 'softcap')]\n"
        "good = kernel('good', head_dims=(256,), features=frozenset({'window', 'softcap', 'sinks'}))\n"
        "print(json.dumps(plan_of([*rows, good], model=model_from_config(config('softcap'))).as_json()))\n"
    )
    outputs = set()
    for seed in ("1", "2", "3", "4"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        child = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
        )
        outputs.add(child.stdout)
    assert len(outputs) == 1


def test_auto_takes_the_exact_row_of_a_kernel_that_has_an_approximate_one_too() -> None:
    """What auto may not take is a row, not the kernel."""
    rows = [kernel("k", accuracy="fp8_math", priority=90), kernel("k", priority=10), kernel("other", priority=1)]
    decode = plan_of(rows).phase("decode")
    assert (decode.kernel, decode.groups[0].row) == ("k", 1)
    with pytest.raises(NoKernel, match="serves it when asked for"):
        plan_of(rows[:1])
