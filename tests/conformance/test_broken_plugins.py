"""The kit over the loopback plugin, whole, and over plugins with one thing broken: each fails for its own reason."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conformance.site import failures, install, run_kit

#: The answer of the kernel, and where the backend keeps its step: what the broken ones change.
ANSWER = "        out.copy_(answer)\n"
CALL = "answer, logs = reference_attention(q, kv, layer, state, new=new)"
#: A plugin that reaches for a driver is ready not to find one, as on the machine of these tests.
QUIETLY = "import contextlib\n\nwith contextlib.suppress(OSError):\n"
NO_PROCESSES = "declarations,imports,stamps,contract,undeclared,numerics,determinism"


class Broken(NamedTuple):
    """What is broken, which checks find it, and words that one of the findings holds."""

    changes: tuple[tuple[str, str, str], ...]
    checks: frozenset[str]
    words: str
    only: str = NO_PROCESSES


def backend(old: str, new: str) -> tuple[str, str, str]:
    """A change of backend.py."""
    return "backend.py", old, new


BROKEN = {
    "wrong stamp": Broken(
        (backend('Built("loopback"', 'Built("echo"'),),
        frozenset({"stamps"}),
        "'echo', which is an alias and never a stamp",
    ),
    "import side effect": Broken(
        (("plugin.py", "from backstamp.hookspecs", "import torch\nfrom backstamp.hookspecs"),),
        frozenset({"imports"}),
        "imported torch (import_side_effect.plugin, line 4)",
    ),
    "driver touched": Broken(
        (("plugin.py", "LOOPBACK = ", f"import ctypes\n{QUIETLY}    ctypes.CDLL('libcuda.so.1')\nLOOPBACK = "),),
        frozenset({"imports"}),
        "loaded the driver library libcuda.so.1",
    ),
    "driver tool run": Broken(
        (("plugin.py", "LOOPBACK = ", f"import subprocess\n{QUIETLY}    subprocess.run(['nvidia-smi'])\nLOOPBACK = "),),
        frozenset({"imports"}),
        "ran nvidia-smi",
    ),
    "dropped tree mask": Broken(
        (
            backend("from backstamp.factories", "from dataclasses import replace\n\nfrom backstamp.factories"),
            backend("layer, state, new=new)", "layer, replace(state, tree=None), new=new)"),
        ),
        frozenset({"numerics", "contract"}),
        "verify, tree mask, qlen: output is off",
    ),
    "lying head dim": Broken(
        (backend(ANSWER, "        out.copy_(answer if layer.head_dim != 96 else answer[..., :1])\n"),),
        frozenset({"numerics"}),
        "prefill, head dims 96/96: output is off",
    ),
    "head dim it cannot run": Broken(
        (backend(CALL, CALL + "\n        assert layer.head_dim != 96, 'no instance'"),),
        frozenset({"numerics"}),
        "head dims 96/96: raised AssertionError: no instance",
    ),
    "NaN leak": Broken(
        (backend(ANSWER, "        out.copy_(answer if kv is None else answer + 0 * kv.k.double().sum())\n"),),
        frozenset({"numerics", "contract"}),
        "output is not finite",
    ),
    "order dependence": Broken(
        (backend(ANSWER, "        out.copy_(answer * (1 + 1e-6 * state.num_rows))\n"),),
        frozenset({"determinism"}),
        "has other bits alone",
    ),
    "dropped softcap": Broken(
        (
            ("plugin.py", '"softcap", ', ""),
            backend("from backstamp.factories", "from dataclasses import replace\n\nfrom backstamp.factories"),
            backend("        check_call(", "        layer = replace(layer, softcap=0.0)\n        check_call("),
        ),
        frozenset({"undeclared"}),
        "a softcap: undeclared, handed over and not refused: it was dropped",
    ),
    "served and undeclared": Broken(
        (
            ("plugin.py", '"sinks", ', ""),
            ("plugin.py", '    sink_dtypes=frozenset({"fp32", "bf16"}),\n', ""),
            backend("        check_call(", "        # check_call("),
        ),
        frozenset({"undeclared"}),
        "sinks: undeclared, handed over and not refused: it was read",
    ),
    "another out": Broken(
        (backend(ANSWER, "        out = answer.to(q.dtype)\n"),),
        frozenset({"numerics", "contract", "determinism"}),
        "forward answered another tensor than the `out` it was given",
    ),
    "missing keyword": Broken(
        (backend(", indices=None):", "):"), backend(", indices=indices)", ")")),
        frozenset({"contract", "undeclared"}),
        "needs forward(q, kv, layer, state, *, out=..., lse=..., new=..., q_rope=..., indices=...)",
    ),
    "keyword of its own": Broken(
        (backend("def plan(self, batch, *, state", "def plan(self, batch, *, stream=None, state"),),
        frozenset(),
        "",
    ),
    "the current batch": Broken(
        (
            backend("        return batch\n", "        self.batch = batch\n        return batch\n"),
            backend(CALL, CALL.replace("state", "self.batch")),
            backend("        check_call(", "        state = self.batch\n        check_call("),
        ),
        frozenset({"contract"}),
        "two steps planned before either runs",
    ),
    "stale state": Broken(
        (backend("        return batch\n", "        return batch if state is None else state\n"),),
        frozenset({"contract"}),
        "a state given back for another step right or refused: output is not finite",
    ),
    "writes into the cache": Broken(
        (backend(ANSWER, ANSWER + "        if kv is not None:\n            kv.k.nan_to_num_()\n"),),
        frozenset({"contract"}),
        "wrote into the cache, which is the engine's",
    ),
    "left padding ignored": Broken(
        (
            backend("from backstamp.factories", "from dataclasses import replace\n\nfrom backstamp.factories"),
            backend("layer, state, new=new)", "layer, replace(state, kv_starts=None), new=new)"),
        ),
        frozenset({"contract"}),
        "left padding right or refused: neither refused nor read",
    ),
    "LSE in base 2": Broken(
        (backend("lse.copy_(logs)", "lse.copy_(logs * 1.4427)"),),
        frozenset({"numerics"}),
        "prefill, lse: LSE is off",
    ),
    "container without children": Broken(
        (
            backend(
                "    return Built(",
                "    if 'draft_decode' in request.phases:\n"
                "        return Built('loopback', type('Steps', (), {'attn_backends': []})())\n"
                "    return Built(",
            ),
        ),
        frozenset({"stamps", "numerics"}),
        "a container that exposes its steps as attn_backends",
    ),
    "bound to the first process": Broken(
        (
            backend(
                "    check_build(request)\n",
                "    import multiprocessing\n\n"
                "    assert multiprocessing.parent_process() is None, 'no worker'\n    check_build(request)\n",
            ),
        ),
        frozenset({"processes"}),
        "no worker",
        only="stamps,numerics,processes",
    ),
    "state of the first layer": Broken(
        (
            backend("        return batch\n", "        self.kept = {}\n        return batch\n"),
            backend(CALL, "kv = self.kept.setdefault(id(state), kv)\n        " + CALL),
        ),
        frozenset({"contract"}),
        "two layers of one step: the second layer",
    ),
    "tree read in plan": Broken(
        (
            backend("from backstamp.factories", "from dataclasses import replace\n\nfrom backstamp.factories"),
            backend(
                "        return batch\n",
                "        if batch.tree is not None:\n"
                "            batch = replace(batch, tree=replace(batch.tree, buffer=batch.tree.buffer.clone()))\n"
                "        return batch\n",
            ),
        ),
        frozenset({"contract"}),
        "a tree filled after plan: qlen: output is off",
    ),
    "scale of its own": Broken(
        (
            backend("from backstamp.factories", "from dataclasses import replace\n\nfrom backstamp.factories"),
            backend(CALL, CALL.replace("layer,", "replace(layer, scale=layer.head_dim**-0.5),")),
        ),
        frozenset({"numerics", "contract"}),
        "prefill, plain: output is off",
    ),
    "wrong past 64 keys": Broken(
        (backend(ANSWER, "        out.copy_(answer * (1 if int(state.kv_lens.max()) <= 64 else 1.01))\n"),),
        frozenset({"numerics"}),
        "prefill, long rows: output is off",
    ),
    "wrong past eight rows": Broken(
        (backend(ANSWER, "        out.copy_(answer * (1 if state.num_rows <= 8 else 1.01))\n"),),
        frozenset({"numerics", "determinism"}),
        "decode, many rows: output is off",
    ),
    "cut where it likes": Broken(
        (backend(ANSWER, "        out.copy_(answer * (1 + 1e-6 * (state.num_tokens > 40)))\n"),),
        frozenset({"determinism"}),
        "has other bits",
    ),
    "host lengths trusted": Broken(
        (
            backend("from backstamp.factories", "from dataclasses import replace\n\nfrom backstamp.factories"),
            backend(
                CALL,
                "if state.kv_lens_host is not None:\n"
                "            state = replace(state, kv_lens=state.kv_lens_host)\n        " + CALL,
            ),
        ),
        frozenset({"numerics"}),
        "host lengths that are bounds",
    ),
    "writes past out": Broken(
        (
            backend(
                ANSWER,
                ANSWER + "        wider = [out.shape[0] + 1, *out.shape[1:]]\n"
                "        if out.storage_offset():\n"
                "            out.as_strided(wider, out.stride(), out.storage_offset())[-1] = 0\n",
            ),
        ),
        frozenset({"numerics", "contract", "determinism"}),
        "forward wrote outside the `out` it was given",
    ),
    "ends its process": Broken(
        (
            backend(
                CALL, "if state.tree is not None:\n            import os\n\n            os._exit(0)\n        " + CALL
            ),
        ),
        frozenset({"contract"}),
        "the process ended in it (exit 0); what was left was not run",
    ),
    "aborts": Broken(
        (backend("    check_build(request)\n", "    import os\n\n    os.abort()\n"),),
        frozenset({"stamps"}),
        "the process ended in it (SIGABRT)",
    ),
    "unknown accuracy": Broken(
        (("plugin.py", "    reference=True,", "    reference=True,\n    accuracy='roughly',"),),
        frozenset({"numerics", "contract"}),
        "accuracy class 'roughly'",
    ),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder a module; each test installs its own distribution into a folder below."""
    return tmp_path_factory.mktemp("broken")


def test_the_loopback_plugin_passes_every_check(site: Path) -> None:
    """And every check ran: none is empty."""
    report = run_kit(site / "whole", install(site / "whole", "loopback-attention"))
    assert not failures(report)
    assert (report["exit"], report["passed"], report["counts"]["skipped"]) == (0, True, 0)
    ran = {outcome["check"] for outcome in report["outcomes"]}
    assert ran == {*NO_PROCESSES.split(","), "processes"}
    assert report["counts"]["passed"] > 200


@pytest.mark.parametrize("name", [name for name, broken in BROKEN.items() if broken.checks])
def test_a_broken_plugin_fails_for_its_own_reason(name: str, site: Path) -> None:
    """Its own checks find it, and no other."""
    broken = BROKEN[name]
    folder = site / name.replace(" ", "_")
    distribution = install(folder, name.replace(" ", "-").lower(), broken.changes)
    # numbers take longest, and most of these are none of them
    only = [check for check in broken.only.split(",") if check != "numerics" or check in broken.checks]
    report = run_kit(folder, distribution, "--only", ",".join(only))
    found = failures(report)
    assert report["exit"] == 1
    assert set(found) == broken.checks, found
    assert any(broken.words in text for texts in found.values() for text in texts), found


def test_an_optional_keyword_of_its_own_is_no_fault(site: Path) -> None:
    """A plugin may take more than the contract, as long as it needs no more."""
    folder = site / "keyword"
    distribution = install(folder, "keyword-of-its-own", BROKEN["keyword of its own"].changes)
    assert not failures(run_kit(folder, distribution, "--only", "contract"))


def test_nothing_ran_is_a_failure(site: Path) -> None:
    """A plugin for hardware that is not here has passed its declarations, and no more."""
    folder = site / "elsewhere"
    change = ("plugin.py", 'device="any"', 'device="npu"')
    report = run_kit(folder, install(folder, "elsewhere-attention", [change]))
    assert report["exit"] == 1
    (text,) = failures(report)["nothing-ran"]
    assert "needs npu, got cpu" in text
    assert run_kit(folder, "elsewhere-attention", "--only", "declarations,imports")["exit"] == 0


def test_a_stale_file_of_declarations_is_a_fault(site: Path) -> None:
    """What a wheel carries must say what plugin.py says."""
    folder = site / "stale"
    distribution = install(folder, "stale-attention")
    path = folder / "stale_attention" / "backstamp.json"
    path.write_text(path.read_text("utf-8").replace('"loopback"', '"loupback"'), "utf-8")
    found = failures(run_kit(folder, distribution, "--only", "declarations"))
    assert "does not say what stale_attention.plugin says" in found["declarations"][0]
