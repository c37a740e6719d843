"""AdamW for all parameters at once, with fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi.multi_adamw import STEP
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.sharding import is_sharded, local

_STATE = ("exp_avg", "exp_avg_sq", "master")


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay; replaces ``torch.optim.AdamW``.

    A step takes two launches for all parameters of a group, or four if the group has both fp32 and 16-bit parameters.
    Weights, moments and arithmetic are fp32. For a bfloat16 or float16 parameter, the optimizer updates an fp32 master
    weight and rounds it to the parameter; otherwise small updates would be lost in rounding. Gradients may have any of
    the three dtypes. Step counts are on the device, so steps can be captured into a CUDA graph; pass `lr` as a tensor
    to change it between replays. Works with ``torch.amp.GradScaler`` without synchronisation.

    The state of a parameter is that of torch (``step``, ``exp_avg``, ``exp_avg_sq``) plus ``master``. A state dict of
    ``torch.optim.AdamW`` without amsgrad can be loaded; master weights are then initialised from the parameters, as at
    the first step. If parameters are overwritten later, the next step restores them from the master weights: load the
    optimizer's state as well, or delete ``state[p]["master"]``.

    Args:
        params: Parameters or parameter groups, bfloat16, float16 or float32. Each parameter and gradient is contiguous
            or a permutation of a contiguous tensor. A group may have parameters on several devices. For a DTensor
            (FSDP2, tensor parallelism), each process updates its own shard, and the state is sharded the same way.
        lr: Learning rate: a number, or a 0-d fp32 tensor on the device of the parameters.
        betas: Decay rates of the two moments, at least 0 and below 1.
        eps: Added to the root of the second moment.
        weight_decay: Weights are multiplied by ``1 - lr * weight_decay``.
        amsgrad: Must be False: there is no running maximum of the second moment.
        maximize: Maximise the objective instead of minimising it.
        foreach: Accepted for compatibility with torch; has no effect, because a step always covers all parameters.
        capturable: Accepted for compatibility with torch; steps can always be captured into a CUDA graph.
        differentiable: Must be False: autograd does not record the step.
        fused: Like `foreach`; the two must not both be True.

    Raises:
        ArgumentError: A hyperparameter is out of range, a parameter has an unsupported dtype or layout, or `amsgrad` or
            `differentiable` is True.
    """

    # GradScaler passes its scale and the found_inf flag as tensors instead of synchronising.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _check_torchs_options(
            {"amsgrad": amsgrad, "differentiable": differentiable, "capturable": capturable},
            {"foreach": foreach, "fused": fused},
        )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        _check_options(defaults)
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check_options(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, or of ``torch.optim.AdamW``.

        Args:
            state_dict: The result of ``state_dict()``.

        Raises:
            ArgumentError: The state dict is from an optimizer with ``amsgrad`` or ``differentiable``.
        """
        for group in state_dict["param_groups"]:
            _check_torchs_options(group, {})
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype, which would discard the low bits of moments and master weights.
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, mine, strict=True):
            state = state_dict["state"].get(i)
            if state is None:
                continue
            if "max_exp_avg_sq" in state:
                raise ArgumentError("the state dict is of an optimizer with amsgrad, which this one does not have")
            kept = {name: torch.empty_like(p, dtype=torch.float32) for name in _STATE if name in state}
            for name, value in kept.items():
                value.copy_(state[name])
            step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device).clone().reshape(())
            self.state[p] = {"step": step, **kept}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: Recomputes the loss and the gradients.

        Returns:
            The loss if there is a closure, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            _check_options(group)
            lr = group["lr"]
            for device, lists in self._lists(group).items():
                scalars = (_moved(lr if isinstance(lr, Tensor) else None, device),
                           _moved(grad_scale, device), _moved(found_inf, device))  # fmt: skip
                number = 0.0 if isinstance(lr, Tensor) else float(lr)
                numbers = (*map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"]))
                for one in lists:
                    if one[0]:
                        STEP(*one, *scalars, number, *numbers, bool(group["maximize"]))
        return loss

    def _lists(self, group: dict[str, Any]) -> dict[torch.device, tuple[tuple[list[Tensor], ...], ...]]:
        """Return, by device, the lists for the operator: one set for fp32 parameters, one for those with masters."""
        found: dict[torch.device, tuple[tuple[list[Tensor], ...], ...]] = {}
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state = self.state[p]
            if not state or (p.dtype != torch.float32 and "master" not in state):
                self._start(p, state)
            lists = found.get(p.device)
            if lists is None:
                lists = found[p.device] = tuple(tuple([] for _ in range(6)) for _ in range(2))
            master = state.get("master")
            weights, grads, firsts, seconds, steps, copies = lists[master is not None]
            mine, first, second = p, state["exp_avg"], state["exp_avg_sq"]
            if is_sharded(p):
                mine, grad, first, second = local(p), _like_parameter(grad, p), local(first), local(second)
                master = None if master is None else local(master)
                torch.autograd.graph.increment_version(p)  # the operator sees only the shard
            weights.append(mine if master is None else master)
            grads.append(grad)
            firsts.append(first)
            seconds.append(second)
            steps.append(state["step"])
            if master is not None:
                copies.append(mine)
        return found

    @staticmethod
    def _start(p: Tensor, state: dict[str, Any]) -> None:
        if p.dtype not in FLOAT_DTYPES or p.layout != torch.strided:
            raise ArgumentError(f"a parameter is {p.dtype}, {p.layout}; expected dense bfloat16, float16 or float32")
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        if p.dtype != torch.float32:
            state["master"] = p.detach().float()


def _like_parameter(grad: Tensor, p: Any) -> Tensor:
    """Return this process's shard of a gradient, after summing the partial gradients of several processes."""
    return local(grad if grad.placements == p.placements else grad.redistribute(placements=p.placements))


def _moved(number: Tensor | None, device: torch.device) -> Tensor | None:
    return None if number is None else number.to(device, torch.float32, non_blocking=True)


_MUST_BE_FALSE = {
    "amsgrad": "this optimizer keeps no running maximum of the second moment",
    "differentiable": "autograd does not record the step, which is one kernel for all parameters",
}


def _check_torchs_options(flags: dict[str, Any], loops: dict[str, Any]) -> None:
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


def _check_options(group: dict[str, Any]) -> None:
    _check_torchs_options(group, {})
    lr, (beta1, beta2) = group["lr"], group["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ArgumentError(f"lr has shape {tuple(lr.shape)}; expected a single number")
    elif not lr >= 0:
        raise ArgumentError(f"lr is {lr}; expected a number of at least 0")
    for name, beta in (("betas[0]", beta1), ("betas[1]", beta2)):
        if not 0 <= beta < 1:
            raise ArgumentError(f"{name} is {beta}; expected a number from 0 to below 1")
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            raise ArgumentError(f"{name} is {group[name]}; expected a number of at least 0")
