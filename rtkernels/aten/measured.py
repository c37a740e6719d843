"""The default set of ``rtkernels.enable()``: overloads that were faster than torch's over FlagGems' core
shapes, with the elements of the largest tensor from which on they are taken.

Written by ``python -m bench aten --record`` from ``bench/results/aten/h200.json``, measured on a NVIDIA H200.
"""

DEFAULT = {
    "allclose": 0,
    "clone": 16777216,
    "count_nonzero": 0,
    "count_nonzero.dim_IntList": 0,
    "isclose": 0,
    "isfinite": 0,
    "isinf": 0,
    "mse_loss": 1048576,
}

# Modules of ``rtkernels.aten`` that have the handlers.
MODULE_OF = {
    "allclose": "reduce",
    "clone": "copy",
    "count_nonzero": "reduce",
    "count_nonzero.dim_IntList": "reduce",
    "isclose": "pointwise",
    "isfinite": "pointwise",
    "isinf": "pointwise",
    "mse_loss": "reduce",
}
