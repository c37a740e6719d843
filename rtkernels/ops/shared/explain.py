"""Which backend and kernels a call would run, and why, without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.backend import AUTO, Backends, in_words
from rtkernels.runtime import targets
from rtkernels.runtime.launch.device import DeviceInfo, device_info, shared_limit
from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.by_name import by_name
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.targets import Target

_SM_COUNTS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}  # A100, H200, B200
_SM_COUNT = 132  # of other targets


class Explanation(NamedTuple):
    """What a call would run.

    Attributes:
        backend: The name of the backend that runs it, or None if none can.
        summary: Its tile, where the backend tells. Without a backend: what runs instead, "" if the call raises.
        refused: Backends that come before it, and why they cannot.
        problem: The call as plain data: a ``Product``, an ``Attention`` or a ``Quantized``.
        after: Backends that come after it, which were not asked.
    """

    backend: str | None
    summary: str
    refused: dict[str, str]
    problem: Any
    after: tuple[str, ...] = ()

    @property
    def product(self) -> Any:
        """The problem of a matrix product."""
        return self.problem

    def __str__(self) -> str:
        reasons = f" ({in_words(self.refused)})" if self.refused else ""
        chosen = f"{self.backend or 'no backend'}{': ' + self.summary if self.summary else ''}"
        return f"{self.problem.title}: {chosen}{reasons}"


class _Reached(BaseException):
    """Ends a call at its first operator of ours; no ``except Exception`` on the way catches it."""

    def __init__(self, operator: TorchOp, args: tuple[Any, ...]) -> None:
        super().__init__(operator.name)
        self.operator, self.arguments = operator, args


class _UntilOurs(TorchDispatchMode):
    """Runs torch's operators, which only make views and small tensors here, up to the first one of ours."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in TorchOp.by_overload:
            raise _Reached(TorchOp.by_overload[func], args)
        return func(*args, **(kwargs or {}))


def explain(function: Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any) -> Explanation:
    """Return which kernels a call would run, and why not others; nothing is computed.

    ``print(rtkernels.explain(rtkernels.scaled_mm, a, b))`` says it in a line.

    Args:
        function: A matrix product (``scaled_mm``, ``gated_mm``, ``grouped_mm``, ``grouped_mm_masked``,
            ``grouped_wgrad``) or an attention (``attention``, ``attention_varlen``, ``mla_attention``, ``sdpa``,
            ``attention_quantized``).
        args: Those of the call. Tensors may be on the meta device.
        target: For which GPU, as "sm_90a" or "8.0". None: the one that has the tensors; "sm_90a" if none has.
        kwargs: Those of the call.

    Returns:
        An ``Explanation``: backend, tile, backends that come before it and why they cannot, backends that come after
        it, and the call as plain data.
    """
    family = _family(function)
    chosen = None if target is None else _info(targets.parse(target))
    bound = inspect.signature(function).bind(*args, **kwargs)
    if bound.arguments.get("backend") == "torch":
        raise ArgumentError("backend is 'torch', whose choice of kernels torch makes")
    operator, given = _first_operator(function, args, kwargs)
    if operator.name not in family.problems:
        raise ArgumentError(f"this call of {function.__name__} begins with {operator.name}, which has no backends")
    metas = _metas(operator, given)
    problem = by_name(family.problems[operator.name], operator.names)(*metas.values())
    if chosen is None:
        device = next(value.device for value in metas.values() if isinstance(value, Meta))
        chosen = device_info(device) if device >= 0 else _info(targets.parse("sm_90a"))
    choice = family.choose(problem, chosen, metas.get("backend", AUTO))
    if choice.backend is None:
        return Explanation(None, family.instead(problem, chosen), choice.refused, problem)
    summary = choice.backend.summary
    tile = "" if summary is None else summary(problem, chosen)
    if choice.options is not None:
        told = ", ".join(f"{name} {value}" for name, value in choice.options.items())
        tile = f"measured by rtkernels tune{', ' + told if told else ''}"
    return Explanation(choice.backend.name, tile, choice.refused, problem, choice.after)


def _family(function: Any) -> Backends[Any]:
    """Return the backends that a public function can use."""
    inner = inspect.unwrap(function) if callable(function) else None
    name = getattr(inner, "__name__", None)
    if getattr(inner, "__module__", "").startswith("rtkernels."):
        for family in Backends.known:
            if name in family.functions:
                return family
    registry.ops()  # every family is imported, and known
    names = ", ".join(name for family in Backends.known for name in family.functions)
    raise ArgumentError(f"function is {name or function!r}; expected one of {names}")


def _info(target: Target) -> DeviceInfo:
    """Return the properties of a GPU that is not present."""
    sm_count = _SM_COUNTS.get(target.capability, _SM_COUNT)
    return DeviceInfo(target.name, target, sm_count, shared_limit(target))


def _first_operator(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the first operator of ours that a call reaches, and its arguments."""
    try:
        with torch.no_grad(), _UntilOurs():
            function(*args, **kwargs)
    except _Reached as reached:
        return reached.operator, reached.arguments
    raise ArgumentError(f"this call of {function.__name__} reaches no kernel of rtkernels")


def _metas(operator: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments by name as plans see them: metadata of tensors, of copies where an operator makes one."""
    values = dict(zip(operator.names, args, strict=True))
    tensors = [argument for argument in operator.arguments if values[argument.name] is not None]
    values |= {argument.name: _meta(values[argument.name]) for argument in tensors}
    operator.check(*values.values())
    for argument in tensors:
        meta = values[argument.name]
        if not argument.fits(meta):
            given = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
            values[argument.name] = _meta(argument.copied(given))._replace(device=meta.device)
    return values


def _meta(t: Tensor) -> Meta:
    return Meta(t.dtype, t.shape, t.stride(), t.get_device(), 0 if t.is_meta else t.data_ptr() & 15)
