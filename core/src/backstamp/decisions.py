"""The decisions of an engine that depend on its attention backends, one function for each question.

In: a plan, or a runner built from one, and where a question is about some kernels their names. Out: a `Decision`, yes
or no with its reason, or the value decided. Each asks the half, the phases or the slots it is about; none reads a
field somebody typed, and none answers about no backend. They are asked when a runner starts, not each step: a runner's
stamps are read anew each time.

Source: SGLang #34264, where these read a base field that a launch with one split flag leaves unset; where SGLang 0.5.23
asks each is said with it.

.. versionadded:: 0.2
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from backstamp.construction import RunnerBackends
from backstamp.declarations import Phase
from backstamp.errors import BadInput, Unresolved
from backstamp.forward import phase_named
from backstamp.halves import (
    Asked,
    Decision,
    any_phase_runs,
    both_halves_run,
    half_kernel,
    half_row,
    half_runs,
    kernels_asked,
    main_groups,
    named,
    named_rows,
    no_backend,
    pair,
    plan_of,
)
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan, PhasePlan
from backstamp.sink_choice import SinkChoice, SinkRead, stored_sinks
from backstamp.text import canonical

__all__ = [
    "Decision",
    "DeterministicPrefill",
    "Serving",
    "SinkChoice",
    "SinkRead",
    "any_phase_runs",
    "both_halves_run",
    "deterministic_prefill",
    "floor_applies",
    "half_kernel",
    "half_runs",
    "pair",
    "runs_chunked_prefix_cache",
    "runs_interleaved_rope_kernel",
    "runs_last_location_kernel",
    "runs_overlap_positions_kernel",
    "runs_request_writer_kernel",
    "serving",
    "stored_sinks",
    "takes_backend_inputs",
]


class Serving(NamedTuple):
    """What serves a forward mode: the phase that runs, its kernel, and who decided."""

    phase: Phase
    kernel: str
    reason: str


class DeterministicPrefill(NamedTuple):
    """How a deterministic launch cuts prefill.

    `alignment_tokens` is what chunks are truncated to a multiple of; `split_tiles` are (kernel, tokens): the tile whose
    edges a kernel splits keys at, once for each that unlike layers of one kernel have. A tile of 1 says that any split
    gives the same bits.
    """

    alignment_tokens: int
    split_tiles: tuple[tuple[str, int], ...]
    reason: str


def serving(of: Asked, mode: str, group: int | None = None) -> Serving:
    """What serves a phase or a forward mode, for one group of layers or all of the main model:
    `RunnerBackends.serving_attention_backend` by name, before anything is built.

    Verify follows `speculative_attention_mode`. A draft decodes in its loop and has a draft-extend of its own; a
    target's is run by its prefill half.

    Source: SGLang models/inkling_common/attn.py, `serving_attention_backend`.

    Raises:
        BadInput: an unknown mode, a phase or group this runner never runs, or groups of unlike kernels and none of
        them named. Unresolved: no plan. Unstamped, BuiltMismatch: a runner whose objects are not those of its plan.
    """
    row, asked = _asked_groups(of, mode, group)
    kernels = {item.kernel for item in asked}
    if len(kernels) > 1:
        # a group is asked for by its place among all groups, a tower's too
        found = ", ".join(f"group {at}: {item.kernel}" for at, item in enumerate(row.groups) if item in asked)
        fix = "Ask about one group, or whether all are among some kernels: takes_backend_inputs"
        raise BadInput(f"what serves {mode}", needed="one kernel, or the group asked about", found=found, fix=fix)
    kernel = kernels.pop()
    return Serving(row.phase, kernel, f"{mode} runs {row.phase}: {kernel} ({row.source})")


def _asked_groups(of: Asked, mode: str, group: int | None) -> tuple[PhasePlan, tuple[GroupPlan, ...]]:
    """The phase that serves a mode, and the group asked about, or without one all those of the main model."""
    plan = plan_of(of)
    row = plan.phase(phase_named(mode, plan.role))
    groups = main_groups(row) if group is None else tuple(item for at, item in enumerate(row.groups) if at == group)
    if not groups:
        running = ", ".join(at.phase for at in plan.running)
        found = row.phase if group is None else f"{row.phase}, group {group}"
        raise BadInput(f"{plan.role} of {plan.model}", needed=f"a phase it runs ({running})", found=found)
    return row, groups


def takes_backend_inputs(of: Asked, mode: str, kernels: Collection[str], group: int | None = None) -> Decision:
    """Whether a forward is served by kernels whose own inputs a model assembles: relative bias, score mods, and the
    prologue fused with them. Without a group, all layers of the main model must be.

    Source: SGLang models/inkling_common/attn.py.

    Raises:
        BadInput: an unknown mode, a phase or group this runner never runs. Unresolved, Unstamped, BuiltMismatch: as
        `serving`; no kernels are asked about.
    """
    wanted = kernels_asked(kernels)
    row, groups = _asked_groups(of, mode, group)
    running = dict.fromkeys(item.kernel for item in groups)
    others = [kernel for kernel in running if kernel not in wanted]
    return Decision(not others, f"{mode} runs {row.phase}: {', '.join(others or running)} ({row.source})")


def runs_chunked_prefix_cache(of: Asked, kernels: Collection[str]) -> Decision:
    """Whether prefill reads its cached prefix in chunks; `kernels` are those that can.

    Source: SGLang model_executor/model_runner_components/misc_utils.py, `maybe_disable_chunked_prefix_cache`.

    Raises:
        Unresolved, Unstamped, BuiltMismatch: as `half_runs`.
    """
    return half_runs(of, "prefill", kernels)


def runs_overlap_positions_kernel(of: Asked, kernels: Collection[str]) -> Decision:
    """Whether two-batch overlap computes the positions of an extend in a Triton kernel; `kernels` are the attention
    kernels beside which that runs.

    Source: SGLang batch_overlap/two_batch_overlap.py, `compute_position`.

    Raises:
        Unresolved, Unstamped, BuiltMismatch: as `half_runs`.
    """
    return half_runs(of, "prefill", kernels)


def runs_interleaved_rope_kernel(of: Asked, kernels: Collection[str]) -> Decision:
    """Whether interleaved multimodal rope runs in a Triton kernel, in prefill and in decode; `kernels` as above.

    Source: SGLang layers/rotary_embedding/mrope.py.

    Raises:
        Unresolved, Unstamped, BuiltMismatch: as `half_runs`.
    """
    return both_halves_run(of, kernels)


def runs_request_writer_kernel(of: Asked, kernels: Collection[str]) -> Decision:
    """Whether the request-to-token writer runs in a Triton kernel; `kernels` as above.

    Its one caller is extend, so decode is not asked: the fallback costs several device-to-host syncs a request, and a
    mixed launch keeps the fast path.

    Source: SGLang mem_cache/allocation.py, `write_cache_indices`.

    Raises:
        Unresolved, Unstamped, BuiltMismatch: as `half_runs`.
    """
    return half_runs(of, "prefill", kernels)


def runs_last_location_kernel(of: Asked, kernels: Collection[str]) -> Decision:
    """Whether the speculative allocator looks last locations up in a Triton kernel; `kernels` as above.

    Verify tokens may be served by either half, or by a kernel that was asked for by itself.

    Source: SGLang mem_cache/allocation.py, `get_last_loc`.

    Raises:
        Unresolved, Unstamped, BuiltMismatch: as `half_runs`.
    """
    halves = both_halves_run(of, kernels)
    verify = plan_of(of).phase("verify")
    if not halves or verify.kernel is None:
        return halves
    answer = named("verify", main_groups(verify), kernels_asked(kernels))
    return Decision(answer.yes, f"{halves.reason} and {answer.reason}" if answer else answer.reason)


def deterministic_prefill(of: Asked) -> DeterministicPrefill:
    """Where a deterministic launch may cut prefill: at what every kernel of the prefill half declares, and truncation
    is never left unset.

    Source: SGLang managers/scheduler.py, `init_deterministic_inference_config`, and the split tiles of
    layers/attention/flashinfer_backend.py.

    Raises:
        Unresolved: no plan, no prefill, or a kernel of it declares no alignment. Unstamped, BuiltMismatch: as
        `half_kernel`.
    """
    half_kernel(of, "prefill")
    # layers without a KV cache are not cut
    groups = [group for group in half_row(of, "prefill").groups if group.cached]
    # one kernel may run unlike layers by unlike rows
    tiles = dict.fromkeys((group.kernel, group.alignment_tokens) for group in groups)
    unknown = sorted(group.kernel for group in groups if group.alignment_tokens is None)
    if unknown or not groups:
        raise Unresolved(
            "prefill truncation of a deterministic launch",
            needed="a declared prefill alignment of every kernel of the prefill half",
            found=f"none of {', '.join(dict.fromkeys(unknown))}" if unknown else "no layer with a KV cache",
            fix="Resolve with deterministic=True, which refuses such a kernel",
        )
    split_tiles = tuple((kernel, tokens) for kernel, tokens in tiles if tokens is not None)
    said = ", ".join(f"{kernel} splits at {tokens}" for kernel, tokens in split_tiles)
    return DeterministicPrefill(math.lcm(*(tokens for _, tokens in split_tiles)), split_tiles, f"prefill half: {said}")


def floor_applies(of: Asked | Sequence[Asked], library: str, kernels: Collection[str] = ()) -> Decision:
    """Whether the version floor of a kernel library applies: some phase, layer or component of either slot of any of
    these runners, the draft's among them, runs on it. One alone need not be a list.

    `library` is a distribution, the one on the stamps; `kernels` are more that need it beside their own library.

    Source: SGLang entrypoints/engine.py, the floors of flashinfer_python and sglang-kernel.

    Raises:
        Unresolved: no runner, no library. Unstamped, BuiltMismatch: a runner whose objects are not those of its plan.
    """
    runners = (of,) if isinstance(of, Plan | RunnerBackends) else of
    if not runners or not isinstance(runners, Sequence):
        raise no_backend(runners)
    if not isinstance(library, str) or not library.strip():
        raise no_backend(library)
    also = kernels_asked(kernels) if kernels else frozenset()
    found: dict[str, None] = {}
    for plan in map(plan_of, runners):
        for phase, row in named_rows(plan):
            for group in row.groups:
                own = group.library is not None and canonical(group.library.distribution) == canonical(library)
                if own or group.kernel in also:
                    found[f"{plan.role} {phase} ({group.kernel})"] = None
    return Decision(bool(found), f"{library} runs {', '.join(found)}" if found else f"nothing runs on {library}")
