"""``rtkernels doctor``: what it finds, and what it concludes from that."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
from pathlib import Path

import pytest
import torch
from support.interpreter import run_python

from rtkernels.__main__ import main
from rtkernels.cli import doctor
from rtkernels.errors import ToolkitError
from rtkernels.runtime import env as env_module
from rtkernels.runtime.build import nvrtc
from rtkernels.runtime.targets import CI_TARGETS, parse

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _private_cache(cache_dir: Path) -> None:
    """Every test here starts with an empty cache and no variables set."""


@pytest.mark.one_in(3)
def test_doctor_reports_everything(monkeypatch):
    monkeypatch.setenv("RTKERNELS_LINEINFO", "1")
    report = doctor.collect()
    assert report["problems"] == []
    assert report["nvrtc"]["version"].split(".")[0] in ("12", "13")
    assert any("libnvrtc" in path for path in report["libraries"]["loaded"])
    assert set(report["test_compile"]) == set(CI_TARGETS)
    known = [name for name in CI_TARGETS if parse(name).number in nvrtc.supported_archs()]
    assert all(report["test_compile"][name].startswith("ok") for name in known)
    assert {variable.name for variable in env_module.VARIABLES} <= set(report["environment"])
    assert report["environment"]["RTKERNELS_LINEINFO"] == "yes (set)"
    assert report["cache"]["writable"] is True
    text = doctor.render(report)
    for variable in env_module.VARIABLES:
        assert variable.name in text
    assert text.endswith("everything rtkernels needs is here")


def test_doctor_shows_the_libraries_whose_models_are_patched(monkeypatch):
    versions = {"transformers": "5.1.2", "peft": "0.19.0"}

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = doctor._packages()
    assert found["transformers"] == "5.1.2" and found["peft"] == "0.19.0"
    assert found["accelerate"] is None and found["diffusers"] is None
    shown = doctor.render({"packages": found, "problems": [], "notes": []})
    assert "transformers              5.1.2" in shown


@pytest.mark.one_in(3)
def test_doctor_has_no_problem_with_an_nvrtc_older_than_a_target(monkeypatch):
    monkeypatch.setattr(nvrtc, "supported_archs", lambda: [80, 89, 90])
    report = doctor.collect()
    assert report["problems"] == []
    assert report["test_compile"]["sm_100a"].startswith("not known to NVRTC")
    assert any("cannot compile for sm_100a, sm_120a" in text for text in report["notes"])


def test_doctor_survives_any_failing_probe(monkeypatch):
    def broken(name):
        raise RuntimeError(f"{name} fell over")

    probes = {name: functools.partial(broken, name) for name in doctor._PROBES}
    monkeypatch.setattr(doctor, "_PROBES", probes)
    report = doctor.collect()
    assert len(report["problems"]) == len(probes)
    assert "emulator: emulator fell over" in doctor.render(report)


@pytest.fixture
def quick_doctor(monkeypatch):
    """Skip the test compilations, and let a test replace the result of any other probe."""
    monkeypatch.setattr(doctor, "_PROBES", {**doctor._PROBES, "test_compile": dict})

    def collect(**sections):
        for name, section in sections.items():
            monkeypatch.setitem(doctor._PROBES, name, lambda section=section: section)
        return doctor.collect()

    return collect


def test_doctor_says_one_problem_one_time(quick_doctor, monkeypatch, caplog):
    def missing():
        raise ToolkitError("CuPy cannot be imported")

    for name in ("cupy", "nvrtc"):
        monkeypatch.setitem(doctor._PROBES, name, missing)
    monkeypatch.setenv("RTKERNELS_CACHE", "sometimes")
    compiles = {"sm_80": "failed: ToolkitError: CuPy cannot be imported"}
    assert quick_doctor(test_compile=compiles)["problems"][:1] == ["cupy, nvrtc: CuPy cannot be imported"]
    (other,) = quick_doctor(test_compile=compiles)["problems"][1:]
    assert other.startswith("cache, environment: RTKERNELS_CACHE='sometimes' is not accepted")
    assert caplog.records == []


def test_doctor_groups_failed_compiles(quick_doctor):
    texts = {"sm_80": "failed: E: no", "sm_89": "ok", "sm_90a": "failed: E: no"}
    report = quick_doctor(test_compile=texts)
    assert report["problems"] == ["test_compile: test compile failed for sm_80, sm_90a: E: no"]


@pytest.mark.parametrize("level", ["", "v2", "v2/sm_80"])
def test_doctor_exits_with_1_for_a_cache_that_others_can_write_to(quick_doctor, capsys, cache_dir, caplog, level):
    (cache_dir / "v2" / "sm_80").mkdir(parents=True)
    (cache_dir / level).chmod(0o777)
    code, out, err = (main(["doctor"]), *capsys.readouterr())
    assert code == 1
    reason = f"{cache_dir / level}: everyone can write to it (mode 0777)"
    assert f"- cache: {cache_dir} is not used: {reason}" in out
    assert "1 problem(s)" in out
    assert "not writable" not in out
    assert (err, caplog.records) == ("", [])


def test_doctor_exits_with_1_for_an_extra_cache_that_is_refused(quick_doctor, capsys, tmp_path, monkeypatch):
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra").chmod(0o1777)
    monkeypatch.setenv("RTKERNELS_CACHE_EXTRA", str(tmp_path / "extra"))
    code, out, _ = (main(["doctor"]), *capsys.readouterr())
    assert code == 1
    assert f"- cache: {tmp_path / 'extra'} is not used" in out


@pytest.mark.parametrize(
    ("driver", "nvrtc", "target", "problem", "note"),
    [
        ("CUDA 12.8", "13.0", "sm_90a", True, False),
        ("CUDA 13.0", "13.2", "sm_90a", False, True),
        ("CUDA 13.0", "13.2", "compute_121", True, True),
        ("CUDA 13.0", "13.0", "sm_90a", False, False),
        ("CUDA 13.2", "13.0", "sm_90a", False, False),
        (None, "13.0", "sm_90a", False, False),
    ],
)
def test_doctor_compares_driver_and_nvrtc(quick_doctor, driver, nvrtc, target, problem, note):
    said = f"NVRTC {nvrtc} is newer than the driver, which is for {driver}"
    sections = {"driver": {"version": driver}, "nvrtc": {"version": nvrtc}, "devices": [{"target": target}]}
    report = quick_doctor(**sections)
    assert any(said in text for text in report["problems"]) == bool(report["problems"]) == problem
    assert any(said in text for text in report["notes"]) == note


def test_doctor_reports_a_kernel_that_cannot_be_launched(quick_doctor, monkeypatch):
    def fails(partial, dtype):
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU\nand so on")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, place: tensor)
    monkeypatch.setattr("rtkernels.ops.shared.column_sum.column_sum", fails)
    report = quick_doctor(devices=[])
    said = "test launch failed for cuda:0, cuda:1: RuntimeError: CUDA_ERROR_NO_BINARY_FOR_GPU"
    assert report["problems"] == [f"test_launch: {said}"]
    monkeypatch.setattr("rtkernels.ops.shared.column_sum.column_sum", lambda partial, dtype: torch.zeros(7))
    assert "expected [3696.0" in quick_doctor(devices=[])["problems"][0]
    monkeypatch.setattr("rtkernels.ops.shared.column_sum.column_sum", lambda partial, dtype: partial.sum(0))
    report = quick_doctor(devices=[])
    assert report["problems"] == []
    assert set(report["test_launch"]) == {"cuda:0", "cuda:1"}
    assert report["test_launch"]["cuda:0"].startswith("ok, column_sum launched")


@pytest.mark.gpu
def test_doctor_launches_a_kernel(quick_doctor):
    report = quick_doctor()
    assert report["problems"] == []
    assert all(text.startswith("ok, column_sum launched") for text in report["test_launch"].values())
    assert len(report["test_launch"]) == torch.cuda.device_count()


def test_doctor_suggests_the_variable_that_was_meant(quick_doctor, monkeypatch):
    monkeypatch.setenv("RTKERNELS_CACHEDIR", "/somewhere")
    (note,) = [text for text in quick_doctor()["notes"] if "RTKERNELS_CACHEDIR" in text]
    assert "did you mean 'RTKERNELS_CACHE_DIR'" in note


@pytest.mark.one_in(1000)
def test_doctor_json_without_cupy_names_the_problem_and_keeps_the_rest():
    code = """
import sys
sys.modules["cupy"] = sys.modules["cupy_backends"] = None
from rtkernels.__main__ import main
sys.exit(main(["doctor", "--json"]))
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RTKERNELS_CACHE": "sometimes", "RTKERNELS_TYPO": "1"}
    done = run_python("-c", code, env=env)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert len([text for text in report["problems"] if "CuPy cannot be imported" in text]) == 1
    assert any("RTKERNELS_CACHE='sometimes'" in text for text in report["problems"])
    assert any("RTKERNELS_TYPO" in text for text in report["notes"])
    assert report["torch"]["version"] == torch.__version__
    assert report["sources"]["units"] > 0
