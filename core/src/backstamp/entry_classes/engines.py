"""What is known of each engine: the hooks its loader asks for, whose drafts have which targets, where its models lie.

In: nothing. Out: frozen data, read from one named version of each engine; docs/parity.md lists every place. A name that
another version does not have is not used.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from backstamp.errors import BadInput

__all__ = ["ENGINES", "PLATFORMS", "Engine", "Gate", "platforms_of", "read_gates"]

#: Every platform a class may be looked at on.
PLATFORMS: Final = ("cuda", "rocm", "xpu", "npu", "cpu")


@dataclass(frozen=True, slots=True)
class Gate:
    """A decision that classes with gated layers must answer: `hook`, and the functions whose call makes a layer one."""

    hook: str
    markers: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine.

    Attributes:
        package: its import name. models: the folder of its model modules, below the package.
        registry: the module whose `ModelRegistry` lists its classes live. platforms: those it has models for.
        on_class: hooks asked of the class before it is built. on_model: asked of what was built.
        gates: see `Gate`. pairs: draft → the targets whose checkpoints it is loaded from, where names do not tell.
        any_target: drafts without a target of their own, with the reason.
    """

    package: str
    models: str
    registry: str
    platforms: tuple[str, ...] = PLATFORMS
    on_class: tuple[str, ...] = ()
    on_model: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    pairs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    any_target: Mapping[str, str] = field(default_factory=dict)

    @property
    def hooks(self) -> tuple[str, ...]:
        """Every hook."""
        return (*self.on_class, *self.on_model)


_ANY: Final = "a head for any target: name the one you serve it with"

#: Source: sglang 0.5.23. Hooks: srt/layers/moe/utils.py:606 and :614, srt/model_loader/loader.py:320 and :428,
#: srt/model_executor/model_runner_components/load_model_utils.py:60. Pairs: srt/configs/model_config.py:1010-1211,
#: where the architecture of a draft is made from its target's.
_SGLANG: Final = Engine(
    package="sglang",
    models="srt/models",
    registry="sglang.srt.models.registry",
    on_class=("shared_experts_fusion_disable_reason", "num_fusable_shared_experts"),
    on_model=("post_load_weights", "fall_back_to_pt_during_load", "precompile_kernels_after_loading"),
    gates=(
        Gate(
            "shared_experts_fusion_disable_reason",
            frozenset({"get_num_fused_shared_experts", "is_shared_experts_fusion_disabled"}),
        ),
    ),
    pairs={
        "BailingMoeForCausalLMNextN": (
            "BailingMoeForCausalLM",
            "BailingMoeV2ForCausalLM",
            "BailingMoeV2_5ForCausalLM",
            "BailingMoeV3ForCausalLM",
        ),
        "DeepseekV3ForCausalLMNextN": ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
        # srt/configs/minimax_vl.py:64, which makes its config from an M3 checkpoint's
        "DSparkMiniMaxDraftModel": ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        "ExaoneMoEForCausalLMMTP": ("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
        "MiMoV2MTP": ("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"),
        "NemotronHForCausalLMMTP": (
            "NemotronHForCausalLM",
            "NemotronHPuzzleForCausalLM",
            "NemotronH_Omni_Reasoning_V3",
        ),
        "Qwen3_5ForCausalLMMTP": (
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
            "Qwen3_5ForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "InternS2PreviewForConditionalGeneration",
            "InternS2MobiusForConditionalGeneration",
        ),
        "Step3p5MTP": ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    },
    any_target={
        "DFlashDraftModel": _ANY,
        "DFlash2DraftModel": _ANY,
        "DSparkDraftModel": _ANY,
        "LiLiCorrDraftModel": _ANY,
        "LingDSparkModel": "a Qwen3-shaped head for any Ling or Bailing target: name the one you serve it with",
        "MiniMaxDFlash2DraftModel": "another name for DFlash2DraftModel, " + _ANY,
    },
)

#: Source: vllm 0.33.0. Hooks: vllm/model_executor/model_loader/utils.py:209, default_loader.py:381. Pairs:
#: vllm/config/speculative.py:715-1160 and :1555, where a draft's architecture is made from its target's.
_VLLM: Final = Engine(
    package="vllm",
    models="model_executor/models",
    registry="vllm.model_executor.models.registry",
    platforms=("cuda", "rocm", "xpu", "cpu"),
    on_model=("process_weights_after_loading", "fall_back_to_pt_during_load"),
    pairs={
        "BailingMoeV3MTPModel": ("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
        "DSparkDraftModel": ("DeepseekV4ForCausalLM",),
        "DSparkV41DraftModel": ("DeepseekV41ForCausalLM",),
        "DeepSeekMTPModel": ("DeepseekV3ForCausalLM",),
        "DeepseekV32MTPModel": ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        "EagleDeepSeekMTPModel": ("DeepseekV3ForCausalLM",),
        "ErnieMTPModel": ("Ernie4_5_MoeForCausalLM",),
        "K3DSparkModel": ("KimiK3ForConditionalGeneration",),
        "MiniMaxM3MTP": ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
        "NemotronHMTPModel": ("NemotronHForCausalLM", "NemotronH_Omni_Reasoning_V3"),
        "OpenPanguMTPModel": ("PanguUltraMoEForCausalLM",),
        "ParseAuxMTPModel": ("RadioMBartPrefixForCausalLM",),
        "Qwen3_5MTP": (
            "Qwen3_5ForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration",
        ),
        "Qwen3_5MoeMTP": (
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration",
        ),
        "Step3p5MTP": ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    },
    any_target={
        "ExtractHiddenStatesModel": "no draft: it hands a target's hidden states out",
        "LiLiCorrDraftModel": _ANY,
    },
)

#: Every engine, by the name an operator types.
ENGINES: Final[Mapping[str, Engine]] = {"sglang": _SGLANG, "vllm": _VLLM}


def platforms_of(engines: Sequence[Engine]) -> tuple[str, ...]:
    """The platforms that some engine has models for; every one without an engine."""
    return tuple(name for name in PLATFORMS if not engines or any(name in engine.platforms for engine in engines))


def read_gates(texts: Sequence[str]) -> tuple[Gate, ...]:
    """`HOOK=NAME,NAME` as the command line has it.

    Raises:
        BadInput: another form.
    """
    gates: list[Gate] = []
    for text in texts:
        hook, _, names = text.partition("=")
        markers = frozenset(name.strip() for name in names.split(",") if name.strip())
        if not hook.strip() or not markers:
            raise BadInput("--gate", needed="HOOK=NAME,NAME", found=repr(text))
        gates.append(Gate(hook.strip(), markers))
    return tuple(gates)
