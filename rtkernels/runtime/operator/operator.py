"""Operators as torch sees them: device code, a reference and a fake. Plain calls skip the dispatcher."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from rtkernels import emulator
from rtkernels.errors import CANNOT_LAUNCH
from rtkernels.runtime import env
from rtkernels.runtime.launch.device import emulating
from rtkernels.runtime.launch.memory import call_state
from rtkernels.runtime.launch.tables import TensorList
from rtkernels.runtime.operator.arguments import ArgumentTypes
from rtkernels.runtime.operator.autograd import refuse_tangents
from rtkernels.runtime.operator.sharding import register_rules
from rtkernels.runtime.operator.written import generated
from rtkernels.runtime.torch_private import (
    TENSOR_TYPES,
    dispatch_modes,
    forward_ad,
    functorch_transform,
    is_dynamo_compiling,
    without_autocast,
)

_LIBRARY = torch.library.Library("rtkernels", "FRAGMENT")
# Exceptions that a non-numeric option can raise when it is hashed, compared, used for planning or packed for a launch.
_NOT_A_NUMBER = (TypeError, ValueError, LookupError, AttributeError, struct.error)
_fell_back: set[str] = set()


class TorchOp:
    """One ``torch.ops.rtkernels.<name>``: device code for CUDA tensors, plain torch for CPU tensors, shapes for fakes.

    Calling it skips the dispatcher if only the launcher needs to see the call. It records no gradient; the
    ``autograd.Function`` around it does.

    Args:
        schema: ``"name(Tensor x, float eps) -> Tensor"``; the first argument is a tensor, or a list of tensors on one
            device (an empty one runs the reference).
        reference: Computes the same in plain torch, on any device.
        fake: Computes the same for tensors without data.
        launch: Runs device code on CUDA tensors, or on CPU tensors while emulating.
    """

    by_overload: ClassVar[dict[Any, TorchOp]] = {}
    resolves_lazy = False  # ``launch`` takes lazy negatives and conjugates

    def __init__(
        self, schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any], launch: Callable[..., Any]
    ) -> None:
        self.name = schema.split("(", 1)[0]
        self.schema = schema
        self.launch = launch
        self.reference = reference
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        _LIBRARY.impl(self.name, self._run_cuda, "CUDA")
        _LIBRARY.impl(self.name, self._run_cpu, "CPU")
        torch.library.register_fake(f"rtkernels::{self.name}", fake, lib=_LIBRARY)
        self.overload = getattr(torch.ops.rtkernels, self.name).default
        self.by_overload[self.overload] = self
        self._check_types = ArgumentTypes(self.overload._schema).check
        self.call = self._make_call()

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def _make_call(self) -> Callable[..., Any]:
        """Return the function behind ``__call__``; public functions use it directly, which saves a Python call.

        It is generated from the schema, as named tuples are. Checks by name instead of loops over ``*args`` save a
        tenth of the host time of a small op.
        """
        arguments = self.overload._schema.arguments
        names = ", ".join(argument.name for argument in arguments)
        plain, lazy = ["not is_dynamo_compiling()"], []
        for argument in arguments:
            if str(argument.type) == "Tensor":
                plain.append(f"type({argument.name}) in TENSOR_TYPES")
                lazy.append(f"{argument.name}.is_neg() or {argument.name}.is_conj()")
            elif str(argument.type) == "Optional[Tensor]":
                plain.append(f"({argument.name} is None or type({argument.name}) in TENSOR_TYPES)")
                lazy.append(f"{argument.name} is not None and ({argument.name}.is_neg() or {argument.name}.is_conj())")
            elif str(argument.type) == "List[Tensor]":  # one C loop over the list, none over a TensorList
                name = argument.name
                plain.append(f"(type({name}) is TensorList or TENSOR_TYPES.issuperset(map(type, {name})))")
        given = ", ".join("*" * ("List" in str(a.type)) + a.name for a in arguments if "Tensor" in str(a.type))
        first, empty = arguments[0].name, ""
        if str(arguments[0].type) == "List[Tensor]":
            # Without a tensor there is no device by which the dispatcher could choose.
            empty = f"    if not {first}:\n        return reference({names})\n"
            first += "[0]"
        # Lazy negatives and conjugates, whose memory holds other values, go to the dispatcher, which copies them. Plans
        # on a GPU and the tables of lists check for them themselves.
        resolved = f"not ({' or '.join(lazy)})" if lazy else "True"
        first_lines, functions, more = self._short_cuts()
        source = f"""
def call({names}):
{first_lines}{empty}\
    if forward_ad._current_level >= 0 and not is_dynamo_compiling():
        refuse_tangents({self.name!r}, [{given}])
    if {" and ".join(plain)} and not dispatch_modes() and functorch_transform() is None:
        if {first}.is_cuda and {True if self.resolves_lazy else resolved}:
            try:
                return launch({names})
            except cannot_launch as error:
                return fall_back(error, ({names},))
            except not_a_number:
                check_types({names})
                raise
        if {first}.is_cpu and {resolved}:
            return run_cpu({names})
    if not is_dynamo_compiling():
        check_types({names})
        register_rules()
    return overload({names})
{functions}"""
        scope = {
            "TENSOR_TYPES": TENSOR_TYPES,
            "is_dynamo_compiling": is_dynamo_compiling,
            "dispatch_modes": dispatch_modes,
            "functorch_transform": functorch_transform,
            "forward_ad": forward_ad,
            "refuse_tangents": refuse_tangents,
            "cannot_launch": CANNOT_LAUNCH,
            "not_a_number": _NOT_A_NUMBER,
            "launch": self.launch,
            "fall_back": self._fall_back,
            "run_cpu": self._run_cpu,
            "reference": self.reference,
            "TensorList": TensorList,
            "check_types": self._check_types,
            "register_rules": register_rules,
            "overload": self.overload,
            **more,
        }
        return generated(source, f"<rtkernels {self.name}>", scope)["call"]

    def _short_cuts(self) -> tuple[str, str, dict[str, Any]]:
        """Return the lines with which ``call`` begins, functions beside it, and the objects that both refer to."""
        return "", "", {}

    def _run_cuda(self, *args: Any) -> Any:
        call_state.dispatched = True
        try:
            return self.launch(*args)
        except CANNOT_LAUNCH as error:
            return self._fall_back(error, args)
        finally:
            call_state.dispatched = False

    def _fall_back(self, error: Exception, args: tuple[Any, ...]) -> Any:
        """Run the reference if the user allows it, else raise."""
        if env.get("FALLBACK") != "torch":
            raise error
        if self.name not in _fell_back:
            _fell_back.add(self.name)
            env.logger().warning("%s runs as plain torch (RTKERNELS_FALLBACK=torch): %s", self.name, error)
        return self.reference(*args)

    def _run_cpu(self, *args: Any) -> Any:
        self._check_types(*args)
        features = emulator.active()
        if features is None:
            with without_autocast("cpu"):  # which would round matrix products
                return self.reference(*args)
        with emulating(features):
            return self.launch(*args)
