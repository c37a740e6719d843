"""The default set of ``rtkernels.enable()``: overloads that were faster than torch's over FlagGems' core
shapes, with the elements of the largest tensor from which on they are taken.

Written by ``python -m bench aten --record`` from ``bench/results/aten/h200.json``, measured on a NVIDIA H200.
"""

DEFAULT = {
    "allclose": 4096,
    "clone": 16777216,
    "count_nonzero": 4096,
    "count_nonzero.dim_IntList": 4096,
    "isclose": 4096,
    "isfinite": 4096,
    "isinf": 4096,
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
