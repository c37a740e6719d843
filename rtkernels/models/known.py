"""What is known of modules that were tried before: modules of one class with the same attributes are tried once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

from torch import nn

from rtkernels.models.probe import NotRecognized, Raised, Recognized

_SAME = set(nn.Module().__dict__)  # tables of torch's own
_answers: dict[Hashable, Recognized | str] = {}  # of this process


class Known:
    """Answers for the modules of one model; those that depend on nothing but values are kept for other models."""

    def __init__(self) -> None:
        self._own: dict[Hashable, Recognized | str] = {}
        self._texts: dict[int, str] = {}  # of configurations
        self._by_identity = False

    def ask(
        self, kind: str, module: nn.Module, find: Callable[[nn.Module], Recognized], more: Hashable, by_class: bool
    ) -> Recognized | str:
        """Return what ``find(module)`` returns, or the reason of its ``NotRecognized``.

        `more` is what the answer depends on, apart from the module, and such an answer is not kept for other models;
        `by_class` says that it depends on the module's class alone.
        """
        self._by_identity = False
        state = None if by_class else self._state(module)
        key = (kind, type(module), _code(type(module)), state, more)
        answers = self._own if self._by_identity or more is not None else _answers
        if key not in answers:
            try:
                answers[key] = find(module)
            except NotRecognized as error:
                answers[key] = str(error)
            except Exception as error:  # a module that is unlike any that was thought of is left alone as well
                answers[key] = str(Raised("at all", error))
        return answers[key]

    def _state(self, module: nn.Module) -> Hashable:
        """Return what two modules of one class may differ in: attributes, sizes of parameters, children, hooks."""
        state = tuple((name, self._value(value)) for name, value in module.__dict__.items() if name not in _SAME)
        tensors = (*module._parameters.items(), *module._buffers.items())
        shapes = tuple((name, None if t is None else tuple(t.shape)) for name, t in tensors)
        hooked = bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        children = tuple((name, self._child(child)) for name, child in module._modules.items())
        return state, shapes, hooked, children

    def _child(self, child: nn.Module | None) -> Hashable:
        if child is None:
            return None
        if child._parameters:  # a projection, which is not tried
            return type(child), *(getattr(child, name, None) for name in ("in_features", "out_features"))
        return type(child), self._state(child)

    def _value(self, value: Any) -> Hashable:
        """Return what stands for an attribute: plain values by their text, functions and classes as they are."""
        if isinstance(value, (bool, int, float, str, type(None))):
            return repr(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._value, value))
        if isinstance(value, (FunctionType, type)):
            return value
        if hasattr(value, "to_json_string"):
            if id(value) not in self._texts:
                self._texts[id(value)] = f"{value.to_json_string()} {value.__dict__}"
            return self._texts[id(value)]
        self._by_identity = True
        return id(value)


def _code(cls: type) -> Hashable:
    """Return the functions of a class and those that its forward calls: somebody may exchange one."""
    classes = [c for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    methods = tuple(f for c in classes for f in vars(c).values() if isinstance(f, FunctionType))
    names = getattr(getattr(cls.forward, "__code__", None), "co_names", ())
    file = getattr(cls.forward, "__globals__", {})
    return methods, tuple(file[name] for name in names if isinstance(file.get(name), FunctionType))
