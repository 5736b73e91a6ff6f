"""The Hopper prefill kernel compiles for its chip, which is not here: what its machine code holds."""

from __future__ import annotations

import pytest

from backstamp_triton.configs import SHARED_BYTES
from tests.children import compiled_by
from tests.plugins.triton import prefill_ahead
from tests.plugins.triton.prefill_ahead import Job

JOBS = (
    Job(),
    Job(dtype="fp16", index="csr", causal="no", page_size=16, extras=("lse_ptr", "window_left")),
    Job(index="indirect", causal="rows", page_size=256, extras=("softcap_log2", "sinks_ptr", "lse_ptr")),
    Job(dims=(64, 64), index="ragged", page_size=0),
    Job(dims=(256, 256), page_size=8),
    Job(group=3, pack=3, extras=("part_ptr", "part_lse_ptr")),
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    """The answers of one child process by job."""
    answers = compiled_by(prefill_ahead.__file__, JOBS, tmp_path_factory.mktemp("triton-cache"))
    return dict(zip(map(str, JOBS), answers, strict=True))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_the_prefill_kernel_compiles_and_fits_its_chip(job, compiled):
    """Warpgroup products and box copies are in the code, and two blocks in flight fit shared memory."""
    answer = compiled[str(job)]
    assert answer["cubin"] > 0
    assert answer["shared_bytes"] <= SHARED_BYTES["9.0"]
    # both warpgroups: logits of the first block and of a later one, outputs of a block and of the last
    block = 64 if job.dims == (256, 256) else 128
    assert answer["products"] == 2 * (2 * job.dims[0] // 16 + 2 * block // 16)
    # keys, values, and values of a block with rows nobody sees
    assert answer["copies"] == answer["pieces"] * (job.dims[0] + 2 * job.dims[1]) // 64
