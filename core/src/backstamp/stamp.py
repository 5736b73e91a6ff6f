"""The stamp: the record on a built object of what it really is, and the only way to put or read it.

In: an object a factory built and what construction checked about it. Out: the same object, stamped, with its steps.
A missing stamp is an error, never a default; an object that cannot carry one is refused, and so is one that carries
another already.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from backstamp.declarations import Phase, Role, Slot
from backstamp.errors import BuiltMismatch, ContainerWithoutChildren, Unstamped
from backstamp.plan_rows import LibraryRef, PhasePlan, PluginRef
from backstamp.text import plain

if TYPE_CHECKING:
    from backstamp.construction import RunnerBackends

__all__ = [
    "Stamp",
    "copy_stamp",
    "is_container",
    "parts_of",
    "put_stamp",
    "read_stamp",
    "said",
    "steps_of",
    "verify_consumed",
]

#: Attribute that carries the stamp; one name for every object, so that any debugger finds it.
ATTRIBUTE: Final = "backstamp_stamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What a built object is.

    Attributes:
        kernel: the kernel that runs, never an alias.
        sources: (phase, who decided) for every phase the object serves.
        origin: file the object's class was defined in.
        skipped: check codes the operator bypassed.
    """

    kernel: str
    slot: Slot
    role: Role
    plugin: PluginRef
    library: LibraryRef | None
    origin: str
    sources: tuple[tuple[Phase, str], ...]
    skipped: tuple[str, ...] = ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases the object serves."""
        return tuple(phase for phase, _ in self.sources)

    def as_json(self, phase: Phase) -> dict[str, object]:
        """The stamp of one phase for tools."""
        return {
            "kernel": self.kernel,
            "slot": self.slot,
            "phase": phase,
            "role": self.role,
            "plugin": self.plugin.as_json(),
            "library": self.library.as_json() if self.library else None,
            "origin": self.origin,
            "source": dict(self.sources)[phase],
            "skipped": list(self.skipped),
        }


def put_stamp(built: object, stamp: Stamp) -> None:
    """Stamp an object and, where it is a container, each of its steps, and theirs.

    Raises:
        BuiltMismatch: the object takes no attributes (`__slots__` without `backstamp_stamp`), or carries another stamp:
        one object would stand for two. An equal stamp may be put again.
        ContainerWithoutChildren: it, or a step, is a container whose steps cannot be read.
    """
    who = f"{stamp.kernel} (plugin {stamp.plugin.name})"
    for item in parts_of(built):
        before = _carried(item)
        if before is not None and before != stamp:
            raise BuiltMismatch(
                who,
                needed=f"an object of its own for {_purpose(stamp)}",
                found=f"{type(item).__name__}, which is stamped as {_purpose(before)}",
                fix="Let the factory make an object for each request it is given",
            )
        try:
            setattr(item, ATTRIBUTE, stamp)
        except Exception as cause:  # a class may refuse attributes with whatever it likes
            none = isinstance(cause, AttributeError | TypeError)
            raise BuiltMismatch(
                who,
                needed=f"a backend that can carry the attribute {ATTRIBUTE}",
                found=f"{type(item).__name__}, which takes no attributes" + ("" if none else f" ({said(cause)})"),
                fix=f"Add {ATTRIBUTE!r} to its __slots__",
            ) from cause


def read_stamp(built: object) -> Stamp:
    """The stamp of an object.

    Raises:
        Unstamped: it carries none; it was not built by Backstamp, or was swapped in after start.
    """
    stamp = _carried(built)
    if stamp is None:
        raise Unstamped(
            _name(built),
            needed="a stamp",
            found="an object without one: it was not built through backstamp.construction, or was swapped in later",
            fix="Build it from a plan, or stamp it with copy_stamp if it wraps a stamped object",
        )
    return stamp


def copy_stamp(wrapper: object, wrapped: object) -> None:
    """Give a wrapper the stamp of what it wraps.

    Raises:
        Unstamped: the wrapped object carries none. BuiltMismatch: the wrapper carries another.
    """
    put_stamp(wrapper, read_stamp(wrapped))


def is_container(built: object) -> bool:
    """Whether an object holds per-step backends.

    Raises:
        BuiltMismatch: its attributes cannot be read.
    """
    try:
        return hasattr(built, "attn_backends")
    except Exception as cause:  # a class may answer for its attributes with code of its own
        raise BuiltMismatch(
            _name(built),
            needed="an object whose attributes can be read",
            found=f"one that raised {said(cause)}",
            fix="Raise AttributeError for an attribute that is not there",
        ) from cause


def steps_of(container: object) -> tuple[object, ...]:
    """The per-step backends of a container.

    Raises:
        ContainerWithoutChildren: it does not expose `attn_backends`, or as no list of at least one.
    """
    if not is_container(container):
        found = "none"
    else:
        steps: object = container.attn_backends  # type: ignore[attr-defined]
        # torch's ModuleList is a list too, and no Sequence
        listed = all(hasattr(type(steps), name) for name in ("__len__", "__getitem__", "__iter__"))
        listed = listed and not isinstance(steps, str | bytes | Mapping)
        if listed:
            children = tuple(cast("Sequence[object]", steps))
            if children:
                return children
        found = f"{'an empty ' if listed else ''}{type(steps).__name__}"
    raise ContainerWithoutChildren(
        _name(container),
        needed="a container that exposes its steps as attn_backends, a list of at least one",
        found=found,
        fix="Expose the list of per-step backends, in step order",
    )


def parts_of(built: object) -> tuple[object, ...]:
    """An object with its steps, where it is a container, and theirs: each once, the object first.

    Raises:
        ContainerWithoutChildren: as `steps_of`, of any of them.
    """
    parts: dict[int, object] = {}
    waiting = [built]
    while waiting:
        item = waiting.pop(0)
        # a container may hold itself
        if id(item) not in parts:
            parts[id(item)] = item
            waiting += steps_of(item) if is_container(item) else ()
    return tuple(parts.values())


def said(cause: BaseException) -> str:
    """An exception as one line; one whose own text raises is named by its type."""
    try:
        return plain(f"{type(cause).__name__}: {cause}")
    except Exception:
        return plain(type(cause).__name__)


def verify_consumed(backends: RunnerBackends) -> None:
    """Hold every built object of both slots, and every step however deep, against the plan it was built from.

    Raises:
        Unstamped: an object or a step carries no stamp. BuiltMismatch: a stamp names another kernel than the plan, or
        a planned group of layers has no object; the phase and component are named.
    """
    _verify_slot(backends, "attention", backends.plan.running, backends.objects)
    if backends.plan.linear is not None:
        rows = [row for row in backends.plan.linear.rows if row.kernel is not None]
        _verify_slot(backends, "linear", rows, backends.linear_objects)


def _verify_slot(
    backends: RunnerBackends, slot: Slot, rows: Sequence[PhasePlan], objects: Mapping[tuple[Phase, int], object]
) -> None:
    role = backends.plan.role
    for phase_plan in rows:
        for at, group in enumerate(phase_plan.groups):
            built = objects.get((phase_plan.phase, at))
            of_slot = "linear " if slot == "linear" else ""
            who = f"{role} {of_slot}{phase_plan.phase}, component {group.component}"
            if built is None:
                raise BuiltMismatch(who, needed=f"an object that runs {group.kernel}", found="none was built")
            for item in parts_of(built):
                stamp = read_stamp(item)
                have = (stamp.kernel, stamp.slot, stamp.role, stamp.plugin, stamp.library)
                wanted = (group.kernel, slot, role, group.plugin, group.library)
                if have != wanted or phase_plan.phase not in stamp.phases:
                    found = _purpose(stamp)
                    needed = f"{_words(group.kernel, slot, role, group.plugin)} for {phase_plan.phase}"
                    raise BuiltMismatch(who, needed=needed, found=found)


def _words(kernel: str, slot: Slot, role: Role, plugin: PluginRef) -> str:
    of_slot = ", linear" if slot == "linear" else ""
    return f"{kernel} of {plugin.distribution} {plugin.version} ({role}{of_slot})"


def _purpose(stamp: Stamp) -> str:
    return f"{_words(stamp.kernel, stamp.slot, stamp.role, stamp.plugin)} for {', '.join(stamp.phases)}"


def _name(built: object) -> str:
    return f"{type(built).__module__}.{type(built).__name__}"


def _carried(built: object) -> Stamp | None:
    """The stamp an object carries; None where there is none to read."""
    # instance state only: a stamp on a class would answer for objects that were never built
    try:
        state: object = getattr(built, "__dict__", None)
        stamp: object = state.get(ATTRIBUTE) if isinstance(state, Mapping) else None
        if stamp is None and ATTRIBUTE in _slots(built):
            stamp = getattr(built, ATTRIBUTE, None)
    except Exception:  # code of the object's own; what cannot be read is not there
        return None
    return stamp if isinstance(stamp, Stamp) else None


def _slots(built: object) -> frozenset[str]:
    return frozenset(name for kind in type(built).__mro__ for name in kind.__dict__.get("__slots__", ()))
