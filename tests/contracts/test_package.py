"""What gets installed, and what importing it does."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.interpreter import run_python

import rtkernels

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, *, cwd: Path | None = None, **environment: str) -> str:
    """Run code in a fresh interpreter that finds this checkout's package, and return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = run_python("-c", code, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_touches_no_device_and_loads_no_compiler():
    loaded = json.loads(
        python("""
import json, sys, torch
before = set(sys.modules)
import rtkernels
new = sorted(set(sys.modules) - before)
maps = open("/proc/self/maps").read()
cupy = [m for m in sys.modules if m.split(".")[0] in ("cupy", "cupy_backends")]
cuda = torch.cuda.is_initialized()
print(json.dumps({"new": new, "cupy": cupy, "initialised": cuda, "mapped": "cupy" in maps}))
""")
    )
    assert not loaded["initialised"]
    assert loaded["cupy"] == []
    assert not loaded["mapped"]
    assert [name for name in loaded["new"] if name.startswith("rtkernels")] == ["rtkernels", "rtkernels._public"]


def test_import_takes_less_than_50_ms_beyond_torch():
    code = """
import time, torch
start = time.perf_counter()
import rtkernels
print(time.perf_counter() - start)
"""
    assert min(float(python(code)) for _ in range(2)) < 0.05


def test_using_an_op_on_cpu_loads_no_compiler():
    printed = python("""
import sys, torch, rtkernels
y = rtkernels.rms_norm(torch.ones(2, 8))
print(tuple(y.shape), "cupy" in sys.modules, torch.cuda.is_initialized())
""")
    assert printed.split("\n")[0] == "(2, 8) False False"


@pytest.mark.one_in(3)
def test_import_works_without_cupy():
    printed = python("""
import sys
sys.modules["cupy"] = sys.modules["cupy_backends"] = None   # importing either now fails
import torch, rtkernels
print(tuple(rtkernels.rms_norm(torch.ones(2, 8)).shape))
try:
    rtkernels.warm(["sm_80"], ["rms_norm"])
except rtkernels.ToolkitError as error:
    print("cupy-cuda13x nvidia-cuda-nvrtc" in str(error))
""")
    assert printed.split("\n")[:2] == ["(2, 8)", "True"]


def test_public_names_resolve():
    for name in ("rms_norm", "glu", "quantize_fp8", "dequantize_fp8", "warm", "emulate"):
        assert callable(getattr(rtkernels, name)), name
        assert name in dir(rtkernels)
    assert rtkernels.cache.path() is not None
    assert issubclass(rtkernels.ArgumentError, rtkernels.RtkError)
    assert rtkernels.RtkError is rtkernels.errors.RtkError


@pytest.mark.one_in(3)
def test_warm_stays_callable_whatever_is_imported():
    printed = python("""
import rtkernels.runtime.warm, rtkernels.cache, rtkernels.cli.doctor, rtkernels
print(callable(rtkernels.warm))
from rtkernels import *
print(callable(warm), callable(rms_norm))
""")
    assert printed.split("\n")[:2] == ["True", "True True"]


def test_unknown_name_is_an_attribute_error_that_lists_the_ops():
    with pytest.raises(AttributeError, match=r"'rms_nrom'.*rms_norm"):
        _ = rtkernels.rms_nrom


def test_no_source_mentions_a_toolkit_include_path():
    """The extras install no CUDA headers, so no unit may need one."""
    angled = re.compile(rb"^\s*#\s*include\s*<", re.MULTILINE)
    files = list((ROOT / "cuda_src").rglob("*.cu*"))
    assert files
    assert [str(path) for path in files if angled.search(path.read_bytes())] == []


@pytest.mark.one_in(1000)
def test_no_assert_guards_user_input():
    for path in (ROOT / "rtkernels").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"^[^#\n]*\bassert\b", text, re.MULTILINE):  # the others need not be parsed
            nodes = ast.walk(ast.parse(text))
            assert not [node.lineno for node in nodes if isinstance(node, ast.Assert)], path


# ---- wheel and sdist -------------------------------------------------------------------------------------

needs_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="building needs hatchling, from the test extra"
)


def build(source: Path, kind: str, out: Path) -> Path:
    """Build one distribution of a source tree with the declared backend, offline."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def expected_files() -> set[str]:
    """Everything the wheel must carry, by its name there."""
    device = [path for path in (ROOT / "cuda_src").rglob("*") if path.suffix in (".cu", ".cuh")]
    kinds = (".py", ".typed", ".h", ".cuh", ".cpp")
    package = [path for path in (ROOT / "rtkernels").rglob("*") if path.suffix in kinds]
    return {f"rtkernels/{path.relative_to(ROOT).as_posix()}" for path in device} | {
        path.relative_to(ROOT).as_posix() for path in package
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@needs_hatchling
def test_wheel_is_pure_and_carries_every_source(wheel: Path):
    assert wheel.name == f"rtkernels-{rtkernels.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected_files() <= names
    assert any(name.startswith("rtkernels/emulator/include/") for name in names)
    assert "rtkernels/py.typed" in names
    top = {name.split("/")[0] for name in names}
    assert top == {"rtkernels", f"rtkernels-{rtkernels.__version__}.dist-info"}, "tests and bench stay out"


@needs_hatchling
def test_wheel_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        info = f"rtkernels-{rtkernels.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata, re.MULTILINE)
    assert sorted(required) == ["numpy", "torch"]
    for extra, packages in {
        "cuda12": {"cupy-cuda12x", "nvidia-cuda-nvrtc-cu12"},
        "cuda13": {"cupy-cuda13x", "nvidia-cuda-nvrtc"},
    }.items():
        found = re.findall(rf"^Requires-Dist: ([\w-]+).*extra == '{extra}'", metadata, re.MULTILINE)
        assert set(found) == packages, "an extra brings CuPy and NVRTC, and no more"
    tools = re.findall(r"^Requires-Dist: (.*); extra == 'test'", metadata, re.MULTILINE)
    assert tools and not [name for name in tools if re.match("cupy|nvidia|torch", name)], "CuPy is the user's choice"
    assert all("==" not in line for line in re.findall("^Requires-Dist: ([^;]*)", metadata, re.MULTILINE)), "no pins"
    assert re.search("^Project-URL: Homepage, https://", metadata, re.MULTILINE)
    assert "Requires-Python: >=3.10" in metadata
    assert "rtkernels = rtkernels.__main__:main" in scripts


@needs_hatchling
@pytest.mark.one_in(3)
def test_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path):
    sdist = build(ROOT, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(tmp_path / "unpacked", filter="data")
        else:
            archive.extractall(tmp_path / "unpacked")
    (tree,) = (tmp_path / "unpacked").iterdir()
    assert (tree / "tests" / "contracts" / "test_package.py").is_file()
    assert (tree / "examples" / "moe_layer.py").is_file()
    rebuilt = build(tree, "wheel", tmp_path / "rebuilt")
    first, second = (
        {item.filename: item.CRC for item in zipfile.ZipFile(path).infolist()} for path in (wheel, rebuilt)
    )
    assert first == second


@needs_hatchling
def test_installed_wheel_uses_its_own_sources(wheel: Path, tmp_path: Path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    printed = python(
        "from rtkernels.runtime.build import sources; print(sources.root()); print(len(sources.units()))",
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path / "site"),
    )
    where, count = printed.split()
    assert Path(where) == tmp_path / "site" / "rtkernels" / "cuda_src"
    assert int(count) == len(list((ROOT / "cuda_src").rglob("*.cu")))


@needs_hatchling
@pytest.mark.one_in(1000)
def test_editable_install_reads_live_sources(tmp_path: Path):
    """The editable wheel points at the checkout and the copy of the sources it also carries is not used."""
    code = f"""
import hatchling.build, os
os.chdir({str(ROOT)!r})
print(hatchling.build.build_editable({str(tmp_path)!r}))
"""
    name = python(code).split()[-1]
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / name) as archive:
        archive.extractall(site)
    (pth,) = site.glob("*.pth")
    assert pth.read_text().split() == [str(ROOT)]
    # What site.py does with a .pth file: append its lines to sys.path.
    printed = python(
        f"import sys; sys.path += [{str(site)!r}, {str(ROOT)!r}]\n"
        "from rtkernels.runtime.build import sources; print(sources.root())",
        cwd=tmp_path,
        PYTHONPATH="",
    )
    assert Path(printed.strip()) == ROOT / "cuda_src"


def test_ci_runs_the_command_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"<!-- test-command -->\n```bash\n(.+)\n```", readme)
    assert "pip install" in command
    assert "pytest" in command
    assert "[cuda13,test]" in command, "CuPy is one extra, the tools of the tests are another"
    assert "<!-- test-command -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_ci_tests_the_oldest_torch_that_is_promised():
    promised = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert f"torch {promised} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"oldest={promised}.0\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_readme_shows_its_images_on_an_index_page():
    images = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert all(link.startswith("https://") for link in images)
    for link in images:
        assert (ROOT / link.split("/main/")[1]).is_file(), link


def test_messages_name_packages_that_exist():
    """An extra of a project that is on no index cannot be installed by name."""
    for path in (ROOT / "rtkernels").rglob("*.py"):
        assert "rtkernels[" not in path.read_text(encoding="utf-8"), path
