"""Lion for all parameters at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from rtkernels.ops.multi import multi_lion
from rtkernels.optim.options import check_options
from rtkernels.optim.stepping import Lists, Stepping


class Lion(Stepping):
    """Sign of an interpolated momentum with decoupled weight decay (Chen et al. 2023, "Symbolic discovery").

    With momentum m and gradient g, a step is ``p = p (1 - lr weight_decay) - lr sign(beta1 m + (1 - beta1) g)`` and
    ``m = beta2 m + (1 - beta2) g``. A step takes two launches for all parameters of a kind and dtype, with fp32
    arithmetic. Weights, masters, rounding, gradients, devices, DTensors, CUDA graphs and ``GradScaler`` are those of
    `AdamW`; updates want a learning rate 3 to 10 times smaller than its. The sign of NaN is NaN, as in the published
    JAX code, so that weights show it.

    The state of a parameter is that of the published optimizer (``exp_avg``) plus ``step`` and ``master``. With
    ``state="8bit"`` it is that of ``bitsandbytes.optim.Lion8bit`` (``state1``, ``absmax1``, ``qmap1``). State dicts of
    these can be loaded.

    Args:
        params: Parameters or parameter groups, as for `AdamW`.
        lr: Learning rate: a number, or a 0-d fp32 tensor on the device of the parameters.
        betas: Decay rates of the interpolation whose sign is the update, and of the momentum; at least 0 and below 1.
        weight_decay: Weights are multiplied by ``1 - lr * weight_decay``.
        maximize: Maximise the objective instead of minimising it.
        state: How the momentum is kept: ``"fp32"``, ``"bf16"`` or ``"8bit"`` (block-wise dynamic codes).
        master: Whether 16-bit parameters have fp32 master weights.
        stochastic: Round bfloat16 parameters without master weights stochastically.
        seed: Of the random numbers, as for `AdamW`.
        offload: Keep the momentum and master weights in pinned host memory, as for `AdamW`.

    Raises:
        ArgumentError: A hyperparameter is out of range, or a parameter has an unsupported dtype or layout.
    """

    _moments = 1
    _kinds = ("fp32", "bf16", "8bit")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state: Literal["fp32", "bf16", "8bit"] = "fp32",
        master: bool = True,
        stochastic: bool = False,
        seed: int = 0,
        offload: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        defaults |= {"state": state, "master": master, "stochastic": stochastic, "seed": seed, "offload": offload}
        check_options(defaults, self._kinds)
        super().__init__(params, defaults)

    def _launch(
        self, plain: bool, lists: Lists, scalars: tuple[Tensor | None, ...], lr: float, group: dict[str, Any]
    ) -> None:
        weights, grads, averages, _, steps, origins, scales, _, copies = lists
        numbers = lr, *map(float, group["betas"]), float(group["weight_decay"]), bool(group["maximize"])
        multi_lion.STEP(
            weights, grads, averages, origins, steps, scales, copies, *scalars, *numbers, int(group["seed"]),
            bool(group["stochastic"]),
        )  # fmt: skip
