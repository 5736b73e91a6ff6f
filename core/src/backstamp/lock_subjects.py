"""What a lock is about, by name: hosts, models, a draft and an engine, found again when the lock is checked.

In: words of a command line, `FILE` or `NAME=FILE`. Out: `LockSubjects`, and the `Lock` of every combination. A lock
holds no path, so a check finds named hosts, this machine and the default model by itself and is given every other
file again; a config with another content than the locked one shows as a difference.

.. versionadded:: 0.2
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import get_data
from typing import Final, NamedTuple, TypeVar

from backstamp.catalogue import Catalogue
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.declarations import Role
from backstamp.engine import EngineFacts, load_engine
from backstamp.errors import BackstampError, BadInput, BadLock
from backstamp.host import HostFacts, load_host, profile_names, this_host
from backstamp.launch import Requests, make_launch
from backstamp.lock import Lock, LockEntry, LockLaunch, make_lock, refusal_of
from backstamp.model import DEFAULT_CONFIG, ModelFacts, load_model, model_from_config
from backstamp.plan import Plan
from backstamp.resolution import resolve_on

__all__ = ["GivenWords", "LockSubjects", "Subject", "config_digest", "read_subjects", "resolve_lock", "subjects_of"]

_THIS_HOST: Final = "this host"
_Facts = TypeVar("_Facts")


class Subject(NamedTuple):
    """One model and the digest of the config it was read from."""

    facts: ModelFacts
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LockSubjects:
    """Everything named that a lock is resolved for; `engine` is its facts and their digest."""

    hosts: Mapping[str, HostFacts]
    models: Mapping[str, Subject]
    draft: tuple[str, Subject] | None = None
    engine: tuple[EngineFacts, str] | None = None

    @property
    def configs(self) -> tuple[tuple[str, str], ...]:
        """Every file that was read, as a lock keeps it."""
        found = [(f"model {name}", subject.digest) for name, subject in self.models.items()]
        found += [(f"draft {self.draft[0]}", self.draft[1].digest)] if self.draft is not None else []
        found += [(f"engine {self.engine[0].name}", self.engine[1])] if self.engine is not None else []
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenWords:
    """Hosts and files as a command line gives them."""

    hosts: Sequence[str] = ()
    models: Sequence[str] = ()
    draft: str | None = None
    engine: str | None = None


def read_subjects(given: GivenWords, device: str | None = None) -> LockSubjects:
    """Read what was named; no host is this machine, no model the default one.

    Raises:
        BadLock: two hosts or two models of one name. BadInput: a file cannot be read as what it must be.
    """
    hosts = [_host(word, device) for word in given.hosts] or [(_THIS_HOST, this_host(device))]
    models = [_model(word) for word in given.models] or [_default_model()]
    return LockSubjects(
        hosts=_by_name("host", hosts),
        models=_by_name("model", models),
        draft=_model(given.draft) if given.draft is not None else None,
        engine=_engine(given.engine) if given.engine is not None else None,
    )


def subjects_of(lock: Lock, given: GivenWords) -> LockSubjects:
    """Find again what a lock was made for; files, whose paths no lock knows, are given again.

    Raises:
        BadLock: something is neither given nor found by its name, or is given and not in the lock.
    """
    device, digests = lock.launch.device, dict(lock.configs)
    locked_hosts = tuple(dict.fromkeys(entry.host for entry in lock.entries))
    hosts = _by_name("host", [_host(word, device) for word in given.hosts])
    models = _by_name("model", [_model(word) for word in given.models])
    _check_known("host", hosts, locked_hosts)
    _check_known("model", models, _locked(lock, "model"))
    return LockSubjects(
        hosts={name: hosts[name] if name in hosts else _host_again(name, device) for name in locked_hosts},
        models={
            name: models[name] if name in models else _model_again(name, digests[f"model {name}"])
            for name in _locked(lock, "model")
        },
        draft=_draft_again(lock, given.draft),
        engine=_engine_again(lock, given.engine),
    )


def resolve_lock(catalogue: Catalogue, launch: LockLaunch, subjects: LockSubjects) -> Lock:
    """Resolve every combination; one that has no plan is an entry with its refusal.

    A draft model adds the draft's plan to each target's; with the draft role it is the draft's plan alone.
    """
    entries: list[LockEntry] = []
    for host_name, facts in subjects.hosts.items():
        host = compile_for(catalogue, facts)
        for name, subject in subjects.models.items():
            work = _Combination(host, launch, subjects, subject.facts)
            entries += [LockEntry(host_name, name, entry.role, entry.plan, entry.refusal) for entry in work.entries()]
    known = [found.plugin for found in catalogue.found] + [failure.plugin for failure in catalogue.failures]
    return make_lock(entries, launch=launch, configs=subjects.configs, plugins=known)


def config_digest(config: Mapping[str, object]) -> str:
    """sha256 of a config's content, without remarks (`_...`) and the version of the library that saved it."""
    kept = {
        name: value for name, value in config.items() if not name.startswith("_") and name != "transformers_version"
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Combination:
    """One host and one model: its target's plan, its draft's, or both."""

    host: HostCatalogue
    launch: LockLaunch
    subjects: LockSubjects
    model: ModelFacts

    def entries(self) -> list[LockEntry]:
        draft = self.subjects.draft
        if self.launch.role == "draft" and draft is None:
            return [self._entry("draft", self.model, None)]
        target = self._entry("target", self.model, None)
        if draft is None:
            return [target]
        # without its target's plan a draft would be resolved as if nothing could be inherited
        drafted = self._entry("draft", draft[1].facts, target.plan) if target.plan is not None else _after(target)
        return [drafted] if self.launch.role == "draft" else [target, drafted]

    def _entry(self, role: Role, model: ModelFacts, target: Plan | None) -> LockEntry:
        # a draft model switches speculation on, and nobody typed the algorithm
        assumed = Requests(speculative_algorithm="STANDALONE") if self.subjects.draft is not None else None
        settings, policy = dict(self.launch.settings), self.launch.policy
        launch = make_launch(self.launch.requests, embedder=assumed, policy=policy, role=role, settings=settings)
        engine = self.subjects.engine[0] if self.subjects.engine is not None else EngineFacts()
        try:
            plan = resolve_on(self.host, launch, engine, model, role=role, target=target)
        except BadInput:
            raise
        except BackstampError as error:
            return LockEntry("", "", role, None, refusal_of(error))
        return LockEntry("", "", role, plan)


def _after(target: LockEntry) -> LockEntry:
    return target._replace(role="draft")


def _split(word: str) -> tuple[str | None, str]:
    """`NAME=FILE`, but a file whose own name has the sign is that file."""
    name, sign, rest = word.partition("=")
    return (name, rest) if sign and name and not Path(word).exists() else (None, word)


def _host(word: str, device: str | None) -> tuple[str, HostFacts]:
    name, rest = _split(word)
    facts = this_host(device) if rest == _THIS_HOST else load_host(rest)
    # the plan says the name its lock knows the host by
    return (name, replace(facts, name=name)) if name is not None else (facts.name, facts)


def _host_again(name: str, device: str | None) -> HostFacts:
    if name == _THIS_HOST:
        return this_host(device)
    if name in profile_names():
        return load_host(name)
    raise BadLock("lock", needed=f"the file of host {name!r}", found="no --host of this name", fix=_again("host", name))


def _model(word: str) -> tuple[str, Subject]:
    name, rest = _split(word)
    facts = load_model(rest)
    path = Path(rest) / "config.json" if Path(rest).is_dir() else Path(rest)
    subject = Subject(facts, config_digest(json.loads(path.read_text("utf-8"))))
    return name if name is not None else facts.name, subject


def _default_model() -> tuple[str, Subject]:
    config = json.loads(get_data("backstamp", DEFAULT_CONFIG) or b"")
    facts = model_from_config(config)
    return facts.name, Subject(facts, config_digest(config))


def _model_again(name: str, digest: str) -> Subject:
    _, default = _default_model()
    if default.digest == digest:
        return default
    raise BadLock(
        "lock", needed=f"the config of model {name!r}", found="no --model of this name", fix=_again("model", name)
    )


def _draft_again(lock: Lock, word: str | None) -> tuple[str, Subject] | None:
    name = _same_as_then(lock, "draft", word, "--draft-model")
    return (name, _model(word)[1]) if word is not None else None


def _engine(path: str) -> tuple[EngineFacts, str]:
    facts = load_engine(path)
    return facts, config_digest(json.loads(Path(path).read_text("utf-8")))


def _engine_again(lock: Lock, word: str | None) -> tuple[EngineFacts, str] | None:
    _same_as_then(lock, "engine", word, "--engine")
    return _engine(word) if word is not None else None


def _same_as_then(lock: Lock, kind: str, word: str | None, flag: str) -> str:
    """The locked name of the one draft or engine; it is given again, and only if there was one."""
    names = _locked(lock, kind)
    if (word is None) == bool(names):
        needed = f"the file of {kind} {names[0]!r}" if names else f"no {kind}, as when it was made"
        raise BadLock(f"lock, {flag}", needed=needed, found=f"{flag} {'unset' if word is None else 'set'}")
    return names[0] if names else ""


def _locked(lock: Lock, kind: str) -> tuple[str, ...]:
    words = [label.partition(" ") for label, _ in lock.configs]
    return tuple(name for at, _, name in words if at == kind)


def _check_known(kind: str, found: Mapping[str, object], locked: Sequence[str]) -> None:
    for name in found:
        if name not in locked:
            raise BadLock(
                f"lock, --{kind} {name}",
                needed=f"a {kind} it was made for ({', '.join(locked)})",
                found=repr(name),
                fix=f"Name the file as the lock does, --{kind} NAME=FILE, or make a new lock",
            )


def _again(kind: str, name: str) -> str:
    return f"A lock holds no paths: give it again with --{kind} {name}=FILE"


def _by_name(kind: str, items: Sequence[tuple[str, _Facts]]) -> dict[str, _Facts]:
    named: dict[str, _Facts] = {}
    for name, facts in items:
        if name in named:
            raise BadLock(
                f"lock, --{kind} {name}",
                needed=f"a name of its own for each {kind}",
                found=f"two of the name {name!r}",
                fix=f"Name one of them: --{kind} NAME=FILE",
            )
        named[name] = facts
    return named
