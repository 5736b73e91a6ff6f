"""Numbers of records that JSON can write and no float can hold."""

from __future__ import annotations

import pytest

from backstamp.errors import BadInput
from backstamp.json_fields import JsonFields


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), float("inf"), float("nan"), True, "1"],
    ids=["1e400", "-1e400", "inf", "nan", "true", "text"],
)
def test_what_is_no_finite_number_is_refused(value: object) -> None:
    """A whole number too large for a float is refused as infinity is, without a traceback."""
    with pytest.raises(BadInput) as refused:
        JsonFields({"microseconds": value}, "record", BadInput).number("microseconds")
    assert refused.value.needed == "a finite number"


@pytest.mark.parametrize("value", [0, -3, 2.5, 10**300])
def test_a_finite_number_is_read_as_it_was_written(value: float) -> None:
    """Whole numbers stay whole."""
    assert JsonFields({"microseconds": value}, "record", BadInput).number("microseconds") == value
