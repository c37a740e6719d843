"""States of ``AdamW`` as other libraries keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import dynamic_codes
from rtkernels.optim import moments
from rtkernels.runtime.operator.sharding import is_sharded

_KEPT = ("lr", "betas", "eps", "weight_decay", "params")  # of a group
_OF_TORCH = {"amsgrad": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None}
KINDS = {"torch": "fp32", "bitsandbytes": "8bit", "torchao": None}  # what moments become; None: stay


def states_of(
    params: list[Tensor], states: dict[int, dict[str, Any]], kinds: dict[int, str], to: str
) -> dict[int, Any]:
    """Return the states of parameters, by index, as another library keeps them."""
    steps = [state["step"].item() for state in states.values()]
    result = {}
    for (i, state), step in zip(states.items(), steps, strict=True):
        kept = int(step) if to == "bitsandbytes" else torch.tensor(step, dtype=torch.float32, device="cpu")
        found: dict[str, Any] = {"step": kept}
        p, kind = params[i], kinds[i]
        found |= _for_torchao(p, state, kind) if to == "torchao" else moments.loaded(p, state, KINDS[to])
        result[i] = found | ({"master": state["master"].clone()} if "master" in state else {})
    return result


def group_of(group: dict[str, Any], to: str) -> dict[str, Any]:
    """Return the options of a group of a state dict under the names of another library."""
    if to == "torch":
        return {**group, **_OF_TORCH, "state": "fp32"}
    if group["maximize"]:
        raise ArgumentError(f"maximize is True, which optimizers of {to} do not have; expected False")
    kept = {name: group[name] for name in _KEPT}
    if to == "bitsandbytes":
        return {**kept, "lr": float(kept["lr"]), "state": "8bit"}
    lr = torch.as_tensor(kept["lr"], dtype=torch.float32, device="cpu").detach().reshape(()).clone()
    return {**kept, "lr": lr, "amsgrad": False}


def _for_torchao(p: Any, state: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return tensors of TorchAO's own; fp32 where it has no codes: under 4096 elements, and short last blocks."""
    mine = moments.own(p)
    plain = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)  # scales are those of rows
    block = dynamic_codes.BLOCKS.get(kind)
    codes = kind if moments.is_coded(plain, kind) and mine.numel() % block == 0 else "fp32"
    found = moments.loaded(plain, moments.of_shard(p, state, kind), codes)
    result = {}
    for i, (name, to) in enumerate(zip(moments.NAMES[codes], moments.NAMES["fp32"], strict=True)):
        value = found[name]
        if codes != "fp32":
            value = _wrapper(codes)(value, found[moments.SCALES[codes][i]], i == 0, tuple(mine.shape))
        result[to] = moments.sharded(value, p) if is_sharded(p) else value
    return result


def _wrapper(kind: str) -> Callable[[Tensor, Tensor, bool, tuple[int, ...]], Tensor]:
    try:
        from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8
    except ImportError as error:
        raise ArgumentError('to is "torchao", and torchao.optim cannot be imported; install torchao') from error

    def qmap(codes: Tensor, signed: bool) -> Tensor:
        return dynamic_codes.code_map(kind, signed).to(codes.device)

    def wrap(codes: Tensor, scale: Tensor, signed: bool, shape: tuple[int, ...]) -> Tensor:
        if kind == "fp8":
            return subclass_fp8.OptimStateFp8(codes, scale)
        if kind == "8bit":
            return subclass_8bit.OptimState8bit(codes, scale, qmap(codes, signed), signed)
        return subclass_4bit.OptimState4bit(codes.view(torch.uint8), scale, qmap(codes, signed), signed, shape)

    return wrap
