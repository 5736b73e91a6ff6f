"""The stamp: the record on a built object of what it really is, and the only way to put or read it.

In: an object a factory built and what construction checked about it. Out: the same object, stamped, with its steps.
A missing stamp is an error, never a default; an object that cannot carry one is refused.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from backstamp.declarations import Phase, Role, Slot
from backstamp.errors import BuiltMismatch, ContainerWithoutChildren, Unstamped
from backstamp.plan_rows import LibraryRef, PluginRef

if TYPE_CHECKING:
    from backstamp.construction import RunnerBackends

__all__ = ["Stamp", "copy_stamp", "is_container", "put_stamp", "read_stamp", "steps_of", "verify_consumed"]

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
    """Stamp an object and, where it is a container, each of its steps.

    Raises:
        BuiltMismatch: the object takes no attributes (`__slots__` without `backstamp_stamp`).
    """
    for item in (built, *(steps_of(built) if is_container(built) else ())):
        try:
            setattr(item, ATTRIBUTE, stamp)
        except AttributeError as cause:
            raise BuiltMismatch(
                f"{stamp.kernel} (plugin {stamp.plugin.name})",
                needed=f"a backend that can carry the attribute {ATTRIBUTE}",
                found=f"{type(item).__name__}, which takes no attributes",
                fix=f"Add {ATTRIBUTE!r} to its __slots__",
            ) from cause


def read_stamp(built: object) -> Stamp:
    """The stamp of an object.

    Raises:
        Unstamped: it carries none; it was not built by Backstamp, or was swapped in after start.
    """
    # instance state only: a stamp on a class would answer for objects that were never built
    state = getattr(built, "__dict__", {})
    stamp = state.get(ATTRIBUTE) or (getattr(built, ATTRIBUTE, None) if ATTRIBUTE in _slots(built) else None)
    if not isinstance(stamp, Stamp):
        raise Unstamped(
            f"{type(built).__module__}.{type(built).__name__}",
            needed="a stamp",
            found="an object without one: it was not built through backstamp.construction, or was swapped in later",
            fix="Build it from a plan, or stamp it with copy_stamp if it wraps a stamped object",
        )
    return stamp


def copy_stamp(wrapper: object, wrapped: object) -> None:
    """Give a wrapper the stamp of what it wraps.

    Raises:
        Unstamped: the wrapped object carries none.
    """
    put_stamp(wrapper, read_stamp(wrapped))


def is_container(built: object) -> bool:
    """Whether an object holds per-step backends."""
    return hasattr(built, "attn_backends")


def steps_of(container: object) -> Sequence[object]:
    """The per-step backends of a container.

    Raises:
        ContainerWithoutChildren: it does not expose `attn_backends`.
    """
    if not is_container(container):
        raise ContainerWithoutChildren(
            f"{type(container).__module__}.{type(container).__name__}",
            needed="a container that exposes its steps as attn_backends",
            found="none",
            fix="Expose the list of per-step backends, in step order",
        )
    steps: Sequence[object] = container.attn_backends  # type: ignore[attr-defined]
    return steps


def verify_consumed(backends: RunnerBackends) -> None:
    """Hold every built object, and every step, against the plan it was built from.

    Raises:
        Unstamped: an object or a step carries no stamp. BuiltMismatch: a stamp names another kernel than the plan, or
        a planned group of layers has no object; the phase and component are named.
    """
    for phase_plan in backends.plan.running:
        for at, group in enumerate(phase_plan.groups):
            built = backends.objects.get((phase_plan.phase, at))
            who = f"{backends.plan.role} {phase_plan.phase}, component {group.component}"
            if built is None:
                raise BuiltMismatch(who, needed=f"an object that runs {group.kernel}", found="none was built")
            for item in (built, *(steps_of(built) if is_container(built) else ())):
                stamp = read_stamp(item)
                have = (stamp.kernel, stamp.role, stamp.plugin, stamp.library)
                wanted = (group.kernel, backends.plan.role, group.plugin, group.library)
                if have != wanted or phase_plan.phase not in stamp.phases:
                    found = f"{_words(stamp.kernel, stamp.role, stamp.plugin)} for {', '.join(stamp.phases)}"
                    needed = f"{_words(group.kernel, backends.plan.role, group.plugin)} for {phase_plan.phase}"
                    raise BuiltMismatch(who, needed=needed, found=found)


def _words(kernel: str, role: Role, plugin: PluginRef) -> str:
    return f"{kernel} of {plugin.distribution} {plugin.version} ({role})"


def _slots(built: object) -> frozenset[str]:
    return frozenset(name for kind in type(built).__mro__ for name in kind.__dict__.get("__slots__", ()))
