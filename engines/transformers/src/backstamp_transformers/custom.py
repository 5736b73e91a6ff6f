"""A caller's own 4-D mask as rows and a tree: the call contract's way to say which of a step's tokens see each other.

In: `[B, 1, Q, S]`, bool or additive, over the keys a cache hands over. Out: a `Step`. The contract lets a kernel hide
this step's tokens from each other one by one, and of earlier keys only a row's first ones; a mask that says anything
else is refused, never rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backstamp_transformers.errors import NotServed
from backstamp_transformers.rows import Rows
from backstamp_transformers.served import Served
from backstamp_transformers.step import Rule, Step

__all__ = ["custom_step", "read_mask"]

_WHO = "attention_mask of four dimensions"
_ELSE = "Use sdpa or eager for this call"


class _Read(NamedTuple):
    """What was read of a mask in one forward, and the last layer that asked."""

    step: Step
    layer: int


def custom_step(served: Served, mask: Tensor, rows: int, q_len: int, num_keys: int, layer: int) -> Step:
    """The step of a forward under a caller's mask: read at the forward's first layer, kept for those that follow.

    Raises:
        NotServed: a mask that is not the contract's to say, or a layer that has a rule beside it.
    """
    known: _Read | None = served.masks.get(mask)
    # layers come in order: whoever asks again begins another forward, and the caller may have written to the mask
    if known is not None and known.layer < layer:
        step = known.step
    else:
        if served.linear_layers:
            raise NotServed(_WHO, needed="layers that attend", found="linear ones among them", fix=_ELSE)
        read, tree = read_mask(mask, rows, q_len, num_keys)
        step = Step(served, read, Rule(True, -1), mask.device, tree)
    served.masks[mask] = _Read(step, layer)
    window = served.spec(layer).window_left
    if window >= 0:
        found = f"layer {layer} with a window of {window + 1} tokens"
        raise NotServed(_WHO, needed="layers that see all the mask lets them", found=found, fix=_ELSE)
    return step


def read_mask(mask: Tensor, rows: int, q_len: int, num_keys: int) -> tuple[Rows, Tensor | None]:
    """The rows of a mask, and bool `[B, Q, Q]` who sees whom among its tokens; None where that is the causal rule.

    A token that sees nothing and is seen by none is padding: its answer means nothing.

    Raises:
        NotServed: another shape, numbers between seen and hidden, or hidden keys that no row and no tree can say.
    """
    shape = tuple(mask.shape)
    if shape not in ((rows, 1, q_len, num_keys), (1, 1, q_len, num_keys)):
        needed = f"[{rows}, 1, {q_len}, {num_keys}], one answer for all heads over the keys of the cache"
        raise NotServed(_WHO, needed=needed, found=str(list(shape)), fix=_ELSE)
    seen = _seen(mask)[:, 0].expand(rows, -1, -1)
    real, earlier = seen.any(2), num_keys - q_len
    before, bits = seen[..., :earlier], seen[..., earlier:]
    if bool((bits & ~real[:, None]).any()):
        needed = "tokens that see a key wherever another token sees them"
        raise NotServed(_WHO, needed=needed, found="one that sees nothing", fix=_ELSE)
    kept = before.any(1)
    counts = kept.sum(1)
    run = torch.arange(earlier, device=mask.device) >= (earlier - counts)[:, None]
    if not bool(((before == run[:, None]) | ~real[..., None]).all()):
        needed = "earlier keys that all tokens of a row see, but for the row's first ones"
        raise NotServed(_WHO, needed=needed, found="others hidden", fix=_ELSE)
    kept_lens = counts.tolist()
    found = Rows([q_len] * rows, [n + q_len for n in kept_lens], [earlier - n for n in kept_lens], None)
    ones = torch.ones(q_len, q_len, dtype=torch.bool, device=mask.device)
    if bool(((bits == ones.tril()) | ~real[..., None]).all()):
        return found, None
    return found, bits.contiguous()


def _seen(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise NotServed(_WHO, needed="bool, or numbers that are added to logits", found=str(mask.dtype), fix=_ELSE)
    hidden = mask <= torch.finfo(mask.dtype).min
    if not bool((hidden | (mask == 0)).all()):
        needed = "0 at keys that are seen, -inf or the least number at others"
        raise NotServed(_WHO, needed=needed, found="numbers between", fix=_ELSE)
    return ~hidden
