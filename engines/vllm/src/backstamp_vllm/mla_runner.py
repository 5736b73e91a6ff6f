"""One plan of MLA prefill for each model vLLM runs, and the backend built from it.

In: a `VllmConfig` whose `mla_prefill_backend` is one of our names. Out: a plan of prefill alone, told in vLLM's log
before weights load, and a stamped backend. Decode over the latent cache is vLLM's: no kernel is chosen for it here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import vllm
import vllm.envs
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.platforms import current_platform

from backstamp.attention import AttentionBackend, LayerSpec
from backstamp.catalogue import Row
from backstamp.construction import RunnerShape, build
from backstamp.declarations import Family, Offer
from backstamp.engine import EngineFacts
from backstamp.errors import Refused
from backstamp.factory_loading import load_factory
from backstamp.hostfit import HostRow
from backstamp.launch import Requests, make_launch
from backstamp.model import LayerFacts, ModelFacts, group_layers, model_from_config
from backstamp.plan import Plan
from backstamp.plan_rows import not_run
from backstamp.row_checks import DTYPE_NAMES
from backstamp.telling import tell_phases, tell_stamps, tell_warnings
from backstamp_vllm.living import Living
from backstamp_vllm.names import LOG, asked_of_prefill, catalogue_here
from backstamp_vllm.runner import host_here, kernels_behind, resolve_asked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
    from vllm.v1.attention.backend import MLAAttentionImpl

__all__ = ["BuiltPrefill", "PrefillRunner", "prefill_offers", "prefill_runner_of"]


class BuiltPrefill(NamedTuple):
    """A built kernel, and the layer it was built for."""

    layer: LayerSpec
    backend: AttentionBackend[object]


class PrefillRunner:
    """One model's plan of MLA prefill and the backend built from it, once for all its layers: they are alike."""

    def __init__(self, config: VllmConfig) -> None:
        self.config, self.name = config, config.attention_config.mla_prefill_backend.name
        # then vLLM attends prompts in parts, each without a causal rule, and merges them by LSE
        self.in_parts = bool(
            config.scheduler_config.enable_chunked_prefill or config.cache_config.enable_prefix_caching
        )
        self.plan = self._resolve()
        (group,) = self.plan.phase("prefill").groups
        self._layers = group.layers
        row = catalogue_here().row("attention", group)
        assert row is not None, "resolve found the row"
        self._check_row(row)
        # a kernel library that does not import is told now, not after minutes of loading weights
        load_factory(row, catalogue_here())
        self.offer = row.offer
        self._built: dict[tuple[int, float, str], BuiltPrefill] = {}

    def check_layers(self) -> None:
        """Hold the MLA layers vLLM has made so far against the plan: a prompt's attention may be no backend's.

        Raises:
            Refused: a layer whose implementation prefills by itself.
        """
        for name, layer in self.config.compilation_config.static_forward_context.items():
            if isinstance(layer, MLAAttention) and _prefills_by_itself(layer.impl):
                raise self._refused(
                    f"an MLA backend around it that asks it for every prompt, in {name}",
                    type(layer.impl).__name__,
                    "Add --attention-backend with one that does: CPU_MLA on the CPU, TRITON_MLA elsewhere",
                )

    def tell_plan(self) -> None:
        """Say in vLLM's log what will run and why, once for all layers."""
        tell_phases(LOG, self.plan, ", MLA prefill", self.plan.running)
        if current_platform.is_cpu():
            LOG.info("Backstamp answers for CPU in MLA prefill: %s was asked for, vLLM's CPU knows no other", self.name)
        tell_warnings(LOG, self.plan)

    def build(self, num_heads: int, scale: float, dims: tuple[int, int], device: str) -> BuiltPrefill:
        """What runs the layers of this many heads on this rank, and their spec."""
        key = (num_heads, scale, device)
        if key not in self._built:
            scheduler, max_len = self.config.scheduler_config, self.config.model_config.max_model_len
            layer = LayerSpec(
                layer_id=self._layers[0],
                num_qo_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=dims[0],
                v_head_dim=dims[1],
                scale=scale,
            )
            shape = RunnerShape(
                device=device,
                layers=(layer,),
                max_rows=scheduler.max_num_seqs,
                max_tokens=scheduler.max_num_batched_tokens,
                max_pages=1,
                max_kv_len=max_len,
            )
            backends = build(self.plan, shape, catalogue_here())
            tell_stamps(LOG, backends.objects.values(), "keys in no cache")
            backend = cast("AttentionBackend[object]", backends.serving_attention_backend("prefill"))
            self._built[key] = BuiltPrefill(layer, backend)
        return self._built[key]

    def _resolve(self) -> Plan:
        asked = asked_of_prefill(self.name)
        requests = Requests(
            prefill_attention_backend=asked.key,
            tp_size=self.config.parallel_config.tensor_parallel_size,
            deterministic=vllm.envs.VLLM_BATCH_INVARIANT or None,
        )
        engine = EngineFacts(
            name=f"vllm {vllm.__version__}, MLA prefill",
            kv_forms=frozenset({"ragged"}),
            inputs=frozenset({"host_lens"}),
            # keys of earlier tokens come as parts of their own
            prefix_cache=False,
            components=frozenset({"main"}),
        )
        plan = resolve_asked(asked, make_launch(requests), engine, self._model(asked.key))
        return replace(plan, phases=tuple(row if row.phase == "prefill" else not_run(row.phase) for row in plan.phases))

    def _model(self, key: str | None) -> ModelFacts:
        """The model's MLA layers before absorption: as many key heads as query heads."""
        config = self.config.model_config
        dtype = DTYPE_NAMES.get(str(config.dtype), str(config.dtype))
        facts = model_from_config(config.hf_config.to_dict(), f"model config {config.model}", dtype)
        family = _family_of(key)

        def unfolded(mixer: LayerFacts) -> LayerFacts:
            assert mixer.ragged_dims is not None, "every MLA layer has them"
            head_dim, v_head_dim = mixer.ragged_dims
            heads = mixer.num_qo_heads
            return replace(
                mixer,
                family=family,
                num_kv_heads=heads,
                head_dim=head_dim,
                v_head_dim=v_head_dim,
                causal=not self.in_parts,
            )

        found = sorted({mixer.family for mixers in facts.layers for mixer in mixers} - {"mla"} - {"kda"})
        layers = tuple(tuple(unfolded(each) for each in mixers if each.family == "mla") for mixers in facts.layers)
        groups = group_layers(layers)
        if found or len(groups) != 1:
            what = f"layers of family {', '.join(found)}" if found else f"{len(groups)} kinds of MLA layers"
            raise self._refused("MLA layers, all alike", what)
        return replace(facts, layers=layers, groups=groups, unread=())

    def _check_row(self, row: Row) -> None:
        """What the resolver is not asked."""
        if self.in_parts and "lse" not in row.offer.features:
            found = "a row without LSE, and a launch with chunked prefill or prefix caching"
            raise self._refused("LSE, by which parts of a prompt are merged", found)

    def _refused(self, needed: str, found: str, fix: str = "Ask for one of vLLM's own backends") -> Refused:
        return Refused(f"backstamp-vllm, MLA prefill backend {self.name}", needed=needed, found=found, fix=fix)


def prefill_runner_of(config: VllmConfig) -> PrefillRunner:
    """The runner of a config; its backends keep it alive.

    Raises:
        BackstampError: as `resolve`.
    """
    return _runners.of(config)


def prefill_offers(name: str) -> tuple[Offer, ...]:
    """The rows a name stands for: that of the plan it was last asked for, else all its key has on this host."""
    runner = _runners.named(name)
    if runner is not None:
        return (runner.offer,)
    key = asked_of_prefill(name).key
    family = _family_of(key)
    return tuple(row.offer for row in _ragged_rows(key) if row.offer.family == family and not row.refusals)


def _prefills_by_itself(impl: MLAAttentionImpl[MLACommonMetadata]) -> bool:
    """Whether vLLM's common way to a prefill backend is replaced: AMX's always, AITER's for quantised caches alone.

    Source: `AMXMLAImpl.forward_mha`, `AiterMLAImpl.forward_mha`, vllm 0.32.
    """
    if type(impl).forward_mha is MLACommonImpl.forward_mha:
        return False
    # what AITER's falls back to vLLM's by; one without it never does
    return bool(getattr(impl, "_fp8_prefill_enabled", True))


def _family_of(key: str | None) -> Family:
    """MLA where the key declares MLA prefill over keys in no cache, else MHA, which unfolded MLA is."""
    return "mla" if any(row.offer.family == "mla" for row in _ragged_rows(key)) else "mha"


def _ragged_rows(key: str | None) -> list[HostRow]:
    """The key's rows of prefill over keys in no cache, those that this host refuses too."""
    kernels = kernels_behind(key)
    return [
        row
        for row in host_here().slots["attention"].rows
        if row.name in kernels and "ragged" in row.offer.kv_forms and "prefill" in row.offer.phases
    ]


_runners: Final = Living(PrefillRunner)
