"""Functions of a declaration get the arguments that they name."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest

from rtkernels.runtime.operator.by_name import by_name
from rtkernels.runtime.operator.kinds import Meta

NAMES = ("x", "weight", "eps", "device")


class Scaled(NamedTuple):
    weight: int
    x: int
    out: str = "new"


class Unknown(NamedTuple):
    x: int
    residual: int


def test_some_names_in_any_order_and_defaults_for_others() -> None:
    assert by_name(lambda device, x: (device, x), NAMES)(1, 2, 3, 4) == (4, 1)
    assert by_name(lambda x, residual=None, weight=None: (x, residual, weight), NAMES)(1, 2, 3, 4) == (1, None, 2)
    assert by_name(lambda: 5, NAMES)(1, 2, 3, 4) == 5


def test_partial_functions() -> None:
    function = partial(lambda first, x, device, out="y": (first, x, device, out), 0, out="x")
    assert by_name(function, NAMES)(1, 2, 3, 4) == (0, 1, 4, "x")


def test_records_of_values() -> None:
    def function(device: int, call: Scaled, more: int = 7) -> tuple[int, Scaled, int]:
        return device, call, more

    assert by_name(function, NAMES)(1, 2, 3, 4) == (4, Scaled(2, 1), 7)
    assert by_name(partial(function, more=8), NAMES)(1, 2, 3, 4) == (4, Scaled(2, 1), 8)
    assert by_name(function, (*NAMES, "out"))(1, 2, 3, 4, "old") == (4, Scaled(2, 1, "old"), 7)


def test_a_name_that_nobody_has_is_an_error() -> None:
    def of_meta(x: Meta, wieght: Meta) -> None:
        """Metas are no records of values."""

    def of_record(call: Unknown) -> None:
        """One field is none of the names."""

    with pytest.raises(ValueError, match="takes wieght; expected some of x, weight, eps, device"):
        by_name(lambda x, wieght: None, NAMES)
    with pytest.raises(ValueError, match="takes wieght"):
        by_name(of_meta, NAMES)
    with pytest.raises(ValueError, match="takes a Unknown with residual"):
        by_name(of_record, NAMES)


def test_values_by_their_order_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"takes \*values; expected parameters named x, weight"):
        by_name(lambda *values: values, NAMES)
    with pytest.raises(ValueError, match=r"takes \*\*others"):
        by_name(lambda x, **others: x, NAMES)
    with pytest.raises(ValueError, match="takes a; expected some of"):
        by_name(lambda a, b, c, d: None, NAMES)
