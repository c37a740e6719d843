"""Compile kernels ahead of time, for any target, with or without a GPU.

The public name is ``rtkernels.warm``, a function. This module is not ``rtkernels/warm.py`` because it would then
replace the function as soon as anyone imported it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rtkernels.errors import ArgumentError, NotWarmError, RtkError
from rtkernels.runtime import cpus, env
from rtkernels.runtime import targets as targets_module
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import nvrtc, places, tuned
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.progress import Bar
from rtkernels.runtime.suggest import did_you_mean
from rtkernels.runtime.targets import Target

if TYPE_CHECKING:
    from rtkernels.runtime.launch.kernel import Kernel
    from rtkernels.runtime.operator.registry import Op

# Suggested by "did you mean"; any other target that NVRTC knows is accepted, too.
_TARGETS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a", "compute_90")


@dataclass(frozen=True)
class Job:
    """One cache entry to build: a variant of a kernel for a target."""

    op: Op
    kernel: Kernel
    variant: tuple
    target: Target

    @property
    def expression(self) -> str:
        """C++ name of the variant."""
        return self.kernel.expression(self.variant)

    @property
    def entry(self) -> tuple[str, tuple[str, ...], Target, tuple[str, ...]]:
        """The identity of the entry in the cache: unit, expressions, target, flags."""
        return self.kernel.unit, (self.expression,), self.target, self.kernel.flags

    def __str__(self) -> str:
        return f"{self.op.name} {self.expression} {self.target}"


@dataclass(frozen=True)
class Failure:
    """One job that did not produce a cache entry."""

    job: Job
    error: Exception

    @property
    def text(self) -> str:
        """The error in one line."""
        lines = [line.strip() for line in str(self.error).splitlines() if line.strip()]
        name = type(self.error).__name__.lstrip("_")
        return f"{name}: {' | '.join(lines)}"

    def __str__(self) -> str:
        return f"{self.job}: {self.text}"


@dataclass
class WarmReport:
    """The result of ``warm``.

    Attributes:
        targets: Names of the requested targets.
        path: The cache directory that was filled.
        compiled: Number of entries compiled by this call.
        present: Number of entries that existed already.
        failures: Jobs that failed.
        seconds: Wall time.
        choices: Number of measured choices (``rtkernels tune``) that a directory named by the caller received.
    """

    targets: tuple[str, ...]
    path: Path
    compiled: int = 0
    present: int = 0
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    choices: int = 0

    @property
    def total(self) -> int:
        """Number of requested entries."""
        return self.compiled + self.present + len(self.failures)

    def __str__(self) -> str:
        return (
            f"{self.total} kernels for {', '.join(self.targets)}: {self.compiled} compiled, "
            f"{self.present} already there, {len(self.failures)} failed, {self.seconds:.1f} s, in {self.path}"
            + (f"; {self.choices} choices of rtkernels tune" if self.choices else "")
        )


def warm(
    archs: Sequence[str] | None = None,
    ops: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    *,
    tiers: Sequence[str] | None = None,
    every_variant: bool = False,
    progress: Callable[[int, int, Failure | None], None] | None = None,
) -> WarmReport:
    """Compile the variants of the chosen ops for the chosen targets into the cache.

    These are all that the public functions launch. The pointwise kernels behind ``rtkernels.enable()`` have thousands
    more, because torch has so many operators and dtypes. Of these, every operator is compiled for float32, bfloat16 and
    float16, and for int64 and bool if tensors are dense; docs/cache.md says what is left to the first use.

    Works without a GPU, for any target that NVRTC knows. The result works on every machine with that NVRTC version, and
    with ``RTKERNELS_NO_COMPILE=1`` on machines with another version. Kernels are compiled in threads, because NVRTC
    releases the GIL. A kernel that fails does not stop the others.

    Args:
        archs: Targets such as ``("sm_80", "sm_90a")``. Default: ``RTKERNELS_ARCH``, or this machine's GPUs.
        ops: Names of ops. Default: all.
        out: Cache directory to fill, for ``RTKERNELS_CACHE_EXTRA``. If it is created, other users may read it. It also
            receives the choices that ``tune`` measured. Default: the user's cache.
        jobs: Number of threads. Default: one per CPU that this process may use.
        tiers: Compile only kernels of these tiers, some of ``"core"``, ``"serve"`` and ``"aten"``. Default: all.
        every_variant: Compile these pointwise kernels for every dtype and layout, too: 1,500 more for each target.
        progress: Called in this thread after each job with (done, total, failure or None).

    Returns:
        Counts, failures and time; check ``report.failures``.

    Raises:
        ArgumentError: A target, op or tier is unknown, or no target is given and there is no GPU.
        ToolkitError: CuPy or NVRTC is missing.
        NotWarmError: A kernel must be compiled, but ``RTKERNELS_NO_COMPILE`` is set.
        RtkError: The directory cannot be written.
    """
    chosen = targets(archs)
    return build(list(plan(with_parts(ops), chosen, tiers, every_variant=every_variant)), out, jobs, progress)


def build(
    todo: Sequence[Job],
    out: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int, Failure | None], None] | None = None,
) -> WarmReport:
    """Run these jobs; arguments as for ``warm``."""
    if jobs is not None and jobs < 1:
        raise ArgumentError(f"jobs is {jobs}; expected the number of threads, from 1 up")
    directory = _directory(out)
    nvrtc.version()  # raise one clear error instead of one per kernel
    _prepare(todo, directory, complete=out is not None)
    started = time.perf_counter()
    report = WarmReport(tuple(dict.fromkeys(job.target.name for job in todo)), directory)

    def run(job: Job) -> str:
        # An entry in a read-only extra cache is enough, except for a directory that the caller named.
        there = out is None and build_cache.peek(*job.entry, op=job.kernel.op) is not None
        entry = build_cache.load(*job.entry, op=job.kernel.op, directory=None if there else directory)
        if entry.path is None:
            raise _NotWritten(directory)
        return entry.source

    with ThreadPoolExecutor(jobs or cpus.usable(), thread_name_prefix="rtkernels-warm") as pool:
        running: dict[Future[str], Job] = {pool.submit(run, job): job for job in todo}
        try:
            for future in as_completed(running):
                failure = _count(report, running[future], future)
                if progress is not None:
                    progress(report.total, len(todo), failure)
                if failure is not None and isinstance(failure.error, _NotWritten):
                    for other in running:  # jobs not yet started would be compiled in vain
                        other.cancel()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if out is not None and not report.failures:
        report.choices = tuned.ship(places.named_store(directory))
    report.seconds = time.perf_counter() - started
    return report


class _NotWritten(RtkError):
    """A kernel could not be written, and the next one could not either."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"it could not be written to {directory}")


def _prepare(todo: Sequence[Job], directory: Path, *, complete: bool) -> None:
    """Check, before the first compilation, that it is allowed and that its result can be written."""
    place = directory if complete else None
    missing = [job for job in todo if build_cache.peek(*job.entry, op=job.kernel.op, directory=place) is None]
    if not missing:
        return
    if env.get("NO_COMPILE"):
        raise NotWarmError(
            f"{len(missing)} of {len(todo)} kernels would have to be compiled, but RTKERNELS_NO_COMPILE is set; "
            f"unset it for this command. The first is {missing[0]}"
        )
    try:
        store_module.require_writable(places.named_store(directory))
    except OSError as error:
        raise RtkError(
            f"the kernel cache {directory} cannot be written: {error.strerror or error}; nothing was compiled. "
            "Name another directory with --out"
        ) from None


def _directory(out: str | os.PathLike[str] | None) -> Path:
    """Return the cache directory to fill."""
    if out is not None:
        try:
            directory = Path(out).expanduser().absolute()
        except RuntimeError:
            raise ArgumentError(f"{os.fspath(out)} cannot be found: this user has no home directory") from None
        if os.path.lexists(directory) and not os.path.isdir(directory):
            raise ArgumentError(f"{directory} is not a directory")
        return directory
    store = places.user_store()
    if store is not None and store.writable:
        return store.root
    path, mode = places.location(), env.get("CACHE")
    if path is None:
        why = "there is no home directory to put it into"
    else:
        why = f"RTKERNELS_CACHE={mode}" if mode != "rw" else places.refusals().get(os.path.realpath(path), "")
    raise ArgumentError(f"the cache {path or ''} may not be written ({why}); name a directory to fill with --out")


def _count(report: WarmReport, job: Job, future: Future[str]) -> Failure | None:
    error = _NotWritten(report.path) if future.cancelled() else future.exception()
    if isinstance(error, Exception):
        failure = Failure(job, error)
        report.failures.append(failure)
        return failure
    if future.result() == "compiled":
        report.compiled += 1
    else:
        report.present += 1
    return None


def targets(archs: Sequence[str] | None) -> list[Target]:
    """Return the targets that a user named, or those of this machine.

    Raises:
        ArgumentError: One is not a target; or none is named, ``RTKERNELS_ARCH`` is not set and there is no GPU.
    """
    if archs is not None:
        if isinstance(archs, str):
            archs = archs.split(",")
        found = [_parse_target(text) for text in archs]
    elif name := env.get("ARCH"):
        found = [targets_module.parse(name)]
    else:
        found = _own_targets()
    if not found:
        raise ArgumentError(
            "no target: this machine has no GPU and RTKERNELS_ARCH is not set; "
            "name the targets, for example --arch sm_80,sm_90a"
        )
    return list(dict.fromkeys(found))


def _parse_target(text: str) -> Target:
    try:
        return targets_module.parse(text)
    except ArgumentError as error:
        raise ArgumentError(f"{error}{did_you_mean(text, _TARGETS)}") from None


def _own_targets() -> list[Target]:
    import torch

    if not torch.cuda.is_available():
        return []
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    supported = nvrtc.supported_archs()
    return [targets_module.for_capability(capability, supported) for capability in sorted(capabilities)]


def select(ops: Sequence[str] | None) -> list[Op]:
    """Return the ops that a user named, by family name or public function, or all of them.

    Raises:
        ArgumentError: There is no such op.
    """
    from rtkernels.runtime.operator import registry

    known = list(registry.ops())
    if ops is None:
        return known
    if isinstance(ops, str):
        ops = ops.split(",")
    found: list[Op] = []
    for name in ops:
        matches = [op for op in known if name == op.name or name in op.public]
        if not matches:
            raise ArgumentError(_no_op(name, known))
        found += [op for op in matches if op not in found]
    return found


def _no_op(name: str, known: Sequence[Op]) -> str:
    owners = [op.name for op in known if any(kernel.name == name for kernel in op.kernels)]
    if owners:
        return f"no op {name!r}; that is a kernel of {', '.join(owners)}"
    names = [op.name for op in known]
    functions = [function for op in known for function in op.public]
    meant = did_you_mean(name, [*names, *functions]) or f"; there are {', '.join(names)}"
    return f"no op {name!r}{meant}"


def with_parts(ops: Sequence[str] | None) -> list[Op]:
    """Return the ops that a user named, followed by the ops whose kernels they launch."""
    found = select(ops)
    if ops is None:
        return found
    used = [name for op in found for name in op.uses]
    return found + [op for op in select(used) if op not in found]


def plan(
    ops: Sequence[Op], chosen: Sequence[Target], tiers: Sequence[str] | None = None, *, every_variant: bool = False
) -> Iterator[Job]:
    """Yield the variants that the ops have for the targets, of kernels of these tiers if any are named.

    Raises:
        ArgumentError: There is no such tier.
    """
    from rtkernels.runtime.launch.kernel import TIERS

    wanted = TIERS if tiers is None else tiers.split(",") if isinstance(tiers, str) else tuple(tiers)
    for name in wanted:
        if name not in TIERS:
            raise ArgumentError(f"no tier {name!r}{did_you_mean(name, TIERS) or '; there are ' + ', '.join(TIERS)}")
    for op in ops:
        for kernel in op.kernels:
            for target in chosen:
                if kernel.tier in wanted and kernel.supports(target):
                    for variant in kernel.variants(target, every=every_variant):
                        yield Job(op, kernel, variant, target)


class Progress:
    """A bar of kernels; failures are told immediately, equal errors in one line."""

    def __init__(self, stream: TextIO) -> None:
        self._bar = Bar(0, "kernels", stream)
        self._errors: dict[str, int] = {}

    def __call__(self, done: int, total: int, failure: Failure | None) -> None:
        if failure is not None:
            count = self._errors[failure.text] = self._errors.get(failure.text, 0) + 1
            if count == 1:
                self._bar.tell(f"failed: {failure}")
        self._bar.total = total
        self._bar.step(done - self._bar.done)

    def close(self) -> None:
        """Erase the bar and print how often each error occurred."""
        self._bar.close()
        for text, count in self._errors.items():
            if count > 1:
                self._bar.tell(f"failed: {count - 1} more with the same error: {text}")
