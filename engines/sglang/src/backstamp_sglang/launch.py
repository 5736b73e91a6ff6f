"""Third step: what the launched process settles before anything is spawned or a weight is read.

In: server arguments that ask for one of our names. Out: a plan nobody refuses; its page size, and graphs switched off,
among SGLang's own settings; and a marker for the processes SGLang spawns. It builds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolved_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from backstamp.plan import Plan
from backstamp_sglang.asked import is_asked, linear_names, names_in
from backstamp_sglang.names import LOG, Marker
from backstamp_sglang.runner import resolve_for

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

__all__ = ["settle_launch"]

_SOURCE = "backstamp_sglang"


def settle_launch(server_args: ServerArgs) -> None:
    """Resolve once here, so that a refusal ends the launch; workers resolve again, on their own machine.

    Raises:
        BackstampError: as `resolve_for`.
    """
    view = resolved_view(server_args)
    plans = []
    if is_asked(view, "target"):
        plans.append(resolve_for(server_args, model_config_of(server_args)))
    if view.speculative_algorithm is not None and is_asked(view, "draft"):
        plans.append(resolve_for(server_args, _draft_config(server_args), "draft"))
    if not plans:
        # a draft's name without a draft: nothing of ours runs
        return
    declare_resolution(server_args, _SOURCE, page_size=plans[0].page_size)
    graphs = view.cuda_graph_config
    for phase in (Phase.DECODE, Phase.PREFILL):
        graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    if graphs != view.cuda_graph_config:
        LOG.warning("CUDA graphs are switched off: Backstamp's steps are not captured in SGLang")
        declare_resolution(server_args, _SOURCE, cuda_graph_config=graphs)
    # pickled with the arguments; a leading underscore is SGLang's own mark for what is no setting
    server_args._backstamp = Marker(names_in(view), bool(linear_names(view)), _plugins_of(plans))


def _plugins_of(plans: Sequence[Plan]) -> tuple[str, ...]:
    phases = [phase for plan in plans for phase in (*plan.running, *plan.running_linear)]
    return tuple(sorted({group.plugin.distribution for phase in phases for group in phase.groups}))


def _draft_config(server_args: ServerArgs) -> ModelConfig:
    """The draft's config: of its own checkpoint, or of the layers its target's carries."""
    view = resolved_view(server_args)
    path, revision = view.speculative_draft_model_path, view.speculative_draft_model_revision
    return ModelConfig.from_server_args(
        server_args,
        model_path=path or view.model_path,
        model_revision=revision if path else view.revision,
        is_draft_model=True,
    )
