"""What ``@public`` does for declared arguments: checks, numbers for which None stands, and calls with DTensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import Among, Matching, Within

_OPTIONS = {
    "layout": Among(("row", "both"), "'row' or 'both'"),
    "alpha": Within("float", "0 <= alpha <= 1", "0 to 1"),
    "rows": Within("int", "rows >= 1", "at least 1, or None"),
    "count": Within("int"),
    "x": Matching((torch.float32, torch.bfloat16), "x.dim()"),
    "w": Matching((torch.float32,), "w.dim() == 2", "[rows, columns]"),
}


@public(recent=False, tensors="y z", options=_OPTIONS)
def _scaled(
    x: Tensor, y: Tensor, z: Tensor | None = None, *, layout: str = "row", alpha: float = 0.5, rows: int | None = None,
    count: int = 0, w: Tensor | None = None, out: Tensor | None = None,
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
        ({"w": 3}, "w is a int; expected a torch.Tensor"),
        ({"w": torch.ones(2, 2).half()}, "w has dtype float16; expected one of float32"),
        ({"w": torch.ones(2)}, "w has shape (2,); expected [rows, columns]"),
        ({"x": torch.ones(2).int()}, "x has dtype int32; expected one of float32, bfloat16"),
        ({"x": torch.tensor(1.0)}, "x has no dimensions; expected at least one"),
    ],
)
def test_a_declared_argument_is_checked_before_the_call(given, message: str) -> None:
    x = torch.ones(2)
    for more in ({}, {"out": torch.zeros(2)}):
        with pytest.raises(ArgumentError) as caught:
            _scaled(**{"x": x, "y": x, **given, **more})
        assert str(caught.value) == message
        assert not more or not more["out"].any()


def test_absent_and_allowed_arguments_pass() -> None:
    x = torch.ones(2)
    assert torch.equal(_scaled(x, x, x, layout="both", alpha=1, rows=None, count=-7), 2 * x)
    assert torch.equal(_scaled(x, x, rows=1), 1.5 * x)
    assert torch.equal(_scaled(x, x, out=torch.zeros(2)), 1.5 * x)


@public(recent=False, defaults={"eps": 0.5}, no_gradients="x y")
def _raised(x: Tensor, y: Tensor | None = None, *, eps: float | None = None, out: Tensor | None = None) -> Tensor:
    return x + eps


def test_none_stands_for_a_declared_number() -> None:
    x = torch.zeros(2)
    for more in ({}, {"out": torch.ones(2)}):
        assert torch.equal(_raised(x, **more), x + 0.5)
        assert torch.equal(_raised(x, eps=None, **more), x + 0.5)
        assert torch.equal(_raised(x, eps=0, **more), x)


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_gradient_that_does_not_exist_is_refused(name: str) -> None:
    given = {"x": torch.zeros(2), name: torch.zeros(2, requires_grad=True)}
    with pytest.raises(ArgumentError, match="_raised is not differentiable, and a tensor requires grad"):
        _raised(**given)
    with torch.no_grad():
        assert torch.equal(_raised(**given), torch.full((2,), 0.5))


def _parts(*, x: Tensor, rows: int) -> Tensor:
    return x + rows


@public(recent=False, sharded=("x", _parts), defaults={"rows": 1})
def _whole(x: Tensor, *, rows: int | None = None, out: Tensor | None = None) -> Tensor:
    return x - rows


def test_dtensors_go_to_their_own_function_with_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2)
    assert torch.equal(_whole(x), x - 1)
    monkeypatch.setitem(_whole.__globals__, "_is_sharded", lambda t: t is x)
    assert torch.equal(_whole(x, rows=3), x + 3)
    out = torch.ones(2)
    assert _whole(x, rows=3, out=out) is out
    assert torch.equal(out, x + 3)
    with pytest.raises(ArgumentError, match="_whole with out= is not differentiable"):
        _whole(x, rows=3, out=torch.ones(2, requires_grad=True))
