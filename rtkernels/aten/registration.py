"""Kernels in the place of torch's, registered with the dispatcher."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from rtkernels import emulator

Kernel = Callable[..., Any]


def torch_kernel(name: str, key: str) -> Kernel:
    """Return torch's own kernel of an overload, looked up while it is not overridden."""
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))  # kernels of a device do not look at it
    return partial(torch.library.get_kernel(f"aten::{name}", key).call_boxed, keyset)


def registered(kernels: Mapping[tuple[str, str], Kernel]) -> torch.library.Library:
    """Register kernels by overload and dispatch key, until the library that is returned ends."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel.*")
        for (name, key), kernel in kernels.items():
            library.impl(name, kernel, key)
    return library


def device_keys() -> tuple[str, ...]:
    """Return the dispatch keys of tensors that kernels take: while emulating those of the CPU, too."""
    return ("CUDA", "CPU") if emulator.active() is not None else ("CUDA",)


class Lasting:
    """Kernels that stay once they are registered.

    Args:
        kernels: Returns them by overload, for a dispatch key.
        prefix: "Autograd" for autograd's kernels.
    """

    def __init__(self, kernels: Callable[[str], Mapping[str, Kernel]], prefix: str = "") -> None:
        self._kernels, self._prefix = kernels, prefix
        self._lock = threading.Lock()
        self._libraries: dict[str, torch.library.Library] = {}

    def install(self) -> None:
        """Register them, unless they are."""
        with self._lock:
            for key in (self._prefix + device for device in device_keys()):
                if key not in self._libraries:
                    self._libraries[key] = registered({(n, key): k for n, k in self._kernels(key).items()})
