"""Models that SGLang starts beside attention backends of a list of its own alone.

In: SGLang's step that adjusts its arguments to a model, when one of our names is asked for. Out: what the step does
where its Triton backend is asked for, and our names again after it. It touches no other model's step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sglang.srt.arg_groups.overrides import (
    attention_backends_of,
    declare_resolution,
    model_config_of,
    resolved_view,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["adjust"]

#: SGLang asserts its own names for these, because others of its own drop sinks; our resolver refuses kernels without.
_LISTED: Final = ("GptOssForCausalLM",)
_SOURCE: Final = "backstamp_sglang"


def adjust(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Run SGLang's step."""
    if model_config_of(server_args).hf_config.architectures[0] not in _LISTED:
        previous(server_args)
        return
    prefill, decode = attention_backends_of(resolved_view(server_args))
    declare_resolution(server_args, _SOURCE, prefill_attention_backend="triton", decode_attention_backend="triton")
    previous(server_args)
    declare_resolution(server_args, _SOURCE, prefill_attention_backend=prefill, decode_attention_backend=decode)
