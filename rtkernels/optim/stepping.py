"""What optimizers share whose step is one operator over lists of tensors: states, and the lists by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rtkernels.errors import ArgumentError
from rtkernels.optim import masters, moments, offload
from rtkernels.optim.options import check_options, check_torchs_options
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.sharding import is_sharded, local

Lists = tuple[list[Tensor], ...]


class Stepping(torch.optim.Optimizer):
    """Base of ``AdamW`` and ``Lion``."""

    # GradScaler passes its scale and the found_inf flag as tensors instead of synchronising.
    _step_supports_amp_scaling = True
    _moments = 2
    _kinds: tuple[str, ...] = ("fp32", "8bit", "fp8", "4bit")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Args:
            param_group: ``"params"``, and options that differ from those of the constructor.

        Raises:
            ArgumentError: An option is out of range.
        """
        check_options({**self.defaults, **param_group}, self._kinds)
        super().add_param_group(param_group)
        try:
            if self.param_groups[-1].get("offload"):
                for p in self.param_groups[-1]["params"]:
                    offload.check(p)
        except ArgumentError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        offload.settle(self.param_groups)
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of an optimizer that was pickled before there was the option
            group.setdefault("offload", False)
            self._mark(group["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or one of those that its documentation names.

        Args:
            state_dict: The result of ``state_dict()`` or ``export_state_dict()``. Options of groups come from it, also
                `state`, unless it has none. Moments are converted to what the group then says.

        Raises:
            ArgumentError: The state dict is from an optimizer with ``amsgrad`` or ``differentiable``, lacks a moment,
                or has codes or shards that cannot be converted.
        """
        for group in state_dict["param_groups"]:
            check_torchs_options(group, {})
        placed = [group.get("offload", False) for group in self.param_groups]
        offload.settle(self.param_groups)  # the state dict may have the tensors of this optimizer
        # torch casts state to the parameter's dtype, which would discard the low bits of moments and master weights. It
        # also copies state to the parameter's device, which may lack the room if states are offloaded.
        super().load_state_dict({**state_dict, "state": {}} if any(placed) else state_dict)
        for group, offloads in zip(self.param_groups, placed, strict=True):
            group["offload"] = offloads  # a choice of this process, not of the one that saved
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            check_options(group, self._kinds)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for i, p in zip(saved, mine, strict=True):
            state = state_dict["state"].get(i)
            if not state:
                continue
            if "max_exp_avg_sq" in state:
                raise ArgumentError("the state dict is of an optimizer with amsgrad, which this one does not have")
            if "step" not in state and self._moments > 1:
                raise ArgumentError(f"the state of a parameter has {', '.join(map(str, state))}; expected step, too")
            step = torch.as_tensor(state.get("step", 0), dtype=torch.float32, device=p.device).clone().reshape(())
            found = moments.loaded(p, state, groups[p]["state"], self._moments)
            if "master" in state and p.dtype != torch.float32:
                found["master"] = moments.copied(p, state["master"])
            self.state[p] = {"step": step, **self._placed(p, found, groups[p])}
        self._mark(mine)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as ``torch.optim.Optimizer.state_dict`` does.

        Step counts of parameters with codes of ``state="8bit"`` are Python numbers, as in bitsandbytes, which waits for
        the device. With offloaded states it waits for the device, too.
        """
        offload.settle(self.param_groups)
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
            check_options(group, self._kinds)
            self._step_group(group)
            self._mark(p for p in group["params"] if p.grad is not None)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        lr = group["lr"]
        offload.refuse_capture(group)
        for device, lists in self._lists(group).items():
            scalars = (_moved(lr if isinstance(lr, Tensor) else None, device),
                       _moved(grad_scale, device), _moved(found_inf, device))  # fmt: skip
            rate = 0.0 if isinstance(lr, Tensor) else float(lr)
            for (plain, *_, offloaded), one in lists.items():
                if not offloaded:
                    self._launch(plain, one, scalars, rate, group)
                    continue
                launch = partial(self._launch, plain, scalars=scalars, lr=rate, group=group)
                offload.Offloaded(one, group["state"], launch).run(self._origin_from)

    def _launch(
        self, plain: bool, lists: Lists, scalars: tuple[Tensor | None, ...], lr: float, group: dict[str, Any]
    ) -> None:
        """Call the operator.

        Args:
            plain: Whether moments and weights are fp32.
            lists: Weights, gradients, first and second moments, step counts, origins, scales of both, copies.
            scalars: Tensors of the learning rate, of the scale of gradients, and whether to skip the step, or None.
            lr: The learning rate unless it is a tensor.
            group: The other options.
        """
        raise NotImplementedError

    def _lists(self, group: dict[str, Any]) -> dict[torch.device, dict[tuple, Lists]]:
        """Return, by device, lists for the operators, by what must be the same for all parameters of a list.

        The first item of a key says that moments and weights are fp32: parameters, or masters.
        """
        found: dict[torch.device, dict[tuple, Lists]] = {}
        kind, with_masters = group["state"], group["master"]
        names, scales = moments.NAMES[kind][: self._moments], moments.SCALES.get(kind, ())
        for p in group["params"]:
            grad = p.grad
            if grad is None:
                continue
            state, full = self.state[p], p.dtype == torch.float32
            if not state or (not full and with_masters and "master" not in state):
                self._start(p, state, group)
            master = self._renew(p, state["master"]) if with_masters and "master" in state else None
            coded = moments.is_coded(p, kind)
            if names[0] not in state or (coded and scales[0] not in state):
                raise ArgumentError(
                    f"state is {kind!r}, and a parameter has {', '.join(state)}; expected moments of this kind: "
                    "load_state_dict converts them"
                )
            if group["stochastic"] and p.dtype == torch.float16:
                raise ArgumentError("stochastic is True, and a parameter is float16; expected bfloat16 or float32")
            offloaded = offload.is_offloaded(p, group)
            key = (not coded and (full or master is not None), coded, master is not None, offloaded)
            device = p.device
            of_device = found.get(device)
            if of_device is None:
                of_device = found[device] = {}
            lists = of_device.get(key)
            if lists is None:
                lists = of_device[key] = tuple([] for _ in range(9))
            mine, kept = p, state
            if is_sharded(p):
                mine, grad, kept = local(p), _like_parameter(grad, p), moments.of_shard(p, state, kind, self._moments)
                master = None if master is None else local(master)
                torch.autograd.graph.increment_version(p)  # the operator sees only the shard
            lists[0].append(mine if master is None else master)
            lists[1].append(grad)
            lists[4].append(state["step"])
            if not key[0] or self._moments == 1:
                lists[5].append(self._origin(p))
            for i, name in enumerate(names):
                lists[2 + i].append(kept[name])
                if coded:
                    lists[6 + i].append(kept[scales[i]])
            if master is not None:
                lists[8].append(mine)
        return found

    def _mark(self, params: Iterable[Tensor]) -> None:
        """Remember parameters as they are now that master weights were written or loaded."""
        marks = self.__dict__.setdefault("_marks", WeakTensorKeyDictionary())
        marks.update((p, masters.mark(p)) for p in params if "master" in self.state.get(p, ()))

    def _renew(self, p: Tensor, master: Tensor) -> Tensor:
        """Return the master weights of a parameter, with what was written to it since then."""
        known = self.__dict__.get("_marks", {}).get(p)
        if known is not None and known != masters.mark(p):
            masters.take_over_(master, p)
        return master

    def _origin(self, p: Tensor) -> Tensor:
        """Return the parameter's place among the random numbers."""
        known = self.__dict__.setdefault("_origins", {})
        if p not in known:
            order = [q for group in self.param_groups for q in group["params"]]
            known |= {q: moments.origin(q, i) for i, q in enumerate(order) if q not in known}
        return known[p]

    def _origin_from(self, origin: Tensor, begin: int) -> Tensor:
        """Return the place of a parameter's elements from a given one on."""
        if begin == 0:
            return origin
        known = self.__dict__.setdefault("_origins_of_slices", {})
        if (key := (origin, begin)) not in known:
            known[key] = origin.clone()
            known[key][1] += begin
        return known[key]

    def _placed(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
        """Return a state, all but its step count, where the group keeps it."""
        if not offload.is_offloaded(p, group):
            return state
        return {name: offload.on_host(value) for name, value in state.items()}

    def _start(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dtype not in FLOAT_DTYPES or p.layout != torch.strided:
            raise ArgumentError(f"a parameter is {p.dtype}, {p.layout}; expected dense bfloat16, float16 or float32")
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state |= self._placed(p, moments.start(p, group["state"], self._moments), group)
        if p.dtype != torch.float32 and group["master"]:
            state |= self._placed(p, {"master": p.detach().float()}, group)


def _like_parameter(grad: Tensor, p: Any) -> Tensor:
    """Return this process's shard of a gradient, after summing the partial gradients of several processes."""
    return local(grad if grad.placements == p.placements else grad.redistribute(placements=p.placements))


def _moved(number: Tensor | None, device: torch.device) -> Tensor | None:
    return None if number is None else number.to(device, torch.float32, non_blocking=True)
