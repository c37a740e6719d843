"""Which backend runs a problem: the first one that can, in an order of preference; the same for every family.

A *problem* is what a call computes, as a record of plain data (``Product`` of ``gemm``, ``Attention`` of
``attention``). A *backend* is one way to compute it: it says in words why it cannot, or returns the launches. Most are
modules ``<name>_plan`` with these names:

    KERNELS                                        its kernels
    unsupported(problem, target) -> str | None     why it cannot run this problem, None if it can
    steps(problem, device) -> Steps                the launches of a problem that it can run
    summary(problem, target) -> str                optional: the tile it would use, for ``explain``
    candidates(problem, info) -> [options]         optional: what ``rtkernels tune`` may choose from, best guess first;
                                                   ``steps(problem, device, **options)`` takes each of them

A family lists its backends in one ``Backends``, which its operators' plans and ``rtkernels.explain`` both ask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError, RtkError, UnsupportedDeviceError
from rtkernels.runtime.invariance import level, refuse
from rtkernels.runtime.launch import tuned
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Steps

AUTO = "auto"


class NoBackendError(UnsupportedDeviceError):
    """No backend can run a problem on a device."""


class Problem(Protocol):
    """What a call computes, as plain data."""

    @property
    def title(self) -> str:
        """The problem in a few words: sizes and types."""
        ...


P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Backend(Generic[P]):
    """One way to run problems of a family.

    Attributes:
        name: What callers write for ``backend=``.
        unsupported: ``(problem, device's info) -> reason``: why it cannot run a problem, None if it can.
        steps: ``(problem, device) -> Steps``.
        kernels: Those it launches, unless they belong to another op.
        summary: ``(problem, device's info) -> str``: the tile it would use.
        by_name: Callers may ask for it; else only "auto" takes it.
        option: The one by which callers ask for it, under this name.
        candidates: ``(problem, device's info) -> options``: what `steps` can be told, as JSON has it.
    """

    name: str
    unsupported: Callable[[P, DeviceInfo], str | None]
    steps: Callable[..., Steps]
    kernels: tuple[Kernel, ...] = ()
    summary: Callable[[P, DeviceInfo], str] | None = None
    by_name: bool = True
    option: str = "backend"
    candidates: Callable[[P, DeviceInfo], Sequence[dict[str, Any]]] | None = None

    def options(self, problem: P, info: DeviceInfo) -> list[dict[str, Any]]:
        """Return what `steps` can be told for a problem; nothing at all is one of it."""
        found = [] if self.candidates is None else list(self.candidates(problem, info))
        return found or [{}]

    @classmethod
    def of(cls, name: str, module: ModuleType) -> Backend[Any]:
        """Return the backend that a module is."""
        summary = getattr(module, "summary", None)
        return cls(
            name, lambda problem, info: module.unsupported(problem, info.target), module.steps, module.KERNELS,
            None if summary is None else lambda problem, info: summary(problem, info.target),
            candidates=getattr(module, "candidates", None),
        )  # fmt: skip


@dataclass(frozen=True)
class Choice(Generic[P]):
    """The backend of a problem, None if none can run it; why earlier candidates cannot; the remaining ones.

    ``options``: of its ``steps``, if ``rtkernels tune`` measured them; None if the backend decides.
    """

    backend: Backend[P] | None
    refused: dict[str, str]
    after: tuple[str, ...]
    options: dict[str, Any] | None = None


@dataclass
class _Recording:
    """Where ``record_problems`` collects the problems of plans that are made, with their families."""

    problems: list[tuple[Backends[Any], Any]] | None = None


recording = _Recording()


def problem_key(problem: Problem) -> str:
    """Return the name of a problem in tables of measured choices."""
    return f"{problem.title} {hashlib.sha256(repr(problem).encode()).hexdigest()[:16]}"


class Backends(Generic[P]):
    """The backends of a family, and the choice between them."""

    known: list[Backends[Any]] = []  # noqa: RUF012 - of all families that were imported

    def __init__(
        self, what: str, backends: Sequence[Backend[P]], *, functions: Sequence[str] = (),
        order: Callable[[P, DeviceInfo], Sequence[str]] | None = None, automatic: Sequence[str] = (AUTO,),
        others: Sequence[str] = (), not_invariant: Sequence[str] = (), error: type[RtkError] = NoBackendError,
        tensors: Callable[[P, torch.device], dict[str, Tensor]] | None = None, problem: type[P] | None = None,
        instead: Callable[[P, DeviceInfo], str] = lambda problem, info: "",
    ) -> None:  # fmt: skip
        """List the backends of a family.

        Args:
            what: A problem, in errors: "product".
            backends: In the order in which they are asked.
            functions: Public functions that ask, for ``explain``.
            order: ``(problem, device's info) -> names``: who is asked, if that depends on the problem.
            automatic: Values of ``backend=`` that leave the choice to this order.
            others: Values that public functions take and never pass on: "torch".
            not_invariant: Backends that choose by the number of rows: refused by name with batch invariance.
            error: What is raised if no backend can run a problem.
            tensors: ``(problem, device) -> tensors by name``, for ``rtkernels tune``; None if it measures no problems
                of this family.
            problem: The type of problems, likewise.
            instead: ``(problem, device's info) -> text``: what a plan does where no backend can run a problem, or "".
        """
        self.tensors, self.problem, self.instead = tensors, problem, instead
        self.what, self.functions, self._error = what, tuple(functions), error
        self._backends = {backend.name: backend for backend in backends}
        self._order = order or (lambda problem, info: tuple(self._backends))
        self._automatic, self._others, self._not_invariant = tuple(automatic), tuple(others), tuple(not_invariant)
        self.problems: dict[str, Callable[..., P]] = {}
        Backends.known.append(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The backends that callers may request."""
        named = (backend for backend in self._backends.values() if backend.by_name and backend.option == "backend")
        return tuple(backend.name for backend in named)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels of all backends."""
        return tuple(kernel for backend in self._backends.values() for kernel in backend.kernels)

    def is_problem(self, value: Any) -> bool:
        """Return True if a value is a problem of this family."""
        return self.problem is not None and isinstance(value, self.problem)

    def describe(self, **problems: Callable[..., P]) -> None:
        """Tell ``explain`` how to read operators, by their names: ``(*values) -> problem``, as for their plans."""
        self.problems |= problems

    def check(self, wanted: str) -> None:
        """Raise an ArgumentError unless ``backend=`` can have this value."""
        if wanted not in (*self._automatic, *(name for name, backend in self._backends.items() if backend.by_name)):
            choices = [*self._automatic, *self.names, *(name for name in self._others if name != wanted)]
            expected = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
            raise ArgumentError(f"backend is {wanted!r}; expected {expected}")

    def is_automatic(self, wanted: str) -> bool:
        """Return True if ``backend=`` leaves the choice to us."""
        return wanted in self._automatic

    def choose(self, problem: P, info: DeviceInfo, wanted: str = AUTO) -> Choice[P]:
        """Return the backend for a problem on a device; `wanted` may name one."""
        self.check(wanted)
        if wanted in self._automatic and (chosen := self._tuned(problem, info)) is not None:
            return chosen
        order = tuple(self._order(problem, info)) if wanted in self._automatic else (wanted,)
        refused: dict[str, str] = {}
        for i, name in enumerate(order):
            backend = self._backends[name]
            reason = backend.unsupported(problem, info)
            if reason is None:
                return Choice(backend, refused, order[i + 1 :])
            refused[name] = reason
        return Choice(None, refused, ())

    def candidates(self, problem: P, info: DeviceInfo) -> list[tuple[Backend[P], dict[str, Any]]]:
        """Return every way to run a problem: what "auto" takes without measurements first."""
        order = dict.fromkeys((*self._order(problem, info), *self._backends))
        able = [self._backends[name] for name in order if self._backends[name].unsupported(problem, info) is None]
        return [(backend, options) for backend in able for options in backend.options(problem, info)]

    def units(self) -> list[str]:
        """Return the sources of all kernels."""
        return sorted({kernel.unit for kernel in self.kernels})

    def _tuned(self, problem: P, info: DeviceInfo) -> Choice[P] | None:
        """Return the measured choice of a problem. Levels of batch invariance have none: it would depend on rows."""
        if level() or self.tensors is None:
            return None
        found = tuned.find(info, self.what, self.units, problem_key(problem))
        backend = None if found is None else self._backends.get(found["backend"])
        if backend is None or backend.unsupported(problem, info) is not None:
            return None
        options = found["options"]
        return Choice(backend, {}, (), options) if options in backend.options(problem, info) else None

    def steps(self, problem: P, device: int, wanted: str = AUTO) -> Steps:
        """Return the launches of a problem.

        Raises:
            RtkError: The `error` of the family. No backend can run it on this device, or the one asked for cannot.
        """
        info = device_info(device)
        if wanted in self._not_invariant and level():
            refuse(f"backend {wanted!r}", "it chooses by the number of rows")
        choice = self.choose(problem, info, wanted)
        if choice.backend is None:
            raise self._error(self._failure(problem, info, wanted, choice.refused))
        if recording.problems is not None and wanted in self._automatic and not level():
            recording.problems.append((self, problem))
        return choice.backend.steps(problem, device, **(choice.options or {}))

    def _failure(self, problem: P, info: DeviceInfo, wanted: str, refused: dict[str, str]) -> str:
        where = f"this {self.what} on {info.target}"
        if wanted in self._automatic:
            return f"no kernel for {where}: {in_words(refused)}"
        option = self._backends[wanted].option
        no_kernel = f"{option} is {wanted!r}, which has no kernel for {where}: {refused[wanted]}"
        if option != "backend":
            return f"{no_kernel}; expected the default of {option}"
        best = self.choose(problem, info, AUTO)
        others = {name: reason for name, reason in best.refused.items() if name != wanted}
        instead = (
            f"expected {AUTO!r}, which takes {best.backend.name}" if best.backend is not None
            else f"nor has any other ({in_words(others)})" if others else "nor has any other"
        )  # fmt: skip
        return f"{no_kernel}; {instead}"


def in_words(refused: dict[str, str]) -> str:
    """Return why backends cannot run a problem, as a sentence."""
    return "; ".join(f"{name}: {reason}" for name, reason in refused.items())
