"""`backstamp lock` and `backstamp diff`: what they write, what they print and how they exit."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from backstamp.testing.dists import PLUGIN_SOURCE, write_plugin
from tests.core.test_cli import MODELS, backstamp

MHA, MLA = str(MODELS / "mha.json"), str(MODELS / "mla.json")
SERVES_ALL = 'phases=frozenset({{"prefill", "decode", "verify"}})'


def install(site: Path, version: str, source: str) -> Path:
    """One version of a plugin that auto prefers, alone in its folder."""
    shutil.rmtree(site, ignore_errors=True)
    write_plugin(site, "acme-fast", source=source.format(kernel="fast", package="acme_fast"), version=version)
    return site


PREFERRED = PLUGIN_SOURCE.replace('kernel="{kernel}",', 'kernel="{kernel}", priority=99,')
PREFILL_ONLY = PREFERRED.replace(SERVES_ALL, 'phases=frozenset({{"prefill"}})')
WIDE_PAGES = PREFERRED.replace("preferred=16, multiple_of=1", "preferred=64, multiple_of=64")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site folder with version 1.0 of the plugin."""
    return install(tmp_path / "site-packages", "1.0", PREFERRED)


@pytest.fixture
def lock(tmp_path: Path, site: Path) -> Path:
    """A lock made with it."""
    path = tmp_path / "kernels.lock"
    arguments = ("lock", "-o", str(path), "--host", "epyc", "--host", "mi300x", "--page-size", "64")
    status, out, err = backstamp(*arguments, path=site)
    assert status == 0, err
    assert "wrote" in out
    return path


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lock for tests that change nothing about what is installed."""
    path = tmp_path_factory.mktemp("ready") / "kernels.lock"
    assert backstamp("lock", "-o", str(path), "--host", "epyc")[0] == 0
    return path


def test_a_lock_says_what_it_holds_and_fits_the_terminal(tmp_path: Path) -> None:
    """Kernels where there is a plan, the refusal where there is none, exit 0 either way."""
    path = tmp_path / "kernels.lock"
    asked = ("--attention-backend", "triton", "--host", "epyc", "--host", "h100", "--model", MHA, "--model", MLA)
    status, out, err = backstamp("lock", "-o", str(path), *asked)
    assert (status, err) == (0, "")
    assert "refused: prefill attention backend 'triton'" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines()) <= 80
    held = json.loads(path.read_text("utf-8"))
    assert [(entry["host"], entry["model"]) for entry in held["entries"]] == [
        ("epyc", "deepseek_v3"),
        ("epyc", "llama"),
        ("h100", "deepseek_v3"),
        ("h100", "llama"),
    ]
    assert held["launch"]["requests"] == {"attention_backend": "triton"}
    assert not stat.S_IMODE(path.stat().st_mode) & 0o022


def test_a_lock_is_the_same_bytes_whatever_the_order_of_its_flags(tmp_path: Path) -> None:
    """And on standard output where no file is named."""
    status, one, _ = backstamp("lock", "--host", "h100", "--host", "epyc", "--model", MHA, "--model", MLA)
    other = backstamp("lock", "--model", MLA, "--model", MHA, "--host", "epyc", "--host", "h100", "--json")[1]
    assert status == 0
    assert one == other


def test_a_lock_answers_tools_how_much_it_holds(tmp_path: Path) -> None:
    """Counts, and what was refused."""
    path = str(tmp_path / "a.lock")
    asked = ("--attention-backend", "triton", "--host", "epyc", "--host", "h100", "--model", MHA)
    status, out, _ = backstamp("lock", "-o", path, *asked, "--json")
    assert status == 0
    assert json.loads(out) == {"wrote": path, "plans": 1, "refused": [["epyc", "llama", "target", "refused"]]}


def test_a_check_without_a_difference_exits_0(site: Path, lock: Path) -> None:
    """Needing no flags: the launch is in the lock."""
    status, out, err = backstamp("lock", "--check", str(lock), path=site)
    assert (status, err) == (0, "")
    assert "no difference in 2 plan(s)" in out
    answer = json.loads(backstamp("lock", "--check", str(lock), "--json", path=site)[1])
    assert (answer["differences"], answer["count"]) == ([], 0)


def test_a_check_names_host_model_phase_and_the_version_that_changed_it(site: Path, lock: Path) -> None:
    """acme-fast 1.1 no longer decodes."""
    install(site, "1.1", PREFILL_ONLY)
    status, out, err = backstamp("lock", "--check", str(lock), path=site)
    assert (status, err) == (1, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    text = " ".join(out.split())
    for word in ("epyc, llama", "decode", "kernel: fast -> torch_native", "acme-fast 1.0"):
        assert word in text, out
    answer = json.loads(backstamp("lock", "--check", str(lock), "--json", path=site)[1])
    decode = [
        row
        for row in answer["differences"]
        if (row["host"], row["phase"], row["field"]) == ("epyc", "decode", "kernel")
    ]
    assert decode == [
        {
            "host": "epyc",
            "model": "llama",
            "role": "target",
            "phase": "decode",
            "field": "kernel",
            "before": "fast",
            "after": "torch_native",
            "because": ["acme-fast 1.0 -> 1.1"],
            "reason": decode[0]["reason"],
        }
    ]
    assert decode[0]["reason"].startswith("fast needs ")


def test_a_version_that_changes_no_kernel_is_a_difference_too(site: Path, lock: Path) -> None:
    """What runs is another program."""
    install(site, "1.1", PREFERRED)
    status, out, _ = backstamp("lock", "--check", str(lock), path=site, columns=200)
    assert status == 1
    assert "plugin: acme-fast 1.0 -> acme-fast 1.1" in out


def test_a_combination_that_is_refused_since_is_a_difference(site: Path, lock: Path, tmp_path: Path) -> None:
    """The plugin that was asked for by name is gone."""
    path = tmp_path / "named.lock"
    assert backstamp("lock", "-o", str(path), "--host", "epyc", "--attention-backend", "fast", path=site)[0] == 0
    shutil.rmtree(site)
    status, out, _ = backstamp("lock", "--check", str(path), columns=300)
    assert status == 1
    assert "outcome: resolved -> refused (unknown_key)" in out
    assert "acme-fast 1.0 went" in out


def test_a_diff_of_two_locks_names_page_size_and_version(site: Path, lock: Path, tmp_path: Path) -> None:
    """What an upgrade changes, before it is made here."""
    install(site, "1.1", WIDE_PAGES)
    new = tmp_path / "new.lock"
    old = tmp_path / "old.lock"
    assert backstamp("lock", "-o", str(new), "--host", "epyc", path=site)[0] == 0
    install(site, "1.0", PREFERRED)
    assert backstamp("lock", "-o", str(old), "--host", "epyc", path=site)[0] == 0
    status, out, err = backstamp("diff", str(old), str(new))
    assert (status, err) == (1, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "page_size: 16 -> 64" in " ".join(out.split())
    rows = json.loads(backstamp("diff", str(old), str(new), "--json")[1])["differences"]
    (page,) = [row for row in rows if row["field"] == "page_size"]
    assert (page["before"], page["after"], page["because"]) == ("16", "64", ["acme-fast 1.0 -> 1.1"])
    assert backstamp("diff", str(old), str(old))[0] == 0


def test_a_diff_takes_the_json_of_plans(site: Path, tmp_path: Path) -> None:
    """Of one runner each."""
    files = []
    for version, source in (("1.0", PREFERRED), ("1.1", PREFILL_ONLY)):
        install(site, version, source)
        status, out, _ = backstamp("resolve", "--host", "epyc", "--json", path=site)
        assert status == 0
        files.append(tmp_path / f"{version}.json")
        files[-1].write_text(out, "utf-8")
        files[-1].chmod(0o644)
    status, out, err = backstamp("diff", *map(str, files), columns=200)
    assert (status, err) == (1, "")
    assert "kernel: fast -> torch_native" in out
    assert "acme-fast 1.0 -> 1.1" in out
    assert backstamp("diff", str(files[0]), str(files[0]))[0] == 0


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: files with an owner and a mode")
@pytest.mark.parametrize("command", [("lock", "--check"), ("diff",)], ids=["check", "diff"])
def test_a_lock_that_others_may_write_is_ignored(ready: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Exit 2, and how to mend it."""
    lock = Path(shutil.copy(ready, tmp_path))
    lock.chmod(0o666)
    status, out, err = backstamp(*command, *[str(lock)] * (2 if command == ("diff",) else 1), columns=300)
    assert (status, out) == (2, "")
    assert "a record that others may write is ignored" in err
    assert "chmod go-w" in err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("lock", "--check", "no-such.lock"), "No such file"),
        (("diff", "no-such.lock", "no-such.lock"), "No such file"),
        (("lock", "--check", "{lock}", "--page-size", "16"), "the launch of the lock"),
        (("lock", "--check", "{lock}", "--strict"), "the launch of the lock"),
        (("lock", "--check", "{lock}", "-o", "x.lock"), "the launch of the lock"),
        (("lock", "--check", "{lock}", "--host", "h100"), "a host it was made for"),
        (("lock", "--host", "h100", "--host", "h100"), "two of the name 'h100'"),
        (("lock", "--host", "nowhere"), "neither a file nor a known name"),
        (("lock", "--model", "none.json"), "No such file"),
        (("lock", "--kv-cache-dtype", "fp7"), "one of"),
        (("lock", "-o", "/no/such/folder/a.lock"), "a file that can be written"),
        (("diff", "{model}", "{model}"), "field schema"),
    ],
)
def test_bad_input_is_one_clear_error_and_exits_2(ready: Path, arguments: tuple[str, ...], word: str) -> None:
    """Never a traceback, and never mistaken for a difference."""
    named = [item.format(lock=ready, model=MHA) for item in arguments]
    status, _, err = backstamp(*named, columns=400)
    assert status == 2, err
    assert word in " ".join(err.split())
    assert "Traceback" not in err
