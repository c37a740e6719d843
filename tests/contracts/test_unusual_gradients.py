"""Ways to differentiate that are not one ``backward()``: they are right, or they raise, for every public function.

Batches of gradients, tangents of forward-mode differentiation, gradients of some results, gradients of gradients.
"""

from __future__ import annotations

import ast
import functools
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import rtkernels
from contracts.fuzz.calls import Call, functions, results_of
from contracts.fuzz.variations import resized
from contracts.test_process_state import _deterministic
from contracts.test_saved_tensors import _differentiable, _Forward
from rtkernels.errors import RtkError

PARTS = 4


@functools.cache
def _functions() -> list[Call]:
    return list(functions())


@functools.cache
def _calls(part: int) -> list[tuple[Call, set[int]]]:
    """Return calls with the places of tensors that get a gradient."""
    calls = [call for call in _functions()[part::PARTS] if not call.written]
    return [(call, wanted) for call in calls if (wanted := _differentiable(call))]


def _incoming(forward: _Forward, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(r.shape, generator=generator).to(r.dtype) for r in forward.results]


def _gradients(call: Call, wanted: set[int], incoming: list[Tensor], **options: bool) -> tuple[Tensor | None, ...]:
    forward = _Forward(call, wanted)  # of its own: some functions are differentiated once per call
    return torch.autograd.grad(forward.results, forward.leaves, incoming, allow_unused=True, **options)


def _close(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two gradients agree; None stands for zeros."""
    if a is None or b is None:
        return a is b or not (b if a is None else a).any()
    bound = 1e-5 if a.dtype == torch.float32 else 2e-2
    return a.dtype == b.dtype and torch.allclose(a, b, bound, bound, equal_nan=True)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("part", range(PARTS))
def test_batches_of_gradients(part: int) -> None:
    wrong = []
    for call, wanted in _calls(part):
        each = [_incoming(_Forward(call, wanted), seed) for seed in (0, 1)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it loops
            batch = [torch.stack(pair) for pair in zip(*each, strict=True)]
            try:
                got = _gradients(call, wanted, batch, is_grads_batched=True)
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):  # one_pass: differentiated once
                    wrong.append(f"{call.name}: {error}")
                continue
        for i, incoming in enumerate(each):
            expected = _gradients(call, wanted, incoming)
            if not all(_close(g if g is None else g[i], e) for g, e in zip(got, expected, strict=True)):
                wrong.append(f"{call.name}: gradient {i}")
    assert not wrong


@pytest.mark.parametrize("part", range(PARTS))
def test_gradients_of_some_results(part: int) -> None:
    wrong = []
    for call, wanted in _calls(part):
        forward = _Forward(call, wanted)
        incoming = _incoming(forward, 0)
        for i in range(len(incoming) if len(incoming) > 1 else 0):
            one = _Forward(call, wanted)
            got = torch.autograd.grad(one.results[i], one.leaves, incoming[i], allow_unused=True)
            zeros = [g if i == j else torch.zeros_like(g) for j, g in enumerate(incoming)]
            if not all(map(_close, got, _gradients(call, wanted, zeros))):
                wrong.append(f"{call.name}: result {i}")
    assert not wrong


@pytest.mark.parametrize("part", range(PARTS))
def test_gradients_of_gradients_are_never_silently_absent(part: int) -> None:
    """With an incoming gradient that requires one, each gradient depends on it: it must not look like a constant."""
    wrong = []
    for call, wanted in _calls(part):
        incoming = [g.requires_grad_() for g in _incoming(_Forward(call, wanted), 0)]
        try:
            got = _gradients(call, wanted, incoming, create_graph=True)
        except RuntimeError as error:
            if "differentiable once" not in str(error):
                wrong.append(f"{call.name}: {error}")
            continue
        given = [g for g in got if g is not None]
        if not all(g.requires_grad for g in given):
            wrong.append(f"{call.name}: constant")
            continue
        try:
            total = sum((g.float() * g.detach().float()).sum() for g in given)
            second = torch.autograd.grad(total, incoming, allow_unused=True)
        except RuntimeError as error:
            if "differentiable once" not in str(error):
                wrong.append(f"{call.name}: {error}")
        else:
            if not any(g is not None and g.any() for g in second):
                wrong.append(f"{call.name}: zero")
    assert not wrong


@pytest.mark.parametrize("part", range(PARTS))
def test_tangents_are_refused(part: int) -> None:
    wrong = []
    for call in _functions()[part::PARTS]:
        for i, name in enumerate(call.names):
            if not call.tensors[i].is_floating_point() or call.tensors[i].itemsize == 1:
                continue
            tensors = [t.clone() for t in call.tensors]
            with forward_ad.dual_level():
                tensors[i] = forward_ad.make_dual(tensors[i], torch.ones_like(tensors[i]))
                try:
                    results = call.run(tensors)
                except rtkernels.ArgumentError as error:
                    if "tangent" not in str(error):
                        wrong.append(f"{call.name}, {name}: {error}")
                    continue
                kept = [forward_ad.unpack_dual(r).tangent is not None for r in results_of(results) if r is not None]
            wrong.append(f"{call.name}, {name}: the tangent is dropped by {kept.count(False)} results")
    assert not wrong


@pytest.mark.parametrize("part", range(PARTS))
def test_gradients_of_tensors_without_elements(part: int) -> None:
    """Each size in turn is 0. Torch fills fresh memory with NaN here, so a gradient that nothing wrote shows."""
    wrong = []
    for call, wanted in _calls(part):
        for size in sorted({n for t in call.tensors if t.is_floating_point() for n in t.shape} - {0}):
            leaves = [resized(t, size, 0).requires_grad_(i in wanted) for i, t in enumerate(call.tensors)]
            try:
                with _deterministic():
                    results = [r for r in results_of(call.run(leaves)) if r is not None and r.requires_grad]
                    ones = [torch.ones_like(r) for r in results]
                    grads = torch.autograd.grad(results, [leaves[i] for i in sorted(wanted)], ones, allow_unused=True)
            except RtkError:
                continue
            except Exception as error:
                wrong.append(f"{call.name}, {size}: {type(error).__name__}: {error}")
                continue
            for i, grad in zip(sorted(wanted), grads, strict=True):
                if grad is None or grad.shape != leaves[i].shape or grad.isnan().any():
                    wrong.append(f"{call.name}, {size}: {call.names[i]}")
    assert not wrong


# Documented: under autocast their arguments are cast, as those of a linear layer.
_CAST = ("linear_cross_entropy()", "linear_logprob()")


@pytest.mark.parametrize("part", range(PARTS))
def test_autocast_changes_no_bits(part: int) -> None:
    wrong = []
    for call, wanted in _calls(part):
        plain = _Forward(call, wanted)
        incoming = _incoming(plain, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = _Forward(call, wanted).results
        if not call.name.startswith(_CAST) and not all(map(_same, results, plain.results)):
            wrong.append(f"{call.name}: forward")
        other = _Forward(call, wanted)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = torch.autograd.grad(other.results, other.leaves, incoming, allow_unused=True)
        expected = torch.autograd.grad(plain.results, plain.leaves, incoming, allow_unused=True)
        if not all(map(_same, got, expected)):
            wrong.append(f"{call.name}: backward")
    assert not wrong


def test_every_backward_says_how_often_it_can_be_differentiated() -> None:
    """Without either decorator, what is not differentiable would be a constant to ``create_graph=True``."""
    bare = []
    for path in sorted(Path(rtkernels.__file__).parent.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "autograd.Function)" in text else ():
            if isinstance(node, ast.ClassDef) and any("Function" in ast.unparse(base) for base in node.bases):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "backward":
                        marks = {ast.unparse(d).rpartition(".")[2] for d in method.decorator_list}
                        if not marks & {"once_differentiable", "differentiable"}:
                            bare.append(f"{path.name}:{method.lineno} {node.name}")
    assert not bare
