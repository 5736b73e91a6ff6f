"""A job on two GPUs whose main group is NCCL, and whose ranks agree through the store before their first collective.

`python tests/core/nccl_agreement.py` starts both ranks, prints one line of JSON for each and exits 0 if all steps went
as they must. `--backend gloo` runs the same job without GPUs, but for the step that hands in an NCCL group.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from backstamp.agreement import agree
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.plan import Plan
from backstamp.resolution import resolve
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host

WORLD_SIZE = 2
START_S = timedelta(seconds=120)
EXPECTED = {
    "store": "agreed",
    "nccl group": "bad_input",
    "all_reduce": "3.0",
    "gloo beside": "agreed",
    "differs": "disagreement",
    "dies": "rank_missing",
}


def main() -> int:
    """Start the ranks, or be one; 0 where every step of every rank went as it must."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.rank is not None:
        run_rank(asked.backend, asked.rank, asked.folder)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--backend", asked.backend, "--folder", folder, "--rank"]
        pipe = subprocess.PIPE
        ranks = [subprocess.Popen([*command, str(rank)], stdout=pipe, text=True) for rank in range(WORLD_SIZE)]
        try:
            lines = [rank.communicate(timeout=240)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    failed = 0
    for rank, line in enumerate(lines):
        print(line.strip() or json.dumps({"rank": rank, "steps": None, "status": ranks[rank].returncode}))
        expected = {step: word for step, word in EXPECTED.items() if rank == 0 or step != "dies"}
        if asked.backend == "gloo":
            del expected["nccl group"]
        steps = json.loads(line)["steps"] if line.strip() else {}
        failed += {step: found["code"] for step, found in steps.items()} != expected
    return 1 if failed else 0


def run_rank(backend: str, rank: int, folder: Path) -> None:
    """One rank: agree first, then the job's collective, then disagree, then lose rank 1."""
    store = _store(rank, folder)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    group_store = dist.PrefixStore("main group", store)
    dist.init_process_group(backend, store=group_store, rank=rank, world_size=WORLD_SIZE, timeout=START_S)
    steps = {"store": _agree(store, _plan(), rank)}
    if backend == "nccl":
        torch.cuda.set_device(device)
        steps["nccl group"] = _agree(dist.group.WORLD, _plan(), None)
    total = torch.full((1,), rank + 1.0, device=device)
    dist.all_reduce(total)
    steps["all_reduce"] = {"code": str(total.item())}
    steps["gloo beside"] = _agree(dist.new_group(backend="gloo"), _plan(), None)
    steps["differs"] = _agree(store, _plan("triton" if rank == 1 else None), rank)
    if rank == 0:
        steps["dies"] = _agree(store, _plan(), rank, timeout_s=5.0)
    print(json.dumps({"rank": rank, "backend": backend, "device": _name(device), "steps": steps}))
    sys.stdout.flush()
    # a group with a dead rank cannot be taken down in order
    os._exit(0)


def _store(rank: int, folder: Path) -> dist.TCPStore:
    """The job's store, served by rank 0 at a port of its own choice."""
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, WORLD_SIZE, True, START_S, False)
        (folder / "port.new").write_text(str(store.port), "utf-8")
        (folder / "port.new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.05)
    return dist.TCPStore("127.0.0.1", int(port.read_text("utf-8")), WORLD_SIZE, False, START_S)


def _plan(decode: str | None = None) -> Plan:
    offers = [cpu_offer("flashinfer", "fake"), cpu_offer("triton", "fake")]
    launch = make_launch(Requests(decode_attention_backend=decode))
    return resolve(
        launch, EngineFacts(), default_model(), described_host("epyc"), catalogue_of(fake_plugin("p", offers))
    )


def _agree(through: object, plan: Plan, rank: int | None, timeout_s: float = 60.0) -> dict[str, str]:
    try:
        agree(through, plan, rank, None if rank is None else WORLD_SIZE, timeout_s=timeout_s)
    except BackstampError as error:
        return {"code": error.code, "message": error.message}
    return {"code": "agreed"}


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
