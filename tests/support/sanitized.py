"""The emulator compiled with AddressSanitizer and UBSan, in a process that has their library.

``python tests/support/sanitized.py CASE...`` runs cases, each in a fork, and prints a line of JSON about each. Cases
are the families of ``cuda_src`` (one kernel of each, `CALLS`) and the planted overflows (`PLANTED`).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
# Memory of the interpreter is not looked at; frames stay on the stacks of fibers, where the emulator expects them.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1:exitcode=86",
    "UBSAN_OPTIONS": "exitcode=87",
}


def libraries() -> list[str] | None:
    """Return the libraries to preload for the sanitizers of the host compiler, None if it has none."""
    from rtkernels.emulator._compiler import compiler

    tool = compiler()
    names = [f"libclang_rt.asan-{os.uname().machine}.so"] if tool.is_clang else ["libasan.so", "libubsan.so"]
    found = []
    for name in names:
        command = [*tool.command, f"-print-file-name={name}"]
        path = Path(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
        if not path.is_absolute() or not path.exists():
            return None
        content = path.read_bytes()
        script = None if content.startswith(b"\x7fELF") else re.search(rb"/\S+\.so[.\d]*", content)  # of the linker
        found.append(script[0].decode() if script else str(path))
    return found


def run_cases(cases: Sequence[str], timeout: float = 600) -> dict[str, dict[str, Any]]:
    """Run cases in a process with the sanitizers' library; return of each its exit code, output and kernels."""
    env = {**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(libraries() or [])}
    command = [sys.executable, str(TESTS / "support" / "sanitized.py"), *cases]
    options = {"env": env, "timeout": timeout, "cwd": TESTS.parent, "preexec_fn": _fixed_addresses}
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.stdout:
            break
    if [line["case"] for line in found] != list(cases):
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return {line.pop("case"): line for line in found}


def _fixed_addresses() -> None:
    """Older sanitizers abort if the kernel happens to map libraries into their shadow memory.

    Where addresses cannot be fixed (in some containers), trying again helps.
    """
    ctypes.CDLL(None).personality(0x0040000)  # ADDR_NO_RANDOMIZE


# ---- one kernel of every family -------------------------------------------------------------------------------------


def _samples(op: str, first: int = 0, count: int = 1) -> Callable[[], None]:
    def call() -> None:
        from contracts.samples import samples_of

        for torch_op, args in samples_of(op, "cpu")[first : first + count]:
            torch_op(*args)

    return call


def _torchs(names: str | list[str], function: Callable[[Any], Any]) -> Callable[[], None]:
    def call() -> None:
        import torch

        import rtkernels

        with rtkernels.use(names):
            function(torch)

    return call


def _probe() -> None:
    import torch

    from support.probe import convert

    convert(torch.randn(100), torch.bfloat16)


# By folder of cuda_src; test_sanitized.py compares it with what is there.
CALLS: dict[str, Callable[[], None]] = {
    "act": _samples("glu"),
    "attention": _samples("attention"),
    "conv": _samples("conv"),
    "gemm": _samples("scaled_mm"),
    "index": _samples("embedding"),
    "layout": _samples("transpose"),
    "loss": _samples("cross_entropy"),
    "moe": _samples("moe_permute"),
    "multi": _samples("multi_tensor"),
    "norm": _samples("rms_norm"),
    "pointwise": _samples("inplace"),
    "probe": _probe,
    "quant": _samples("quantize_fp8"),
    "random": _torchs("rng", lambda torch: torch.empty(1000).uniform_()),
    "reduce": _samples("softmax"),
    "rope": _samples("qk_norm_rope", 0, 2),  # the backward has the most arguments of all
    "router": _samples("topk_router"),
    "scan": _torchs("scan", lambda torch: torch.randn(3, 300).cumsum(1)),
    "shared": _samples("qk_norm_rope", 1),
    "sort": _torchs("sort", lambda torch: torch.randn(3, 300).sort(1)),
    "window": _torchs("win", lambda torch: torch.nn.functional.avg_pool2d(torch.randn(2, 3, 9, 9), 3)),
}


def _family(folder: str) -> list[str]:
    import rtkernels

    with rtkernels.emulate("sm_90"):
        CALLS[folder]()
    return sorted(f"{unit}: {kernel}" for unit, kernel in rtkernels.emulator.launched())


# ---- planted overflows ----------------------------------------------------------------------------------------------


def _kernel(name: str, dtype: str = "float32", **more: Any) -> None:
    import torch

    from support.emulator_harness import run

    y = torch.zeros(64, dtype=getattr(torch, dtype))
    run("sanitized.cu", name, block=64, **({"x": torch.ones(64)} if name == "in_order" else {}), y=y, **more)
    if name == "in_order":
        want = torch.tensor([(63 - i) % 4 + (63 - (i ^ 1)) % 4 + 9.0 for i in range(64)])
        assert torch.equal(y, want)
    if name == "many_arguments":
        assert y.tolist() == [88 + 8000] * 64


def _many_arguments() -> None:
    _kernel("many_arguments", "int64", **{f"{letter}{i}": 1 for letter in "abcdefghijkl" for i in range(8)})


def _after_a_report() -> None:
    """Fibers that a report abandoned inside functions; the next launch reuses their stacks."""
    import pytest
    import torch

    from rtkernels.emulator import EmulatorError
    from support.emulator_harness import run

    for _ in range(2):
        with pytest.raises(EmulatorError, match="out of bounds"):
            run("bugs.cu", "read_past_end", grid=2, block=64, x=torch.ones(100), y=torch.empty(100), n=100)
        _kernel("in_order", n=7)


def _runtime_overflow() -> None:
    """An earlier runtime: room for 64 arguments, however many there are."""
    from rtkernels.emulator import _build

    folder = Path("runtime").absolute()  # in the folder of this case
    shutil.copytree(_build.RUNTIME, folder)
    source = folder / "runtime.cpp"
    line = "u64* const args = static_cast<u64*>(__builtin_alloca(launch->arg_count * sizeof(u64)));"
    assert source.read_text().count(line) == 1, "this planting no longer applies"
    source.write_text(source.read_text().replace(line, "u64 args[64];"))
    _build.RUNTIME = folder
    _many_arguments()


# What runs it, and what the sanitizer must say of it; "" if it is in order.
PLANTED: dict[str, tuple[Callable[[], None], str]] = {
    "in_order": (lambda: _kernel("in_order", n=7), ""),
    "many_arguments": (_many_arguments, ""),
    "after_a_report": (_after_a_report, ""),
    "runtime_overflow": (_runtime_overflow, "stack-buffer-overflow"),
    "local_overflow": (lambda: _kernel("local_overflow", n=9), "stack-buffer-overflow"),
    "table_overflow": (lambda: _kernel("table_overflow", n=9), "index 9 out of bounds"),
    "shift_too_far": (lambda: _kernel("shift_too_far", "int64", n=64), "shift exponent 64 is too large"),
}


# ---- the process ----------------------------------------------------------------------------------------------------


def _run(case: str) -> list[str]:
    if case in PLANTED:
        PLANTED[case][0]()
        return []
    return _family(case)


def main(cases: list[str]) -> None:
    """Run each case in a fork, which a sanitizer may abort; print how each ended."""
    os.environ.pop("LD_PRELOAD")  # not for the compiler
    import torch

    from rtkernels.emulator import _build, _compiler

    torch.set_num_threads(1)
    _compiler.sanitized = True
    _build.runtime()
    print("started", flush=True)
    for case in cases:
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory() as folder:
            if not (child := os.fork()):
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(folder)
                code = 1
                try:
                    print("\n".join(["", "launched:", *_run(case)]), flush=True)
                    code = 0
                finally:
                    if code:
                        import traceback

                        traceback.print_exc()
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            output.seek(0)
            text = output.read()
        launched = text.partition("\nlaunched:\n")[2].splitlines() if code == 0 else []
        print(json.dumps({"case": case, "code": code, "launched": launched, "output": text[:10_000]}), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    main(sys.argv[1:])
