"""Functions of a declaration get the arguments that they name."""

from __future__ import annotations

from functools import partial

import pytest

from rtkernels.runtime.operator.by_name import by_name

NAMES = ("x", "weight", "eps", "device")


def test_some_names_in_any_order_and_defaults_for_others() -> None:
    assert by_name(lambda device, x: (device, x), NAMES)(1, 2, 3, 4) == (4, 1)
    assert by_name(lambda x, residual=None, weight=None: (x, residual, weight), NAMES)(1, 2, 3, 4) == (1, None, 2)
    assert by_name(lambda: 5, NAMES)(1, 2, 3, 4) == 5


def test_partial_functions() -> None:
    function = partial(lambda first, x, device, out="y": (first, x, device, out), 0, out="x")
    assert by_name(function, NAMES)(1, 2, 3, 4) == (0, 1, 4, "x")


def test_all_values_in_order_for_other_names() -> None:
    assert by_name(lambda *values: values, NAMES)(1, 2, 3, 4) == (1, 2, 3, 4)
    assert by_name(lambda a, b, c, d, e=5: (a, b, c, d, e), NAMES)(1, 2, 3, 4) == (1, 2, 3, 4, 5)


def test_a_name_that_nobody_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="wieght"):
        by_name(lambda x, wieght: None, NAMES)


def test_a_value_under_the_name_of_another_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"epsilon.* not as weight, x"):
        by_name(lambda weight, x, epsilon, device: None, NAMES)
