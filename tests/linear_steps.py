"""Steps of linear attention that every kernel is held to, built objects to run them, and what is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from backstamp.attention import LinearBackend
from backstamp.declarations import Offer
from backstamp.factories import BuildRequest, Built
from backstamp.linear import LinearAttnBackends
from backstamp.testing.linear_batches import SMALL_LINEAR_LAYER, MadeLinearStep, make_linear_step
from backstamp.testing.linear_reference import LinearAnswer, reference_linear, relative_error

#: Two branches under the first token, and a second root.
TREE = [[-1, 0, 0, 1, 2], [-1, -1, 0], [], [-1, 0]]

#: What each step has, by name; `family` and `order` are given beside.
PREFILL: dict[str, dict[str, Any]] = {
    "ragged": {"q_lens": [5, 1, 9, 3], "has_state": [True, True, False, True]},
    "empty-and-pads": {"q_lens": [4, 0, 2, 3, 0], "pads": [3], "has_state": [False, True, True, True, False]},
    "one-row": {"q_lens": [7], "has_state": [False]},
    "pad-tokens": {"q_lens": [3, 6], "pad_tokens": 4, "raw_gates": False},
}
DECODE: dict[str, dict[str, Any]] = {
    "rows": {"q_lens": [1] * 5},
    "pads": {"q_lens": [1] * 4, "pads": [1, 3]},
    "empty-rows": {"q_lens": [1, 0, 1, 0, 1], "pad_tokens": 2},
    "computed": {"q_lens": [1, 1, 1], "raw_gates": False, "pads": [2]},
}
CHAIN: dict[str, dict[str, Any]] = {
    "kept": {"q_lens": [3, 3, 3], "pads": [1]},
    "slots": {"q_lens": [4, 4, 4], "form": "slot_table", "num_accepted": [1, 3, 2], "pads": [2]},
}
RAGGED_VERIFY: dict[str, dict[str, Any]] = {
    "ragged-kept": {"q_lens": [3, 1, 0, 4], "raw_gates": False},
    "ragged-slots": {"q_lens": [2, 4, 1], "form": "slot_table", "num_accepted": [2, 1, 4]},
    "tree": {"q_lens": [5, 3, 0, 2], "parents": TREE},
}

#: Counts that are a pad's: none accepted, and more than the row has slots; both rows have slots for their tokens.
UNCOUNTED: dict[str, Any] = {"q_lens": [3, 3, 3], "form": "slot_table", "num_accepted": [2, 0, 4]}


def step(phase: str, of: dict[str, Any], **more: Any) -> MadeLinearStep:
    """One of the steps above."""
    return make_linear_step(**{"phase": phase, **of, **more})


def request_for(offer: Offer, made: MadeLinearStep, dtype: str = "fp32", **changes: Any) -> BuildRequest:
    """What construction would hand the factory for this step's layer."""
    fields: dict[str, Any] = {
        "kernel": offer.kernel,
        "offer": offer,
        "family": offer.family,
        "phases": ("prefill", "decode", "verify"),
        "role": "target",
        "layers": (made.layer,),
        "dtype": dtype,
        "kv_dtype": "same",
        "page_size": 1,
        "layout": made.pool.order,
        "device": str(made.q.device),
        "max_rows": 64,
        "max_tokens": 4096,
        "max_pages": 1,
        "max_kv_len": 4096,
        "linear_attn_backends": LinearAttnBackends(offer.kernel, offer.kernel, offer.kernel),
    }
    return BuildRequest(**{**fields, **changes})


def run(factory: Callable[[BuildRequest], Built], offer: Offer, made: MadeLinearStep, **changes: Any) -> torch.Tensor:
    """Build, plan and run one step; states are left in its pool."""
    backend: LinearBackend[Any] = factory(request_for(offer, made, **changes)).backend
    state = backend.plan(made.batch)
    return forward(backend, made, state)


def forward(backend: LinearBackend[Any], made: MadeLinearStep, state: Any, **more: Any) -> torch.Tensor:
    """One layer's call with this step's tensors."""
    named = {"pool": made.pool, "slots": made.batch.slots, **more}
    return backend.forward(made.q, made.k, made.v, made.gates, made.layer, state, **named)


def reference(made: MadeLinearStep) -> LinearAnswer:
    """What the step should come to; to be asked before it is run."""
    return reference_linear(made.q, made.k, made.v, made.gates, made.layer, made.batch, made.pool)


def compare(made: MadeLinearStep, out: torch.Tensor, wanted: LinearAnswer) -> float:
    """The worst relative error of outputs of live rows and of every state; what is not compared must be finite."""
    assert bool(out.isfinite().all()), "a pad's output is not finite"
    live = wanted.out.abs().sum((1, 2)) > 0
    errors = [relative_error(out[live], wanted.out[live]), relative_error(made.pool.ssm, wanted.ssm)]
    if wanted.intermediate is not None:
        errors.append(relative_error(made.batch.intermediate, wanted.intermediate))
    return max(errors)


__all__ = [
    "CHAIN",
    "DECODE",
    "PREFILL",
    "RAGGED_VERIFY",
    "SMALL_LINEAR_LAYER",
    "TREE",
    "UNCOUNTED",
    "compare",
    "forward",
    "reference",
    "request_for",
    "run",
    "step",
]
