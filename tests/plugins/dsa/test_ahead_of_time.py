"""Every kernel compiles for every kind of chip, in the launch shape the launcher would use there; no GPU is needed."""

from __future__ import annotations

import pytest

from backstamp_dsa.configs import SHARED_BYTES
from tests.children import compiled_by
from tests.plugins.dsa import ahead
from tests.plugins.dsa.ahead import Job

ARCHS = ("8.0", "9.0", "10.0", "12.0", "gfx942", "gfx950")
DTYPES = ("bf16", "fp16", "fp32")
FORMS = ("page_table", "csr", "indirect")
SOURCES = ("given", "window", "all")


def _jobs() -> list[Job]:
    jobs = []
    for at, arch in enumerate(ARCHS):
        jobs += [Job(arch, "attend", dtype, heads=(128, 16, 8)[d]) for d, dtype in enumerate(DTYPES)]
        jobs += [
            Job(arch, "split", DTYPES[at % 3], heads=(16, 128)[at % 2]),
            Job(arch, ("merge", "parts")[at % 2]),
            Job(arch, "slots", index=FORMS[at % 3], source=SOURCES[(at + at // 3) % 3]),
            Job(arch, "logits", DTYPES[(at + 1) % 3], index=FORMS[(at + 1) % 3]),
        ]
    # the library behind it has images for SM90 alone
    jobs += [Job("9.0", "dense"), Job("9.0", "dense rows")]
    jobs += [Job("9.0", "hopper", "bf16"), Job("9.0", "hopper", "fp16", heads=20), Job("9.0", "hopper split", "bf16")]
    return jobs


JOBS = _jobs()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    """The answers of one child process by job."""
    answers = compiled_by(ahead.__file__, JOBS, tmp_path_factory.mktemp("triton-cache"))
    return dict(zip(map(str, JOBS), answers, strict=True))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_the_kernel_compiles_and_fits_its_chip(job, compiled):
    """Machine code for the chip is there, and its shared memory is within what one program may use."""
    answer = compiled[str(job)]
    assert answer["code"].get("hsaco" if job.arch.startswith("gfx") else "cubin", 0) > 0
    assert answer["shared_bytes"] <= SHARED_BYTES[job.arch]


@pytest.mark.parametrize("job", [job for job in JOBS if job.kernel.startswith("hopper")], ids=str)
def test_the_kernel_for_hopper_compiles_to_warpgroup_products(job, compiled):
    """36 score a block of keys, four a half fold its values."""
    assert compiled[str(job)]["products"] == 36 + 4 + 4


@pytest.mark.parametrize("name", ["dense", "dense rows"])
def test_no_argument_of_a_dense_launch_is_compiled_for(name, compiled):
    """Code at hand is found by dtypes and absent tensors: an address or a size it was cut to would be missed."""
    assert compiled[str(Job("9.0", name))]["looked_at"] == []


def test_the_jobs_cover_every_setting():
    """Each chip meets each dtype and kernel, and each index form and source of choices is compiled."""
    assert {(job.arch, job.dtype) for job in JOBS if job.kernel == "attend"} == {(a, d) for a in ARCHS for d in DTYPES}
    assert {job.arch for job in JOBS} == {job.arch for job in JOBS if job.kernel == "slots"} == set(ARCHS)
    assert {(job.index, job.source) for job in JOBS if job.kernel == "slots"} >= {("page_table", "given")}
    assert {job.source for job in JOBS if job.kernel == "slots"} == set(SOURCES)
    assert {job.index for job in JOBS if job.kernel == "logits"} == set(FORMS)
