"""The doctor: plugins that kill, hang or deceive the process that imports them, each tried in a child."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backstamp.doctor import Finding, examine, find_killers
from backstamp.testing.dists import PLUGIN_SOURCE, write_plugin
from backstamp.testing.hosts import described_host
from backstamp.watching import Seen, read_report
from tests.sites import along, fresh_site

TIMEOUT_S = 20.0
KILLERS = {
    "exits": ("import os; os._exit(7)", "ends the process, exit status 7"),
    "exits-well": ("import os; os._exit(0)", "ends the process before its import is over"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "ends the process, signal SIGSEGV"),
    "abort": ("import os; os.abort()", "ends the process, signal SIGABRT"),
    "system-exit": ("raise SystemExit(5)", "ends the process, exit status 5"),
    "interrupts": ("raise KeyboardInterrupt", "ends the process, signal SIGINT"),
    "raises": ("raise RuntimeError('down')", "RuntimeError: down"),
    "pretends": ("print('REACHED', flush=True); import os; os._exit(0)", "ends the process before its import is over"),
    "answers": (
        "import os, sys; os.write(1, b'[[],[],[]]\\nREACHED\\n'); os._exit(0)",
        "ends the process before its import is over",
    ),
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site folder on the path, for this process and its children."""
    for folder in fresh_site(tmp_path, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        yield folder


def carried(site: Path, name: str, source: str) -> None:
    """A plugin as a wheel carries it: its declarations are data, its module does what `source` says."""
    package = write_plugin(site, name, kernel=name, carries_json=True)
    (site / package / "plugin.py").write_text(source, "utf-8")
    (site / package / "backend.py").write_text("", "utf-8")


def found_in(site: Path, name: str, timeout_s: float = TIMEOUT_S) -> list[Finding]:
    """What the doctor says of one plugin."""
    findings = examine(along(site), described_host("epyc"), timeout_s)
    return [item for item in findings if item.subject.startswith(f"plugin {name} ")]


@pytest.mark.parametrize("killer", KILLERS)
def test_a_plugin_that_ends_its_process_is_a_fault_with_the_way_it_ended(site: Path, killer: str) -> None:
    """It is found in a child, and the doctor lives."""
    source, text = KILLERS[killer]
    carried(site, "killer", source)
    (finding,) = found_in(site, "killer")
    assert finding.level == "fault"
    assert text in finding.text
    assert finding.fix == "Mend or uninstall killer"


HANGS = {
    "loop": "while True:\n    pass\n",
    "sleeps": "import time\ntime.sleep(600)\n",
    "ignores": "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n",
}


@pytest.mark.parametrize("hang", HANGS)
def test_a_plugin_that_hangs_is_a_fault_after_the_timeout(site: Path, hang: str) -> None:
    """Whatever it does with signals."""
    carried(site, "slow", HANGS[hang])
    before = time.monotonic()
    (finding,) = found_in(site, "slow", timeout_s=2.0)
    assert time.monotonic() - before < 20
    assert finding.level == "fault"
    assert finding.text == "hangs at import: no answer in 2 s"


@pytest.mark.parametrize("end", ["time.sleep(600)", "os._exit(0)"], ids=["hangs", "exits"])
def test_what_a_plugin_started_goes_with_it(site: Path, tmp_path: Path, end: str) -> None:
    """A child that holds the pipes would keep the doctor waiting, and one that lives on would keep the machine busy."""
    pid = tmp_path / "pid"
    source = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n{end}\n"
    )
    carried(site, "breeds", source)
    before = time.monotonic()
    (finding,) = found_in(site, "breeds", timeout_s=3.0)
    assert finding.level == "fault"
    assert time.monotonic() - before < 20
    stat = Path(f"/proc/{pid.read_text('utf-8')}/stat")
    deadline = time.monotonic() + 10
    # killed, it stays a zombie until whoever inherits it collects it
    while stat.exists() and stat.read_text("utf-8").split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not stat.exists() or stat.read_text("utf-8").split()[2] == "Z"


def test_killers_of_discovery_are_found_and_the_rest_is_not_blamed(site: Path) -> None:
    """Without backstamp.json discovery imports them: each is tried alone."""
    write_plugin(site, "killer", source="import os; os._exit(3)")
    write_plugin(site, "good", kernel="good")
    write_plugin(site, "other-contract", source="import os; os._exit(4)", requires=("backstamp>=2,<3",))
    findings = find_killers(TIMEOUT_S)
    assert [(item.subject, item.text) for item in findings] == [
        ("plugin killer (killer 1.0)", "ends the process, exit status 3")
    ]


def test_a_hang_at_discovery_is_found_too(site: Path) -> None:
    """The timeout is the caller's."""
    write_plugin(site, "slow", source="while True:\n    pass\n")
    (finding,) = find_killers(timeout_s=3.0)
    assert finding.text == "hangs at import: no answer in 3 s"


def test_no_killer_no_finding(site: Path) -> None:
    """What only raises leaves discovery alive, and is listed with its cause elsewhere."""
    write_plugin(site, "good", kernel="good")
    write_plugin(site, "bad", source="raise RuntimeError('down')")
    assert find_killers(TIMEOUT_S) == ()


WATCHED = {
    "dlopen-path": (
        "import ctypes\ntry:\n    ctypes.CDLL('/usr/lib/libze_loader.so.1')\nexcept OSError:\n    pass\n",
        "libze_loader.so.1",
    ),
    "dlopen-npu": (
        "import ctypes\ntry:\n    ctypes.cdll.LoadLibrary('libascendcl.so')\nexcept OSError:\n    pass\n",
        "libascendcl.so",
    ),
    "node-npu": ("try:\n    open('/dev/davinci_manager', 'rb')\nexcept OSError:\n    pass\n", "/dev/davinci_manager"),
    "node-musa": ("import os\ntry:\n    os.open('/dev/mtgpu.0', 0)\nexcept OSError:\n    pass\n", "/dev/mtgpu.0"),
    "patch-class": (
        "from backstamp.declarations import PageSizes\nPageSizes.accepts = lambda self, page_size: True\n",
        "backstamp.declarations:PageSizes.accepts",
    ),
    "patch-constant": ("import backstamp.doctor\nbackstamp.doctor.TIMEOUT_S = 0\n", "backstamp.doctor:TIMEOUT_S"),
    "delete": ("import backstamp.text\ndel backstamp.text.near\n", "backstamp.text:near"),
}


@pytest.mark.parametrize("watched", WATCHED)
def test_what_importing_a_plugin_does_is_named(site: Path, watched: str) -> None:
    """Drivers, nodes and replaced objects are faults, though the plugin loads and declares well."""
    lines, word = WATCHED[watched]
    carried(site, "busy", lines + PLUGIN_SOURCE.format(kernel="busy", package="busy"))
    fault, well = found_in(site, "busy")
    assert fault.level == "fault"
    assert word in fault.text
    assert well.level == "ok"


def test_a_quiet_plugin_is_well(site: Path) -> None:
    """Nothing is reported of a plugin that declares and does no more, though it prints."""
    carried(site, "quiet", "print('[[], [], []]')\n" + PLUGIN_SOURCE.format(kernel="quiet", package="quiet"))
    (finding,) = found_in(site, "quiet")
    assert (finding.level, finding.text.partition(";")[0]) == ("ok", "quiet")


def test_a_library_that_loads_itself_past_python_is_seen(site: Path) -> None:
    """A driver loaded by native code raises no audit event: the process's own map is read too."""
    driver = site / "libcuda.so.1"
    libraries = [line.split()[-1] for line in Path("/proc/self/maps").read_text("utf-8").splitlines() if ".so" in line]
    driver.write_bytes(Path(next(path for path in libraries if "libc.so" in path or "libc-" in path)).read_bytes())
    source = (
        f"import mmap\nFILE = open({str(driver)!r}, 'rb')\nMAP = mmap.mmap(FILE.fileno(), 0, prot=mmap.PROT_READ)\n"
    )
    carried(site, "native", source + PLUGIN_SOURCE.format(kernel="native", package="native"))
    fault, _ = found_in(site, "native")
    assert str(driver) in fault.text


def test_a_report_is_taken_only_behind_its_word() -> None:
    """Whatever else a plugin writes."""
    assert read_report('noise\n[[], [], []]\nw0rd[["libcuda.so"], [], []]\n', "w0rd") == Seen(("libcuda.so",))
    assert read_report("[[], [], []]\n", "w0rd") is None
