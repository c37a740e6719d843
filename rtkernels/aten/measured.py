"""The default set of ``rtkernels.enable()``: overloads that were faster than torch's over FlagGems' core
shapes, with the elements of the largest tensor from which on they are taken.

Written by ``python -m bench aten --record`` from ``bench/results/aten/h200.json``, measured on a NVIDIA H200.
"""

DEFAULT = {
    "allclose": 0,
    "amax": 0,
    "argmax": 0,
    "clone": 0,
    "count_nonzero": 0,
    "count_nonzero.dim_IntList": 0,
    "isclose": 0,
    "isfinite": 0,
    "isinf": 0,
    "max.dim": 0,
    "min.dim": 0,
    "mse_loss": 0,
    "std.correction": 0,
    "std_mean.correction": 0,
    "trace": 0,
    "tril": 0,
    "var.correction": 0,
    "var_mean.correction": 0,
}

# Modules of ``rtkernels.aten`` that have the handlers.
MODULE_OF = {
    "allclose": "reduce",
    "amax": "reduce",
    "argmax": "reduce",
    "clone": "copy",
    "count_nonzero": "reduce",
    "count_nonzero.dim_IntList": "reduce",
    "isclose": "pointwise",
    "isfinite": "pointwise",
    "isinf": "pointwise",
    "max.dim": "reduce",
    "min.dim": "reduce",
    "mse_loss": "reduce",
    "std.correction": "reduce",
    "std_mean.correction": "reduce",
    "trace": "reduce",
    "tril": "copy",
    "var.correction": "reduce",
    "var_mean.correction": "reduce",
}
