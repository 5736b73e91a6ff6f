"""Transformers' mask function: called once a forward for each kind of layer, it is where a step begins.

In: how long the batch is, its 2-D padding mask and the function that says who sees whom. Out: an empty tensor that
stands for a `Step`, because models hand masks on to layers and nothing else. A mask that is neither causal, sliding nor
bidirectional is refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from backstamp_transformers.errors import NotServed
from backstamp_transformers.rows import read_rows
from backstamp_transformers.served import Served
from backstamp_transformers.step import Rule, Step

__all__ = ["mask_for", "step_of"]

_steps: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mask_for(
    served: Served,
    batch_size: int,
    q_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    mask_function: Callable[..., object],
    attention_mask: Tensor | None,
    local_size: int | None,
    device: torch.device,
) -> Tensor:
    """The mask of one forward: it names a step, and holds no element anyone could read.

    Raises:
        NotServed: a mask no kernel is told of.
    """
    rule = _rule_of(mask_function, local_size)
    rows = read_rows(batch_size, q_length, int(q_offset), int(kv_offset), attention_mask)
    mask = torch.empty((0, 0, 0, 0), dtype=torch.bool, device=device)
    _steps[mask] = Step(served, rows, rule, device)
    return mask


def step_of(mask: Tensor) -> Step | None:
    """The step a mask stands for; None where it is none of this module's, or was changed on the way."""
    return _steps.get(mask)


def _rule_of(mask_function: Callable[..., object], window: int | None) -> Rule:
    if mask_function is causal_mask_function:
        return Rule(True, -1)
    if mask_function is bidirectional_mask_function:
        return Rule(False, -1)
    if window is not None and _alike(mask_function, sliding_window_causal_mask_function(window)):
        # Transformers' window counts the token itself
        return Rule(True, window - 1)
    name = mask_function.__qualname__ if isinstance(mask_function, FunctionType) else repr(mask_function)
    raise NotServed(
        "attention mask",
        needed="a causal, sliding or bidirectional one, with or without padding",
        found=f"another rule ({name})",
        fix="Use sdpa or eager for this model or call",
    )


def _alike(one: object, other: object) -> bool:
    """Whether two functions are one code over equal captured values: Transformers makes its rules of closures."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        mine, theirs = one.__closure__ or (), other.__closure__ or ()
        same = one.__code__ is other.__code__ and len(mine) == len(theirs)
        return same and all(_alike(a.cell_contents, b.cell_contents) for a, b in zip(mine, theirs, strict=True))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and one == other
