"""How tests judge a kernel: error budgets against fp64, and the places a test can run.

Everything compares with an ``exact`` result: the same math in float64 from the same (already rounded) inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rtkernels.errors import RtkError
from rtkernels.runtime.launch import memory
from rtkernels.runtime.launch import plans as plans_module

# Half the distance from 1 to the next number: the largest relative error of one rounding.
ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
}

# What a product of fp8 on a GPU may lose before it is rounded, of the sum of magnitudes. The tensor cores of sm_90 keep
# about 14 bits as they add: 2^-13 of the largest number in each step of 32 along k. Sums go to fp32 registers after
# four steps, which lose up to 2^-11 as a rule; those of `acc="fast"` do not, and lose up to about twice that in tests.
# Sums of rotated numbers, which are all of about the same size, lost up to 2^-10.0 among 60 thousand.
FP8_SUMS = 2.0**-9.5


class CompareError(RtkError, AssertionError):
    """A result is outside its error budget."""


def assert_close(
    got: Tensor, exact: Tensor, *, c: float = 1.5, scale: Tensor | None = None, what: str = "result"
) -> None:
    """Check every element against its budget ``c * roundoff(got.dtype) * scale``.

    NaN and infinities must be at the same places. Always allowed: half the smallest subnormal, and flushing what is
    below fp32's normal range.

    Args:
        got: Any floating dtype, any device.
        exact: float64, same shape.
        c: 1 is a correctly rounded result; sums of n terms need about sqrt(n) more in fp32.
        scale: Magnitude the error is relative to, broadcastable to `exact`; its own magnitude if None. For sums, pass
            the sum of magnitudes.
        what: Name for the message.

    Raises:
        CompareError: Says how many elements are off and shows the worst.
    """
    if got.shape != exact.shape:
        raise CompareError(f"{what} has shape {tuple(got.shape)}; expected {tuple(exact.shape)}")
    exact = exact.to(got.device)
    wide = got.double()
    magnitude = exact.abs() if scale is None else scale.to(exact).expand_as(exact)
    # The exact value may round to infinity in the narrow type: then infinity is the right answer.
    expected = torch.where(exact.abs() <= torch.finfo(got.dtype).max, exact, exact.to(got.dtype).double())
    limits = torch.finfo(got.dtype)
    flushed = 0.0 if got.dtype == torch.float64 else 2.0**-126
    budget = c * ROUNDOFF[got.dtype] * magnitude + max(limits.smallest_normal * limits.eps / 2 * max(c, 1.0), flushed)
    error = (wide - expected).abs()
    same = (wide == expected) | (wide.isnan() & expected.isnan())
    bad = ~(same | (error <= budget))
    if not bad.any():
        return
    worst = torch.where(bad, (error / budget).nan_to_num(torch.inf, torch.inf), -1.0).flatten().argmax()
    place = tuple(int(i) for i in torch.unravel_index(worst, exact.shape))
    raise CompareError(
        f"{what}: {int(bad.sum())} of {bad.numel()} elements off by more than {c} roundoffs of {got.dtype}; worst at "
        f"{place}: got {wide[place].item():.9g}, exact {exact[place].item():.9g}, allowed {budget[place].item():.3g}"
    )


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Return the relative Frobenius error ``|got - exact| / |exact|`` in float64 (0 for empty tensors)."""
    exact = exact.to(got.device).double()
    norm = exact.norm().item()
    error = (got.double() - exact).norm().item()
    return error / norm if norm else error


def assert_no_worse(got: Tensor, other: Tensor, exact: Tensor, *, factor: float = 1.05, what: str = "result") -> None:
    """Check that the relative Frobenius error is at most `factor` times that of another implementation.

    Raises:
        CompareError: It is larger.
    """
    ours, theirs = relative_error(got, exact), relative_error(other, exact)
    if not ours <= factor * theirs:
        raise CompareError(f"{what}: relative error {ours:.3g} is more than {factor} times {theirs:.3g}")


def assert_same_bits(first: Tensor, second: Tensor, what: str = "result") -> None:
    """Check that two tensors hold the same bits, NaN payloads and signs of zero included.

    Raises:
        CompareError: They differ.
    """
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    if first.dtype != second.dtype or first.shape != second.shape:
        raise CompareError(f"{what}: {first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)}")
    differ = first.contiguous().view(kind) != second.contiguous().view(kind)
    if differ.any():
        raise CompareError(f"{what}: {int(differ.sum())} of {differ.numel()} elements differ in their bits")


@contextmanager
def poisoned() -> Iterator[None]:
    """Make ``torch.empty`` and its kin give NaN (integers: the largest value), so that an unwritten output shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    fast_path, memory._empty_strided_cuda = memory._empty_strided_cuda, None  # it fills nothing
    plans_module.Plans.forget_all()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        memory._empty_strided_cuda = fast_path
        plans_module.Plans.forget_all()
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


@contextmanager
def running_on(place: str) -> Iterator[str]:
    """Run ops at a place and give the device their tensors belong on.

    Args:
        place: ``"cuda"``, ``"cpu"`` (the plain-torch reference), or ``"sm_80"``, ``"sm_90"``: CPU tensors, kernels in
            the host emulator with that feature set. Outputs are poisoned everywhere.
    """
    with poisoned():
        if place in ("cpu", "cuda"):
            yield place
        else:
            import rtkernels

            with rtkernels.emulate(place):
                yield "cpu"
