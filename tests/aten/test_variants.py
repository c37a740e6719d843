"""All variants of the pointwise kernels, of which the registry names a sample: compiled with ``--full`` only."""

from __future__ import annotations

import pytest
from support.places import allowed_spills, compiled_for

from rtkernels.aten import gradients, pointwise, ternary  # noqa: F401  register their functors
from rtkernels.aten.functors import _FUNCTORS, KERNELS, all_variants
from rtkernels.runtime import targets
from rtkernels.runtime.build import cache
from rtkernels.runtime.build.nvrtc import Resources

_KINDS = (("V", KERNELS.flat), ("G", KERNELS.strided), ("T", KERNELS.transposed), ("S", KERNELS.squares))


def test_samples_are_variants() -> None:
    target = targets.parse("sm_90a")
    for kind, kernel in _KINDS:
        sample, everything = kernel.variants(target), set(all_variants(kind))
        assert set(sample) <= everything and 0 < len(sample) < len(everything)


@pytest.mark.slow
@pytest.mark.parametrize("functor", sorted(_FUNCTORS))
def test_all_compile_without_spills(functor: str) -> None:
    for kind, kernel in _KINDS:
        expressions = [kernel.expression(variant) for variant in set(all_variants(kind)) if variant[0] == functor]
        entry = cache.load(kernel.unit, sorted(expressions), compiled_for("sm_90a"), kernel.flags, op=kernel.op)
        for expression in expressions:
            used = Resources(**entry.meta["resources"][expression])
            assert max(used.spill_stores, used.spill_loads) <= allowed_spills(), expression
            assert used.registers <= kernel.max_registers, expression
