"""The check before `bench/kernels.py` times: a wrong answer is seen wherever it lies, in every form of step."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.bench_modules import bench_modules

DIMS = {"heads": (4, 2), "dims": (16, 16)}
LATENT = {"heads": (4, 1), "dims": (576, 512), "page_size": 64}


@pytest.fixture(scope="module")
def bench():
    """The modules of steps and their truth."""
    with bench_modules("shapes", "steps", "truth") as modules:
        yield modules


def error(bench, out: torch.Tensor, step) -> float:
    """What is told of an answer."""
    return bench[2].error_of(out, step, bench[2].truth_of(step))


STEPS = {
    "paged": {"work": "prefill", "rows": ((300, 300), (5, 90)), "page_size": 16, **DIMS},
    "ragged": {"work": "prefill", "rows": ((300, 300), (7, 7)), "name": "two", **DIMS},
    "fp8": {"work": "decode", "rows": ((1, 40), (1, 9)), "page_size": 16, "kv_dtype": "e4m3fn", **DIMS},
    "tree": {"work": "verify", "rows": ((8, 40),) * 2, "page_size": 16, "tree": True, **DIMS},
    "latent": {"work": "mla_decode", "rows": ((1, 70),) * 2, **LATENT},
    "chosen": {"work": "sparse_mla_decode", "rows": ((1, 70),) * 2, "topk": 9, **LATENT},
    "packed": {"work": "sparse_mla_prefill", "rows": ((4, 70),), "topk": 9, "kv_dtype": "fp8_ds_mla", **LATENT},
}


def answer(step) -> torch.Tensor:
    """The whole step in fp32, a token at a time, by the words of the call contract alone."""
    from backstamp.testing.packed_latent import unpack
    from backstamp.testing.reference import gather_row, tree_rows

    layer, out, token = step.layer, [], 0
    for row, (q_len, kv_len) in enumerate(step.shape.rows):
        if step.kv is None:
            first = int(step.new.kv_indptr[row])
            k, v = (half[first : first + kv_len].float() for half in (step.new.k, step.new.v))
        elif step.kv.layout != "rows":
            k = gather_row(unpack(step.kv.k, step.kv.layout), step.batch.index, row, kv_len)
            v = k[..., : layer.v_head_dim]
        else:
            k = gather_row(step.kv.k, step.batch.index, row, kv_len).float() * (step.kv.k_scale or 1.0)
            v = k[..., : layer.v_head_dim]
            if step.kv.v is not None:
                v = gather_row(step.kv.v, step.batch.index, row, kv_len).float() * (step.kv.v_scale or 1.0)
        k, v = (x.repeat_interleave(layer.num_qo_heads // layer.num_kv_heads, 1) for x in (k, v))
        for at in range(q_len):
            keys = list(range(kv_len - q_len + at + 1))
            if step.batch.tree is not None:
                own = tree_rows(step.batch.tree, row, q_len, kv_len)[at].nonzero().flatten() + kv_len - q_len
                keys = [*range(kv_len - q_len), *own.tolist()]
            if step.indices is not None:
                keys = step.indices[token].tolist()
            weights = (torch.einsum("hd,khd->hk", step.q[token].float(), k[keys]) * layer.scale).softmax(-1)
            out.append(torch.einsum("hk,khd->hd", weights, v[keys]))
            token += 1
    return torch.stack(out)


@pytest.mark.parametrize("name", STEPS)
def test_a_right_answer_is_right_in_every_form_of_step(bench, name: str) -> None:
    """Quantised caches are read as what their bytes mean."""
    step = bench[1].attention_step(bench[0].Shape(**STEPS[name]), "cpu")
    assert error(bench, answer(step), step) < 1e-5


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("where", ["last", "one head", "nan"])
def test_a_wrong_answer_is_wrong_in_every_form_of_step(bench, name: str, where: str) -> None:
    """The last token, one head of it, or a number that is none."""
    step = bench[1].attention_step(bench[0].Shape(**STEPS[name]), "cpu")
    out = answer(step)
    if where == "last":
        out[-1] = 0
    elif where == "one head":
        out[-1, 1] = out[-1, 0]
    else:
        out[0, 0, 0] = math.nan
    assert error(bench, out, step) > 0.2


def test_a_wrong_tile_late_in_a_long_row_is_seen(bench) -> None:
    """Outputs of late tokens are small beside the first's, and an error over all samples at once would hide them."""
    step = bench[1].attention_step(bench[0].Shape(**STEPS["paged"]), "cpu")
    out = answer(step)
    out[290:300] *= 1.5
    assert error(bench, out, step) > 0.4


def test_samples_lie_all_over_a_row(bench) -> None:
    """The first and the last are among them, and no gap is wider than the others."""
    some = bench[2].sampled(8192, 64)
    gaps = [after - before for before, after in itertools.pairwise(some)]
    assert (some[0], some[-1], len(some)) == (0, 8191, 64)
    assert max(gaps) <= 131
    assert bench[2].sampled(3, 64) == [0, 1, 2]


RECURRENCES = [("gdn_prefill", ((70, 70), (5, 5))), ("kda_prefill", ((70, 70),)), ("gdn_decode", ((1, 1),) * 3)]


def recurred(step) -> torch.Tensor:
    """The kit's reference, states written back."""
    from backstamp.testing.linear_reference import reference_linear

    truth = reference_linear(step.q, step.k, step.v, step.gates, step.layer, step.batch, step.pool)
    step.pool.ssm.copy_(truth.ssm)
    return truth.out


BOUNDED = ("kda_prefill", ((70, 70),), -5.0)
OTHERS = [(*of, None) for of in (*RECURRENCES, ("kda_decode", ((1, 1),) * 3))]


@pytest.mark.parametrize(("work", "rows", "bound"), [*OTHERS, BOUNDED])
def test_a_right_recurrence_is_right_and_a_wrong_one_wrong(bench, work: str, rows, bound) -> None:
    """Late outputs and final states both; states are put back as they were."""
    shape = bench[0].Shape(work, rows, heads=(2, 4), dims=(16, 16), name="some", lower_bound=bound)
    step = bench[1].linear_step(shape, "cpu")
    out = recurred(step)
    assert error(bench, out, step) < 1e-6
    late = out.clone()
    late[rows[0][0] - 1] = 0
    assert error(bench, late, step) > 0.2
    step.pool.ssm[step.batch.slots[-1]] *= 1.3
    assert error(bench, out, step) > 0.2
    step.restore()
    assert torch.equal(step.pool.ssm, step.before)
