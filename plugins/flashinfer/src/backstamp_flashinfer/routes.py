"""Which of the library's wrappers and backends serves one kind of layer in one step.

In: a layer's constants and what a step looks like from the host. Out: a `Route`. Every backend is named outright: the
library's own "auto" may hand a step to cuDNN or XQA, and the stamp would then name a kernel that did not run.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from backstamp.attention import LayerSpec

__all__ = ["FA2_QUERY_TOKENS", "FA3_HEAD_DIMS", "LayerKind", "Route", "choose_route", "kind_of", "window_of"]

#: Source: flashinfer 0.7.4 utils.py:is_fa3_prefill_head_dim_supported
FA3_HEAD_DIMS = frozenset({64, 128, 256})
#: Query tokens up to which FA2 is the faster of the two on Hopper. Source: prefill.py:_determine_auto_backend
FA2_QUERY_TOKENS = 64


class LayerKind(NamedTuple):
    """What the library is planned with; layers that agree in it share a plan."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window_left: int
    softcap: float
    sinks: bool


class Route(NamedTuple):
    """One wrapper of the library, and all it is constructed with.

    Attributes:
        entry: the wrapper: decode, prefill, ragged prefill, prefill with sinks, or prefill with a custom mask.
        backend: "fa2" or "fa3".
        head_dim, window: compiled into the module with sinks; 0 and False elsewhere.
        rows, tokens, pages, q_len, kv_len: sizes of a wrapper with buffers at fixed addresses; 0 where it has none.
    """

    entry: Literal["decode", "prefill", "ragged", "sinks", "tree"]
    backend: Literal["fa2", "fa3"]
    head_dim: int = 0
    window: bool = False
    rows: int = 0
    tokens: int = 0
    pages: int = 0
    q_len: int = 0
    kv_len: int = 0

    @property
    def fixed(self) -> bool:
        """Whether the wrapper has buffers of its own, which a graph may record."""
        return self.rows > 0


def kind_of(layer: LayerSpec) -> LayerKind:
    """What of a layer the library is planned with."""
    return LayerKind(
        num_qo_heads=layer.num_qo_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        scale=layer.scale,
        window_left=layer.window_left,
        softcap=layer.softcap,
        sinks=layer.sinks is not None,
    )


def choose_route(
    kind: LayerKind,
    *,
    hopper: bool,
    ragged: bool,
    tree: bool,
    one_token: bool,
    causal: bool,
    max_q_len: int,
    strides_differ: bool,
    sizes: dict[str, int],
) -> Route:
    """The wrapper for one kind of layer; `sizes` are the fixed sizes of `Route`, empty for a step nobody records."""
    if tree:
        return Route(entry="tree", backend="fa2", **sizes)
    # FA3 has no custom mask, one stride for keys and values, and no key to the right of a window it would skip;
    # short queries, which are what graphs record, are FA2's
    long = max_q_len > FA2_QUERY_TOKENS and not sizes
    whole = causal or kind.window_left < 0
    fa3 = hopper and long and whole and kind.head_dim in FA3_HEAD_DIMS and kind.head_dim == kind.v_head_dim
    if ragged:
        return Route(entry="ragged", backend="fa3" if fa3 else "fa2")
    backend: Literal["fa2", "fa3"] = "fa3" if fa3 and not strides_differ else "fa2"
    if kind.sinks:
        window = kind.window_left >= 0
        return Route(entry="sinks", backend=backend, head_dim=kind.head_dim, window=window, **sizes)
    return Route(entry="decode" if one_token else "prefill", backend=backend, **sizes)


def window_of(kind: LayerKind, route: Route) -> int:
    """The window the kernel applies: a tree's own is wider, because positions in a tree lag behind slots."""
    if route.entry == "tree" and kind.window_left >= 0:
        return kind.window_left + route.q_len
    return kind.window_left
