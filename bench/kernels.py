"""Attention kernels on this GPU, side by side in one run: every kernel through its built backend, peers beside them.

    python bench/kernels.py [--only prefill|decode|mla_decode] [--output FILE] [--json]
    python bench/kernels.py --check [KERNEL ...] [--jobs N] [--seconds S] [--output FILE]

`--check` holds every kernel against float64, case by case, and times nothing; what a declaration refuses is refused
with its reason. Exit 1 where a case is wrong or failed.

Each kernel is checked against float64 on sampled rows before it is timed. Times are medians over CUDA events. A shape
that could not be run is in `not_run` with its reason. Read ratios: the times are one machine's.

Source of the shapes: one H200's anchors, prefill B2 S8192 and decode B64 kv8192, 32/8 heads, head dim 128, bf16.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import importlib_metadata
import torch
from torch import Tensor

from backstamp.attention import AttentionBackend
from backstamp.catalogue import build_catalogue
from backstamp.construction import RunnerShape, build
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.host import HostFacts, this_host
from backstamp.launch import Requests, make_launch
from backstamp.model import ModelFacts, model_from_config
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp
from check_runs import KERNEL_SECONDS, check_all, check_table, merge_lines
from peers import peers
from shapes import DIM, HEADS, KV_HEADS, LATENT, MLA_HEADS, ROTARY, Data, Shape, mha_data, mla_data, sampled_error

ERROR_BOUND = 1e-2

#: Distributions whose versions the record keeps, where they are installed.
LIBRARIES = (
    *("triton", "flashinfer-python", "tokenspeed-fa3", "fa3-fwd", "tokenspeed-fa4", "tokenspeed-mla"),
    *("sgl-flash-mla", "fla-core", "nvidia-cutlass-dsl"),
)


SHAPES = (
    Shape("prefill", 2, 8192, 8192, 16),
    Shape("prefill", 2, 8192, 8192, 64),
    Shape("decode", 64, 1, 8192, 16),
    Shape("decode", 64, 1, 8192, 64),
    Shape("decode", 8, 1, 32768, 16),
    Shape("decode", 128, 1, 1024, 16),
    Shape("mla_decode", 128, 1, 8192, 64),
)


def main() -> int:
    """Measure what this machine can run, print it, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted({shape.work for shape in SHAPES}))
    parser.add_argument("--output", type=Path, help="write the record here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", nargs="*", metavar="KERNEL", help="check these kernels, or all, and time nothing")
    parser.add_argument("--jobs", type=int, default=4, help="processes that check at a time")
    parser.add_argument("--seconds", type=float, default=KERNEL_SECONDS, help="most seconds one kernel's checks take")
    options = parser.parse_args()
    host = this_host()
    if options.check is not None:
        return check(options.check, options.jobs, options.seconds, options.output, host)
    if not torch.cuda.is_available():
        print("bench/kernels.py: needs a CUDA or ROCm GPU to time, got none; --check runs here too", file=sys.stderr)
        return 2
    results: list[dict[str, object]] = []
    not_run: list[dict[str, str]] = []
    for shape in SHAPES:
        if options.only in (None, shape.work):
            measure_shape(shape, host, results, not_run)
    record = {
        "host": host.device_name,
        "versions": versions(),
        "limits": limits(),
        "results": with_ratios(results),
        "not_run": not_run,
    }
    write(options.output, record)
    print(json.dumps(record, indent=1) if options.json else table(record))
    return 0


def check(kernels: list[str], jobs: int, seconds: float, output: Path | None, host: HostFacts) -> int:
    """Hold kernels against float64 and put the lines beside what was timed, kernel by kernel as they end."""
    known = [kernel for slot, kernel in build_catalogue(discover()).rows if slot == "attention"]
    told: list[dict[str, object]] = []
    for lines in check_all(kernels or known, jobs, seconds):
        told += lines
        before = read(output)
        found = before.get("versions", {}) | versions()
        about = {"host": host.device_name or f"{host.arch} CPU", "device": host.device, "arch": host.arch}
        write(output, about | {"versions": found, "checks": merge_lines(before.get("checks", []), lines)})
    print(check_table(told))
    return int(any(line["status"] not in ("ok", "refused") for line in told))


def write(path: Path | None, record: dict[str, object]) -> None:
    """Bring a record up to date: what this run did not do stays as another run left it."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(read(path) | record, indent=1) + "\n", "utf-8")


def read(path: Path | None) -> dict[str, Any]:
    """The record as it is, empty where there is none."""
    return json.loads(path.read_text("utf-8")) if path is not None and path.exists() else {}


def measure_shape(
    shape: Shape, host: HostFacts, results: list[dict[str, object]], not_run: list[dict[str, str]]
) -> None:
    """Every kernel of the catalogue, then the peers called directly, on one set of tensors."""
    data = mla_data(shape) if shape.work == "mla_decode" else mha_data(shape)
    runs: list[tuple[str, str, Callable[[], Callable[[], Tensor]]]] = []
    for kernel in (name for slot, name in build_catalogue(discover()).rows if slot == "attention"):
        runs.append((kernel, "", lambda kernel=kernel: built_run(kernel, data, host)))
    runs += peers(data)
    for kernel, library, prepare in runs:
        try:
            run = prepare()
            error = sampled_error(run(), data)
            if not error <= ERROR_BOUND:
                raise ArithmeticError(f"relative error {error:.1e} on sampled rows")
            us = microseconds(run)
        except (BackstampError, ImportError, RuntimeError, ArithmeticError, NotImplementedError, TypeError) as reason:
            first = str(reason).strip().splitlines()[0][:240] if str(reason).strip() else type(reason).__name__
            not_run.append({"work": shape.work, "shape": shape.label, "kernel": kernel, "reason": first})
            continue
        results.append(
            {
                "work": shape.work,
                "shape": shape.label,
                "kernel": kernel,
                "library": library or kernel,
                "us": round(us, 1),
                "tflops": round(data.flops / us / 1e6, 1),
                "tbps": round(data.bytes / us / 1e6, 3),
                "rel_error": error,
            }
        )
        print(f"{shape.work:11} {shape.label:28} {kernel:34} {us:9.1f} us", file=sys.stderr, flush=True)


def built_run(kernel: str, data: Data, host: HostFacts) -> Callable[[], Tensor]:
    """A kernel through its built, stamped backend: plan outside, `forward` is what is timed."""
    phase = "decode" if data.shape.q_len == 1 else "prefill"
    asked = Requests(**{f"{phase}_attention_backend": kernel}, page_size=data.shape.page_size)
    catalogue = build_catalogue(discover())
    plan = resolve(make_launch(asked), EngineFacts(name="bench"), model_of(data), host, catalogue)
    ran = plan.phase(phase).groups[0].kernel
    if ran != kernel:
        raise NotImplementedError(f"the key leads to {ran} here, which has a line of its own")
    pages = data.kv.k.shape[0]
    runner = RunnerShape("cuda:0", (data.layer,), data.shape.rows, data.q.shape[0], pages, data.shape.kv_len)
    backend: AttentionBackend[object] = build(plan, runner, catalogue).serving_attention_backend(phase)
    assert read_stamp(backend).kernel == kernel
    state, out = backend.plan(data.batch), torch.empty_like(data.q[..., : data.layer.v_head_dim])
    return lambda: backend.forward(data.q, data.kv, data.layer, state, out=out)


def model_of(data: Data) -> ModelFacts:
    """Facts of a one-layer model with the data's attention."""
    config: dict[str, object] = {"model_type": "llama", "dtype": "bfloat16", "num_hidden_layers": 1}
    if data.shape.work == "mla_decode":
        config |= {"model_type": "deepseek_v3", "num_attention_heads": MLA_HEADS, "kv_lora_rank": LATENT}
        config |= {"qk_rope_head_dim": ROTARY, "hidden_size": 7168, "v_head_dim": 128, "qk_nope_head_dim": 128}
    else:
        config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "hidden_size": 4096}
    return model_from_config(config)


def microseconds(run: Callable[[], Tensor]) -> float:
    """Median time of one call over CUDA events, caches flushed between calls."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=40, rep=200, return_mode="median")) * 1e3


def limits() -> dict[str, float]:
    """What this machine's memory and matrix units reach in this run."""
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_us = microseconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul_us = microseconds(lambda: a @ b)
    return {
        "copy_tbps": round(4 * source.numel() / copy_us / 1e6, 2),
        "bf16_tflops": round(2 * 8192**3 / matmul_us / 1e6, 1),
    }


def versions() -> dict[str, str]:
    """What was measured with what."""
    named = {"torch": torch.__version__}
    if torch.version.cuda is not None:
        named["cuda"] = torch.version.cuda
    for name in LIBRARIES:
        try:
            named[name] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
    return named


def with_ratios(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """Each row with its speed relative to the fastest of its shape: 1.0 is the fastest."""
    best: dict[tuple[object, object], float] = {}
    for row in results:
        key = (row["work"], row["shape"])
        best[key] = min(best.get(key, math.inf), float(str(row["us"])))
    return [
        {**row, "ratio_to_best": round(best[row["work"], row["shape"]] / float(str(row["us"])), 3)} for row in results
    ]


def table(record: dict[str, object]) -> str:
    """The record for people."""
    lines = [f"{record['host']}: {record['versions']}, limits {record['limits']}"]
    head = f"{'work':11} {'shape':28} {'kernel':36} {'us':>9} {'TFLOP/s':>8} {'TB/s':>6} {'error':>8} {'of best':>7}"
    lines.append(head)
    results: list[dict[str, object]] = record["results"]  # type: ignore[assignment]
    for row in results:
        lines.append(
            f"{row['work']:11} {row['shape']:28} {row['kernel']:36} {row['us']:>9} {row['tflops']:>8} {row['tbps']:>6}"
            f" {row['rel_error']:>8.1e} {row['ratio_to_best']:>7}"
        )
    missing: list[dict[str, str]] = record["not_run"]  # type: ignore[assignment]
    lines += [f"not run: {row['work']} {row['shape']} {row['kernel']}: {row['reason']}" for row in missing]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
