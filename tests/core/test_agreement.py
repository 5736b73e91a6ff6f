"""Ranks and instances of one job agree before their first collective, or every one of them raises and says who not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backstamp.agreement import agree, canonical_bytes, compare, differences
from backstamp.errors import BadInput, BadPlan, Disagreement
from backstamp.launch import Requests
from backstamp.plan import Plan
from tests.children import ordinary_environment
from tests.documents import ROOT
from tests.resolving import kernel, plan_of

OFFERS = [kernel("flashinfer"), kernel("triton")]
PLAN = plan_of(OFFERS)
OTHER = plan_of(OFFERS, Requests(decode_attention_backend="triton"))
WORLD_SIZE = 4
#: A rank that neither ends nor raises by then hangs: thirty times what it needs.
HANGS_S = 120


def with_group(plan: Plan, phase: str, **changes: object) -> Plan:
    """A plan with the first group of one phase changed."""
    rows = [
        row._replace(groups=(row.groups[0]._replace(**changes), *row.groups[1:])) if row.phase == phase else row
        for row in plan.phases
    ]
    return replace(plan, phases=tuple(rows))


def test_equal_plans_agree() -> None:
    """No difference, nothing raised; one plan alone and no plan at all agree with themselves."""
    compare([PLAN] * 8)
    compare([PLAN])
    compare([])
    assert differences([PLAN] * 8) == ()


def test_what_does_not_run_may_differ() -> None:
    """Hosts, who asked, verdicts and warnings are each rank's own."""
    asked = plan_of(OFFERS, Requests(attention_backend="flashinfer", page_size=PLAN.page_size))
    assert asked.phase("decode").source != PLAN.phase("decode").source
    elsewhere = replace(asked, host="node7", warnings=(), losses=(), bypassed=("companion",))
    compare([PLAN, elsewhere])
    compare([PLAN, with_group(PLAN, "decode", skipped=("companion",), row=3, source="operator")])


def test_the_majority_is_the_reference_even_when_rank_0_is_the_odd_one() -> None:
    """Seven of eight name the one that differs, wherever it is."""
    with pytest.raises(Disagreement) as caught:
        compare([OTHER, *[PLAN] * 7])
    assert caught.value.who == "rank 0, phases.decode.kernel"
    assert caught.value.needed == "flashinfer, as rank 1 and 6 others have it"
    assert caught.value.found == "triton"


def test_between_equals_the_first_is_the_reference() -> None:
    """Two against two: every rank must name the same side."""
    found = differences([OTHER, PLAN, OTHER, PLAN])
    assert [item.who for item in found] == ["rank 1", "rank 3"]
    assert found[0].agreeing == ("rank 0", "rank 2")


def test_every_rank_that_differs_is_listed() -> None:
    """The error is about the first; the others are told with it."""
    with pytest.raises(Disagreement, match=r"rank 1, .*Also considered: rank 5, page_size, 32 vs 16") as caught:
        compare([PLAN, OTHER, PLAN, PLAN, PLAN, replace(PLAN, page_size=32)])
    assert caught.value.considered == "rank 5, page_size, 32 vs 16"


@pytest.mark.parametrize(
    ("other", "field", "value"),
    [
        (replace(PLAN, model="qwen3"), "model", "qwen3"),
        (replace(PLAN, role="draft"), "role", "draft"),
        (replace(PLAN, page_size=32), "page_size", "32"),
        (replace(PLAN, dtype="fp16"), "dtype", "fp16"),
        (replace(PLAN, kv_dtype="e4m3fn"), "kv_cache_dtype", "e4m3fn"),
        (replace(PLAN, layouts=(("attention", "packed"),)), "layouts.attention", "packed"),
        (replace(PLAN, graph="any"), "graph", "any"),
        (replace(PLAN, num_steps=3), "speculative.num_steps", "3"),
        (replace(PLAN, topk=4), "speculative.topk", "4"),
        (with_group(PLAN, "prefill", layers=(0, 1)), "phases.prefill.groups[0].layers", "0, 1"),
        (with_group(PLAN, "decode", kernel="triton"), "phases.decode.groups[0].kernel", "triton"),
        (
            with_group(PLAN, "decode", plugin=PLAN.phase("decode").groups[0].plugin._replace(version="1.1")),
            "phases.decode.groups[0].plugin",
            "fake-p 1.1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_must_agree_on_everything_that_runs(other: Plan, field: str, value: str) -> None:
    """Each is named by the path a reader of the plan's JSON knows."""
    (found,) = differences([PLAN, PLAN, other])
    assert (found.who, found.field, found.value) == ("rank 2", field, value)


def test_a_phase_only_one_rank_runs_is_named() -> None:
    """A rank that drafts beside ranks that do not."""
    drafting = plan_of(OFFERS, Requests(speculative_algorithm="EAGLE"))
    (found,) = differences([PLAN, PLAN, drafting])
    assert (found.field, found.value, found.reference) == ("phases.verify.kernel", "flashinfer", "none")


def test_plans_by_name_are_named_so() -> None:
    """A mapping names its ranks or instances itself."""
    with pytest.raises(
        Disagreement, match=r"^instance decode, page_size: needs 16, as instance prefill has it, got 64"
    ):
        compare({"prefill": PLAN, "decode": replace(PLAN, page_size=64)}, of="instances")


@pytest.mark.parametrize(
    ("of", "convertible", "word"),
    [
        ("ranks", frozenset({"page_size"}), "page_size"),
        ("instances", frozenset({"layouts"}), "layouts"),
        ("hosts", frozenset(), "'hosts'"),
    ],
    ids=["ranks-convert-nothing", "no-layout-is-converted", "unknown-of"],
)
def test_an_unknown_word_is_refused(of: str, convertible: frozenset[str], word: str) -> None:
    """A misspelt permission must not pass for one."""
    with pytest.raises(BadInput) as caught:
        compare([PLAN, PLAN], of, convertible=convertible)
    assert caught.value.found == word


@pytest.mark.parametrize(
    ("plans", "who", "found"),
    [
        pytest.param([PLAN, None], "compare, rank 1", "None", id="no-plan"),
        pytest.param({"prefill": PLAN, "decode": "plan.json"}, "compare, rank decode", "'plan.json'", id="a-word"),
        pytest.param(None, "compare", "NoneType", id="nothing"),
        pytest.param(PLAN, "compare", "Plan", id="one-plan"),
    ],
)
def test_what_is_no_plan_is_refused_by_its_place(plans: object, who: str, found: str) -> None:
    """A rank that has none cannot agree."""
    for hold in (compare, differences):
        with pytest.raises(BadInput) as caught:
            hold(plans)  # type: ignore[arg-type]
        assert (caught.value.who, caught.value.found) == (who, found)


def test_a_rank_without_a_plan_is_refused_before_it_shows_anything() -> None:
    """The others would wait for it in vain, or read something else."""
    with pytest.raises(BadInput, match="agree: needs a resolved plan, got None"):
        agree(None, None, 0, 2)  # type: ignore[arg-type]


def test_what_is_convertible_is_a_set() -> None:
    """A word alone would be read letter by letter."""
    with pytest.raises(BadInput, match="compare, convertible: needs a set of words, got 'page_size'"):
        compare([PLAN], "instances", convertible="page_size")  # type: ignore[arg-type]


def test_the_bytes_that_travel_are_the_plan_and_nothing_else() -> None:
    """JSON in ASCII, the same for the same plan, read back by any reader of plans."""
    assert canonical_bytes(PLAN) == canonical_bytes(plan_of(OFFERS))
    assert json.loads(canonical_bytes(PLAN).decode("ascii"))["digest"] == PLAN.digest


@pytest.mark.parametrize(
    ("shown", "word"),
    [("", "needs JSON, got 0 other bytes"), ("cos\nsystem\n(S'x'\ntR.", "needs JSON"), ("{}", "field schema")],
    ids=["nothing", "pickle", "another-record"],
)
def test_what_a_rank_shows_is_read_as_a_plan_and_nothing_else(shown: str, word: str) -> None:
    """A peer's bytes are not trusted; the error says whose they are."""
    store = torch.distributed.HashStore()
    store.set("backstamp/plans/1/1", "another digest")
    store.set("backstamp/plans/2/1", shown)
    with pytest.raises(BadPlan, match=rf"^plan of rank 1.*{word}"):
        agree(store, PLAN, 0, 2, timeout_s=5.0)


def test_agreeing_through_a_store_imports_no_torch() -> None:
    """Any object with a store's five methods serves, in an engine that has torch or in a launcher that has not."""
    program = (
        "import sys\n"
        "from backstamp import agree\n"
        "from tests.resolving import kernel, plan_of\n"
        "class Store(dict):\n"
        "    def set(self, key, value): self[key] = value.encode()\n"
        "    def get(self, key): return self[key]\n"
        "    def add(self, key, value): return value\n"
        "    def check(self, keys): return all(key in self for key in keys)\n"
        "    def wait(self, keys, timeout): assert self.check(keys)\n"
        "agree(Store(), plan_of([kernel('a')]), 0, 1)\n"
        "import backstamp.cli.lock_commands\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
    )
    environment = ordinary_environment(ROOT)
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert child.returncode == 0, child.stderr


def run_job(transport: str, end: str, lost: int, folder: Path) -> dict[int, dict[str, dict[str, str]]]:
    """Four real processes; what became of each step on each rank that did not hang."""
    program = [sys.executable, str(ROOT / "tests" / "core" / "agreement_ranks.py"), transport]
    words = [[*program, str(rank), str(WORLD_SIZE), str(folder), end, str(lost)] for rank in range(WORLD_SIZE)]
    environment = {**ordinary_environment(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen(word, stdout=pipe, stderr=pipe, text=True, env=environment) for word in words]
    steps = {}
    try:
        for at, rank in enumerate(ranks):
            if end == "hangs" and at == lost:
                continue
            out, err = rank.communicate(timeout=HANGS_S)
            assert out, f"rank {at} ended with {rank.returncode}: {err}"
            steps[at] = json.loads(out)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return steps


JOBS = [("tcp", "dies", 3), ("tcp", "dies", 0), ("file", "hangs", 1), ("gloo", "dies", 3), ("gloo", "hangs", 1)]


@pytest.fixture(scope="module", params=JOBS, ids=[f"{way}-rank-{lost}-{end}" for way, end, lost in JOBS])
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[int, dict[str, dict[str, str]]], tuple[str, str, int]]:
    """One job of four processes for each way to exchange, and each way to lose a rank."""
    transport, end, lost = request.param
    return run_job(transport, end, lost, tmp_path_factory.mktemp("job")), request.param


def test_ranks_with_equal_plans_go_on(job: tuple[dict[int, dict[str, dict[str, str]]], object]) -> None:
    """Twice, on one host and on four of unlike names."""
    for steps in job[0].values():
        assert (steps["equal"]["code"], steps["hosts"]["code"]) == ("agreed", "agreed")


def test_every_rank_raises_and_names_the_rank_that_differs(
    job: tuple[dict[int, dict[str, dict[str, str]]], object],
) -> None:
    """The one that differs too; all say the same."""
    for steps in job[0].values():
        error = steps["differs"]
        assert (error["code"], error["who"]) == ("disagreement", "rank 2, phases.decode.kernel")
        assert (error["needed"], error["found"]) == ("flashinfer, as rank 0, rank 1, rank 3 have it", "triton")


def test_a_lost_rank_is_an_error_within_the_timeout_that_names_it(
    job: tuple[dict[int, dict[str, dict[str, str]]], tuple[str, str, int]],
) -> None:
    """Every other rank ends, and says who answered and who did not."""
    steps, (transport, _, lost) = job
    living = [rank for rank in range(WORLD_SIZE) if rank != lost]
    assert [rank for rank in steps if rank != lost] == living
    for rank in living:
        error = steps[rank]["ends"]
        assert error["code"] == "rank_missing"
        assert error["who"] == f"agreement of 4 ranks, rank {rank}"
        assert "within 5 s" in error["needed"]
        if (transport, lost) == ("tcp", 0):
            # rank 0 served the store: nobody can be asked any more
            assert "the store does not answer" in error["found"]
        else:
            answered = ", ".join(map(str, living))
            assert error["found"] == f"ranks {answered} answered, rank {lost} did not"


def test_a_job_like_it_without_gpus_goes_as_it_must() -> None:
    """The program below with a gloo group in place of NCCL, so that it is not written for GPUs alone."""
    status, out, err = run_two_gpus("gloo")
    assert status == 0, out + err
    assert [json.loads(line)["rank"] for line in out.splitlines()] == [0, 1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs in one host, and NCCL")
def test_a_job_whose_main_group_is_nccl_agrees_through_its_store() -> None:
    """The NCCL group is refused, the store and a gloo group beside it serve, and the first collective runs."""
    status, out, err = run_two_gpus("nccl")
    assert status == 0, out + err


def run_two_gpus(backend: str) -> tuple[int, str, str]:
    """Both ranks of tests/core/nccl_agreement.py."""
    program = [sys.executable, str(ROOT / "tests" / "core" / "nccl_agreement.py"), "--backend", backend]
    child = subprocess.run(
        program, capture_output=True, text=True, env=ordinary_environment(), check=False, timeout=300
    )
    return child.returncode, child.stdout, child.stderr
