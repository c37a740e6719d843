"""Arguments that ``@public`` checks: tensors, options with some values, numbers within limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import Among, Within

_OPTIONS = {
    "layout": Among(("row", "both"), "'row' or 'both'"),
    "alpha": Within("float", "0 <= alpha <= 1", "0 to 1"),
    "rows": Within("int", "rows >= 1", "at least 1, or None"),
    "count": Within("int"),
}


@public(recent=False, tensors="y z", options=_OPTIONS)
def _scaled(
    x: Tensor, y: Tensor, z: Tensor | None = None, *, layout: str = "row", alpha: float = 0.5, rows: int | None = None,
    count: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return x + alpha * y


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"y": 3}, "y is a int; expected a torch.Tensor"),
        ({"z": "a"}, "z is a str; expected a torch.Tensor"),
        ({"layout": "column"}, "layout is 'column'; expected 'row' or 'both'"),
        ({"layout": None}, "layout is None; expected 'row' or 'both'"),
        ({"alpha": 2}, "alpha is 2; expected 0 to 1"),
        ({"alpha": float("nan")}, "alpha is nan; expected 0 to 1"),
        ({"alpha": "half"}, "alpha is 'half'; expected a number"),
        ({"rows": 0}, "rows is 0; expected at least 1, or None"),
        ({"rows": 1.5}, "rows is a float; expected an integer"),
        ({"count": None}, "count is None; expected an integer"),
    ],
)
def test_a_declared_argument_is_checked_before_the_call(given, message: str) -> None:
    x = torch.ones(2)
    for more in ({}, {"out": torch.zeros(2)}):
        with pytest.raises(ArgumentError) as caught:
            _scaled(x, **{"y": x, **given, **more})
        assert str(caught.value) == message
        assert not more or not more["out"].any()


def test_absent_and_allowed_arguments_pass() -> None:
    x = torch.ones(2)
    assert torch.equal(_scaled(x, x, x, layout="both", alpha=1, rows=None, count=-7), 2 * x)
    assert torch.equal(_scaled(x, x, rows=1), 1.5 * x)
    assert torch.equal(_scaled(x, x, out=torch.zeros(2)), 1.5 * x)
