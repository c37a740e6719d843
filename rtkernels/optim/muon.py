"""Muon for matrices, all of one shape at a time, with AdamW for the other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import multi_muon
from rtkernels.ops.multi.multi_muon import APPLY, MOMENTUM
from rtkernels.optim import moments, muon_shards
from rtkernels.optim.adamw import AdamW
from rtkernels.optim.muon_iteration import QUINTIC, Coefficients, orthogonalize_, schedule
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.sharding import is_sharded, local

_BATCH_ELEMENTS = 1 << 28  # of the matrices that are processed together, which bounds the memory of a step
_SCALINGS = (None, "original", "match_rms_adamw", "spectral")
_ADAMW_EPS = 1e-8


class Muon(AdamW):
    """Momentum whose update of every matrix is orthogonalised; replaces ``torch.optim.Muon``.

    Matrices of the same shape are processed as one batch, with products that compute one triangle of a symmetric
    result. Parameters with three dimensions, such as experts, are batches of matrices. Momentum and arithmetic outside
    of the iteration are fp32; 16-bit parameters have fp32 master weights, as in ``AdamW``. Updates are those of torch's
    Muon (its code, where the momentum is an average of gradients), up to the rounding of the iteration.

    Groups with ``use_muon=False`` are updated by AdamW, with `betas` and the other options of ``rtkernels.optim.AdamW``
    as keys of the group. So one optimizer serves a whole model::

        hidden = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n and "lm_head" not in n]
        others = ...
        Muon([{"params": hidden}, {"params": others, "use_muon": False, "lr": 3e-4}], lr=2e-2)

    DTensors that are sharded by rows over one mesh dimension (FSDP2) are never orthogonalised in parts: matrices of a
    shape are dealt to processes in turn. Each process receives all rows of its matrices, computes their updates and
    sends the rows back. Experts that are sharded by expert need no communication. For other shardings, every process
    gathers the whole matrices. The state stays sharded like the parameters.

    The state of a parameter is that of torch (``momentum_buffer``) plus ``master``; a state dict of
    ``torch.optim.Muon`` can be loaded.

    Args:
        params: Parameters or parameter groups with two or three dimensions, or any for groups with ``use_muon=False``;
            bfloat16, float16 or float32, dense.
        lr: Learning rate: a number, or a 0-d tensor.
        weight_decay: Weights are multiplied by ``1 - lr * weight_decay``.
        momentum: Weight of the old average; at least 0 and below 1.
        nesterov: Use ``lerp(grad, average, momentum)`` instead of the average.
        ns_coefficients: ``(a, b, c)`` of the quintic iteration, one such tuple per step, or ``"polar_express"``.
        eps: Least norm that a matrix is divided by.
        ns_steps: How many steps.
        adjust_lr_fn: What the learning rate is multiplied by for a matrix of r x c: ``"original"`` or None,
            ``sqrt(max(1, r / c))``; ``"match_rms_adamw"`` (Moonlight), ``0.2 sqrt(max(r, c))``; ``"spectral"``,
            ``sqrt(r / c)``.
        gram: Iterate on the smaller of ``X X^T`` and ``X^T X``, in float16: the same polynomial with fewer operations
            and smaller errors unless the matrix is square. None: where that is faster.
        betas: Of groups with ``use_muon=False``.

    Raises:
        ArgumentError: A hyperparameter is out of range, or a parameter has an unsupported dtype, layout or shape.
    """

    _step_supports_amp_scaling = False  # GradScaler unscales gradients, and skips steps, before they arrive

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients | Sequence[Coefficients] | Literal["polar_express"] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral"] | None = None,
        *,
        gram: bool | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        own = {
            "momentum": momentum, "nesterov": nesterov, "ns_coefficients": ns_coefficients, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "gram": gram, "use_muon": True,
        }  # fmt: skip
        _check_muon(own)
        groups = list(params)
        if groups and isinstance(groups[0], dict):
            groups = [{"eps": _ADAMW_EPS, **g} if g.get("use_muon") is False else g for g in groups]
        self._own = own
        super().__init__(groups, lr, betas, eps, weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Args:
            param_group: ``"params"``, and options that differ from those of the constructor.

        Raises:
            ArgumentError: An option is out of range, or a parameter is no matrix.
        """
        self.defaults |= self._own
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _check_muon(group)
        if group["use_muon"]:
            if group["offload"]:
                raise ArgumentError("offload is True, and use_muon is True; expected use_muon=False for such a group")
            for p in group["params"]:
                if p.dim() not in (2, 3):
                    raise ArgumentError(
                        f"a parameter has shape {tuple(p.shape)}; expected two or three dimensions, or a group with "
                        "use_muon=False"
                    )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this optimizer, or of ``torch.optim.Muon``.

        Args:
            state_dict: The result of ``state_dict()``.
        """
        known = {i: s for i, s in state_dict["state"].items() if "momentum_buffer" in s}
        rest = {i: s for i, s in state_dict["state"].items() if i not in known}
        super().load_state_dict({**state_dict, "state": rest})
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, mine, strict=True):
            if i in known:
                names = ("momentum_buffer", *(("master",) if p.dtype != torch.float32 else ()))
                found = {name: known[i][name] for name in names if name in known[i]}
                self.state[p] = {name: moments.copied(p, value) for name, value in found.items()}
        self._mark(mine)

    def _step_group(self, group: dict[str, Any]) -> None:
        if not group["use_muon"]:
            super()._step_group(group)
            return
        _check_muon(group)
        coefficients = schedule(group["ns_coefficients"], group["ns_steps"])

        def orthogonal(x: Tensor) -> Tensor:
            return orthogonalize_(x, coefficients, group["eps"], group["gram"])

        for items in _batches(self._ready(p, group) for p in group["params"] if p.grad is not None):
            updates = _updates(items, group)
            if is_sharded(items[0][0]):
                directions = muon_shards.orthogonalized([p for p, *_ in items], updates.unbind(0), orthogonal)
            else:
                directions = list(_orthogonalized(updates, orthogonal).unbind(0))
            _apply(items, directions, group)

    def _ready(self, p: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return a parameter, its gradient and its state."""
        state = self.state[p]
        if p.dtype not in FLOAT_DTYPES or p.layout != torch.strided:
            raise ArgumentError(f"a parameter is {p.dtype}, {p.layout}; expected dense bfloat16, float16 or float32")
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, dtype=torch.float32)
        if p.dtype != torch.float32 and "master" not in state:
            state["master"] = p.detach().float()
        if p.grad.layout != torch.strided:
            raise ArgumentError(f"a gradient is {p.grad.layout}; expected a dense tensor")
        if "master" in state:
            self._renew(p, state["master"])
        return p, p.grad, state


def _batches(items: Iterator[tuple[Tensor, Tensor, dict[str, Any]]]) -> Iterator[list[tuple]]:
    """Yield parameters of one shape, dtype, device and sharding; no more than fit into the memory of a step."""
    found: dict[Any, list[tuple]] = {}
    for item in items:
        p = item[0]
        sharding = (p.device_mesh, tuple(p.placements)) if is_sharded(p) else None
        key = (tuple(p.shape), p.device, p.dtype, item[1].dtype, sharding)
        found.setdefault(key, []).append(item)
    for key, same in found.items():
        count = max(_BATCH_ELEMENTS // max(math.prod(key[0]), 1), 1)
        yield from (same[i : i + count] for i in range(0, len(same), count))


def _updates(items: list[tuple], group: dict[str, Any]) -> Tensor:
    """Advance the momentum of this process's shards and return what is to be orthogonalised, bfloat16, as a batch."""
    grads, averages = [], []
    for p, grad, state in items:
        average = state["momentum_buffer"]
        if is_sharded(p):
            grad = local(grad if grad.placements == p.placements else grad.redistribute(placements=p.placements))
            average = local(average)
        grads.append(grad)
        averages.append(average)
    x = torch.empty((len(items), *averages[0].shape), dtype=torch.bfloat16, device=averages[0].device)
    updates, numbers = list(x.unbind(0)), (float(group["momentum"]), group["nesterov"], group["maximize"])
    if all(t.is_contiguous() for t in (*grads, *averages)):
        MOMENTUM(averages, grads, updates, *numbers)
    else:
        for lists in zip(averages, grads, updates, strict=True):
            multi_muon.momentum_reference(*([t] for t in lists), *numbers)
    return x


def _orthogonalized(x: Tensor, orthogonal: Any) -> Tensor:
    return orthogonal(x.reshape(-1, *x.shape[-2:])).reshape(x.shape) if x.numel() else x


def _apply(items: list[tuple], directions: Sequence[Tensor], group: dict[str, Any]) -> None:
    lr = group["lr"]
    weights = [_own(state.get("master", p)) for p, _, state in items]
    copies = [_own(p) for p, _, state in items if "master" in state]
    lr_by = lr.to(weights[0].device, torch.float32, non_blocking=True).reshape(()) if isinstance(lr, Tensor) else None
    factor = _scaling(group["adjust_lr_fn"], *items[0][0].shape[-2:])
    numbers = (0.0 if lr_by is not None else float(lr), factor, float(group["weight_decay"]))
    if all(t.is_contiguous() for t in (*weights, *directions, *copies)):
        APPLY(weights, directions, copies, lr_by, *numbers)
    else:
        for i, lists in enumerate(zip(weights, directions, strict=True)):
            multi_muon.apply_reference(*([t] for t in lists), copies[i : i + 1], lr_by, *numbers)
    for p, *_ in items:
        if is_sharded(p):
            torch.autograd.graph.increment_version(p)  # the operator sees only the shard


def _own(t: Tensor) -> Tensor:
    return local(t) if is_sharded(t) else t


def _scaling(kind: str | None, rows: int, cols: int) -> float:
    if 0 in (rows, cols):
        return 1.0
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(rows / cols) if kind == "spectral" else math.sqrt(max(1.0, rows / cols))


def _check_muon(group: dict[str, Any]) -> None:
    if not 0 <= group["momentum"] < 1:
        raise ArgumentError(f"momentum is {group['momentum']}; expected a number from 0 to below 1")
    if group["adjust_lr_fn"] not in _SCALINGS:
        raise ArgumentError(f"adjust_lr_fn is {group['adjust_lr_fn']!r}; expected {', '.join(map(repr, _SCALINGS))}")
    steps = group["ns_steps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < 100:
        raise ArgumentError(f"ns_steps is {steps!r}; expected an integer from 0 to 99")
    for name in ("nesterov", "use_muon", "gram"):
        if not isinstance(group[name], bool) and not (name == "gram" and group[name] is None):
            raise ArgumentError(f"{name} is {group[name]!r}; expected True or False{' or None' * (name == 'gram')}")
    given = group["ns_coefficients"]
    if isinstance(given, str):
        correct = given == "polar_express"
    else:
        rows = [given] if given and isinstance(given[0], (int, float)) else list(given)
        correct = bool(rows) and all(len(row) == 3 and all(math.isfinite(x) for x in row) for row in rows)
    if not correct:
        raise ArgumentError(
            f"ns_coefficients is {given!r}; expected three numbers, a list of three numbers for each step, or "
            "'polar_express'"
        )
