"""``batch_invariant`` and ``set_batch_invariant``, which users see; ``runtime/invariance.py`` has the state."""

from __future__ import annotations

import contextlib

from rtkernels.aten import invariant_linear, invariant_products
from rtkernels.runtime import env, invariance


class batch_invariant(contextlib.ContextDecorator):
    """Make the bits of a row independent of the rest of its batch, inside of a ``with`` or of a decorated function.

    A row is then computed from its own inputs and the weights alone. Its bits do not depend on the number of rows, its
    place among them, other rows, padding, packing, pages of a cache or how a prompt is cut into chunks. Kernels are
    chosen by the sizes of weights and heads only. That costs time where a batch is small, because work that one row
    has is not split. Calls that cannot promise this raise an ArgumentError.

    It holds for this package and for torch's matrix products, in this thread and in the threads of the backward passes
    that it starts; so a backward pass belongs inside. Enter it outside of compiled functions, which follow the level of
    the thread that calls them. Recorded CUDA graphs keep the level under which they were recorded.

    Args:
        level: 1 for the forward pass, 2 for gradients of inputs as well (attention: of each sequence), 3 for gradients
            of weights as well: micro-batches, cut at multiples of 128 rows, leave the bits of one batch in the
            ``main_grad`` (float32) of parameters that have one. 0 switches it off inside.

    Raises:
        ArgumentError: The level is none of these.
    """

    def __init__(self, level: int = 1) -> None:
        self._level = invariance.check_level(level)
        self._before: list[int | None] = []

    def __enter__(self) -> batch_invariant:
        _install(self._level)
        self._before.append(invariance.enter(self._level))
        return self

    def __exit__(self, *exc: object) -> None:
        invariance.leave(self._level, self._before.pop())


def _install(level: int) -> None:
    if level:
        invariant_products.install()
    if level >= 3:
        invariant_linear.install()


def set_batch_invariant(level: int) -> None:
    """Set the level of ``batch_invariant`` for all threads of this process, wherever no ``with`` says otherwise.

    The environment variable ``RTKERNELS_BATCH_INVARIANT`` sets it when the package is imported.

    Args:
        level: As for ``batch_invariant``.
    """
    _install(invariance.check_level(level))
    invariance.set_default(level)


def from_environment() -> None:
    """Set the level that ``RTKERNELS_BATCH_INVARIANT`` asks for."""
    if wanted := env.get("BATCH_INVARIANT"):
        set_batch_invariant(wanted)
