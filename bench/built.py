"""Every kernel of the catalogue as something to time: resolved for a shape, built by its factory, stamped, planned.

In: a shape, its step and this host. Out: `Candidate`s whose `prepare` answers one call of `forward`; planning, once a
step for all layers, is outside. What a declaration refuses raises its refusal; nothing falls back to another kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, cast

import torch
from packaging.requirements import Requirement
from torch import Tensor

from backstamp.attention import AttentionBackend, LinearBackend
from backstamp.catalogue import Catalogue
from backstamp.construction import RunnerShape, build
from backstamp.declarations import GraphLevel, Offer, Slot
from backstamp.device_check import torch_device
from backstamp.engine import EngineFacts
from backstamp.errors import Refused
from backstamp.host import HostFacts
from backstamp.launch import Requests, make_launch
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp
from linear_checks import resolve_case as resolve_linear
from shapes import Shape, case_of, family_of, linear_case_of
from steps import AttentionStep, LinearStep

__all__ = ["Candidate", "Here", "Ready", "Serving", "candidates", "serve"]

#: Distributions that Triton comes in: what runs over them is our own kernel.
_TRITON: Final = ("triton", "pytorch-triton-rocm", "triton-ascend")
#: What an operator asks of a kernel's insides, by field of `Requests`.
Asks: TypeAlias = Mapping[str, str]
_NOTHING: Final[Asks] = {}
#: Most tokens of a step that a row declared to be a reference is timed at.
_REFERENCE_TOKENS: Final = 1024
#: What an operator asks to have our own kernels inside `dsa`.
_TRITON_INSIDE: Final[Asks] = {"dsa_prefill_backend": "triton", "dsa_decode_backend": "triton"}


class Ready(NamedTuple):
    """One call, and the library it is timed as: "triton" for our own kernels, else a distribution."""

    run: Callable[[], Tensor]
    library: str


class Candidate(NamedTuple):
    """Something to time: `direct` is a library called without us. `prepare` takes the shape's step."""

    kernel: str
    direct: bool
    prepare: Callable[[Any], Ready]


class Serving(NamedTuple):
    """A built, stamped backend over one step: `plan` takes `state` and `capture` as the contract has them, `forward`
    a planned state, and writes `out`."""

    offer: Offer
    library: str
    backend: object
    plan: Callable[..., Any]
    forward: Callable[[Any], Tensor]
    out: Tensor


class Here(NamedTuple):
    """Where kernels are built."""

    host: HostFacts
    catalogue: Catalogue

    @property
    def device(self) -> str:
        """As torch names it."""
        return torch_device(self.host.device)


def candidates(shape: Shape, here: Here) -> Iterator[Candidate]:
    """Every kernel with a row of the shape's family and phase for this kind of device; twice where an operator may ask
    it for our own Triton kernels inside."""
    slot: Slot = "linear" if shape.linear else "attention"
    for (of, kernel), rows in here.catalogue.rows.items():
        offers = [
            row.offer
            for row in rows
            if row.offer.family == family_of(shape)
            and shape.phase in row.offer.phases
            and row.offer.device in (here.host.device, "any")
        ]
        if of != slot or not offers:
            continue
        for name, asks in _ways(kernel, offers):
            yield Candidate(name, False, lambda step, kernel=kernel, asks=asks: _ready(kernel, step, here, asks))  # type: ignore[misc]


def serve(
    kernel: str, step: AttentionStep | LinearStep, here: Here, asks: Asks = _NOTHING, graph: GraphLevel = "never"
) -> Serving:
    """Resolve, build and stamp one kernel for a step.

    Raises:
        BackstampError: it is refused, or the key leads to another kernel on this host.
    """
    if isinstance(step, LinearStep):
        return _serve_linear(kernel, step, here)
    return _serve_attention(kernel, step, here, asks, graph)


def _ways(kernel: str, offers: Sequence[Offer]) -> Iterator[tuple[str, Asks]]:
    yield kernel, _NOTHING
    # where a library has the rows and something of ours may be asked for in its place
    if any(_may_be_ours(offer) for offer in offers):
        yield f"{kernel}, Triton inside", _TRITON_INSIDE


def _ready(kernel: str, step: AttentionStep | LinearStep, here: Here, asks: Asks) -> Ready:
    serving = serve(kernel, step, here, asks)
    if serving.offer.reference and step.shape.num_tokens > _REFERENCE_TOKENS:
        needed = f"at most {_REFERENCE_TOKENS} tokens of a reference, which takes them one by one"
        raise Refused(f"kernel {kernel!r}", needed=needed, found=f"{step.shape.num_tokens}")
    state, forward = serving.plan(), serving.forward
    return Ready(lambda: forward(state), serving.library)


def _may_be_ours(offer: Offer) -> bool:
    """Whether a row over a library takes our own kernels inside where it is asked to."""
    library = _named(Requirement(offer.requires[0]).name) if offer.requires else ""
    return library != "triton" and "triton" in offer.sub_settings.get("dsa_prefill_backend", ())


def _named(distribution: str) -> str:
    return "triton" if distribution in _TRITON else distribution


def _library_of(group: GroupPlan, asks: Asks) -> str:
    """What ran: a plan names the row's first requirement."""
    if asks:
        return "triton"
    return _named(group.library.distribution) if group.library else group.kernel


def _serve_attention(kernel: str, step: AttentionStep, here: Here, asks: Asks, graph: GraphLevel) -> Serving:
    shape, batch, layer = step.shape, step.batch, step.layer
    plan = _resolve(kernel, shape, here, asks, graph)
    group = plan.phase(shape.phase).groups[0]
    if group.kernel != kernel:
        raise Refused(f"key {kernel!r}", needed=f"{kernel} on this host", found=f"{group.kernel}, which is told itself")
    runner = RunnerShape(
        device=here.device,
        layers=(layer,),
        max_rows=batch.num_rows,
        max_tokens=batch.num_tokens,
        max_pages=step.kv.k.shape[0] if step.kv is not None else 1,
        max_kv_len=batch.max_kv_len,
    )
    built = build(plan, runner, here.catalogue).serving_attention_backend(shape.phase)
    assert read_stamp(built).kernel == kernel
    backend = cast("AttentionBackend[object]", built)
    row = here.catalogue.row("attention", group)
    assert row is not None, "the plan was just resolved on this catalogue"
    q, kv, new, indices = step.q, step.kv, step.new, step.indices
    # memory that is just free may hold another kernel's right answer
    out = q.new_full((batch.num_tokens, layer.num_qo_heads, layer.v_head_dim), float("nan"))

    def forward(state: object) -> Tensor:
        return backend.forward(q, kv, layer, state, out=out, new=new, indices=indices)

    planned = partial(backend.plan, batch)
    return Serving(row.offer, _library_of(group, asks), backend, planned, forward, out)


def _resolve(kernel: str, shape: Shape, here: Here, asks: Asks, graph: GraphLevel) -> Plan:
    """The plan that has this kernel in the shape's phase; the reference kernel in the others, where it serves them."""
    case = case_of(shape)
    sparse = family_of(shape) == "sparse_mla"
    asked: dict[str, Any] = {"page_size": case.page_size, **asks}
    if not sparse:
        asked |= {f"{half}_attention_backend": "torch_native" for half in ("prefill", "decode", "verify")}
    asked["attention_backend" if sparse else f"{shape.phase}_attention_backend"] = kernel
    if case.kv_dtype != "same":
        asked["kv_cache_dtype"] = case.kv_dtype
    if shape.phase == "verify":
        asked |= {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
        asked |= {"speculative_topk": 2 if shape.tree else 1}
    engine = EngineFacts(name="bench", graph=graph, prefix_cache=case.new != "all", layouts=frozenset({case.layout}))
    return resolve(make_launch(Requests(**asked)), engine, case.model(), here.host, here.catalogue)


def _serve_linear(kernel: str, step: LinearStep, here: Here) -> Serving:
    case = linear_case_of(step.shape)
    plan, group, offer = resolve_linear(kernel, case, here.host, here.catalogue)
    tokens, rows = step.batch.num_tokens, step.batch.num_rows
    runner = RunnerShape(device=here.device, layers=case.layers(), max_rows=rows, max_tokens=tokens)
    built = build(plan, runner, here.catalogue).serving_linear_backend(case.phase)
    assert read_stamp(built).kernel == kernel
    backend = cast("LinearBackend[object]", built)
    q, k, v, gates, layer, pool = step.q, step.k, step.v, step.gates, step.layer, step.pool
    # as for attention
    slots, out = step.batch.slots, torch.full_like(v, float("nan"))

    def forward(state: object) -> Tensor:
        return backend.forward(q, k, v, gates, layer, state, pool=pool, slots=slots, out=out)

    return Serving(offer, _library_of(group, {}), backend, partial(backend.plan, step.batch), forward, out)
