"""Second step of the flow: what the operator, the embedding framework and the model family asked for, as one `Launch`.

In: up to three `Requests`, ranked operator > embedder > family, and the settings found in the environment. Out: a
frozen `Launch` whose every value knows who asked and through which flag, and one `Policy`. A launch never hands out
the base attention field alone: callers ask for the request of a half or of a phase, and unset stays unset.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal, get_args

from backstamp.declarations import Half, Phase, Role
from backstamp.errors import BadInput
from backstamp.policy import Policy
from backstamp.request_checks import check_flag, check_number, check_word, named

__all__ = [
    "FLAGS",
    "SOURCES",
    "Launch",
    "Request",
    "Requests",
    "Source",
    "flag_of",
    "make_launch",
    "outranks",
    "stronger",
]

Source = Literal["operator", "embedder", "family"]
#: Who may ask, strongest first.
SOURCES: Final[tuple[Source, ...]] = ("operator", "embedder", "family")
#: Draft steps where speculation is on and nobody said how many: SGLang 0.5.23 starts DeepSeek's MTP with 3.
_DEFAULT_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What one source asked for; None is unset. Keys may be written `distribution:name`.

    Raises:
        BadInput: a value of another type, out of range or an unknown word, naming the flag.
    """

    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    verify_attention_backend: str | None = None
    draft_attention_backend: str | None = None
    linear_attn_backend: str | None = None
    linear_attn_prefill_backend: str | None = None
    linear_attn_decode_backend: str | None = None
    linear_attn_verify_backend: str | None = None
    dsa_prefill_backend: str | None = None
    dsa_decode_backend: str | None = None
    seed_dsa_topk_from_draft_extend: bool | None = None
    speculative_algorithm: str | None = None
    speculative_attention_mode: str | None = None
    speculative_num_steps: int | None = None
    speculative_topk: int | None = None
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    chunked_prefill_size: int | None = None
    deterministic: bool | None = None
    tp_size: int | None = None
    dcp_size: int | None = None
    training: bool | None = None
    component_backends: Mapping[str, str] | None = None
    features: Mapping[str, bool] | None = None

    def __post_init__(self) -> None:
        for name in (*_KEYS, "speculative_algorithm", "kv_cache_dtype"):
            check_word(FLAGS[name], getattr(self, name))
        for name in ("seed_dsa_topk_from_draft_extend", "deterministic", "training"):
            check_flag(FLAGS[name], getattr(self, name))
        for name in ("speculative_topk", "page_size", "tp_size", "dcp_size"):
            check_number(FLAGS[name], getattr(self, name), 1)
        check_number(FLAGS["speculative_num_steps"], self.speculative_num_steps, 0)
        # -1 is the field's word for chunked prefill switched off
        check_number(FLAGS["chunked_prefill_size"], self.chunked_prefill_size, -1)
        if self.speculative_attention_mode not in (None, "prefill", "decode"):
            flag, found = FLAGS["speculative_attention_mode"], repr(self.speculative_attention_mode)
            fix = "To choose the verify kernel itself, use --verify-attention-backend"
            raise BadInput(flag, needed="prefill or decode", found=found, fix=fix)
        for component, key in named(FLAGS["component_backends"], self.component_backends):
            check_word(_component_flag(component), key, optional=False)
        for feature, on in named(FLAGS["features"], self.features):
            check_flag(f"{FLAGS['features']} {feature}", on, optional=False)


#: The flag of every request, as the command line spells it; the last two are repeated, NAME=VALUE each.
FLAGS: Final[Mapping[str, str]] = {item.name: "--" + item.name.replace("_", "-") for item in fields(Requests)} | {
    "component_backends": "--component-backend",
    "features": "--feature",
}
_KEYS: Final = tuple(name for name in FLAGS if name.endswith("_backend"))
_PER_NAME: Final = ("component_backends", "features")


def _component_flag(component: str) -> str:
    return f"{FLAGS['component_backends']} {component}"


@dataclass(frozen=True, slots=True)
class Request:
    """One value somebody asked for, who asked, and the flag it came through."""

    value: str
    source: Source
    setting: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Everything asked for, merged; made by `make_launch`. Phases and halves are read through its methods.

    `keys` and `components` hold a `Request` each, `sources` says who set any of the other values; what is not in it
    nobody set. `settings` are settings found set by name, for the tombstones of retired ones.
    """

    policy: Policy = field(default_factory=Policy)
    keys: Mapping[str, Request] = field(default_factory=dict)
    seed_dsa_topk_from_draft_extend: bool = False
    components: Mapping[str, Request] = field(default_factory=dict)
    features: Mapping[str, tuple[bool, Source]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Source] = field(default_factory=dict)
    speculative_algorithm: str | None = None
    speculative_attention_mode: str | None = None
    speculative_num_steps: int = 0
    speculative_topk: int = 1
    page_size: int | None = None
    kv_cache_dtype: str = "auto"
    chunked_prefill_size: int | None = None
    deterministic: bool = False
    tp_size: int = 1
    dcp_size: int = 1
    training: bool = False

    @property
    def speculative(self) -> bool:
        """Whether a draft proposes tokens in this launch."""
        return self.speculative_algorithm is not None

    def pair(self) -> tuple[Request | None, Request | None]:
        """The requests of the prefill and the decode half, split fields first, the base field as fallback."""
        return self.half("prefill"), self.half("decode")

    def half(self, half: Half) -> Request | None:
        """The request of one half; None when neither its split field nor the base field was set."""
        # the only read of the base field: always as the fallback of a half
        return _strongest(self.keys.get(f"{half}_attention_backend"), self.keys.get("attention_backend"))

    def half_of(self, half: Half, component: str) -> Request | None:
        """The request of one half for one component: the one scoped to it first, unless a stronger source asked."""
        return _strongest(self.components.get(component), self.half(half))

    def own(self, phase: Phase, role: Role) -> Request | None:
        """The request that binds a phase by itself, before halves are inherited or modes followed."""
        if role == "draft":
            return self.keys.get("draft_attention_backend")
        if phase == "verify":
            return self.keys.get("verify_attention_backend")
        if phase == "prefill":
            return self.half("prefill")
        return self.half("decode") if phase == "decode" else None

    def linear(self, phase: Phase) -> Request | None:
        """The request of the linear slot in one phase, split fields first."""
        return _strongest(self.keys.get(f"linear_attn_{phase}_backend"), self.keys.get("linear_attn_backend"))

    def source_of(self, name: str) -> Source | Literal["auto"]:
        """Who set a value, by its field name; "auto" where nobody did."""
        request = self.keys.get(name)
        return request.source if request is not None else self.sources.get(name, "auto")

    def sub_settings(self, prefix: str) -> tuple[Request, ...]:
        """Requests whose field starts with `prefix`, for example "dsa_"; they need a parent in force."""
        return tuple(request for name, request in sorted(self.keys.items()) if name.startswith(prefix))


def outranks(source: Source, other: Source) -> bool:
    """Whether one source comes before another."""
    return SOURCES.index(source) < SOURCES.index(other)


def stronger(one: Request | None, other: Request | None) -> Request | None:
    """The request of the stronger source; the first of equals."""
    if one is None or other is None:
        return one if other is None else other
    return other if outranks(other.source, one.source) else one


def flag_of(phase: Phase, role: Role) -> str:
    """The flag that sets one phase of a runner."""
    return "--draft-attention-backend" if role == "draft" else f"--{phase}-attention-backend"


def make_launch(
    operator: Requests,
    *,
    embedder: Requests | None = None,
    family: Requests | None = None,
    policy: Policy | None = None,
    role: Role = "target",
    settings: Mapping[str, str] | None = None,
) -> Launch:
    """Merge what was asked for, strongest source first.

    `settings` are environment variables and old flags found set; those a plugin declares retired are told, the others
    are left alone. A draft role implies speculation even when no algorithm was named: there is no other reason to ask
    about a draft.

    Raises:
        BadInput: an unknown role, or an argument that is not of its class.
    """
    _check_arguments({"operator": operator, "embedder": embedder, "family": family}, policy, role, settings)
    ranked = zip(SOURCES, (operator, embedder, family), strict=True)
    asked = [(source, requests) for source, requests in ranked if requests is not None]
    keys: dict[str, Request] = {}
    components: dict[str, Request] = {}
    features: dict[str, tuple[bool, Source]] = {}
    plain: dict[str, object] = {}
    origins: dict[str, Source] = {}
    for source, requests in asked:
        for name, flag in FLAGS.items():
            value = getattr(requests, name)
            if value is None or name in _PER_NAME:
                continue
            if name in _KEYS:
                keys.setdefault(name, Request(value, source, flag))
            else:
                plain.setdefault(name, value)
                origins.setdefault(name, source)
        for component, key in (requests.component_backends or {}).items():
            components.setdefault(component, Request(key, source, _component_flag(component)))
        for feature, on in (requests.features or {}).items():
            features.setdefault(feature, (on, source))
    algorithm = plain.get("speculative_algorithm", "STANDALONE" if role == "draft" else None)
    steps = plain.get("speculative_num_steps", _DEFAULT_STEPS if algorithm is not None else 0)
    return Launch(
        policy=policy if policy is not None else Policy(),
        keys=keys,
        seed_dsa_topk_from_draft_extend=plain.get("seed_dsa_topk_from_draft_extend") is True,
        components=components,
        features=features,
        settings=dict(settings or {}),
        sources=origins,
        speculative_algorithm=_word(algorithm),
        speculative_attention_mode=_word(plain.get("speculative_attention_mode")),
        speculative_num_steps=_number(steps),
        speculative_topk=_number(plain.get("speculative_topk", 1)),
        page_size=_number_or_none(plain.get("page_size")),
        kv_cache_dtype=_word(plain.get("kv_cache_dtype")) or "auto",
        chunked_prefill_size=_number_or_none(plain.get("chunked_prefill_size")),
        deterministic=plain.get("deterministic") is True,
        tp_size=_number(plain.get("tp_size", 1)),
        dcp_size=_number(plain.get("dcp_size", 1)),
        training=plain.get("training") is True,
    )


def _check_arguments(asked: Mapping[str, object], policy: object, role: object, settings: object) -> None:
    for name, requests in asked.items():
        if not isinstance(requests, Requests) and (requests is not None or name == "operator"):
            raise BadInput(f"make_launch, {name}", needed="Requests", found=repr(requests))
    if policy is not None and not isinstance(policy, Policy):
        raise BadInput("make_launch, policy", needed="a Policy", found=repr(policy))
    if role not in get_args(Role):
        raise BadInput("make_launch, role", needed=" or ".join(get_args(Role)), found=repr(role))
    pairs = settings.items() if isinstance(settings, Mapping) else ()
    if not isinstance(settings, Mapping | None) or not all(isinstance(word, str) for pair in pairs for word in pair):
        raise BadInput("make_launch, settings", needed="texts by name", found=repr(settings))


def _strongest(split: Request | None, base: Request | None) -> Request | None:
    # an operator's base field outranks an embedder's split field; between equals the split field wins
    if split is None or base is None:
        return split if base is None else base
    return split if SOURCES.index(split.source) <= SOURCES.index(base.source) else base


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number_or_none(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _number(value: object) -> int:
    assert isinstance(value, int), value
    return value
