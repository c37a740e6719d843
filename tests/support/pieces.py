"""What an op consists of besides its kernel and its operators, and what to write where a piece is missing.

Each function returns "" or a message that names the file to write and what to put into it. The contract tests assert
that it is ""; ``tests/contracts/test_pieces.py`` takes the pieces away from an op, one at a time, and reads the
messages. docs/adding_an_op.md shows all of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

ROOT = Path(__file__).resolve().parents[2]
GUIDE = "See docs/adding_an_op.md."


def family_of(op: str, root: Path = ROOT) -> str:
    """Return the folder of ``rtkernels/ops`` that has an op's module; ``<family>`` if there is none."""
    found = sorted((root / "rtkernels" / "ops").glob(f"*/{op}.py"))
    return found[0].parent.name if found else "<family>"


def _file(op: str, pattern: str) -> str:
    return pattern.format(family=family_of(op), op=op)


def _samples(op: str) -> str:
    return _file(op, "tests/contracts/samples/{family}/{op}.py")


def samples(op: Op, given: Iterable[tuple[TorchOp, tuple[Any, ...]]]) -> str:
    """Every operator has arguments to be tried with."""
    reached = {torch_op.name for torch_op, _ in given}
    missing = [torch_op.name for torch_op in op.torch_ops if torch_op.name not in reached]
    unknown = sorted(reached - {torch_op.name for torch_op in op.torch_ops})
    if missing:
        return (
            f"{_samples(op.name)} has no sample of {', '.join(missing)}. In samples(device), write for each operator\n"
            f"    yield OPERATOR, (torch.randn(3, 5, device=device), ...)\n"
            f"with OPERATOR imported from the op's module, and all of its arguments in the order of its schema. {GUIDE}"
        )
    if unknown:
        return f"{_samples(op.name)} has samples of {', '.join(unknown)}, which Op(torch_ops=...) does not name"
    return ""


def tests_of(op: Op, root: Path = ROOT) -> str:
    """An op with public functions has one file of tests."""
    found = sorted((root / "tests" / "ops").glob(f"*/test_{op.name}.py"))
    if len(found) == 1:
        return ""
    if found:
        return f"{op.name} has {len(found)} test files: {', '.join(map(str, found))}; expected one"
    wanted = _file(op.name, "tests/ops/{family}/test_{op}.py")
    return f"{wanted} does not exist. Write tests of numerics: CPU reference, emulator and GPU. {GUIDE}"


def bench_rows(op: Op, labels: Iterable[str]) -> str:
    """An op with public functions has benchmark rows, which differ in their labels."""
    wanted, labels = _file(op.name, "bench/rows/{family}/{op}.py"), list(labels)
    if not labels:
        return f"{wanted} has no rows. Write rows(), which yields a Row for each size that users have. {GUIDE}"
    twice = sorted({label for label in labels if labels.count(label) > 1})
    return f"{wanted} has two rows {twice[0]!r}; expected different names or shapes" if twice else ""


def host_call(name: str, op: str, measured: Collection[str]) -> str:
    """The host time of every public function is measured."""
    if name in measured:
        return ""
    return (
        f"{_file(op, 'bench/rows/{family}/{op}.py')} measures no host time of {name}. Write\n"
        f"    def host(x):  # [64, 1024], bfloat16\n"
        f'        return {{"{name}": lambda: rtkernels.{name}(x)}}\n{GUIDE}'
    )


def documentation(name: str, function: Callable[..., Any]) -> str:
    """A public function has a docstring that names every parameter."""
    where = f"{name} in {function.__module__}"
    doc = inspect.getdoc(function)
    if not doc:
        return f"{where} has no docstring. Write what it returns, then sections Args: and Returns:, in Google style"
    missing = [section for section in ("Args:", "Returns:") if section not in doc]
    if missing:
        return f"the docstring of {where} has no section {' and none '.join(missing)}. Write it in Google style"
    words = set(doc.replace(":", " ").split())
    unnamed = [parameter for parameter in inspect.signature(function).parameters if parameter not in words]
    if unnamed:
        lines = "".join(f"\n        {parameter}: ..." for parameter in unnamed)
        return f"the docstring of {where} does not describe {', '.join(unnamed)}. Write under Args:{lines}"
    return ""


def out_parameter(name: str, function: Callable[..., Any]) -> str:
    """A public function that returns tensors can write them to the caller's memory."""
    if name.endswith("_") or "out" in inspect.signature(function).parameters:
        return ""
    return (
        f"{name} in {function.__module__} has no parameter out. Write `*, out: Tensor | None = None` and the head of "
        f"the function as in the example of docs/adding_an_op.md. If no caller can use it, add {name} to WITHOUT_OUT "
        f"in tests/contracts/test_out.py with the reason"
    )


def call(name: str, op: str, known: Collection[str]) -> str:
    """Contracts of public functions (compile, export, wrong arguments, out, process state) have a call of each."""
    if name in known:
        return ""
    return (
        f"{_samples(op)} has no call of {name}. Write\n"
        f'    CALLS = {{"{name}": lambda x, ids: rtkernels.{name}(x)}}\n'
        f"where x is float32 [rows, 256] and may require a gradient, ids int64 [rows, 2] with numbers below 8; the "
        f"call must work for any number of rows. {GUIDE}"
    )


def overwriting(name: str, op: str, known: Collection[str]) -> str:
    """Functions that overwrite an argument are tried with leaves of autograd."""
    if name in known:
        return ""
    return (
        f"{_samples(op)} does not say what {name} overwrites. Write\n"
        f'    OVERWRITING = {{"{name}": ((4, 8), lambda x: rtkernels.{name}(x), False)}}\n'
        f"with the shape of what is overwritten, a call, and whether the function is differentiable"
    )


def emulated(op: Op, launched: Collection[tuple[str, str]]) -> str:
    """Every kernel runs in the emulator."""
    for kernel in op.kernels:
        if kernel.emulated is not True and not (isinstance(kernel.emulated, str) and kernel.emulated):
            return f"{kernel!r} has emulated={kernel.emulated!r}; expected True, or why the emulator cannot run it"
    missing = [k.name for k in op.kernels if k.emulated is True and (k.unit, k.name) not in launched]
    if not missing:
        return ""
    test = _file(op.name, "tests/ops/{family}/test_{op}.py")
    return (
        f"no sample of {op.name} launches {', '.join(missing)} in the emulator. Add a sample to {_samples(op.name)} "
        f"that does, or write in {test}\n"
        f"    def emulated_coverage() -> None:\n"
        f'        with rtkernels.emulate("sm_90"):\n'
        f"            ...  # calls that launch {', '.join(missing)}"
    )


def table_of_names(listed: dict[str, str], public: Iterable[str]) -> str:
    """Every public function is in the table by which ``rtkernels.<name>`` finds it."""
    public = set(public)
    missing, gone = sorted(public - listed.keys()), sorted(listed.keys() - public)
    if not missing and not gone:
        return ""
    what = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"names {', '.join(gone)}, which no Op has"] * bool(gone)
    return f"rtkernels/_public.py {' and '.join(what)}. It is generated: run python docs/make.py"


def parameters(kernel: Any, given: list[str]) -> str:
    """A record has the kernel's parameters in their order: the packed buffer is read by position."""
    spelled = {"ptr": "a pointer", "i64": "i64", "f64": "double", "tmap": "const __grid_constant__ ptx::TensorMap"}
    recorded = " ".join(f"{name}:{kind}" for name, kind in kernel.args)
    if len(given) != len(kernel.args):
        return (
            f'{kernel!r}: args="{recorded}" has {len(kernel.args)} arguments, the kernel in cuda_src/{kernel.unit} has '
            f"{len(given)}: {', '.join(given)}. Write args in the kernel's order: pointers name:ptr, i64 name:i64, "
            f"double name:f64"
        )
    for parameter, (name, kind) in zip(given, kernel.args, strict=True):
        if not _is_of_kind(parameter, kind):
            return (
                f"{kernel!r}: {name} is {kind} in its record, which is {spelled[kind]}, but cuda_src/{kernel.unit} has "
                f"{parameter!r} in its place"
            )
        called = re.search(r"[\s*](\w+)$", parameter)  # None for one that this kernel does not use
        if called and called[1] != name:
            return f"{kernel!r}: {name} is called {called[1]} in cuda_src/{kernel.unit}; give both one name"
    return ""


def _is_of_kind(parameter: str, kind: str) -> bool:
    words = parameter.replace("*", " * ").split()
    if kind == "tmap":
        return parameter.startswith("const __grid_constant__ ptx::TensorMap ")
    return {"ptr": "*", "i64": "i64", "f64": "double"}[kind] in words


def variant_count(op: str, count: int, allowed: int) -> str:
    """Every variant costs compile time and room in the cache."""
    if count <= allowed:
        return ""
    return (
        f"{op} has {count} variants on sm_90a; expected at most {allowed}. Make template arguments run-time arguments, "
        f"or raise the number in MANY_VARIANTS of tests/contracts/test_kernels_compile.py and say there what they gain "
        f"(5 % at least)"
    )
