"""Case 31, sglang #34264: the key asked for is not always the kernel built, and the stamp names the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backstamp.catalogue import Catalogue, Row
from backstamp.construction import Factory
from backstamp.declarations import Alias
from backstamp.errors import BuiltMismatch
from backstamp.factories import BuildRequest, Built
from backstamp.launch import Requests
from backstamp.testing.fakes import RecordingBackend, fake_plugin
from tests.building import MLA, SPARSE, built_from, model_of, plan_on, stamps_of
from tests.resolving import kernel

B200 = {"archs": ("10.0", "10.3")}
PLUGIN = fake_plugin(
    "p",
    [
        kernel("cutedsl_mla", phases=frozenset({"decode"}), **B200, **MLA),
        kernel("trtllm_mla", **B200, **MLA),
        kernel("dsa", archs=("9.0", "10.0"), **SPARSE),
    ],
    [
        Alias(key="cutedsl_mla", kernels=("cutedsl_mla", "trtllm_mla")),
        Alias(key="nsa", kernels=("dsa",), deprecated="dsa"),
    ],
)


@pytest.mark.parametrize(
    ("requests", "role", "phase", "stamp"),
    [
        pytest.param({"attention_backend": "cutedsl_mla"}, "target", "decode", "cutedsl_mla", id="decode"),
        pytest.param({"decode_attention_backend": "cutedsl_mla"}, "target", "decode", "cutedsl_mla", id="decode-flag"),
        pytest.param({"attention_backend": "cutedsl_mla"}, "target", "prefill", "trtllm_mla", id="prefill"),
        pytest.param({"verify_attention_backend": "cutedsl_mla"}, "target", "verify", "trtllm_mla", id="verify-flag"),
        pytest.param(
            {"draft_attention_backend": "cutedsl_mla"}, "draft", "draft_decode", "cutedsl_mla", id="draft-dec"
        ),
        pytest.param({"draft_attention_backend": "cutedsl_mla"}, "draft", "draft_extend", "trtllm_mla", id="draft-ext"),
        pytest.param({"attention_backend": "cutedsl_mla"}, "draft", "draft_extend", "trtllm_mla", id="inherited-ext"),
        pytest.param({"attention_backend": "cutedsl_mla"}, "draft", "draft_decode", "cutedsl_mla", id="inherited-dec"),
    ],
)
def test_cutedsl_mla_is_two_kernels_and_each_phase_is_stamped_with_its_own(
    requests: dict[str, str], role: str, phase: str, stamp: str
) -> None:
    """sglang #34264: decode is cutedsl_mla, what extends is trtllm_mla; read from the object and from its steps."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    plan = plan_on("b200", PLUGIN, requests=asked, model=model_of("mla"), role=role)
    assert stamps_of(built_from(plan, PLUGIN))[phase] == {stamp}


@pytest.mark.parametrize("host", ["h100", "b200"])
@pytest.mark.parametrize(
    ("requests", "role", "phase"),
    [
        pytest.param({"attention_backend": "nsa"}, "target", "prefill", id="prefill"),
        pytest.param({"attention_backend": "nsa"}, "target", "decode", id="decode"),
        pytest.param({"prefill_attention_backend": "nsa"}, "target", "prefill", id="prefill-flag"),
        pytest.param({"decode_attention_backend": "nsa"}, "target", "decode", id="decode-flag"),
        pytest.param({"verify_attention_backend": "nsa"}, "target", "verify", id="verify-flag"),
        pytest.param({"draft_attention_backend": "nsa"}, "draft", "draft_decode", id="draft-decode"),
        pytest.param({"draft_attention_backend": "nsa"}, "draft", "draft_extend", id="draft-extend"),
        pytest.param({"attention_backend": "nsa"}, "draft", "draft_extend", id="inherited"),
    ],
)
def test_nsa_is_stamped_dsa_in_any_phase_and_warns(host: str, requests: dict[str, str], role: str, phase: str) -> None:
    """sglang #34264: the old key still works, the stamp never says it, and the plan says what to write."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    plan = plan_on(host, PLUGIN, requests=asked, model=model_of("dsa"), role=role)
    assert stamps_of(built_from(plan, PLUGIN))[phase] == {"dsa"}
    deprecated = [warning.text for warning in plan.warnings if warning.code == "deprecated"]
    assert any("'nsa' is deprecated, use 'dsa'" in text for text in deprecated)
    assert any(phase.replace("_", " ") in text for text in deprecated)


def test_the_new_key_does_not_warn() -> None:
    """Only the old word is deprecated, not what it stands for."""
    plan = plan_on("h100", PLUGIN, requests=Requests(attention_backend="dsa"), model=model_of("dsa"))
    assert "deprecated" not in {warning.code for warning in plan.warnings}


def answering(name: str, phase: str) -> Callable[[Row, Catalogue], Factory]:
    """A loader whose factory answers this name for one phase, its own name elsewhere."""

    def load(row: Row, catalogue: Catalogue) -> Factory:
        return lambda request: Built(_name(request, row), RecordingBackend(request))

    def _name(request: BuildRequest, row: Row) -> str:
        return name if phase in request.phases else row.offer.kernel

    return load


@pytest.mark.parametrize(
    ("name", "word"),
    [
        pytest.param("nsa", "alias and never a stamp", id="an-alias"),
        pytest.param("trtllm_mla", "another kernel", id="another-kernel"),
        pytest.param("dsa_v2", "nobody declared", id="nobodys"),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "draft_decode", "draft_extend"])
def test_a_factory_that_answers_an_alias_as_its_name_is_rejected(name: str, word: str, phase: str) -> None:
    """sglang #34264: an alias stamp crashed the first draft-extend forward; the answer is checked when it is built."""
    asked = Requests(draft_attention_backend="nsa", speculative_algorithm="EAGLE")
    plan = plan_on("h100", PLUGIN, requests=asked, model=model_of("dsa"), role="draft")
    with pytest.raises(BuiltMismatch) as caught:
        built_from(plan, PLUGIN, load=answering(name, phase))
    assert word in caught.value.found
    assert phase in caught.value.who
