"""The conclusions of ``rtkernels doctor``: problems, one line each, and notes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rtkernels.runtime.suggest import did_you_mean

_TYPE = re.compile(r"^\w+: ")  # the exception's type before its text
_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def judge(report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the problems that prevent kernels from being compiled, loaded or cached here, and the notes.

    One cause often breaks several probes: equal messages become one problem that names all sections.
    """
    sections: dict[str, list[str]] = {}
    for name, text in _problems(report):
        known = sections.setdefault(_TYPE.sub("", text), [])
        if name not in known:
            known.append(name)
    return [f"{', '.join(names)}: {text}" for text, names in sections.items()], list(_notes(report))


def _problems(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (section, text). A section whose probe failed has only an ``error``."""
    for name, section in report.items():
        if isinstance(section, dict) and "error" in section:
            yield name, section["error"]
    for text in report["environment"].values():
        if text.startswith("invalid: "):
            yield "environment", text.removeprefix("invalid: ")
    if "error" not in report["nvrtc"]:
        yield from _failed("test_compile", "test compile", report)
        yield from _failed("test_launch", "test launch", report)
    for path, reason in (report["cache"].get("refused") or {}).items():
        yield "cache", f"{path} is not used: {reason}"
    newer = _newer_than_driver(report)
    if newer == "major":
        yield "driver", f"{_versions(report)}: it cannot load the kernels; update it or install an older NVRTC"
    elif newer == "minor" and any(str(device.get("target")).startswith("compute_") for device in _devices(report)):
        yield "driver", f"{_versions(report)}, and this GPU needs PTX, which an older driver does not load"


def _failed(section: str, what: str, report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the failures of a section; equal messages are combined."""
    places: dict[str, list[str]] = {}
    for name, text in report[section].items():
        if text.startswith("failed: "):
            places.setdefault(text.removeprefix("failed: "), []).append(name)
    for text, names in places.items():
        yield section, f"{what} failed for {', '.join(names)}: {text}"


def _notes(report: dict[str, Any]) -> Iterator[str]:
    variables = [name for name, text in report["environment"].items() if "unknown variable" not in text]
    for name in report["environment"]:
        if name not in variables:
            yield f"{name} is not a variable rtkernels reads{did_you_mean(name, variables)}"
    cache, nvrtc = report["cache"], report["nvrtc"].get("version")
    if cache.get("writable") is False and cache.get("path") not in cache["refused"]:
        why = "there is no home directory for the cache" if cache.get("path") is None else "the cache is not writable"
        yield f"{why}: every process compiles its kernels again"
    others = {version: count for version, count in (cache.get("nvrtc") or {}).items() if version != nvrtc}
    if others and nvrtc:
        counts = ", ".join(f"{count} with {version}" for version, count in others.items())
        yield (
            f"the caches have entries made by another NVRTC ({counts}) than the {nvrtc} installed: they are used "
            "with RTKERNELS_NO_COMPILE=1 only, otherwise kernels are compiled again"
        )
    copies = {Path(path).name for path in report["libraries"].get("loaded", []) if "libnvrtc.so" in path}
    if len(copies) > 1:
        yield f"more than one NVRTC is loaded: {', '.join(sorted(copies))}"
    built = report["torch"].get("built for CUDA")
    if built and nvrtc and built.split(".")[0] != nvrtc.split(".")[0]:
        cupy = f"cupy-cuda{built.split('.')[0]}x"
        yield f"torch is built for CUDA {built} but NVRTC is {nvrtc}: {cupy} and its NVRTC would fit"
    if unknown := [name for name, text in report["test_compile"].items() if text.startswith("not known")]:
        yield f"NVRTC {nvrtc} cannot compile for {', '.join(unknown)}: GPUs of these need a newer one"
    if _newer_than_driver(report) == "minor":
        yield f"{_versions(report)}: cubins load all the same, PTX and what needs newer driver functions may not"
    if report["devices"] == []:
        yield "no GPU here: ops run on CPU tensors; kernels can be compiled for any target"


def _devices(report: dict[str, Any]) -> list[dict[str, Any]]:
    return report["devices"] if isinstance(report["devices"], list) else []


def _newer_than_driver(report: dict[str, Any]) -> str | None:
    """Return how NVRTC is newer than the driver: "major", "minor" or None (also without a driver)."""
    driver = _NUMBERS.search(str(report["driver"].get("version")))
    nvrtc = _NUMBERS.search(str(report["nvrtc"].get("version")))
    if not driver or not nvrtc:
        return None
    supported, installed = tuple(map(int, driver.groups())), tuple(map(int, nvrtc.groups()))
    if installed[0] > supported[0]:
        return "major"
    return "minor" if installed > supported else None


def _versions(report: dict[str, Any]) -> str:
    return f"NVRTC {report['nvrtc']['version']} is newer than the driver, which is for {report['driver']['version']}"
