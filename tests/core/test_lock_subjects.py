"""What a lock is about is found again by name, and what has no name of its own to be found by is given again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backstamp.declarations import RetiredSetting
from backstamp.discovery import Failure
from backstamp.drift import check_lock
from backstamp.errors import BackstampError, BadInput, BadLock
from backstamp.host import record_host
from backstamp.launch import Requests
from backstamp.lock import Lock, LockLaunch, lock_from_json, lock_text
from backstamp.lock_subjects import GivenWords, config_digest, read_subjects, resolve_lock, subjects_of
from backstamp.plan_rows import PluginRef
from backstamp.policy import Policy
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.models import FOLDER, config
from tests.resolving import kernel

MHA, MLA = str(FOLDER / "mha.json"), str(FOLDER / "mla.json")
CATALOGUE = catalogue_of(
    fake_plugin(
        "p",
        [kernel("fa3"), kernel("mla", family="mla", head_dims=("any",)), kernel("cpu", device="cpu", archs=("any",))],
    )
)


def locked(launch: LockLaunch | None = None, **words: object) -> Lock:
    """A lock of what these words name."""
    given = GivenWords(**words)
    launch = launch if launch is not None else LockLaunch()
    return resolve_lock(CATALOGUE, launch, read_subjects(given, launch.device))


def again(lock: Lock, **words: object) -> Lock:
    """The same lock, resolved again from its own text."""
    read = lock_from_json(json.loads(lock_text(lock)))
    return resolve_lock(CATALOGUE, read.launch, subjects_of(read, GivenWords(**words)))


def test_every_host_is_resolved_for_every_model() -> None:
    """Two hosts and two models are four plans."""
    lock = locked(hosts=["h100", "h200"], models=[MHA, MLA])
    assert [entry.key for entry in lock.entries] == [
        (host, model, "target") for host in ("h100", "h200") for model in ("deepseek_v3", "llama")
    ]
    assert [entry.plan.phase("decode").kernel for entry in lock.entries] == ["mla", "fa3"] * 2


def test_no_word_is_this_machine_and_the_default_model() -> None:
    """And both are found again by themselves."""
    lock = locked()
    assert [(entry.host, entry.model) for entry in lock.entries] == [("this host", "llama")]
    assert check_lock(lock, again(lock)) == ()


def test_named_hosts_and_the_default_model_are_found_again() -> None:
    """A check needs no flags."""
    lock = locked(hosts=["h100", "mi300x"])
    assert check_lock(lock, again(lock)) == ()


def test_a_combination_that_has_no_plan_is_its_refusal() -> None:
    """Nothing here serves ROCm; the other host's plan stands."""
    entries = {entry.host: entry for entry in locked(hosts=["h100", "mi300x"]).entries}
    assert entries["mi300x"].plan is None
    assert entries["mi300x"].refusal.code == "no_kernel"
    assert "needs an attention kernel" in entries["mi300x"].refusal.message
    assert entries["h100"].refusal is None


def test_a_flag_that_is_wrong_everywhere_is_no_refusal() -> None:
    """A mistyped word is the operator's, not the combination's."""
    with pytest.raises(BadInput, match="fp7"):
        locked(LockLaunch(requests=Requests(kv_cache_dtype="fp7")), hosts=["h100"])


def test_two_of_one_name_need_names_of_their_own(tmp_path: Path) -> None:
    """Two Llamas; two machines recorded as this host."""
    with pytest.raises(BadLock, match="two of the name 'llama'") as caught:
        locked(hosts=["h100"], models=[MHA, MHA])
    assert "--model NAME=FILE" in caught.value.fix
    box = tmp_path / "box.json"
    box.write_text(record_host("cpu"), "utf-8")
    with pytest.raises(BadLock, match="two of the name 'this host'"):
        locked(hosts=[str(box), str(box)])
    lock = locked(hosts=[f"a={box}", f"b={box}"], models=[f"small={MHA}", f"big={MHA}"])
    assert [entry.key[:2] for entry in lock.entries] == [("a", "big"), ("a", "small"), ("b", "big"), ("b", "small")]
    assert {entry.plan.host for entry in lock.entries} == {"a", "b"}


def test_a_file_whose_own_name_has_the_sign_is_that_file(tmp_path: Path) -> None:
    """`a=b.json` may be there."""
    path = tmp_path / "size=8b.json"
    path.write_text(Path(MHA).read_text("utf-8"), "utf-8")
    assert locked(hosts=["h100"], models=[str(path)]).entries[0].model == "llama"


def test_a_config_and_a_recorded_host_are_given_again(tmp_path: Path) -> None:
    """A lock holds no paths."""
    box = tmp_path / "box.json"
    box.write_text(record_host("cpu"), "utf-8")
    lock = locked(hosts=[f"box={box}"], models=[MLA])
    assert str(tmp_path) not in lock_text(lock)
    assert MLA not in lock_text(lock)
    with pytest.raises(BadLock, match="the file of host 'box'"):
        again(lock, models=[MLA])
    with pytest.raises(BadLock, match="the config of model 'deepseek_v3'") as caught:
        again(lock, hosts=[f"box={box}"])
    assert "--model deepseek_v3=FILE" in caught.value.fix
    assert check_lock(lock, again(lock, hosts=[f"box={box}"], models=[MLA])) == ()


def test_another_config_under_the_same_name_is_a_difference() -> None:
    """The digest of its content is in the lock."""
    lock = locked(hosts=["h100"], models=[MHA])
    drifts = check_lock(lock, again(lock, models=[f"llama={FOLDER / 'mistral.json'}"]))
    assert drifts[0].field == "configs.model llama"


def test_what_the_lock_was_not_made_for_is_refused() -> None:
    """A name that is new would go unchecked."""
    lock = locked(hosts=["h100"])
    with pytest.raises(BadLock, match=r"--host h200: needs a host it was made for \(h100\)"):
        again(lock, hosts=["h200"])
    with pytest.raises(BadLock, match="--model deepseek_v3: needs a model it was made for"):
        again(lock, models=[MLA])


def test_a_launch_is_remembered_with_its_flags() -> None:
    """Page size, key, strictness."""
    launch = LockLaunch(
        requests=Requests(attention_backend="fa3", page_size=32), policy=Policy(strict=True), settings=(("OLD", "1"),)
    )
    lock = locked(launch, hosts=["h100"])
    now = again(lock)
    assert now.launch == launch
    assert now.entries[0].plan.page_size == 32
    assert check_lock(lock, now) == ()


def test_an_old_setting_that_was_named_is_set_again_and_the_environments_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tombstone maps it to a key, now as then; what the environment holds is no part of a lock."""
    old = RetiredSetting(name="OLD_BACKEND", replacement="--attention-backend", values={"x": "fa3"})
    found = fake_plugin("p", [kernel("fa3"), kernel("best", priority=99)], retired_settings=[old])
    launch, subjects = (
        LockLaunch(policy=Policy(allow=frozenset({"fake-p"})), settings=(("OLD_BACKEND", "x"),)),
        read_subjects(GivenWords(hosts=["h100"])),
    )
    (named,) = resolve_lock(catalogue_of(found), launch, subjects).entries
    assert named.plan.phase("decode").kernel == "fa3"
    monkeypatch.setenv("OLD_BACKEND", "x")
    (unnamed,) = resolve_lock(catalogue_of(found), replace(launch, settings=()), subjects).entries
    assert unnamed.plan.phase("decode").kernel == "best"


def test_a_draft_is_locked_beside_its_target() -> None:
    """Two roles a combination; the draft inherits as it would when served."""
    lock = locked(hosts=["h100"], models=[MLA], draft=f"tiny={MHA}")
    target, draft = sorted(lock.entries, key=lambda entry: entry.role, reverse=True)
    assert (target.role, draft.role, draft.model) == ("target", "draft", "deepseek_v3")
    assert draft.plan.model == "llama"
    assert draft.plan.phase("draft_decode").kernel == "fa3"
    assert draft.plan.num_steps > 0
    assert ("draft tiny", config_digest(config("mha"))) in lock.configs
    with pytest.raises(BadLock, match="the file of draft 'tiny'"):
        again(lock, models=[MLA])
    assert check_lock(lock, again(lock, models=[MLA], draft=MHA)) == ()
    with pytest.raises(BadLock, match="no draft, as when it was made"):
        again(locked(hosts=["h100"]), draft=MHA)


def test_the_draft_role_locks_the_draft_alone() -> None:
    """With its target's plan to inherit from, or on its own."""
    launch = LockLaunch(role="draft")
    assert [entry.role for entry in locked(launch, hosts=["h100"]).entries] == ["draft"]
    (entry,) = locked(launch, hosts=["h100"], models=[MLA], draft=MHA).entries
    assert (entry.role, entry.plan.model) == ("draft", "llama")
    assert "inherited" in entry.plan.phase("draft_decode").source


def test_a_draft_whose_target_has_no_plan_has_none() -> None:
    """It would be resolved as if there were nothing to inherit."""
    lock = locked(LockLaunch(requests=Requests(attention_backend="fa3")), hosts=["h100"], models=[MLA], draft=MHA)
    assert [entry.refusal.code for entry in lock.entries] == ["refused", "refused"]


def test_engine_facts_are_a_file_like_the_others(tmp_path: Path) -> None:
    """Given again, and only where they were given."""
    path = tmp_path / "engine.json"
    path.write_text('{"name": "tiny", "graph": "uniform"}', "utf-8")
    lock = locked(hosts=["h100"], engine=str(path))
    assert lock.configs[0][0] == "engine tiny"
    with pytest.raises(BadLock, match="the file of engine 'tiny'"):
        again(lock)
    assert check_lock(lock, again(lock, engine=str(path))) == ()


def test_the_digest_of_a_config_is_that_of_what_it_says() -> None:
    """Not of who saved it, where from, or in which order."""
    said = config("mha")
    saved = {"transformers_version": "9.9", "_name_or_path": "/home/ada/llama", **dict(reversed(said.items()))}
    assert config_digest(saved) == config_digest(said)
    assert config_digest({**said, "num_hidden_layers": 2}) != config_digest(said)


def test_the_order_of_the_words_does_not_matter() -> None:
    """The same lock, the same bytes."""
    words = {"hosts": ["h100", "h200", "epyc"], "models": [MHA, MLA]}
    there, back = locked(**words), locked(**{name: list(reversed(word)) for name, word in words.items()})
    assert lock_text(there) == lock_text(back)


def test_a_plugin_that_came_since_is_known_to_the_new_lock() -> None:
    """Chosen or not, so that a difference can name it."""
    lock = locked(hosts=["h100"])
    more = catalogue_of(*CATALOGUE.found, fake_plugin("q", [kernel("new", priority=99)]))
    now = resolve_lock(more, lock.launch, subjects_of(lock, GivenWords()))
    assert ("fake-q", "1.0") in now.plugins
    assert {drift.because for drift in check_lock(lock, now)} == {("fake-q 1.0 came",)}


def test_a_plugin_that_failed_is_known_to_a_lock() -> None:
    """It was installed: when it loads again, it has not come from nowhere."""
    failure = Failure(
        plugin=PluginRef("r", "fake-r", "1.0"),
        entry="r",
        cause="ImportError: x",
        error=ImportError("x"),
        names=frozenset(),
    )
    lock = resolve_lock(catalogue_of(*CATALOGUE.found, failures=[failure]), LockLaunch(), read_subjects(GivenWords()))
    assert ("fake-r", "1.0") in lock.plugins


def test_the_device_of_this_machine_is_remembered() -> None:
    """`this host` was its CPU, and is again."""
    lock = locked(LockLaunch(device="cpu"))
    assert subjects_of(lock, GivenWords()).hosts["this host"].device == "cpu"
    with pytest.raises(BackstampError, match="cuda device"):
        subjects_of(replace(lock, launch=LockLaunch(device="cuda")), GivenWords())
