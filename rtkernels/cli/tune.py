"""``rtkernels tune``: products from a command line, or from a program, measured and kept."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

import rtkernels
from rtkernels.cli.show import table
from rtkernels.errors import ArgumentError
from rtkernels.runtime.build import tuned
from rtkernels.runtime.launch import tuned as in_memory
from rtkernels.runtime.suggest import did_you_mean

FUNCTIONS = ("scaled_mm", "gated_mm", "grouped_mm")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
# Shapes of scales by recipe: of a, and of b [n, k].
RECIPES: dict[str, Any] = {
    "none": lambda m, n, k: (None, None),
    "tensor": lambda m, n, k: ((), ()),
    "row": lambda m, n, k: ((m,), (n,)),
    "block_1x128_128x128": lambda m, n, k: ((m, -(-k // 128)), (-(-n // 128), -(-k // 128))),
    "block_1x128_1x128": lambda m, n, k: ((m, -(-k // 128)), (n, -(-k // 128))),
}


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    if arguments.list:
        print(listed())
        return 0
    if arguments.clear:
        removed = tuned.clear()
        in_memory.forget()
        print(f"removed the choices for {removed} GPUs")
        return 0
    problems = _from_script(arguments.script) if arguments.script is not None else _from_sizes(arguments)
    print(f"{len(problems)} products", file=sys.stderr)
    rtkernels.tune(problems, progress=print)
    return 0


def listed() -> str:
    """Return all measured choices as a table."""
    rows = []
    for gpu in tuned.gpus():
        for source, families in tuned.load(gpu).items():
            for choices in families.values():
                for choice in choices.values():
                    told = ", ".join(f"{name} {value}" for name, value in choice["options"].items())
                    times = f"{choice.get('us')} us, was {choice.get('default_us')} us"
                    rows.append([gpu, source, choice.get("title", ""), choice["backend"], told, times])
    if not rows:
        return "no choices were measured"
    return table(["GPU", "kernels", "problem", "backend", "options", "time"], rows)


def _from_script(script: list[str]) -> list[Any]:
    if not script:
        raise ArgumentError("--script is empty; expected the path of a program and its arguments")
    if not Path(script[0]).is_file():
        raise ArgumentError(f"--script is {script[0]!r}; expected the path of a Python program")
    before, path = sys.argv, list(sys.path)
    sys.argv = list(script)
    sys.path.insert(0, str(Path(script[0]).resolve().parent))
    try:
        with rtkernels.record_problems() as problems:
            try:
                runpy.run_path(script[0], run_name="__main__")
            except SystemExit as end:
                if end.code not in (None, 0):
                    raise ArgumentError(f"{script[0]} ended with {end.code!r}; nothing was measured") from None
    finally:
        sys.argv, sys.path[:] = before, path
    if not problems:
        raise ArgumentError(f"{script[0]} computed no product with rtkernels; there is nothing to measure")
    return problems


def _from_sizes(arguments: argparse.Namespace) -> list[Any]:
    name, dtype = arguments.function, arguments.dtype
    if name not in FUNCTIONS:
        raise ArgumentError(
            f"function is {name!r}; expected one of {', '.join(FUNCTIONS)}{did_you_mean(str(name), FUNCTIONS)}"
        )
    if dtype not in DTYPES:
        raise ArgumentError(f"--dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    recipe = arguments.recipe or ("row" if dtype in ("fp8", "int8") else "none")
    if recipe not in RECIPES or (recipe != "none" and dtype not in ("fp8", "int8")):
        raise ArgumentError(
            f"--recipe is {recipe!r} for {dtype}; expected one of {', '.join(RECIPES)}, and none for 16 bits"
        )
    if (arguments.groups is not None) != (name == "grouped_mm"):
        raise ArgumentError("--groups goes with grouped_mm, which needs it")
    if not arguments.sizes:
        raise ArgumentError("sizes are missing; expected some MxNxK, for example 16x4096x4096")
    return [_problem(name, text, dtype, recipe, arguments.groups or 1) for text in arguments.sizes]


def _problem(name: str, text: str, dtype: str, recipe: str, groups: int) -> Any:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentError(f"size {text!r} is not MxNxK; expected three numbers from 1 up, for example 16x4096x4096")
    m, n, k = map(int, parts)
    columns = 2 * n if name == "gated_mm" else n

    def empty(shape: tuple[int, ...] | None, of: torch.dtype) -> torch.Tensor | None:
        return None if shape is None else torch.empty(shape, dtype=of, device="meta")

    shape_a, shape_b = RECIPES[recipe](m, columns, k)
    if name == "grouped_mm":
        offs = torch.empty(groups, dtype=torch.int32, device="meta")
        shape_b = None if shape_b is None else (groups, *shape_b)
        return rtkernels.explain(
            rtkernels.grouped_mm, empty((m, k), DTYPES[dtype]), empty((groups, n, k), DTYPES[dtype]),
            empty(shape_a, torch.float32), empty(shape_b, torch.float32), offs=offs,
        ).problem  # fmt: skip
    return rtkernels.explain(
        getattr(rtkernels, name), empty((m, k), DTYPES[dtype]), empty((columns, k), DTYPES[dtype]),
        empty(shape_a, torch.float32), empty(shape_b, torch.float32),
    ).problem  # fmt: skip
