"""AdamW for all parameters at once, with fp32 master weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import multi_adamw_codes
from rtkernels.ops.multi.multi_adamw import STEP
from rtkernels.optim import moments
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.sharding import is_sharded, local


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay; replaces ``torch.optim.AdamW``.

    A step takes two launches for all parameters of a group, or four if the group has both fp32 and 16-bit parameters.
    Weights, moments and arithmetic are fp32. For a bfloat16 or float16 parameter, the optimizer updates an fp32 master
    weight and rounds it to the parameter; otherwise small updates would be lost in rounding. Gradients may have any of
    the three dtypes. Step counts are on the device, so steps can be captured into a CUDA graph; pass `lr` as a tensor
    to change it between replays. Works with ``torch.amp.GradScaler`` without synchronisation.

    With ``state="8bit"`` or ``"fp8"``, the moments of tensors of 4096 elements or more take one byte each and a scale
    per 256 elements. With ``master=False``, 16-bit parameters are updated without an fp32 copy. ``stochastic=True``
    then rounds bfloat16 parameters up or down at random, so that small updates survive on average. All three together
    take 10 bytes of memory traffic per parameter and step instead of 28. A group may have its own values.

    The state of a parameter is that of torch (``step``, ``exp_avg``, ``exp_avg_sq``) plus ``master``. With
    ``state="8bit"`` it is that of ``bitsandbytes.optim.AdamW8bit`` (``state1``, ``absmax1``, ``qmap1``, ...), so state
    dicts can be exchanged in both directions. A state dict of any kind can be loaded, including those of
    ``torch.optim.AdamW`` without amsgrad and of TorchAO's 8-bit and fp8 optimizers. Master weights that it does not
    have are initialised from the parameters, as at the first step. If parameters are overwritten later, the next step
    restores them from the master weights: load the optimizer's state as well, or delete ``state[p]["master"]``.

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
        state: How moments are kept: ``"fp32"``, ``"8bit"`` (block-wise dynamic codes) or ``"fp8"`` (float8_e4m3fn).
        master: Whether 16-bit parameters have fp32 master weights.
        stochastic: Round bfloat16 parameters without master weights stochastically.
        seed: Of the random numbers. They depend on the seed, the step, the parameter's position among all, and the
            element's place in the whole tensor, so a run can be repeated, and shards of the first dimension round like
            the whole tensor. Those of another dimension count on from the place of their first element.

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
        state: Literal["fp32", "8bit", "fp8"] = "fp32",
        master: bool = True,
        stochastic: bool = False,
        seed: int = 0,
    ) -> None:
        _check_torchs_options(
            {"amsgrad": amsgrad, "differentiable": differentiable, "capturable": capturable},
            {"foreach": foreach, "fused": fused},
        )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults |= {"state": state, "master": master, "stochastic": stochastic, "seed": seed}
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
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        kinds = {p: group["state"] for group in self.param_groups for p in group["params"]}
        for i, p in zip(saved, mine, strict=True):
            state = state_dict["state"].get(i)
            if state is None:
                continue
            if "max_exp_avg_sq" in state:
                raise ArgumentError("the state dict is of an optimizer with amsgrad, which this one does not have")
            step = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device).clone().reshape(())
            self.state[p] = {"step": step, **moments.loaded(p, state, kinds[p])}
            if "master" in state and p.dtype != torch.float32:
                self.state[p]["master"] = torch.empty_like(p, dtype=torch.float32).copy_(state["master"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as ``torch.optim.Optimizer.state_dict`` does.

        Step counts of groups with ``state="8bit"`` are Python numbers, as in bitsandbytes, which waits for the device.
        """
        result = super().state_dict()
        coded = [state for state in result["state"].values() if "state1" in state]
        counts = torch.stack([state["step"] for state in coded]).tolist() if coded else []
        numbers = {id(state): int(count) for state, count in zip(coded, counts, strict=True)}
        result["state"] = {
            i: {**state, "step": numbers[id(state)]} if id(state) in numbers else state
            for i, state in result["state"].items()
        }
        return result

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
        for group in self.param_groups:
            _check_options(group)
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        lr = group["lr"]
        for device, lists in self._lists(group).items():
            scalars = (_moved(lr if isinstance(lr, Tensor) else None, device),
                       _moved(grad_scale, device), _moved(found_inf, device))  # fmt: skip
            number = 0.0 if isinstance(lr, Tensor) else float(lr)
            numbers = (*map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"]))
            for plain, one in lists.items():
                numbers_of = (number, *numbers, bool(group["maximize"]))
                if plain[0]:
                    STEP(*one[:5], one[8], *scalars, *numbers_of)
                else:
                    random = int(group["seed"]), bool(group["stochastic"])
                    multi_adamw_codes.STEP(*one, *scalars, *numbers_of, *random)

    def _lists(self, group: dict[str, Any]) -> dict[torch.device, dict[tuple, tuple[list[Tensor], ...]]]:
        """Return, by device, lists for the operators, by what must be the same for all parameters of a list.

        The first item of a key says that moments and weights are fp32: parameters, or masters.
        """
        found: dict[torch.device, dict[tuple, tuple[list[Tensor], ...]]] = {}
        kind, with_masters = group["state"], group["master"]
        (name1, name2), scales = moments.NAMES[kind], moments.SCALES.get(kind)
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state, full = self.state[p], p.dtype == torch.float32
            if not state or (not full and with_masters and "master" not in state):
                self._start(p, state, group)
            master = state.get("master") if with_masters else None
            coded = scales is not None and moments.is_coded(p, kind)
            key = (not coded and (full or master is not None), coded, master is not None)
            device = p.device
            of_device = found.get(device)
            if of_device is None:
                of_device = found[device] = {}
            lists = of_device.get(key)
            if lists is None:
                lists = of_device[key] = tuple([] for _ in range(9))
            mine, first, second = p, state[name1], state[name2]
            if is_sharded(p):
                mine, grad, first, second = local(p), _like_parameter(grad, p), local(first), local(second)
                master = None if master is None else local(master)
                torch.autograd.graph.increment_version(p)  # the operator sees only the shard
            lists[0].append(mine if master is None else master)
            lists[1].append(grad)
            lists[2].append(first)
            lists[3].append(second)
            lists[4].append(state["step"])
            if not key[0]:
                lists[5].append(self._origin(p))
            if coded:
                lists[6].append(state[scales[0]])
                lists[7].append(state[scales[1]])
            if master is not None:
                lists[8].append(mine)
        return found

    def _origin(self, p: Tensor) -> Tensor:
        """Return the parameter's place among the random numbers."""
        known = self.__dict__.setdefault("_origins", {})
        if p not in known:
            order = [q for group in self.param_groups for q in group["params"]]
            known |= {q: moments.origin(q, i) for i, q in enumerate(order) if q not in known}
        return known[p]

    @staticmethod
    def _start(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dtype not in FLOAT_DTYPES or p.layout != torch.strided:
            raise ArgumentError(f"a parameter is {p.dtype}, {p.layout}; expected dense bfloat16, float16 or float32")
        if group["stochastic"] and p.dtype == torch.float16:
            raise ArgumentError("stochastic is True, and a parameter is float16; expected bfloat16 or float32")
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state |= moments.start(p, group["state"])
        if p.dtype != torch.float32 and group["master"]:
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
    if group["state"] not in moments.KINDS:
        raise ArgumentError(f"state is {group['state']!r}; expected {', '.join(map(repr, moments.KINDS))}")
    for name in ("master", "stochastic"):
        if not isinstance(group[name], bool):
            raise ArgumentError(f"{name} is {group[name]!r}; expected True or False")
    if group["master"] and group["stochastic"]:
        raise ArgumentError("stochastic is True, and so is master; expected one of them: master weights are exact")
    if not isinstance(group["seed"], int) or not 0 <= group["seed"] < 1 << 63:
        raise ArgumentError(f"seed is {group['seed']!r}; expected an integer from 0 to 2^63 - 1")
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            raise ArgumentError(f"{name} is {group[name]}; expected a number of at least 0")
