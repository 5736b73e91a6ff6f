"""The model of the mini engine: a small, real decoder that owns everything but attention and the cache.

In: a Hugging Face config dict, scaled down, then tokens, their positions and an `attend` function. Out: logits. It
never touches a cache, a mask or a backend: `attend` is the one seam where an engine calls attention. Weights are random
at init scale, so attention decides the tokens: zeroed attention or a lost causal mask gives other ones.

.. versionadded:: 0.1
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from backstamp.attention import LayerSpec
from backstamp.errors import BadModel

__all__ = ["Attend", "Decoder", "DecoderConfig"]

#: `(q [T, Hq, Dk], k [T, Hk, Dk], v [T, Hk, Dv], layer) -> out [T, Hq, Dv]`.
Attend = Callable[[Tensor, Tensor, Tensor, LayerSpec], Tensor]
# logits of standard deviation 4: sharp enough that a lost window, sink or soft cap shows in the tokens
_QUERY_GAIN = 4.0
# each layer says half as much as the one before, so that a draft of the first layers agrees in part, as a trained one
_DEPTH_DECAY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The facts of a model that its attention sees, at a size a CPU can run.

    Attributes:
        windows: one `window_left` a layer, -1 none; its length is the number of layers.
        softcap: soft cap on attention logits, 0.0 none.
        sinks: whether each head has a learned sink.
        scale: factor on attention logits, linear.
    """

    windows: tuple[int, ...]
    hidden: int
    vocab: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    sinks: bool = False
    rms_eps: float = 1e-6
    rope_theta: float = 10_000.0

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        *,
        layers: int = 4,
        hidden: int = 256,
        vocab: int = 512,
        max_kv_heads: int = 2,
        max_window_tokens: int = 24,
    ) -> DecoderConfig:
        """Scale a model's `config.json` down; head dim, query heads per KV head and attention extras stay real.

        Windows shrink to `max_window_tokens`, so that short prompts feel them. Raises `BadModel` when a fact is
        missing or malformed, or when the model's attention is not plain multi-head (MLA, linear layers).
        """
        nested = config.get("text_config")
        config = nested if isinstance(nested, Mapping) else config
        if config.get("kv_lora_rank") is not None:
            raise _bad_model("multi-head attention", f"kv_lora_rank {config['kv_lora_rank']!r} (MLA)")
        qo_heads = _whole(config, "num_attention_heads")
        kv_heads = _whole(config, "num_key_value_heads", qo_heads)
        if qo_heads % kv_heads:
            raise _bad_model("num_attention_heads divisible by num_key_value_heads", f"{qo_heads} and {kv_heads}")
        absent = config.get("head_dim") is None
        head_dim = _whole(config, "hidden_size") // qo_heads if absent else _whole(config, "head_dim")
        if head_dim % 2:
            raise _bad_model("an even head_dim (rotary halves)", str(head_dim))
        rope = config.get("rope_parameters")
        scaled_kv_heads = min(kv_heads, max_kv_heads)
        return cls(
            windows=_windows(config, layers, max_window_tokens),
            hidden=hidden,
            vocab=vocab,
            num_qo_heads=scaled_kv_heads * (qo_heads // kv_heads),
            num_kv_heads=scaled_kv_heads,
            head_dim=head_dim,
            scale=(_real(config, "query_pre_attn_scalar", 0.0) or head_dim) ** -0.5,
            softcap=_real(config, "attn_logit_softcapping", 0.0),
            sinks=config.get("model_type") == "gpt_oss",
            rms_eps=_real(config, "rms_norm_eps", 1e-6),
            rope_theta=_real(rope if isinstance(rope, Mapping) else config, "rope_theta", 0.0) or 10_000.0,
        )


class Decoder:
    """Embedding, then RMSNorm, rotary GQA and SwiGLU layers, then a head; weights from `seed`, equal on any device.

    `layer_specs` describes each attention layer to a backend; layers of one window share a KV group.
    """

    def __init__(
        self,
        config: DecoderConfig,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, std: float) -> Tensor:
            return (torch.randn(*shape, generator=generator) * std).to(device, dtype)

        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.embedding = normal(config.vocab, config.hidden, std=1.0)
        self.layers = tuple(_Layer.random(config, index, normal) for index in range(len(config.windows)))
        self.norm = 1 + normal(config.hidden, std=0.1)
        self.head = normal(config.vocab, config.hidden, std=config.hidden**-0.5)
        groups = list(dict.fromkeys(config.windows))
        self.layer_specs = tuple(
            LayerSpec(
                layer_id=index,
                group=groups.index(window_left),
                num_qo_heads=config.num_qo_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                v_head_dim=config.head_dim,
                scale=config.scale,
                window_left=window_left,
                softcap=config.softcap,
                sinks=self.layers[index].sinks,
            )
            for index, window_left in enumerate(config.windows)
        )

    @classmethod
    def draft_of(cls, target: Decoder, layers: int) -> Decoder:
        """A cheaper draft: the target's first `layers` layers, sharing its embedding and head.

        With all of the target's layers it is the target itself. Raises `BadModel` for no layer or more than it has.
        """
        if not 1 <= layers <= len(target.layers):
            raise _bad_model(f"1 to {len(target.layers)} draft layers", str(layers))
        draft = copy.copy(target)
        draft.config = replace(target.config, windows=target.config.windows[:layers])
        draft.layers, draft.layer_specs = target.layers[:layers], target.layer_specs[:layers]
        return draft

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """`tokens`, `positions [T]` i64 to logits `[T, vocab]`; `attend` is called once a layer, in order."""
        config = self.config

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(x, (config.hidden,), weight, config.rms_eps)

        exponents = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
        angles = positions[:, None, None] * config.rope_theta**-exponents
        rotary = angles.cos(), angles.sin()
        hidden = self.embedding[tokens]
        for layer, spec in zip(self.layers, self.layer_specs, strict=True):
            x = norm(hidden, layer.attention_norm)
            q, k, v = ((x @ weight.T).view(len(x), -1, config.head_dim) for weight in (layer.q, layer.k, layer.v))
            out = attend(_rotate(q, rotary), _rotate(k, rotary), v, spec)
            hidden = hidden + out.flatten(1) @ layer.o.T
            x = norm(hidden, layer.mlp_norm)
            hidden = hidden + (F.silu(x @ layer.gate.T) * (x @ layer.up.T)) @ layer.down.T
        return norm(hidden, self.norm) @ self.head.T


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights `[out, in]` of one layer; `sinks [Hq]` or None."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    sinks: Tensor | None
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def random(cls, config: DecoderConfig, index: int, normal: Callable[..., Tensor]) -> _Layer:
        hidden, inner = config.hidden, 2 * config.hidden
        qo_width, kv_width = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
        unit, decay = hidden**-0.5, _DEPTH_DECAY**index
        return cls(
            attention_norm=1 + normal(hidden, std=0.1),
            q=normal(qo_width, hidden, std=_QUERY_GAIN * unit),
            k=normal(kv_width, hidden, std=unit),
            v=normal(kv_width, hidden, std=unit),
            o=normal(hidden, qo_width, std=decay * qo_width**-0.5),
            sinks=normal(config.num_qo_heads, std=_QUERY_GAIN) if config.sinks else None,
            mlp_norm=1 + normal(hidden, std=0.1),
            gate=normal(inner, hidden, std=unit),
            up=normal(inner, hidden, std=unit),
            down=normal(hidden, inner, std=decay * inner**-0.5),
        )


def _windows(config: Mapping[str, object], layers: int, max_window_tokens: int) -> tuple[int, ...]:
    """One `window_left` a layer: the model's first layers, the last one replaced if a kind would be missing."""
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window", True) is not False
    real = config.get("layer_types") or ["sliding_attention" if windowed else "full_attention"]
    kinds = [str(kind) for kind in real] if isinstance(real, list | tuple) else [str(real)]
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise _bad_model("layer_types of full_attention and sliding_attention", ", ".join(unknown))
    chosen = [kinds[index % len(kinds)] for index in range(layers)]
    if layers > 1 and (missing := set(kinds) - set(chosen)):
        chosen[-1] = missing.pop()
    if "sliding_attention" not in chosen:
        return (-1,) * layers
    # a Hugging Face window counts the token itself, window_left does not
    window_left = min(_whole(config, "sliding_window"), max_window_tokens) - 1
    return tuple(window_left if kind == "sliding_attention" else -1 for kind in chosen)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the two halves of each head by angles whose cosine and sine are `[T, 1, head_dim / 2]`, f32."""
    (cos, sin), (left, right) = rotary, x.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def _whole(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _bad_model(f"a whole number {name!r} of 1 or more", repr(value))
    return value


def _real(config: Mapping[str, object], name: str, default: float) -> float:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise _bad_model(f"a finite number {name!r} of 0 or more", repr(value))
    return float(value)


def _bad_model(needed: str, found: str) -> BadModel:
    return BadModel("demo decoder", needed=needed, found=found)
