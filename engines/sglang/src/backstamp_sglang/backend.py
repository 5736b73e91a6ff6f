"""The layer side: SGLang's calls of one attention backend, to `plan` and `forward` of what was built.

In: a model runner whose weights and caches are ready, then forward batches and layers' tensors. Out: attention outputs.
SGLang's own pool writes keys and values; a kernel reads them through views, without a copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from backstamp.attention import AttentionBackend as ContractBackend
from backstamp.attention import Batch, LayerSpec
from backstamp.construction import RunnerShape
from backstamp.declarations import Phase
from backstamp.errors import Refused
from backstamp_sglang.layers import CacheViews, check_pool, linear_spec_of, spec_of
from backstamp_sglang.runner import Serving, runner_of
from backstamp_sglang.step import Slots, batch_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor

__all__ = ["BackstampAttnBackend", "Part", "Planned"]


class Part(NamedTuple):
    """What serves some layers in one phase, and whether their tokens lie in slots of the sliding layers' own."""

    serving: Serving
    in_window: bool


class Planned(NamedTuple):
    """One part's share of a step."""

    batch: Batch
    state: object


class BackstampAttnBackend(AttentionBackend):
    """Both halves of one runner's plan; of a pair SGLang holds two, and calls each for its own half."""

    # kernels may plan on host lengths
    needs_cpu_seq_lens = True

    def __init__(self, model_runner: ModelRunner) -> None:
        """Build what the plan says, for the layers of the loaded model.

        Raises:
            BackstampError: as `runner_of` and `build`. Refused: a layer or a cache that no kernel is handed.
        """
        super().__init__()
        self.runner = runner_of(model_runner)
        # SGLang's wrappers of a backend read these off it
        pool = self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool, self.max_context_len = (
            model_runner.req_to_token_pool,
            model_runner.model_config.context_len,
        )
        self._windowed = pool if isinstance(pool, SWAKVPool) else None
        if self._windowed is not None and resolved_view(model_runner.server_args).speculative_algorithm is not None:
            needed, found = "one kind of slots beside a draft", "slots of sliding layers apart"
            raise Refused("backstamp-sglang", needed=needed, found=found, fix="Add --disable-hybrid-swa-memory")
        check_pool(pool)
        layers = list(model_runner.model.modules())
        self._specs = {layer.layer_id: spec_of(layer) for layer in layers if isinstance(layer, RadixAttention)}
        linear = [linear_spec_of(layer) for layer in layers if isinstance(layer, RadixLinearAttention)]
        self.runner.build(_shape_of(model_runner, (*self._specs.values(), *linear)))
        self._table = self.req_to_token_pool.req_to_token
        self._page_size = model_runner.page_size
        self._caches = CacheViews(pool, self._page_size)
        planned = [row.phase for row in self.runner.plan.running]
        self.parts = {phase: {layer_id: self._part(phase, layer_id) for layer_id in self._specs} for phase in planned}
        self._step: dict[Part, Planned] = {}
        self._window_loc: Tensor | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan one step: once for every kernel and kind of slots that its layers have.

        Raises:
            UnsupportedBatch: the step asks for what a kernel does not declare.
        """
        phase = self.phase_of(forward_batch.forward_mode)
        self._window_loc, self._step = None, {}
        # a step of no rows has nothing to attend, and a draft's loop plans its steps itself
        if forward_batch.batch_size == 0 or phase == "draft_decode":
            return
        self._step = {part: self._plan(part, forward_batch, phase) for part in set(self.parts[phase].values())}
        if self._windowed is not None:
            self._window_loc = self._windowed.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        """Attend chunks of prompts, with decode rows SGLang mixes in, or drafted tokens: `[T, Hq * Dv]`."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, others)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: object,
    ) -> Tensor:
        """Attend one token a row: `[B, Hq * Dv]`."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks, others)

    def support_triton(self) -> bool:
        """Whether SGLang may prepare a step with Triton kernels of its own: not on a CPU."""
        return bool(self._table.is_cuda)

    def phase_of(self, mode: ForwardMode) -> Phase:
        """The phase that serves one of SGLang's forward modes, in a runner of this role."""
        if mode.is_decode_or_idle():
            return "draft_decode" if self.runner.plan.role == "draft" else "decode"
        if mode.is_draft_extend_v2():
            return "draft_extend"
        return "verify" if mode.is_target_verify() else "prefill"

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: Tensor | None,
        others: dict[str, object],
    ) -> Tensor:
        given = sorted(name for name, value in others.items() if value is not None and value is not False)
        if given:
            who = f"backstamp-sglang, layer {layer.layer_id}"
            raise Refused(who, needed="queries, keys, values and sinks", found=", ".join(given))
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=self._window_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        part = self.parts[self.phase_of(forward_batch.forward_mode)][layer.layer_id]
        planned, spec = self._step[part], self._spec(layer.layer_id, sinks)
        tokens = planned.batch.num_tokens
        out = q.new_empty(len(q), spec.num_qo_heads, spec.v_head_dim)
        # what SGLang pads a step with must stay finite
        out[tokens:].zero_()
        queries = q.reshape(len(q), spec.num_qo_heads, spec.head_dim)[:tokens]
        cache = self._caches.of(layer.layer_id)
        self._kernel(part).forward(queries, cache, spec, planned.state, out=out[:tokens])
        return out.flatten(1)

    def _kernel(self, part: Part) -> ContractBackend[object]:
        """What runs; one step of a draft's loop has its own."""
        return part.serving.backend

    def _spec(self, layer_id: int, sinks: Tensor | None) -> LayerSpec:
        """A layer with the sinks its model hands over at each call."""
        spec = self._specs[layer_id]
        if sinks is not spec.sinks:
            spec = self._specs[layer_id] = replace(spec, sinks=sinks)
        return spec

    def _part(self, phase: Phase, layer_id: int) -> Part:
        in_window = self._windowed is not None and self._windowed.layers_mapping[layer_id][1]
        return Part(self.runner.serving(phase, layer_id), in_window)

    def _plan(self, part: Part, forward_batch: ForwardBatch, phase: Phase) -> Planned:
        batch = batch_of(forward_batch, phase, self._slots(part), part.serving.index_forms)
        return Planned(batch, part.serving.backend.plan(batch))

    def _slots(self, part: Part) -> Slots:
        to_window = self._windowed.full_to_swa_index_mapping if self._windowed and part.in_window else None
        return Slots(self._table, self._page_size, to_window)


def _shape_of(model_runner: ModelRunner, layers: tuple[LayerSpec, ...]) -> RunnerShape:
    view, max_len = resolved_view(model_runner.server_args), model_runner.model_config.context_len
    requests, chunk = model_runner.req_to_token_pool.size, view.chunked_prefill_size or 0
    # a draft's loop has a row for each of its chains
    rows = requests * (view.speculative_eagle_topk or 1)
    return RunnerShape(
        device=str(model_runner.device),
        layers=layers,
        max_rows=rows,
        # a whole prompt where none is cut, and beside it rows that decode, or have drafted tokens to verify
        max_tokens=(chunk if chunk > 0 else max(view.max_prefill_tokens, max_len))
        + max(rows, requests * (view.speculative_num_draft_tokens or 1)),
        max_pages=rows * -(-max_len // model_runner.page_size),
        max_kv_len=max_len,
    )
