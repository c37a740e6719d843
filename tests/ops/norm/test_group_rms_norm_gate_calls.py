"""group_rms_norm_gate: autograd, errors, torch.compile, arrays, order of threads, and what only a GPU shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, poisoned, running_on
from support.group_rms_norm_gate_cases import Inputs, check, gated, make, plain
from support.places import at, error_tests, meta_on, order_test
from support.ways import assert_compiles, assert_equal_bits, captured
from torch import Tensor

from bench.rows import rows_of
from rtkernels.ops.norm import group_rms_norm_gate as module

# ---- autograd -------------------------------------------------------------------------------------------------------


def test_only_the_gradients_that_are_wanted() -> None:
    x, gate, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    for wanted in range(3):
        leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate((x, gate, weight))]
        gated(*leaves, groups=2).sum().backward()
        others = [t.clone().double().requires_grad_(i == wanted) for i, t in enumerate((x, gate, weight))]
        plain(*others, 2, 1e-6, "same").sum().backward()
        for i, (ours, exact) in enumerate(zip(leaves, others, strict=True)):
            assert (ours.grad is not None) == (i == wanted)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, exact.grad.float())


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(gated(x, x, groups=2).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- errors ---------------------------------------------------------------------------------------------------------


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (
        lambda: gated(_ones(4, 8, dtype=torch.float64), _ones(4, 8), groups=2),
        "x has dtype float64; expected one of bfloat16, float16, float32",
    ),
    "no dimensions": (
        lambda: gated(torch.tensor(1.0), torch.tensor(1.0), groups=1),
        "x or gate has too few dimensions; expected at least one",
    ),
    "layout": (
        lambda: gated(_ones(4, 8), _ones(4, 8), groups=2, layout="bshd"),
        "layout is 'bshd'; expected one of same, sequence_first",
    ),
    "sequence_first dimensions": (
        lambda: gated(_ones(4, 8), _ones(4, 8), groups=2, layout="sequence_first"),
        r"x has shape \(4, 8\); layout 'sequence_first' takes \[batch, sequence, channels\]",
    ),
    "gate shape": (
        lambda: gated(_ones(4, 8), _ones(4, 6), groups=2),
        r"gate has shape \(4, 6\); expected \(4, 8\) for x of shape \(4, 8\) and layout 'same'",
    ),
    "gate shape sequence_first": (
        lambda: gated(_ones(2, 3, 4, 8), _ones(2, 3, 32), groups=2, layout="sequence_first"),
        r"gate has shape \(2, 3, 32\); expected \(3, 2, 32\) for x of shape \(2, 3, 4, 8\)",
    ),
    "gate dtype": (
        lambda: gated(_ones(4, 8), _ones(4, 8, dtype=torch.float16), groups=2),
        "gate has dtype float16; expected float32, that of x",
    ),
    "gate device": (
        lambda: module.FORWARD.check(
            meta_on(0, _ones(4, 8)), meta_on(1, _ones(4, 8)), None, 2, 1e-6, "same", "sigmoid", False
        ),
        "gate has device index 1; expected 0, that of x",
    ),
    "act": (
        lambda: gated(_ones(4, 8), _ones(4, 8), groups=2, act="gelu"),
        "act is 'gelu'; expected one of sigmoid, silu",
    ),
    "groups": (lambda: gated(_ones(4, 8), _ones(4, 8), groups=3), "groups is 3; expected a number that divides the 8"),
    "no groups": (lambda: gated(_ones(4, 8), _ones(4, 8), groups=0), "groups is 0; expected a number that divides"),
    "weight shape": (
        lambda: gated(_ones(4, 8), _ones(4, 8), _ones(2), groups=2),
        r"weight has shape \(2,\); expected \(8,\), one number for each channel, or \(4,\), shared by the groups",
    ),
    "weight dtype": (
        lambda: gated(_ones(4, 8), _ones(4, 8), _ones(8, dtype=torch.float16), groups=2),
        "weight has dtype float16; expected one of float32",
    ),
    "weight device": (
        lambda: module.FORWARD.check(
            meta_on(0, _ones(4, 8)), meta_on(0, _ones(4, 8)), meta_on(-1, _ones(8)), 2, 1e-6, "same", "sigmoid", False
        ),
        "weight has device index -1; expected 0, that of x",
    ),
    "not a tensor": (
        lambda: gated([1.0, 2.0], _ones(2), groups=1),
        "expected a torch.Tensor or an array with __dlpack__",
    ),
    "dy shape": (
        lambda: module.BACKWARD(_ones(4, 4), _ones(4, 8), _ones(4, 8), None, 2, 1e-6, "same", "sigmoid", False, False),
        r"dy has shape \(4, 4\); expected \(4, 8\), that of gate",
    ),
    "dy dtype": (
        lambda: module.BACKWARD(
            _ones(4, 8).half(), _ones(4, 8), _ones(4, 8), None, 2, 1e-6, "same", "sigmoid", False, False
        ),
        "dy has dtype float16; expected float32",
    ),
    "weight_grad": (
        lambda: module.BACKWARD(_ones(4, 8), _ones(4, 8), _ones(4, 8), None, 2, 1e-6, "same", "sigmoid", False, True),
        "weight_grad is True but there is no weight",
    ),
}

test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        turned = gated(x * 2, gate, weight, groups=2, layout="sequence_first")
        return turned + gated(turned.flip(-1), gate, groups=4)

    def inputs(tokens: int) -> list[Tensor]:
        return [torch.randn(shape, device=place) for shape in ((2, tokens, 4, 4), (tokens, 2, 16), (8,))]

    assert_compiles(block, map(inputs, (3, 4)), dynamic=dynamic)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)
    y = gated(x, x, np.ones(8, "f4"), groups=2)
    assert isinstance(y, np.ndarray)
    np.testing.assert_allclose(y, gated(torch.from_numpy(x), torch.from_numpy(x), groups=2).numpy())


def test_bench_rows_agree_with_torch() -> None:
    rows = {(row.name, row.shape): row for row in rows_of(module.OP.name)}
    assert rows["gate_fwd", "b2s4096c2048g4"].bytes == 100_667_392
    assert rows["gate_bwd", "b2s4096c2048g4"].bytes == 167_784_448 - 2 * 2048  # dweight is bf16, as the weight
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "dy": torch.randn(5, 2, 32, generator=generator),
        "x": torch.randn(2, 5, 32, generator=generator),
        "gate": torch.randn(5, 2, 32, generator=generator),
        "weight": torch.randn(32, generator=generator),
        "groups": 4,
        "eps": 1e-6,
        "layout": "sequence_first",
    }
    bwd = rows["gate_bwd", "b2s4096c2048g4"]
    torch.testing.assert_close(bwd.ours(**inputs), bwd.torch(**inputs))
    del inputs["dy"]
    fwd = rows["gate_fwd", "b2s4096c2048g4"]
    torch.testing.assert_close(fwd.ours(**inputs), fwd.torch(**inputs))


# ---- order and the GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ("plain", "shared", "odd", "many_groups", "slices_shared", "turned_many"))
@at("sm_90", "cuda")
def test_equal_bits_twice(place: str, case: str) -> None:
    with running_on(place) as device:
        first, second = (check(make(case, torch.bfloat16, device)) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case, torch.bfloat16, "cpu")),
    *("plain", "odd", "two_warps", "many_groups", "slices_shared", "turned_many"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ("same", "sequence_first"))
@pytest.mark.parametrize(("channels", "groups"), ((2048, 4), (2048, 16), (4096, 4), (5120, 40), (8192, 1), (1536, 3)))
def test_bench_shapes(channels: int, groups: int, layout: str) -> None:
    with poisoned():
        generator = torch.Generator("cuda").manual_seed(channels)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

        x, like = normal(2, 1027, channels), (2, 1027, channels) if layout == "same" else (1027, 2, channels)
        for weight in (normal(channels), normal(channels // groups)):
            check(Inputs(x, normal(*like), groups, weight, layout, normal(*like)))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    rows, channels = 2**20 + 3, 2048
    x = torch.zeros(rows, channels, device="cuda", dtype=torch.bfloat16)
    x[-1], x[0] = 2.0, 4.0
    y = gated(x, torch.zeros_like(x), groups=4)
    assert (y[-1] == 0.5).all() and (y[0] == 0.5).all() and not y[1:-1].any()
    _, dgate, dweight = module.BACKWARD(
        y, x, torch.zeros_like(x), torch.ones(channels, device="cuda"), 4, 1e-6, "same", "sigmoid", False, True
    )
    assert (dgate[-1] == 0.125).all() and (dgate[0] == 0.125).all() and not dgate[1:-1].any()
    torch.testing.assert_close(dweight, torch.full_like(dweight, 0.5))


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    x, gate = (torch.randn(64, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight, dy = torch.rand(32, device="cuda"), torch.randn_like(gate)

    def run() -> tuple[Tensor, ...]:
        options = (weight, 4, 1e-6, "same", "sigmoid", False)
        return module.FORWARD(x, gate, *options), *module.BACKWARD(dy, x, gate, *options, True)

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())
