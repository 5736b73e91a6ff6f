"""Host facts as data: the named profiles, recorded files, and what a bad one is answered with."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from backstamp.errors import BadHost
from backstamp.host import Accelerator, HostFacts, Probe, load_host, parse_host, profile_names
from backstamp.testing.hosts import described_host

BOX = HostFacts(
    name="box",
    device="cuda",
    arch="10.3",
    device_name="NVIDIA GB300",
    device_index=1,
    origin="runtime",
    cpu_arch="aarch64",
    cpu_features=frozenset({"sve", "asimd", "bf16"}),
    runtimes=(("cuda", "13.0"),),
    libraries=(("flashinfer-python", "0.7.4"), ("torch", "2.13.0+cu130")),
    devices=(Accelerator("cuda", 0, "12.0", "NVIDIA RTX"), Accelerator("cuda", 1, "10.3", "NVIDIA GB300")),
    probes=(Probe("torch", True, "2.13.0+cu130"), Probe("rocm device node", False, "none of /dev/kfd")),
    triton_interpreter=True,
)
RECORDED = BOX.as_json()


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_loads_under_its_own_name(name: str) -> None:
    """Nothing of a described machine is assumed: no libraries, no probes, and a CPU only where it is the device."""
    facts = load_host(name)
    assert (facts.name, facts.origin, facts.libraries, facts.probes) == (name, "profile", None, ())
    assert facts.cpu_arch == (facts.arch if facts.device == "cpu" else "")
    assert not facts.triton_interpreter


@pytest.mark.parametrize(
    ("name", "device", "arch", "runtimes"),
    [
        ("h200", "cuda", "9.0", (("cuda", "13.0"),)),
        ("mi300x", "rocm", "gfx942", (("rocm", "7.0"),)),
        ("ascend910b", "npu", "ascend910b", (("cann", "8.2"),)),
        ("mtt_s5000", "musa", "3.1", (("musa", "4.3"),)),
        ("pvc", "xpu", "pvc", ()),
        ("graviton", "cpu", "aarch64", ()),
    ],
)
def test_a_profile_says_device_arch_and_runtime(
    name: str, device: str, arch: str, runtimes: tuple[tuple[str, str], ...]
) -> None:
    """One machine of every device kind."""
    facts = load_host(name)
    assert (facts.device, facts.arch, facts.runtimes) == (device, arch, runtimes)


def test_cpu_features_are_the_kernels_names() -> None:
    """A profile's features compare with what /proc/cpuinfo says."""
    assert {"amx_tile", "amx_bf16", "avx512f"} <= load_host("xeon_amx").cpu_features
    assert "amx_tile" not in load_host("epyc").cpu_features


def test_a_recorded_host_reads_back_equal_and_byte_for_byte(tmp_path: Path) -> None:
    """What was recorded there can be asked about here, and recording it again changes nothing."""
    path = tmp_path / "box.json"
    path.write_text(BOX.to_json(), "utf-8")
    facts = load_host(path)
    assert facts == BOX
    assert facts.to_json() == path.read_text("utf-8")


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_can_be_recorded(name: str) -> None:
    """A described host written out is the same host: an unknown library list stays unknown."""
    facts = load_host(name)
    assert parse_host(json.loads(facts.to_json()), "file") == facts


def test_the_order_of_features_does_not_change_the_bytes() -> None:
    """A frozenset has no order of its own."""
    words = [f"feature{at}" for at in range(64)]
    one, other = (replace(BOX, cpu_features=frozenset(order)) for order in (words, words[::-1]))
    assert one.to_json() == other.to_json()


def test_facts_are_frozen_hashable_and_survive_a_process_border() -> None:
    """Facts may be compared, kept as keys and sent to workers."""
    assert hash(pickle.loads(pickle.dumps(BOX))) == hash(BOX)
    with pytest.raises(FrozenInstanceError):
        BOX.arch = "9.0"


def test_library_names_of_a_written_host_are_canonical() -> None:
    """PEP 503: a hand-written Flash_Attn.3 is flash-attn-3."""
    facts = parse_host({"device": "cuda", "arch": "9.0", "libraries": {"Flash_Attn.3": "3.0"}}, "hand-written")
    assert facts.libraries == (("flash-attn-3", "3.0"),)


def test_a_described_host_takes_libraries_and_the_interpreter() -> None:
    """Tests say what is installed on a machine they do not have."""
    facts = described_host("epyc", libraries={"triton": "3.9.0"}, triton_interpreter=True)
    assert (facts.libraries, facts.triton_interpreter) == ((("triton", "3.9.0"),), True)
    assert described_host("epyc").libraries is None


@pytest.mark.parametrize(("typed", "meant"), [("h10", "h100"), ("H200", "h200"), ("mi300", "mi300x")])
def test_an_unknown_name_is_answered_with_the_near_match_and_the_known_ones(typed: str, meant: str) -> None:
    """A typo in --host costs one line, not a search."""
    with pytest.raises(BadHost) as caught:
        load_host(typed)
    assert caught.value.fix == f"Did you mean {meant!r}?"
    assert all(name in caught.value.needed for name in profile_names())


GONE = object()

#: name: (changed fields of a recorded host, field the error names, what it needs, what it got)
BAD: dict[str, tuple[dict[str, object], str, str, str]] = {
    "device-unknown": ({"device": "gpu"}, "device", "cuda, rocm", "'gpu'"),
    "device-number": ({"device": 9}, "device", "a word", "9"),
    "arch-missing": ({"arch": GONE}, "arch", "a word", "no such field"),
    "arch-empty": ({"arch": " "}, "arch", "a word", "' '"),
    "arch-number": ({"arch": 9.0}, "arch", "a word", "9.0"),
    "name-missing": ({"name": GONE}, "name", "a word", "no such field"),
    "origin-unknown": ({"origin": "guessed"}, "origin", "recorded", "'guessed'"),
    "index-negative": ({"device_index": -1}, "device_index", ">= 0", "-1"),
    "index-bool": ({"device_index": True}, "device_index", "whole number", "True"),
    "features-text": ({"cpu_features": "avx2"}, "cpu_features", "a list", "'avx2'"),
    "features-numbers": ({"cpu_features": [1]}, "cpu_features", "list of words", "[1]"),
    "runtimes-list": ({"runtimes": ["cuda"]}, "runtimes", "names with versions", "['cuda']"),
    "runtime-number": ({"runtimes": {"cuda": 13.0}}, "runtimes", "names with versions", "13.0"),
    "libraries-list": ({"libraries": ["torch"]}, "libraries", "names with versions", "['torch']"),
    "probes-short": ({"probes": [["torch", True]]}, "probes", "rows of str, bool, str", "['torch', True]"),
    "devices-bool": ({"devices": [["cuda", True, "9.0", "x"]]}, "devices", "rows of str, int", "True"),
    "devices-unknown": ({"devices": [["gpu", 0, "9.0", "x"]]}, "devices", "cuda, rocm", "'gpu'"),
    "interpreter-text": ({"triton_interpreter": "1"}, "triton_interpreter", "true or false", "'1'"),
    "schema-newer": ({"schema": 2}, "schema", "1", "2"),
    "field-misspelt": ({"archs": ["9.0"]}, "archs", "arch", "archs"),
}


@pytest.mark.parametrize(("fields", "field", "needed", "found"), BAD.values(), ids=BAD)
def test_a_bad_field_is_named_with_what_it_must_be(
    fields: dict[str, object], field: str, needed: str, found: str
) -> None:
    """Who, needed and got, in one line."""
    data = {name: value for name, value in {**RECORDED, **fields}.items() if value is not GONE}
    with pytest.raises(BadHost) as caught:
        parse_host(data, "box")
    assert caught.value.who == f"host box, field {field}"
    assert needed in caught.value.needed
    assert found in caught.value.found
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"arch": "9.0"}, "device"),
        ({"device": "cuda"}, "arch"),
        ({"device": "cuda", "arch": "9.0", "cuda": 13}, "cuda"),
    ],
    ids=["no-device", "no-arch", "runtime-number"],
)
def test_a_bad_profile_names_its_field(fields: dict[str, object], field: str) -> None:
    """The short form is checked like the recorded one."""
    with pytest.raises(BadHost) as caught:
        parse_host(fields, "mine")
    assert caught.value.who == f"host mine, field {field}"


def test_a_remark_in_a_host_file_is_no_field() -> None:
    """People write down where a machine stands."""
    assert parse_host({"_": "the box in room 7", "device": "cpu", "arch": "x86_64"}, "mine").cpu_arch == "x86_64"


@pytest.mark.parametrize(
    "text", ["{", "", "[]", "null", '"h100"', "[" * 200_000], ids=["cut", "empty", "list", "null", "word", "too-deep"]
)
def test_a_malformed_file_is_one_clear_line(tmp_path: Path, text: str) -> None:
    """`--host FILE` of a bad file names the file."""
    path = tmp_path / "box.json"
    path.write_text(text, "utf-8")
    with pytest.raises(BadHost) as caught:
        load_host(path)
    assert "box" in caught.value.who
    assert "\n" not in caught.value.message


def test_bytes_that_are_no_text_are_one_clear_line(tmp_path: Path) -> None:
    """A binary file named where a host is due."""
    path = tmp_path / "box.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadHost):
        load_host(path)


@pytest.mark.parametrize("arch", ["9", "sm_90", "9.0a", "hopper", "9.0.1", " 9.0"])
def test_a_cuda_arch_is_a_compute_capability(arch: str) -> None:
    """A misspelt arch would refuse every kernel and say that the machine is at fault."""
    with pytest.raises(BadHost, match="a compute capability"):
        parse_host({"device": "cuda", "arch": arch}, "box")
