"""`backstamp check`: what it tells about a plugin, or all of them, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

from backstamp.testing.dists import PLUGIN_SOURCE, write_plugin
from tests.core.test_cli import backstamp


def checked(*arguments: str, path: Path) -> tuple[int, dict[str, object]]:
    """Exit status and JSON of `backstamp check`."""
    status, out, err = backstamp("check", *arguments, "--only", "declarations", "--json", path=path)
    assert out, err
    return status, json.loads(out)


def names(report: dict[str, object]) -> list[str]:
    """What was checked."""
    return [outcome["name"] for outcome in report["outcomes"]]


def test_check_passes_a_module_whose_json_says_the_same(tmp_path: Path) -> None:
    """Exit 0 without faults; what other plugins do wrong is theirs."""
    package = write_plugin(tmp_path, "mine", kernel="mine", carries_json=True)
    write_plugin(tmp_path, "broken", source="import nothing_of_this_name")
    status, report = checked(f"{package}.plugin", path=tmp_path)
    assert (status, report["findings"], names(report)) == (0, [], ["plugin mine"])


def test_check_holds_backstamp_json_to_the_module(tmp_path: Path) -> None:
    """A stale file and a missing one are faults of the module that is checked."""
    package = write_plugin(tmp_path, "mine", kernel="mine", carries_json=True)
    path = tmp_path / package / "backstamp.json"
    path.write_text(path.read_text("utf-8").replace("bf16", "fp16"), "utf-8")
    status, report = checked(f"{package}.plugin", path=tmp_path)
    (finding,) = report["findings"]
    assert (status, finding["subject"]) == (1, "mine: backstamp.json")
    assert "does not say what mine.plugin says" in finding["text"]
    path.unlink()
    status, report = checked(f"{package}.plugin", path=tmp_path)
    assert (status, report["findings"][0]["subject"]) == (1, "mine: backstamp.json")


def test_check_without_arguments_checks_every_plugin_together(tmp_path: Path) -> None:
    """A file that is only missing is a note there; a broken plugin is a fault, and so is a name claimed twice."""
    site = tmp_path / "site-packages"
    write_plugin(site, "one", kernel="same")
    write_plugin(site, "two", kernel="same")
    write_plugin(site, "broken", source="import nothing_of_this_name")
    status, report = checked(path=site)
    assert status == 1
    assert {f"plugin {name}" for name in ("one", "two", "broken", "cpu", "triton")} <= set(names(report))
    subjects = [(finding["level"], finding["subject"]) for finding in report["findings"]]
    assert ("note", "one: backstamp.json") in subjects
    assert ("fault", "two: name 'same'") in subjects
    (broken,) = [finding for finding in report["findings"] if finding["subject"].startswith("broken: ")]
    assert broken["text"].startswith("ModuleNotFoundError")


def test_check_exits_0_with_notes_alone_and_prints_them(tmp_path: Path) -> None:
    """Two kernels that tie are said, and stop nobody."""
    source = PLUGIN_SOURCE.format(kernel="a", package="mine")
    head, _, row = source.partition("        Offer(")
    row = "        Offer(" + row.rpartition("    )\n")[0]
    text = head + row + row.replace('kernel="a"', 'kernel="b"') + "    )\n"
    package = write_plugin(tmp_path, "mine", source=text)
    assert backstamp("declare", f"{package}.plugin", path=tmp_path)[0] == 0
    status, out, _ = backstamp("check", f"{package}.plugin", "--only", "declarations", path=tmp_path, columns=200)
    assert status == 0
    assert "a and b both serve mha" in out
    assert "1 passed, 0 failed, 0 skipped" in out


def test_check_tells_a_module_that_raises_and_refuses_one_that_does_not_exist(tmp_path: Path) -> None:
    """A plugin that does not import is a fault with its cause; a word that names no module is usage."""
    package = write_plugin(tmp_path, "loud", source="raise SystemExit('no licence')")
    status, report = checked(f"{package}.plugin", path=tmp_path)
    assert (status, report["findings"][0]["text"]) == (1, "SystemExit: no licence")
    status, _, err = backstamp("check", "nowhere.plugin", path=tmp_path)
    assert status == 2
    assert "a plugin module that exists" in err


def test_check_takes_recorded_hosts(tmp_path: Path) -> None:
    """A kernel for a chip without a profile passes with the chip's file."""
    source = PLUGIN_SOURCE.format(kernel="a", package="mine").replace('device="cpu"', 'device="cuda"')
    package = write_plugin(tmp_path, "mine", source=source.replace("archs=ANY", 'archs=("9.9",)'))
    backstamp("declare", f"{package}.plugin", path=tmp_path)
    assert checked(f"{package}.plugin", path=tmp_path)[0] == 1
    host = tmp_path / "chip.json"
    host.write_text(json.dumps({"device": "cuda", "arch": "9.9"}), "utf-8")
    assert checked(f"{package}.plugin", "--host", str(host), path=tmp_path)[0] == 0


def test_check_refuses_a_check_and_a_name_nobody_knows(tmp_path: Path) -> None:
    """Usage, with what there is; a misspelt distribution is guessed."""
    status, _, err = backstamp("check", "cpu", "--only", "numbers", path=tmp_path)
    assert status == 2
    assert "checks among declarations" in err
    status, _, err = backstamp("check", "backstamp-tritn", path=tmp_path)
    assert status == 2
    assert "Did you mean backstamp-triton?" in err
