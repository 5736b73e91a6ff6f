"""Where Transformers' registries meet ours: a name becomes an attention function, a mask function and an admission.

In: a name and what was asked under it. Out: entries in `AttentionInterface` and `AttentionMaskInterface`, both or none:
with the first alone, Transformers drops padding in silence. A model is admitted, its request resolved, where
Transformers checks its implementation, which is before it loads weights. Nothing is patched before a name is asked for.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from backstamp_transformers.asked import PREFIX, Asked, asked_as, forget, name_for
from backstamp_transformers.attend import attention_forward
from backstamp_transformers.errors import NotServed
from backstamp_transformers.masks import mask_for
from backstamp_transformers.served import Served

__all__ = ["admit", "owner_of", "register", "release", "served_for"]

#: What runs each config's model. A value holds its config and its model weakly, so that nothing here keeps them alive.
_served: WeakIdKeyDictionary = WeakIdKeyDictionary()
_checked_by_transformers: Final = PreTrainedModel.get_correct_attn_implementation


def register(asked: Asked) -> str:
    """A new name for a request, known to Transformers."""
    name = name_for(asked)
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, partial(_mask, name))
    PreTrainedModel.get_correct_attn_implementation = _check_and_admit
    return name


def release(name: str) -> None:
    """Take a name back; Transformers' own interface only adds."""
    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)
    forget(name)


def owner_of(config: PretrainedConfig) -> nn.Module | None:
    """The model a config is served for; None where nobody serves it, or its model is gone."""
    served = _served.get(config)
    return served.model() if served is not None and served.in_force else None


def admit(model: PreTrainedModel, name: str, dtype: torch.dtype, device: torch.device) -> Served:
    """Resolve a model's request and remember who serves its config.

    Raises:
        BackstampError: nothing serves it as asked.
    """
    config = model.config
    served = Served.admit(model, config, asked_as(name), dtype, device)
    _served[config] = served
    return served


def served_for(config: PretrainedConfig, name: str) -> Served:
    """What serves the model of a config.

    Raises:
        NotServed: a config that no model was admitted with, or under another name.
    """
    served = _served.get(config)
    if served is not None and served.asked is asked_as(name):
        return served
    raise NotServed(
        f"Transformers model {config.model_type}, attn_implementation={name!r}",
        needed="a model that was loaded with it, or given to backstamp_transformers.use()",
        found="a config set by hand",
    )


def _check_and_admit(self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False) -> str:
    """Transformers' own check of a model's implementation, with ours before it where the name is ours."""
    if requested_attention is not None and requested_attention.startswith(PREFIX):
        known = _served.get(self.config)
        # a model's inner parts share its config: the outermost was admitted first
        if known is None or known.asked is not asked_as(requested_attention):
            asked = asked_as(requested_attention)
            device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
            admit(self, requested_attention, _dtype_of(self.config), device)
    return _checked_by_transformers(self, requested_attention, is_init_check)


def _mask(
    name: str,
    *,
    batch_size: int,
    q_length: int,
    mask_function: object,
    config: PretrainedConfig,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: torch.device,
    **unread: object,
) -> Tensor:
    """The mask function of one name, as `AttentionMaskInterface` calls it."""
    served = served_for(config, name)
    return mask_for(
        served, batch_size, q_length, q_offset, kv_offset, mask_function, attention_mask, local_size, device
    )


def _dtype_of(config: PretrainedConfig) -> torch.dtype:
    """What a model of this config is loaded in; a loader sets torch's default while it builds one."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.get_default_dtype()
