"""One module handles files: no other one opens, creates, moves or removes any, or loads code from one.

``rtkernels/runtime/build`` checks owners and permissions (``trust.py``) before it writes or reads. What is listed here
besides either reads what the system or the package itself provides, or writes to a path that the caller named.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "rtkernels"

CALLS = {
    *("open", "fdopen", "mkdir", "makedirs", "mkdtemp", "mkstemp", "mktemp", "gettempdir", "gettempprefix"),
    *("NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile", "TemporaryDirectory"),
    *("write_text", "write_bytes", "read_text", "read_bytes", "touch", "mkfifo", "mknod"),
    *("renames", "rename", "unlink", "remove", "rmdir", "removedirs", "rmtree", "truncate", "ftruncate"),
    *("chmod", "fchmod", "lchmod", "chown", "symlink", "symlink_to", "hardlink_to", "link", "chdir", "umask"),
    *("copyfile", "copytree", "copy2", "copyfileobj", "unpack_archive", "make_archive"),
    *("save", "savez", "savetxt", "tofile", "fromfile", "memmap", "loadtxt", "genfromtxt", "save_file", "load_file"),
    *("safe_open", "from_file", "save_pretrained", "CDLL", "LoadLibrary", "dlopen", "load_library", "load_inline"),
    *("run", "Popen", "check_call", "check_output", "call", "system", "execv", "execve", "spawnv"),
}
OF_MODULES = {  # names that methods of other things have too: counted where a module of files or processes has them
    *("save", "remove", "copy2", "run", "call", "open", "truncate", "rename", "link", "system", "touch", "copyfile"),
}
MODULES = {"os", "io", "shutil", "subprocess", "tempfile", "torch", "np", "numpy", "gzip", "zipfile", "tarfile"}
REPLACING = ("os.replace", "os.link", "shutil.move", "shutil.copy", "torch.load", "np.load")
IMPORTS = {"tempfile", "shelve", "sqlite3", "dbm", "mmap", "zipfile", "tarfile", "fileinput"}

DECIDE = {f"runtime/build/{name}.py" for name in ("places", "store", "locks", "tuned")}
ALLOWED = {
    "runtime/build/trust.py": {"_is_unmapped": "/proc"},
    "runtime/build/sources.py": {"_load": "reads the package's sources, and those whose path a Kernel gives"},
    "runtime/build/nvrtc.py": {"library_path": "/proc/self/maps", "header_version": "reads the toolkit's headers"},
    "runtime/cpus.py": {"_quotas": "/proc", "_quota_v1": "cgroups", "_quota_v2": "cgroups"},
    "runtime/launch/driver.py": {"_cuda": "the driver's library, by its name"},
    "runtime/launch/tensor_map.py": {"_encode": "likewise"},
    "cli/doctor.py": {"_libraries": "/proc/self/maps", "_driver": "the driver's library, by its name"},
    "emulator/_compiler.py": {"_contraction": "/proc/cpuinfo", "_probe": "asks the compiler", "accepted": "likewise"},
    "emulator/_build.py": {
        "_closure": "reads the package's sources, and those whose path a Kernel gives",
        "runtime": "likewise",
        "_cached": "reads what the compiler wrote into a directory of places.scratch",
        "_compile": "starts the compiler, which writes there",
        "locate": "addr2line reads a library that was loaded",
    },
    "emulator/_launch.py": {"_runtime": "a path that _build returned", "_library": "likewise"},
    "calibration.py": dict.fromkeys(("save", "load", "checkpoint_key"), "the caller's path"),
    "models/checkpoint_files.py": {"write_tokenizer": "the caller's folder"},
    "models/fp8_checkpoint.py": {"export_fp8": "the caller's folder", "_loaded": "the caller's folder"},
    "aten/selection.py": {"add_file": "the caller's path"},
    "aten/enable.py": {"__init__": "the caller's path", "__call__": "the caller's path"},
    "__main__.py": {"main": "os.devnull"},
}


def calls(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, str, int]]:
    """Yield (function it is in, call, line) of everything that could open, create, move, remove or execute a file."""
    for node in ast.iter_child_nodes(tree):
        here = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not inside else inside
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for module in modules:
                if (module or "").split(".")[0] in IMPORTS:
                    yield here, f"import {module}", node.lineno
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in CALLS - OF_MODULES | {"open"}:
                yield here, node.func.id, node.lineno
            elif isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
                owner = ast.unparse(node.func.value)
                path = node.func.attr == "open" and owner == "path"
                if node.func.attr not in OF_MODULES or owner in MODULES or path:
                    yield here, f"{owner}.{node.func.attr}", node.lineno
            elif ast.unparse(node.func) in REPLACING:
                yield here, ast.unparse(node.func), node.lineno
        yield from calls(node, here)


def found(source: str) -> list[tuple[str, str, int]]:
    return list(calls(ast.parse(source)))


def test_no_other_module_decides_where_files_are() -> None:
    others, used = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name in DECIDE:
            continue
        for function, call, line in found(path.read_text()):
            if function in ALLOWED.get(name, {}):
                used.add((name, function))
            else:
                others.append(f"{name}:{line}: {call} in {function or 'the module'}")
    assert not others, "\n".join(["go through rtkernels/runtime/build/places.py:", *others])
    stale = {(name, function) for name, functions in ALLOWED.items() for function in functions} - used
    assert not stale, f"listed, but touches no file any more: {sorted(stale)}"


@pytest.mark.parametrize(
    "source",
    [
        "open('x', 'w')", "Path(x).write_text('')", "folder.mkdir(parents=True)", "import tempfile",
        "from tempfile import mkdtemp", "os.replace(a, b)", "shutil.rmtree(x)", "np.save(x, y)", "torch.save(x, y)",
        "os.makedirs(x)", "ctypes.CDLL(x)", "subprocess.run(['cc'])", "def f():\n    p.unlink()", "os.open(x, 0)",
        "class A:\n    def f(self):\n        Path('x').read_bytes()",
    ],
)  # fmt: skip
def test_every_kind_of_access_is_seen(source: str) -> None:
    assert found(source)


def test_what_is_no_access_is_not() -> None:
    assert not found("x.copy_(y)\nnames.remove('a')\nrun(functor)\nop.call(x)\nself.save()\ntext.replace('a', 'b')")
