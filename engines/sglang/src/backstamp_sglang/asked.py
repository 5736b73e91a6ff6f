"""Which names of ours a launch asks for, for which of its runners, and beside how many drafts.

In: SGLang's resolved arguments. Out: names, or a number. It says nothing of what they stand for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view
from sglang.srt.arg_groups.speculative_hook import _auto_choose_speculative_params

from backstamp.declarations import Role
from backstamp_sglang.names import is_ours, is_ours_linear

if TYPE_CHECKING:
    from sglang.srt.arg_groups.overrides import ResolvedView
    from sglang.srt.server_args import ServerArgs

__all__ = ["is_asked", "linear_names", "names_in", "names_of", "topk_of"]


def names_in(view: ResolvedView) -> tuple[str, ...]:
    """The names of ours that a launch asks for, of the pair and of the draft."""
    asked = (*attention_backends_of(view), view.speculative_draft_attention_backend)
    return tuple(dict.fromkeys(name for name in asked if is_ours(name)))


def names_of(view: ResolvedView, role: Role) -> tuple[str | None, ...]:
    """What a runner of a role is to run: a draft its own name, or else the pair."""
    draft = view.speculative_draft_attention_backend
    return (draft,) if role == "draft" and draft is not None else attention_backends_of(view)


def linear_names(view: ResolvedView) -> tuple[str, ...]:
    """The names of the linear slot's prefill and decode, where any name of the slot is ours; none else."""
    base, verify = view.linear_attn_backend, view.linear_attn_verify_backend
    pair = (view.linear_attn_prefill_backend or base, view.linear_attn_decode_backend or base)
    return pair if any(map(is_ours_linear, (*pair, verify))) else ()


def is_asked(view: ResolvedView, role: Role) -> bool:
    """Whether a runner of this role is to run a name of ours."""
    return any(map(is_ours, names_of(view, role))) or bool(linear_names(view))


def topk_of(server_args: ServerArgs) -> int | None:
    """How many drafts lie side by side; None without speculation."""
    view = resolved_view(server_args)
    if view.speculative_algorithm is None or view.speculative_num_steps is not None:
        return view.speculative_eagle_topk
    # SGLang chooses for whoever did not, but after its attention backends are settled; private, and it has no other
    (architecture,) = model_config_of(server_args).hf_config.architectures
    _num_steps, topk, _num_tokens = _auto_choose_speculative_params(server_args, architecture)
    return int(topk)
