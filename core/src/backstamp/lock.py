"""A lock: the plans of many hosts, models and roles as one record, to be held against tomorrow's.

In: plans, or refusals where a combination has none, and the launch they were resolved with. Out: a `Lock` that is one
byte-stable JSON record and reads back equal. It holds names and versions only: hosts and models by name, a config by
the digest of its content, never a path. A name that stands for two things is an error.

.. versionadded:: 0.2
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from backstamp import __version__
from backstamp.declarations import Role
from backstamp.errors import BackstampError, BadLock
from backstamp.json_fields import JsonFields
from backstamp.launch import Requests
from backstamp.plan import Plan
from backstamp.plan_reading import plan_from_json
from backstamp.plan_rows import PluginRef
from backstamp.policy import Policy

__all__ = [
    "LOCK_SCHEMA",
    "Lock",
    "LockEntry",
    "LockLaunch",
    "LockedRefusal",
    "lock_from_json",
    "lock_text",
    "lock_to_json",
    "locked_distributions",
    "make_lock",
    "refusal_of",
]

LOCK_SCHEMA: Final = 1
_ROLES: Final[tuple[Role, ...]] = get_args(Role)
_LOCK: Final = ("schema", "backstamp", "launch", "configs", "plugins", "entries")
#: The folders of an absolute path as exceptions quote it: "GDN/KDA" and "1/2" are none.
_PATH: Final = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[\\/](?:[\w.+@~-]+(?: [\w.+@~-]+)*[\\/])+")
_Words = TypeVar("_Words", Requests, Policy)


class LockedRefusal(NamedTuple):
    """Why a combination has no plan: the error's code, and who needs what and got what."""

    code: str
    message: str


class LockEntry(NamedTuple):
    """One combination: its plan, or its refusal."""

    host: str
    model: str
    role: Role
    plan: Plan | None
    refusal: LockedRefusal | None = None

    @property
    def key(self) -> tuple[str, str, Role]:
        """What the combination is of; unique in a lock."""
        return self.host, self.model, self.role


@dataclass(frozen=True, slots=True, kw_only=True)
class LockLaunch:
    """What was asked for: everything but hosts, models and files, so that a check needs no flags.

    `settings` are the old settings that were named; those of the environment are no part of a lock.
    """

    requests: Requests = field(default_factory=Requests)
    policy: Policy = field(default_factory=Policy)
    role: Role = "target"
    device: str | None = None
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The plans of hosts x models x roles.

    Attributes:
        entries: in order of host, model and role.
        launch: what they were resolved with.
        configs: (kind and name, digest) of every file that was read: "model llama", "draft eagle", "engine vllm".
        plugins: (distribution, version) of every plugin there was, chosen or not.
        backstamp: the version that resolved.
    """

    entries: tuple[LockEntry, ...]
    launch: LockLaunch = field(default_factory=LockLaunch)
    configs: tuple[tuple[str, str], ...] = ()
    plugins: tuple[tuple[str, str], ...] = ()
    backstamp: str = __version__


def make_lock(
    plans: Iterable[Plan | LockEntry],
    *,
    launch: LockLaunch | None = None,
    configs: Iterable[tuple[str, str]] = (),
    plugins: Iterable[PluginRef] = (),
) -> Lock:
    """Put plans together; a plan alone is an entry under its own host, model and role.

    Raises:
        BadLock: two plans of one host, model and role.
    """
    entries: dict[tuple[str, str, Role], LockEntry] = {}
    for item in plans:
        entry = item if isinstance(item, LockEntry) else LockEntry(item.host, item.model, item.role, item)
        if entry.key in entries:
            raise BadLock(
                f"lock, {entry.role} of {entry.model} on {entry.host}",
                needed="one plan for each host, model and role",
                found="two",
                fix="Give one of them a name of its own, as --model NAME=FILE or --host NAME=FILE do",
            )
        entries[entry.key] = _without_paths(entry)
    refs = dict(sorted([*(ref for entry in entries.values() for ref in _plugins_of(entry)), *_versions(plugins)]))
    return Lock(
        entries=tuple(entries[key] for key in sorted(entries)),
        launch=launch if launch is not None else LockLaunch(),
        configs=tuple(sorted(configs)),
        plugins=tuple(refs.items()),
    )


def refusal_of(error: BackstampError) -> LockedRefusal:
    """The part of a refusal that a lock keeps.

    What else was considered is left out: it lists whatever is installed, and would change with every new plugin.
    """
    return LockedRefusal(error.code, f"{error.who}: needs {error.needed}, got {error.found}")


def locked_distributions(lock: Lock) -> frozenset[str]:
    """The distributions inside a lock: those whose plugins were there when it was made, chosen or not."""
    return frozenset(distribution for distribution, _ in lock.plugins)


def lock_to_json(lock: Lock) -> dict[str, object]:
    """The lock for tools; key order is fixed."""
    return {
        "schema": LOCK_SCHEMA,
        "backstamp": lock.backstamp,
        "launch": {
            "requests": _asked(lock.launch.requests),
            "policy": _asked(lock.launch.policy),
            "role": lock.launch.role,
            "device": lock.launch.device,
            "settings": dict(lock.launch.settings),
        },
        "configs": dict(lock.configs),
        "plugins": dict(lock.plugins),
        "entries": [_entry_to_json(entry) for entry in lock.entries],
    }


def lock_text(lock: Lock) -> str:
    """The text of a lock file: the same lock, the same bytes."""
    return json.dumps(lock_to_json(lock), indent=1) + "\n"


def lock_from_json(data: object, who: str = "lock") -> Lock:
    """The lock that was written as this JSON.

    Raises:
        BadLock: a field is missing, malformed or unknown, or the schema is not ours. BadPlan: one of its plans is.
    """
    fields = JsonFields(data, who, BadLock)
    fields.schema(LOCK_SCHEMA)
    fields.only(_LOCK)
    launch = fields.part("launch").only(("requests", "policy", "role", "device", "settings"))
    entries = tuple(_entry_from_json(part) for part in fields.parts("entries"))
    if [entry.key for entry in entries] != sorted({entry.key for entry in entries}):
        raise fields.bad("entries", "each host, model and role once, in order", "another order, or one twice")
    return Lock(
        entries=entries,
        launch=LockLaunch(
            requests=_read_asked(launch.part("requests"), Requests),
            policy=_read_asked(launch.part("policy"), Policy),
            role=launch.one_of("role", _ROLES),
            device=launch.word_or_none("device"),
            settings=_texts(launch.part("settings")),
        ),
        configs=_pairs(fields.part("configs")),
        plugins=_pairs(fields.part("plugins")),
        backstamp=fields.word("backstamp"),
    )


def _plugins_of(entry: LockEntry) -> list[tuple[str, str]]:
    if entry.plan is None:
        return []
    linear = entry.plan.linear
    rows = [*entry.plan.phases, *(linear.rows if linear is not None else ())]
    return _versions(group.plugin for row in rows for group in row.groups)


def _versions(plugins: Iterable[PluginRef]) -> list[tuple[str, str]]:
    return [(plugin.distribution, plugin.version) for plugin in plugins]


def _without_paths(entry: LockEntry) -> LockEntry:
    """The causes of failed plugins quote files of the machine that resolved; a lock keeps their last part."""
    plan, refusal = entry.plan, entry.refusal
    if plan is not None:
        warnings = tuple(warning._replace(text=_PATH.sub("", warning.text)) for warning in plan.warnings)
        plan = dataclasses.replace(plan, warnings=warnings)
    if refusal is not None:
        refusal = refusal._replace(message=_PATH.sub("", refusal.message))
    return entry._replace(plan=plan, refusal=refusal)


def _entry_to_json(entry: LockEntry) -> dict[str, object]:
    return {
        "host": entry.host,
        "model": entry.model,
        "role": entry.role,
        "plan": None if entry.plan is None else entry.plan.as_json(),
        "refusal": None if entry.refusal is None else entry.refusal._asdict(),
    }


def _entry_from_json(fields: JsonFields) -> LockEntry:
    fields.only(LockEntry._fields)
    refusal = fields.part_or_none("refusal")
    plan = fields.value("plan")
    if (plan is None) == (refusal is None):
        raise fields.bad("plan", "a plan or a refusal", "neither" if plan is None else "both")
    return LockEntry(
        host=fields.word("host"),
        model=fields.word("model"),
        role=fields.one_of("role", _ROLES),
        plan=None if plan is None else plan_from_json(plan, f"{fields.who}, {fields.path}.plan"),
        refusal=None if refusal is None else _refusal(refusal.only(LockedRefusal._fields)),
    )


def _refusal(fields: JsonFields) -> LockedRefusal:
    return LockedRefusal(fields.word("code"), fields.text("message"))


def _pairs(fields: JsonFields) -> tuple[tuple[str, str], ...]:
    return tuple((name, fields.word(name)) for name in fields.names())


def _texts(fields: JsonFields) -> tuple[tuple[str, str], ...]:
    return tuple((name, fields.text(name)) for name in fields.names())


def _asked(words: Requests | Policy) -> dict[str, object]:
    """The fields somebody set, sets in order."""
    unset = type(words)()
    asked = {item.name: getattr(words, item.name) for item in dataclasses.fields(words)}
    return {
        name: sorted(value) if isinstance(value, frozenset) else dict(value) if isinstance(value, Mapping) else value
        for name, value in asked.items()
        if value != getattr(unset, name)
    }


def _read_asked(fields: JsonFields, kind: type[_Words]) -> _Words:
    hints = get_type_hints(kind)
    fields.only(hints)
    return kind(**{name: _value(fields, name, hints[name]) for name in fields.names()})  # type: ignore[arg-type]


def _value(fields: JsonFields, name: str, hint: object) -> object:
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is Literal:
        return fields.one_of(name, cast("Sequence[str]", kinds))
    if get_origin(hint) is frozenset:
        return frozenset(fields.words(name))
    if get_origin(hint) is tuple:
        return fields.words(name)
    below = next((get_args(kind)[1] for kind in kinds if get_origin(kind) is Mapping), None)
    if below is not None:
        part = fields.part(name)
        return {key: part.flag(key) if below is bool else part.word(key) for key in part.names()}
    if bool in kinds:
        return fields.flag(name)
    return fields.whole(name, least=-1) if int in kinds else fields.word(name)
