"""Case 73, sglang #28063, #11801 and #36344: a deterministic launch knows the alignment of the kernel it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from tests.resolving import kernel
from tests.scenes import plan_with

FA3 = kernel("fa3", deterministic=True, priority=90)
ALIGNED = kernel("aligned", deterministic=True, alignment_tokens=4096, priority=50)
ANY_SPLIT = kernel("any_split", deterministic=True, alignment_tokens=1, priority=10)


def on(chunk: int | None = None, **asked: str) -> Requests:
    """A deterministic launch with a prefill chunk."""
    return Requests(deterministic=True, chunked_prefill_size=chunk, **asked)


def test_a_deterministic_kernel_without_an_alignment_is_refused_in_this_mode() -> None:
    """sglang #28063: fa3 would have won; asked for, it is refused for the alignment it does not declare."""
    assert plan_with([FA3, ALIGNED], on()).phase("prefill").kernel == "aligned"
    assert plan_with([FA3, ALIGNED]).phase("prefill").kernel == "fa3"
    with pytest.raises(Refused, match="needs a declared prefill alignment, got none declared"):
        plan_with([FA3, ALIGNED], on(attention_backend="fa3"))


@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend", "draft_attention_backend"])
def test_whichever_flag_names_it(flag: str) -> None:
    """sglang #11801: every phase that is split into chunks asks, the draft's extend too."""
    role = "draft" if flag.startswith("draft") else "target"
    with pytest.raises(Refused, match="a declared prefill alignment"):
        plan_with([FA3, ALIGNED], on(**{flag: "fa3"}), role=role)


def test_a_draft_extend_is_split_like_a_prefill() -> None:
    """sglang #11801: under mode decode the extend would follow fa3, which decodes well and extends without a word."""
    asked = replace(
        on(prefill_attention_backend="aligned", decode_attention_backend="fa3"), speculative_attention_mode="decode"
    )
    plan = plan_with([FA3, ALIGNED], asked, role="draft")
    assert (plan.phase("draft_decode").kernel, plan.phase("draft_extend").kernel) == ("fa3", "aligned")
    assert plan.phase("draft_extend").source == "inherited -> auto"


def test_a_phase_that_is_never_split_does_not_ask() -> None:
    """Decode truncates nothing: fa3 may decode beside a prefill kernel that keeps its alignment."""
    plan = plan_with([FA3, ALIGNED], on(decode_attention_backend="fa3"))
    assert (plan.phase("prefill").kernel, plan.phase("decode").kernel) == ("aligned", "fa3")


@pytest.mark.parametrize("chunk", [128, 4095, 6000])
def test_a_chunk_that_breaks_the_alignment_is_an_error_at_config_time(chunk: int) -> None:
    """sglang #36344: smaller than the alignment hangs, no multiple of it breaks; both sides are in the message."""
    with pytest.raises(Refused, match=rf"a prefill chunk in multiples of 4096 tokens, got {chunk}\b"):
        plan_with([ALIGNED], on(chunk, attention_backend="aligned"))
    with pytest.raises(NoKernel, match=rf"multiples of 4096 tokens, got {chunk}\b"):
        plan_with([ALIGNED], on(chunk))


@pytest.mark.parametrize("chunk", [4096, 8192, -1, None])
def test_a_chunk_that_keeps_it_is_accepted(chunk: int | None) -> None:
    """A multiple, chunking switched off, or no chunk size known."""
    assert plan_with([ALIGNED], on(chunk)).phase("prefill").kernel == "aligned"


def test_auto_takes_a_kernel_that_any_split_suits() -> None:
    """sglang #36344: alignment 1 is a declaration too."""
    assert plan_with([ALIGNED, ANY_SPLIT], on(128)).phase("prefill").kernel == "any_split"


def test_without_the_mode_no_alignment_counts() -> None:
    """The chunk is free where nobody asked for the same bits."""
    assert plan_with([ALIGNED], Requests(chunked_prefill_size=128)).phase("prefill").kernel == "aligned"


def test_an_undeclared_mode_is_a_no() -> None:
    """A kernel that says nothing is not deterministic, in either half."""
    with pytest.raises(Refused, match="a kernel that declares deterministic"):
        plan_with([kernel("quiet"), ALIGNED], on(decode_attention_backend="quiet"))
