"""What a launch may be asked for, and how the request reaches the processes it spawns."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sglang
from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.server_args import prepare_server_args

from backstamp.catalogue import Catalogue, Conflict
from backstamp.discovery import Failure
from backstamp.errors import NotInstalled, UnknownKey
from backstamp.plan_rows import PluginRef
from backstamp_sglang import names, runner
from backstamp_sglang.door import check_sglang, hook_runners
from backstamp_sglang.names import Marker, catalogue_here, keys_of, offer_names, plugins_sent
from backstamp_sglang.runner import resolve_for
from engines.sglang.tests.launches import KEY, arguments

SGLANGS_OWN = {"torch_native", "flex_attention", "intel_amx", "triton", "fa3"}
MISTYPED = "backstamp_torch_nativ"
#: SGLang's module of gated delta nets imports Triton kernels, which ask for a GPU unless they are interpreted.
TRITON = {"TRITON_INTERPRET": "1"}


def test_every_key_is_a_name_and_sglangs_own_names_stay_its_own(model: Path) -> None:
    """`backstamp_` and a key, or the key alone where SGLang has no such name; behind SGLang's names is SGLang."""
    for key in catalogue_here().keys("attention"):
        names = {f"backstamp_{key}", key if key not in SGLANGS_OWN else f"backstamp_{key}"}
        for name in names:
            assert ATTENTION_BACKENDS[name].__module__ == "backstamp_sglang.names"
            assert name in choices.ATTENTION_BACKEND_CHOICES
            # SGLang replaces a draft backend it does not find here by its own, with a line in the log
            assert name in choices.DRAFT_ATTENTION_BACKEND_CHOICES
            # and ends, where it is asked for deterministic inference and does not find one here
            assert name in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    for name in SGLANGS_OWN:
        assert ATTENTION_BACKENDS[name].__module__.startswith("sglang.")
    assert "backstamp" in ATTENTION_BACKENDS
    assert "xqa" in ATTENTION_BACKENDS
    assert {"backstamp", KEY} <= set(choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES)


def test_a_name_is_offered_once(model: Path) -> None:
    """SGLang may load its plugins from more than one of its doors."""
    before = list(choices.ATTENTION_BACKEND_CHOICES)
    offer_names()
    assert before == choices.ATTENTION_BACKEND_CHOICES
    assert len(set(before)) == len(before)


def test_a_key_that_no_kernel_can_answer_is_a_name_too(model: Path) -> None:
    """A plugin that is not installed, one that fails, a key two claim: whoever asks for it is told which."""
    assert "backstamp_fa3" in ATTENTION_BACKENDS
    plugin = PluginRef("acme", "acme-attention", "1.0")
    failure = Failure(plugin=plugin, entry="acme", cause="no luck", error=None, names=frozenset({"acme"}))
    contested = {("attention", "ours"): Conflict("ours", "attention", ("a", "b"))}
    catalogue = Catalogue(failures=(failure,), conflicts=contested)
    assert {"acme", "ours", "fa3"} <= set(keys_of(catalogue, "attention"))
    assert "ours" not in keys_of(catalogue, "linear")


@pytest.mark.parametrize(
    ("flag", "who"),
    [
        ("attention_backend", "attention backend"),
        ("decode_attention_backend", "decode attention backend"),
        ("speculative_draft_attention_backend", "draft prefill attention backend"),
        ("linear_attn_backend", "linear decode backend"),
        ("linear_attn_decode_backend", "linear decode backend"),
    ],
)
def test_a_mistyped_name_of_ours_is_refused_with_the_launch(flag: str, who: str, model: Path, hybrid: Path) -> None:
    """SGLang's command line checks names, its `Engine` does not: it would load the weights first."""
    if flag == "speculative_draft_attention_backend":
        others = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(model)}
        server = arguments(model, **others, **{flag: MISTYPED})
    else:
        server = arguments(hybrid, **{"linear_attn_backend": KEY, flag: MISTYPED})
    with pytest.raises(UnknownKey, match=rf"{who} 'torch_nativ', .*Did you mean 'torch_native'"):
        server.resolve_once()


def test_the_command_line_takes_our_names(model: Path) -> None:
    """SGLang's flags have lists of choices; a name nobody has is its own error."""
    pair = ["--prefill-attention-backend", "backstamp_flex_attention", "--decode-attention-backend", KEY]
    others = ["--speculative-draft-attention-backend", KEY, "--linear-attn-backend", KEY]
    asked = prepare_server_args(["--model-path", str(model), "--device", "cpu", *pair, *others])
    assert asked.prefill_attention_backend == "backstamp_flex_attention"
    with pytest.raises(SystemExit):
        prepare_server_args(["--model-path", str(model), "--attention-backend", "no_such_kernel"])


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0"])
def test_an_sglang_outside_the_tested_range_is_refused(version: str) -> None:
    """SGLang's attention contract changes between patch releases."""
    with pytest.raises(NotInstalled, match=rf"backstamp-sglang: needs sglang ==0.5.23, got {version}"):
        check_sglang(version)


def test_such_an_sglang_is_refused_where_a_launch_asks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a module of ours reads what may have moved; and only where one of our names is asked for."""
    monkeypatch.setattr(sglang, "__version__", "0.5.40")
    with pytest.raises(NotInstalled, match=r"got 0\.5\.40"):
        arguments(model).resolve_once()
    with pytest.raises(NotInstalled, match=r"got 0\.5\.40"):
        ATTENTION_BACKENDS[KEY](None)
    with pytest.raises(NotInstalled, match=r"got 0\.5\.40"):
        hook_runners(linear=False)
    arguments(model, attention_backend="torch_native").resolve_once()


def test_a_request_travels_with_the_arguments(model: Path) -> None:
    """Its names, and the distributions of its plan; a launch of SGLang's own carries nothing."""
    asked, own = arguments(model), arguments(model, attention_backend="torch_native")
    for each in (asked, own):
        each.resolve_once()
    assert asked._backstamp == Marker((KEY,), False, ("backstamp-cpu",))
    assert b"backstamp" not in pickle.dumps(own)
    # a copy is no arrival: nothing of SGLang's is hooked in the launched process
    assert copy.deepcopy(asked)._backstamp is asked._backstamp
    assert plugins_sent() == frozenset()


ARRIVAL = """
import pickle, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

path, when = sys.argv[1:]
if when == "after":
    load_plugins()
with open(path, "rb") as sent:
    server_args = pickle.load(sent)
load_plugins()
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
print("acme_alone" in ATTENTION_BACKENDS or when, *sorted(HookRegistry._patched))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_request_arrives_before_sglangs_plugins_or_after(when: str, hybrid: Path, tmp_path: Path) -> None:
    """Either way the runners of a spawned process are hooked, its gated delta nets too, and its names are there."""
    asked = arguments(hybrid, linear_attn_backend=KEY)
    asked.resolve_once()
    asked._backstamp = asked._backstamp._replace(names=(KEY, "acme_alone"))
    sent = tmp_path / "sent"
    sent.write_bytes(pickle.dumps(asked))
    program = [sys.executable, "-W", "ignore", "-c", ARRIVAL, str(sent), when]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env={**os.environ, **TRITON})
    named, *hooked = done.stdout.split()
    assert named == ("True" if when == "before" else "after"), done.stderr[-2000:]
    assert [path.rpartition(".")[2] for path in hooked] == ["__init__", "load_model", "_create_backend"]


def test_a_process_that_lacks_a_plugin_of_the_plan_names_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked for, the best by rank too: another kernel may not stand in."""
    server = arguments(model, attention_backend="backstamp")
    monkeypatch.setattr(names, "_sent", [Marker(("backstamp",), False, ("acme-attention", "backstamp-cpu"))])
    said = "in a process that SGLang spawned: needs acme-attention, .*got an environment without it.*Install acme-att"
    with pytest.raises(NotInstalled, match=said):
        resolve_for(server, model_config_of(server))
    failure = Failure(plugin=PluginRef("acme", "acme-attention", "1.0"), entry="acme", cause="no luck", error=None)
    catalogue = replace(catalogue_here(), failures=(failure,))
    monkeypatch.setattr(runner, "catalogue_here", lambda: catalogue)
    with pytest.raises(NotInstalled, match="got one that fails to load: no luck"):
        resolve_for(server, model_config_of(server))
