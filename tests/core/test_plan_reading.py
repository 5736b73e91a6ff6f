"""A plan reads back from its JSON: equal, byte for byte, or one error that names the field."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import pickle
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings

from backstamp.declarations import Offer
from backstamp.errors import BadPlan
from backstamp.plan import LinearPlan, Plan
from backstamp.plan_reading import plan_from_json
from backstamp.plan_rows import GroupPlan, PhasePlan, SinkNeeds
from tests.children import ordinary_environment
from tests.documents import ROOT
from tests.plans import resolved, samples
from tests.resolving import kernel, plan_of

SAMPLES = samples()
FULL: Plan = SAMPLES[Plan][0]


def written(plan: Plan) -> object:
    """The plan's JSON as another process reads it."""
    return json.loads(json.dumps(plan.as_json()))


def fields_of(kind: type) -> tuple[str, ...]:
    """The fields of a dataclass or a named tuple."""
    return tuple(item.name for item in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else kind._fields


def record_types(kind: type) -> set[type]:
    """Every record type a type is made of, itself included."""
    found = {kind}
    waiting = list(get_type_hints(kind).values())
    while waiting:
        hint = waiting.pop()
        waiting += get_args(hint)
        if (
            isinstance(hint, type)
            and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"))
            and hint not in found
        ):
            found |= record_types(hint)
    return found


def within(value: object) -> Plan:
    """The full plan with one of its parts replaced by this value of the same type."""
    if isinstance(value, Plan):
        return value
    phase = FULL.phases[0]
    if isinstance(value, LinearPlan):
        return dataclasses.replace(FULL, linear=value)
    if isinstance(value, PhasePlan):
        return dataclasses.replace(FULL, phases=(value, *FULL.phases[1:]))
    if isinstance(value, GroupPlan):
        return within(phase._replace(groups=(value,)))
    if isinstance(value, SinkNeeds):
        return within(phase.groups[0]._replace(sinks=value))
    at_phase = {"PluginRef": "plugin", "LibraryRef": "library", "Verdict": "verdicts"}
    name = type(value).__name__
    if name in at_phase:
        return within(phase._replace(**{at_phase[name]: (value,) if name == "Verdict" else value}))
    lists = {"Loss": "losses", "Warn": "warnings", "FeaturePlan": "features"}
    lists |= {"Conversion": "conversions", "Timing": "timings"}
    return dataclasses.replace(FULL, **{lists[name]: (value,)})


def test_there_are_samples_of_every_type_a_plan_is_made_of() -> None:
    """A type added to the plan must be added to tests/plans.py, and so to the test below."""
    assert set(SAMPLES) == record_types(Plan)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in SAMPLES for name in fields_of(kind)])
def test_every_field_of_a_plan_is_carried_by_its_json(kind: type, name: str) -> None:
    """A field that the JSON leaves out, or the reader, would be lost between a parent and its workers."""
    first, second = SAMPLES[kind]
    other = getattr(second, name)
    if kind is PhasePlan and name == "phase":
        # the key of the record, not a value in it: the first phase is always prefill
        assert [row.phase for row in plan_from_json(written(FULL)).phases] == [row.phase for row in FULL.phases]
        return
    assert getattr(first, name) != other, f"tests/plans.py: give {kind.__name__}.{name} two values"
    changed = (
        dataclasses.replace(first, **{name: other})
        if dataclasses.is_dataclass(kind)
        else first._replace(**{name: other})
    )
    plan = within(changed)
    assert plan != within(first)
    assert plan_from_json(written(plan)) == plan


@settings(deadline=None)
@given(resolved())
def test_a_resolved_plan_survives_json_and_pickle_equal(made: tuple[Plan, list[Offer]]) -> None:
    """Whatever was resolved: equal after JSON, equal after pickle, and the same bytes when written again."""
    plan, _ = made
    text = json.dumps(plan.as_json())
    read = plan_from_json(json.loads(text))
    assert read == plan
    assert read.digest == plan.digest
    assert json.dumps(read.as_json()) == text
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan_from_json(json.loads(json.dumps(plan.as_json(), sort_keys=True))) == plan


def test_the_json_of_a_plan_is_the_same_bytes_in_every_process() -> None:
    """String hashing is seeded anew in each process, and no set may reach the JSON in its own order."""
    program = (
        "import json, sys\n"
        "from tests.plans import MODELS\n"
        "from tests.resolving import kernel, plan_of\n"
        "rows = [kernel(name, head_dims=('any',), archs=('8.0',) if name == 'c' else ('9.0',)) for name in 'abcd']\n"
        "rows += [kernel('m', family='mla', head_dims=('any',))]\n"
        "plans = [plan_of(rows, model=model).as_json() for model in MODELS[:3]]\n"
        "sys.stdout.write(json.dumps(plans))\n"
    )
    texts = set()
    for seed in ("1", "2", "3"):
        environment = {**ordinary_environment(ROOT), "PYTHONHASHSEED": seed}
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment, check=False)
        assert child.returncode == 0, child.stderr.decode()
        texts.add(hashlib.sha256(child.stdout).hexdigest())
    assert len(texts) == 1


def paths_of(data: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where every value of some JSON lies."""
    below = enumerate(data) if isinstance(data, list) else data.items() if isinstance(data, dict) else ()
    return [path, *(found for at, value in below for found in paths_of(value, (*path, at)))]


def dotted(path: tuple[str | int, ...]) -> str:
    """A path as errors write it."""
    return "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in path)[1:]


def changed(path: tuple[str | int, ...], value: object) -> object:
    """The JSON of the full plan with the value at a path replaced, or left out where the value is ...."""
    data = copy.deepcopy(written(FULL))
    place = data
    for at in path[:-1]:
        place = place[at]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


#: Every field but those of open records, whose names are anybody's: any of them may be left out.
_OPEN = [path for path in paths_of(written(FULL))[1:] if not ({"layouts", "settings"} & set(path[:-1]))]
#: Where a time stands, which may have a fraction.
_TIMES = [path for path in _OPEN if str(path[-1]).endswith("microseconds")]


@pytest.mark.parametrize("path", [path for path in _OPEN if path not in _TIMES], ids=dotted)
def test_a_value_of_the_wrong_type_is_one_error_that_names_the_field(path: tuple[str | int, ...]) -> None:
    """Nowhere in these does a number with a fraction stand, and nowhere is one taken for something else."""
    with pytest.raises(BadPlan) as caught:
        plan_from_json(changed(path, 1.5), "plan of rank 3")
    *parent, last = path
    named = dotted(path) if not isinstance(last, int) or isinstance(written_at(path), dict) else dotted(tuple(parent))
    assert caught.value.who == f"plan of rank 3, field {named}"


@pytest.mark.parametrize("path", _TIMES, ids=dotted)
@pytest.mark.parametrize("value", ["50", True, float("nan")])
def test_a_time_that_is_no_number_is_one_error_that_names_it(path: tuple[str | int, ...], value: object) -> None:
    """It is what a choice rests on."""
    with pytest.raises(BadPlan, match="needs a finite number") as caught:
        plan_from_json(changed(path, value), "plan of rank 3")
    assert caught.value.who == f"plan of rank 3, field {dotted(path)}"


@pytest.mark.parametrize("value", ["50", True, None, float("nan"), float("inf")])
def test_a_setting_that_is_no_number_is_one_error_that_names_it(value: object) -> None:
    """It is compiled in."""
    with pytest.raises(BadPlan, match=r"prefill\.groups\[0\]\.settings\.softcap: needs a finite number"):
        plan_from_json(changed(("phases", "prefill", "groups", 0, "settings", "softcap"), value))


def written_at(path: tuple[str | int, ...]) -> object:
    """The value of the full plan's JSON at a path."""
    place = written(FULL)
    for at in path:
        place = place[at]
    return place


@pytest.mark.parametrize("path", [path for path in _OPEN if isinstance(path[-1], str)], ids=dotted)
def test_a_field_left_out_is_one_error_that_names_it(path: tuple[str | int, ...]) -> None:
    """Nothing is filled in."""
    with pytest.raises(BadPlan) as caught:
        plan_from_json(changed(path, ...))
    assert caught.value.who == f"plan, field {dotted(path)}"
    assert caught.value.found == "no such field"


@pytest.mark.parametrize(
    "path",
    [(), ("phases",), ("phases", "decode"), ("phases", "decode", "groups", 0), ("speculative",), ("timings", 0)],
    ids=dotted,
)
def test_a_field_nobody_knows_is_an_error(path: tuple[str | int, ...]) -> None:
    """A misspelt field would be a fact lost in silence."""
    with pytest.raises(BadPlan, match="a field nobody knows") as caught:
        plan_from_json(changed((*path, "kernal"), "fa3"))
    assert caught.value.who.endswith("kernal")


@pytest.mark.parametrize("schema", [2, 0, "1", True, None])
def test_another_schema_is_refused(schema: object) -> None:
    """A record of another schema is not read as if it were ours."""
    with pytest.raises(BadPlan, match="field schema: needs 1") as caught:
        plan_from_json(changed(("schema",), schema))
    assert caught.value.found == repr(schema)


@pytest.mark.parametrize(
    ("path", "value"),
    [(("page_size",), 32), (("graph",), "any"), (("phases", "decode", "groups", 0, "plugin", "version"), "1.1")],
    ids=["page-size", "graph", "plugin-version"],
)
def test_a_plan_changed_after_it_was_written_is_refused(path: tuple[str | int, ...], value: object) -> None:
    """The stored digest is that of the content."""
    with pytest.raises(BadPlan, match="field digest") as caught:
        plan_from_json(changed(path, value))
    assert caught.value.found == FULL.digest


def test_a_verdict_whose_message_says_something_else_is_refused() -> None:
    """The message is made of the two sides, and must be what they say."""
    with pytest.raises(BadPlan, match=r"verdicts\[0\].message"):
        plan_from_json(changed(("phases", "verify", "verdicts", 0, "message"), "needs nothing"))


@pytest.mark.parametrize("data", [None, [], "plan", 3])
def test_what_is_no_record_is_refused(data: object) -> None:
    """Whatever a peer or a file hands over."""
    with pytest.raises(BadPlan, match="needs a JSON object"):
        plan_from_json(data)


def test_reading_a_plan_imports_nothing_it_names() -> None:
    """A plan from elsewhere decides no import, though its kernel be called like a module."""
    plan = plan_of([kernel("json.tool")])
    data = written(plan)
    assert "json.tool" not in sys.modules
    before = set(sys.modules)
    assert plan_from_json(data).phase("decode").kernel == "json.tool"
    assert set(sys.modules) == before
