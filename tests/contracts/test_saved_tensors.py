"""What a backward pass reads is saved by autograd: a tensor that was changed since the forward pass raises.

A tensor that a node keeps as a plain attribute has no version that torch would compare; its gradient would silently be
that of other values. Called is every public function that is differentiable, on the CPU: its nodes are the same everywhere.
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


def _differentiated(call: Call) -> tuple[list[Tensor], list[Tensor], list[Tensor]] | None:
    """Return the inputs of a call, leaves that they are made from, and its results that require a gradient."""
    floats = [t.is_floating_point() and t.itemsize > 1 for t in call.tensors]
    # One that is changed must not be a leaf, and those without a gradient are refused or ignored, each by itself.
    wanted = set()
    for i, is_float in enumerate(floats):
        try:
            results = call.run([t.clone().requires_grad_(i == j) for j, t in enumerate(call.tensors)]) if is_float else 0
        except rtkernels.ArgumentError:
            continue
        if any(isinstance(r, Tensor) and r.requires_grad for r in results_of(results)):
            wanted.add(i)
    if not wanted:
        return None
    leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(call.tensors)]
    inputs = [t * 1 if t.requires_grad else t for t in leaves]
    results = [r for r in results_of(call.run(inputs)) if isinstance(r, Tensor) and r.requires_grad]
    return inputs, [t for t in leaves if t.requires_grad], results


def _changed(t: Tensor) -> None:
    with torch.no_grad():
        if t.dtype == torch.bool:
            t.logical_not_()
        elif t.is_floating_point() and t.itemsize > 1:
            t.mul_(1.75).add_(0.25)
        else:
            t.zero_()


@pytest.mark.parametrize("part", range(4))
def test_changes_between_forward_and_backward_raise_or_do_not_matter(part: int) -> None:
    wrong: list[str] = []
    for call in list(functions())[part::4]:
        first = None if call.written else _differentiated(call)
        if first is None:
            continue
        _, leaves, results = first
        wrong += [f"{call.name}: {name} is an attribute" for name in _kept(results)]
        expected = torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results], allow_unused=True)
        for i in range(len(call.tensors)):
            inputs, leaves, results = _differentiated(call)
            _changed(inputs[i])
            try:
                got = torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results], allow_unused=True)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error), call.name
                continue
            for a, b in zip(got, expected, strict=True):
                if (a is None) is not (b is None) or (a is not None and not torch.equal(a, b)):
                    wrong.append(f"{call.name}: a change of {call.names[i]} goes unnoticed")
    assert not wrong


def test_the_index_of_a_gradient_as_codes_is_saved() -> None:
    index = rtkernels.moe_index(torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), 2)
    y = torch.randn(index.slots.shape[0], 128, dtype=torch.bfloat16, requires_grad=True)
    out = nn.unpermute_with_fp8_gradient(y, index)
    index.rows.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
