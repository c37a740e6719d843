"""Operators as torch sees them, with device code, a reference and a fake, and the fastest way to call them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from rtkernels import emulator
from rtkernels.errors import KernelCompileError, NotWarmError, ToolkitError, UnsupportedDeviceError
from rtkernels.runtime import env
from rtkernels.runtime.depends import option_code
from rtkernels.runtime.launch.device import emulate_features
from rtkernels.runtime.launch.memory import call_state
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.launch.tables import TensorList
from rtkernels.runtime.operator.arguments import ArgumentTypes
from rtkernels.runtime.operator.autograd import refuse_tangents
from rtkernels.runtime.operator.plan import Plan, Steps
from rtkernels.runtime.operator.sharding import register_rules
from rtkernels.runtime.operator.written import generated
from rtkernels.runtime.torch_private import (
    TENSOR_TYPES,
    dispatch_modes,
    forward_ad,
    functorch_transform,
    is_dynamo_compiling,
    same_tensors,
)

_LIBRARY = torch.library.Library("rtkernels", "FRAGMENT")
CANNOT_LAUNCH = (ToolkitError, UnsupportedDeviceError, KernelCompileError, NotWarmError)
# Exceptions that a non-numeric option can raise when it is hashed, compared, used for planning or packed for a launch.
_NOT_A_NUMBER = (TypeError, ValueError, LookupError, AttributeError, struct.error)
_FIRST_TRIED = 4  # recent calls that are compared before a look-up, because layers of different shapes alternate
_fell_back: set[str] = set()


def last_with(
    calls: tuple[Any, ...], matches: Callable[..., bool], run: Callable[..., Any], options: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the recent calls of an operator with a new one in front: comparison, plan and options of each."""
    return (matches, run, options), *[call for call in calls if call[1] is not run][: _FIRST_TRIED - 1]


class TorchOp:
    """One ``torch.ops.rtkernels.<name>``: device code for CUDA tensors, plain torch for CPU tensors, shapes for fakes.

    Calling it skips the dispatcher if only the launcher needs to see the call. It records no gradient; the
    ``autograd.Function`` around it does. A call that matches one of the last few runs its plan, found by one comparison
    in C++. This also serves calls that autograd records, which are not replayed as a whole.

    Args:
        schema: ``"name(Tensor x, float eps) -> Tensor"``; the first argument is a tensor, or a list of tensors on one
            device (an empty one runs the reference).
        reference: Computes the same in plain torch, on any device.
        fake: Computes the same for tensors without data.
        launch: Runs device code on CUDA tensors, or on CPU tensors while emulating.
        plan: Instead of `launch`, for ops whose host time matters: returns a ``Plan``, or None if the strides of a
            tensor are unsupported. It may depend on the metadata of tensors, on whether their addresses are multiples
            of 16, and on the other arguments: a call that matches a recent one in all of these runs the same plan.
        copied: With `plan`: returns the arguments with such tensors copied.
    """

    by_overload: ClassVar[dict[Any, TorchOp]] = {}
    _numbers: Sequence[str] = ()  # arguments that no plan depends on; ``run`` takes them after the addresses
    _number_places: Sequence[int] = ()
    _written: Sequence[str] = ()  # arguments that are overwritten

    def __init__(
        self,
        schema: str,
        *,
        reference: Callable,
        fake: Callable,
        launch: Callable | None = None,
        plan: Callable[..., Plan | None] | None = None,
        copied: Callable[..., tuple[Any, ...]] | None = None,
    ) -> None:
        self.name = schema.split("(", 1)[0]
        self.schema = schema
        self.launch = launch or self._launch_planned
        self._plan, self._copied = plan, copied
        self.reference = reference
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        _LIBRARY.impl(self.name, self._run_cuda, "CUDA")
        _LIBRARY.impl(self.name, self._run_cpu, "CPU")
        torch.library.register_fake(f"rtkernels::{self.name}", fake, lib=_LIBRARY)
        self.overload = getattr(torch.ops.rtkernels, self.name).default
        self.by_overload[self.overload] = self
        arguments = self.overload._schema.arguments
        self._tensors = [i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
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
        first, empty = arguments[0].name, ""
        if str(arguments[0].type) == "List[Tensor]":
            # Without a tensor there is no device by which the dispatcher could choose.
            empty = f"    if not {first}:\n        return reference({names})\n"
            first += "[0]"
        # Lazy negatives and conjugates, whose memory holds other values, go to the dispatcher, which copies them. Plans
        # on a GPU and the tables of lists check for them themselves.
        resolved = f"not ({' or '.join(lazy)})" if lazy else "True"
        globals_, launch, on_gpu = "", "launch", resolved
        first_lines, more = self._first_lines()
        if self._plan is not None:
            launch, on_gpu = "run_and_keep", "True"
            globals_ = "    global last_calls\n"
        source = f"""
def call({names}):
{globals_}{first_lines}{empty}\
{self._refusal()}\
    if {" and ".join(plain)} and not dispatch_modes() and functorch_transform() is None:
        if {first}.is_cuda and {on_gpu}:
            try:
                return {launch}({names})
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
"""
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
            "run_and_keep": lambda *args: self._run_and_keep(scope, args),
            "increment_version": torch.autograd.graph.increment_version,
            "last_with": last_with,
            **more,
        }
        if self._plan is not None:
            scope["last_calls"] = ()
            Plans.replays.append(lambda: scope.update(last_calls=()))
            options = [self._option(a) for i, a in enumerate(arguments) if i not in self._tensors]
            source += f"\ndef options_of({names}):\n    return ({''.join(f'{option}, ' for option in options)})\n"
        return generated(source, f"<rtkernels {self.name}>", scope)["call"]

    def _option(self, argument: Any) -> str:
        """Return the expression of an option in comparisons with recent calls; plans do not depend on numbers."""
        return argument.name if argument.name in self._numbers else option_code(argument.name, str(argument.type))

    def _refusal(self) -> str:
        """Return the lines of ``call`` that refuse tensors with tangents of forward-mode differentiation."""
        tensors = [argument for argument in self.overload._schema.arguments if "Tensor" in str(argument.type)]
        given = ", ".join("*" * ("List" in str(argument.type)) + argument.name for argument in tensors)
        return f"""\
    if forward_ad._current_level >= 0 and not is_dynamo_compiling():
        refuse_tangents({self.name!r}, [{given}])
"""

    def _first_lines(self) -> tuple[str, dict[str, Any]]:
        """Return the lines with which ``call`` begins, and the objects that they refer to."""
        return self._replay_lines() if self._plan is not None else "", {}

    def _replay_lines(self) -> str:
        """Return the lines of ``call`` that run the plan of a matching recent call."""
        tensors, options, addresses = [], [], []
        for i, argument in enumerate(self.overload._schema.arguments):
            name = argument.name
            if i not in self._tensors:
                options.append(self._option(argument))
                continue
            tensors.append(name)
            absent = "" if str(argument.type) == "Tensor" else f"0 if {name} is None else "
            addresses.append(f"{absent}{name}.data_ptr()")
        pointers = [f"pointer_{i}" for i in range(len(addresses))]
        run = f"return run({', '.join([*pointers, *self._numbers])})"
        if self._written:
            counted = "; ".join(
                f"{name} is None or {name}.is_inference() or increment_version({name})" for name in self._written
            )
            run = f"returned = {run.removeprefix('return ')}; {counted}; return returned"
        assign = "".join(f"                {p} = {a}\n" for p, a in zip(pointers, addresses, strict=True))
        same = f" and options == ({', '.join(options)},)" if options else ""
        return f"""\
    if not is_dynamo_compiling() and forward_ad._current_level < 0 and not dispatch_modes():
        calls = last_calls
        for one in calls:
            matches, run, options = one
            if matches({", ".join(tensors)}){same}:
{assign}\
                if not ({" | ".join(pointers)}) & 15:
                    if one is not calls[0] and calls is last_calls:
                        last_calls = last_with(calls, *one)
                    {run}
"""

    def _planned(self, args: tuple[Any, ...], plan: Plan | None = None) -> tuple[Plan, tuple[Any, ...]]:
        """Return the plan of a call and the arguments that it runs with. `plan`: the plan, if already known."""
        plan = plan or self._plan(*args)
        if plan is None:
            args = self._copied(*args)
            plan = self._plan(*args)
        return plan, args

    def _addresses(self, args: tuple[Any, ...]) -> list[int]:
        return [0 if args[i] is None else args[i].data_ptr() for i in self._tensors]

    def _launch_planned(self, *args: Any) -> Any:
        plan, args = self._planned(args)
        return plan.run(*self._addresses(args))

    def _run_and_keep(self, scope: dict[str, Any], args: tuple[Any, ...], plan: Plan | None = None) -> Any:
        plan, used = self._planned(args, plan)
        if type(plan) is Steps:  # nothing to replay
            return self._launch_resolved(args) if self._lazy(args) else self._run_planned(plan, used, args)
        addresses = self._addresses(used)
        if used is args and not any(address & 15 for address in addresses):
            given = [args[i] for i in self._tensors]
            if plan.matches is None or not plan.matches(*given):  # or created in inference mode
                if self._lazy(args):
                    return self._launch_resolved(args)
                there = [tensor for tensor in given if tensor is not None]
                if len(set(map(id, there))) < len(there):  # the comparison needs distinct tensors
                    results = plan.run(*addresses, *[args[i] for i in self._number_places])
                    self._count_versions(args)
                    return results
                plan.matches = same_tensors(given)
            options = scope["options_of"](*args)
            # A single assignment, so that other threads see all of it or nothing.
            scope["last_calls"] = last_with(scope["last_calls"], plan.matches, plan.run, options)
        elif self._lazy(args):
            return self._launch_resolved(args)
        if used is not args and self._written:
            return self._run_planned(plan, used, args)  # writes copies back
        results = plan.run(*addresses, *[args[i] for i in self._number_places])
        self._count_versions(args)
        return results

    def _count_versions(self, args: tuple[Any, ...]) -> None:
        """Tell autograd which tensors were overwritten, so that a backward that saved one raises."""

    def _lazy(self, args: tuple[Any, ...]) -> bool:
        """Return True if a tensor is a lazy negative (``z.conj().imag``) or a lazy conjugate."""
        return any(args[i] is not None and (args[i].is_neg() or args[i].is_conj()) for i in self._tensors)

    def _launch_resolved(self, args: tuple[Any, ...]) -> Any:
        if self._written:
            self._check_types(*args)
        return self._launch_planned(
            *(a.resolve_neg().resolve_conj() if isinstance(a, torch.Tensor) else a for a in args)
        )

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
            if torch.is_autocast_enabled("cpu"):  # autocast would round matrix products
                with torch.autocast("cpu", enabled=False):
                    return self.reference(*args)
            return self.reference(*args)
        with emulator.lock:
            emulate_features(features)
            with emulator.recording():
                return self.launch(*args)
