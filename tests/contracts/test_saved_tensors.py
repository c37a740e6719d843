"""What a backward pass reads is saved by autograd: a tensor that was changed since the forward pass raises.

A tensor that a node keeps as a plain attribute has no version that torch would compare; its gradient would silently be
that of other values. Called is every public function that is differentiable, on the CPU: nodes are the same everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rtkernels
from contracts.fuzz.calls import Call, functions, results_of
from rtkernels import nn

# Sums that later micro-batches add to, and a bias of which the backward pass reads the shape and dtype alone.
_LIVE = {"main_grad", "bias_like"}


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.numel():
            yield name, value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item, name)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, name)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), f"{name}.{field.name}")


def _nodes(results: list[Tensor]) -> Iterator[Any]:
    open_, seen = [r.grad_fn for r in results], set()
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        open_ += [following for following, _ in node.next_functions]


def _kept(results: list[Tensor]) -> list[str]:
    """Return names of attributes of nodes that are tensors, or hold some."""
    found = []
    for node in _nodes(results):
        attributes = getattr(node, "__dict__", {})
        found += [f"{type(node).__name__}.{name}" for key, value in attributes.items() if key not in _LIVE
                  for name, _ in _tensors(value, key)]  # fmt: skip
    return found


def _differentiable(call: Call) -> set[int]:
    """Return the places of tensors that get a gradient, each tried by itself."""
    found = set()
    for i, given in enumerate(call.tensors):
        if not given.is_floating_point() or given.itemsize == 1:
            continue
        try:
            results = call.run([t.clone().requires_grad_(i == j) for j, t in enumerate(call.tensors)])
        except rtkernels.ArgumentError:  # says that there is no gradient
            continue
        if any(r is not None and r.requires_grad for r in results_of(results)):
            found.add(i)
    return found


class _Forward:
    """A forward pass: its inputs, the leaves that they were made from, and the results that require a gradient."""

    def __init__(self, call: Call, wanted: set[int]) -> None:
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(call.tensors)]
        self.inputs = [t * 1 if t.requires_grad else t for t in leaves]  # a leaf could not be changed
        self.leaves = [leaves[i] for i in sorted(wanted)]
        self.results = [r for r in results_of(call.run(self.inputs)) if r is not None and r.requires_grad]

    def gradients(self) -> tuple[Tensor | None, ...]:
        ones = [torch.ones_like(r) for r in self.results]
        return torch.autograd.grad(self.results, self.leaves, ones, allow_unused=True)


def _changed(t: Tensor) -> None:
    with torch.no_grad():
        if t.dtype == torch.bool:
            t.logical_not_()
        elif t.is_floating_point() and t.itemsize > 1:
            t.mul_(1.75).add_(0.25)
        else:
            t.zero_()


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@pytest.mark.parametrize("part", range(4))
def test_changes_between_forward_and_backward_raise_or_do_not_matter(part: int) -> None:
    wrong: list[str] = []
    for call in list(functions())[part::4]:
        wanted = set() if call.written else _differentiable(call)
        if not wanted:
            continue
        plain = _Forward(call, wanted)
        wrong += [f"{call.name}: {name} is an attribute" for name in _kept(plain.results)]
        expected = plain.gradients()
        for i, name in enumerate(call.names):
            other = _Forward(call, wanted)
            _changed(other.inputs[i])
            try:
                got = other.gradients()
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error), call.name
                continue
            if not all(map(_same, got, expected)):
                wrong.append(f"{call.name}: a change of {name} goes unnoticed")
    assert not wrong


def test_the_index_of_a_gradient_as_codes_is_saved() -> None:
    index = rtkernels.moe_index(torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), 2)
    y = torch.randn(index.slots.shape[0], 128, dtype=torch.bfloat16, requires_grad=True)
    out = nn.unpermute_with_fp8_gradient(y, index)
    index.rows.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
