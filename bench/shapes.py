"""One piece of work `bench/kernels.py` measures, as numbers: what a step looks like, and what it costs at least.

In: rows, heads, pages. Out: how the record names it, the case a resolver and a model are made of, floating-point
operations and bytes. Nothing here touches a tensor or knows a kernel.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from backstamp.declarations import Family, Phase
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.linear_cases import LinearCase
from backstamp.testing.conformance.sparse_cases import SparseCase

__all__ = ["LATENT", "PHASES", "WORKS", "Shape", "Work", "case_of", "family_of", "linear_case_of"]

Work: TypeAlias = Literal[
    "prefill",
    "extend",
    "decode",
    "verify",
    "mla_prefill",
    "mla_decode",
    "sparse_mla_prefill",
    "sparse_mla_decode",
    "gdn_prefill",
    "gdn_decode",
    "kda_prefill",
    "kda_decode",
]
WORKS: Final[tuple[Work, ...]] = get_args(Work)
#: The phase a work runs in.
PHASES: Final[dict[Work, Phase]] = {
    work: "verify" if work == "verify" else "decode" if work.endswith("decode") else "prefill" for work in WORKS
}
_FAMILIES: Final[dict[str, Family]] = {"mla": "mla", "sparse": "sparse_mla", "gdn": "gdn", "kda": "kda"}
#: Families whose values lie inside their keys.
LATENT: Final = frozenset({"mla", "sparse_mla"})
#: Bytes of one number, and of one token of a packed latent cache.
_NUMBER: Final = {"same": 2, "e4m3fn": 1}
_PACKED: Final = {"fp8_ds_mla": 656}


class Shape(NamedTuple):
    """One piece of work; every number is bf16 unless it says otherwise.

    Attributes:
        rows: (query tokens, KV tokens with them) of each request; the two are one in linear attention.
        page_size: in tokens; 0 where keys and values lie in no cache (prefill), and in linear attention.
        heads, dims: of queries and keys, or of keys and values in linear attention.
        kv_dtype: of the cache: "same", "e4m3fn", or "fp8_ds_mla", which is a layout too.
        tree: a verify step's tokens are a tree, not a chain.
        topk: keys each token of sparse attention chooses.
        lower_bound: of a decay of Kimi delta attention that has one, whose gates are raw in every phase.
        name: what the record calls the rows where they are unlike.
    """

    work: Work
    rows: tuple[tuple[int, int], ...]
    page_size: int = 0
    heads: tuple[int, int] = (32, 8)
    dims: tuple[int, int] = (128, 128)
    kv_dtype: str = "same"
    tree: bool = False
    topk: int = 0
    lower_bound: float | None = None
    name: str = ""

    @property
    def phase(self) -> Phase:
        """The phase that serves it."""
        return PHASES[self.work]

    @property
    def linear(self) -> bool:
        """Whether it is a recurrence."""
        return self.work.startswith(("gdn", "kda"))

    @property
    def uniform(self) -> bool:
        """Whether all rows are alike."""
        return len(set(self.rows)) == 1

    @property
    def label(self) -> str:
        """How the record names the shape, unique within its work."""
        q_len, kv_len = self.rows[0]
        lengths = f"t{q_len}" if self.linear else f"q{q_len} kv{kv_len}"
        words = [self.name or f"b{len(self.rows)} {lengths}"]
        if not self.linear:
            words.append(f"page{self.page_size}" if self.page_size else "ragged")
        words += [f"top{self.topk}"] if self.topk else []
        words += [self.kv_dtype] if self.kv_dtype != "same" else []
        words += ["tree"] if self.tree else []
        words += ["bounded"] if self.lower_bound is not None else []
        words += [f"h{self.heads[0]}"] if self.work.startswith(("mla", "sparse")) and self.heads[0] != 128 else []
        return " ".join(words)

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return sum(q for q, _ in self.rows)

    @property
    def num_kv_tokens(self) -> int:
        """KV tokens of all rows."""
        return sum(kv for _, kv in self.rows)

    @property
    def flops(self) -> float:
        """Floating-point operations that must be done: two for each number of a key a query sees, and of its value.

        A token of a recurrence reads its state, changes it and reads it again: six for each number of the state. A
        tree is counted as the chain.
        """
        if self.linear:
            return 6.0 * self.num_tokens * self.heads[1] * self.dims[0] * self.dims[1]
        return 2.0 * sum(map(self._pairs, self.rows)) * self.heads[0] * sum(self.dims)

    @property
    def bytes(self) -> float:
        """Bytes that must move: the keys and values that are seen once, queries in, outputs out; in a recurrence
        tokens and gates in, outputs out, and states of fp32, which a prefill here only writes."""
        if self.linear:
            return self._linear_bytes
        ends = 2.0 * self.num_tokens * self.heads[0] * sum(self.dims)
        return ends + self._token_bytes * sum(min(kv, q * self.topk) if self.topk else kv for q, kv in self.rows)

    def _pairs(self, row: tuple[int, int]) -> float:
        q_len, kv_len = row
        if self.topk:
            return float(sum(min(self.topk, kv_len - q_len + at + 1) for at in range(q_len)))
        return q_len * (kv_len - q_len) + q_len * (q_len + 1) / 2

    @property
    def _token_bytes(self) -> int:
        if self.kv_dtype in _PACKED:
            return _PACKED[self.kv_dtype]
        numbers = self.dims[0] if family_of(self) in LATENT else sum(self.dims)
        return numbers * self.heads[1] * _NUMBER[self.kv_dtype]

    @property
    def raw_gates(self) -> bool:
        """Whether an engine hands a recurrence raw gates of the tokens' dtype, and not computed ones of fp32."""
        return self.phase == "decode" or self.lower_bound is not None

    @property
    def _linear_bytes(self) -> float:
        (keys, values), (dk, dv) = self.heads, self.dims
        decays = values * dk if self.work.startswith("kda") else values
        gates = (decays + values) * (2 if self.raw_gates else 4)
        state = len(self.rows) * values * dk * dv * 4 * (2 if self.phase == "decode" else 1)
        return float(self.num_tokens * ((2 * keys * dk + 2 * values * dv) * 2 + gates) + state)


def family_of(shape: Shape) -> Family:
    """The attention family a kernel's row must serve."""
    return _FAMILIES.get(shape.work.partition("_")[0], "mha")


def case_of(shape: Shape) -> AttentionCase:
    """The attention shape as the conformance kit describes a step: its model is what is resolved."""
    known = {
        "name": shape.label,
        "phase": shape.phase,
        "rows": shape.rows,
        "family": family_of(shape),
        "heads": shape.heads,
        "dims": shape.dims,
        # a plan has a page size even where a step has no cache
        "page_size": shape.page_size or 64,
        "dtype": "bf16",
        "kv_dtype": shape.kv_dtype,
        "layout": shape.kv_dtype if shape.kv_dtype in _PACKED else "rows",
        "tree": "qlen" if shape.tree else None,
        "new": "" if shape.page_size else "all",
    }
    if family_of(shape) == "sparse_mla":
        return SparseCase(**known, topk=shape.topk)  # type: ignore[arg-type]
    return AttentionCase(**known)  # type: ignore[arg-type]


def linear_case_of(shape: Shape) -> LinearCase:
    """The recurrence as the conformance kit describes a step."""
    return LinearCase(
        name=shape.label,
        phase=shape.phase,
        q_lens=tuple(q for q, _ in shape.rows),
        family="gdn" if family_of(shape) == "gdn" else "kda",
        heads=shape.heads,
        dims=shape.dims,
        dtype="bf16",
        raw_gates=shape.raw_gates,
        lower_bound=shape.lower_bound,
    )
