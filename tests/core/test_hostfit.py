"""Which archs an offer's list stands for, images with letters and forward claims among them."""

from __future__ import annotations

import pytest

from backstamp.errors import BackstampError
from backstamp.hostfit import arch_fits, arch_words, archs_fit
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import host_of, plan_on
from tests.resolving import kernel

ASKED = Requests(attention_backend="needy")


@pytest.mark.parametrize(
    ("image", "arch", "forward", "runs"),
    [
        pytest.param("9.0", "9.0", "no", True, id="plain-on-its-own"),
        pytest.param("9.0a", "9.0", "no", True, id="90a-on-hopper"),
        pytest.param("10.0f", "10.0", "no", True, id="100f-on-b200"),
        pytest.param("10.0f", "10.3", "no", False, id="100f-claims-nothing"),
        pytest.param("10.0f", "10.3", "major", True, id="100f-claims-its-major"),
        pytest.param("10.0f", "12.0", "any", False, id="100f-ends-with-its-major"),
        pytest.param("9.0a", "10.0", "any", False, id="90a-goes-nowhere"),
        pytest.param("9.0a", "9.1", "major", False, id="90a-goes-to-no-minor"),
        pytest.param("8.0", "8.6", "no", False, id="plain-claims-nothing"),
        pytest.param("8.0", "8.6", "major", True, id="plain-claims-its-major"),
        pytest.param("8.6", "8.0", "major", False, id="nothing-goes-back"),
        pytest.param("8.0", "12.0", "major", False, id="major-is-no-more"),
        pytest.param("8.0", "12.0", "any", True, id="any-is-everything-newer"),
        pytest.param("8.0", "7.5", "any", False, id="any-does-not-go-back"),
        pytest.param("gfx942", "gfx950", "any", False, id="gfx-names-have-no-order"),
    ],
)
def test_an_image_runs_where_it_was_built_for_and_where_it_claims(
    image: str, arch: str, forward: str, runs: bool
) -> None:
    """transformers #47926: an image is no family; a letter narrows what may be claimed for it."""
    assert archs_fit((image,), arch, forward) is runs
    assert arch_fits(kernel("k", archs=(image,), forward_archs=forward), arch) is runs


def test_a_plain_arch_carries_an_image_beside_it() -> None:
    """{8.0, 9.0a} with a claim: what is newer is claimed from 8.0, never from the image."""
    assert archs_fit(("8.0", "9.0a"), "8.6", "major")
    assert not archs_fit(("8.0", "9.0a"), "10.0", "major")


@pytest.mark.parametrize(
    ("archs", "device", "words"),
    [
        ("10.3", "cuda", "SM103 (10.3)"),
        ("9.0a", "cuda", "SM90a (9.0a)"),
        ("10.0f", "cuda", "SM100f (10.0f)"),
        ("sm_90", "cuda", "capability sm_90"),
        ("gfx942", "rocm", "gfx942"),
    ],
)
def test_archs_read_as_people_say_them(archs: str, device: str, words: str) -> None:
    """A refusal names SM numbers and capabilities, images with their letter."""
    assert arch_words(archs, device) == words


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (frozenset({"avx512f", "amx_tile"}), "got only amx_tile"),
        (frozenset({"avx512f", "sse"}), "got a CPU without them"),
        (frozenset(), "got none known"),
    ],
)
def test_a_refused_cpu_is_told_by_the_features_that_were_asked_for(features: frozenset[str], words: str) -> None:
    """A CPU reports a hundred features; the ones the kernel needs are named, and which of them are there."""
    needy = kernel("needy", device="cpu", archs=("x86_64",), cpu_features=frozenset({"amx_tile", "amx_bf16"}))
    with pytest.raises(BackstampError) as caught:
        plan_on(host_of("epyc", cpu_features=features), fake_plugin("p", [needy]), requests=ASKED)
    assert "needs CPU features amx_bf16, amx_tile" in caught.value.message
    assert words in caught.value.message
    assert "sse" not in caught.value.message
