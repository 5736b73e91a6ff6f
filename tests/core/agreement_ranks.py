"""One rank of a job of four: agrees, then differs, then loses a rank; run as a program, once a rank.

Arguments: tcp, file or gloo; rank; world size; a folder; `dies` or `hangs`; the rank that does. It prints one line of
JSON: what became of each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from backstamp.agreement import agree
from backstamp.errors import BackstampError
from backstamp.launch import Requests
from backstamp.plan import Plan
from tests.resolving import kernel, plan_of

#: Of the step that loses a rank. The first steps wait for ranks that are still starting.
TIMEOUT_S = 5.0
#: Longer than the test waits, so that no timeout but `agree`'s own can end a step.
START_S = timedelta(seconds=300)


def main() -> None:
    """Run the steps of this rank: equal plans, another plan on rank 2, and one rank gone or silent."""
    transport, folder, end = sys.argv[1], sys.argv[4], sys.argv[5]
    rank, world_size, lost = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[6])
    through = _through(transport, rank, world_size, Path(folder))
    place = (rank, world_size) if transport != "gloo" else (None, None)
    usual = plan_of([kernel("flashinfer"), kernel("triton")])
    unlike = plan_of([kernel("flashinfer"), kernel("triton")], Requests(decode_attention_backend="triton"))
    steps: dict[str, object] = {}
    steps["equal"] = _step(through, usual, place)
    # ranks of unlike hosts that run the same agree
    steps["hosts"] = _step(through, replace(usual, host=f"host {rank}"), place)
    steps["differs"] = _step(through, unlike if rank == 2 else usual, place)
    if rank == lost and end == "dies":
        print(json.dumps(steps))
        sys.stdout.flush()
        os._exit(9)
    if rank == lost and end == "hangs":
        time.sleep(600)
    steps["ends"] = _step(through, usual, place, TIMEOUT_S)
    print(json.dumps(steps))
    sys.stdout.flush()
    # a group with a dead rank cannot be taken down in order
    os._exit(0)


def _through(transport: str, rank: int, world_size: int, folder: Path) -> object:
    if transport == "file":
        return dist.FileStore(str(folder / "store"), world_size)
    if transport == "gloo":
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=world_size, timeout=START_S
        )
        return dist.group.WORLD
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, True, START_S, False)
        (folder / "port.new").write_text(str(store.port), "utf-8")
        (folder / "port.new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.02)
    return dist.TCPStore("127.0.0.1", int(port.read_text("utf-8")), world_size, False, START_S)


def _step(through: object, plan: Plan, place: tuple[int | None, int | None], timeout_s: float = 90.0) -> dict[str, str]:
    try:
        agree(through, plan, *place, timeout_s=timeout_s)
    except BackstampError as error:
        return error.as_json()["error"]
    return {"code": "agreed"}


if __name__ == "__main__":
    main()
