"""Variants of the pointwise kernels: which ``warm`` builds; all of them are compiled with ``--full`` only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.overrides import taken
from support.places import allowed_spills, compiled_for

import rtkernels
from rtkernels import emulator
from rtkernels.aten import gradients, pointwise, ternary  # noqa: F401  register their functors
from rtkernels.aten.functors import _FUNCTORS, KERNELS, all_variants
from rtkernels.runtime import targets, warm
from rtkernels.runtime.build import cache
from rtkernels.runtime.build.nvrtc import Resources
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans

_KINDS = (("V", KERNELS.flat), ("G", KERNELS.strided), ("T", KERNELS.transposed), ("S", KERNELS.squares))


def test_warm_builds_the_usual_variants_and_every_one_on_request() -> None:
    target = targets.parse("sm_90a")
    for kind, kernel in _KINDS:
        usual, every = kernel.variants(target), kernel.variants(target, every=True)
        assert set(every) == set(all_variants(kind)) and len(set(every)) == len(every)
        assert set(usual) < set(every)
    ops, chosen = warm.select(["aten_pointwise"]), [target]
    jobs = list(warm.plan(ops, chosen, every_variant=True))
    assert len(jobs) == sum(len(kernel.variants(target, every=True)) for _, kernel in _KINDS) > 2000
    assert 500 < len(list(warm.plan(ops, chosen))) < 800


def _launched(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> set[tuple[str, tuple[Any, ...]]]:
    """Return kernels and variants that a call binds; nothing is compiled or run."""
    found = set()

    def bind(kernel: Kernel, variant: tuple[Any, ...], *args: Any, **more: Any) -> Callable[..., None]:
        found.add((kernel.name, variant))
        return lambda *args: None

    monkeypatch.setattr(emulator, "bind", bind)
    Plans.forget_all()
    with taken("sm_90", "all"):
        call()
    Plans.forget_all()
    return found


_TYPES = [torch.float32, torch.bfloat16, torch.float16]


def _usual(dtype: torch.dtype) -> None:
    x, y, rows = torch.ones(64, 128, dtype=dtype), torch.ones(64, 128, dtype=dtype), torch.ones(128, dtype=dtype)
    for other in (y, rows, 2.0):
        _ = x + other, x * other, x - other, x / other, x > other, torch.where(x > 0, x, y)
    _ = x[:, ::2] + y[:, ::2], x[:, 1:].sigmoid(), x.tanh(), x.exp(), -x, x.abs()
    _ = x.t().contiguous(), x.t() + torch.ones(128, 64, dtype=dtype), x.clone(), torch.zeros_like(x).fill_(3)
    large = torch.ones(1024, 1024, dtype=dtype)
    _ = large.t().contiguous(), large.t() + large, large * large.t()
    _ = x.float(), x.to(torch.bfloat16), x.half(), (x > 0).to(dtype), torch.arange(128).to(dtype)
    torch.addcmul(x, y, y), torch.lerp(x, y, 0.5), x.clamp(-1, 1), x.masked_fill(x > 0, 0.0), torch.arange(64) + 1


@pytest.mark.parametrize("dtype", _TYPES, ids=str)
def test_warm_builds_what_pointwise_operators_launch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    target, usual = targets.parse("sm_90a"), set()
    for _, kernel in _KINDS:
        usual |= {(kernel.name, variant) for variant in kernel.variants(target)}
    found = {(name, v) for name, v in _launched(monkeypatch, lambda: _usual(dtype)) if name.startswith("pointwise_")}
    assert len(found) > 20 and {name for name, _ in found} == {kernel.name for _, kernel in _KINDS}
    assert not found - usual


@pytest.mark.parametrize("dtype", _TYPES, ids=str)
def test_warm_builds_what_functions_of_pointwise_launch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"warm_probe_{str(dtype).removeprefix('torch.')}"
    function = rtkernels.pointwise(name, "a * b + s0", backward={"a": "g * b", "b": "g * a"})
    x, y = (torch.ones(1024, 1024, dtype=dtype, requires_grad=True) for _ in range(2))

    def call() -> None:
        for a, b in ((x, y), (x.t(), y), (x, y.t()), (x[:, ::2], y[:, ::2]), (x[1:, 1:].t(), y[1:, 1:])):
            function(a, b, 2.0).sum().backward()

    target = targets.parse("sm_90a")
    built = {(kernel.name, variant) for kernel in function.op.kernels for variant in kernel.variants(target)}
    found = {(kernel, variant) for kernel, variant in _launched(monkeypatch, call) if variant[0].startswith("user_")}
    assert len({kernel for kernel, _ in found}) == 4
    assert not found - built


@pytest.mark.slow
@pytest.mark.parametrize("functor", sorted(_FUNCTORS))
def test_all_compile_without_spills(functor: str) -> None:
    for kind, kernel in _KINDS:
        expressions = [kernel.expression(variant) for variant in set(all_variants(kind)) if variant[0] == functor]
        entry = cache.load(kernel.unit, sorted(expressions), compiled_for("sm_90a"), kernel.flags, op=kernel.op)
        for expression in expressions:
            used = Resources(**entry.meta["resources"][expression])
            assert max(used.spill_stores, used.spill_loads) <= allowed_spills(), expression
            assert used.registers <= kernel.max_registers, expression
