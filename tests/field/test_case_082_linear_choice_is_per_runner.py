"""Case 82, SGLang #34376 and #33492: building the draft replaced the target's linear kernel in a shared table."""

from __future__ import annotations

import logging

import pytest

from backstamp.errors import Unstamped
from backstamp.launch import Launch, Requests, make_launch
from backstamp.linear import (
    LinearAttnBackends,
    linear_attn_backends_of,
    resolve_linear_attn_backends,
    stamp_linear_attn_backends,
)


class ModelRunner:
    """What is stamped: an engine's runner."""


def build_runner(launch: Launch, *, gated_delta: bool) -> ModelRunner:
    """A runner as an engine builds it on SM100, where a gated-delta-net target prefills with flashinfer."""
    runner = ModelRunner()
    default = "flashinfer" if gated_delta else None
    stamp_linear_attn_backends(runner, resolve_linear_attn_backends(launch, default))
    return runner


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["target-first", "draft-first"])
def test_building_one_runner_never_changes_the_other(order: tuple[bool, bool]) -> None:
    """Both build orders give the same: target flashinfer, draft triton, and the launch as it was."""
    launch = make_launch(Requests())
    runners = {gated: build_runner(launch, gated_delta=gated) for gated in order}
    assert linear_attn_backends_of(runners[True]) == LinearAttnBackends("triton", "flashinfer", "triton")
    assert linear_attn_backends_of(runners[False]) == LinearAttnBackends("triton", "triton", "triton")
    assert launch == make_launch(Requests())


def test_an_operators_choice_probes_no_device_and_wins_in_both_runners() -> None:
    """The gate of the default is not asked at all."""
    launch = make_launch(Requests(linear_attn_prefill_backend="triton"))

    def gate() -> str:
        raise AssertionError("the gate probed a device")

    for _ in ("target", "draft"):
        assert resolve_linear_attn_backends(launch, gate).prefill == "triton"
    assert resolve_linear_attn_backends(make_launch(Requests()), lambda: "flashinfer").prefill == "flashinfer"


@pytest.mark.parametrize(("decode", "verify"), [("flashinfer", "flashinfer"), ("triton", "triton"), ("cula", "triton")])
def test_unset_verify_follows_decode_where_that_is_flashinfer(decode: str, verify: str) -> None:
    """Mission section 4; an explicit verify binds."""
    assert resolve_linear_attn_backends(make_launch(Requests(linear_attn_decode_backend=decode))).verify == verify
    asked = Requests(linear_attn_decode_backend=decode, linear_attn_verify_backend="x")
    assert resolve_linear_attn_backends(make_launch(asked)).verify == "x"


def test_a_runner_without_a_stamp_is_an_error_on_first_use() -> None:
    """No default stands in: it would be another runner's."""
    with pytest.raises(Unstamped, match="runner ModelRunner"):
        linear_attn_backends_of(ModelRunner())


def test_a_stamp_on_the_class_answers_for_no_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process-wide state is no stamp."""
    monkeypatch.setattr(ModelRunner, "linear_attn_backends", LinearAttnBackends("a", "b", "c"), raising=False)
    with pytest.raises(Unstamped):
        linear_attn_backends_of(ModelRunner())


def test_the_choice_is_logged_once_a_runner(caplog: pytest.LogCaptureFixture) -> None:
    """One line each, with all three kernels; resolving alone logs nothing."""
    with caplog.at_level(logging.INFO, logger="backstamp"):
        resolve_linear_attn_backends(make_launch(Requests()), "flashinfer")
        assert not caplog.messages
        build_runner(make_launch(Requests()), gated_delta=True)
    assert caplog.messages == ["linear attention: decode triton, prefill flashinfer, verify triton"]
