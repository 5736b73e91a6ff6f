"""What was asked for, under the opaque name Transformers knows it by.

In: keys. Out: a name such as `backstamp_0`. Transformers reads names: one that contains `flash` is taken for its own
FlashAttention, and keys do contain it. So a name says nothing, and the request is kept here, in its caller's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

import torch

from backstamp.catalogue import Catalogue
from backstamp.launch import Launch, Requests, make_launch
from backstamp.policy import Policy
from backstamp_transformers.errors import NotServed, in_engine_idiom

__all__ = ["ARGUMENTS", "PREFIX", "Asked", "asked_as", "forget", "is_asked", "make_asked", "name_for"]

PREFIX = "backstamp_"
_numbers = count()
_asked: dict[str, Asked] = {}

#: What a caller of `use` and `implementation` types.
ARGUMENTS: Final[Mapping[str, str]] = {
    name: f"argument {name}" for name in ("backend", "prefill", "decode", "linear", "device")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request: the keys of both halves and of the linear slot (None: `auto`), a policy, a catalogue, a device.

    `catalogue` None is what is installed; `device` is where the model is expected to run, a torch device. `words` are
    what the caller typed, by the flag that core names in its place.
    """

    prefill: str | None = None
    decode: str | None = None
    linear: str | None = None
    policy: Policy | None = None
    catalogue: Catalogue | None = None
    device: str | None = None
    words: Mapping[str, str] = field(default_factory=dict)

    def launch(self) -> Launch:
        """The request in core's terms, each key under the caller's own word for it."""
        requests = Requests(
            prefill_attention_backend=self.prefill,
            decode_attention_backend=self.decode,
            linear_attn_backend=self.linear,
        )
        launch = make_launch(requests, policy=self.policy)
        keys = {
            name: replace(request, setting=self.words.get(request.setting, request.setting))
            for name, request in launch.keys.items()
        }
        return replace(launch, keys=keys)


def make_asked(
    typed: Mapping[str, str],
    *,
    backend: str | None,
    prefill: str | None,
    decode: str | None,
    linear: str | None,
    policy: Policy | None = None,
    catalogue: Catalogue | None = None,
    device: str | None = None,
) -> Asked:
    """A request, looked at as far as it can be without a model; `typed` is the caller's word for each argument.

    Raises:
        BackstampError: a key that is no word, another policy than one, a device that torch does not know.
    """
    words = {
        "--attention-backend": typed["backend"],
        "--prefill-attention-backend": typed["backend" if prefill is None else "prefill"],
        "--decode-attention-backend": typed["backend" if decode is None else "decode"],
        "--linear-attn-backend": typed["linear"],
    }
    if typed is ARGUMENTS:
        words |= {"the flag": "the argument", "these flags": "these arguments"}
    asked = Asked(
        prefill=backend if prefill is None else prefill,
        decode=backend if decode is None else decode,
        linear=linear,
        policy=policy,
        catalogue=catalogue,
        device=device,
        words=words,
    )
    with in_engine_idiom(words):
        asked.launch()
    _check_device(typed["device"], device)
    return asked


def _check_device(word: str, device: str | None) -> None:
    if device is None:
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise NotServed(word, needed="a torch device, as cpu or cuda:0", found=repr(device)) from cause


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
