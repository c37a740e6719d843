"""The command line, run the way a user runs it (in process where that changes nothing, for speed)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.interpreter import run_python
from support.ops import op_named

import rtkernels
from rtkernels.__main__ import main
from rtkernels.cli import show
from rtkernels.errors import KernelCompileError, ToolkitError
from rtkernels.runtime import cpus
from rtkernels.runtime import warm as warming
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import nvrtc, store
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator import registry
from rtkernels.runtime.targets import CI_TARGETS, parse

ROOT = Path(__file__).resolve().parents[2]
SMALL = "column_sum"  # the op with the fewest variants
COUNT = len(op_named(SMALL).kernels[0].variants(parse("sm_80")))  # the same for every target

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.fixture(autouse=True)
def _private_cache(cache_dir: Path) -> None:
    """Every test here starts with an empty cache and no variables set."""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code and what it printed."""
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def shell(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return run_python("-m", "rtkernels", *arguments, env=env)


# ---- usage and errors ------------------------------------------------------------------------------------


def test_help_names_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in ("doctor", "list", "warm", "cache", "show", "demo"):
        assert re.search(rf"^\s+{command}\s", out, re.MULTILINE)


def test_version(capsys):
    assert run(capsys, "--version")[:2] == (0, f"rtkernels {rtkernels.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("wram",), "did you mean 'warm'?"),
        (("cache", "claer"), "did you mean 'clear'?"),
        (("warm", "--arch", "sm_9x"), "'sm_9x' is not a compilation target"),
        (("warm", "--arch", "sm_9oa"), "did you mean 'sm_90a'"),
        (("cache", "clear", "--arch", "sm80x"), "did you mean 'sm_80'"),
        (("warm", "--arch", "sm_70"), "8.0"),
        (("warm", "--arch", ","), "at least one name"),
        (("warm", "--arch", "sm_80", "--op", "rms_nrom"), "no op 'rms_nrom'; did you mean 'rms_norm'"),
        (("warm", "--arch", "sm_80", "--op", "kl-div"), "did you mean 'kl_div'"),
        (("list", "--op", "rms_norm_fwd"), "'rms_norm_fwd'; that is a kernel of rms_norm"),
        (("warm", "--arch", "sm_80", "--op", "zzz"), "no op 'zzz'; there are act, "),
        (("warm", "--arch", "sm_80", "--jobs", "0"), "--jobs"),
        (("warm", "--arch", "sm_80", "--out", __file__), "is not a directory"),
        (("cache",), "ACTION"),
        (("cache", "clear", "--op", "nothing"), "no op 'nothing'"),
        (("show", "nothing", "--arch", "sm_80"), "no op 'nothing'"),
        (("show", SMALL, "--arch", "sm_80", "--kernel", "nothing"), "no kernel 'nothing'"),
        (("show", SMALL, "--arch", "sm_80", "--kernel", "colum_sum"), "did you mean 'column_sum'?"),
        (("show", SMALL, "--source", "--kernel", "colum_sum"), "did you mean 'column_sum'?"),
        (("show", SMALL, "--source", "--kernel", "nothing"), "no kernel 'nothing'"),
        (("show", SMALL, "--arch", "sm_80", "--variant", "99"), f"variants 0 to {COUNT - 1}"),
        (("show", SMALL, "--arch", "sm_80", "--ptx", "--source"), "not allowed with"),
        (("show", SMALL, "--source", "--variant", "1"), "--variant"),
        (("show", SMALL, "--call", "--kernel", SMALL), "no meaning with --call"),
        (("show", "nothing", "--call"), "no op 'nothing'"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(capsys, arguments, said):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("rtkernels")
    assert err.count("\n") == 1
    assert said in err


@no_gpu
def test_warm_without_a_target_says_what_to_name(capsys):
    code, _, err = run(capsys, "warm")
    assert code == 2
    assert "this machine has no GPU and RTKERNELS_ARCH is not set" in err
    assert "--arch sm_80,sm_90a" in err


def test_bad_environment_value_is_a_usage_error(capsys, monkeypatch):
    monkeypatch.setenv("RTKERNELS_ARCH", "volta")
    code, _, err = run(capsys, "warm", "--op", SMALL)
    assert code == 2
    assert "RTKERNELS_ARCH='volta'" in err


def test_missing_compiler_is_one_line_and_code_1(capsys, monkeypatch):
    def missing() -> tuple[int, int]:
        raise ToolkitError("CuPy cannot be imported.\nInstall it")

    monkeypatch.setattr(nvrtc, "version", missing)
    code, _, err = run(capsys, "warm", "--arch", "sm_80", "--op", SMALL)
    assert (code, err) == (1, "rtkernels: CuPy cannot be imported. | Install it\n")


@pytest.mark.one_in(1000)
def test_closed_pipe_is_quiet():
    code = "import sys; from rtkernels.__main__ import main; sys.exit(main(['list', '--json', '--op', 'scaled_mm']))"
    command = f'{sys.executable} -c "{code}" | head -n 1; exit ${{PIPESTATUS[0]}}'
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[\n", "")


# ---- list ------------------------------------------------------------------------------------------------


def _listed() -> list[tuple[Any, Kernel]]:
    """Every kernel that has a variant; those of a user's `pointwise` may have none."""
    found = [parse(name) for name in ("sm_80", "sm_90a")]
    return [(op, kernel) for op, kernel in registry.kernels() if any(kernel.variants(target) for target in found)]


@pytest.mark.one_in(3)
def test_list_shows_every_kernel_and_what_is_cached(capsys):
    rtkernels.warm(["sm_80"], [SMALL])
    code, out, _ = run(capsys, "list", "--arch", "sm_80,sm_90a")
    assert code == 0
    for op, kernel in _listed():
        assert re.search(rf"^{op.name}\s+{kernel.name}\s+{re.escape(kernel.unit)}\s", out, re.MULTILINE)
    assert re.search(rf"^{SMALL}\s.*\s{COUNT}/{COUNT}\s+0/{COUNT}$", out, re.MULTILINE)
    assert "quantize_fp8" in out
    assert f"{COUNT} in the cache" in out


def test_list_json_has_one_entry_per_variant(capsys):
    code, out, _ = run(capsys, "list", "--json", "--op", SMALL)
    assert code == 0
    rows = json.loads(out)
    assert {row["op"] for row in rows} == {SMALL}
    assert {row["cached"] for row in rows} == {False}
    if not torch.cuda.is_available():
        assert {row["target"] for row in rows} == set(CI_TARGETS)
        assert len(rows) == COUNT * len(CI_TARGETS)


@pytest.mark.one_in(3)
def test_tiers_select_kernels(capsys, monkeypatch):
    monkeypatch.setattr(op_named(SMALL).kernels[0], "tier", "serve")
    code, out, _ = run(capsys, "list", "--arch", "sm_80,sm_90a")
    assert code == 0
    for op, kernel in _listed():
        tier = "serve" if op.name == SMALL else kernel.tier
        assert kernel.tier in ("core", "serve", "aten")
        assert re.search(rf"^{op.name}\s+{kernel.name}\s+{re.escape(kernel.unit)}\s+{tier}\s", out, re.MULTILINE)
    code, out, _ = run(capsys, "list", "--arch", "sm_80", "--json", "--tier", "serve,aten")
    assert {row["op"] for row in json.loads(out)} == {
        SMALL,
        *(op.name for op, k in registry.kernels() if k.tier != "core" and k.supports(parse("sm_80"))),
    }
    assert rtkernels.warm(["sm_80"], [SMALL], tiers=["core"]).total == 0
    code, out, _ = run(capsys, "warm", "--arch", "sm_80", "--op", SMALL, "--tier", "serve")
    assert (code, out.split(":")[0]) == (0, f"{COUNT} kernels for sm_80")
    code, _, err = run(capsys, "warm", "--arch", "sm_80", "--tier", "cores")
    assert (code, err) == (2, "rtkernels: no tier 'cores'; did you mean 'core'?\n")
    with pytest.raises(ValueError, match=r"kernel f has tier 'fast'; expected one of core, serve, aten"):
        Kernel("f.cu", "f", template="T", args="x:ptr", variants=[], max_registers=32, tier="fast")


def test_ops_are_found_by_the_functions_they_offer(capsys):
    (op,) = warming.select(["dequantize_fp8"])
    assert "dequantize_fp8" in op.public
    code, out, _ = run(capsys, "list", "--json", "--op", "kl_div", "--arch", "sm_80")
    assert code == 0
    assert {row["op"] for row in json.loads(out)} == {"divergence"}
    code, out, _ = run(capsys, "show", "kl_div", "--source")
    assert code == 0
    assert "// ==== " in out
    assert run(capsys, "cache", "clear", "--op", "kl_div")[0] == 0


# ---- warm ------------------------------------------------------------------------------------------------


def test_warm_compiles_once_into_the_named_directory(capsys, tmp_path):
    arguments = ("warm", "--arch", "sm_80,sm_90a", "--op", SMALL, "--out", str(tmp_path / "kernels"), "--jobs", "2")
    code, out, err = run(capsys, *arguments)
    total = 2 * COUNT
    assert code == 0
    assert re.findall(r"^\d+/6 kernels, [\d.]+(?:/s| s each), \d+ s$", err, re.MULTILINE) == err.splitlines()
    assert err.splitlines()[-1].startswith("6/6 kernels")
    assert f"{total} kernels for sm_80, sm_90a: {total} compiled, 0 already there, 0 failed" in out
    assert len(list((tmp_path / "kernels").rglob("kernel.cubin"))) == total
    assert rtkernels.cache.ls() == []

    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert f"0 compiled, {total} already there" in out


def test_warm_of_every_variant_builds_the_rare_ones_too(capsys, monkeypatch):
    (kernel,) = op_named(SMALL).kernels
    first, *rare = kernel.variants(parse("sm_80"))
    monkeypatch.setattr(kernel, "_variants", [first])
    monkeypatch.setattr(kernel, "_rare", lambda target: rare)
    code, out, _ = run(capsys, "warm", "--arch", "sm_80", "--op", SMALL)
    assert (code, out.split(",")[0]) == (0, "1 kernels for sm_80: 1 compiled")
    code, out, _ = run(capsys, "warm", "--arch", "sm_80", "--op", SMALL, "--every-variant")
    assert (code, out.split(",")[0]) == (0, f"{COUNT} kernels for sm_80: {COUNT - 1} compiled")
    assert rtkernels.warm(["sm_80"], [SMALL], every_variant=True).present == COUNT


def test_warmed_directory_serves_a_process_that_may_not_compile(tmp_path, monkeypatch):
    rtkernels.warm(["sm_90a"], [SMALL], out=tmp_path / "kernels")
    build_cache.forget()
    monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", str(tmp_path / "kernels"))
    monkeypatch.setenv("RTKERNELS_NO_COMPILE", "1")
    report = rtkernels.warm(["sm_90a"], [SMALL])
    assert (report.compiled, report.present, report.failures) == (0, COUNT, [])
    assert build_cache.stats.compiles == 0


def test_warm_says_that_compiling_is_forbidden_instead_of_advising_itself(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RTKERNELS_NO_COMPILE", "1")
    for place in ((), ("--out", str(tmp_path / "kernels"))):
        code, out, err = run(capsys, "warm", "--arch", "sm_80", "--op", SMALL, *place)
        assert (code, out) == (1, "")
        assert err.count("\n") == 1
        assert f"{COUNT} of {COUNT} kernels would have to be compiled, but RTKERNELS_NO_COMPILE is set; unset it" in err
        assert "rtkernels warm" not in err
    assert build_cache.stats.compiles == 0


def test_warm_of_one_op_includes_the_parts_it_launches():
    """The backward of rms_norm ends in column_sum: warming rms_norm alone must be enough to run it."""
    parts = ["norm_fp8", "norm_modulated", "norm_modulated_bwd", "combine", SMALL, "block_sum"]
    assert [op.name for op in warming.with_parts(["rms_norm"])] == ["rms_norm", *parts]
    assert [op.name for op in warming.with_parts([SMALL]) if op.kernels] == [SMALL]
    assert warming.with_parts(None) == warming.select(None)


def test_warm_uses_the_target_of_the_environment(monkeypatch):
    monkeypatch.setenv("RTKERNELS_ARCH", "8.9")
    report = rtkernels.warm(ops=[SMALL])
    assert report.targets == ("sm_89",)
    assert {entry.target for entry in rtkernels.cache.ls()} == {"sm_89"}


def test_warm_goes_on_after_a_failure_and_exits_with_1(capsys, monkeypatch):
    broken = op_named(SMALL).kernels[0].expression(("bf16",))
    compile_unit = nvrtc.compile_unit

    def failing(unit, expressions, *rest, **options):
        if list(expressions) == [broken]:
            raise KernelCompileError("does not compile\n  column_sum.cu(1): error")
        return compile_unit(unit, expressions, *rest, **options)

    monkeypatch.setattr(nvrtc, "compile_unit", failing)
    code, out, err = run(capsys, "warm", "--arch", "sm_80", "--op", SMALL)
    assert code == 1
    (line,) = [line for line in err.splitlines() if "kernels, " not in line]
    assert line == f"failed: {SMALL} {broken} sm_80: KernelCompileError: does not compile | column_sum.cu(1): error"
    assert f"{COUNT - 1} compiled, 0 already there, 1 failed" in out


def test_warm_that_cannot_write_fails(capsys, monkeypatch):
    monkeypatch.setenv("RTKERNELS_CACHE", "off")
    code, _, err = run(capsys, "warm", "--arch", "sm_80", "--op", SMALL)
    assert code == 2
    assert "RTKERNELS_CACHE=off" in err
    assert "--out" in err


@pytest.mark.parametrize("name", ["fsync", "mkdir"])
def test_warm_checks_that_it_can_write_before_it_compiles(capsys, monkeypatch, tmp_path, name):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, name, full)
    code, out, err = run(capsys, "warm", "--arch", "sm_80", "--op", SMALL, "--out", str(tmp_path / "kernels"))
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "cannot be written: No space left on device; nothing was compiled" in err
    assert build_cache.stats.compiles == 0


def test_warm_needs_no_write_where_everything_is_there(monkeypatch):
    rtkernels.warm(["sm_80"], [SMALL])
    build_cache.forget()
    monkeypatch.setattr(store, "require_writable", None)
    assert rtkernels.warm(["sm_80"], [SMALL]).present == COUNT


def test_warm_says_an_error_one_time_and_stops_when_the_disk_is_full(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "publish", lambda *arguments: False)
    arguments = ("warm", "--arch", "sm_80,sm_90a", "--op", SMALL, "--out", str(tmp_path / "kernels"), "--jobs", "1")
    code, out, err = run(capsys, *arguments)
    assert code == 1
    assert f"{2 * COUNT} failed" in out
    assert build_cache.stats.compiles < 2 * COUNT
    failed = [line for line in err.splitlines() if line.startswith("failed: ")]
    assert failed[0].endswith(f"it could not be written to {tmp_path / 'kernels'}")
    assert failed[1].startswith(f"failed: {2 * COUNT - 1} more with the same error")
    assert len(failed) == 2


def test_warm_uses_the_cpus_it_is_allowed(monkeypatch, tmp_path):
    def cgroup(membership, **files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return cpus.usable()

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)), raising=False)
    monkeypatch.setattr(cpus, "_CGROUPS", tmp_path)
    monkeypatch.setattr(cpus, "_MEMBERSHIP", tmp_path / "membership")
    assert cpus.usable() == 12
    assert cgroup("0::/job/step\n") == 12
    assert cgroup("0::/job/step\n", job__step__cpu_dot_max="max 100000\n") == 12
    assert cgroup("0::/job/step\n", job__cpu_dot_max="650000 100000\n") == 7
    assert cgroup("0::/job/step\n", job__step__cpu_dot_max="20000 100000\n") == 1
    assert cgroup("0::/not/mounted/here\n", cpu_dot_max="300000 100000\n") == 3
    v1 = {"cpu__a__cpu_dot_cfs_quota_us": "500000\n", "cpu__a__cpu_dot_cfs_period_us": "100000\n"}
    assert cgroup("3:cpuacct,cpu:/a\n1:name=systemd:/a\n", **v1) == 5
    v1["cpu__a__cpu_dot_cfs_quota_us"] = "-1\n"
    assert cgroup("1:cpu:/a\n", **v1) == 12
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    assert cpus.usable() == 1

    pools = []
    monkeypatch.setattr(warming, "ThreadPoolExecutor", lambda count, **options: pools.append(count) or pool(count))
    pool = ThreadPoolExecutor
    rtkernels.warm(["sm_80"], [SMALL])
    assert pools == [1]


def test_warm_draws_one_line_on_a_terminal():
    class Terminal:
        text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    terminal = Terminal()
    progress = warming.Progress(terminal)
    report = warming.warm(["sm_80"], [SMALL], progress=progress)
    progress.close()
    assert f"{report.total}/{report.total}" in terminal.text
    assert "\n" not in terminal.text
    assert terminal.text.endswith(" \r")


# ---- cache -----------------------------------------------------------------------------------------------


def test_cache_path(capsys, cache_dir):
    assert run(capsys, "cache", "path") == (0, f"{cache_dir}\n", "")


def test_cache_ls_verify_and_clear(capsys, cache_dir):
    rtkernels.warm(["sm_80", "sm_90a"], [SMALL])
    code, out, _ = run(capsys, "cache", "ls")
    assert code == 0
    assert out.count(f"rtk::{SMALL}<") == 2 * COUNT
    assert f"{2 * COUNT} entries" in out
    code, out, _ = run(capsys, "cache", "ls", "--json")
    assert {entry["target"] for entry in json.loads(out)} == {"sm_80", "sm_90a"}

    victim = next(cache_dir.rglob("kernel.cubin"))
    victim.write_bytes(victim.read_bytes()[:-1])
    code, out, _ = run(capsys, "cache", "verify")
    assert code == 1
    assert str(victim.parent) in out
    assert f"{2 * COUNT} entries checked, 1 damaged" in out
    assert "damaged:" in run(capsys, "cache", "ls")[1]
    assert run(capsys, "cache", "verify", "--repair")[0] == 1
    assert run(capsys, "cache", "verify")[0] == 0

    code, out, _ = run(capsys, "cache", "clear", "--arch", "9.0", "--op", SMALL)
    assert code == 0
    assert re.match(r"removed \d entries", out)
    assert {entry.target for entry in rtkernels.cache.ls()} == {"sm_80"}
    assert run(capsys, "cache", "clear")[0] == 0
    assert rtkernels.cache.ls() == []


def test_cache_prune_removes_nothing_below_the_cap(capsys):
    rtkernels.warm(["sm_80"], [SMALL])
    code, out, _ = run(capsys, "cache", "prune")
    assert (code, out.split(",")[0]) == (0, "removed 0 entries")
    assert len(rtkernels.cache.ls()) == COUNT


# ---- show ------------------------------------------------------------------------------------------------


def test_show_resources(capsys):
    code, out, _ = run(capsys, "show", SMALL, "--arch", "sm_80", "--resources")
    assert code == 0
    header, *lines = out.splitlines()
    assert header.split()[:4] == ["variant", "kernel", "target", "regs"]
    assert len(lines) == COUNT
    for row in show.resources(SMALL, parse("sm_80")):
        assert 0 < row["registers"] <= row["max_registers"]
        assert row["spill_stores"] == row["spill_loads"] == 0


def test_show_ptx_of_one_variant(capsys):
    code, out, _ = run(capsys, "show", SMALL, "--arch", "sm_90a", "--ptx", "--kernel", SMALL, "--variant", "1")
    assert code == 0
    assert ".target sm_90a" in out
    assert out.count(".entry") == 1


def test_show_call_has_what_was_written_for_the_operators(capsys):
    code, out, _ = run(capsys, "show", "rms_norm", "--call")
    assert code == 0
    assert "# ==== rms_norm_fwd\ndef call(x, weight, eps, offset):" in out
    assert "# ==== rms_norm_bwd\n" in out and "def launch(" in out


def test_show_source_has_the_kernel_and_its_headers(capsys):
    code, out, _ = run(capsys, "show", "rms_norm", "--source")
    assert code == 0
    assert "// ==== norm/rms_norm.cu" in out
    assert "__global__" in out
    assert "common/abi.cuh" in out


# ---- demo, and the two ways to call ----------------------------------------------------------------------


@pytest.mark.one_in(1000)
def test_demo_runs_and_agrees_with_torch():
    done = shell("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("rms_norm + backward", "glu silu + backward", "quantize_fp8 1x128", "dequantize_fp8 1x128"):
        assert name in done.stdout
    assert "all results agree with torch" in done.stdout
    if not torch.cuda.is_available():
        assert "no GPU on this machine" in done.stdout
        assert re.search(r"sm_80: \d+ kernels compiled", done.stdout)
        assert re.search(r"sm_90a: \d+ kernels compiled", done.stdout)


@no_gpu
@pytest.mark.one_in(3)
def test_demo_without_cupy_shows_the_cpu_path_and_says_what_is_missing(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('not installed')")
    done = shell("demo", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all results agree with torch" in done.stdout
    assert "pip install cupy-cuda13x nvidia-cuda-nvrtc" in done.stdout
    assert "kernels compiled" not in done.stdout
    assert not done.stderr
