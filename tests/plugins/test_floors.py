"""What a host must have beside the right chip: runtimes and distributions below a row's floor are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import Refused
from backstamp.launch import Requests, make_launch
from backstamp.model import model_from_config
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.testing.hosts import described_host
from tests.models import config

INSTALLED = {
    "torch": "2.13.0",
    "triton": "3.9.0",
    "flashinfer-python": "0.7.4",
    "tokenspeed-fa4": "4.0.0.post20260923",
    "tokenspeed-mla": "2.0.4",
    "nvidia-cutlass-dsl": "4.8.0",
    "sgl-flash-mla": "1.0.0",
    "amd-aiter": "0.1.27",
    "torch-npu": "2.13.0",
    "custom-ops": "1.0",
}
#: Key, host and model; the newest version that is too old, and the oldest that will do.
RUNTIMES = [
    ("flashinfer", "a100", "mha", "cuda", "12.8", "12.9"),
    ("flashinfer", "h100", "mha", "cuda", "12.8", "12.9"),
    ("flashinfer", "h100", "mla", "cuda", "12.8", "12.9"),
    ("flashinfer", "rtx5090", "mha", "cuda", "12.8", "12.9"),
    ("flashinfer", "gb300", "mha", "cuda", "12.8", "12.9"),
    ("flashinfer", "thor", "mha", "cuda", "12.9", "13.0"),
    ("trtllm_mha", "h100", "mha", "cuda", "12.8", "12.9"),
    ("trtllm_mha", "rtx5090", "mha", "cuda", "12.8", "12.9"),
    ("trtllm_mha", "gb300", "mha", "cuda", "12.8", "12.9"),
    ("tokenspeed_mla", "b200", "mla", "cuda", "12.8", "12.9"),
    ("fa4", "h100", "mha", "cuda", "12.8", "12.9"),
    ("fa4", "b200", "mha", "cuda", "12.8", "12.9"),
    ("flashmla", "h100", "mla", "cuda", "12.9", "13.0"),
    ("dsv4", "h100", "dsv4", "cuda", "12.9", "13.0"),
    ("dsv4", "b200", "dsv4", "cuda", "12.9", "13.0"),
    ("dsv4", "mi355x", "dsv4", "rocm", "6.4", "7.0"),
    ("aiter", "mi300x", "mha", "rocm", "6.4", "7.0"),
]


def plan_of(key: str, host: str, model: str, runtime: tuple[str, str] | None = None, **changed: str | None) -> Plan:
    """The plan of one key; `changed` are versions of distributions by name, None for one that is not there."""
    versions = INSTALLED | {name.replace("_", "-"): version for name, version in changed.items()}
    libraries = {name: version for name, version in versions.items() if version is not None}
    there = described_host(host, libraries=libraries)
    there = there if runtime is None else replace(there, runtimes=(runtime,))
    launch = make_launch(Requests(attention_backend=key))
    return resolve(launch, EngineFacts(), model_from_config(config(model)), there, build_catalogue(discover()))


@pytest.mark.parametrize(
    ("key", "host", "model", "name", "old", "new"), RUNTIMES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_runtime_below_the_floor_is_refused(key: str, host: str, model: str, name: str, old: str, new: str) -> None:
    """What was installed for the one chip is not run under a runtime that cannot compile or load it."""
    with pytest.raises(Refused, match=rf"needs {name}>={new}.*got {old}"):
        plan_of(key, host, model, (name, old))
    assert plan_of(key, host, model, (name, new)).running


@pytest.mark.parametrize("cuda", ["12.9", "14.0"])
def test_sparse_latent_attention_falls_to_our_own_kernels_without_cuda_13(cuda: str) -> None:
    """The images of sgl-flash-mla load libcudart.so.13 alone; Triton's are compiled where they run."""
    plans = {text: plan_of("dsa", "h100", "dsa", ("cuda", text)) for text in (cuda, "13.0")}
    libraries = {
        text: {group.library.distribution for phase in plan.running for group in phase.groups if group.library}
        for text, plan in plans.items()
    }
    assert libraries == {cuda: {"triton"}, "13.0": {"sgl-flash-mla"}}


@pytest.mark.parametrize("version", ["0.1.7.post2", "0.1.14", "0.1.19", "0.1.19.post1"])
def test_a_release_without_the_sparse_kernel_is_refused(version: str) -> None:
    """`pa_decode_sparse` for gfx950 came after 0.1.19."""
    with pytest.raises(Refused, match=f"needs amd-aiter>0.1.19.*got amd-aiter {version}"):
        plan_of("dsv4", "mi355x", "dsv4", amd_aiter=version)
    assert plan_of("dsv4", "mi355x", "dsv4", amd_aiter="0.1.20").running


def test_the_ascend_operators_are_a_distribution_of_their_own() -> None:
    """torch-npu alone has none of them."""
    with pytest.raises(Refused, match=r"needs custom-ops>=1.0.*custom-ops is not installed"):
        plan_of("dsv4", "ascend910b", "dsv4", custom_ops=None)
    assert plan_of("dsv4", "ascend910b", "dsv4").running
