"""Second step: server arguments and a model's config → what the resolver reads: launch, engine and model facts.

In: SGLang's resolved arguments, its `ModelConfig` and the names asked for. Out: the resolver's arguments, or an error
for what this adapter does not hand to a kernel yet. It reads configs only: no weights, no device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import sglang
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
from sglang.srt.runtime_context import get_platform

from backstamp.declarations import Family, Role
from backstamp.engine import EngineFacts
from backstamp.errors import Refused
from backstamp.launch import Launch, Requests, make_launch
from backstamp.model import LINEAR_FAMILIES, ModelFacts, group_layers, model_from_config
from backstamp.row_checks import DTYPE_NAMES
from backstamp_sglang.names import asked_by, is_ours, is_ours_linear, linear_key

if TYPE_CHECKING:
    from sglang.srt.arg_groups.overrides import ResolvedView
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

__all__ = ["Question", "is_asked", "linear_names", "names_in", "question_of"]

#: Attention whose layers SGLang calls with other tensors than queries, keys and values.
_ELSEWHERE: Final[frozenset[Family]] = frozenset({"mla", "sparse_mla", "csa"})
#: Algorithms whose draft is a model run in a loop, and verified as rows of a tree.
_DRAFTED: Final = ("EAGLE", "EAGLE3", "STANDALONE")


class Question(NamedTuple):
    """What the resolver is asked for one model of one launch."""

    launch: Launch
    engine: EngineFacts
    model: ModelFacts


def names_in(view: ResolvedView) -> tuple[str, ...]:
    """The names of ours that a launch asks for, of the pair and of the draft."""
    asked = (*attention_backends_of(view), view.speculative_draft_attention_backend)
    return tuple(dict.fromkeys(name for name in asked if is_ours(name)))


def linear_names(view: ResolvedView) -> tuple[str, ...]:
    """The names of the linear slot's prefill and decode, where one of them is ours; none else."""
    base = view.linear_attn_backend
    pair = (view.linear_attn_prefill_backend or base, view.linear_attn_decode_backend or base)
    return pair if any(map(is_ours_linear, pair)) else ()


def is_asked(view: ResolvedView, role: Role) -> bool:
    """Whether a runner of this role is to run a name of ours: a draft runs its own, or else the pair."""
    return any(is_ours(name) for name in _names(view, role)) or (role == "target" and bool(linear_names(view)))


def question_of(server_args: ServerArgs, config: ModelConfig, role: Role = "target") -> Question:
    """What to resolve for a model of these arguments.

    Raises:
        BadModel: the model's config cannot be read. Refused: the launch needs what this adapter does not hand over.
    """
    view = resolved_view(server_args)
    model = _model(config, keep_linear=role == "target" and bool(linear_names(view)))
    _check_reach(view, config, model, role)
    return Question(_launch(view, role), _engine(view), model)


def _names(view: ResolvedView, role: Role) -> tuple[str | None, ...]:
    draft = view.speculative_draft_attention_backend
    return (draft,) if role == "draft" and draft is not None else attention_backends_of(view)


def _launch(view: ResolvedView, role: Role) -> Launch:
    prefill, decode = (asked_by(name).key if is_ours(name) else None for name in attention_backends_of(view))
    draft, same = view.speculative_draft_attention_backend, prefill == decode
    linear = [linear_key(name) for name in linear_names(view)] if role == "target" else []
    asked = Requests(
        attention_backend=prefill if same else None,
        prefill_attention_backend=None if same else prefill,
        decode_attention_backend=None if same else decode,
        draft_attention_backend=asked_by(draft).key if is_ours(draft) else None,
        linear_attn_prefill_backend=linear[0] if linear else None,
        linear_attn_decode_backend=linear[1] if linear else None,
        page_size=view.page_size,
        chunked_prefill_size=view.chunked_prefill_size,
        tp_size=view.tp_size // view.attn_dp_size,
        deterministic=view.enable_deterministic_inference or None,
        speculative_algorithm=view.speculative_algorithm,
        # prefill is SGLang's default, which nobody need have asked for
        speculative_attention_mode="decode" if view.speculative_attention_mode == "decode" else None,
        speculative_num_steps=view.speculative_num_steps,
        speculative_topk=view.speculative_eagle_topk,
    )
    return make_launch(asked, role=role)


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
    layers = tuple(tuple(mixer for mixer in mixers if mixer.family not in left) for mixers in facts.layers)
    return replace(facts, layers=layers, groups=group_layers(layers), unread=())


def _check_reach(view: ResolvedView, config: ModelConfig, model: ModelFacts, role: Role) -> None:
    """Refuse what a plan would promise and this adapter does not carry to the kernel."""
    foreign = [name for name in _names(view, role) if not is_ours(name)]
    algorithm = view.speculative_algorithm
    windowed = view.speculative_draft_window_size is not None or view.speculative_draft_sink_size is not None
    draft_dtype = view.speculative_draft_kv_cache_dtype
    families = sorted({group.facts.family for group in model.groups})
    linear = linear_names(view) if role == "target" else ()
    recurrent = set(families) & LINEAR_FAMILIES
    verify = view.linear_attn_verify_backend
    tracked = view.mamba_radix_cache_strategy
    # SGLang asserts its own names there, when weights are loaded
    barred = get_platform().is_blackwell and hybrid_gdn_config(config) is not None
    mixed = {group.facts.attn_type for group in model.groups} - {"decoder"}
    for needed, found, wrong in (
        ("both halves from Backstamp", f"{', '.join(map(str, foreign))} beside it", bool(foreign)),
        ("attention layers", "a model without any", not families),
        ("layers of keys and values", f"layers of family {', '.join(families)}", bool(_ELSEWHERE & set(families))),
        ("a GPU before Blackwell", "a Blackwell one, where SGLang takes no other attention beside these", barred),
        ("both linear halves from Backstamp", f"{', '.join(linear)}", not all(map(is_ours_linear, linear))),
        ("gated delta nets", f"recurrent layers {sorted(recurrent)}", bool(linear) and recurrent != {"gdn"}),
        ("a launch without speculation beside linear kernels", algorithm, bool(linear) and algorithm is not None),
        ("SGLang's own linear verify", verify, is_ours_linear(verify)),
        ("final states alone", f"--mamba-radix-cache-strategy {tracked}", bool(linear) and tracked == "extra_buffer"),
        ("decoder layers", "encoder or cross-attention layers", bool(mixed) or config.is_encoder_decoder),
        (f"a draft of {', '.join(_DRAFTED)}", algorithm, algorithm is not None and algorithm not in _DRAFTED),
        ("one draft model, run in a loop", "multi-layer EAGLE", view.enable_multi_layer_eagle),
        ("one number of draft steps", "adaptive speculation", view.speculative_adaptive),
        ("a draft that sees all its tokens", "a draft window", windowed),
        ("one dtype for both caches", f"--speculative-draft-kv-cache-dtype {draft_dtype}", draft_dtype is not None),
        ("a cache in the model's own dtype", f"--kv-cache-dtype {view.kv_cache_dtype}", view.kv_cache_dtype != "auto"),
        ("one rank a sequence", "decode context parallelism", view.dcp_size > 1),
        ("one rank a prompt", "context parallelism", view.attn_cp_size > 1),
        ("one stream of steps", "two-batch overlap", view.enable_two_batch_overlap),
        ("one stream of steps", "prefill and decode multiplexed", view.enable_pdmux),
        ("a cache of one model", "unified memory", view.enable_unified_memory),
        ("a cache of plain rows", "page-major layout", view.enable_page_major_kv_layout),
        ("causal attention", "a diffusion language model", view.dllm_algorithm is not None),
        ("one item a request", "multi-item scoring", view.enable_mis),
    ):
        if wrong:
            raise Refused("backstamp-sglang", needed=needed, found=str(found), fix="Ask for SGLang's own backends")
