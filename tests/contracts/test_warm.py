"""A contract of all public functions: ``warm --op NAME`` builds every kernel that a call of it launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from torch import Tensor

import rtkernels
from contracts.test_dynamic_rows import CALLS, MATRIX, OWNERS, _gradient, _inputs, _tensors
from rtkernels import emulator
from rtkernels.runtime import warm
from rtkernels.runtime.launch.plans import Plans

F32, BF16 = torch.float32, torch.bfloat16
MORE_CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "decode_linear, 20 rows": lambda x, ids: rtkernels.decode_linear(
        x.detach().bfloat16().repeat(2, 1), MATRIX.bfloat16(), norm_weight=MATRIX[0].bfloat16()
    ),
    "hadamard, transposed": lambda x, ids: rtkernels.quantize_fp8_hadamard(x, transposed=True),
    "layer_norm, statistics": lambda x, ids: rtkernels.layer_norm(x, return_statistics=True),
    "layer_norm_fp8, kept": lambda x, ids: rtkernels.layer_norm_fp8(x, keep=True).y,
    "quantize_fp8, channel": lambda x, ids: rtkernels.quantize_fp8(x, granularity="channel"),
    "quantize_fp8_smooth, channel": lambda x, ids: rtkernels.quantize_fp8_smooth(x, granularity="channel")[:2],
    "rms_norm, statistics": lambda x, ids: rtkernels.rms_norm(x, return_rstd=True),
    "rms_norm_fp8, kept": lambda x, ids: rtkernels.rms_norm_fp8(x, keep=True).y,
    "scaled_mm, 4 rows": lambda x, ids: rtkernels.scaled_mm(x.detach().bfloat16()[:4], MATRIX.bfloat16()),
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Any]]:
    """The kernels that are launched meanwhile. Nothing is compiled or run: results are memory as it comes."""
    found: set[Any] = set()

    def bind(kernel: Any, *args: Any, **more: Any) -> Callable[..., None]:
        return lambda *args: found.add(kernel)

    monkeypatch.setattr(emulator, "bind", bind)
    Plans.forget_all()
    yield found
    Plans.forget_all()


def _asked_for(function: Callable[..., Any]) -> set[str]:
    """Return the ops whose public functions a call names itself, such as the index of a permutation."""
    names, todo = set(), [function.__code__]
    while todo:
        code = todo.pop()
        names.update(code.co_names)
        todo += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    names |= {"moe_index"} if "_index" in names else set()
    return {OWNERS[name] for name in names if name in OWNERS}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*CALLS, *MORE_CALLS])
def test_warming_an_op_builds_what_its_functions_launch(name: str, launched: set[Any]) -> None:
    function, owner = {**CALLS, **MORE_CALLS}[name], OWNERS[name.split(",")[0]]
    for arch in ("sm_80", "sm_90"):
        for dtype in (F32, BF16):
            x, ids = _inputs(10)
            _try(arch, function, x.to(dtype).requires_grad_(), ids)
    built = {kernel for op in warm.with_parts(sorted({*_asked_for(function), owner})) for kernel in op.kernels}
    ops = sorted({kernel.op for kernel in launched - built})
    assert not ops, (
        f"a call of {name} launches kernels of {', '.join(ops)}. Write Op({owner!r}, ..., "
        f"uses=({', '.join(map(repr, ops))},)), so that `rtkernels warm --op` builds them"
    )


def _try(arch: str, function: Callable[..., Any], leaf: Tensor, ids: Tensor) -> None:
    with rtkernels.emulate(arch):
        try:
            results = _tensors(function(leaf, ids))
            _gradient([t.float() for t in results], leaf)
        except (rtkernels.errors.RtkError, RuntimeError) as error:
            if leaf.dtype == F32:  # the calls were written for this one
                raise AssertionError(function) from error
