"""What one call of ``patch`` has tried: the answers of its tests, and the sites of its report."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

from torch import nn

from rtkernels.models import replace
from rtkernels.models.patch_report import Site
from rtkernels.models.probe import NotRecognized, Raised, Recognized

_SAME = set(nn.Module().__dict__)  # attributes of every module
_answers: dict[Hashable, Recognized | str] = {}  # shared by all models of this process


class Patcher:
    """One ``patch`` call. Modules of one class with equal attributes are tested once.

    Test results that depend on plain values only are shared between models.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._own: dict[Hashable, Recognized | str] = {}
        self._texts: dict[int, str] = {}  # configurations as text, by id
        self._by_identity = False

    def visit(
        self, kind: str, name: str, module: nn.Module, find: Callable[[nn.Module], Recognized],
        more: Hashable = None, by_class: bool = False,
    ) -> None:  # fmt: skip
        """Replace a module if ``find`` recognises it.

        `more` is what the result of ``find`` depends on besides the module; such a result is not shared with other
        models. `by_class` means that the result depends on the module's class alone.
        """
        answer = self.answer(kind, module, find, more, by_class)

        def action() -> None:
            replace.check_own_forward(module)
            if isinstance(answer, str):
                raise NotRecognized(answer)
            replace.replace(module, answer)

        self.attempt(kind, name, module, action)

    def attempt(self, kind: str, name: str, module: nn.Module, action: Callable[[], None]) -> None:
        """Run `action`, which replaces a module or a part of it, and record it or the reason why it is left alone."""
        reason = None
        try:
            action()
        except NotRecognized as error:
            reason = str(error)
        self.record(kind, name, module, reason)

    def record(self, kind: str, name: str, module: nn.Module, reason: str | None) -> None:
        self.sites.append(Site(kind, name, type(module).__name__, reason))

    def answer(
        self, kind: str, module: nn.Module, find: Callable[[nn.Module], Recognized], more: Hashable = None,
        by_class: bool = False,
    ) -> Recognized | str:  # fmt: skip
        """Return ``find(module)``, or the message of the ``NotRecognized`` that it raises."""
        self._by_identity = False
        state = None if by_class else self._state(module)
        key = (kind, type(module), _code(type(module)), state, more)
        answers = self._own if self._by_identity or more is not None else _answers
        if key not in answers:
            try:
                answers[key] = find(module)
            except NotRecognized as error:
                answers[key] = str(error)
            except Exception as error:  # a module that the tests cannot handle is left alone, too
                answers[key] = str(Raised("at all", error))
        return answers[key]

    def _state(self, module: nn.Module) -> Hashable:
        """Return everything in which modules of one class may differ: attributes, parameter sizes, children, hooks."""
        state = tuple((name, self._value(value)) for name, value in module.__dict__.items() if name not in _SAME)
        tensors = (*module._parameters.items(), *module._buffers.items())
        shapes = tuple((name, None if t is None else tuple(t.shape)) for name, t in tensors)
        hooked = bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)
        children = tuple((name, self._child(child)) for name, child in module._modules.items())
        return state, shapes, hooked, children

    def _child(self, child: nn.Module | None) -> Hashable:
        if child is not None and child._parameters:  # a projection, which is replaced by a random map
            return type(child), *(getattr(child, name, None) for name in ("in_features", "out_features"))
        return type(child), None if child is None else self._state(child)

    def _value(self, value: Any) -> Hashable:
        """Return a hashable form of an attribute: the text of plain values, functions and classes themselves."""
        form: Hashable = value
        if isinstance(value, (bool, int, float, str, type(None))):
            form = repr(value)
        elif isinstance(value, (tuple, list)):
            form = tuple(map(self._value, value))
        elif hasattr(value, "to_json_string") and not isinstance(value, type):
            form = self._texts.get(id(value)) or f"{value.to_json_string()} {value.__dict__}"
            self._texts[id(value)] = form
        elif not isinstance(value, (FunctionType, type)):
            self._by_identity, form = True, id(value)
        return form


def _code(cls: type) -> Hashable:
    """Return the methods of a class and the functions its forward calls: other libraries may exchange them."""
    classes = [c for c in cls.__mro__ if issubclass(c, nn.Module) and c is not nn.Module]
    methods = tuple(f for c in classes for f in vars(c).values() if isinstance(f, FunctionType))
    names = getattr(getattr(cls.forward, "__code__", None), "co_names", ())
    file = getattr(cls.forward, "__globals__", {})
    return methods, tuple(file[name] for name in names if isinstance(file.get(name), FunctionType))
