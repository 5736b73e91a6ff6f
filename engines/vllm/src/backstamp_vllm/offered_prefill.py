"""The door vLLM comes through for MLA prefill: each name is looked up here, as `backstamp_vllm.offered_prefill.NAME`.

In: a name. Out: its backend class. A vLLM this adapter was not run against is refused here, as in `offered`.
"""

from __future__ import annotations

import vllm

from backstamp_vllm.facts import check_vllm

__all__: list[str] = []


def __getattr__(name: str) -> type:
    """The backend of a name, as vLLM looks it up by path.

    Raises:
        NotInstalled: vLLM's version is outside the tested range.
    """
    if not name.isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_vllm(vllm.__version__)
    from backstamp_vllm.mla_prefill import class_of

    return class_of(name)
