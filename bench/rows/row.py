"""The benchmark row: one op at one shape, declared in ``bench/rows/<family>/<op>.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rtkernels.errors import ArgumentError

if TYPE_CHECKING:
    import torch


def in_fp32(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32, and one of fp64 as it is: a row's plain torch is its exact reference, too."""
    return x if x.dtype.itemsize == 8 else x.float()


@dataclass(frozen=True)
class Row:
    """One measured line of the benchmark: an op, a shape, and what to compare it with.

    A row named ``<op>_bwd`` is paired with the row ``<op>_fwd`` of the same shape: torch's backward is timed
    through autograd on the forward row's ``torch`` and ``fused`` functions. Its incoming gradient is the
    input called ``dy``; every other floating-point tensor that the forward takes is differentiated, in the
    order ``make`` lists them.

    Attributes:
        name: Row name, for example ``rms_norm_fwd``; adapters of other libraries are found by it.
        shape: Shape in words, for example ``8192x4096``.
        make: ``make(device, generator)`` builds the keyword inputs afresh; called once per rotated copy.
        ours: Called as ``ours(**inputs)``; runs the op under test and nothing else.
        torch: The same math in plain torch, same inputs; also what ``torch.compile`` compiles.
        bytes: Least bytes moved: every input read once, every output written once.
        exact: fp64 reference from the same inputs; None runs ``torch`` on inputs cast to fp64.
        fused: torch's own fused op for this math, where there is one.
        flops: Operations of a matrix product, ``2 m n k``; 0 for rows that memory bounds.
        backends: Other ways of torch to compute it, each called as ``prepare(**inputs)`` like the adapters of
            other libraries; ``{"flash": ...}`` is measured as ``torch_flash``.
        no_graph: Of a backward row: why autograd's graph of the whole forward is not measured; "" if it is.
    """

    name: str
    shape: str
    make: Callable[[str, torch.Generator], dict[str, Any]]
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    bytes: int
    exact: Callable[..., Any] | None = None
    fused: Callable[..., Any] | None = None
    flops: int = 0
    backends: Mapping[str, Callable[..., Callable[[], Any]]] = field(default_factory=dict)
    no_graph: str = ""

    def __post_init__(self) -> None:
        if not self.name or not self.shape:
            raise ArgumentError("Row: name and shape must not be empty; they identify the row in results.")
        if self.bytes <= 0:
            raise ArgumentError(f"Row {self.name} {self.shape}: bytes is {self.bytes}; it must be positive.")

    @property
    def label(self) -> str:
        """``name shape``, the text that ``bench run --rows`` matches."""
        return f"{self.name} {self.shape}"


def gradients_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward pass of a differentiable function of tensors: a function of dy and the same tensors."""

    def backward(dy: Any, **inputs: Any) -> Any:
        import torch

        with torch.enable_grad():
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
            return torch.autograd.grad(forward(**leaves), list(leaves.values()), dy)

    return backward


def by_sequence(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of batches that computes one sequence at a time: all at once would not fit on a device."""

    def run(**inputs: Any) -> tuple[Any, ...]:
        import torch

        count = len(next(iter(inputs.values())))
        found = [function(**{name: t[b : b + 1] for name, t in inputs.items()}) for b in range(count)]
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    return run
