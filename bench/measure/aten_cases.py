"""Arguments of reductions, scans, sorts, index operators, random operators and windows in ``python -m bench aten``.

As FlagGems measures them: dimension 1, or the only one; k = 5; windows of 3 with stride 2; indices of half the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Case = Callable[[tuple[int, ...], torch.dtype, str], Arguments]


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device)


def _one(*args: Any, **kwargs: Any) -> Case:
    """One tensor, then these arguments; a function of the dimension is called with it."""

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


def _rms_norm(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    return (_numbers(s, t, d), s[-1:], _numbers(s[-1:], t, d), 1e-5), {}


def _rms_norm_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    (x, shape, weight, eps), _ = _rms_norm(s, t, d)
    _, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
    return (_numbers(s, t, d), x, shape, rstd, weight, [True, True]), {}


def _grouped(s: tuple[int, ...]) -> tuple[int, int, int]:
    """Return batch, channels and spatial size: dimension 1 are channels, in groups of two or more."""
    return s[0], s[1], math.prod(s[2:])


def _group_norm(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    parameters = _numbers(s[1:2], t, d), _numbers(s[1:2], t, d)
    return (_numbers(s, t, d), *parameters, *_grouped(s), max(s[1] // 2, 1), 1e-5), {}


def _group_norm_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    (x, weight, bias, n, c, hxw, groups, eps), _ = _group_norm(s, t, d)
    _, mean, rstd = torch.native_group_norm(x, weight, bias, n, c, hxw, groups, eps)
    return (_numbers(s, t, d), x, mean, rstd, weight, n, c, hxw, groups, [True, True, True]), {}


def _batch_norm(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    parameters = (torch.rand(s[1:2], dtype=t, device=d) for _ in range(4))
    return (_numbers(s, t, d), *parameters, True, 0.1, 1e-5), {}


def _batch_norm_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    (x, weight, _, mean, var, *_), _ = forward = _batch_norm(s, t, d)
    _, saved, inverse = torch.native_batch_norm(*forward[0])
    return (_numbers(s, t, d), x, weight, mean, var, saved, inverse, True, 1e-5, [True, True, True]), {}


def _classes(s: tuple[int, ...], t: torch.dtype, d: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = math.prod(s[:-1])
    return _numbers((rows, s[-1]), t, d), _index((rows,), s[-1], d)


def _nll_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    x, target = _classes(s, t, d)
    _, total = torch.ops.aten.nll_loss_forward(x, target, None, 1, -100)
    return (_numbers((), t, d), x, target, None, 1, -100, total), {}


def _nll2d(s: tuple[int, ...], t: torch.dtype, d: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _numbers((s[0], s[-1], 8, 8), t, d), _index((s[0], 8, 8), s[-1], d)


def _nll2d_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    x, target = _nll2d(s, t, d)
    _, total = torch.ops.aten.nll_loss2d_forward(x, target, None, 1, -100)
    return (_numbers((), t, d), x, target, None, 1, -100, total), {}


def _weights(s: tuple[int, ...], t: torch.dtype, d: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _numbers((s[0], math.prod(s[1:])), t, d), _numbers((s[0], 1), t, d)


def _weight_norm_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    v, g = _weights(s, t, d)
    _, norms = torch.ops.aten._weight_norm_interface(v, g, 0)
    return (_numbers(v.shape, t, d), v, g, norms, 0), {}


def _pool_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = _numbers(_planes(s), t, d)
    y, indices = torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    return y, x, indices


def _avg_pool_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    y, x, _ = _pool_backward(s, t, d)
    return (y, x, [3, 3], [2, 2], [1, 1], False, True, None), {}


def _max_pool_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    y, x, indices = _pool_backward(s, t, d)
    return (y, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices), {}


def _upsample_backward(s: tuple[int, ...], t: torch.dtype, d: str) -> Arguments:
    size = _planes(s)
    out = [2 * size[2], 2 * size[3]]
    return (_numbers((*size[:2], *out), t, d), out, list(size)), {}


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
    "topk": lambda s, t, d: ((_numbers(s, t, d), min(5, s[-1])), {}),
    "_unique2": lambda s, t, d: ((_index(s, 1000, d),), {}),
    "gather": lambda s, t, d: ((_numbers(s, t, d), 1, _index((s[0], s[1] // 2), s[1], d)), {}),
    "index_select": lambda s, t, d: ((_numbers(s, t, d), 0, _index((s[0] // 2,), s[0], d)), {}),
    "embedding": lambda s, t, d: ((_numbers(s, t, d), _index((s[0],), s[0], d)), {}),
    "embedding_dense_backward": lambda s, t, d: ((_numbers(s, t, d), _index((s[0],), s[0], d), s[0], -1, False), {}),
    "index_add": lambda s, t, d: ((_numbers(s, t, d), 0, _index((s[0],), s[0], d), _numbers(s, t, d)), {}),
    "scatter_add": lambda s, t, d: (
        (_numbers(s, t, d), 0, _index((s[0], 1), s[0], d).expand(s), _numbers(s, t, d)), {},
    ),
    **dict.fromkeys(("scatter.src", "scatter_.src"), lambda s, t, d: (
        (_numbers(s, t, d), 1, _index((s[0], s[1] // 2), s[1], d), _numbers(s, t, d)), {},
    )),
    **dict.fromkeys(("scatter.value", "scatter_.value"), lambda s, t, d: (
        (_numbers(s, t, d), 1, _index((s[0], s[1] // 2), s[1], d), 2.0), {},
    )),
    **dict.fromkeys(("index_put", "index_put_"), lambda s, t, d: (
        (_numbers(s, t, d), [_index((s[0],), s[0], d)], _numbers(s, t, d)), {},
    )),
    **dict.fromkeys(("uniform_", "normal_", "exponential_", "bernoulli_.float", "rand_like", "randn_like"), _one()),
    **dict.fromkeys(("rand", "randn"), lambda s, t, d: ((s,), {"dtype": t, "device": d})),
    "randperm": lambda s, t, d: ((s[0] * s[-1],), {"device": d}),
    "trace": lambda s, t, d: ((_numbers(s[-2:], t, d) if len(s) > 1 else _numbers((1024, 1024), t, d),), {}),
    "native_dropout": _one(0.5, True),
    "normal.Tensor_float": _one(1.0),
    "normal.float_Tensor": lambda s, t, d: ((0.0, _numbers(s, t, d).abs()), {}),
    "normal.Tensor_Tensor": lambda s, t, d: ((_numbers(s, t, d), _numbers(s, t, d).abs()), {}),
    "_softmax": _one(-1, False),
    "_log_softmax": _one(-1, False),
    "_softmax_backward_data": lambda s, t, d: ((_numbers(s, t, d), _numbers(s, t, d).softmax(-1), -1, t), {}),
    "_log_softmax_backward_data": lambda s, t, d: ((_numbers(s, t, d), _numbers(s, t, d).log_softmax(-1), -1, t), {}),
    "native_layer_norm": _norm,
    "native_layer_norm_backward": _norm_backward,
    "avg_pool2d": lambda s, t, d: ((_numbers(_planes(s), t, d), [3, 3], [2, 2], [1, 1]), {}),
    "max_pool2d_with_indices": lambda s, t, d: ((_numbers(_planes(s), t, d), [3, 3], [2, 2], [1, 1]), {}),
    "avg_pool2d_backward": _avg_pool_backward,
    "max_pool2d_with_indices_backward": _max_pool_backward,
    "upsample_nearest2d_backward": _upsample_backward,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "_weight_norm_interface": lambda s, t, d: ((*_weights(s, t, d), 0), {}),
    "_weight_norm_interface_backward": _weight_norm_backward,
    "nll_loss_forward": lambda s, t, d: ((*_classes(s, t, d), None, 1, -100), {}),
    "nll_loss_backward": _nll_backward,
    "nll_loss2d_forward": lambda s, t, d: ((*_nll2d(s, t, d), None, 1, -100), {}),
    "nll_loss2d_backward": _nll2d_backward,
    "isin.Tensor_Scalar": lambda s, t, d: ((_index(s, 1000, d), 7), {}),
    "isin.Scalar_Tensor": lambda s, t, d: ((7, _index(s, 1000, d)), {}),
    "isin.Tensor_Tensor": lambda s, t, d: ((_index(s, 1000, d), _index((s[0],), 1000, d)), {}),
    "index.Tensor": lambda s, t, d: ((_numbers(s, t, d), [_index((s[0],), s[0], d)]), {}),
    "_index_put_impl_": lambda s, t, d: (
        (_numbers(s, t, d), [_index((s[0],), s[0], d)], _numbers(s, t, d), True, True), {},
    ),
    "native_dropout_backward": lambda s, t, d: ((_numbers(s, t, d), _numbers(s, t, d) > 0, 2.0), {}),
    "mse_loss": lambda s, t, d: ((_numbers(s, t, d), _numbers(s, t, d)), {}),
    "mse_loss_backward": lambda s, t, d: ((_numbers((), t, d), _numbers(s, t, d), _numbers(s, t, d), 1), {}),
    "upsample_nearest2d": lambda s, t, d: ((_numbers(_planes(s), t, d), [2 * s[-2], 2 * s[-1]]), {}),
}  # fmt: skip
