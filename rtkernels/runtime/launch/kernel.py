"""From a kernel's record to a function that launches it on torch tensors.

A ``Kernel`` describes a kernel's source, template and arguments. ``bind`` returns a ``Launch``: a function with grid,
block and device fixed that packs its arguments into one buffer and calls the driver.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rtkernels.errors import ArgumentError, NotWarmError, RtkError, UnsupportedDeviceError
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import nvrtc
from rtkernels.runtime.launch import driver
from rtkernels.runtime.launch.device import device_info, emulated_features, shared_limit
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.targets import Target

Variant = tuple[Any, ...]

_C_TYPES = {"bf16": "rtk::bf16", "fp16": "rtk::fp16", "fp32": "float", "e4m3": "rtk::e4m3", "e5m2": "rtk::e5m2"}
TIERS = ("core", "serve", "aten")  # see Kernel
_KIND_FORMAT = {"ptr": "Q", "i64": "q", "f64": "d"}
_KIND_BYTES = {"tmap": 128, **dict.fromkeys(_KIND_FORMAT, 8)}
MAX_ARGUMENT_BYTES = 4096  # limit that every supported driver accepts


class Kernel:
    """The record of one function template in ``cuda_src``.

    Args:
        unit: Source file relative to ``cuda_src``, or the absolute path of a file elsewhere
            (docs/tutorials/write_a_kernel.md).
        entry: Name of the ``__global__`` template in namespace ``rtk``.
        template: Names of the template parameters, for readers.
        args: ``"x:ptr rows:i64 eps:f64"``; every argument is eight bytes. Tensor maps (``x:tmap``, passed as
            ``tensor_map.TensorMap``) come before all others.
        struct: The arguments after the tensor maps are the members of one ``const __grid_constant__`` struct. Required
            from 33 arguments on.
        variants: Template arguments to build ahead of time: tuples, or a function of the target that returns them.
        rare: Further ones, of a kernel with hundreds, that few programs launch: ``warm(every_variant=True)`` builds
            them as well.
        max_registers: Limit that the compile tests enforce.
        needs: Features that a target must have (see ``Target.features``).
        emulated: True, or the reason why the host emulator cannot run this kernel.
        flags: Extra compiler flags.
        tier: Which programs need this kernel, so that ``warm`` and CI can omit others: "core" for training and for
            kernels that several kinds of programs use, "serve" for inference only, "aten" for operators that replace
            torch's.

    Raises:
        ArgumentError: `args` has an unknown kind, a tensor map after other arguments, or more bytes than a launch
            takes.
    """

    def __init__(
        self,
        unit: str | os.PathLike[str],
        entry: str,
        *,
        template: str,
        args: str,
        variants: Sequence[Variant] | Callable[[Target], Iterable[Variant]],
        max_registers: int,
        needs: tuple[str, ...] = (),
        emulated: bool | str = True,
        flags: tuple[str, ...] = (),
        tier: str = "core",
        rare: Sequence[Variant] | Callable[[Target], Iterable[Variant]] = (),
        struct: bool = False,
    ) -> None:
        if tier not in TIERS:
            raise ValueError(f"kernel {entry} has tier {tier!r}; expected one of {', '.join(TIERS)}")
        self.tier = tier
        self.unit = os.fspath(unit)
        self.name = entry
        self.template = tuple(template.split())
        self.args = _parsed(entry, args)
        self.struct = struct
        self.max_registers = max_registers
        self.needs = needs
        self.emulated = emulated
        self.flags = flags
        self.op = entry  # the owning Op sets its own name
        self._variants, self._rare = variants, rare
        self._maps = sum(kind == "tmap" for _, kind in self.args)
        self._kinds = "".join(_KIND_FORMAT[kind] for _, kind in self.args[self._maps :])
        self._functions: dict[tuple[Variant, int], int] = {}
        self._alive: list[Any] = []  # CuPy modules; their functions are valid only while they exist
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork)

    def __repr__(self) -> str:
        return f"Kernel({self.unit}: {self.name})"

    def expression(self, variant: Variant) -> str:
        """Return the C++ name of a variant, ``rtk::rms_norm_fwd<rtk::bf16, float, 8>``."""
        if len(variant) != len(self.template):
            raise TypeError(f"{self.name} takes template arguments {self.template}, got {variant}")
        return f"rtk::{self.name}<{', '.join(map(_template_argument, variant))}>"

    def variants(self, target: Target, *, every: bool = False) -> list[Variant]:
        """Return the variants that warming and the compile tests build for a target (none if unsupported).

        `every`: with those that few programs launch.
        """
        if not self.supports(target):
            return []
        lists = (self._variants, self._rare) if every else (self._variants,)
        return [variant for given in lists for variant in (given(target) if callable(given) else given)]

    def supports(self, target: Target) -> bool:
        """Return True if the target has every feature this kernel needs."""
        return target.features.issuperset(self.needs)

    def bind(
        self,
        variant: Variant,
        device: int,
        grid: int | tuple[int, ...],
        block: int,
        shared: int = 0,
        *,
        overlap: bool = False,
        cluster: int = 1,
        resident: bool = False,
        ending: Sequence[int | float] = (),
        fixed: Mapping[int, int | float] | None = None,
    ) -> Launch:
        """Return a function that launches a variant on a device; compiles and loads it if needed.

        Args:
            variant: Template arguments.
            device: CUDA ordinal, or -1 for the host emulator.
            grid: Blocks in x, or in up to three dimensions. If a dimension is 0, as for empty tensors, the function
                does nothing.
            block: Threads per block.
            shared: Dynamic shared memory in bytes.
            overlap: The kernel may start before the previous one of its stream has ended. It must call
                ``ptx::wait_for_previous`` before it reads that kernel's results. Ignored below sm_90.
            cluster: Blocks in x that run at the same time and access each other's shared memory; divides the grid.
            resident: All blocks run at the same time, which is required if they wait for each other; otherwise the
                launch raises a ResidencyError. `max_resident_blocks` returns the limit.
            ending: The kernel's last arguments, the same for all launches; launches take only the arguments before
                them.
            fixed: Other arguments that are the same for all launches, by position among all arguments. Ignored in the
                emulator, whose launches take them.
        """
        dims = tuple(map(int, grid if isinstance(grid, Sequence) else (grid,)))  # sizes may be NumPy numbers
        dims += (1,) * (3 - len(dims))
        if 0 in dims:  # the driver refuses empty grids
            return driver.no_blocks
        if device < 0:
            from rtkernels import emulator

            together = dims[0] if resident else cluster  # blocks that the emulator interleaves
            launch = emulator.bind(
                self, variant, emulated_features(), dims, block, shared, together, resident=resident, overlap=overlap
            )
            return (lambda *args: launch(*args, *ending)) if ending else launch
        function = self._functions.get((variant, device)) or self._load(variant, device)
        overlap = overlap and "pdl" in device_info(device).target.features
        last = dict(enumerate(ending, len(self.args) - len(ending)))
        places = {place - self._maps: value for place, value in {**last, **(fixed or {})}.items()}
        arguments = driver.Arguments(self._maps, self._kinds, places, struct=self.struct)
        how = {"overlap": overlap, "cluster": cluster, "resident": resident}
        launch = driver.launcher(function, arguments, device, dims, block, shared, **how)
        launch.with_fixed = lambda more: self.bind(
            variant, device, grid, block, shared, ending=ending, fixed=more, **how
        )  # fmt: skip
        return launch

    def max_resident_blocks(self, variant: Variant, device: int, block: int, shared: int) -> int:
        """Return the largest number of blocks of a launch with ``resident=True``; arguments as for ``bind``."""
        info = device_info(device)
        if device < 0:
            return info.sm_count
        function = self._functions.get((variant, device)) or self._load(variant, device)
        return driver.max_resident_blocks(function, device, info.sm_count, block, shared)

    def _load(self, variant: Variant, device: int) -> int:
        with self._lock:
            if found := self._functions.get((variant, device)):
                return found
            expression = self.expression(variant)
            info = device_info(device)
            if not self.supports(info.target):
                raise UnsupportedDeviceError(
                    f"{self.op}: kernel {self.name} needs {', '.join(self.needs)}, which {info.name} "
                    f"({info.target}) does not have"
                )
            with torch.cuda.device(device):
                if torch.cuda.is_current_stream_capturing():
                    raise NotWarmError(
                        f"{self.op}: {expression} is not loaded on cuda:{device} and cannot be compiled or loaded "
                        f"while a CUDA graph is captured; call the op once with tensors of the same shapes, strides "
                        f"and dtypes before the capture"
                    )
                entry = build_cache.load(self.unit, [expression], info.target, self.flags, op=self.op)
                function = self._load_image(entry, expression, info.target)
            self._functions[variant, device] = function
            return function

    def _load_image(self, entry: build_cache.Entry, expression: str, target: Target) -> int:
        # Loaded from memory, so that the verified image is loaded even if the file changes.
        module = nvrtc.import_cupy().cuda.function.Module()
        module.load(entry.image)
        loaded = module.get_function(entry.names[expression])
        self._alive.append((module, loaded))
        function = loaded.ptr
        driver.allow_shared(function, shared_limit(target))
        return function

    def _after_fork(self) -> None:
        self._lock = threading.Lock()


def build_together(device: int, *wanted: tuple[Kernel, Variant]) -> None:
    """Compile the missing kernels of one call at the same time; binding then finds them in the cache."""
    if device < 0 or torch.cuda.is_current_stream_capturing():
        return
    target = device_info(device).target
    new = [(k, v) for k, v in wanted if (v, device) not in k._functions and k.supports(target)]
    missing = [pair for pair in new if not _built(*pair, target, compile_allowed=False)]
    threads = [threading.Thread(target=_built, args=(*pair, target)) for pair in missing[1:]]
    for thread in threads:
        thread.start()
    if threads:
        _built(*missing[0], target)
    for thread in threads:
        thread.join()


def _built(kernel: Kernel, variant: Variant, target: Target, *, compile_allowed: bool = True) -> bool:
    try:
        build_cache.load(
            kernel.unit, [kernel.expression(variant)], target, kernel.flags, op=kernel.op,
            compile_allowed=compile_allowed,
        )  # fmt: skip
    except RtkError:  # binding raises it again
        return False
    return True


def _parsed(entry: str, args: str) -> tuple[tuple[str, str], ...]:
    """Return names and kinds of a kernel's arguments."""
    found = tuple((name, kind) for name, _, kind in (item.partition(":") for item in args.split()))
    if unknown := [name for name, kind in found if kind not in _KIND_BYTES]:
        raise ArgumentError(f"kernel {entry}: argument {unknown[0]} is none of {', '.join(_KIND_BYTES)}")
    kinds = [kind for _, kind in found]
    if "tmap" in kinds[kinds.count("tmap") :]:
        raise ArgumentError(f"kernel {entry}: tensor maps (tmap) come before all other arguments")
    if (size := sum(_KIND_BYTES[kind] for kind in kinds)) > MAX_ARGUMENT_BYTES:
        raise ArgumentError(
            f"kernel {entry} takes {len(found)} arguments of {size} bytes; a launch has room for {MAX_ARGUMENT_BYTES}"
        )
    return found


def _template_argument(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _C_TYPES.get(value, f"rtk::{value}")
    return str(value)
