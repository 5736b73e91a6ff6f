"""Every kernel compiles for every declared kind of chip, in the launch shape the launcher would use there.

No GPU is needed: one child process without the interpreter compiles all jobs. Each chip meets each
dtype; head dims, steps, features and index forms are spread over them.
"""

from __future__ import annotations

import pytest

from backstamp_triton.configs import SHARED_BYTES, overlaps_launches
from tests.children import compiled_by
from tests.plugins.triton import ahead
from tests.plugins.triton.ahead import Job

ARCHS = ("8.0", "9.0", "10.0", "12.0", "gfx942", "gfx950")
DTYPES = ("bf16", "fp16", "fp32")
DIMS = ((128, 128), (64, 64), (80, 80), (256, 256), (96, 96), (192, 128), (192, 192), (64, 256))
#: What a step is asked for beside its dtype and head dim.
VARIANTS = (
    {"step": "prefill", "extras": ("lse_ptr",)},
    {"step": "decode", "extras": ("lse_ptr", "window_left"), "index": "csr"},
    {"step": "verify", "tree": "qlen", "extras": ("window_left", "softcap_log2")},
    {"step": "prefill", "causal": "rows", "extras": ("sinks_ptr", "kv_starts"), "index": "indirect", "page_size": 128},
    {"step": "decode", "extras": ("sinks_ptr", "softcap_log2"), "index": "indirect", "page_size": 1},
    {"step": "verify", "tree": "full", "extras": ("lse_ptr",), "index": "csr", "page_size": 1},
    {"step": "prefill", "causal": "no", "extras": ("window_left",), "index": "ragged", "page_size": 1},
    {"step": "verify", "tree": "packed", "extras": ("sinks_ptr",)},
)
MLA = {"dims": (576, 512), "heads": (128, 1)}


def _jobs() -> list[Job]:
    jobs = []
    for a, arch in enumerate(ARCHS):
        for d, dtype in enumerate(DTYPES):
            at = a * len(DTYPES) + d
            jobs.append(Job(arch, dtype, dims=DIMS[at % 8], **VARIANTS[(at + at // 8) % 8]))
        # the shape most models have
        jobs.append(Job(arch, DTYPES[(a + 1) % 2], **VARIANTS[0]))
        step = {"step": "decode", "extras": ("lse_ptr",)} if a % 2 else {"step": "verify", "extras": ("q_rope_ptr",)}
        jobs.append(Job(arch, DTYPES[a % 3], **MLA, **step))
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
    for part in (answer, answer.get("combine", answer)):
        assert part["code"].get("hsaco" if job.arch.startswith("gfx") else "cubin", 0) > 0
        assert part["shared_bytes"] <= SHARED_BYTES[job.arch], answer["config"]


@pytest.mark.parametrize("job", [job for job in JOBS if job.step == "decode"], ids=str)
def test_a_merge_waits_on_the_device_for_the_shares(job, compiled):
    """Where a merge is launched early its code waits once, and the kernel before says when; elsewhere neither does."""
    answer = compiled[str(job)]
    early = overlaps_launches(job.arch)
    assert answer["waits"] == ["griddepcontrol.launch_dependents"] * early
    assert answer["combine"]["waits"] == ["griddepcontrol.wait"] * early


def test_the_jobs_cover_every_setting():
    """Each chip meets each dtype, and each head dim, step, tree, index form and optional tensor is compiled."""
    assert {(job.arch, job.dtype) for job in JOBS} == {(arch, dtype) for arch in ARCHS for dtype in DTYPES}
    assert {job.dims for job in JOBS} >= {*DIMS, (576, 512)}
    assert {job.tree for job in JOBS} == {"no", "qlen", "full", "packed"}
    assert {job.causal for job in JOBS} == {"no", "yes", "rows"}
    assert {job.index for job in JOBS} == {"page_table", "csr", "indirect", "ragged"}
    assert {(job.arch.startswith("gfx"), job.step) for job in JOBS} == {
        (amd, step) for amd in (True, False) for step in ("prefill", "verify", "decode")
    }
    assert {extra for job in JOBS for extra in job.extras} == {
        "lse_ptr", "sinks_ptr", "kv_starts", "window_left", "softcap_log2", "q_rope_ptr",
    }  # fmt: skip
