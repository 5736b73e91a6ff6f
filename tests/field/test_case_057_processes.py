"""Case 57, vllm #5657, #10238, #16228, #18740, #18326, #9233: what was registered by hand is known to its process
alone, and a worker can say so."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import backstamp
from backstamp.catalogue import build_catalogue
from backstamp.declarations import Offer
from backstamp.discovery import discover
from backstamp.errors import UnknownKey
from backstamp.hookspecs import hookimpl
from backstamp.registration import VARIABLE
from backstamp.testing.dists import cpu_offer, write_plugin
from tests.sites import ask, fresh_site, python

Answer = dict[str, object]


class Driver:
    """A plugin that the driver registers by hand."""

    @hookimpl
    def backstamp_offers(self) -> tuple[Offer, ...]:
        """One kernel, k2."""
        return (cpu_offer("k2", "driver"),)


WORKER = """\
import json
import backstamp as b
discovery = b.discover()
catalogue = b.build_catalogue(discovery)
answer = {"parent_only": sorted(discovery.parent_only)}
for key in ("k1", "k2"):
    try:
        asked = b.make_launch(b.Requests(attention_backend=key))
        plan = b.resolve(asked, b.EngineFacts(), b.default_model(), b.load_host("epyc"), catalogue)
        answer[key] = plan.phase("decode").kernel
    except b.BackstampError as error:
        answer[key] = error.code
"""


def work(queue: multiprocessing.SimpleQueue[Answer]) -> None:
    """A worker of `multiprocessing`: what it can resolve, and what it knows only by name."""
    names: dict[str, Answer] = {}
    exec(WORKER, {}, names)
    queue.put(names["answer"])


def worker_of(method: str) -> Answer:
    """The answer of a worker started by `method`."""
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    answer: Answer = queue.get()
    return answer


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """k1 installed with an entry point, k2 registered by hand."""
    for folder in fresh_site(tmp_path, monkeypatch):
        write_plugin(folder, "k1-kernels", kernel="k1", carries_json=True)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        # so that what a test takes out of the environment does not come back after it
        monkeypatch.setenv(VARIABLE, "")
        backstamp.register("driver", Driver())
        yield folder
        backstamp.unregister("driver")


def test_the_parent_resolves_both(site: Path) -> None:
    """vllm #5657: installed and registered plugins are one catalogue."""
    catalogue = build_catalogue(discover())
    assert ask(catalogue, "k1").phase("decode").kernel == "k1"
    assert ask(catalogue, "k2").phase("decode").kernel == "k2"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_fresh_worker_has_the_installed_one_and_the_name_of_the_other(site: Path, method: str) -> None:
    """vllm #10238, #18740: k1 resolves in both; k2 does not, and the worker knows that a parent registered it."""
    assert worker_of(method) == {"k1": "k1", "k2": "unknown_key", "parent_only": ["k2"]}


def test_a_fresh_interpreter_has_the_installed_one_and_the_name_of_the_other(site: Path) -> None:
    """vllm #16228: an engine core started as a program inherits the environment, not the registration."""
    child = python(f"{WORKER}print(json.dumps(answer))", site)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == {"k1": "k1", "k2": "unknown_key", "parent_only": ["k2"]}


def test_a_forked_worker_inherits_the_registration(site: Path) -> None:
    """vllm #9233: a fork is a copy of its parent."""
    assert worker_of("fork") == {"k1": "k1", "k2": "k2", "parent_only": []}


def test_a_worker_elsewhere_knows_no_such_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #18326: on another machine the environment says nothing, and the key is unknown."""
    monkeypatch.delenv(VARIABLE)
    child = python(f"{WORKER}print(json.dumps(answer))", site)
    assert json.loads(child.stdout) == {"k1": "k1", "k2": "unknown_key", "parent_only": []}


BUILD = """\
import pickle
import sys
import backstamp as b
from backstamp.testing.fakes import recording_factory
catalogue = b.build_catalogue(b.discover())
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        plan = pickle.load(file)
    try:
        built = b.build(plan, b.RunnerShape(), catalogue, load=recording_factory)
        print(b.read_stamp(built.objects["decode", 0]).kernel)
    except b.BackstampError as error:
        print(error.code, error.who, "|", error.needed)
"""


def test_a_worker_that_is_handed_a_plan_builds_what_it_says_or_says_what_it_cannot(site: Path, tmp_path: Path) -> None:
    """vllm #10238: the parent's plan is never resolved anew; what this process lacks is named before any weight."""
    catalogue = build_catalogue(discover())
    paths = [tmp_path / "k1.pickle", tmp_path / "k2.pickle"]
    for path in paths:
        path.write_bytes(pickle.dumps(ask(catalogue, path.stem)))
    child = python(BUILD, site, *map(str, paths))
    assert child.returncode == 0, child.stderr
    first, second = child.stdout.splitlines()
    assert first == "k1"
    assert second.startswith("built_mismatch target ")
    assert "'k2' (plugin driver)" in second
    assert "<this process>" in second


def test_a_key_of_the_parent_alone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #5657: the refusal says that only a parent registered it, and what to do."""
    monkeypatch.setenv(VARIABLE, "k2")
    discovery = discover([])
    assert discovery.parent_only == {"k2"}
    with pytest.raises(UnknownKey) as caught:
        ask(build_catalogue(discovery), "k2")
    assert "k2, which was registered only in the parent process" in caught.value.found
    assert "entry point" in caught.value.fix
    with pytest.raises(UnknownKey) as elsewhere:
        ask(build_catalogue(discover([])), "k3")
    assert "the unknown key 'k3'" in elsewhere.value.found
