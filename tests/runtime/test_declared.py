"""Operators by declaration: schemas, plans, conversions, memory that is overwritten, gradients as written-out code."""

from __future__ import annotations

import linecache
import time

import pytest
import torch
from support.recent import recent
from torch import Tensor

import rtkernels
from rtkernels import emulator
from rtkernels.errors import ArgumentError
from rtkernels.ops.index.row_moves_operators import SCATTER
from rtkernels.ops.pointwise.inplace import ADD
from rtkernels.ops.reduce import row_dot, softmax
from rtkernels.runtime import torch_private
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.operator.declared import Aligned, Dense, DenseFloat, Meta, Rows, UnitStride, dense_as, misaligned
from rtkernels.runtime.operator.plan import Memory, StepPlan, Steps


def _meta(t: Tensor) -> Meta:
    return Meta(t.dtype, t.shape, t.stride(), t.get_device(), t.data_ptr() & 15)


def test_schemas_keep_the_order_of_their_arguments() -> None:
    assert SCATTER.schema == "scatter_add_fwd(Tensor x, Tensor indices, SymInt rows, Tensor? weights) -> Tensor"
    assert ADD.schema.endswith("(Tensor(a!) x, Tensor? y, Tensor? factor, float alpha, float beta) -> ()")


def test_what_kinds_copy() -> None:
    x = torch.zeros(4, 6)
    assert Rows("x").fits(_meta(x[:, 2:])) and not Rows("x").fits(_meta(x.t()))
    assert UnitStride("x").fits(_meta(x.view(2, 2, 6)[:, 0])) and not Dense("x").fits(_meta(x[:, 2:]))
    assert not DenseFloat("x").fits(_meta(x.half())) and DenseFloat("x").copied(x.half().t()).is_contiguous()
    flat = torch.zeros(9)
    assert not Aligned("x").fits(_meta(flat[1:])) and Aligned("x").copied(flat[1:]).data_ptr() % 16 == 0
    assert misaligned(_meta(flat), None, _meta(flat[1:])) == 4
    assert dense_as(_meta(x.t()), torch.float16) == (torch.float16, (6, 4), (4, 1), -1, 0)


def test_numbers_have_no_plans_of_their_own() -> None:
    with rtkernels.emulate("sm_80"):
        x = torch.randn(3, 8)
        softmax.softmax(x)
        plans = len(softmax.FORWARD._plans)
        for scale in (0.5, 2.0, -1.0):
            torch.testing.assert_close(softmax.softmax(x, scale=scale), torch.softmax(scale * x, -1))
        assert len(softmax.FORWARD._plans) == plans
        with pytest.raises(ArgumentError, match="scale is inf"):
            softmax.softmax(x, scale=float("inf"))


def test_what_is_overwritten_through_a_copy_is_counted() -> None:
    with rtkernels.emulate("sm_80"):
        x = torch.randn(8, 3).t()
        wanted, version = torch.softmax(x, -1), x._version
        assert softmax.softmax(x, in_place=True) is x and x._version > version
        torch.testing.assert_close(x, wanted)


def test_replay_needs_the_same_kind_of_call() -> None:
    op, scope = row_dot.FORWARD, row_dot.FORWARD.call.__globals__
    with rtkernels.emulate("sm_80"), emulator.recording():
        x, y = torch.randn(4, 16), torch.randn(4, 16)
        first = op._launch_slowly(scope, None, (x, y))
        assert torch.equal(recent(op, x.clone(), y.clone()), first)
        assert recent(op, x[:2], y[:2]) is None
        other = torch.randn(2, 16), torch.randn(2, 16)
        scope["launch"](*other)
        assert torch.equal(recent(op, x, y), first) and recent(op, *other) is not None
        assert scope["last_calls"][0][0](*other) and scope["last_calls"][1][0](x, y)
        for rows in range(5, 9):  # more than are remembered
            scope["launch"](torch.randn(rows, 16), torch.randn(rows, 16))
        assert recent(op, x, y) is None
        assert torch.equal(scope["launch"](x, y), first) and recent(op, x, y) is not None


def test_a_site_has_recent_calls_of_its_own() -> None:
    op, call = row_dot.FORWARD, row_dot.FORWARD.call
    Plans.forget_all()
    site, scope = op.at_site(), call.__globals__
    assert op.call is call and site is not call
    with rtkernels.emulate("sm_80"), emulator.recording():
        (x, y), (v, w) = torch.randn(2, 4, 16), torch.randn(2, 2, 16)
        first, second = site.__globals__["launch"](x, y), scope["launch"](v, w)
        assert torch.equal(recent(op, x, y, call=site), first) and recent(op, x, y) is None
        assert torch.equal(recent(op, v, w), second)
        Plans.forget_all()
        assert recent(op, x, y, call=site) is None


def test_steps_that_nobody_can_run_twice_over() -> None:
    with pytest.raises(ValueError, match="y is the name of two tensors"):
        StepPlan("made_up", ("y",), (), {"y": Memory((1,), torch.float32)}, "single", Steps(), -1)


def test_written_code_has_lines() -> None:
    for name in ("<rtkernels row_dot_fwd>", "<rtkernels plans of row_dot_fwd>"):
        assert linecache.getline(name, 2), name


def test_dropped_plans_are_not_replayed_and_one_tensor_given_twice_is() -> None:
    op, scope = row_dot.FORWARD, row_dot.FORWARD.call.__globals__
    with rtkernels.emulate("sm_80"), emulator.recording():
        x, y = torch.randn(4, 16), torch.randn(4, 16)
        first = op._launch_slowly(scope, None, (x, y))
        assert torch.equal(recent(op, x, y), first)
        Plans.forget_all()
        assert recent(op, x, y) is None
        torch.testing.assert_close(scope["launch"](x, x), op.reference(x, x))
        for both in (x, y):
            torch.testing.assert_close(recent(op, both, both), op.reference(both, both))
        assert recent(op, x, y) is None


@pytest.mark.skipif(torch_private.TensorGuards is None, reason="this torch has no such guards")
def test_guards_compare_aliases_and_absent_tensors() -> None:
    a, b, c = (torch.zeros(2) for _ in range(3))
    matches = torch_private.same_tensors([a, None, a, b])
    assert matches(a, None, a, b) and matches(b, None, b, a)
    for other in ((a, None, c, b), (a, a, a, b), (a, None, a, a), (None, None, None, b), (a, None, a, None)):
        assert not matches(*other), other
    assert not torch_private.same_tensors([a, b])(a, a)
    # Lists of parameters have thousands: a comparison of each with all before it would take half a minute here.
    many, began = [torch.zeros(1) for _ in range(50_000)], time.perf_counter()
    assert torch_private.same_tensors(many)(*many) and time.perf_counter() - began < 10
