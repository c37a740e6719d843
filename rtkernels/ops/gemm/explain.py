"""What a call of a matrix product would run, and why: without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import checks, grouped_mm_plan, scaled_mm_plan
from rtkernels.ops.gemm.backend import Explanation, explained
from rtkernels.ops.gemm.gated_mm import gated_mm
from rtkernels.ops.gemm.grouped_mm import as_int32, grouped_mm, grouped_mm_masked, grouped_wgrad
from rtkernels.ops.gemm.scaled_mm import as_packed, as_scale, scaled_mm
from rtkernels.ops.gemm.scaled_mm_plan import Described
from rtkernels.runtime import targets
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.operator.declared import Meta


def _meta(t: Tensor | None) -> Meta | None:
    if t is None:
        return None
    return Meta(t.dtype, t.shape, t.stride(), t.get_device(), 0 if t.is_meta else t.data_ptr() & 15)


def _dense(given: dict[str, Any], gated: bool) -> Described:
    a = given["a"]
    tensors = (a, given["b"], *(as_scale(a, given[name]) for name in ("scale_a", "scale_b", "global_scale")))
    tensors = (*tensors, given["bias"], given.get("add"))
    options = (given["recipe"], given["b_layout"], as_packed(given["packed"], given["nibble"], a))
    options = (*options, *(given[name] for name in ("act", "out_dtype", "acc", "backend")))
    return scaled_mm_plan.describe(
        *map(_meta, tensors), *options, out=_meta(given.get("out")), accumulate=given.get("accumulate", False),
        gated=gated, quantized=given["quant_out"],
    )  # fmt: skip


def _grouped(given: dict[str, Any]) -> Described:
    a = given["a"]
    sizes = [as_int32(given.get(name)) for name in ("offs", "m_indices", "masked_m")]
    tensors = (a, given["b"], as_scale(a, given["scale_a"]), as_scale(a, given["scale_b"]), *sizes)
    options = (given.get("align", 1), given.get("expected_m", 0), given["recipe"], given["b_layout"])
    options = (*options, as_packed(given["packed"]), *(given[n] for n in ("act", "out_dtype", "acc", "backend")))
    out, accumulate = _meta(given["out"]), given.get("accumulate", False)
    return grouped_mm_plan.describe(*map(_meta, tensors), *options, out=out, accumulate=accumulate)


def _wgrad(given: dict[str, Any]) -> Described:
    dy, x, offs = given["dy"], given["x"], as_int32(given["offs"])
    floats = dy.dtype in checks.FLOATS
    a, b = (t.t() if floats else t for t in (dy, x))
    out = given["out"]
    if out is None:
        out = torch.empty(len(offs), a.shape[0], b.shape[0], dtype=given["out_dtype"], device="meta")
    scales = (as_scale(dy, given[name]) for name in ("scale_dy", "scale_x"))
    metas = [_meta(t) for t in (out, a, b, *scales, offs)]
    metas[0] = metas[0]._replace(device=metas[1].device)
    options = (given["align"] or (1 if floats else 128), given["accumulate"], given["recipe"], given["acc"])
    return grouped_mm_plan.describe_wgrad(*metas, *options, given["backend"])


# By what public functions wrap: a wrapper may be added to a function before or after it is imported here.
_DESCRIBED: dict[Callable[..., Any], Callable[[dict[str, Any]], Described]] = {
    inspect.unwrap(scaled_mm): lambda given: _dense(given, False),
    inspect.unwrap(gated_mm): lambda given: _dense(given, True),
    inspect.unwrap(grouped_mm): _grouped,
    inspect.unwrap(grouped_mm_masked): _grouped,
    inspect.unwrap(grouped_wgrad): _wgrad,
}


def explain(function: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any) -> Explanation:
    """Return which kernels a call would run and why others are not used; nothing is computed.

    ``print(rtkernels.explain(rtkernels.scaled_mm, a, b))`` prints it in one line.

    Args:
        function: ``scaled_mm``, ``gated_mm``, ``grouped_mm``, ``grouped_mm_masked`` or ``grouped_wgrad``.
        args: Positional arguments of the call. Tensors may be on the meta device.
        target: The GPU, such as "sm_90a" or "8.0". Default: the device of the tensors, or "sm_90a" if they are on none.
        kwargs: Keyword arguments of the call.

    Returns:
        An ``Explanation``: the backend, the tile, the rejected backends with reasons, and the product as plain data.
    """
    described = _DESCRIBED.get(inspect.unwrap(function)) if callable(function) else None
    if described is None:
        names = ", ".join(each.__name__ for each in _DESCRIBED)
        raise ArgumentError(f"function is {getattr(function, '__name__', function)!r}; expected one of {names}")
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["backend"] == "torch":
        raise ArgumentError("backend is 'torch', for which torch selects the kernels")
    product = described(given).product
    first = args[0] if args else given.get("a", given.get("dy"))
    if target is not None:
        chosen = targets.parse(target)
    else:
        chosen = device_info(first.get_device()).target if first.is_cuda else targets.parse("sm_90a")
    return explained(product, chosen, given["backend"])
