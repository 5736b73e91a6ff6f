"""What `use` answers: the plan and the stamps of one model, and the way back.

In: a model on its kernels. Out: what runs, read from the built objects; `release` gives the model its former attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from backstamp.declarations import Phase
from backstamp.plan import Plan
from backstamp.stamp import Stamp, read_stamp
from backstamp_transformers.errors import NotServed
from backstamp_transformers.linear import detach
from backstamp_transformers.names import release
from backstamp_transformers.served import Served

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Self

__all__ = ["Handle"]


@dataclass(slots=True)
class Handle:
    """One model's kernels; a context manager that releases them at its end."""

    model: PreTrainedModel
    name: str
    served: Served
    former: str | None

    @property
    def plan(self) -> Plan:
        """The decision in force, or the last one that was."""
        return self.served.now.plan

    @property
    def stamps(self) -> dict[tuple[Phase, int], Stamp]:
        """The stamp of every built attention kernel, by phase and group of like layers; none after release."""
        backends = self.served.now.backends
        return {} if backends is None else {at: read_stamp(built) for at, built in backends.objects.items()}

    @property
    def linear_stamps(self) -> dict[tuple[Phase, int], Stamp]:
        """The stamp of every built linear kernel, by phase and group of like linear layers."""
        backends = self.served.now.backends
        return {} if backends is None else {at: read_stamp(built) for at, built in backends.linear_objects.items()}

    def release(self) -> None:
        """Give the model back what it had; a second call does nothing."""
        if self.former is not None:
            detach(self.served)
            self.model.set_attn_implementation(self.former)
            self.former, self.served.in_force, self.served.held = None, False, False
            release(self.name)
            self.served.let_go()

    def __enter__(self) -> Self:
        if self.former is None:
            raise NotServed(
                f"backstamp_transformers handle {self.name!r}",
                needed="a handle in force",
                found="one that was released",
                fix="Call backstamp_transformers.use() again",
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def __reduce__(self) -> NoReturn:
        # copies and pickles of a handle would release the model of another
        raise NotServed(
            f"backstamp_transformers handle {self.name!r}",
            needed="one handle, in the process that runs its model",
            found="a copy or a pickle of it",
            fix="Copy or pickle the model, and give that one to backstamp_transformers.use()",
        )
