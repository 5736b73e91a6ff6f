"""Every refusal, in five parts: who, what was needed, what was found, what else was considered, what to do.

In: the parts, as the module that refuses knows them. Out: an exception whose message reads in that order and whose
`as_json()` carries the same parts for tools. One class per cause, each a subclass of the builtin a caller expects.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self

    from backstamp.plan_rows import Verdict

__all__ = [
    "AliasConflict",
    "AlreadyRegistered",
    "BackstampError",
    "BadHost",
    "BadInput",
    "BadLock",
    "BadModel",
    "BadPlan",
    "BuiltMismatch",
    "ConflictingRequest",
    "ContainerWithoutChildren",
    "DeclarationError",
    "Disagreement",
    "FactoryFailed",
    "FactoryImportFailed",
    "ForeignAlias",
    "NoDevice",
    "NoKernel",
    "NotAdopted",
    "NotInstalled",
    "PluginFailed",
    "RankMissing",
    "Refused",
    "StrictViolation",
    "UnknownKey",
    "Unresolved",
    "UnsafeRecord",
    "Unstamped",
    "UnsupportedBatch",
]


class BackstampError(Exception):
    """The parts of a refusal, kept as attributes; the message is made of them in order."""

    code: ClassVar[str] = "error"

    def __init__(
        self,
        who: str,
        *,
        needed: str,
        found: str,
        considered: str = "",
        fix: str = "",
        verdicts: Sequence[Verdict] = (),
    ) -> None:
        self.who = who
        self.needed = needed
        self.found = found
        self.considered = considered
        self.fix = fix
        self.verdicts = tuple(verdicts)
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """One line: who: needs X, got Y. Also considered: ... What to do."""
        parts = [f"{self.who}: needs {self.needed}, got {self.found}."]
        if self.considered:
            parts.append(f"Also considered: {self.considered}.")
        if self.fix:
            parts.append(self.fix if self.fix.endswith((".", "?")) else f"{self.fix}.")
        return " ".join(parts)

    def of(self, setting: str, beside: Sequence[str] = ()) -> Self:
        """The same refusal, with the flag that asked and more that was considered."""
        who = f"{self.who}, asked for with {setting}" if setting else self.who
        considered = "; ".join([*filter(None, [self.considered]), *beside])
        parts = {"needed": self.needed, "found": self.found, "considered": considered, "fix": self.fix}
        return type(self)(who, **parts, verdicts=self.verdicts)

    def as_json(self) -> dict[str, object]:
        """The error for tools: code, message, the five parts and the verdicts."""
        return {
            "error": {
                "code": self.code,
                "message": self.message,
                "who": self.who,
                "needed": self.needed,
                "found": self.found,
                "considered": self.considered,
                "fix": self.fix,
                "verdicts": [verdict.as_json() for verdict in self.verdicts],
            }
        }

    def __reduce__(self) -> tuple[object, ...]:
        # the default would call the class with the message alone, and a refusal must survive a process border
        state = (self.who, self.needed, self.found, self.considered, self.fix, self.verdicts)
        return (_rebuild, (type(self), *state))


def _rebuild(
    cause: type[BackstampError],
    who: str,
    needed: str,
    found: str,
    considered: str,
    fix: str,
    verdicts: Sequence[Verdict],
) -> BackstampError:
    return cause(who, needed=needed, found=found, considered=considered, fix=fix, verdicts=verdicts)


class UnknownKey(BackstampError, LookupError):
    """No distribution declares this key."""

    code = "unknown_key"


class NotInstalled(BackstampError, LookupError):
    """The key or kernel is known, but the distribution or library that has it is not installed."""

    code = "not_installed"


class Refused(BackstampError, ValueError):
    """A key that exists cannot serve what was asked on this host."""

    code = "refused"


class NoKernel(BackstampError, LookupError):
    """Nothing installed can serve a phase."""

    code = "no_kernel"


class ConflictingRequest(BackstampError, ValueError):
    """Two settings of one launch contradict each other, or one has no meaning without another."""

    code = "conflicting_request"


class StrictViolation(BackstampError, ValueError):
    """Strict mode met a choice that was lost, changed or failed."""

    code = "strict"


class PluginFailed(BackstampError, ImportError):
    """A plugin did not load; the first cause is chained."""

    code = "plugin_failed"


class AliasConflict(BackstampError, LookupError):
    """Two distributions claim one name; the name is poisoned, nothing else is."""

    code = "conflict"


class AlreadyRegistered(BackstampError, ValueError):
    """A second in-process plugin under a name that is taken.

    .. versionadded:: 0.2
    """

    code = "already_registered"


class ForeignAlias(Refused):
    """An alias that stands for another distribution's kernel, which only the operator may allow."""

    code = "foreign_alias"


class DeclarationError(BackstampError, ValueError):
    """A declaration is empty, malformed or contradicts itself."""

    code = "declaration"


class FactoryImportFailed(BackstampError, ImportError):
    """A factory path does not import; the cause is chained."""

    code = "factory_import"


class FactoryFailed(BackstampError, RuntimeError):
    """A factory raised when it was called; the cause is chained."""

    code = "factory"


class Unresolved(BackstampError, TypeError):
    """Something was to be built that no resolver decided."""

    code = "unresolved"


class NoDevice(BackstampError, RuntimeError):
    """A plan is to be built for a device that is not here."""

    code = "no_device"


class BuiltMismatch(BackstampError, TypeError):
    """A factory answered something other than what the plan and the declaration say."""

    code = "built_mismatch"


class ContainerWithoutChildren(BackstampError, TypeError):
    """A per-step draft container does not expose `attn_backends`."""

    code = "container_without_children"


class Unstamped(BackstampError, AttributeError):
    """An object that carries no stamp was asked what it is."""

    code = "unstamped"


class UnsupportedBatch(BackstampError, ValueError):
    """A batch asks a built kernel for what it does not declare; raised in `plan`, before any launch."""

    code = "unsupported_batch"


class BadInput(BackstampError, ValueError):
    """A flag, a file or a number cannot be read as what it must be."""

    code = "bad_input"


class BadModel(BadInput):
    """A model config cannot be read as one."""

    code = "bad_model"


class BadHost(BadInput):
    """A host name or host file cannot be read as one."""

    code = "bad_host"


class BadPlan(BadInput):
    """A record cannot be read as a plan, or its digest is not that of its content."""

    code = "bad_plan"


class BadLock(BadInput):
    """A record cannot be read as a lock, or a lock cannot be made of what was given."""

    code = "bad_lock"


class UnsafeRecord(BadInput):
    """A record that others may write; it is ignored, whatever it says."""

    code = "unsafe_record"


class Disagreement(BackstampError, ValueError):
    """The plans of one job's ranks, or of its instances, do not go together."""

    code = "disagreement"


class RankMissing(BackstampError, TimeoutError):
    """A rank did not show its plan in time."""

    code = "rank_missing"


class NotAdopted(BackstampError, ValueError):
    """A plan that was handed over cannot be built here, or not on this host."""

    code = "not_adopted"
