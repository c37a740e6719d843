"""Arguments of reductions, scans, sorts, choices by index, random operators and windows in ``python -m bench aten``.

As FlagGems measures them: dimension 1, or the only one; k = 5; windows of 3 with stride 2; indices of half the size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Case = Callable[[tuple[int, ...], torch.dtype, str], Arguments]


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def _one(*args: Any, **kwargs: Any) -> Case:
    """One tensor, then these; a function gets the dimension."""

    def case(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Arguments:
        dim = min(1, len(shape) - 1)
        return (_numbers(shape, dtype, device), *(a(dim) if callable(a) else a for a in args)), kwargs

    return case


def _dim(dim: int) -> int:
    return dim


def _dims(dim: int) -> list[int]:
    return [dim]


def _index(shape: tuple[int, ...], n: int, device: str) -> torch.Tensor:
    return torch.randint(0, n, shape, device=device)


def _planes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, 1, *shape) if len(shape) == 2 else (1, *shape) if len(shape) == 3 else shape


def _norm(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    parameters = _numbers(s[-1:], t, d), _numbers(s[-1:], t, d)
    return (_numbers(s, t, d), s[-1:], *parameters, 1e-5), {}


def _norm_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    (x, shape, weight, bias, eps), _ = _norm(s, t, d)
    _, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    return (_numbers(s, t, d), x, shape, mean, rstd, weight, bias, [True, True, True]), {}


FAMILY_CASES: dict[str, Case] = {
    **dict.fromkeys(("sum", "mean", "prod", "max", "min", "any", "all", "argmax", "argmin", "count_nonzero"), _one()),
    **dict.fromkeys(("sum.dim_IntList", "mean.dim", "amax", "amin", "any.dims", "all.dims"), _one(_dims)),
    **dict.fromkeys(("count_nonzero.dim_IntList",), _one(_dims)),
    **dict.fromkeys(("prod.dim_int", "max.dim", "min.dim", "any.dim", "all.dim"), _one(_dim)),
    **dict.fromkeys(("cumsum", "cummax", "cummin"), _one(_dim)),
    **dict.fromkeys(("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"), _one(_dims)),
    "linalg_vector_norm": _one(2, _dims),
    "nonzero": lambda s, t, d: ((_numbers(s, t, d) > 0,), {}),
    "masked_select": lambda s, t, d: ((_numbers(s, t, d), _numbers(s, t, d) > 0), {}),
    "repeat_interleave.Tensor": lambda s, t, d: ((_index((s[0],), 64, d),), {}),
    "sort": _one(),
    "sort.stable": _one(stable=True),
    "topk": _one(5),
    "_unique2": lambda s, t, d: ((_index(s, 1000, d),), {}),
    "gather": lambda s, t, d: ((_numbers(s, t, d), 1, _index((s[0], s[1] // 2), s[1], d)), {}),
    "index_select": lambda s, t, d: ((_numbers(s, t, d), 0, _index((s[0] // 2,), s[0], d)), {}),
    "embedding": lambda s, t, d: ((_numbers(s, t, d), _index((s[0],), s[0], d)), {}),
    "embedding_dense_backward": lambda s, t, d: ((_numbers(s, t, d), _index((s[0],), s[0], d), s[0], -1, False), {}),
    "index_add": lambda s, t, d: ((_numbers(s, t, d), 0, _index((s[0],), s[0], d), _numbers(s, t, d)), {}),
    "scatter_add": lambda s, t, d: (
        (_numbers(s, t, d), 0, _index((s[0], 1), s[0], d).expand(s), _numbers(s, t, d)), {},
    ),
    **dict.fromkeys(("uniform_", "normal_", "exponential_", "bernoulli_.float", "rand_like", "randn_like"), _one()),
    **dict.fromkeys(("rand", "randn"), lambda s, t, d: ((s,), {"dtype": t, "device": d})),
    "randperm": lambda s, t, d: ((s[0] * s[-1],), {"device": d}),
    "trace": lambda s, t, d: ((_numbers(s[-2:], t, d) if len(s) > 1 else _numbers((1024, 1024), t, d),), {}),
    "native_dropout": _one(0.5, True),
    "normal.Tensor_float": _one(1.0),
    "normal.Tensor_Tensor": lambda s, t, d: ((_numbers(s, t, d), _numbers(s, t, d).abs()), {}),
    "_softmax": _one(-1, False),
    "_log_softmax": _one(-1, False),
    "_softmax_backward_data": lambda s, t, d: ((_numbers(s, t, d), _numbers(s, t, d).softmax(-1), -1, t), {}),
    "_log_softmax_backward_data": lambda s, t, d: ((_numbers(s, t, d), _numbers(s, t, d).log_softmax(-1), -1, t), {}),
    "native_layer_norm": _norm,
    "native_layer_norm_backward": _norm_backward,
    "avg_pool2d": lambda s, t, d: ((_numbers(_planes(s), t, d), [3, 3], [2, 2], [1, 1]), {}),
    "max_pool2d_with_indices": lambda s, t, d: ((_numbers(_planes(s), t, d), [3, 3], [2, 2], [1, 1]), {}),
    "upsample_nearest2d": lambda s, t, d: ((_numbers(_planes(s), t, d), [2 * s[-2], 2 * s[-1]]), {}),
}  # fmt: skip
