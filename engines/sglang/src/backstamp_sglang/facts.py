"""Second step: server arguments and a model's config → what the resolver reads: launch, engine and model facts.

In: SGLang's resolved arguments and its `ModelConfig`. Out: the resolver's arguments, or the error of `reach`. It reads
configs only: no weights, no device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import sglang
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

from backstamp.declarations import Role
from backstamp.engine import EngineFacts
from backstamp.launch import Launch, Requests, make_launch
from backstamp.model import LINEAR_FAMILIES, ModelFacts, group_layers, model_from_config
from backstamp.row_checks import DTYPE_NAMES
from backstamp_sglang.asked import linear_names, topk_of
from backstamp_sglang.names import is_ours, key_of
from backstamp_sglang.reach import check_reach

if TYPE_CHECKING:
    from sglang.srt.arg_groups.overrides import ResolvedView
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

__all__ = ["Question", "question_of"]

#: What SGLang stores sinks in, whatever the checkpoint's dtype. Source: `sinks_dtype` in its models, 0.5.23.
_SINKS: Final = "bf16"


class Question(NamedTuple):
    """What the resolver is asked for one model of one launch."""

    launch: Launch
    engine: EngineFacts
    model: ModelFacts


def question_of(server_args: ServerArgs, config: ModelConfig, role: Role = "target") -> Question:
    """What to resolve for a model of these arguments.

    Raises:
        BadModel: the model's config cannot be read. Refused: the launch needs what this adapter does not hand over.
    """
    view = resolved_view(server_args)
    model = _model(config, keep_linear=bool(linear_names(view)))
    check_reach(view, config, model, role)
    return Question(_launch(view, role, topk_of(server_args)), _engine(view), model)


def _launch(view: ResolvedView, role: Role, topk: int | None) -> Launch:
    prefill, decode = (key_of(name) if is_ours(name) else None for name in attention_backends_of(view))
    draft, same = view.speculative_draft_attention_backend, prefill == decode
    linear_prefill, linear_decode = [key_of(name) for name in linear_names(view)] or (None, None)
    whole = linear_prefill == linear_decode
    asked = Requests(
        attention_backend=prefill if same else None,
        prefill_attention_backend=None if same else prefill,
        decode_attention_backend=None if same else decode,
        draft_attention_backend=key_of(draft) if is_ours(draft) else None,
        linear_attn_backend=linear_prefill if whole else None,
        linear_attn_prefill_backend=None if whole else linear_prefill,
        linear_attn_decode_backend=None if whole else linear_decode,
        page_size=view.page_size or _page_size(view, topk),
        chunked_prefill_size=view.chunked_prefill_size,
        tp_size=view.tp_size // view.attn_dp_size,
        deterministic=view.enable_deterministic_inference or None,
        speculative_algorithm=view.speculative_algorithm,
        # prefill is SGLang's default, which nobody need have asked for
        speculative_attention_mode="decode" if view.speculative_attention_mode == "decode" else None,
        speculative_num_steps=view.speculative_num_steps,
        speculative_topk=topk,
    )
    return make_launch(asked, role=role)


def _page_size(view: ResolvedView, topk: int | None) -> int | None:
    """One token a page where SGLang takes no more, and its own default would have been that; else the kernel's."""
    side_by_side = topk is not None and topk > 1
    final_states = view.uses_mamba_radix_cache and view.mamba_radix_cache_strategy == "no_buffer"
    return 1 if side_by_side or final_states else None


def _engine(view: ResolvedView) -> EngineFacts:
    chunked = view.chunked_prefill_size is not None and view.chunked_prefill_size > 0
    return EngineFacts(
        name=f"sglang {sglang.__version__}",
        kv_forms=frozenset({"paged"}),
        inputs=frozenset({"host_lens"}),
        # no step of ours is captured: graphs are switched off with the request
        graph="never",
        prefix_cache=chunked or not view.disable_radix_cache,
        components=frozenset({"main"}),
    )


def _model(config: ModelConfig, keep_linear: bool) -> ModelFacts:
    """The facts of the main model; towers, and recurrences nobody asked about, stay with SGLang's own kernels."""
    dtype = DTYPE_NAMES.get(str(config.dtype), str(config.dtype))
    facts = model_from_config(config.hf_config.to_dict(), f"model config {config.model_path}", dtype)
    left = frozenset() if keep_linear else LINEAR_FAMILIES
    kept = [[mixer for mixer in mixers if mixer.family not in left] for mixers in facts.layers]
    layers = tuple(tuple(replace(mixer, sinks=mixer.sinks and _SINKS) for mixer in mixers) for mixers in kept)
    return replace(facts, layers=layers, groups=group_layers(layers), unread=())
