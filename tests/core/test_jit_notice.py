"""A compile is told once, while it lasts, and a cached one not at all."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest

from backstamp import jit_notice
from backstamp.jit_notice import Announcer, compiling


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the real waits, and nothing told yet."""
    monkeypatch.setattr(jit_notice, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(jit_notice, "PROGRESS_SECONDS", 0.1)
    monkeypatch.setattr(jit_notice, "_told", set())


def test_a_long_compile_says_that_it_began_goes_on_and_ended(caplog: pytest.LogCaptureFixture) -> None:
    """In that order, each line with the kernel and what is compiled."""
    with compiling("acme", "prefill d128"):
        time.sleep(0.4)
    lines = [record.message for record in caplog.records]
    assert lines[0].startswith("acme: compiling prefill d128")
    assert lines[1].startswith("acme: still compiling prefill d128")
    assert lines[-1].startswith("acme: compiled prefill d128 in ")


def test_the_same_work_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Every layer and step enters it again; other work is told."""
    for _ in range(2):
        with compiling("acme", "decode"):
            time.sleep(0.1)
    with compiling("acme", "decode fp8"):
        time.sleep(0.1)
    begun = [record.message for record in caplog.records if "compiling" in record.message]
    assert len(begun) == 2


def test_what_a_cache_answers_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """Loading is not compiling."""
    with compiling("acme", "verify"):
        pass
    time.sleep(0.1)
    assert caplog.records == []


def test_a_failure_inside_passes_and_is_not_called_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """The library's own error is the one to see."""

    def compile_badly() -> None:
        with compiling("acme", "extend"):
            time.sleep(0.1)
            raise RuntimeError("nvcc is missing")

    with pytest.raises(RuntimeError, match="nvcc"):
        compile_badly()
    assert not any("compiled" in record.message for record in caplog.records)
    # what it stopped is still to be done, and told then
    with compiling("acme", "extend"):
        time.sleep(0.1)
    assert any("compiled" in record.message for record in caplog.records)


def test_an_announcer_tells_each_variant_once_and_names_no_empty_part(caplog: pytest.LogCaptureFixture) -> None:
    """A launch of a known variant runs inside nothing; one that failed is not known."""
    announcer = Announcer("acme")
    for parts in (("decode", 128, ""), ("decode", 128, "sinks"), ("decode", 128, "")):
        with announcer.first(*parts):
            time.sleep(0.1)
    begun = [record.message.partition(";")[0] for record in caplog.records if "compiling" in record.message]
    assert begun == ["acme: compiling decode 128", "acme: compiling decode 128 sinks"]
    assert isinstance(announcer.first("decode", 128, ""), nullcontext)
    with pytest.raises(RuntimeError, match="nvcc"), announcer.first("extend"):
        raise RuntimeError("nvcc is missing")
    assert not isinstance(announcer.first("extend"), nullcontext)
