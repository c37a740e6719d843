"""quack's CuTe kernels, called below its autograd functions."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Absent, Call, Table


def _rms_norm_fwd(x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from quack.rmsnorm import rmsnorm_fwd

    return lambda: rmsnorm_fwd(x, weight, eps=eps, store_rstd=True)[0]


def _rms_norm_bwd(dy: Any, x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    rstd = rmsnorm_fwd(x, weight, eps=eps, store_rstd=True)[2]
    return lambda: rmsnorm_bwd(x, weight, dy, rstd)[:2]


def _layer_norm_fwd(x: Any, weight: Any, bias: Any, eps: float, **_: Any) -> Call:
    """Weight and bias must be fp32 there; they are converted beforehand."""
    from quack.rmsnorm import layernorm_fwd

    weight, bias = weight.float(), bias.float()
    return lambda: layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)[0]


def _layer_norm_bwd(dy: Any, x: Any, weight: Any, bias: Any, eps: float, **_: Any) -> Call:
    """As the forward."""
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    weight, bias = weight.float(), bias.float()
    _, rstd, mean = layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
    return lambda: layernorm_bwd(x, weight, dy, rstd, mean, has_bias=True)


def _softmax_fwd(x: Any, **_: Any) -> Call:
    from quack.softmax import softmax_fwd

    return lambda: softmax_fwd(x)


def _softmax_bwd(dy: Any, y: Any, **_: Any) -> Call:
    from quack.softmax import softmax_bwd

    return lambda: softmax_bwd(dy, y)


def _cross_entropy_fwd(logits: Any, labels: Any, **_: Any) -> Call:
    from quack.cross_entropy import cross_entropy_fwd

    return lambda: cross_entropy_fwd(logits, labels, return_lse=True)[0]


def _cross_entropy_bwd(dy: Any, logits: Any, labels: Any, **_: Any) -> Call:
    from quack.cross_entropy import cross_entropy_bwd, cross_entropy_fwd

    _, lse = cross_entropy_fwd(logits, labels, return_lse=True)
    return lambda: cross_entropy_bwd(logits, labels, dy, lse)


def _cross_entropy_both(logits: Any, labels: Any, **_: Any) -> Call:
    """Loss and gradient in one kernel; the gradient is of the sum, a mean would still have to scale it."""
    from quack.cross_entropy import cross_entropy_fwd

    def call() -> tuple[Any, Any]:
        loss, dx = cross_entropy_fwd(logits, labels, return_dx=True)
        return loss.mean(), dx

    return call


def _topk(x: Any, k: int, **_: Any) -> Call:
    """Powers of two only, int32 indices; the low bits of the numbers carry the column there, so near ties may swap."""
    from quack.topk import topk_fwd

    if x.shape[-1] > 4096 or x.shape[-1] & (x.shape[-1] - 1) or k & (k - 1):
        raise Absent("quack's topk takes powers of two, up to 4096 columns")
    return lambda: topk_fwd(x, k)


def _product(tuned: bool) -> Any:
    def prepare(a: Any, b: Any, scale_a: Any = None, scale_b: Any = None, **_: Any) -> Call:
        """Its own choice of a kernel, or the fastest of those that it tries at the first call."""
        from quack.gemm_interface import gemm

        if a.dtype.itemsize != 2 or b.dtype != a.dtype or scale_b is not None:
            raise Absent("quack's products of 8 bits have scales of blocks of 32, on other devices")
        right = b.t()
        return lambda: gemm(a, right, tuned=tuned)

    return prepare


def _gated(tuned: bool) -> Any:
    def prepare(a: Any, b: Any, **_: Any) -> Call:
        """Rows of the weight alternate between gate and up there; they are sorted beforehand."""
        from quack.gemm_interface import gemm_gated

        right = b.view(2, -1, b.shape[1]).transpose(0, 1).reshape(b.shape).t()
        return lambda: gemm_gated(a, right, activation="swiglu", store_preact=False, tuned=tuned)[1]

    return prepare


def _rope_fwd(q: Any, k: Any, tables: Any, **_: Any) -> Call:
    """One launch each for q and k."""
    from quack.rotary import apply_rotary

    return lambda: (apply_rotary(q, *tables), apply_rotary(k, *tables))


ADAPTERS: Table = {
    "scaled_mm": {"quack": _product(False), "quack_tuned": _product(True)},
    "gated_mm": {"quack": _gated(False), "quack_tuned": _gated(True)},
    "rope_fwd": {"quack": _rope_fwd},
    "topk": {"quack": _topk},
    "topk_bf16": {"quack": _topk},
    "rms_norm_fwd": {"quack": _rms_norm_fwd},
    "rms_norm_bwd": {"quack": _rms_norm_bwd},
    "layer_norm_fwd": {"quack": _layer_norm_fwd},
    "layer_norm_bwd": {"quack": _layer_norm_bwd},
    "softmax_fwd": {"quack": _softmax_fwd},
    "softmax_bwd": {"quack": _softmax_bwd},
    "cross_entropy_fwd": {"quack": _cross_entropy_fwd},
    "cross_entropy_bwd": {"quack": _cross_entropy_bwd},
    "cross_entropy_fwdbwd": {"quack": _cross_entropy_both},
}
