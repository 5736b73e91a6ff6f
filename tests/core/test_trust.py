"""Installing is not consenting: a hostile plugin for each line of what discovery, declarations, doctor and printing
promise."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backstamp.declarations import Alias, RetiredSetting
from backstamp.declared import Declared, declared_to_json
from backstamp.discovery import discover
from backstamp.testing.dists import PLUGIN_SOURCE, cpu_offer, write_plugin
from backstamp.text import plain
from tests.sites import along, ask, command, fresh_site

HOSTILE = {
    "escape": "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "newline": "a\nb\r\n::error::injected",
    "command": "::set-output name=x::y",
    "colons": ":::error:::: x",
    "markup": "[bold red]x[/] [/red]",
    "bidi": "a\u202e\u2066b",
    "null": "a\0b\x08\x9b31m",
    "surrogate": "a\udcffb",
    "path": "../../etc/passwd",
    "comma": "a,b,c",
    "long": "x" * 20_000,
}
RAW = ("\x1b", "\x07", "\x08", "\x9b", "\0", "\r", "\u202e", "\u2066", "\udcff", "::", "x" * 5_000)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site folder with one honest plugin."""
    for folder in fresh_site(tmp_path, monkeypatch):
        write_plugin(folder, "honest", kernel="honest", carries_json=True)
        yield folder


def assert_harmless(site: Path, *arguments: str) -> str:
    """Run the command as text and as JSON: nothing raw in the one, the other parses; the honest plugin is there."""
    child = command(*arguments, path=site)
    said = child.stdout + child.stderr
    assert "Traceback" not in said
    # a terminal's width must not be what cuts a long name
    assert [raw for raw in RAW if raw in said or raw in said.replace("\n", "")] == []
    machine = command(*arguments, "--json", path=site)
    json.loads(machine.stdout)
    return said


def declare(site: Path, name: str, declared: Declared) -> None:
    """A plugin whose backstamp.json says `declared`, whatever that is."""
    package = write_plugin(site, name, kernel=name, carries_json=True)
    (site / package / "backstamp.json").write_text(declared_to_json(declared), "utf-8")


def source_of(place: str, package: str, text: str) -> str:
    """A plugin module that says a hostile text in one place."""
    source = PLUGIN_SOURCE.format(kernel=package, package=package)
    if place == "cause":
        return f"raise RuntimeError({text!r})"
    if place == "kernel":
        return source.replace(f'kernel="{package}"', f"kernel={text!r}")
    alias = f"    return (Alias(key={text!r}, kernels=({package!r},)),)\n"
    return f"from backstamp.declarations import Alias\n{source}\n\n@hookimpl\ndef backstamp_aliases():\n{alias}"


@pytest.mark.parametrize("place", ["cause", "kernel", "key"])
def test_what_a_plugin_says_reaches_no_terminal_raw_and_breaks_no_json(site: Path, place: str) -> None:
    """Exception texts, kernel names and keys, by `list`."""
    for name, text in HOSTILE.items():
        write_plugin(site, f"loud-{name}", source=source_of(place, f"loud_{name}", text))
    said = assert_harmless(site, "list")
    assert "honest" in said
    assert [name for name in HOSTILE if f"loud-{name}" not in said] == []
    assert len(along(site).failures) == len(HOSTILE)


@pytest.mark.parametrize("hostile", ["escape", "command", "markup", "bidi", "long", "path", "comma"])
def test_metadata_reaches_no_terminal_raw(site: Path, hostile: str) -> None:
    """Names, versions and entry names are a stranger's text like any other."""
    text = HOSTILE[hostile]
    line = text.replace("\n", " ")
    write_plugin(site, "loud", points=f"[backstamp.plugins]\n{line} = loud.plugin\n", kernel="loud")
    write_plugin(site, "other", points=f"[backstamp.plugins]\nother = {line}\n", kernel="other")
    for name in ("loud", "other"):
        metadata = site / f"{name}-1.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text("utf-8").replace("Version: 1.0", f"Version: {line}"), "utf-8")
    (site / "third.egg-info").mkdir()
    (site / "third.egg-info" / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {line}\nVersion: 1\n", "utf-8")
    (site / "third.egg-info" / "entry_points.txt").write_text("[backstamp.plugins]\nt = t.plugin\n", "utf-8")
    said = assert_harmless(site, "list")
    assert "honest" in said
    for item in (*discover([str(site)]).found, *discover([str(site)]).failures):
        assert max(map(len, item.plugin)) <= 100


def test_resolve_and_doctor_print_no_hostile_text_raw(site: Path) -> None:
    """Refusals, warnings and findings quote causes, and quote them harmlessly."""
    for hostile in ("escape", "newline", "command", "bidi", "surrogate"):
        write_plugin(site, f"loud-{hostile}", source=f"raise RuntimeError({HOSTILE[hostile]!r})")
    package = write_plugin(site, "shouts", kernel="shouts", carries_json=True)
    (site / package / "plugin.py").write_text(f"raise RuntimeError({HOSTILE['newline']!r})", "utf-8")
    assert_harmless(site, "doctor")
    for key in ("nosuch", "loud_escape", HOSTILE["escape"], HOSTILE["newline"]):
        assert_harmless(site, "resolve", "--host", "epyc", "--attention-backend", key)


def test_a_warning_quotes_what_a_plugin_declares_only_if_it_is_printable(site: Path) -> None:
    """A tombstone's text goes to every operator who still sets the old name."""
    setting = RetiredSetting(name="OLD", replacement=HOSTILE["escape"])
    declare(site, "loud", Declared(offers=(cpu_offer("loud", "loud"),), retired_settings=(setting,)))
    (failure,) = along(site).failures
    assert "replacement needs one printable line" in failure.cause
    assert_harmless(site, "list")


@pytest.mark.parametrize("text", [":::", "::::", ":::::", "a:: ::b", ":\0:"])
def test_no_run_of_colons_is_left_together(text: str) -> None:
    """A replaced pair may stand beside a third."""
    assert "::" not in plain(text)


@pytest.mark.parametrize("text", ["##[add-mask]x", "a ###[stop-commands]x", "##vso[task.setvariable variable=a]b"])
def test_no_command_within_a_line_is_left(text: str) -> None:
    """GitHub's runner and Azure's agent obey these wherever in a line they stand."""
    assert "##" not in plain(text)


def test_an_exception_that_cannot_be_printed_is_still_a_failure(site: Path) -> None:
    """Its text raises: that is no reason to lose the others."""
    source = "class Sly(Exception):\n    def __str__(self):\n        raise SystemExit('gone')\n\nraise Sly\n"
    write_plugin(site, "sly", source=source)
    discovery = discover([str(site)])
    assert [found.plugin.name for found in discovery.found] == ["honest"]
    assert discovery.failures[0].cause == "Sly, which cannot say why"


def test_interrupts_pass_and_exits_do_not(site: Path) -> None:
    """The operator's own key is obeyed, a plugin's wish to end the process is not."""
    write_plugin(site, "exits", source="raise SystemExit(0)")
    assert [failure.cause for failure in discover([str(site)]).failures] == ["SystemExit: 0"]
    write_plugin(site, "interrupts", source="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        discover([str(site)])


PRINTS = {
    "print": "print('{')",
    "stdout": "import sys; sys.stdout.write('{'); sys.stdout.flush()",
    "descriptor": "import os; os.write(1, b'{')",
    "child": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(123)'])",
    "original": "import sys; sys.__stdout__.write('{'); sys.__stdout__.flush()",
}


@pytest.mark.parametrize("way", PRINTS)
def test_what_a_plugin_prints_at_import_is_in_no_json(site: Path, way: str) -> None:
    """By Python, by the descriptor, or by a child of its own."""
    write_plugin(site, "chatty", source=PRINTS[way] + "\n" + PLUGIN_SOURCE.format(kernel="chatty", package="chatty"))
    listed = json.loads(command("list", "--json", path=site).stdout)
    assert "chatty" in [item["name"] for item in listed["plugins"]]


def test_a_declaration_file_that_is_no_declaration_is_refused(site: Path) -> None:
    """Too large, too deep, a list, a device: each is that plugin's failure, told in a line."""
    texts = {
        "huge": '{"schema": 1, "offers": [' + " " * (5 << 20) + "]}",
        "deep": "[" * 200_000 + "]" * 200_000,
        "deep-field": '{"schema": 1, "offers": [{"kernel": ' + "[" * 900 + "]" * 900 + "}]}",
        "list": "[]",
        "number": '{"schema": 1, "offers": [{"priority": 1e400}]}',
        "twice": '{"schema": 1, "offers": [{"kernel": ["a"], "phases": [["x"]]}]}',
    }
    for name, text in texts.items():
        package = write_plugin(site, name, kernel=name, carries_json=True)
        (site / package / "backstamp.json").write_text(text, "utf-8")
        (site / package / "plugin.py").write_text("raise SystemExit('imported')", "utf-8")
    catalogue = along(site)
    assert sorted(failure.plugin.distribution for failure in catalogue.failures) == sorted(texts)
    causes = {failure.plugin.distribution: failure.cause for failure in catalogue.failures}
    assert "at most 4194304 bytes" in causes["huge"]
    assert "maximum recursion depth" in causes["deep"]
    assert not [cause for cause in causes.values() if "imported" in cause]
    assert ask(catalogue).phase("decode").kernel == "honest"


def test_a_declaration_file_that_leads_out_of_its_distribution_is_refused(site: Path, tmp_path: Path) -> None:
    """A link is followed to a cache that holds the module too, and nowhere else."""
    package = write_plugin(site, "linked", kernel="linked", carries_json=True)
    outside = tmp_path / "outside.json"
    (site / package / "backstamp.json").rename(outside)
    (site / package / "backstamp.json").symlink_to(outside)
    (failure,) = along(site).failures
    assert "inside its own distribution" in failure.cause
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("backstamp.json", "plugin.py"):
        text = (site / package / name).read_text("utf-8")
        (cache / name).write_text(text, "utf-8")
        (site / package / name).unlink()
        (site / package / name).symlink_to(cache / name)
    assert along(site).failures == ()


def test_a_pipe_for_a_declaration_file_keeps_nobody_waiting(site: Path) -> None:
    """It is no file: the module speaks."""
    package = write_plugin(site, "piped", kernel="piped")
    os.mkfifo(site / package / "backstamp.json")
    assert ("attention", "piped") in along(site).rows


def test_a_plugin_cannot_change_what_another_declared(site: Path) -> None:
    """What was read is detached from the objects of the module it was read from."""
    aliases = (
        "\nfrom backstamp.declarations import Alias\nALIAS = Alias(key='k', kernels=('victim',), by_phase={'decode': "
        "('victim',)})\n\n@hookimpl\ndef backstamp_aliases():\n    return (ALIAS,)\n"
    )
    write_plugin(site, "a-victim", source=PLUGIN_SOURCE.format(kernel="victim", package="a_victim") + aliases)
    (found,) = [item for item in discover([str(site)]).found if item.plugin.distribution == "a-victim"]
    module = importlib.import_module("a_victim.plugin")
    vars(module)["ALIAS"].by_phase["decode"] = ("thief",)
    assert found.declared.aliases[0].by_phase == {"decode": ("victim",)}


def test_a_row_of_a_class_of_its_own_is_refused(site: Path) -> None:
    """A subclass could answer one kernel to the check and another to the resolver."""
    source = PLUGIN_SOURCE.format(kernel="sly", package="sly").replace("        Offer(", "        Sly(")
    source = source.replace("@hookimpl", "class Sly(Offer):\n    pass\n\n\n@hookimpl", 1)
    write_plugin(site, "sly", source=source)
    (failure,) = along(site).failures
    assert "must answer Offer rows, got Sly" in failure.cause


@pytest.mark.parametrize(
    "factory", ["os:system", "subprocess:run", "backstamp.cli:main", "honest.backend:build", "unowned:f"]
)
def test_a_factory_outside_its_own_distribution_is_refused(site: Path, factory: str) -> None:
    """Though top_level.txt lists that package: what was installed speaks."""
    declare(site, "evil", Declared(offers=(replace(cpu_offer("evil", "evil"), factory=factory),)))
    (site / "evil-1.0.dist-info" / "top_level.txt").write_text(
        "evil\nos\nsubprocess\nbackstamp\nhonest\nunowned\n", "utf-8"
    )
    (failure,) = along(site).failures
    assert "lies outside its distribution's packages ['evil']" in failure.cause


def test_a_name_with_separators_never_reaches_the_catalogue(site: Path) -> None:
    """It would be a path in a report, or two names in a list."""
    for at, name in enumerate(("../up", "a,b", "a/b", "c:\\d", "honest:other")):
        declare(site, f"evil-{at}", Declared(offers=(replace(cpu_offer("k", f"evil_{at}"), kernel=name),)))
        declare(site, f"key-{at}", Declared(aliases=(Alias(key=name, kernels=("honest",)),)))
    catalogue = along(site)
    assert [kernel for _, kernel in catalogue.rows] == ["honest"]
    assert catalogue.aliases == {}
    assert len(catalogue.failures) == 10


def test_hostile_plugins_and_honest_ones_share_one_doctor(site: Path) -> None:
    """A plugin that prints a report, exits, or escapes is named; the command ends with its own status."""
    package = write_plugin(site, "ends", kernel="ends", carries_json=True)
    (site / package / "plugin.py").write_text("print('\\x1b[2J'); import os; os._exit(0)", "utf-8")
    (site / "honest" / "backend.py").write_text("", "utf-8")
    child = command("doctor", path=site)
    assert child.returncode == 1
    assert "ends the process before its import is over" in child.stdout
    (line,) = [line for line in child.stdout.splitlines() if "honest" in line]
    assert line.startswith("ok")
