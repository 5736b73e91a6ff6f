"""`intel_amx`: its numbers on any CPU, in blocks of keys, and the checks that AMX is there where it is built."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from backstamp.attention import LayerSpec
from backstamp.declarations import PHASES
from backstamp.errors import BadInput, UnsupportedBatch
from backstamp.factories import BuildRequest
from backstamp.testing.batches import SMALL_LAYER, make_batch, make_tree, split_new
from backstamp.testing.reference import reference_attention, relative_error
from backstamp.testing.requests import request_for
from backstamp_cpu import amx
from backstamp_cpu.amx import IntelAmx, attend_in_blocks
from backstamp_cpu.backend import build_intel_amx
from backstamp_cpu.isa import AMX_LIMITS, check_amx, limit_of
from backstamp_cpu.plugin import AMX, AMX_MLA

#: bf16 outputs against float64 over the same bf16 inputs; the kernels of docs/performance.md miss by 2e-3 to 3.2e-3.
BOUND = 5e-3
MLA = LayerSpec(layer_id=0, num_qo_heads=8, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5)


def request(offer=AMX, **changed) -> BuildRequest:
    """A request for the kernel in all five phases."""
    return request_for(offer, **changed)


def backend(**changed) -> IntelAmx:
    """The class itself: the factory would ask for AMX, which this machine may lack; the numbers are the same."""
    return IntelAmx(request(**changed), rows_alone=False)


def run(kernel, step, **options):
    return kernel.forward(step.q, step.kv, step.layer, kernel.plan(step.batch), **options)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 keys, so that short rows have several and the last one is part full."""
    monkeypatch.setattr(amx, "BLOCK_KEYS", 16)


STEPS = {
    "ragged": {"q_lens": [5, 1, 3, 1], "kv_lens": [37, 64, 3, 1]},
    "empty-rows": {"q_lens": [0, 4, 1, 0], "kv_lens": [0, 20, 17, 9]},
    "pad-tokens": {"q_lens": [2, 2], "kv_lens": [18, 33], "pad_tokens": 3},
    "left-padding": {"q_lens": [6, 1], "kv_lens": [21, 40], "kv_starts": [3, 17]},
    "per-row-causal": {"q_lens": [4, 4, 1], "kv_lens": [21, 33, 16], "causal": [True, False, True]},
    "csr": {"q_lens": [3, 1], "kv_lens": [40, 9], "index_form": "csr"},
    "indirect-hnd": {"q_lens": [3, 1], "kv_lens": [40, 9], "index_form": "indirect", "cache_form": "hnd"},
}
LAYERS = {
    "plain": {},
    "window": {"window_left": 7},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0])},
    "alibi": {"alibi": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "wide-values": {"num_qo_heads": 6, "num_kv_heads": 2, "v_head_dim": 48},
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("step", STEPS)
def test_every_step_of_every_layer_equals_the_reference(step, layer, page_size):
    """Several blocks a row, masks that cut through them, rows without anything."""
    spec = replace(SMALL_LAYER, **LAYERS[layer])
    made = make_batch(**STEPS[step], layer=spec, page_size=page_size, dtype=torch.bfloat16)
    truth, true_lse = reference_attention(made.q, made.kv, spec, made.batch)
    kernel = backend(page_size=page_size)
    assert relative_error(run(kernel, made), truth) < BOUND
    if spec.sinks is None:
        lse = torch.empty(made.q.shape[:2])
        run(kernel, made, lse=lse)
        seen = torch.isfinite(true_lse)
        assert torch.equal(torch.isfinite(lse), seen)
        assert relative_error(lse[seen], true_lse[seen]) < 1e-4


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_served(phase):
    """Targets and drafts, over rows longer than one block."""
    made = make_batch([1, 2], [8, amx.BLOCK_KEYS + 88], phase=phase, dtype=torch.bfloat16)
    truth, _ = reference_attention(made.q, made.kv, made.layer, made.batch)
    assert relative_error(run(backend(), made), truth) < BOUND


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("query", ["joined", "q-rope-apart"])
def test_absorbed_mla_reads_its_values_inside_the_keys(query):
    """The dims of the golden model: 576 for the key, 512 for the value."""
    made = make_batch([3, 1, 1, 4], [9, 33, 16, 4], layer=MLA, cache_form="latent", dtype=torch.bfloat16)
    truth, _ = reference_attention(made.q, made.kv, MLA, made.batch)
    kernel = backend(offer=AMX_MLA)
    q, q_rope = (made.q, None) if query == "joined" else (made.q[..., :512], made.q[..., 512:])
    assert relative_error(kernel.forward(q, made.kv, MLA, kernel.plan(made.batch), q_rope=q_rope), truth) < BOUND


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["full", "qlen", "packed"])
def test_verify_of_a_tree_equals_the_reference(kind):
    """Every mask format, with a window that counts in the tree's own positions."""
    layer = replace(SMALL_LAYER, window_left=9)
    tree = make_tree([5, 5], [20, 31], kind)
    made = make_batch([5, 5], [20, 31], layer=layer, phase="verify", tree=tree, dtype=torch.bfloat16)
    truth, _ = reference_attention(made.q, made.kv, layer, made.batch)
    assert relative_error(run(backend(), made), truth) < BOUND


@pytest.mark.usefixtures("small_blocks")
def test_new_tokens_beside_the_cache_equal_the_whole():
    """`split_kv`: this step's tokens come apart."""
    made = make_batch([3, 1, 4], [9, 33, 4], dtype=torch.bfloat16)
    truth, _ = reference_attention(made.q, made.kv, made.layer, made.batch)
    kv, new = split_new(made)
    kernel = backend()
    out = kernel.forward(made.q, kv, made.layer, kernel.plan(made.batch), new=new)
    assert relative_error(out, truth) < BOUND


def test_large_logits_keep_what_a_bf16_product_would_round_away():
    """Logits of 30 rounded to bf16 move by 0.06: the weights of close keys would be wrong by as many per cent."""
    layer = replace(SMALL_LAYER, num_qo_heads=2, num_kv_heads=1, head_dim=128, v_head_dim=32, scale=1.0)
    made = make_batch([4, 1], [200, 77], layer=layer, dtype=torch.bfloat16)
    truth, true_lse = reference_attention(made.q, made.kv, layer, made.batch)
    lse = torch.empty(made.q.shape[:2])
    assert relative_error(run(backend(), made, lse=lse), truth) < BOUND
    assert float((lse.double() - true_lse).abs().max()) < 2e-3


def test_blocks_of_any_size_give_the_same_answer(monkeypatch):
    """The running maximum and sum are carried from block to block."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, 4, 32, generator=generator).bfloat16()
    k, v = (torch.randn(2, 50, 2, 32, generator=generator).bfloat16() for _ in range(2))
    mask = torch.rand(2, 3, 50, generator=generator) > 0.3
    mask[0, 1] = False
    whole, whole_lse = attend_in_blocks(q, k, v, mask, None, SMALL_LAYER)
    for size in (1, 7, 16, 49):
        monkeypatch.setattr(amx, "BLOCK_KEYS", size)
        out, lse = attend_in_blocks(q, k, v, mask, None, SMALL_LAYER)
        assert relative_error(out, whole) < BOUND
        assert torch.allclose(lse, whole_lse, atol=1e-4)
        assert torch.equal(out[0, 1], torch.zeros_like(out[0, 1]))


def test_a_query_of_another_dtype_is_refused_not_converted():
    """fp32 queries belong to torch_native."""
    made = make_batch([1], [8])
    kernel = backend()
    with pytest.raises(UnsupportedBatch, match=r"needs q: bf16, as built, got fp32"):
        run(kernel, made)
    for field in ("dtype", "kv_dtype"):
        with pytest.raises(UnsupportedBatch, match=rf"needs {field}: (bf16|same), got fp16"):
            build_intel_amx(request(**{field: "fp16"}))


def test_a_cpu_without_amx_is_refused_where_the_kernel_is_built():
    """A described host may promise AMX; the process that builds has to have it."""
    if torch.cpu._is_amx_tile_supported():
        assert build_intel_amx(request()).kernel == "intel_amx"
        return
    with pytest.raises(BadInput, match=r"amx_tile and amx_bf16.*got none that torch may use"):
        build_intel_amx(request())


@pytest.mark.parametrize("limit", ["ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16", "DNNL_MAX_CPU_ISA=AVX2"])
def test_a_limit_on_onednn_is_named(limit, monkeypatch):
    """oneDNN reads its limit once and says nothing when it drops AMX for it."""
    name, value = limit.split("=")
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=rf"instruction sets oneDNN may use, got {limit}.*Unset {name}"):
        check_amx("intel_amx")


def test_a_limit_that_leaves_amx_in_reach_is_none():
    """The newer variable counts where both are set."""
    assert limit_of({}) is None
    assert all(limit_of({"ONEDNN_MAX_CPU_ISA": name.lower()}) is None for name in AMX_LIMITS)
    assert limit_of({"ONEDNN_MAX_CPU_ISA": "ALL", "DNNL_MAX_CPU_ISA": "AVX2"}) is None


def test_onednn_switched_off_is_named():
    """In a process of its own: the switch is torch's, for all of it."""
    code = (
        "import torch; torch.backends.mkldnn.enabled = False\n"
        "from backstamp_cpu.isa import check_amx\n"
        "try: check_amx('intel_amx')\n"
        "except ValueError as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("MAX_CPU_ISA")}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "oneDNN enabled, got torch.backends.mkldnn.enabled = False" in answer.stdout


def test_the_products_are_onednn_bf16_matmuls():
    """What AMX is reached through: oneDNN's own log names bf16 products, for queries, residuals and values."""
    code = (
        "import torch\n"
        "from backstamp_cpu.amx import attend_in_blocks\n"
        "from backstamp.testing.batches import SMALL_LAYER\n"
        "q = torch.randn(2, 3, 4, 32).bfloat16(); k = torch.randn(2, 50, 2, 32).bfloat16()\n"
        "attend_in_blocks(q, k, k, None, None, SMALL_LAYER)"
    )
    environment = os.environ | {"ONEDNN_VERBOSE": "1"}
    log = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    products = [line for line in log.stdout.splitlines() if ",exec,cpu,matmul," in line]
    if not products and "onednn_verbose" not in log.stdout:
        pytest.skip("this CPU's torch takes no bf16 product to oneDNN (needs AVX-512)")
    assert len(products) == 3
    assert all("src:bf16" in line and "wei:bf16" in line and "dst:bf16" in line for line in products)
    assert ["attr-post-ops:sum:-1" in line for line in products] == [False, True, False]
