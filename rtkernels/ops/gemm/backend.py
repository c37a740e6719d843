"""Which backend makes a product: the first one that can, in an order that depends on its number of rows.

Backends are modules ``<name>_plan`` (see ``product``), imported when they are first asked.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from rtkernels.errors import ArgumentError, UnsupportedDeviceError
from rtkernels.ops.gemm.product import BYTES, Product
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Steps
from rtkernels.runtime.targets import Target

BACKENDS = ("sm90", "skinny", "unpack", "mma", "cluster")
CHOICES = ("auto", "rtkernels", *BACKENDS)
_SKINNY_ROWS = 64  # rows up to which it is asked
_SKINNY_FIRST = 16  # and asked before the others (H200)
_LATENCY_ROWS = 32  # rows up to which a product of few weights is a matter of latency
_LATENCY_BYTES = 24 << 20  # of such weights, at most
_LATER_FIELDS = {"global_scale": 0}  # of Product, with the value that asks for nothing


class NoBackendError(UnsupportedDeviceError):
    """No backend can make a product on a device."""


class Choice(NamedTuple):
    """The backend of a product, and why not the others."""

    name: str | None
    module: ModuleType | None
    refused: dict[str, str]


@cache
def module_of(name: str) -> ModuleType | None:
    """Return the module of a backend, None if this build has none."""
    path = f"{__package__}.{name}_plan"
    return importlib.import_module(path) if importlib.util.find_spec(path) else None


def kernels() -> tuple[Kernel, ...]:
    """Return the kernels of all backends."""
    modules = [module_of(name) for name in BACKENDS]
    return tuple(kernel for module in modules if module is not None for kernel in module.KERNELS)


def _reads(module: ModuleType, field: str) -> bool:
    """Return True if a backend knows a field of ``Product``: it says so, or a kernel takes a tensor of that name."""
    return field in getattr(module, "FIELDS", ()) or any((field, "ptr") in kernel.args for kernel in module.KERNELS)


def unsupported(name: str, product: Product, target: Target) -> str | None:
    """Return why a backend cannot make this product on a target, None if it can."""
    module = module_of(name)
    if module is None:
        return "not in this build"
    for field, unused in _LATER_FIELDS.items():
        if getattr(product, field) != unused and not _reads(module, field):
            return f"no {field.replace('_', ' ')}"
    if name == "skinny" and product.groups is None and product.m > _SKINNY_ROWS:
        return f"more than {_SKINNY_ROWS} rows"
    return module.unsupported(product, target)


def check_backend(wanted: str) -> None:
    """Raise an ArgumentError unless there is such a backend."""
    if wanted not in CHOICES:
        raise ArgumentError(f"backend is {wanted!r}; expected {', '.join(map(repr, CHOICES))} or 'torch'")


def _is_latency(product: Product, target: Target) -> bool:
    """Return True if the time until the first result of a product counts more than bandwidth."""
    weights = product.n * (1 if product.gate is None else 2) * product.k * BYTES[product.b.token]
    return "cluster" in target.features and product.m <= _LATENCY_ROWS and weights <= _LATENCY_BYTES


def choose(product: Product, target: Target, wanted: str = "auto") -> Choice:
    """Return the backend for a product on a target; ``wanted`` may name one."""
    check_backend(wanted)
    refused = {}
    order = ("skinny", "sm90", "unpack", "mma") if product.m <= _SKINNY_FIRST else ("sm90", "skinny", "unpack", "mma")
    if _is_latency(product, target):
        order = ("cluster", *order)
    for name in order if wanted in ("auto", "rtkernels") else (wanted,):
        reason = unsupported(name, product, target)
        if reason is None:
            return Choice(name, module_of(name), refused)
        refused[name] = reason
    return Choice(None, None, refused)


def steps_of(product: Product, device: int, wanted: str = "auto") -> Steps:
    """Return the launches of a product.

    Raises:
        NoBackendError: No backend can make it on this device.
    """
    target = device_info(device).target
    choice = choose(product, target, wanted)
    if choice.module is None:
        raise NoBackendError(f"no kernel for this product on {target}: {told(choice.refused)}")
    return choice.module.steps(product, device)


def told(refused: dict[str, str]) -> str:
    """Return why backends were passed over, as a sentence."""
    return "; ".join(f"{name}: {reason}" for name, reason in refused.items())


class Explanation(NamedTuple):
    """What a call would run.

    Attributes:
        backend: "cluster", "sm90", "skinny", "unpack", "mma", or None if none can.
        summary: Its tile, where the backend tells.
        refused: Backends that come before it, and why they cannot.
        product: The call as plain data.
    """

    backend: str | None
    summary: str
    refused: dict[str, str]
    product: Product

    def __str__(self) -> str:
        p = self.product
        what = f"{p.m} x {p.n} x {p.k} of {p.a.token} and {p.b.token} to {p.out.token}"
        passed = f" ({told(self.refused)})" if self.refused else ""
        return f"{what}: {self.backend or 'no backend'}{': ' + self.summary if self.summary else ''}{passed}"


def explained(product: Product, target: Target, wanted: str = "auto") -> Explanation:
    """Return what a product would run on a target."""
    choice = choose(product, target, wanted)
    summary: Any = getattr(choice.module, "summary", None)
    return Explanation(choice.name, summary(product, target) if summary else "", choice.refused, product)
