"""Targets: spelling, choice by device, features."""

from __future__ import annotations

import pytest

from rtkernels.errors import ArgumentError, UnsupportedDeviceError
from rtkernels.runtime import targets
from rtkernels.runtime.targets import Target

NVRTC_13_0 = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121]


@pytest.fixture(autouse=True)
def warn_again(monkeypatch):
    monkeypatch.setattr(targets, "_warned", set())


@pytest.mark.parametrize(
    ("text", "name", "capability", "is_ptx"),
    [
        ("9.0", "sm_90a", (9, 0), False),
        ("90", "sm_90a", (9, 0), False),
        ("90a", "sm_90a", (9, 0), False),
        ("sm_90a", "sm_90a", (9, 0), False),
        ("sm_90", "sm_90", (9, 0), False),
        ("compute_90", "compute_90", (9, 0), True),
        ("8.0", "sm_80", (8, 0), False),
        ("86", "sm_86", (8, 6), False),
        (" SM_89 ", "sm_89", (8, 9), False),
        ("10.0", "sm_100a", (10, 0), False),
        ("120", "sm_120a", (12, 0), False),
        ("12.1", "sm_121a", (12, 1), False),
    ],
)
def test_arch_parse(text, name, capability, is_ptx):
    assert targets.parse(text) == Target(name, capability, is_ptx)


@pytest.mark.parametrize("name", targets.CI_TARGETS)
def test_arch_ci_targets_are_their_own_spelling(name):
    assert targets.parse(name).name == name


@pytest.mark.parametrize("text", ["", "hopper", "sm_", "9", "9.0a", "sm_9x", "sm_90b", "gfx90a", "1234"])
def test_arch_parse_message_not_a_target(text):
    with pytest.raises(ArgumentError, match=r"is not a compilation target; accepted forms: 9\.0, 90"):
        targets.parse(text)


@pytest.mark.parametrize("text", ["7.5", "sm_70", "compute_75"])
def test_arch_parse_message_too_old(text):
    with pytest.raises(ArgumentError, match=r"no kernels below capability 8\.0"):
        targets.parse(text)


@pytest.mark.parametrize("text", ["sm_80a", "89a", "compute_90a"])
def test_arch_parse_message_wrong_suffix(text):
    with pytest.raises(ArgumentError, match="suffix 'a' exists for sm_90 and newer only"):
        targets.parse(text)


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"),
     ((10, 3), "sm_103a"), ((12, 0), "sm_120a")],
)  # fmt: skip
def test_arch_known_device_gets_its_exact_target(capability, name):
    assert targets.for_capability(capability, NVRTC_13_0) == Target(name, capability)


@pytest.mark.parametrize(
    ("capability", "supported", "name"),
    [((13, 0), NVRTC_13_0, "compute_121"), ((11, 0), [80, 90, 100, 120], "compute_100")],
)
def test_arch_newer_device_gets_ptx_and_one_warning(caplog, capability, supported, name):
    for _ in range(2):
        target = targets.for_capability(capability, supported)
        assert target.name == name
        assert target.is_ptx
    assert len(caplog.records) == 1
    assert f"compute capability {capability[0]}.{capability[1]} is newer" in caplog.text
    assert "install a newer NVRTC" in caplog.text


def test_arch_without_nvrtc_the_exact_target_is_assumed():
    assert targets.for_capability((9, 0), []).name == "sm_90a"


def test_arch_message_old_device():
    with pytest.raises(UnsupportedDeviceError, match=r"capability 7\.5; rtkernels needs 8\.0"):
        targets.for_capability((7, 5), NVRTC_13_0)


def test_arch_message_device_older_than_nvrtc_compiles_for():
    with pytest.raises(UnsupportedDeviceError, match=r"compiles for sm_90, sm_100 only; install an NVRTC"):
        targets.for_capability((8, 0), [90, 100])


@pytest.mark.parametrize(
    ("name", "has", "lacks"),
    [
        ("sm_80", {"cp_async", "bf16"}, {"fp8_cvt", "tma", "wgmma", "tcgen05"}),
        ("sm_89", {"fp8_cvt"}, {"tma", "wgmma"}),
        ("sm_90a", {"fp8_cvt", "tma", "wgmma", "cluster", "pdl"}, {"tcgen05"}),
        ("sm_90", {"fp8_cvt", "tma"}, {"wgmma"}),
        ("sm_100a", {"fp8_cvt", "tma", "tcgen05"}, {"wgmma"}),
        ("sm_120a", {"fp8_cvt", "tma"}, {"wgmma", "tcgen05"}),
        ("compute_90", {"fp8_cvt", "tma"}, {"wgmma"}),
        ("compute_100", {"fp8_cvt", "tma"}, {"tcgen05"}),
    ],
)
def test_arch_features(name, has, lacks):
    features = targets.parse(name).features
    assert has <= features
    assert not lacks & features
