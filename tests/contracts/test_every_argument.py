"""Every argument of every public function, replaced by invalid values: an ArgumentError that names an argument.

The calls are those of ``test_dynamic_rows`` and ``test_process_state``, with every parameter of the signature in turn.
A function may accept a strange argument, but it must not raise any other error, or name something that its caller never
passed.
"""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.places import at, emulated
from torch import Tensor

import rtkernels
from contracts import test_dynamic_rows
from contracts.test_dynamic_rows import _inputs
from contracts.test_process_state import ALL
from rtkernels.errors import ArgumentError, RtkError
from rtkernels.runtime.call.explained import _problem, names_one_of
from rtkernels.runtime.call.public import public

ROWS = 6
FUNCTIONS = sorted({name.partition(",")[0] for name in ALL if hasattr(rtkernels, name.partition(",")[0])})
QUICK = ["rms_norm", "softmax", "quantize_nvfp4", "index_select", "topk_router", "rope", "glu", "quantize_fp8"]


class _Nothing:
    """An object without any meaning."""

    def __repr__(self) -> str:
        return "<nothing>"


def arguments_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a public function and all arguments of a valid call."""
    function, seen = getattr(rtkernels, name), []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return function(*args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(rtkernels, name, spy)
        patch.setattr(test_dynamic_rows, "COUNTS", torch.tensor([1, 0, 3, 2]))
        next(call for key, call in ALL.items() if key.partition(",")[0] == name)(*_inputs(ROWS))
    bound = inspect.signature(function).bind(*seen[0][0], **seen[0][1])
    bound.apply_defaults()
    return function, dict(bound.arguments)


def nonsense(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield replacements for an argument."""
    yield "a string", "nonsense"
    yield "an object", _Nothing()
    yield "a class", int
    yield "a list", [1.0, "a"]
    yield "an empty list", []
    yield "a dictionary", {"a": 1}
    yield "nothing", None
    yield "2^70", 2**70
    yield "-2^70", -(2**70)
    yield "-1", -1
    yield "0", 0
    yield "2", 2
    yield "1.5", 1.5
    yield "1e300", 1e300
    yield "nan", float("nan")
    yield "complex", 1j
    yield "a dtype", torch.int16
    yield "bytes", b"ab"
    like = value if isinstance(value, Tensor) else torch.ones(4, 8)
    yield "meta", torch.empty_like(like, device="meta")
    yield "sparse", torch.ones(like.shape if like.dim() else (1,)).to_sparse()
    yield "int16", torch.ones(like.shape, dtype=torch.int16)
    yield "complex tensor", torch.ones(like.shape, dtype=torch.complex64)
    yield "float64", torch.ones(like.shape, dtype=torch.float64)
    yield "bool", torch.ones(like.shape, dtype=torch.bool)
    yield "no dimensions", torch.ones((), dtype=like.dtype)
    yield "seven dimensions", torch.ones((1,) * 6 + (like.numel(),), dtype=torch.float32).to(like.dtype)
    yield "nothing in it", torch.ones((0, 4), dtype=torch.float32).to(like.dtype)
    yield "tensors", [torch.ones(3), None, 1]


NOT_TENSORS = {"a string", "an object", "a class", "a list", "an empty list", "a dictionary", "complex", "a dtype"}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value


def _accepts(parameter: inspect.Parameter, what: str) -> bool:
    """Return whether the annotation allows this kind of nonsense."""
    text = str(parameter.annotation)
    if what in ("a list", "an empty list"):
        return any(word in text for word in ("Sequence", "list", "tuple", "Tensors", "Any"))
    return False


def failures(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what was wrong with the errors of a function's arguments."""
    function, right = arguments_of(name, monkeypatch)
    parameters = inspect.signature(function).parameters
    found = []
    for parameter in parameters.values():
        for what, wrong in nonsense(right[parameter.name]):
            given = {key: _copied(value) for key, value in right.items()} | {parameter.name: wrong}
            args = [given[p.name] for p in parameters.values() if p.kind is p.POSITIONAL_ONLY]
            kwargs = {p.name: given[p.name] for p in parameters.values() if p.kind is not p.POSITIONAL_ONLY}
            try:
                with torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    function(*args, **kwargs)
                tensor = isinstance(right[parameter.name], Tensor) or str(parameter.annotation).startswith("Tensor")
                if tensor and what in NOT_TENSORS and not _accepts(parameter, what):
                    found.append(f"{parameter.name}, {what}: accepted")
            except RtkError as error:
                if not names_one_of(str(error), [*parameters]):
                    found.append(f"{parameter.name}, {what}: names no argument of {name}: {error}")
            except Exception as error:
                text = (str(error).splitlines() or [""])[0]
                found.append(f"{parameter.name}, {what}: {type(error).__name__}: {text[:120]}")
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_errors_name_an_argument(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = failures(name, monkeypatch)
    assert not found, "\n".join([f"{len(found)} of {name}:", *found])


@emulated
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FUNCTIONS])
def test_launchers_name_an_argument(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with rtkernels.emulate("sm_90"):
        found = failures(name, monkeypatch)
    assert not found, "\n".join([f"{len(found)} of {name}:", *found])


# ---- the mechanism -------------------------------------------------------------------------------------------------


@at("cpu", "sm_90")
@pytest.mark.parametrize("value", [2, -1, 7])
def test_booleans_are_not_other_integers(value: int, place: str) -> None:
    x = torch.randn(5, 64)
    with rtkernels.emulate(place) if place != "cpu" else torch.no_grad():
        with pytest.raises(ArgumentError, match=f"swizzled is {value}; expected True or False"):
            rtkernels.quantize_nvfp4(x, swizzled=value)
        for one in (1, True):
            assert rtkernels.quantize_nvfp4(x, swizzled=one)[1].shape == (512,)


@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda", 99), "hpu"])
def test_devices_that_are_not_there(device: str | torch.device) -> None:
    with pytest.raises(ArgumentError, match=f"device is {device}; expected"):
        rtkernels.rope_table(4, 8, device=device)


def test_errors_of_a_device_that_is_there_stay() -> None:
    @public(recent=False)
    def failing(device: torch.device | str | None = None) -> Tensor:
        raise RuntimeError("the device is broken")

    with pytest.raises(RuntimeError, match="the device is broken"):
        failing("cpu")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_valid_calls_fit_their_annotations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise any error, of another argument or of none, would become one about this argument."""
    function, arguments = arguments_of(name, monkeypatch)
    for key, parameter in inspect.signature(function).parameters.items():
        values = [arguments[key], parameter.default] if parameter.default is not parameter.empty else [arguments[key]]
        for value in values:
            assert _problem(key, value, parameter.annotation) is None


def test_every_default_fits_its_annotation() -> None:
    for name in sorted(rtkernels.__all__):
        function = getattr(rtkernels, name)
        if not inspect.isfunction(function) or not hasattr(function, "__wrapped__"):
            continue
        for key, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not parameter.empty:
                assert (name, _problem(key, parameter.default, parameter.annotation)) == (name, None)


def test_errors_that_no_argument_explains_stay() -> None:
    @public(recent=False)
    def failing(x: Tensor, eps: float = 1.0) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        failing(torch.ones(2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        failing(torch.ones(2), epsilon=2.0)


def test_internal_names_become_those_of_the_caller() -> None:
    def inner(lengths: Tensor) -> None:
        raise ArgumentError(f"lengths has dtype {lengths.dtype}; expected int32")

    @public(recent=False)
    def outer(q: Tensor, seqused: Tensor) -> None:
        seqused = seqused.contiguous() + 0
        inner(seqused)

    with pytest.raises(ArgumentError, match=r"^seqused has dtype torch\.int16; expected int32"):
        outer(torch.ones(2), torch.ones(2, dtype=torch.int16))


@pytest.mark.parametrize(
    ("message", "names", "found"),
    [
        ("lengths is a int", ["a", "b"], False),
        ("a is a int", ["a", "b"], True),
        ("scale_a has shape", ["a"], False),
        ("expected 4, that of b", ["a", "b"], True),
        ("the result has dtype", ["dtype"], True),
        ("out[1] has shape", ["out"], True),
    ],
)
def test_which_messages_name_an_argument(message: str, names: list[str], found: bool) -> None:
    assert names_one_of(message, names) is found


def test_public_functions_stay_what_they_are() -> None:
    assert pickle.loads(pickle.dumps(rtkernels.rms_norm)) is rtkernels.rms_norm
    assert rtkernels.rms_norm.__module__ == "rtkernels.ops.norm.rms_norm"
    assert rtkernels.layer_norm.__doc__.startswith("Normalise")
