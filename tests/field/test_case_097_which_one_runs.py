"""Case 97, flash-attention #1152: with two versions installed, the built object and one command say which one runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backstamp.declared import Declared, declared_to_json
from backstamp.launch import Requests
from backstamp.stamp import read_stamp
from backstamp.testing.dists import write_plugin
from backstamp.testing.fakes import fake_plugin
from tests.building import built_from, host_of, plan_on
from tests.core.test_cli import backstamp
from tests.resolving import kernel

BOTH = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.1"}
HOST = host_of("h100", libraries=tuple(sorted(BOTH.items())))
FA3 = kernel("fa3", requires=("flash-attn-3>=3",), priority=90)
FA2 = kernel("fa2", requires=("flash-attn>=2,<3",))
PLUGIN = fake_plugin("fa", [FA3, FA2], version="1.4")


@pytest.mark.parametrize(
    ("requests", "role", "phase", "source"),
    [
        pytest.param({}, "target", "decode", "auto", id="auto"),
        pytest.param({"attention_backend": "fa3"}, "target", "prefill", "operator", id="base"),
        pytest.param({"decode_attention_backend": "fa3"}, "target", "decode", "operator", id="decode"),
        pytest.param({"verify_attention_backend": "fa3"}, "target", "verify", "operator", id="verify"),
        pytest.param({"draft_attention_backend": "fa3"}, "draft", "draft_extend", "operator", id="draft"),
        pytest.param({"decode_attention_backend": "fa3"}, "draft", "draft_decode", "inherited", id="inherited"),
    ],
)
def test_the_object_says_what_it_is(requests: dict[str, str], role: str, phase: str, source: str) -> None:
    """flash-attention #1152: kernel, distribution, version, origin file, phase and who chose it, with fa2 beside it."""
    plan = plan_on(HOST, PLUGIN, requests=Requests(speculative_algorithm="EAGLE", **requests), role=role)
    stamp = read_stamp(built_from(plan, PLUGIN).serving_attention_backend(phase))
    assert stamp.kernel == "fa3"
    assert stamp.plugin == ("fa", "fake-fa", "1.4")
    assert stamp.library == ("flash-attn-3", "3.0.1")
    assert Path(stamp.origin).name == "fakes.py"
    assert dict(stamp.sources)[phase] == source
    assert stamp.as_json(phase)["phase"] == phase


def test_the_other_version_is_as_plain() -> None:
    """The mirror: fa2 asked for on the same machine names 2.x, not 3."""
    plan = plan_on(HOST, PLUGIN, requests=Requests(attention_backend="fa2"))
    stamp = read_stamp(built_from(plan, PLUGIN).serving_attention_backend("decode"))
    assert (stamp.kernel, stamp.library) == ("fa2", ("flash-attn", "2.8.3"))


def test_two_rows_of_one_kernel_are_told_apart_by_their_library() -> None:
    """The relative: one kernel name over two builds; the stamp names the build that was accepted."""
    rows = [kernel("fa3", requires=("flash-attn-3>=4",)), kernel("fa3", requires=("flash-attn>=2",))]
    plugin = fake_plugin("fa", rows)
    plan = plan_on(HOST, plugin)
    stamp = read_stamp(built_from(plan, plugin).serving_attention_backend("decode"))
    assert stamp.library == ("flash-attn", "2.8.3")


def test_one_command_prints_it(tmp_path: Path) -> None:
    """The stamps of a build, on any machine, for people and for tools."""
    site = tmp_path / "site-packages"
    package = write_plugin(site, "fa", kernel="acme3", version="1.4")
    # names of its own: `fa3` is backstamp-fa3's
    offers = tuple(
        kernel(name, requires=offer.requires, priority=offer.priority, factory=f"{package}.backend:build")
        for name, offer in (("acme3", FA3), ("acme2", FA2))
    )
    (site / package / "backstamp.json").write_text(declared_to_json(Declared(offers=offers)), "utf-8")
    host = tmp_path / "box.json"
    host.write_text(json.dumps({"device": "cuda", "arch": "9.0", "libraries": BOTH}), "utf-8")
    flags = ("build", "--fake", "--host", str(host), "--decode-attention-backend", "acme3")
    status, out, err = backstamp(*flags, "--json", path=site)
    assert status == 0, err
    stamp = json.loads(out)["phases"]["decode"]["stamp"]
    assert (stamp["kernel"], stamp["phase"], stamp["source"]) == ("acme3", "decode", "operator")
    assert stamp["plugin"] == {"name": "fa", "distribution": "fa", "version": "1.4"}
    assert stamp["library"] == {"distribution": "flash-attn-3", "version": "3.0.1"}
    assert stamp["origin"].endswith("fakes.py")
    status, out, _ = backstamp(*flags, path=site)
    assert status == 0
    assert "Stamps read from the built objects" in out
    assert "acme3" in out
