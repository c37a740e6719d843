"""AdamW for all parameters at once, with fp32 master weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import multi_adamw_codes
from rtkernels.ops.multi.multi_adamw import STEP
from rtkernels.optim import exported
from rtkernels.optim import offload as offloading
from rtkernels.optim.options import check_options, check_torchs_options
from rtkernels.optim.stepping import Lists, Stepping


class AdamW(Stepping):
    """Adam with decoupled weight decay; replaces ``torch.optim.AdamW``.

    A step takes two launches for all parameters of a group, or four if the group has both fp32 and 16-bit parameters.
    Weights, moments and arithmetic are fp32. For a bfloat16 or float16 parameter, the optimizer updates an fp32 master
    weight and rounds it to the parameter; otherwise small updates would be lost in rounding. Gradients may have any of
    the three dtypes. Step counts are on the device, so steps can be captured into a CUDA graph; pass `lr` as a tensor
    to change it between replays. Works with ``torch.amp.GradScaler`` without synchronisation.

    With ``state="8bit"`` or ``"fp8"``, the moments of tensors of 4096 elements or more take one byte each and a scale
    per 256 elements; with ``"4bit"``, half a byte and a scale per 128. With ``master=False``, 16-bit parameters are
    updated without an fp32 copy. ``stochastic=True`` then rounds bfloat16 parameters up or down at random, so that
    small updates survive on average. With codes, all three together take 10 bytes of memory traffic per parameter and
    step instead of 28, or 8 with 4 bits. A group may have its own values. A NaN or an infinity among gradients reaches
    all elements that share its scale.

    The state of a parameter is that of torch (``step``, ``exp_avg``, ``exp_avg_sq``) plus ``master``. With
    ``state="8bit"`` it is that of ``bitsandbytes.optim.AdamW8bit`` (``state1``, ``absmax1``, ``qmap1``, ...), so state
    dicts can be exchanged in both directions; ``export_state_dict`` converts states for torch and TorchAO. A state dict
    of any kind can be loaded, including those of ``torch.optim.AdamW`` without amsgrad and of TorchAO's optimizers with
    8 bits, 4 bits and fp8. Codes of 4 bits are TorchAO's, two in an int8 element, in the order of memory. Master
    weights that it does not have are initialised from the parameters, as at the first step. Parameters that are
    overwritten later, as by ``load_state_dict`` of the model, keep their new values: the next step takes them over as
    master weights. Writes through ``p.data`` (``p.data.copy_``) are not noticed, and the next step undoes them: delete
    ``state[p]["master"]`` then.

    Args:
        params: Parameters or parameter groups, bfloat16, float16 or float32. Each parameter and gradient is contiguous
            or a permutation of a contiguous tensor. A group may have parameters on several devices. For a DTensor
            (FSDP2, tensor parallelism), each process updates its own shard, and the state is sharded the same way.
        lr: Learning rate: a number, or a 0-d fp32 tensor on the device of the parameters.
        betas: Decay rates of the two moments, at least 0 and below 1.
        eps: Added to the root of the second moment. It may be 0 with fp32 moments: elements whose moments are 0 then
            become NaN, as in torch. With codes it is at least 1e-15.
        weight_decay: Weights are multiplied by ``1 - lr * weight_decay``.
        amsgrad: Must be False: there is no running maximum of the second moment.
        maximize: Maximise the objective instead of minimising it.
        foreach: Accepted for compatibility with torch; has no effect, because a step always covers all parameters.
        capturable: Accepted for compatibility with torch; steps can always be captured into a CUDA graph.
        differentiable: Must be False: autograd does not record the step.
        fused: Like `foreach`; the two must not both be True.
        state: How moments are kept: ``"fp32"``, ``"8bit"`` (block-wise dynamic codes), ``"fp8"`` (float8_e4m3fn) or
            ``"4bit"`` (dynamic codes of the first moment, sixteenths of the largest for the second).
        master: Whether 16-bit parameters have fp32 master weights.
        stochastic: Round bfloat16 parameters without master weights stochastically.
        seed: Of the random numbers. They depend on the seed, the step, the parameter's position among all, and the
            element's place in the whole tensor, so a run can be repeated, and shards of the first dimension round like
            the whole tensor. Those of another dimension count on from the place of their first element.
        offload: Keep moments and master weights of parameters of 65536 elements or more in pinned host memory. A step
            copies them to the device and back in chunks of 64 MiB, three at a time, while others are updated; updates
            have the same bits. Synchronise the device before you read ``state``; ``state_dict`` does. Not for DTensors,
            and not in a CUDA graph. A state dict does not change it, and groups must not after a step.

    Raises:
        ArgumentError: A hyperparameter is out of range, a parameter has an unsupported dtype or layout, or `amsgrad` or
            `differentiable` is True.
    """

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
        state: Literal["fp32", "8bit", "fp8", "4bit"] = "fp32",
        master: bool = True,
        stochastic: bool = False,
        seed: int = 0,
        offload: bool = False,
    ) -> None:
        check_torchs_options(
            {"amsgrad": amsgrad, "differentiable": differentiable, "capturable": capturable},
            {"foreach": foreach, "fused": fused},
        )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults |= {"state": state, "master": master, "stochastic": stochastic, "seed": seed, "offload": offload}
        check_options(defaults, self._kinds)
        super().__init__(params, defaults)

    def export_state_dict(self, to: Literal["torch", "bitsandbytes", "torchao"]) -> dict[str, Any]:
        """Return the state as an optimizer of another library loads it; its tensors are new, unlike ``state_dict``'s.

        `"torch"` has fp32 moments, for ``torch.optim.AdamW``, and for an optimizer of ours on another number of
        processes: a checkpoint of DTensors can be loaded in other shards, which codes and their scales cannot.
        `"bitsandbytes"` is for ``AdamW8bit``. `"torchao"` is for ``AdamW8bit``, ``AdamWFp8`` or ``AdamW4bit``,
        whichever the `state` of the group is, and needs TorchAO. Its learning rates are tensors. Where TorchAO has no
        codes (a shard under 4096 elements, or a last block that is short) moments are fp32.

        Codes and scales are kept to the bit where the other library has the same kind and blocks, otherwise they are
        decoded and encoded again. Waits for the device.

        Args:
            to: The library.

        Returns:
            A state dict. It also has master weights, which other libraries ignore.

        Raises:
            ArgumentError: `to` is no such library, TorchAO is not installed, or a group maximises, which neither
                bitsandbytes nor TorchAO does.
        """
        if to not in exported.KINDS:
            raise ArgumentError(f"to is {to!r}; expected {', '.join(map(repr, exported.KINDS))}")
        offloading.settle(self.param_groups)
        own = torch.optim.Optimizer.state_dict(self)
        params = [p for group in self.param_groups for p in group["params"]]
        groups = [exported.group_of(group, to) for group in own["param_groups"]]
        kinds = {i: group["state"] for group in own["param_groups"] for i in group["params"]}
        states = exported.states_of(params, own["state"], kinds, to)
        return {**own, "param_groups": groups, "state": states}

    def _launch(
        self, plain: bool, lists: Lists, scalars: tuple[Tensor | None, ...], lr: float, group: dict[str, Any]
    ) -> None:
        numbers = (lr, *map(float, group["betas"]), float(group["eps"]), float(group["weight_decay"]))
        maximize = bool(group["maximize"])
        if plain:
            STEP(*lists[:5], lists[8], *scalars, *numbers, maximize)
        else:
            random = int(group["seed"]), bool(group["stochastic"])
            multi_adamw_codes.STEP(*lists, *scalars, *numbers, maximize, *random)
