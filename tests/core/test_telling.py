"""What an engine's log says of a plan and of what was built from it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from backstamp.launch import Requests
from backstamp.plan_rows import Warn
from backstamp.telling import tell_phases, tell_stamps, tell_warnings
from backstamp.testing.fakes import fake_plugin
from tests.building import built_from, plan_on
from tests.resolving import kernel

LOG = logging.getLogger("an.engine")
PLUGIN = fake_plugin("p", [kernel("one")], distribution="p-dist", version="2.1")
PLAN = plan_on("h100", PLUGIN, requests=Requests(attention_backend="one"))


def test_a_plan_is_one_line_and_each_warning_one_more(caplog: pytest.LogCaptureFixture) -> None:
    """Who runs what and who decided, in the engine's own log."""
    caplog.set_level(logging.INFO, LOG.name)
    tell_phases(LOG, PLAN, ", prompts", PLAN.running[:2])
    tell_warnings(LOG, replace(PLAN, warnings=(Warn("lost", "something faster"),)))
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            LOG.name,
            "INFO",
            f"Backstamp plan for {PLAN.model}, prompts: prefill one (p-dist 2.1, operator); "
            f"decode one (p-dist 2.1, operator); digest {PLAN.digest[:12]}",
        ),
        (LOG.name, "WARNING", "Backstamp plan, lost: something faster"),
    ]


def test_objects_with_one_stamp_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """A kernel of a row without a library says so."""
    caplog.set_level(logging.INFO, LOG.name)
    built = list(built_from(PLAN, PLUGIN).objects.values())
    tell_stamps(LOG, [*built, *built], "pages of 16")
    assert {record.getMessage() for record in caplog.records} == {
        "Backstamp built one for prefill, decode: p-dist 2.1, no library, pages of 16"
    }
    assert len(caplog.records) == 1
