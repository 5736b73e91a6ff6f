"""The flags every resolving command shares, written once.

In: parsed flags. Out: the library's `Launch`, `EngineFacts`, `ModelFacts` and `HostFacts`. A command takes one
parameter annotated `Flags`; `with_flags` shows typer its fields as the command's own options.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_type_hints

import typer

from backstamp.declarations import Role
from backstamp.engine import EngineFacts, load_engine
from backstamp.errors import BadInput
from backstamp.host import HostFacts, load_host, this_host
from backstamp.launch import Launch, Requests, make_launch
from backstamp.lock import lock_from_json, locked_distributions
from backstamp.measurements import Machine, Measurements, Workload, workload_of
from backstamp.model import ModelFacts, default_model, load_model
from backstamp.policy import Policy
from backstamp.records import read_record
from backstamp.tune_record import default_place, load_measurements

__all__ = ["TUNED", "AsJson", "Flags", "with_flags"]

#: What `--measurements` calls this machine's record in its default place.
TUNED = "tuned"

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for tools.")]

_KEY = "Backends by phase"
_SUB = "Linear and sparse backends"
_SPEC = "Speculation"
_CACHE = "Cache and launch"
_POLICY = "Policy"
_WHAT = "What to resolve for"


def _key(flag: str, text: str, panel: str = _KEY) -> object:
    return typer.Option(flag, metavar="KEY", help=text, rich_help_panel=panel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """One launch as the command line spells it."""

    attention_backend: Annotated[str | None, _key("--attention-backend", "Both halves.")] = None
    prefill_attention_backend: Annotated[str | None, _key("--prefill-attention-backend", "Prefill half.")] = None
    decode_attention_backend: Annotated[str | None, _key("--decode-attention-backend", "Decode half.")] = None
    verify_attention_backend: Annotated[str | None, _key("--verify-attention-backend", "Verify phase.")] = None
    draft_attention_backend: Annotated[str | None, _key("--draft-attention-backend", "Every draft phase.")] = None
    linear_attn_backend: Annotated[str | None, _key("--linear-attn-backend", "Linear slot.", _SUB)] = None
    linear_attn_prefill_backend: Annotated[str | None, _key("--linear-attn-prefill-backend", "Its prefill.", _SUB)] = (
        None
    )
    linear_attn_decode_backend: Annotated[str | None, _key("--linear-attn-decode-backend", "Its decode.", _SUB)] = None
    linear_attn_verify_backend: Annotated[str | None, _key("--linear-attn-verify-backend", "Its verify.", _SUB)] = None
    dsa_prefill_backend: Annotated[str | None, _key("--dsa-prefill-backend", "Kernel inside dsa, prefill.", _SUB)] = (
        None
    )
    dsa_decode_backend: Annotated[str | None, _key("--dsa-decode-backend", "Kernel inside dsa, decode.", _SUB)] = None
    seed_dsa_topk_from_draft_extend: Annotated[
        bool | None,
        typer.Option(
            "--seed-dsa-topk-from-draft-extend", help="Drafts of dsa take draft extend's keys.", rich_help_panel=_SUB
        ),
    ] = None
    speculative_algorithm: Annotated[
        str | None, typer.Option(help="Any name switches speculation on.", rich_help_panel=_SPEC, metavar="NAME")
    ] = None
    speculative_attention_mode: Annotated[
        str | None, typer.Option(help="Half that verifies: prefill or decode.", rich_help_panel=_SPEC, metavar="HALF")
    ] = None
    speculative_num_steps: Annotated[int | None, typer.Option(help="Draft steps.", rich_help_panel=_SPEC)] = None
    speculative_topk: Annotated[int | None, typer.Option(help="Branches a step.", rich_help_panel=_SPEC)] = None
    page_size: Annotated[int | None, typer.Option(help="KV page size in tokens.", rich_help_panel=_CACHE)] = None
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto, bf16, fp8_e4m3 ...", rich_help_panel=_CACHE)] = None
    chunked_prefill_size: Annotated[
        int | None, typer.Option(help="Prefill chunk in tokens, -1 off.", rich_help_panel=_CACHE)
    ] = None
    deterministic: Annotated[
        bool | None, typer.Option("--deterministic", help="Same bits in any batch.", rich_help_panel=_CACHE)
    ] = None
    tp_size: Annotated[int | None, typer.Option(help="Tensor-parallel size.", rich_help_panel=_CACHE)] = None
    dcp_size: Annotated[int | None, typer.Option(help="Decode-context-parallel size.", rich_help_panel=_CACHE)] = None
    training: Annotated[
        bool | None, typer.Option("--training", help="Gradients are needed.", rich_help_panel=_CACHE)
    ] = None
    component_backend: Annotated[
        list[str] | None, typer.Option(help="Of one component; repeatable.", metavar="NAME=KEY", rich_help_panel=_KEY)
    ] = None
    feature: Annotated[
        list[str] | None, typer.Option(help="Switch one; repeatable.", metavar="NAME=on|off", rich_help_panel=_CACHE)
    ] = None
    bypass: Annotated[
        list[str] | None,
        typer.Option(help="Check to skip, e.g. companion; stamped.", metavar="CODE", rich_help_panel=_POLICY),
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Lost, changed or failed choices are errors.", rich_help_panel=_POLICY)
    ] = False
    layers: Annotated[
        Literal["auto", "uniform", "per_layer"], typer.Option(help="Unlike layers.", rich_help_panel=_POLICY)
    ] = "auto"
    keep_graph: Annotated[
        bool, typer.Option("--keep-graph", help="auto keeps the CUDA-graph level.", rich_help_panel=_POLICY)
    ] = False
    allow: Annotated[
        list[str] | None, typer.Option(help="auto prefers these.", metavar="DISTRIBUTION", rich_help_panel=_POLICY)
    ] = None
    allow_lock: Annotated[
        str | None, typer.Option(help="auto prefers what this lock has.", metavar="FILE", rich_help_panel=_POLICY)
    ] = None
    deny: Annotated[
        list[str] | None, typer.Option(help="auto never takes these.", metavar="DISTRIBUTION", rich_help_panel=_POLICY)
    ] = None
    duplicate: Annotated[
        list[str] | None,
        typer.Option(help="Whose name it is.", metavar="DISTRIBUTION:NAME", rich_help_panel=_POLICY),
    ] = None
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="An old setting as found, beside the environment's.", metavar="NAME=VALUE", rich_help_panel=_POLICY
        ),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="cuda, rocm, npu, musa, xpu or cpu, of this machine.", rich_help_panel=_WHAT)
    ] = None
    engine: Annotated[str | None, typer.Option(help="Engine facts.", rich_help_panel=_WHAT, metavar="FILE")] = None
    model: Annotated[
        str | None,
        typer.Option(help="Model config.json; default a Llama 3.1 8B.", rich_help_panel=_WHAT, metavar="FILE"),
    ] = None
    draft_model: Annotated[
        str | None, typer.Option(help="Draft config.json.", rich_help_panel=_WHAT, metavar="FILE")
    ] = None
    measurements: Annotated[
        str | None,
        typer.Option(
            help="Times auto ranks by: a file, or tuned, this machine's own.", metavar="FILE", rich_help_panel=_WHAT
        ),
    ] = None
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Load whose times count; repeatable.", metavar="PHASE=ROWSxTOKENS", rich_help_panel=_WHAT),
    ] = None
    role: Annotated[Literal["target", "draft"], typer.Option(help="Runner.", rich_help_panel=_WHAT)] = "target"
    host: Annotated[
        str | None,
        typer.Option(help="Named or recorded host; default this machine.", rich_help_panel=_WHAT, metavar="HOST"),
    ] = None

    def requests(self) -> Requests:
        """What these flags ask for."""
        asked = {name: getattr(self, name) for name in _PLAIN}
        asked["component_backends"] = _pairs("--component-backend", self.component_backend, "NAME=KEY") or None
        asked["features"] = _switches(self.feature) or None
        return Requests(**asked)

    def launch(self, role: Role | None = None) -> Launch:
        """The launch these flags ask for; a draft model switches speculation on."""
        asked = self.requests()
        # nobody typed it: the operator's word is stronger, and a refusal does not blame a flag
        assumed = Requests(speculative_algorithm="STANDALONE") if self.draft_model is not None else None
        settings = {**os.environ, **self.settings()}
        role = role if role is not None else self.role
        return make_launch(asked, embedder=assumed, policy=self.policy(), role=role, settings=settings)

    def settings(self) -> dict[str, str]:
        """The old settings these flags name, beside the environment's."""
        return _pairs("--setting", self.setting)

    def policy(self) -> Policy:
        """The policy these flags ask for."""
        return Policy(
            strict=self.strict,
            layers=self.layers,
            keep_graph=self.keep_graph,
            allow=frozenset(self.allow or ()) | self._locked(),
            deny=frozenset(self.deny or ()),
            duplicates=frozenset(self.duplicate or ()),
            bypass=frozenset(self.bypass or ()),
        )

    def _locked(self) -> frozenset[str]:
        """The distributions of the lock that was named."""
        if self.allow_lock is None:
            return frozenset()
        record = read_record(self.allow_lock, "lock")
        return locked_distributions(lock_from_json(record, f"lock {self.allow_lock}"))

    def engine_facts(self) -> EngineFacts:
        """The engine's facts, from a file or permissive."""
        return load_engine(self.engine) if self.engine is not None else EngineFacts()

    def host_facts(self) -> HostFacts:
        """The host asked about."""
        if self.host is not None:
            facts = load_host(self.host)
            if self.device is not None and self.device != facts.device:
                raise BadInput(
                    "--device", needed=f"{facts.device}, the device of host {facts.name}", found=repr(self.device)
                )
            return facts
        return this_host(self.device)

    def measured(self, host: HostFacts) -> Measurements | None:
        """The times the launch is ranked by."""
        if self.measurements is None:
            if self.workload:
                raise BadInput("--workload", needed="--measurements, whose times it chooses", found="none")
            return None
        if self.measurements != TUNED:
            return load_measurements(host, self.measurements, self.expected_load())
        found = load_measurements(host, None, self.expected_load())
        if found is None:
            needed = f"this machine's record, {default_place(Machine.of(host))}"
            raise BadInput("--measurements tuned", needed=needed, found="no such file", fix="Run `backstamp tune`")
        return found

    def expected_load(self) -> Workload:
        """The load of `--workload`, the default for each phase it does not name."""
        return workload_of(_pairs("--workload", self.workload, "PHASE=ROWSxTOKENS"), "--workload")

    def target_model(self) -> ModelFacts:
        """The model of `--model`."""
        return load_model(self.model) if self.model is not None else default_model()

    def runner_model(self) -> ModelFacts:
        """The model of the runner asked about."""
        if self.role == "draft" and self.draft_model is not None:
            return load_model(self.draft_model)
        return self.target_model()


_PLAIN = [item.name for item in dataclasses.fields(Requests) if item.name not in ("component_backends", "features")]


def _pairs(flag: str, given: Sequence[str] | None, form: str = "NAME=VALUE") -> dict[str, str]:
    """NAME=VALUE, repeated; the last of one name counts."""
    pairs: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise BadInput(flag, needed=form, found=repr(text))
        pairs[name.strip()] = value.strip()
    return pairs


def _switches(given: Sequence[str] | None) -> dict[str, bool]:
    switches: dict[str, bool] = {}
    for name, value in _pairs("--feature", given, "NAME=on|off").items():
        if value not in ("on", "off"):
            raise BadInput(f"--feature {name}", needed="on or off", found=repr(value))
        switches[name] = value == "on"
    return switches


def with_flags(command: Callable[..., None], without: frozenset[str] = frozenset()) -> Callable[..., None]:
    """Replace a command's `flags: Flags` parameter by the fields of `Flags`, as typer reads signatures.

    A command that has an option of its own in place of a field names it in `without`.
    """
    shown = [item for item in dataclasses.fields(Flags) if item.name not in without]
    names = [item.name for item in shown]

    @functools.wraps(command)
    def spread(**given: object) -> None:
        own = {name: value for name, value in given.items() if name not in names}
        command(flags=Flags(**{name: given[name] for name in names}), **own)  # type: ignore[arg-type]

    hints = get_type_hints(command, include_extras=True)
    of_flags = get_type_hints(Flags, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(command).parameters.items()
        if name != "flags"
    ]
    parameters += [
        inspect.Parameter(
            item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=of_flags[item.name]
        )
        for item in shown
    ]
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread
