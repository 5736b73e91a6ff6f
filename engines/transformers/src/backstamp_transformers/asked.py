"""What was asked for, under the opaque name Transformers knows it by.

In: keys. Out: a name such as `backstamp_0`. Transformers reads names: one that contains `flash` is taken for its own
FlashAttention, and keys do contain it. So a name says nothing, and the request is kept here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from backstamp.catalogue import Catalogue
from backstamp.launch import Launch, Requests, make_launch
from backstamp.policy import Policy
from backstamp_transformers.errors import NotServed

__all__ = ["PREFIX", "Asked", "asked_as", "forget", "is_asked", "name_for"]

PREFIX = "backstamp_"
_numbers = count()
_asked: dict[str, Asked] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request: the keys of both halves and of the linear slot (None: `auto`), a policy, a catalogue, a device.

    `catalogue` None is what is installed; `device` is where the model is expected to run, a torch device type.
    """

    prefill: str | None = None
    decode: str | None = None
    linear: str | None = None
    policy: Policy | None = None
    catalogue: Catalogue | None = None
    device: str | None = None

    def launch(self) -> Launch:
        """The request in core's terms."""
        requests = Requests(
            prefill_attention_backend=self.prefill,
            decode_attention_backend=self.decode,
            linear_attn_backend=self.linear,
        )
        return make_launch(requests, policy=self.policy)


def name_for(asked: Asked) -> str:
    """A name nobody has yet."""
    name = f"{PREFIX}{next(_numbers)}"
    _asked[name] = asked
    return name


def asked_as(name: str) -> Asked:
    """What was asked under a name.

    Raises:
        NotServed: nobody asked, or the request was released.
    """
    if name in _asked:
        return _asked[name]
    raise NotServed(
        f"attn_implementation={name!r}",
        needed="a name that backstamp_transformers.implementation() answered in this process",
        found="one that is not in use",
        fix="Call backstamp_transformers.implementation(...) and pass what it answers",
    )


def is_asked(name: str, asked: Asked) -> bool:
    """Whether a name stands for this request, and none that was let go."""
    return _asked.get(name) is asked


def forget(name: str) -> None:
    """Let a name go."""
    _asked.pop(name, None)
