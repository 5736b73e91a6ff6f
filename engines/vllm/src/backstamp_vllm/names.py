"""First step: every key of the catalogue becomes a name of vLLM's two registries of backends, in every process of vLLM:
`--attention-backend`, and `mla_prefill_backend` of `--attention-config`.

In: vLLM's call of its `vllm.general_plugins` entry point, or the arrival of a config that asks for one of our names in
another process. Out: names in those registries, and a listener (`unread`). It resolves nothing, imports no kernel, and
overrides a backend of vLLM's own only where the operator asked for Backstamp and the platform cannot answer otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Final, NamedTuple

from vllm.logger import init_logger
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.discovery import discover
from backstamp.first_party import FIRST_PARTY
from backstamp_vllm.unread import tell_of_unread

__all__ = [
    "LOG",
    "Asked",
    "asked_by",
    "asked_of_prefill",
    "catalogue_here",
    "is_ours",
    "offer_names",
    "was_asked",
    "was_asked_of_prefill",
]

#: A name under `vllm`, because vLLM shows the records of its own loggers only.
LOG: Final = init_logger("vllm.backstamp")
#: The name whose keys come from `--additional-config`: vLLM keeps it free for plugins.
CUSTOM: Final = "CUSTOM"
_PREFIX: Final = "BACKSTAMP_"


class Asked(NamedTuple):
    """What one of our names stands for: a key of the catalogue (None: what `--additional-config` says) and the
    distributions that have it in the process that named it."""

    key: str | None
    owner: str


def offer_names() -> None:
    """Give every key a name, once a process; a name vLLM has itself gets a prefix."""
    tell_of_unread()
    if _asked or _is_cut_off():
        return
    catalogue = catalogue_here()
    # a key whose plugin failed or is not installed has a name too: whoever asks for it is told why
    failed = [name for failure in catalogue.failures for name in failure.names]
    keys: dict[str, set[str]] = {}
    for key in (*catalogue.keys("attention"), *failed, *FIRST_PARTY):
        # `distribution:key` is no name of a backend: --additional-config takes it
        if ":" not in key:
            keys.setdefault(re.sub(r"\W", "_", key).upper(), set()).add(key)
    for name, alike in sorted(keys.items()):
        if len(alike) == 1:
            (key,) = alike
            owner = catalogue.owner(key, "attention")
            asked = Asked(key, owner.distribution if owner else "")
            _offer(_free(name, AttentionBackendEnum.__members__), asked)
            _offer_prefill(_free(name, MLAPrefillBackendEnum.__members__), asked)
    if AttentionBackendEnum.CUSTOM.is_overridden():
        LOG.info("Backstamp leaves CUSTOM to %s, which has it", AttentionBackendEnum.CUSTOM.get_path())
    else:
        _offer(CUSTOM, Asked(None, ""))


@cache
def catalogue_here() -> Catalogue:
    """What is installed, as this process first saw it."""
    return build_catalogue(discover())


def asked_by(name: str) -> Asked:
    """What one of our names stands for."""
    return _asked[name]


def is_ours(member: AttentionBackendEnum | None) -> bool:
    """Whether a backend somebody asked for is one of our names, and no other plugin has taken it since."""
    return member is not None and member.name in _asked and member.get_path() == _path(member.name)


def was_asked(name: str, asked: Asked) -> AttentionBackendEnum:
    """The member of a name the operator asked for in the process that sent this config.

    On vLLM's CPU platform every layer gets `CPU_ATTN` whatever was asked for, so there that member is overridden. A
    gated delta net is made before any layer that asks for a backend, so its layer is replaced here.
    """
    offer_names()
    if name not in _asked:
        # a key of the other process alone: which plugin is missing here is told with the plan
        _offer(name, asked)
    member = AttentionBackendEnum[name]
    _answer_for_cpu(member)
    _replace_linear_layer()
    return member


def asked_of_prefill(name: str) -> Asked:
    """What one of our names of MLA prefill stands for."""
    return _asked_of_prefill[name]


def was_asked_of_prefill(name: str, asked: Asked) -> MLAPrefillBackendEnum:
    """The same of a name of MLA prefill, for which vLLM's CPU platform takes the first of two members that runs."""
    offer_names()
    if name not in _asked_of_prefill:
        _offer_prefill(name, asked)
    member = MLAPrefillBackendEnum[name]
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for fixed in (MLAPrefillBackendEnum.ZEN_CPU, MLAPrefillBackendEnum.CPU):
            register_mla_prefill_backend(fixed, member.get_path())
    return member


_asked: dict[str, Asked] = {}
_asked_of_prefill: dict[str, Asked] = {}


def _free(name: str, taken: Mapping[str, object]) -> str:
    return f"{_PREFIX}{name}" if name in taken else name


def _offer(name: str, asked: Asked) -> None:
    _asked[name] = asked
    register_backend(AttentionBackendEnum.CUSTOM if name == CUSTOM else name, _path(name))
    # an enum member is pickled by its value, which a process that has not loaded this plugin yet cannot look up
    AttentionBackendEnum[name].__reduce_ex__ = partial(_reduce, name, asked)


def _path(name: str) -> str:
    return f"backstamp_vllm.offered.{name}"


def _offer_prefill(name: str, asked: Asked) -> None:
    _asked_of_prefill[name] = asked
    register_mla_prefill_backend(name, _prefill_path(name))
    MLAPrefillBackendEnum[name].__reduce_ex__ = partial(_reduce_prefill, name, asked)


def _prefill_path(name: str) -> str:
    return f"backstamp_vllm.offered_prefill.{name}"


def _is_cut_off() -> bool:
    """Whether a request could not reach the platform that answers: better no name than one that is not served."""
    from vllm import envs
    from vllm.platforms import current_platform

    cut_off = current_platform.is_cpu() and not envs.VLLM_ENABLE_V1_MULTIPROCESSING
    if cut_off:
        LOG.warning("Backstamp offers nothing here: on the CPU it needs VLLM_ENABLE_V1_MULTIPROCESSING=1")
    return cut_off


def _reduce(name: str, asked: Asked, protocol: int) -> tuple[object, ...]:
    member = AttentionBackendEnum[name]
    if is_ours(member):
        return was_asked, (name, asked)
    return _taken, (name,)


def _reduce_prefill(name: str, asked: Asked, protocol: int) -> tuple[object, ...]:
    member = MLAPrefillBackendEnum[name]
    if member.get_path() == _prefill_path(name):
        return was_asked_of_prefill, (name, asked)
    return _taken_of_prefill, (name,)


def _taken(name: str) -> AttentionBackendEnum:
    """The member of a name that another plugin took after us: it answers for it here too."""
    offer_names()
    return AttentionBackendEnum[name]


def _taken_of_prefill(name: str) -> MLAPrefillBackendEnum:
    offer_names()
    return MLAPrefillBackendEnum[name]


def _answer_for_cpu(member: AttentionBackendEnum) -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # what runs says so with its plan: this may be before the process has a log
        register_backend(AttentionBackendEnum.CPU_ATTN, member.get_path())


def _replace_linear_layer() -> None:
    import vllm

    from backstamp_vllm.facts import is_tested

    # another vLLM is refused at the door of the backend, before a module that reads more of it is imported
    if is_tested(vllm.__version__):
        from backstamp_vllm.linear import replace_layer

        replace_layer()
