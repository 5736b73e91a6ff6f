"""The command: what it prints, what it answers as JSON, and its exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from backstamp.testing.dists import write_plugin
from tests.children import COMMAND, ordinary_environment

MODELS = Path(__file__).parent.parent / "data" / "models"


def backstamp(
    *arguments: str, path: Path | None = None, columns: int = 80, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Run the command in a child; `path` is put first on its module path."""
    environment = {**ordinary_environment(path), "COLUMNS": str(columns), "NO_COLOR": "1"}
    command = [sys.executable, "-c", COMMAND, *arguments]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False)
    return child.returncode, child.stdout, child.stderr


def answered(*arguments: str) -> dict[str, object]:
    """The JSON of a command that succeeds."""
    status, out, err = backstamp(*arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def test_list_shows_plugins_kernels_and_failures(tmp_path: Path) -> None:
    """Installed kernels with their distribution, and a broken plugin with its cause."""
    write_plugin(tmp_path / "site-packages", "broken", source="import nothing_of_this_name")
    status, out, _ = backstamp("list", path=tmp_path / "site-packages")
    assert status == 0
    assert re.search(r"torch_native +attention +mha, mla", out)
    assert "nothing_of_this_name" in out


def test_plan_json_has_the_published_keys() -> None:
    """The keys tools rely on, all five phases among them."""
    plan = answered("resolve", "--host", "h100", "--model", str(MODELS / "mha.json"))
    published = {
        "schema", "host", "model", "role", "phases", "linear", "page_size", "page_size_source", "layouts", "losses",
        "warnings", "digest",
    }  # fmt: skip
    assert published <= set(plan)
    assert list(plan["phases"]) == ["prefill", "decode", "verify", "draft_decode", "draft_extend"]
    phase = plan["phases"]["prefill"]
    assert {"requested", "setting", "kernel", "plugin", "library", "source", "groups", "verdicts"} <= set(phase)
    assert set(phase["plugin"]) == {"name", "distribution", "version"}
    assert {"kernel", "accepted", "code", "field", "wanted", "have", "message", "plugin"} == set(phase["verdicts"][0])
    assert {"component", "family", "layers", "kernel", "plugin", "library"} <= set(phase["groups"][0])


def test_a_refusal_is_json_with_its_parts_and_exits_1() -> None:
    """Tools get the five parts and the verdicts on standard output."""
    status, out, _ = backstamp("resolve", "--host", "epyc", "--attention-backend", "triton", "--json")
    assert status == 1
    error = json.loads(out)["error"]
    assert set(error) == {"code", "message", "who", "needed", "found", "considered", "fix", "verdicts"}
    assert (error["code"], error["needed"]) == ("refused", "cuda or rocm")
    assert "epyc: cpu" in error["found"]


def test_a_refusal_in_a_terminal_says_who_needed_found_and_what_to_do() -> None:
    """Text goes to standard error and fits the terminal."""
    status, out, err = backstamp("resolve", "--host", "epyc", "--attention-backend", "triton")
    assert (status, out) == (1, "")
    who = f"prefill attention backend 'triton' (plugin triton, backstamp-triton {version('backstamp-triton')})"
    assert f"{who}, asked for with --attention-backend: needs cuda or rocm" in " ".join(err.split())
    assert "what to do: Keys that resolve for prefill here:" in err
    assert max(len(line) for line in err.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("resolve", "--nonsense"), "No such option"),
        (("resolve", "--page-size", "0"), "a whole number >= 1"),
        (("resolve", "--page-size", "x"), "valid integer"),
        (("resolve", "--host", "h1000"), "Did you mean 'h100'?"),
        (("resolve", "--device", "gpu"), "one of cuda, rocm"),
        (("resolve", "--device", "cuda"), "a cuda device 0 on this machine"),
        (("resolve", "--host", "h100", "--device", "cpu"), "the device of host h100"),
        (("resolve", "--model", "no-such-file.json"), "No such file"),
        (("resolve", "--engine", "no-such-file.json"), "No such file"),
        (("resolve", "--speculative-attention-mode", "both"), "prefill or decode"),
        (("resolve", "--kv-cache-dtype", "fp7"), "one of"),
        (("build",), "--fake"),
        (("demo", "--host", "h100"), "this machine"),
        (("demo", "--engine", "no-such-file.json"), "--draft-model"),
        (("frobnicate",), "No such command"),
        (("hosts", "record", "-o", "/no/such/folder/box.json"), "a file that can be written"),
        (("declare", "nothing_of_this_name"), "ModuleNotFoundError"),
        (("declare", "json"), "implements no Backstamp hook"),
        (("resolve", "--host", "x" * 5000), "neither a file nor a known name"),
        (("resolve", "--bypass", "arch"), "companion"),
        (("resolve", "--feature", "x=maybe"), "on or off"),
        (("resolve", "--feature", "x=on"), "none does"),
        (("resolve", "--component-backend", "vision"), "NAME=KEY"),
        (("resolve", "--setting", "=x"), "NAME=VALUE"),
        (("resolve", "--duplicate", "triton"), "distribution:name"),
        (("resolve", "--allow", "a", "--deny", "a"), "a in both"),
    ],
)
def test_usage_is_one_clear_error_and_exits_2(arguments: tuple[str, ...], word: str) -> None:
    """Wrong flags, malformed values and missing files never print a traceback."""
    status, _, err = backstamp(*arguments, columns=400)
    assert status == 2
    assert word in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "needs JSON"),
        ("[]", "a JSON object"),
        ("{}", "model_type"),
        ('{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 7, "hidden_size": 64}', "hidden_size"),
    ],
)
def test_a_malformed_model_is_one_clear_line(tmp_path: Path, text: str, word: str) -> None:
    """A config that cannot be read names the file and the field."""
    path = tmp_path / "config.json"
    path.write_text(text, "utf-8")
    status, _, err = backstamp("resolve", "--model", str(path), columns=400)
    assert status == 2
    assert word in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize("text", ["{", "[]", '{"device": "cuda"}', '{"device": "gpu", "arch": "9.0"}'])
def test_a_malformed_host_file_is_one_clear_line(tmp_path: Path, text: str) -> None:
    """A host file that cannot be read says how to record one, or which word was meant."""
    path = tmp_path / "host.json"
    path.write_text(text, "utf-8")
    status, _, err = backstamp("resolve", "--host", str(path))
    assert status == 2
    assert "host" in err
    assert "Traceback" not in err


def test_hosts_record_reads_back_as_the_same_host(tmp_path: Path) -> None:
    """What was recorded here can be asked about from any machine, libraries included."""
    path = tmp_path / "box.json"
    assert backstamp("hosts", "record", "--output", str(path))[0] == 0
    plan = answered("resolve", "--host", str(path))
    assert plan["phases"]["decode"]["kernel"] == "torch_native"
    assert plan["phases"]["decode"]["library"]["version"] is not None
    assert "assumed" not in [warning["code"] for warning in plan["warnings"]]


def test_hosts_show_keeps_one_reason_for_every_failed_probe() -> None:
    """A machine without an accelerator says which probes found nothing, and where they looked."""
    status, out, _ = backstamp("hosts", "show")
    assert status == 0
    assert "/dev/kfd" in out


def test_hosts_list_names_every_profile() -> None:
    """Nineteen described machines ship."""
    assert len(json.loads(backstamp("hosts", "list", "--json")[1])) == 19


def test_explain_prints_five_phases_and_the_flag_that_sets_each() -> None:
    """vllm #31787: how to set a backend per phase is one command away."""
    status, out, _ = backstamp("explain", "flex_attention", "--host", "h100")
    assert status == 0
    for phase, flag in (
        ("prefill", "--prefill-attention-backend"),
        ("decode", "--decode-attention-backend"),
        ("verify", "--verify-attention-backend"),
        ("draft_decode", "--draft-attention-backend"),
        ("draft_extend", "--draft-attention-backend"),
    ):
        assert re.search(rf"^{phase} .*{flag}", out, re.MULTILINE), out


def test_explain_of_an_unknown_key_names_the_near_match() -> None:
    """A typo is answered with the key that was meant."""
    status, _, err = backstamp("explain", "tritn")
    assert status == 1
    assert "'triton'" in err


@pytest.mark.parametrize("form", ["table", "md", "csv", "json"])
def test_matrix_comes_in_four_forms(form: str) -> None:
    """Alias x host x phase, for people and for tools."""
    status, out, err = backstamp("matrix", "triton", "--host", "h100", "--host", "epyc", "--format", form)
    assert status == 0, err
    assert "epyc" in out
    if form == "csv":
        assert out.splitlines()[0] == "alias,host,phase,kernel,code,reason"
        assert "triton,h100,prefill,triton,accepted,accepted" in out
    if form == "json":
        assert len(json.loads(out)["cells"]) == 10


def test_build_fake_prints_stamps_and_steps() -> None:
    """The stamps are read from built objects and from every step of the draft loop."""
    arguments = ("build", "--fake", "--role", "draft", "--host", "a100", "--draft-attention-backend", "triton")
    report = answered(*arguments, "--model", str(MODELS / "mha.json"), "--speculative-num-steps", "4")
    phase = report["phases"]["draft_decode"]
    assert (phase["kernel"], phase["steps"]) == ("triton", ["triton"] * 3)
    assert phase["stamp"]["kernel"] == "triton"
    assert report["phases"]["verify"]["kernel"] is None


def test_a_draft_model_is_resolved_beside_its_target() -> None:
    """`--draft-model` with the draft role: the target's choice is inherited where it can serve."""
    target, draft = str(MODELS / "mla.json"), str(MODELS / "mha.json")
    plan = answered("resolve", "--role", "draft", "--host", "a100", "--model", target, "--draft-model", draft)
    assert plan["model"] == "llama"
    assert plan["phases"]["draft_decode"]["source"] == "inherited"


def test_kernels_refused_for_one_reason_share_a_line() -> None:
    """Twenty kernels that are for another device are one line to read, not twenty."""
    status, out, err = backstamp("resolve", "--host", "epyc")
    assert status == 0, err
    told = [line for line in out.splitlines() if "needs cuda, got cpu" in line]
    assert len(told) == 1
    assert told[0].startswith("cutedsl_mla, fa4,")


def test_doctor_finds_a_broken_plugin_and_exits_1(tmp_path: Path) -> None:
    """A plugin that kills the process that loads it is found in a child."""
    site = tmp_path / "site-packages"
    write_plugin(site, "killer", kernel="killer", carries_json=True)
    (site / "killer" / "plugin.py").write_text("import os; os._exit(7)", "utf-8")
    status, out, _ = backstamp("doctor", path=site)
    assert status == 1
    assert "exit status 7" in out
    status, out, err = backstamp("doctor")
    assert status == 0, out + err


def test_doctor_survives_a_plugin_that_ends_the_process_at_discovery(tmp_path: Path) -> None:
    """Without backstamp.json the plugin would take discovery down; doctor tries it in a child and names it."""
    site = tmp_path / "site-packages"
    write_plugin(site, "killer", source="import os; os._exit(0)")
    status, out, _ = backstamp("doctor", path=site)
    assert status == 1
    assert "killer" in out
    assert "ends the process" in " ".join(out.split())


def test_doctor_lists_a_factory_module_that_does_not_exist(tmp_path: Path) -> None:
    """A factory path that leads nowhere is a fault before anybody builds it."""
    site = tmp_path / "site-packages"
    write_plugin(site, "lost", kernel="lost")
    status, out, _ = backstamp("doctor", path=site, columns=200)
    assert status == 1
    assert "factory module lost.backend does not exist" in out


def test_a_kernel_of_the_other_slot_is_told(tmp_path: Path) -> None:
    """A key that exists in the attention slot is not called uninstalled in the linear one."""
    flags = ("--host", "h100", "--model", str(MODELS / "hybrid.json"), "--linear-attn-backend", "flex_attention")
    status, _, err = backstamp("resolve", *flags, columns=300)
    assert status == 1
    assert "exists in the attention slot" in err


def test_known_keys_are_listed_whole() -> None:
    """A typo is answered with every key there is, the last ones of the alphabet too."""
    status, _, err = backstamp("resolve", "--host", "h100", "--attention-backend", "flashinfr")
    assert status == 1
    assert "xqa (backstamp-trtllm)" in " ".join(err.split())


def linear_rows(text: str) -> dict[str, list[str]]:
    """The rows of the linear slot in a table, by phase."""
    rows = [line.split() for line in text.splitlines() if line.startswith("linear ")]
    return {phase: cells for _, phase, *cells in rows}


@pytest.mark.parametrize("speculation", [(), ("--speculative-algorithm", "EAGLE")], ids=["plain", "eagle"])
def test_the_linear_slot_is_told_for_the_phases_it_runs(speculation: tuple[str, ...]) -> None:
    """A plan says its libraries, a build its stamps, an explanation why; nothing is said of a verify nobody runs."""
    flags = ("--host", "h100", "--model", str(MODELS / "hybrid.json"), *speculation)
    phases = {"decode", "prefill", *(("verify",) if speculation else ())}
    told = linear_rows(backstamp("resolve", *flags, columns=120)[1])
    assert set(told) == phases
    assert told["prefill"] == ["-", "flashinfer", "flashinfer-python", "(assumed)", "auto"]
    stamps = backstamp("build", "--fake", *flags, columns=120)[1].partition("Stamps read")[2]
    assert linear_rows(stamps)["prefill"] == ["flashinfer", "backstamp-linear-attn", "-"]
    assert set(linear_rows(stamps)) == phases
    because = linear_rows(backstamp("explain", *flags, columns=200)[1])
    assert set(because) == phases
    assert because["decode"][-1] == "--linear-attn-decode-backend"


def test_build_json_has_the_linear_stamps() -> None:
    """Read from the objects, as those of attention are."""
    flags = ("--host", "h100", "--model", str(MODELS / "hybrid.json"))
    linear = answered("build", "--fake", *flags)["linear"]
    assert linear["decode"]["stamp"]["slot"] == "linear"
    assert [row["phase"] for row in answered("explain", *flags)["linear"]] == ["decode", "prefill"]


def test_no_sync_is_told_of_a_verify_nobody_runs() -> None:
    """Nothing drafts; with a draft it is told."""
    flags = ("resolve", "--host", "ascend910b", "--model", str(MODELS / "hybrid.json"))
    assert "host_sync" not in backstamp(*flags)[1]
    assert "host_sync: verify: ascend" in backstamp(*flags, "--speculative-algorithm", "EAGLE")[1]


def test_plugin_strings_are_never_read_as_markup(tmp_path: Path) -> None:
    """Brackets in a plugin's exception are printed as they are."""
    site = tmp_path / "site-packages"
    write_plugin(site, "loud", source="raise RuntimeError('[red]down[/red] [/]')")
    status, out, _ = backstamp("list", path=site)
    assert status == 0
    assert "[red]down[/red]" in out


def test_declare_writes_what_the_module_says_and_check_finds_a_stale_file(tmp_path: Path) -> None:
    """`backstamp declare` and `--check` hold backstamp.json to plugin.py."""
    package = write_plugin(tmp_path, "mine", kernel="mine")
    path = tmp_path / package / "backstamp.json"
    assert backstamp("declare", f"{package}.plugin", path=tmp_path)[0] == 0
    assert '"mine"' in path.read_text("utf-8")
    assert backstamp("declare", "--check", f"{package}.plugin", path=tmp_path)[0] == 0
    path.write_text(path.read_text("utf-8").replace("mine", "yours"), "utf-8")
    assert backstamp("declare", "--check", f"{package}.plugin", path=tmp_path)[0] == 1


def test_tables_fit_eighty_columns() -> None:
    """Nothing a newcomer runs first overflows a plain terminal."""
    for arguments in (
        ("list",),
        ("resolve", "--host", "h100"),
        ("hosts", "list"),
        ("matrix", "--host", "h100"),
        ("--help",),
    ):
        _, out, _ = backstamp(*arguments)
        assert max(len(line) for line in out.splitlines()) <= 80, arguments


@pytest.mark.parametrize(
    "arguments",
    [("resolve", "--nonsense"), ("resolve", "--page-size", "x"), ("frobnicate",), ("hosts", "show", "a", "b")],
)
def test_an_error_of_usage_is_json_too_where_json_was_asked_for(arguments: tuple[str, ...]) -> None:
    """A tool that reads JSON reads every refusal, those of the command line's own parser included."""
    status, out, err = backstamp(*arguments, "--json")
    assert (status, err) == (2, "")
    assert json.loads(out)["error"]["code"] == "bad_input"


HOSTILE = "[red]h\u001b[2J\n::error::y"


@pytest.mark.parametrize("command", [("resolve",), ("explain",), ("explain", "torch_native"), ("hosts", "show")])
def test_names_from_files_reach_no_terminal_raw(tmp_path: Path, command: tuple[str, ...]) -> None:
    """A host, a model and an engine named by strangers: no escape code, no CI command, no markup."""
    record = {"schema": 1, "name": HOSTILE, "device": "cpu", "arch": "x86_64", "device_name": HOSTILE}
    (tmp_path / "host.json").write_text(json.dumps(record), "utf-8")
    config = {**json.loads((MODELS / "mha.json").read_text("utf-8")), "model_type": HOSTILE}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "engine.json").write_text(json.dumps({"name": HOSTILE, "page_size": 16}), "utf-8")
    flags = ("--host", "host.json", "--model", "config.json", "--engine", "engine.json")
    files = ("host.json",) if command[0] == "hosts" else flags
    status, out, err = backstamp(*command, *files, cwd=tmp_path)
    assert status == 0, err
    assert "\x1b" not in out
    assert not [line for line in out.splitlines() if line.startswith("::")]
    assert "[red]h" in out


def test_a_draft_model_that_is_not_there_is_told_for_its_target_too() -> None:
    """A target's plan does not read the draft's config, and a wrong name must not wait until the draft's does."""
    status, _, err = backstamp("resolve", "--host", "h100", "--draft-model", "/no/such/config.json")
    assert status == 2
    assert "No such file" in err


def test_explain_tells_components_and_warnings(tmp_path: Path) -> None:
    """What runs beside the main component, and what resolve warns about, is no secret of resolve."""
    flags = (
        "explain",
        "--host",
        "h100",
        "--model",
        str(MODELS / "mllama.json"),
        "--verify-attention-backend",
        "triton",
    )
    answer = answered(*flags)
    assert {row["component"] for row in answer["components"]} == {"cross_attention", "vision"}
    assert {"unused", "assumed"} <= {row["code"] for row in answer["warnings"]}
    _, out, _ = backstamp(*flags)
    assert "vision" in out
    assert "unused: --verify-attention-backend triton" in out
