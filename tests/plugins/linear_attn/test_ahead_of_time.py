"""Every Triton kernel of the plugin compiles for every declared kind of chip, as its launcher would launch it.

No GPU is needed: one child process without the interpreter compiles all jobs.
"""

from __future__ import annotations

import pytest

from tests.children import compiled_by
from tests.plugins.linear_attn import ahead
from tests.plugins.linear_attn.ahead import Job

ARCHS = ("8.0", "9.0", "10.0", "12.0", "gfx942", "gfx950")
DIMS = ((128, 128), (64, 64), (256, 256), (96, 192), (64, 128))
#: Each form of a step, with what it may have beside.
VARIANTS = (
    {"form": "slots", "family": "gdn"},
    {"form": "slots", "family": "gdn", "many": True},
    {"form": "slot_table", "family": "kda", "order": "kv"},
    {"form": "intermediate", "family": "gdn", "tree": True, "raw": False},
    {"form": "intermediate", "family": "kda", "tree": True, "order": "kv"},
    {"form": "slots", "family": "kda", "raw": False, "state": "bf16"},
    {"form": "slots", "family": "kda", "bounded": True},
    {"form": "prepare"},
    {"form": "prepare", "raw": False},
    {"form": "tokens"},
    {"form": "load", "state": "bf16"},
    {"form": "store", "state": "fp16"},
)
JOBS = [
    Job(arch, ("bf16", "fp16", "fp32")[(a + v) % 3], dims=DIMS[(a + v) % 5], **variant)
    for a, arch in enumerate(ARCHS)
    for v, variant in enumerate(VARIANTS)
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, dict]:
    """The answers of one child process by job."""
    answers = compiled_by(ahead.__file__, JOBS, tmp_path_factory.mktemp("triton-cache"))
    return dict(zip(map(str, JOBS), answers, strict=True))


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_the_kernel_compiles_for_its_chip(job, compiled):
    """Machine code for the chip is there, and a program takes little shared memory: its state is in registers."""
    answer = compiled[str(job)]
    assert answer["code"].get("hsaco" if job.arch.startswith("gfx") else "cubin", 0) > 0
    assert answer["shared_bytes"] <= 48 * 1024
