"""One stored sink parameter for every kernel that reads it: which dtype it has, and who reads it converted.

Incidents: SGLang #34917 and #34264, where the dtype followed one field of a split pair.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.decisions import SinkRead, stored_sinks
from backstamp.declarations import Offer
from backstamp.errors import ConflictingRequest, Unresolved
from backstamp.launch import Requests
from backstamp.plan import Plan
from backstamp.words import read_as
from tests.resolving import kernel
from tests.scenes import DENSE, model_with, plan_with
from tests.splits import SPEC, built

MODELS = {dtype: model_with((4, replace(DENSE, sinks=dtype))) for dtype in ("bf16", "fp16", "fp32")}


def reader(name: str, *dtypes: str, conversion: str = "no", **more: object) -> Offer:
    """A kernel that reads sinks of these dtypes."""
    features = frozenset({"sinks"})
    return kernel(name, features=features, sink_dtypes=frozenset(dtypes), sink_conversion=conversion, **more)


#: As FA4 was before it read other dtypes, as it is, as TRT-LLM's MHA is, and one that rounds what it is given.
BF16_ONLY, FA4 = reader("bf16_only", "bf16", priority=90), reader("fa4", "bf16", "fp16", "fp32", priority=20)
TRTLLM = reader("trtllm_mha", "fp32", conversion="lossless", priority=10)
ROUNDS, ROUNDS_TO_FP16 = reader("rounds", "bf16", conversion="any"), reader("rounds_fp16", "fp16", conversion="any")
OFFERS = [BF16_ONLY, FA4, TRTLLM, ROUNDS, ROUNDS_TO_FP16]


def plan(prefill: str | None, decode: str | None, model: str = "bf16", **more: object) -> Plan:
    """A launch that names halves, over a model that stores sinks in a dtype."""
    asked = Requests(prefill_attention_backend=prefill, decode_attention_backend=decode, **more)
    return plan_with(OFFERS, asked, model=MODELS[model])


@pytest.mark.parametrize(
    ("prefill", "decode", "stored", "converting"),
    [
        ("trtllm_mha", None, "bf16", ["prefill"]),
        (None, "trtllm_mha", "bf16", ["decode"]),
        ("bf16_only", "trtllm_mha", "bf16", ["decode"]),
        ("trtllm_mha", "bf16_only", "bf16", ["prefill"]),
        ("trtllm_mha", "trtllm_mha", "fp32", []),
        ("fa4", "trtllm_mha", "fp32", []),
        ("bf16_only", "fa4", "bf16", []),
        ("fa4", "fa4", "bf16", []),
    ],
    ids=["prefill-only", "decode-only", "mixed", "mirrored", "base", "mixed-reads-both", "one-reads-both", "as-stored"],
)
def test_the_stored_dtype_is_one_every_kernel_reads_or_widens(
    prefill: str | None, decode: str | None, stored: str, converting: list[str]
) -> None:
    """Nobody loses a bit of what the model stores, the fewest kernels convert, the model's own dtype comes first."""
    of = plan(prefill, decode)
    for answer in (stored_sinks(of), stored_sinks(built(of, OFFERS))):
        assert answer.stored == stored
        assert answer.converting == tuple(SinkRead(phase, "trtllm_mha", "fp32") for phase in converting)
        assert [read.phase for read in answer.reads] == ["prefill", "decode"]
        assert answer.reason == (f"trtllm_mha widens {stored}" if converting else f"every kernel reads {stored}")


def test_what_converts_is_what_the_plan_notes_for_the_models_own_dtype() -> None:
    """The decision and `Plan.conversions` agree where the parameter is stored as the model has it."""
    of = plan("bf16_only", "trtllm_mha", **SPEC)
    noted = {(item.phase, item.kernel, item.wanted) for item in of.conversions}
    assert set(stored_sinks(of).converting) == noted == {("decode", "trtllm_mha", "fp32")}


@pytest.mark.parametrize(
    ("prefill", "decode", "model"),
    [
        ("rounds", "trtllm_mha", "fp32"),
        ("trtllm_mha", "rounds", "fp32"),
        ("rounds", "rounds_fp16", "fp32"),
        ("rounds", "rounds_fp16", "bf16"),
    ],
)
def test_two_kernels_that_cannot_be_served_without_loss_are_an_error(prefill: str, decode: str, model: str) -> None:
    """Each declares that it rounds, but not to what the other reads: both are named with their dtypes."""
    reads = {"rounds": "bf16", "rounds_fp16": "fp16", "trtllm_mha": "fp32"}
    of = plan(prefill, decode, model)
    with pytest.raises(ConflictingRequest) as caught:
        stored_sinks(of)
    assert caught.value.who == "sinks of made_up (target)"
    assert (
        caught.value.found == f"{prefill} reads {reads[prefill]} (prefill) and {decode} reads {reads[decode]} (decode)"
    )
    assert caught.value.needed.endswith(f"without loss of the model's {model}")


def test_one_rounding_that_all_declare_is_allowed_and_said() -> None:
    """As SGLang serves an fp32 checkpoint with FA3: stored whole, rounded by the one dtype everybody reads."""
    answer = stored_sinks(plan("rounds", "rounds", "fp32"))
    assert (answer.stored, {read.dtype for read in answer.converting}) == ("fp32", {"bf16"})
    assert answer.reason == "every kernel rounds fp32 to bf16, as it declares"


def test_verify_is_a_reader_of_its_own() -> None:
    """A verify kernel that the operator named alone counts beside both halves."""
    of = plan("bf16_only", "bf16_only", verify_attention_backend="trtllm_mha", **SPEC)
    answer = stored_sinks(of)
    assert (answer.stored, answer.converting) == ("bf16", (SinkRead("verify", "trtllm_mha", "fp32"),))


@pytest.mark.parametrize("model", ["bf16", "fp32"])
def test_a_draft_decides_for_its_own_parameter(model: str) -> None:
    """SGLang #34917: by the phases the draft runs, whatever its target's are."""
    asked = Requests(attention_backend="fa4", draft_attention_backend="trtllm_mha", **SPEC)
    target = plan_with(OFFERS, asked, model=MODELS[model])
    draft = plan_with(OFFERS, asked, model=MODELS[model], role="draft", target=target)
    assert stored_sinks(target).stored == model
    answer = stored_sinks(draft)
    assert (answer.stored, answer.converting) == ("fp32", ())
    assert [read.phase for read in answer.reads] == ["prefill", "draft_decode", "draft_extend"]


def test_layers_that_store_two_dtypes_are_held_by_the_wider() -> None:
    """What one dtype must hold is what every layer stores."""
    layers = [(2, replace(DENSE, sinks=dtype, window_left=at)) for at, dtype in ((-1, "bf16"), (127, "fp32"))]
    windows = replace(TRTLLM, features=TRTLLM.features | {"window"})
    assert stored_sinks(plan_with([windows], model=model_with(*layers))).stored == "fp32"
    rounds = replace(ROUNDS, features=windows.features)
    with pytest.raises(ConflictingRequest, match="the model's bf16 and fp32"):
        stored_sinks(plan_with([rounds], model=model_with(*layers)))


def test_a_model_without_sinks_has_none_to_store() -> None:
    """Not a dtype somebody would allocate."""
    with pytest.raises(Unresolved, match="needs layers with sinks"):
        stored_sinks(plan_with([FA4]))


@pytest.mark.parametrize(
    ("reads", "conversion", "stored", "read"),
    [
        ({"bf16"}, "no", "bf16", "bf16"),
        ({"fp32"}, "no", "bf16", None),
        ({"fp32"}, "lossless", "bf16", "fp32"),
        ({"bf16"}, "lossless", "fp32", None),
        ({"fp32"}, "lossless", "fp64", None),
        ({"fp16", "fp32"}, "any", "bf16", "fp32"),
        ({"fp16"}, "any", "bf16", "fp16"),
        (set(), "any", "bf16", None),
    ],
)
def test_a_conversion_goes_to_the_widest_dtype_and_only_where_declared(
    reads: set[str], conversion: str, stored: str, read: str | None
) -> None:
    """A lossless one never narrows; one that may lose takes what loses least."""
    assert read_as(reads, conversion, stored) == read
