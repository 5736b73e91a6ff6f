"""One step of a recurrence that a declared row has to serve, as data: what its rows, states and gates look like.

In: numbers. Out: the layer as a kernel sees it, and the model as the resolver does: the recurrence above a layer of
full attention, as hybrid models have them. Nothing here touches a tensor.

.. versionadded:: 0.2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from backstamp.attention import LayerSpec
from backstamp.declarations import Phase
from backstamp.model import LayerFacts, LayerGroup, ModelFacts

__all__ = ["TREE", "LinearCase", "LinearFamily", "Order", "VerifyForm"]

LinearFamily: TypeAlias = Literal["gdn", "kda"]
#: Which of a state's two dims comes first, keys or values.
Order: TypeAlias = Literal["vk", "kv"]
#: Where a verify step leaves the state after each token.
VerifyForm: TypeAlias = Literal["slot_table", "intermediate"]
#: Parents of three rows of five tokens: two branches under the first token, and a second root.
TREE: Final = ((-1, 0, 0, 1, 2), (-1, -1, 0, 1, 1), (-1, 0, 1, 2, 3))
_DENSE: Final = (8, 2, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCase:
    """One step of one linear layer.

    Attributes:
        name: unique among the cases of a row and phase.
        q_lens: query tokens of each row.
        heads: key and value heads. dims: key and value head dims.
        has_state: which rows have one, None for all. pads: rows whose slot is -1.
        lower_bound: of a decay that is bounded.
        form, parents, num_accepted: read in verify alone. unkept: the last state of the first row has no slot.
        pad_tokens: tokens at the end that belong to no row.
        own_slots: the layer's states lie in other slots than the batch names.
        strided: tokens are cut out of wider rows, states out of wider slots.
        fixed: what the case is about, of "states", "gates" and "form": those a row may not take, and no declaration
            has a word for. What is not fixed may be the other way where a kernel refuses the one that is here.
        optional: no declaration can promise the case, so that a kernel may refuse it when it is called.
        refused: the row does not declare what the case has, so that a kernel must refuse it.
        words: situations of `backstamp.declarations.SITUATIONS` the launch has beside what its phase brings.
    """

    name: str
    phase: Phase
    q_lens: tuple[int, ...]
    family: LinearFamily = "gdn"
    heads: tuple[int, int] = (2, 4)
    dims: tuple[int, int] = (64, 64)
    order: Order = "vk"
    dtype: str = "fp32"
    state_dtype: str = "fp32"
    raw_gates: bool = True
    lower_bound: float | None = None
    has_state: tuple[bool, ...] | None = None
    pads: tuple[int, ...] = ()
    form: VerifyForm = "intermediate"
    parents: tuple[tuple[int, ...], ...] | None = None
    num_accepted: tuple[int, ...] | None = None
    unkept: bool = False
    pad_tokens: int = 0
    host_lens: bool = True
    own_slots: bool = False
    strided: bool = False
    graph: bool = False
    fixed: frozenset[str] = frozenset()
    optional: bool = False
    refused: bool = False
    words: frozenset[str] = frozenset()

    @property
    def said(self) -> frozenset[str]:
        """Every word an offer's `needs` and `excludes` may hold against this case."""
        tree = self.parents is not None and not self.refused
        holds = {"tree_mask": tree, "topk": tree, "spec": self.phase == "verify", "graph": self.graph}
        holds["bounded_gates"] = self.lower_bound is not None and not self.refused
        return self.words | {word for word, true in holds.items() if true}

    def layer(self) -> LayerSpec:
        """The layer as a kernel sees it."""
        return LayerSpec(
            layer_id=0,
            num_qo_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            scale=self.dims[0] ** -0.5,
        )

    def layers(self) -> tuple[LayerSpec, LayerSpec]:
        """The runner's layers: this one, and the one of full attention."""
        query_heads, kv_heads, dim = _DENSE
        full = LayerSpec(
            layer_id=1,
            num_qo_heads=query_heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            v_head_dim=dim,
            scale=dim**-0.5,
        )
        return self.layer(), full

    def model(self) -> ModelFacts:
        """The model as the resolver sees it: one layer of each slot."""
        query_heads, kv_heads, dim = _DENSE
        facts = LayerFacts(
            family=self.family,
            num_qo_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_dim=self.dims[0],
            v_head_dim=self.dims[1],
            conv_kernel=4,
            gate_lower_bound=None if self.refused else self.lower_bound,
        )
        full = LayerFacts(family="mha", num_qo_heads=query_heads, num_kv_heads=kv_heads, head_dim=dim, v_head_dim=dim)
        groups = (LayerGroup("main", facts, (0,)), LayerGroup("main", full, (1,)))
        return ModelFacts(
            name="conformance", architecture="", dtype=self.dtype, layers=((facts,), (full,)), groups=groups
        )
