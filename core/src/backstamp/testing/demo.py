"""The demo: a small decoder served end to end by the backends a plan chose, checked against float64 as it runs.

In: a launch, a model config and this host. Out: a `DemoReport`: plans, stamps read from built objects, tokens of plain
and speculative decoding, and the worst relative error of every phase. It is the main job in one call, and an example
of the order in which an engine makes its calls.

.. versionadded:: 0.1
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from backstamp.attention import AttentionBackend, DraftContainer, LayerSpec, PagedKV
from backstamp.catalogue import Catalogue
from backstamp.construction import RunnerBackends
from backstamp.declarations import Role
from backstamp.draft import DraftBackendFactory
from backstamp.errors import BadInput
from backstamp.host import HostFacts
from backstamp.launch import Launch
from backstamp.model import ModelFacts, model_from_config
from backstamp.plan import Plan
from backstamp.reports import built_report
from backstamp.resolution import resolve
from backstamp.testing.admission import Request
from backstamp.testing.decoder import Decoder, DecoderConfig
from backstamp.testing.kv_pool import KVPool
from backstamp.testing.mini_engine import ENGINE, MAX_ROWS, POOL_TOKENS, MiniEngine, Part, build_backends
from backstamp.testing.runner import Observe, PhaseErrors, Runner
from backstamp.testing.speculative import SpeculativeEngine

__all__ = ["DemoReport", "Generation", "facts_of_decoder", "run_demo"]

#: Ragged on purpose: one token, page boundaries, and more than a chunk.
PROMPT_LENGTHS: Final = (1, 5, 15, 16, 17, 31, 33, 48, 64, 7)
NEW_TOKENS: Final = (24, 16, 20, 24, 12, 24, 8, 24, 16, 24)
LAYERS, DRAFT_LAYERS = 4, 2
#: float32 attention against float64; flash kernels in float32 stay well below it.
ERROR_BOUND: Final = 1e-4


class Generation(NamedTuple):
    """One way of generating: its tokens, and how many a verify step accepted on average (0.0 without verify)."""

    name: str
    tokens: list[list[int]]
    accept_length: float
    seconds: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo did.

    Attributes:
        errors: worst relative error against float64, by role and phase.
        equal: whether every speculative output equals the plain one token for token.
    """

    model: ModelFacts
    target: RunnerBackends
    draft: RunnerBackends
    generations: tuple[Generation, ...]
    errors: Mapping[tuple[Role, str], float]
    error_bound: float

    def as_json(self) -> dict[str, object]:
        """The report for tools: plans with stamps, generations, errors, and whether all of it holds."""
        return {
            "model": self.model.describe(),
            "target": built_report(self.target),
            "draft": built_report(self.draft),
            "generations": [
                {
                    "name": generation.name,
                    "tokens": generation.tokens,
                    "accept_length": generation.accept_length,
                    "seconds": generation.seconds,
                }
                for generation in self.generations
            ],
            "errors": {f"{role} {phase}": error for (role, phase), error in self.errors.items()},
            "error_bound": self.error_bound,
            "equal": self.equal,
            "sound": self.sound,
        }

    @property
    def equal(self) -> bool:
        """Whether every speculative output equals the plain one token for token."""
        plain = self.generations[0].tokens
        return all(generation.tokens == plain for generation in self.generations)

    @property
    def sound(self) -> bool:
        """Whether outputs are equal and every phase stays within the error bound; NaN does not."""
        return self.equal and all(error <= self.error_bound for error in self.errors.values())


def run_demo(
    launch: Launch,
    config: Mapping[str, object],
    host: HostFacts,
    catalogue: Catalogue,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    planned: Callable[[Plan, Plan], None] | None = None,
) -> DemoReport:
    """Resolve, build and serve. `progress(what, done, total)` counts tokens; `planned` sees the plans before any run.

    Raises:
        BackstampError: what cannot be resolved or built; nothing falls back.
    """
    # TF32 would hide a float32 kernel's own error behind the matrix unit's
    torch.backends.cuda.matmul.allow_tf32 = False
    device = f"cuda:{host.device_index}" if host.device in ("cuda", "rocm") else host.device
    shape = DecoderConfig.from_config(config, layers=LAYERS)
    decoder = Decoder(shape, device=device)
    drafter = Decoder.draft_of(decoder, DRAFT_LAYERS)
    model = facts_of_decoder(config, shape)
    draft_model = facts_of_decoder(config, drafter.config)
    target_plan = resolve(launch, ENGINE, model, host, catalogue)
    draft_plan = resolve(launch, ENGINE, draft_model, host, catalogue, role="draft", target=target_plan)
    if planned is not None:
        planned(target_plan, draft_plan)
    for plan in (target_plan, draft_plan):
        _check_one_kernel(plan)
    target, draft = _serve(target_plan, decoder, catalogue), _serve(draft_plan, drafter, catalogue)
    with _one_thread():
        generations = _generate(target, draft, launch, progress)
    errors: dict[tuple[Role, str], float] = {("target", phase): error for phase, error in target.errors.worst.items()}
    errors |= {("draft", phase): error for phase, error in draft.errors.worst.items()}
    return DemoReport(model, target.backends, draft.backends, generations, errors, ERROR_BOUND)


def facts_of_decoder(config: Mapping[str, object], shape: DecoderConfig) -> ModelFacts:
    """Model facts of a scaled-down decoder, read from a config like any model's."""
    windowed = [window + 1 for window in shape.windows if window >= 0]
    scaled: dict[str, object] = {
        **config,
        "dtype": "float32",
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab,
        "num_hidden_layers": len(shape.windows),
        "num_attention_heads": shape.num_qo_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "layer_types": ["full_attention" if window < 0 else "sliding_attention" for window in shape.windows],
        "sliding_window": windowed[0] if windowed else None,
    }
    return model_from_config(scaled)


def _check_one_kernel(plan: Plan) -> None:
    """The speculative engine has one backend a phase: unlike layers on unlike kernels are not what it would run."""
    for row in plan.running:
        kernels = sorted({group.kernel for group in row.groups})
        if len(kernels) > 1:
            raise BadInput(
                f"demo, {plan.role} {row.phase}",
                needed="one kernel for all layers",
                found=", ".join(kernels),
                fix="Ask for a key that serves them all, or leave --layers out",
            )


@dataclass(frozen=True, slots=True)
class _Served:
    runner: Runner
    backends: RunnerBackends
    errors: PhaseErrors


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on many CPU threads than on one, ten times so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _serve(plan: Plan, decoder: Decoder, catalogue: Catalogue) -> _Served:
    """Build a plan's backends and put them behind a decoder and a cache of the speculative engine."""
    backends, errors = build_backends(plan, decoder, catalogue), PhaseErrors()
    pool = KVPool.for_layers(decoder.layer_specs, POOL_TOKENS // plan.page_size, plan.page_size, device=decoder.device)
    runner = Runner(decoder=decoder, pool=pool, backends=_Phases(backends), observe=errors)
    return _Served(runner, backends, errors)


@dataclass(slots=True)
class _Watched(MiniEngine):
    """The mini engine, each call compared with float64 and each token counted."""

    observe: Observe = field(kw_only=True)
    count: Callable[[int], None] = field(kw_only=True)

    def step(self, running: Sequence[Request]) -> None:
        before = sum(len(request.tokens) for request in running)
        MiniEngine.step(self, running)
        self.count(sum(len(request.tokens) for request in running) - before)

    def attend(self, part: Part, layer: LayerSpec, q: Tensor, kv: PagedKV, out: Tensor) -> None:
        MiniEngine.attend(self, part, layer, q, kv, out)
        self.observe(part.batch.phase, layer, q, kv, part.batch, out)


@dataclass(frozen=True, slots=True)
class _Phases:
    """Answers the engine's one question with the stamped object itself."""

    backends: RunnerBackends

    def serving_attention_backend(self, phase: str) -> AttentionBackend[object]:
        return cast("AttentionBackend[object]", self.backends.serving_attention_backend(phase))


def _generate(
    target: _Served, draft: _Served, launch: Launch, progress: Callable[[str, int, int], None] | None
) -> tuple[Generation, ...]:
    """Plain decoding, then a chain, then a tree where the launch asks for branches."""
    draw = torch.Generator().manual_seed(7)
    vocab = target.runner.decoder.config.vocab
    prompts = [torch.randint(vocab, (length,), generator=draw).tolist() for length in PROMPT_LENGTHS]
    factory = DraftBackendFactory(draft.backends)
    container = cast("DraftContainer[object] | None", factory.create_decode_backend())
    extend = cast("AttentionBackend[object]", factory.create_draft_extend_backend())
    ways = [("plain", 0), ("chain", 1)] + ([("tree", launch.speculative_topk)] if launch.speculative_topk > 1 else [])
    generations = []
    for name, topk in ways:
        count = _counter(name, progress)
        begin = time.perf_counter()
        if topk == 0:
            engine = _Watched(target.runner.decoder, target.backends, observe=target.errors, count=count)
            tokens, accepted = engine.generate(prompts, NEW_TOKENS), 0.0
        else:
            speculative = SpeculativeEngine(
                target.runner,
                draft.runner,
                container,
                extend,
                num_steps=launch.speculative_num_steps,
                topk=topk,
                max_rows=MAX_ROWS,
                progress=count,
            )
            tokens, accepted = speculative.generate(prompts, NEW_TOKENS)
        generations.append(Generation(name, tokens, accepted, time.perf_counter() - begin))
    return tuple(generations)


def _counter(name: str, progress: Callable[[str, int, int], None] | None) -> Callable[[int], None]:
    done = 0

    def count(produced: int) -> None:
        nonlocal done
        done += produced
        if progress is not None:
            progress(name, min(done, sum(NEW_TOKENS)), sum(NEW_TOKENS))

    return count
