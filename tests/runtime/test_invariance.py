"""The level of batch invariance: scopes, threads, keys of plans and replays, torch's products, compilation."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from support.interpreter import environment, run_python
from support.places import emulated

import rtkernels
from rtkernels import ArgumentError
from rtkernels.runtime import invariance
from rtkernels.runtime.depends import call_key


def test_scopes_nest() -> None:
    assert invariance.level() == 0
    with rtkernels.batch_invariant(2):
        assert invariance.level() == 2
        with rtkernels.batch_invariant(0):
            assert invariance.level() == 0
        with rtkernels.batch_invariant(3):
            assert invariance.level() == 3
        assert invariance.level() == 2
    assert invariance.level() == 0 == invariance.state.highest


def test_the_default_is_of_the_process() -> None:
    rtkernels.set_batch_invariant(1)
    try:
        found = []
        thread = threading.Thread(target=lambda: found.append(invariance.level()))
        thread.start()
        thread.join()
        assert found == [1]
        with rtkernels.batch_invariant(0):
            assert invariance.level() == 0
    finally:
        rtkernels.set_batch_invariant(0)
    assert invariance.state.highest == 0


def test_a_scope_is_of_its_thread() -> None:
    found = []
    with rtkernels.batch_invariant(2):
        thread = threading.Thread(target=lambda: found.append(invariance.level()))
        thread.start()
        thread.join()
    assert found == [0]


def test_an_exception_ends_a_scope_and_functions_can_be_decorated() -> None:
    @rtkernels.batch_invariant(1)
    def fails() -> None:
        assert invariance.level() == 1
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fails()
    assert invariance.level() == 0


@pytest.mark.parametrize("level", [-1, 4, 1.0, True, "1", None])
def test_wrong_levels(level: object) -> None:
    with pytest.raises(ArgumentError, match="level is"):
        rtkernels.batch_invariant(level)
    with pytest.raises(ArgumentError, match="level is"):
        rtkernels.set_batch_invariant(level)


@pytest.mark.one_in(3)
def test_the_environment_sets_the_default() -> None:
    code = "import rtkernels; from rtkernels.runtime import invariance; print(invariance.level())"
    variables = environment(os.getcwd(), RTKERNELS_BATCH_INVARIANT="2")
    assert run_python("-c", code, env=variables).stdout.strip() == "2"
    wrong = run_python("-c", code, env=variables | {"RTKERNELS_BATCH_INVARIANT": "7"})
    assert wrong.returncode and "RTKERNELS_BATCH_INVARIANT='7'" in wrong.stderr


class _Asks(torch.autograd.Function):
    found: int | None = None

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        _Asks.found = invariance.level()
        return dy * 2


def test_backward_passes_have_the_level_of_their_caller() -> None:
    x = torch.ones(3, requires_grad=True)
    with rtkernels.batch_invariant(2):
        y = _Asks.apply(x).sum()
        y.backward(retain_graph=True)
    assert _Asks.found == 2
    y.backward()
    assert _Asks.found == 0


def test_keys_hold_the_level() -> None:
    x = torch.ones(3)
    plain = call_key([x, 1.0])
    with rtkernels.batch_invariant(1):
        assert call_key([x, 1.0]) != plain
    assert call_key([x, 1.0]) == plain


@emulated
@pytest.mark.parametrize("features", ["sm_80", "sm_90"])
def test_plans_and_replays_see_the_level(features: str) -> None:
    """Calls at two levels alternate: each has its own bits, at the first, the second and later times."""
    a, b = torch.randn(20, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    with rtkernels.emulate(features, races=False):
        with rtkernels.batch_invariant(1):
            whole = rtkernels.scaled_mm(a, b, out_dtype=torch.float32)
        plain = rtkernels.scaled_mm(a[:3], b, out_dtype=torch.float32)
        for _ in range(3):
            with rtkernels.batch_invariant(1):
                assert torch.equal(rtkernels.scaled_mm(a[:3], b, out_dtype=torch.float32), whole[:3])
            assert torch.equal(rtkernels.scaled_mm(a[:3], b, out_dtype=torch.float32), plain)
        assert not torch.equal(plain, whole[:3])  # or the kernels are the same, and this shows nothing


@emulated
def test_products_of_torch_with_other_dtypes() -> None:
    x, w = torch.randn(300, 48), torch.randn(48, 32)
    cube, other = torch.randn(3, 7, 5), torch.randn(3, 5, 4)
    with rtkernels.emulate("sm_80"), rtkernels.batch_invariant(1):
        full = x @ w
        for rows in (1, 5, 129):
            assert torch.equal(x[7 : 7 + rows] @ w, full[7 : 7 + rows])
        for result, wanted in (
            (full, x.double() @ w.double()),
            (torch.addmm(w[0], x, w, beta=0.5, alpha=2.0), 0.5 * w[0].double() + 2 * (x.double() @ w.double())),
            (torch.bmm(cube, other), cube.double() @ other.double()),
            (torch.baddbmm(cube[:, :, :4], cube, other), cube[:, :, :4].double() + cube.double() @ other.double()),
            (w.t() @ x[0], w.t().double() @ x[0].double()),
            (torch.mm(x, w, out=torch.empty(0)), x.double() @ w.double()),
            (torch.zeros(300, 32).addmm_(x, w), x.double() @ w.double()),
            (torch.zeros(0, 48) @ w, torch.zeros(0, 32).double()),
        ):
            torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)


ENABLED = {
    "sum": lambda x: x.sum(-1), "var": lambda x: x.var(-1), "_softmax": lambda x: x.softmax(-1),
    "native_group_norm": lambda x: torch.nn.functional.group_norm(x.view(len(x), 4, -1), 2),
    "cumsum": lambda x: x.cumsum(-1),
}  # fmt: skip


@emulated
@pytest.mark.parametrize("name", ENABLED)
def test_operators_of_torch_that_are_enabled(name: str) -> None:
    """Rows are long, so that few of them would be cut into slices for more SMs than many are."""
    x = torch.randn(40, 20000, generator=torch.Generator().manual_seed(0))
    with rtkernels.emulate("sm_90", races=False), rtkernels.batch_invariant(1), rtkernels.use([name]):
        full = ENABLED[name](x)
        for first, end in (*((i, i + 1) for i in (0, 5, 11, 39)), (3, 8)):
            assert torch.equal(ENABLED[name](x[first:end]), full[first:end]), (first, end)


def test_compiled_functions_follow_the_level() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + invariance.level())

    x = torch.ones(3)
    assert function(x).tolist() == [1, 1, 1]
    with rtkernels.batch_invariant(2):
        assert function(x).tolist() == [3, 3, 3]
    assert function(x).tolist() == [1, 1, 1]
