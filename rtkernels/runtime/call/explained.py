"""Public functions whose errors name an argument of the caller.

What cannot be an argument is noticed far inside: by a launch, by the dispatcher, by torch, and
under a name that the caller never saw. Looking at every argument first would cost each call; so a function is called as
it is, and only if it fails are its arguments compared with its annotations. An error that no argument explains stays as
it is.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral, Real
from types import TracebackType
from typing import Any

import numpy
import torch
from torch import Tensor

from rtkernels.errors import ArgumentError, RtkError
from rtkernels.runtime.torch_private import is_dynamo_compiling

_INT64 = range(-(2**63), 2**63)
_FLOAT_MAX = torch.finfo(torch.float32).max
_WANTED = {
    "Tensor": "a torch.Tensor", "float": "a number", "int": "an integer", "bool": "True or False", "str": "a string",
    "torch.dtype": "a torch.dtype", "torch.device": "a torch.device", "None": "None", "Tensors": "a list of tensors",
    "Quant": "an rtkernels.Quant", "MoeIndex": "an rtkernels.MoeIndex", "a device's name": "its name",
}  # fmt: skip


def explainer(function: Callable[..., Any]) -> Callable[[Exception, dict[str, Any]], None]:
    """Return what a public function calls with an error and its arguments, before the error is raised again."""
    parameters = inspect.signature(function).parameters
    return functools.partial(_explain, function.__name__, parameters)


def _is_inside_another() -> bool:
    """Return True if one public function called another: the outer one knows the caller's arguments."""
    frame = sys._getframe(3)  # beyond the function that failed
    while frame is not None:
        if frame.f_code.co_filename.startswith("<rtkernels public "):
            return True
        frame = frame.f_back
    return False


def names_one_of(message: str, names: Sequence[str]) -> bool:
    """Return whether a message is about one of some arguments; ``a`` is one only where it is not an article."""
    long = [re.escape(name) for name in names if len(name) > 1]
    short = [re.escape(name) for name in names if len(name) == 1]
    if long and re.search(rf"\b({'|'.join(long)})\b", message):
        return True
    one = "|".join(short)
    where = rf"^({one})\b|\b({one})(\[| is\b| has\b| and\b|,|;|$)|\b(of|with|for) ({one})\b"
    return bool(short and re.search(where, message))


def _explain(function: str, parameters: Any, error: Exception, arguments: dict[str, Any]) -> None:
    """Raise an ArgumentError that names an argument, if one is to blame for an error that names none."""
    if is_dynamo_compiling():  # which raises the error to the user's code as it is
        return
    if _is_inside_another() or (isinstance(error, RtkError) and not isinstance(error, ArgumentError)):
        return
    if isinstance(error, ArgumentError) and names_one_of(str(error), [*arguments]):
        return
    for name, value in arguments.items():
        if problem := _problem(name, value, parameters[name].annotation):
            raise ArgumentError(f"{function}: {problem}") from error
    if problem := _strange_tensor(arguments):
        raise ArgumentError(f"{function}: {problem}") from error
    if isinstance(error, ArgumentError):
        if renamed := _renamed(error, arguments):
            raise ArgumentError(renamed) from error
    elif problem := _absent_device(parameters, arguments) or _out_of_range(error, arguments):
        raise ArgumentError(f"{function}: {problem}") from error


# ---- one argument ---------------------------------------------------------------------------------------------------


def _problem(name: str, value: Any, annotation: Any) -> str | None:
    """Return what is wrong with an argument of this annotation, None if nothing is or nobody can tell."""
    kinds = _kinds(str(annotation))
    if "torch.device" in kinds:
        kinds = ["a device's name" if kind == "str" else kind for kind in kinds]
    if "Any" in kinds:
        return _not_a_group(value) if name == "group" else None
    if any(_fits(value, kind) for kind in kinds):
        return None
    wanted = " or ".join(_WANTED.get(kind, _listed(kind)) for kind in kinds)
    return f"{name} is {_said(value)}; expected {wanted}"


def _kinds(annotation: str) -> list[str]:
    """Return the members of a union; those in brackets stay together."""
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(annotation):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "|" and depth == 0:
            parts.append(annotation[start:i].strip())
            start = i + 1
    return [*parts, annotation[start:].strip()]


def _fits(value: Any, kind: str) -> bool:
    if kind == "None":
        return value is None
    if kind == "Tensor":
        return isinstance(value, Tensor) or hasattr(value, "__dlpack__")
    if kind == "bool":
        return isinstance(value, (bool, numpy.bool_, torch.SymBool)) or (type(value) is int and value in (0, 1))
    if kind == "float":
        if isinstance(value, Integral) and not abs(int(value)) < 2**63:
            return False
        return isinstance(value, (Real, torch.SymFloat, torch.SymInt))
    if kind == "int":
        return isinstance(value, torch.SymInt) or (isinstance(value, Integral) and int(value) in _INT64)
    if kind == "str":
        return isinstance(value, str)
    if kind == "a device's name":
        return isinstance(value, str) and _is_device(value)
    if kind == "torch.dtype":
        return isinstance(value, torch.dtype)
    if kind == "torch.device":
        return isinstance(value, torch.device) or (type(value) in (str, int) and _is_device(value))
    if kind == "Tensors":
        return type(value).__name__ == "TensorList" or _is_list_of(value, ["Tensor"])
    head, _, inner = kind.partition("[")
    if head == "Literal":
        return isinstance(value, (str, int)) and value in ast.literal_eval(f"({inner[:-1]},)")
    if head in ("tuple", "list", "Sequence"):
        members = _split(inner[:-1])
        if head == "tuple" and members[-1] != "..." and isinstance(value, (tuple, list)):
            return len(value) == len(members) and all(
                any(_fits(item, k) for k in _kinds(member)) for item, member in zip(value, members, strict=True)
            )
        return _is_list_of(value, _kinds(members[0]))
    return any(kind == base.__name__ for base in type(value).__mro__)


def _is_device(value: str | int) -> bool:
    try:
        torch.device(value)
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


def _absent_device(parameters: Any, arguments: dict[str, Any]) -> str | None:
    """Return which argument names a device that torch does not see."""
    for name, value in arguments.items():
        if value is None or "torch.device" not in _kinds(str(parameters[name].annotation)):
            continue
        device, count = torch.device(value), torch.cuda.device_count()
        if device.type == "cuda" and (device.index or 0) >= count:
            seen = f"one of the {count} CUDA devices that torch sees" if count else "another: torch sees no CUDA device"
            return f"{name} is {device}; expected {seen}"
        if device.type not in ("cuda", "cpu", "meta"):
            return f"{name} is {device}; expected a CUDA device, cpu or meta"
    return None


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _is_list_of(value: Any, kinds: list[str]) -> bool:
    return isinstance(value, (tuple, list)) and all(any(_fits(item, kind) for kind in kinds) for item in value)


def _listed(kind: str) -> str:
    head, _, inner = kind.partition("[")
    if not inner:
        return f"an rtkernels {kind}"
    if head == "Literal":
        return " or ".join(_split(inner[:-1]))
    members = [member for member in _split(inner[:-1]) if member != "..."]
    wanted = ", ".join(" or ".join(_WANTED.get(kind, kind) for kind in _kinds(member)) for member in members)
    return f"a {'list' if head == 'Sequence' else head} of {wanted}"


def _said(value: Any) -> str:
    plain = value is None or isinstance(value, (str, bytes, complex, int, float, torch.dtype))
    if isinstance(value, int) and value not in _INT64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value) if plain else f"a {type(value).__name__}"


def _not_a_group(value: Any) -> str | None:
    group = getattr(torch.distributed, "ProcessGroup", None)
    if value is None or (group is not None and isinstance(value, group)) or hasattr(value, "allreduce"):
        return None
    return f"group is {_said(value)}; expected a torch.distributed.ProcessGroup or None"


# ---- tensors --------------------------------------------------------------------------------------------------------


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (tuple, list)):
            yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, Tensor))


def _strange_tensor(arguments: dict[str, Any]) -> str | None:
    """Return which tensor has no memory as kernels know it, or is elsewhere than the first one."""
    where = of = None
    for name, tensor in _tensors(arguments):
        if tensor.layout is not torch.strided:
            return f"{name} has layout {str(tensor.layout).removeprefix('torch.')}; expected a dense (strided) tensor"
        if tensor.is_quantized:
            return f"{name} is a quantized tensor of torch; expected a plain one"
        if where is not None and tensor.device != where:
            return f"{name} is on {tensor.device}; expected {where}, that of {of}"
        where, of = tensor.device, name
    return None


def _out_of_range(error: Exception, arguments: dict[str, Any]) -> str | None:
    """Return which number, or tensor without dimensions, torch could do nothing with."""
    if isinstance(error, IndexError):
        for name, tensor in _tensors(arguments):
            if tensor.dim() == 0:
                return f"{name} has no dimensions; expected at least one"
    for name, value in arguments.items():
        if isinstance(value, float) and _FLOAT_MAX < abs(value) < float("inf") and "overflow" in str(error):
            return f"{name} is {value}; expected a number of float32, which ends at {_FLOAT_MAX:.4g}"
    return None


def _renamed(error: Exception, arguments: dict[str, Any]) -> str | None:
    """Return the message of an error with the names of the caller's arguments, found by what frames had in hand."""
    names: dict[str, str] = {}
    message = str(error)
    words = set(re.findall(r"[A-Za-z_]\w*", message)) - {*arguments}
    frames = [*_locals(error.__traceback__)]
    # The function may have replaced an argument, by a copy or by a float32 one, under the name that it has.
    stages = [arguments, *(values for values in frames if {*arguments} <= {*values})]
    for values in frames:
        for word in words & {*values} - {*names}:
            value = values[word]
            same = [name for name in arguments if any(stage[name] is value is not None for stage in stages)]
            same = same or [name for name, tensor in _tensors(arguments) if _is_of(value, tensor)]
            if len(same) == 1 and (isinstance(value, Tensor) or message.startswith(word)):
                names[word] = same[0]
    if not names:
        return None
    return re.sub(rf"\b({'|'.join(names)})\b", lambda word: names[word[0]], message)


def _is_of(value: Any, tensor: Tensor) -> bool:
    """Return whether a value is a view of a tensor from its beginning."""
    if not isinstance(value, Tensor) or value.is_meta or tensor.is_meta:
        return False
    if value.numel() == 0:  # has no address
        return tensor.dtype == value.dtype and value.is_set_to(tensor)
    return value.data_ptr() == tensor.data_ptr()


def _locals(traceback: TracebackType | None) -> Iterator[dict[str, Any]]:
    """Yield what the frames of a traceback have by name, from the outermost on; operators name their arguments."""
    while traceback is not None:
        values = traceback.tb_frame.f_locals
        names = getattr(values.get("self"), "names", None)
        args = values.get("args")
        yield {**(dict(zip(names, args, strict=False)) if names and isinstance(args, tuple) else {}), **values}
        traceback = traceback.tb_next
