"""Other ways to run an op, for the tests that compare them with a plain call: captured in a CUDA graph, compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from support.compare import assert_same_bits


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a call in a CUDA graph; return a function that replays it and returns its results: a tensor or a tuple.

    Their memory is overwritten before each replay, so that results of an earlier one cannot pass.
    """
    run()  # a capture must not load kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> Any:
        for t in _tensors(results):
            torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).fill_(0xA5)
        graph.replay()
        return results

    return replay


def assert_equal_bits(got: Any, wanted: Any, what: str = "result") -> None:
    """Check that two calls gave the same bits: each a tensor, or a tuple of tensors, some of which may be None."""
    first, second = _tensors(got), _tensors(wanted)
    if len(first) != len(second):
        raise AssertionError(f"{what}: {len(first)} tensors and {len(second)}")
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b, what)


def assert_compiles(
    block: Callable[..., Tensor], inputs: Iterable[list[Tensor]], *, dynamic: bool | None = None
) -> None:
    """Check a function against itself compiled without graph breaks, call after call: results and gradients."""
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tensors in inputs:
        torch.testing.assert_close(compiled(*tensors), block(*tensors))
        grads = []
        for function in (compiled, block):
            leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
            function(*leaves).square().sum().backward()
            grads.append([t.grad for t in leaves])
        torch.testing.assert_close(*grads)


def _tensors(results: Any) -> list[Tensor]:
    return [t for t in (results if isinstance(results, tuple) else (results,)) if t is not None]
