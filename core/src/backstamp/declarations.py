"""What a plugin declares: frozen data, read on any machine, never gated at import.

In: values a plugin author writes down. Out: immutable rows that discovery carries and the catalogue checks. Nothing
here runs code of its own, probes a host or imports a kernel library. Undeclared means no: an empty set accepts
nothing, and an unknown fact is not a yes.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

__all__ = [
    "ANY",
    "BACKEND_REQUESTS",
    "FEATURES",
    "GRAPH_LEVELS",
    "PHASES",
    "SITUATIONS",
    "Alias",
    "EntryPair",
    "Family",
    "FamilyDefault",
    "FeatureDefault",
    "GraphLevel",
    "GroupSizes",
    "Half",
    "Offer",
    "PageSizes",
    "Phase",
    "RetiredSetting",
    "Role",
    "Slot",
]

Phase = Literal["prefill", "decode", "verify", "draft_decode", "draft_extend"]
Half = Literal["prefill", "decode"]
Role = Literal["target", "draft"]
Slot = Literal["attention", "linear"]
Family = Literal["mha", "mla", "sparse_mla", "csa", "gdn", "kda", "mamba2", "lightning", "short_conv"]
GraphLevel = Literal["never", "single", "uniform", "varlen", "any"]
Device = Literal["cuda", "rocm", "npu", "musa", "xpu", "cpu", "any"]

PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
#: What an operator may ask a key for, by field of `backstamp.launch.Requests`; a tombstone maps to one of them.
BACKEND_REQUESTS: Final = frozenset(
    f"{name}_backend"
    for name in (
        *("attention", "prefill_attention", "decode_attention", "verify_attention", "draft_attention"),
        *("linear_attn", "linear_attn_prefill", "linear_attn_decode", "linear_attn_verify"),
        *("dsa_prefill", "dsa_decode"),
    )
)
#: CUDA-graph levels from the weakest to the strongest.
GRAPH_LEVELS: Final[tuple[GraphLevel, ...]] = get_args(GraphLevel)
#: Accepts every value of an open field (archs, head dims). Written out, because an empty tuple accepts none.
ANY: Final = ("any",)

#: Features a layer or an engine can need of a kernel; an offer lists those it has.
FEATURES: Final[frozenset[str]] = frozenset(
    {
        "window",  # sliding window on keys before self
        "chunked",  # keys of self's own chunk of the sequence only
        "softcap",  # logit soft-capping
        "sinks",  # one extra logit a head in the softmax denominator
        "tree_mask",  # verify of a token tree
        "topk",  # draft decode with more than one branch a request
        "non_causal",  # every token of a row sees every key
        "alibi",
        "relative_bias",
        "score_mod",
        "lse",  # returns log-sum-exp on request
        "split_kv",  # this step's tokens passed beside a cached prefix
        "fused_write",  # writes this step's K/V itself
        "cross",  # attends over another sequence's keys
        "encoder",  # encoder self-attention without a cache
        "indices",  # reads a per-token selection of keys
        "backward",  # has gradients
        "tracked_states",  # a linear kernel that also writes the states in between
        "bounded_gates",  # Kimi delta attention whose decay has a lower bound
    }
)
#: What can hold of a launch; `needs`, `excludes` and `graph_under` name these, features, or "kv_" and a KV dtype, and
#: join words that must hold together with "+" ("spec+dcp").
SITUATIONS: Final[frozenset[str]] = frozenset(
    {
        "spec",
        "dcp",
        "tp",
        "graph",
        "deterministic",
        "topk",
        "chunked_prefill",
        "prefix_cache",
        "training",
        "draft",  # the runner is a draft
    }
)

HeadDims: TypeAlias = "tuple[int | tuple[int, int] | str, ...]"
GroupSizes: TypeAlias = "tuple[int | tuple[int, int] | str, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSizes:
    """KV page sizes in tokens a kernel reads: any multiple of `multiple_of`, and exactly those in `exact`.

    `preferred` is what an unset page size becomes when this kernel is chosen.
    """

    preferred: int
    exact: tuple[int, ...] = ()
    multiple_of: int = 0

    def accepts(self, page_size: int) -> bool:
        """Answer whether the kernel reads pages of this many tokens."""
        return page_size in self.exact or (self.multiple_of > 0 and page_size % self.multiple_of == 0)

    def describe(self) -> str:
        """Say what is accepted, for a refusal."""
        parts = [str(size) for size in self.exact]
        if self.multiple_of:
            parts.append(f"multiples of {self.multiple_of}")
        return ", ".join(parts) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One row of what a kernel can do with given libraries on given hardware.

    Rows that share most fields are made with `dataclasses.replace`. One kernel name may have rows over several
    libraries and families.

    Attributes:
        kernel: concrete name, the one on the stamp; unique within the slot across distributions.
        factory: "module:callable" inside a top-level package of the plugin's own distribution.
        family: attention family the row serves.
        priority: 0..100, higher wins in `auto` where no measurement speaks.
        requires: PEP 508 names with ranges (no markers, no URLs); all must hold. The first is the library on the stamp.
        companions: distributions that, when installed, must be at the version of the first `requires`.
        device: "cuda", "rocm", "npu", "musa", "xpu", "cpu", or "any".
        archs: exact archs as host facts spell them ("9.0", "gfx942", "x86_64"), or `ANY`. "9.0" covers its `a` images.
        forward_archs: "major" also accepts newer minors of a listed major, "any" everything newer than the oldest.
        cpu_features: features the CPU must report.
        runtimes: floors such as "cuda>=12.8", spelled like `requires`.
        phases: served phases. `draft_decode` follows decode and `draft_extend` follows prefill unless
            `draft_phases` says otherwise.
        draft_phases: None to follow; else exactly these draft phases.
        dtypes: query dtypes ("fp16", "bf16", "fp32"). kv_dtypes: cache dtypes ("same" is the query's own).
        kv_dtype_names: operator names this row maps, for example {"fp8_e4m3": "e4m3fn"}.
        head_dims: d for (d, d), or (qk, v) pairs, or `ANY`. MLA rows give the absorbed pair (576, 512).
        group_sizes: query heads a KV head on one rank, as numbers and (least, most) ranges, or `ANY`. MLA has one KV
            head, so there they are all its query heads.
        page_sizes: pages the kernel reads. kv_forms: "paged", "ragged". index_forms: "page_table", "csr", "indirect".
        prefix: whether queries may attend over tokens cached by earlier steps.
        features: members of `FEATURES`.
        needs, excludes: conditions that must hold, or must not: words of `SITUATIONS`, "spec+dcp" for both together.
        graph: strongest CUDA-graph level. graph_under: weaker levels under a condition, {"non_causal": "never"}.
        plan: "device" if `replan` needs no host work, else "host".
        deterministic: same bits for a row whatever shares its batch. alignment_tokens: prefill truncation alignment.
            A deterministic attention row that serves prefill must declare it; 1 says that any split is the same.
        accuracy: "exact", or the name of a bound; `auto` takes only exact rows.
        reference: right everywhere and slow: where `auto` takes it, the plan says so.
        inputs: what the engine must supply ("host_lens", "token_rows"). phase_inputs: more, in one phase.
        sink_dtypes: dtypes of stored sinks it reads ("same" is the query's own).
        sink_conversion: whether it converts sinks of another dtype on the way in: "no", "lossless" (only a widening),
            or "any".
        layouts: KV layout ids, best first. state_layouts: recurrent-state layout ids, best first.
        mask_format: how a mask reaches the kernel; must be declared.
        build_settings: features compiled in at build time, which `Built.settings` must report back.
        fill_value: `kv_len` a padded row must carry.
        sub_settings: values it knows of the requests for its insides, {"dsa_decode_backend": {"triton"}}; a row that
            names none leaves them to its factory.
    """

    kernel: str
    factory: str
    family: Family
    device: Device
    archs: tuple[str, ...]
    phases: frozenset[Phase]
    dtypes: frozenset[str]
    head_dims: HeadDims
    page_sizes: PageSizes
    group_sizes: GroupSizes = ANY
    slot: Slot = "attention"
    priority: int = 50
    requires: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    forward_archs: Literal["no", "major", "any"] = "no"
    cpu_features: frozenset[str] = frozenset()
    runtimes: tuple[str, ...] = ()
    draft_phases: frozenset[Phase] | None = None
    kv_dtypes: frozenset[str] = frozenset({"same"})
    kv_dtype_names: Mapping[str, str] = field(default_factory=dict)
    kv_forms: frozenset[str] = frozenset({"paged"})
    index_forms: frozenset[str] = frozenset({"page_table"})
    prefix: bool = False
    features: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    excludes: frozenset[str] = frozenset()
    graph: GraphLevel = "never"
    graph_under: Mapping[str, GraphLevel] = field(default_factory=dict)
    plan: Literal["host", "device"] = "host"
    deterministic: bool = False
    alignment_tokens: int | None = None
    accuracy: str = "exact"
    reference: bool = False
    inputs: frozenset[str] = frozenset()
    phase_inputs: Mapping[Phase, frozenset[str]] = field(default_factory=dict)
    sink_dtypes: frozenset[str] = frozenset({"same"})
    sink_conversion: Literal["no", "lossless", "any"] = "no"
    layouts: tuple[str, ...] = ("rows",)
    state_layouts: tuple[str, ...] = ()
    mask_format: Literal["none", "2d", "4d_bool", "internal_causal"] | None = None
    build_settings: frozenset[str] = frozenset()
    fill_value: int = 0
    sub_settings: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def all_phases(self) -> frozenset[Phase]:
        """The declared phases with the draft phases that follow them."""
        if self.draft_phases is not None:
            return self.phases | self.draft_phases
        follow: set[Phase] = set(self.phases)
        if "decode" in self.phases:
            follow.add("draft_decode")
        if "prefill" in self.phases:
            follow.add("draft_extend")
        return frozenset(follow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A key an operator may type: an ordered list of kernels, the first that fits binds.

    `by_phase` gives a phase its own list. `deprecated` names the key to use instead. An alias that leads to another
    distribution's kernel binds only when the operator names it as `distribution:key`.
    """

    key: str
    kernels: tuple[str, ...]
    by_phase: Mapping[Phase, tuple[str, ...]] = field(default_factory=dict)
    deprecated: str | None = None
    slot: Slot = "attention"

    def for_phase(self, phase: Phase) -> tuple[str, ...]:
        """The ordered kernels this key stands for in one phase."""
        return self.by_phase.get(phase, self.kernels)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPair:
    """A draft entry class and the target it is named after, as "module:Class" strings."""

    draft: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredSetting:
    """A setting that no longer exists, an environment variable or a flag: its tombstone.

    `replacement` is what to set instead. `values` maps values that still mean something to keys, {"True": "triton"},
    and `request` is the request such a key becomes, a backend field of `Requests`.
    """

    name: str
    replacement: str
    values: Mapping[str, str] = field(default_factory=dict)
    request: str = "attention_backend"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyDefault:
    """A model family's own wish for one component of one role: `kernels` in order of preference, the first that fits,
    and the only kernels it `allowed`, if it says so.

    `model_type` is the config's. A draft that shares its target's KV cache is held to its target's `allowed` too.
    """

    model_type: str
    kernels: tuple[str, ...] = ()
    allowed: frozenset[str] | None = None
    component: str = "main"
    role: Role = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureDefault:
    """An optimisation that is on by default, but only on these archs of this device."""

    feature: str
    archs: tuple[str, ...]
    device: Device = "cuda"
