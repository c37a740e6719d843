"""Other libraries' kernels for the same rows.

``ADAPTERS[row][peer]`` is called as ``prepare(**inputs)`` and returns the call to time: what a backward needs
from its forward (1/rms, a graph) is made while preparing. Libraries are imported while preparing, so that one
which is not installed costs nothing and is reported as absent.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]
Prepare = Callable[..., Call]

FAMILIES = ("torch", "inductor", "liger", "quack", "linghe", "flaggems")
DISTRIBUTIONS = {
    "liger": "liger-kernel",
    "quack": "quack-kernels",
    "linghe": "linghe",
    "flaggems": "flag-gems",
}


class Absent(Exception):
    """This peer has nothing for this row; the text says why."""


def selected(peer: str, wanted: list[str] | None) -> bool:
    """Whether ``peer`` (``liger_ab``) belongs to one of the wanted families (``liger``); None wants all."""
    return wanted is None or any(peer == item or peer.startswith(item + "_") for item in wanted)


def _silu_only(act: str, library: str) -> None:
    if act != "silu":
        raise Absent(f"{library} has no merged-input GLU for act={act!r}")


# Liger-Kernel


def _liger_rms_norm_fwd(x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]


def _liger_rms_norm_bwd(dy: Any, x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    _, x, rstd, block, warps, mode = rms_norm_forward(x, weight, eps, 0.0, "llama", None)
    return lambda: rms_norm_backward(dy, x, weight, rstd, 0.0, mode, block, warps, False, None)


def _liger_rms_norm_bwd_inplace(dy: Any, x: Any, weight: Any, eps: float, **_: Any) -> Call:
    """Liger's default: dX overwrites dY, which spares the zero fill of dX."""
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    _, x, rstd, block, warps, mode = rms_norm_forward(x, weight, eps, 0.0, "llama", None)
    return lambda: rms_norm_backward(dy, x, weight, rstd, 0.0, mode, block, warps, True, None)


def _liger_glu_fwd(x: Any, act: str = "silu", **_: Any) -> Call:
    _silu_only(act, "Liger-Kernel")
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    return lambda: swiglu_fused_gate_up_forward(x)[1]


def _liger_glu_bwd(dy: Any, x: Any, act: str = "silu", **_: Any) -> Call:
    _silu_only(act, "Liger-Kernel")
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward

    return lambda: swiglu_fused_gate_up_backward(x, dy)


def _halves(x: Any) -> tuple[Any, Any]:
    gate, up = x.chunk(2, dim=-1)
    return gate.contiguous(), up.contiguous()


def _liger_ab_glu_fwd(x: Any, act: str = "silu", **_: Any) -> Call:
    """Separate gate and up tensors, split beforehand: the same bytes in Liger's older layout."""
    from liger_kernel.ops.geglu import geglu_forward
    from liger_kernel.ops.swiglu import swiglu_forward

    forward = {"silu": swiglu_forward, "gelu_tanh": geglu_forward}.get(act)
    if forward is None:
        raise Absent(f"Liger-Kernel has no GLU for act={act!r}")
    gate, up = _halves(x)
    return lambda: forward(gate, up)[2]


def _liger_ab_glu_bwd(dy: Any, x: Any, act: str = "silu", **_: Any) -> Call:
    """As above; Liger overwrites gate and up with their gradients, so the values drift, not the bytes."""
    from liger_kernel.ops.geglu import geglu_backward
    from liger_kernel.ops.swiglu import swiglu_backward

    backward = {"silu": swiglu_backward, "gelu_tanh": geglu_backward}.get(act)
    if backward is None:
        raise Absent(f"Liger-Kernel has no GLU for act={act!r}")
    gate, up = _halves(x)
    return lambda: backward(gate, up, dy)


# quack


def _quack_rms_norm_fwd(x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from quack.rmsnorm import rmsnorm_fwd

    return lambda: rmsnorm_fwd(x, weight, eps=eps, store_rstd=True)[0]


def _quack_rms_norm_bwd(dy: Any, x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    rstd = rmsnorm_fwd(x, weight, eps=eps, store_rstd=True)[2]
    return lambda: rmsnorm_bwd(x, weight, dy, rstd)[:2]


# linghe


def _linghe_rms_norm_fwd(x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from linghe.utils.norm import triton_rms_norm_forward

    return lambda: triton_rms_norm_forward(x, weight, eps)[0]


def _linghe_rms_norm_bwd(dy: Any, x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from linghe.utils.norm import triton_rms_norm_backward, triton_rms_norm_forward

    rms = triton_rms_norm_forward(x, weight, eps)[1]
    return lambda: triton_rms_norm_backward(dy, x, weight, eps, rms)


def _linghe_glu_fwd(x: Any, act: str = "silu", **_: Any) -> Call:
    _silu_only(act, "linghe")
    from linghe.utils.silu import triton_weighted_silu_forward

    return lambda: triton_weighted_silu_forward(x)


def _linghe_glu_bwd(dy: Any, x: Any, act: str = "silu", **_: Any) -> Call:
    _silu_only(act, "linghe")
    from linghe.utils.silu import triton_weighted_silu_backward

    return lambda: triton_weighted_silu_backward(dy, x)[0]


def _linghe_row(x: Any, **_: Any) -> Call:
    from linghe.quant.channel import triton_tokenwise_row_quant

    if x.shape[-1] & (x.shape[-1] - 1):
        raise Absent("linghe's tokenwise row quantiser takes power-of-two widths only")
    return lambda: triton_tokenwise_row_quant(x)


def _linghe_group(x: Any, **_: Any) -> Call:
    from linghe.quant.group import triton_group_quant

    return lambda: triton_group_quant(x)


def _linghe_group_t(x: Any, **_: Any) -> Call:
    from linghe.quant.block import triton_blockwise_quant

    return lambda: triton_blockwise_quant(x, output_mode=1)[2:]


def _linghe_block(x: Any, **_: Any) -> Call:
    from linghe.quant.block import triton_block_quant

    return lambda: triton_block_quant(x)


# FlagGems


def _flaggems() -> None:
    # Without it FlagGems looks for its vendor by running the tools of every vendor it knows.
    os.environ.setdefault("GEMS_VENDOR", "nvidia")
    import flag_gems  # noqa: F401


def _flaggems_rms_norm_fwd(x: Any, weight: Any, eps: float, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, [x.shape[-1]], weight, eps)[0]


def _flaggems_rms_norm_bwd(dy: Any, x: Any, weight: Any, eps: float, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.rms_norm import rms_norm_backward, rms_norm_forward

    inv_rms = rms_norm_forward(x, [x.shape[-1]], weight, eps)[1]
    return lambda: rms_norm_backward(dy, x, inv_rms, [x.shape[-1]], weight, eps)


def _flaggems_glu_fwd(x: Any, act: str = "silu", **_: Any) -> Call:
    _silu_only(act, "FlagGems")
    _flaggems()
    from flag_gems.fused.swiglu import swiglu

    return lambda: swiglu(x)


def _flaggems_glu_bwd(dy: Any, x: Any, act: str = "silu", **_: Any) -> Call:
    _silu_only(act, "FlagGems")
    _flaggems()
    from flag_gems.fused.swiglu import dswiglu

    return lambda: dswiglu(dy, x)


def _flaggems_group(x: Any, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.per_token_group_quant_fp8 import per_token_group_quant_fp8

    return lambda: per_token_group_quant_fp8(x, 128)


ADAPTERS: dict[str, dict[str, Prepare]] = {
    "rms_norm_fwd": {
        "liger": _liger_rms_norm_fwd,
        "quack": _quack_rms_norm_fwd,
        "linghe": _linghe_rms_norm_fwd,
        "flaggems": _flaggems_rms_norm_fwd,
    },
    "rms_norm_bwd": {
        "liger": _liger_rms_norm_bwd,
        "liger_inplace": _liger_rms_norm_bwd_inplace,
        "quack": _quack_rms_norm_bwd,
        "linghe": _linghe_rms_norm_bwd,
        "flaggems": _flaggems_rms_norm_bwd,
    },
    "glu_fwd": {
        "liger": _liger_glu_fwd,
        "liger_ab": _liger_ab_glu_fwd,
        "linghe": _linghe_glu_fwd,
        "flaggems": _flaggems_glu_fwd,
    },
    "glu_bwd": {
        "liger": _liger_glu_bwd,
        "liger_ab": _liger_ab_glu_bwd,
        "linghe": _linghe_glu_bwd,
        "flaggems": _flaggems_glu_bwd,
    },
    "quantize_fp8_row": {"linghe": _linghe_row},
    "quantize_fp8_group": {"linghe": _linghe_group, "flaggems": _flaggems_group},
    "quantize_fp8_group_t": {"linghe": _linghe_group_t},
    "quantize_fp8_block": {"linghe": _linghe_block},
}


# torch itself: rows carry the functions, so these are made from the row


def _eager(function: Callable[..., Any], **inputs: Any) -> Call:
    return lambda: function(**inputs)


def _backward(function: Callable[..., Any], dy: Any, **inputs: Any) -> Call:
    """Autograd's backward of ``function`` alone: the graph is built here and kept."""
    import torch

    # Also of a compiled function: signature() follows __wrapped__.
    accepted = inspect.signature(function).parameters.values()
    names = {p.name for p in accepted}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted)
    given = {k: v for k, v in inputs.items() if takes_all or k in names}
    leaves = {
        k: v.detach().clone().requires_grad_()
        for k, v in given.items()
        if isinstance(v, torch.Tensor) and v.is_floating_point()
    }
    out = function(**{**given, **leaves})
    out = out[0] if isinstance(out, (tuple, list)) else out
    return lambda: torch.autograd.grad(out, list(leaves.values()), dy, retain_graph=True)


def _compiled(prepare: Prepare, function: Callable[..., Any]) -> Prepare:
    """``prepare`` of the function compiled by inductor, compiled once for all copies of the inputs."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        import torch

        return torch.compile(function, dynamic=False)

    return lambda **inputs: prepare(compiled(), **inputs)


def torch_peers(row: Any, forward: Any | None) -> dict[str, Prepare]:
    """torch's own competitors of a row: eager, its fused op, and inductor.

    With ``forward`` (the matching forward row) the backward is autograd's, timed alone: ``inductor`` is
    then the backward of the compiled forward and ``inductor_math`` the compiled formula of the row.
    """
    if forward is None:
        found = {"torch": functools.partial(_eager, row.torch), "inductor": _compiled(_eager, row.torch)}
    else:
        found = {
            "torch": functools.partial(_backward, forward.torch),
            "inductor": _compiled(_backward, forward.torch),
            "inductor_math": _compiled(_eager, row.torch),
        }
    if row.fused:
        found["torch_fused"] = functools.partial(_eager, row.fused)
    elif forward is not None and forward.fused:
        found["torch_fused"] = functools.partial(_backward, forward.fused)
    return found
