"""``@public``: what every public function does beside its own work.

Arrays of other libraries are converted (``interop.py``), results go to `out` if the caller gives one (``out.py``), a
call like a recent one is replayed (``recent.py``), and errors name an argument of the caller (``explained.py``). A
public function is its docstring, its checks and its operators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from textwrap import indent
from types import FunctionType
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from rtkernels import interop
from rtkernels.runtime.call.explained import explainer
from rtkernels.runtime.call.out import refuse_any_tangent, with_out
from rtkernels.runtime.call.recent import Recent, miss
from rtkernels.runtime.checks import check_dtype, check_tensor, refuse_shape
from rtkernels.runtime.depends import MISS
from rtkernels.runtime.operator.arguments import Among, Matching, Within, check_kind, refuse_option
from rtkernels.runtime.operator.autograd import refuse_gradients
from rtkernels.runtime.operator.sharding import is_sharded
from rtkernels.runtime.operator.written import generated
from rtkernels.runtime.torch_private import TENSOR_TYPES, dispatch_modes, forward_ad, is_dynamo_compiling

F = TypeVar("F", bound=Callable[..., Any])


def _by_position(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose keyword-only arguments can be passed by position.

    Python passes more than 14 keywords as a dict, which costs as much as the rest of the way to an operator.
    """
    code = function.__code__
    code = code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0)
    return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def _checks(
    parameters: Mapping[str, inspect.Parameter], tensors: str, options: Mapping[str, Among | Matching | Within]
) -> tuple[list[str], dict[str, Any]]:
    """Return the lines that check declared arguments, and the objects that they refer to."""
    scope = {"_check_tensor": check_tensor, "_check_kind": check_kind, "_refuse_option": refuse_option,
             "_check_dtype": check_dtype, "_refuse_shape": refuse_shape}  # fmt: skip
    lines: list[str] = []
    first = next(iter(parameters))  # is a tensor by now
    listed = [name for name, option in options.items() if isinstance(option, Matching) and name != first]
    for name in dict.fromkeys((*tensors.split(), *listed)):
        given = f"{name} is not None and " if parameters[name].default is None else ""
        lines += [f"if {given}not isinstance({name}, Tensor):", f"    _check_tensor({name!r}, {name})"]
    for name, option in options.items():
        given = f"{name} is not None and " if parameters[name].default is None else ""
        refusal = f"    _refuse_option({name!r}, {name}, {option.wanted!r})"
        if isinstance(option, Matching):
            scope[f"_dtypes_of_{name}"] = option.dtypes
            if option.dtypes:
                lines += [f"if {given}{name}.dtype not in _dtypes_of_{name}:"]
                lines += [f"    _check_dtype({name!r}, {name}.dtype, _dtypes_of_{name})"]
            if option.condition:
                lines += [f"if {given}not ({option.condition}):"]
                lines += [f"    _refuse_shape({name!r}, {name}.shape, {option.wanted!r})"]
        elif isinstance(option, Among):
            scope[f"_values_of_{name}"] = option.values
            lines += [f"if {name} not in _values_of_{name}:", refusal]
        else:
            lines += [f"if {given}type({name}) is not {option.kind}:"]
            lines += [f"    _check_kind({name!r}, {option.kind!r}, {name})"]
            lines += [f"if {given}not ({option.condition}):", refusal] if option.condition else []
    return lines, scope


@overload
def public(function: F) -> F: ...
@overload
def public(**declared: Any) -> Callable[[F], F]: ...
def public(
    function: Any = None, *, own_out: bool = False, over: str = "", recent: bool = True, tensors: str = "",
    options: Mapping[str, Among | Matching | Within] | None = None, defaults: Mapping[str, float] | None = None,
    no_gradients: str = "", sharded: tuple[str, Callable[..., Any]] = ("", miss),
) -> Any:  # fmt: skip
    """Make a function public.

    Args:
        function: Its results follow from the metadata of tensors, from its other arguments, and from what the
            dispatcher sees. An argument called `out` is always None when it is called, unless it has `own_out`.
        own_out: Its operators write to `out` themselves, because `out` is also read or may have other strides.
        over: Names of arguments that `out` may be.
        recent: Replay recent calls. False for functions of lists of tensors, which are found by their tables, and where
            host time does not count.
        tensors: Names of arguments that must be tensors, or None if that is their default; checked before the call.
        options: What is checked of arguments, by name.
        defaults: Numbers for which None stands, where they depend on nothing else. As default values of the function,
            they would become symbolic under ``torch.compile(dynamic=True)``.
        no_gradients: Names of arguments that must not need a gradient, because there is no backward.
        sharded: Names of arguments that may be DTensors, and what is called then with all arguments but `out` by name.
    """
    if function is None:
        declared = {"own_out": own_out, "over": over, "recent": recent, "tensors": tensors, "options": options,
                    "defaults": defaults, "no_gradients": no_gradients, "sharded": sharded}  # fmt: skip
        return functools.partial(public, **declared)
    parameters = inspect.signature(function).parameters
    listed = []
    for name, p in parameters.items():
        if p.kind is p.KEYWORD_ONLY and "*" not in listed:
            listed.append("*")
        listed.append(name)
    names, by_name = ", ".join(parameters), "{" + ", ".join(f"{name!r}: {name}" for name in parameters) + "}"
    first = next(iter(parameters))
    is_array = f"not isinstance({first}, Tensor)"
    annotation = str(parameters[first].annotation)
    if "int" in annotation.split(" | "):  # Dynamo cannot ask a symbolic integer for its attributes
        is_array = f"not isinstance({first}, (Tensor, int))"
    if annotation.split(" | ")[0] != "Tensor":
        is_array += f" and hasattr({first}, '__dlpack__')"
    elif annotation != "Tensor":
        is_array += f" and not isinstance({first}, {'(tuple, list)' if 'Sequence' in annotation else 'tuple'})"
    # While autograd records a call, there is nothing to replay: it is not compared with recent calls, and the next one
    # not even with the last.
    required = [n for n, p in parameters.items() if p.default is p.empty and str(p.annotation).startswith("Tensor")]
    wants_grad = " or ".join(f"(type({name}) in _TENSOR_TYPES and {name}.requires_grad)" for name in required[:2])
    tangents = f"_refuse_tangents({function.__name__!r}, {by_name})"
    replay = f"""\
        if not _is_dynamo_compiling():
            if _forward_ad._current_level >= 0:
                {tangents}
            elif not _dispatch_modes():
                if _last is not _miss:
                    _result = _last({names})
                    if _result is not _MISS:
                        return _result
                if not ({wants_grad or "False"}) or not _is_grad_enabled():
                    return _find({names})
                _last = _miss
"""
    if not recent:
        replay = f"""\
        if _forward_ad._current_level >= 0 and not _is_dynamo_compiling():
            {tangents}
"""
    call = [] if annotation == "int" else [f"if {is_array}:", f"    return _with_arrays(_public, {by_name})"]
    checks, objects = _checks(parameters, tensors, options or {})
    call += checks
    if sharded[0]:
        sharded[1].__name__ = function.__name__  # for messages
        given = ", ".join(f"{name}={name}" for name in parameters if name != "out")
        call += [f"if {' or '.join(f'_is_sharded({name})' for name in sharded[0].split())}:"]
        call += ["    if out is None:", f"        return _of_shards({given})"]
        call += [f"    return _with_out(_of_shards, {by_name}, _over)"]
    for name, value in (defaults or {}).items():
        call += [f"if {name} is None:", f"    {name} = {value!r}"]
    if "out" in parameters and not own_out:
        call += ["if out is not None:", f"    return _with_out(_function, {by_name}, _over)"]
    if no_gradients:
        call.append(f"_refuse_gradients({function.__name__!r}, ({', '.join(no_gradients.split())},))")
    call.append(f"return _by_position({names})")
    body = "\n".join(call)
    first_lines = replay + indent(body, " " * 8)
    source = f"""
def {function.__name__}({", ".join(listed)}):
    global _last
    try:
{first_lines}
    except Exception as _error:
        _explain(_error, {by_name})
        raise

def _call({names}):
{indent(body, " " * 4)}
"""
    scope: dict[str, Any] = {  # without a __name__: Dynamo would import it
        "Tensor": Tensor, "_TENSOR_TYPES": TENSOR_TYPES, "_MISS": MISS, "_function": function, "_last": miss,
        "_by_position": _by_position(function), "_refuse_tangents": refuse_any_tangent,
        "_miss": miss, "_over": over.split(), "_explain": explainer(function),
        "_is_dynamo_compiling": is_dynamo_compiling, "_refuse_gradients": refuse_gradients,
        "_forward_ad": forward_ad, "_dispatch_modes": dispatch_modes, "_is_grad_enabled": torch.is_grad_enabled,
        "_with_out": with_out, "_with_arrays": interop.with_arrays,
        "_is_sharded": is_sharded, "_of_shards": sharded[1], **objects,
    }  # fmt: skip
    generated(source, f"<rtkernels public {function.__name__}>", scope)
    result = scope["_public"] = functools.wraps(function)(scope[function.__name__])
    result.__defaults__, result.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    if recent:
        result.recent = Recent(function.__name__, scope, [*parameters], required[:2], tuple(over.split()))
        scope["_find"] = result.recent.find
    return result
