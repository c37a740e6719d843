"""Gradients over saved tensors (`reuse="inputs"`): the same values in their memory, and what is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import at
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rtkernels
from rtkernels.errors import ArgumentError

glu, rms_norm, layer_norm = rtkernels.glu, rtkernels.rms_norm, rtkernels.layer_norm


def _normal(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def _weight(cols: int, device: str) -> Tensor:
    return _normal(cols, device=device).requires_grad_()


# Name: leaves, and a call of results of operations on them; the result, and the tensors whose memory gradients take.
Case = tuple[Callable[[str], list[Tensor]], Callable[..., tuple[Any, list[Tensor]]]]


def _glu(x: Tensor, reuse: str | None) -> tuple[Any, list[Tensor]]:
    return glu(x, reuse=reuse), [x]


def _separate(x: Tensor, up: Tensor, weight: Tensor, reuse: str | None) -> tuple[Any, list[Tensor]]:
    return glu(x, up, act="gelu_tanh", weight=weight, reuse=reuse), [x, up]


def _rms(x: Tensor, weight: Tensor, reuse: str | None) -> tuple[Any, list[Tensor]]:
    return rms_norm(x, weight, reuse=reuse), [x]


def _rms_add(x: Tensor, residual: Tensor, weight: Tensor, reuse: str | None) -> tuple[Any, list[Tensor]]:
    y, h = rms_norm(x, weight, residual=residual, reuse=reuse)
    return (y, h), [h]


def _layer(x: Tensor, weight: Tensor, bias: Tensor, reuse: str | None) -> tuple[Any, list[Tensor]]:
    return layer_norm(x, weight, bias, reuse=reuse), [x]


def _layer_add(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, reuse: str | None):
    y, h = layer_norm(x, weight, bias, residual=residual, reuse=reuse)
    return (y, h), [h]


def _inputs(*shapes: tuple[int, ...]) -> Callable[[str], list[Tensor]]:
    return lambda device: [_normal(*shape, device=device).requires_grad_() for shape in shapes]


CASES: dict[str, Case] = {
    "glu": (_inputs((5, 2 * 64)), _glu),
    "glu_odd": (_inputs((3, 7, 2 * 33)), _glu),
    "glu_no_rows": (_inputs((0, 2 * 8)), _glu),
    "glu_separate": (_inputs((4, 24), (4, 24), (4,)), _separate),
    "rms_norm": (_inputs((5, 64), (64,)), _rms),
    "rms_norm_odd": (_inputs((3, 77), (77,)), _rms),  # a second kernel reads the rows for the weight's gradient
    "rms_norm_residual": (_inputs((2, 3, 64), (2, 3, 64), (64,)), _rms_add),
    "layer_norm": (_inputs((5, 64), (64,), (64,)), _layer),
    "layer_norm_odd": (_inputs((3, 77), (77,), (77,)), _layer),
    "layer_norm_residual": (_inputs((5, 64), (5, 64), (64,), (64,)), _layer_add),
}


def run(case: str, device: str, reuse: str | None) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Return the gradients of the leaves, and the addresses of gradients and of the tensors that they may be over."""
    make, call = CASES[case]
    leaves = make(device)
    matrices = [leaf * 1 if leaf.dim() > 1 or case == "glu_separate" else leaf for leaf in leaves]
    results, over = call(*matrices, reuse)
    seen: dict[int, Tensor] = {}
    for i, t in enumerate(matrices):
        if t.grad_fn is not None:
            t.grad_fn.register_prehook(lambda grads, i=i: seen.__setitem__(i, grads[0]))
    results = results if isinstance(results, tuple) else (results,)
    grads = [_normal(*r.shape, device=device) * (k + 1) for k, r in enumerate(results)]
    where = [t.data_ptr() for t in over]
    torch.autograd.backward(results, grads)
    return [leaf.grad for leaf in leaves], list(zip(where, (seen[i].data_ptr() for i in range(len(over))), strict=True))


@pytest.mark.parametrize("case", CASES)
@at()
def test_same_gradients_in_the_memory_of_the_inputs(place: str, case: str) -> None:
    with running_on(place) as device:
        wanted, places = run(case, device, None)
        assert all(a != b or a == 0 for a, b in places)
        got, places = run(case, device, "inputs")
        assert all(a == b for a, b in places)
        for a, b in zip(got, wanted, strict=True):
            assert_same_bits(a, b)


def test_no_gradient_changes_nothing() -> None:
    x = _normal(4, 16)
    assert_same_bits(glu(x, reuse="inputs"), glu(x))
    kept, weight = x.clone(), torch.ones(4, requires_grad=True)
    glu(x, weight=weight, reuse="inputs").sum().backward()  # x needs no gradient, so its memory may belong to anybody
    assert_same_bits(x, kept)
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        glu(leaf, reuse="inputs")


# ---- refused --------------------------------------------------------------------------------------------------------

LEAF = torch.ones(4, 16, requires_grad=True)
BAD: dict[str, Callable[[], Any]] = {
    "reuse is 'x'; expected 'inputs' or None": lambda: glu(torch.ones(2, 8), reuse="x"),
    "reuse is True; expected 'inputs' or None": lambda: rms_norm(torch.ones(2, 8), reuse=True),
    "x is a leaf that requires grad; expected the result of an operation": lambda: glu(LEAF, reuse="inputs"),
    "x is a view of a leaf that requires grad": lambda: rms_norm(LEAF[:2], reuse="inputs"),
    "up is a view of a leaf that requires grad": lambda: glu(LEAF * 1, LEAF.view(4, 16), reuse="inputs"),
    r"x has strides \(1, 16\); expected a dense tensor": lambda: layer_norm((LEAF * 1).t(), reuse="inputs"),
    "up shares memory with another input": lambda: (lambda x: glu(x, x, reuse="inputs"))(LEAF * 1),
    "reuse cannot be combined with rstd or return_rstd": lambda: rms_norm(LEAF * 1, return_rstd=True, reuse="inputs"),
    "reuse cannot be combined with rstd, mean": lambda: layer_norm(LEAF * 1, return_statistics=True, reuse="inputs"),
}


@pytest.mark.parametrize("message", BAD)
def test_errors(message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        BAD[message]()


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": lambda x: glu(x, reuse="inputs"),
    "rms_norm": lambda x: rms_norm(x, reuse="inputs"),
    "rms_norm_residual": lambda x: rms_norm(x, residual=torch.ones_like(x), reuse="inputs")[0],
    "layer_norm": lambda x: layer_norm(x, reuse="inputs"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_backward_twice(call: Callable[[Tensor], Tensor]) -> None:
    y = call(torch.ones(4, 16, requires_grad=True) * 2)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"reuse='inputs'\) was differentiated before \(retain_graph=True\)"):
        y.sum().backward()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_other_ways_to_differentiate(call: Callable[[Tensor], Tensor]) -> None:
    leaf = torch.ones(4, 16, requires_grad=True)
    y = call(leaf * 2)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y.sum(), leaf, create_graph=True)
    y = call(leaf * 2)
    with pytest.raises(RuntimeError, match="is_grads_batched"):
        torch.autograd.grad(y, leaf, torch.ones(2, *y.shape), is_grads_batched=True)


def test_torch_notices_that_another_node_needs_the_input() -> None:
    """One that saved it and runs later: its producer, whose result it is, or an operation on a view of it."""
    leaf = torch.rand(4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        glu(leaf.exp(), reuse="inputs").sum().backward()
    x = leaf * 2
    squares = x.view(-1).square().sum()  # its node was created first and runs last
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (rms_norm(x, reuse="inputs").sum() + squares).backward()
    y, h = rms_norm(leaf * 2, residual=leaf * 3, reuse="inputs")
    later = h.square().sum()
    y.sum().backward()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|second time"):
        later.backward()


def test_gradients_that_lie_in_the_input_are_copied() -> None:
    leaf = torch.rand(4, 16)
    results = []
    for reuse in (None, "inputs"):
        x = leaf.clone().requires_grad_()
        h = x * 2
        y = rms_norm(h, reuse=reuse)
        y.backward(h.detach())
        results.append(x.grad)
    assert_same_bits(*results)


# ---- ways to run ----------------------------------------------------------------------------------------------------


def test_checkpointing_takes_new_memory() -> None:
    """Torch does not track versions of tensors unpacked by saved-tensor hooks: another use would go unnoticed."""
    leaf = torch.rand(4, 16, requires_grad=True)

    def block(x: Tensor, reuse: str | None) -> Tensor:
        h = x * 2
        return glu(h, reuse=reuse).sum() + h.square().sum()  # saved twice

    (wanted,) = torch.autograd.grad(block(leaf, None), leaf)
    (got,) = torch.autograd.grad(checkpoint(block, leaf, "inputs", use_reentrant=False), leaf)
    assert_same_bits(got, wanted)
    with torch.autograd.graph.save_on_cpu():
        y = block(leaf, "inputs")
    assert_same_bits(torch.autograd.grad(y, leaf)[0], wanted)


def test_torch_compile() -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        y, h = rms_norm(x * 2, weight, residual=x, reuse="inputs")
        return glu(y * h, reuse="inputs") + layer_norm(x * 3, reuse="inputs")[:, :8]

    leaf, weight = torch.rand(4, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(block(leaf, weight).sum(), (leaf, weight))
    for a, b in zip(torch.autograd.grad(compiled(leaf, weight).sum(), (leaf, weight)), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_peak_memory() -> None:
    """The backward pass of glu takes no memory for the gradient of [gate | up]."""
    peaks = []
    for reuse in (None, "inputs"):
        x = torch.randn(1024, 2 * 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True) * 1
        y = glu(x, reuse=reuse)
        dy = torch.ones_like(y)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(y, x, dy)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] >= x.nbytes > peaks[1]
