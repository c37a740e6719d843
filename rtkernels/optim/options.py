"""Checks of the options of optimizers, from the constructor, a group or a state dict."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi.dynamic_codes import CODES

_SMALLEST = 2.0**-126
_SMALLEST_EPS = 1e-15  # with codes, among which the second moments that are not 0 may have a code for 0

_MUST_BE_FALSE = {
    "amsgrad": "this optimizer keeps no running maximum of the second moment",
    "differentiable": "autograd does not record the step, which is one kernel for all parameters",
}


def check_torchs_options(flags: dict[str, Any], loops: dict[str, Any]) -> None:
    """Check options of ``torch.optim.AdamW`` other than hyperparameters, from the constructor or a group."""
    for name, value in {**flags, **loops}.items():
        if name in ("amsgrad", "differentiable", "capturable", *loops) and not (
            isinstance(value, bool) or (value is None and name in loops)
        ):
            raise ArgumentError(f"{name} is {value!r}; expected True or False{' or None' if name in loops else ''}")
    for name, why in _MUST_BE_FALSE.items():
        if flags.get(name):
            raise ArgumentError(f"{name} is True, and must be False: {why}; use torch.optim.AdamW for that")
    if loops and all(loops.values()):
        raise ArgumentError("fused and foreach are both True; torch.optim.AdamW takes one of them, too")


def check_options(group: dict[str, Any], kinds: tuple[str, ...]) -> None:
    """Raise an ArgumentError unless a group's hyperparameters are in range; `kinds` are those of moments."""
    check_torchs_options(group, {})
    lr, (beta1, beta2) = group["lr"], group["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ArgumentError(f"lr has shape {tuple(lr.shape)}; expected a single number")
    elif not lr >= 0:
        raise ArgumentError(f"lr is {lr}; expected a number of at least 0")
    for name, beta in (("betas[0]", beta1), ("betas[1]", beta2)):
        if not 0 <= beta < 1:
            raise ArgumentError(f"{name} is {beta}; expected a number from 0 to below 1")
    if group["state"] not in kinds:
        raise ArgumentError(f"state is {group['state']!r}; expected {', '.join(map(repr, kinds))}")
    for name in ("master", "stochastic", "offload"):
        if not isinstance(group[name], bool):
            raise ArgumentError(f"{name} is {group[name]!r}; expected True or False")
    if group["master"] and group["stochastic"]:
        raise ArgumentError("stochastic is True, and so is master; expected one of them: master weights are exact")
    if not isinstance(group["seed"], int) or not 0 <= group["seed"] < 1 << 63:
        raise ArgumentError(f"seed is {group['seed']!r}; expected an integer from 0 to 2^63 - 1")
    for name in ("eps", "weight_decay"):
        if name in group and not group[name] >= 0:
            raise ArgumentError(f"{name} is {group[name]}; expected a number of at least 0")
    if "eps" in group:
        _check_eps(float(group["eps"]), group["state"])


def _check_eps(eps: float, kind: str) -> None:
    if kind in CODES and eps < _SMALLEST_EPS:
        raise ArgumentError(
            f"eps is {eps}; expected at least {_SMALLEST_EPS} with state={kind!r}: codes round small second moments to "
            "0, and the update is divided by their root plus eps"
        )
    if 0 < eps < _SMALLEST:
        raise ArgumentError(f"eps is {eps}; expected 0 or at least 1.2e-38, the smallest normal number of fp32")
