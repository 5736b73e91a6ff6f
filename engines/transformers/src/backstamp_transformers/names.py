"""Where Transformers' registries meet ours: a name becomes an attention function, a mask function and an admission.

In: what was asked. Out: a name in `AttentionInterface` and in `AttentionMaskInterface`, both or none: with the first
alone, Transformers drops padding in silence. A model is admitted, its request resolved, where Transformers checks its
implementation, and its modules are looked at where Transformers ends their making: both before it loads weights.
Nothing is patched before a name is asked for, and what is patched does what it did for every other name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from backstamp_transformers.admission import admit, is_admitted, is_tower, leave, mark_towers, served_for, server_of
from backstamp_transformers.asked import PREFIX, Asked, asked_as, forget, name_for
from backstamp_transformers.attend import attention_forward
from backstamp_transformers.continuous import open_continuous_batching
from backstamp_transformers.linear import attach, linear_modules
from backstamp_transformers.masks import mask_for
from backstamp_transformers.served import Served

__all__ = ["check_modules", "register", "release"]

_checked_by_transformers: Final = PreTrainedModel.get_correct_attn_implementation
_initialised_by_transformers: Final = PreTrainedModel.post_init


def register(asked: Asked) -> str:
    """A new name for a request, known to Transformers."""
    name = name_for(asked)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, _mask)
    PreTrainedModel.get_correct_attn_implementation = _check_and_admit
    PreTrainedModel.post_init = _initialise_and_check
    open_continuous_batching()
    return name


def release(name: str) -> None:
    """Take a name back; Transformers' own interface only adds."""
    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)
    forget(name)


def _check_and_admit(self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False) -> str:
    """Transformers' own check of a model's implementation, with ours before it where the name is ours."""
    name = requested_attention
    if name is None or not name.startswith(PREFIX):
        answer = _checked_by_transformers(self, requested_attention, is_init_check)
        leave(self.config)
        return answer
    mark_towers(self.config)
    if is_tower(self.config):
        # the name came down from the whole model: this part gets what Transformers would give it
        return _checked_by_transformers(self, None, is_init_check)
    if not is_admitted(self.config, name):
        device = torch.device(asked_as(name).device or ("cuda" if torch.cuda.is_available() else "cpu"))
        admit(self, name, _dtype_of(self.config), device)
    return _checked_by_transformers(self, requested_attention, is_init_check)


def _initialise_and_check(self: PreTrainedModel) -> None:
    """Transformers' own last step of making a model, and a look at what was made where it is ours to serve."""
    _initialised_by_transformers(self)
    config: PretrainedConfig = self.config
    served = server_of(config)
    # a composite model's own config has no layers
    if served is not None and served.model() is self and config.get_text_config() is config:
        check_modules(served)


def check_modules(served: Served) -> None:
    """Look at a model's modules before any weight is in them.

    Raises:
        NotServed: modules that are not those the config describes.
    """
    served.read_layers()
    linear_modules(served)


def _mask(
    *,
    batch_size: int,
    q_length: int,
    mask_function: Callable[..., object],
    config: PretrainedConfig,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device,
    **unread: object,
) -> Tensor:
    """The mask function of every name, as `AttentionMaskInterface` calls it."""
    served = served_for(config)
    # the first thing of ours a forward meets, before any layer
    attach(served)
    return mask_for(
        served, batch_size, q_length, q_offset, kv_offset, mask_function, attention_mask, local_size, device
    )


def _dtype_of(config: PretrainedConfig) -> torch.dtype:
    """What a model of this config is loaded in; a loader sets torch's default while it builds one."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.get_default_dtype()
