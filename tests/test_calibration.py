"""Scales from a run: what is recorded, what they are, and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import rtkernels
from rtkernels import Calibration
from rtkernels.calibration import balance_channels, checkpoint_key, clipped
from rtkernels.errors import ArgumentError


def test_scales_are_those_of_the_largest_magnitudes() -> None:
    calibration = Calibration()
    for k in (1.0, 3.0, 2.0):
        calibration.observe("a", torch.tensor([0.5, -k]).bfloat16())
        calibration.observe("b", torch.zeros(4))
    assert calibration.freeze() == {"a": pytest.approx(3 / 448), "b": 1e-12}
    calibration.observe("a", torch.tensor([100.0]))  # not recording any more
    assert calibration.scale("a").item() == pytest.approx(3 / 448)
    x = torch.tensor([3.0, -1.5, 0.75])
    codes = rtkernels.quantize_fp8(x, calibration.scale("a"))[0]
    torch.testing.assert_close(codes.float() * calibration.scale("a"), x, rtol=2**-4, atol=0)
    assert clipped(calibration, [("a", torch.tensor([3.0, 3.2, 3.4]))]) == {"a": 1}


def test_modes_over_samples() -> None:
    found = {}
    for mode, options in {"max": {}, "percentile": {"percentile": 50}, "ema": {"momentum": 0.5}}.items():
        calibration = Calibration(mode, **options, dtype=torch.int8, headroom=127)
        for k in (1.0, 4.0, 2.0):
            calibration.observe("x", torch.tensor([k / 2]))
            calibration.observe("x", torch.tensor([-k]))  # a second step of the sample
            calibration.next_sample()
        found[mode] = calibration.freeze()["x"]
    assert found == {"max": 4.0, "percentile": 2.0, "ema": 2.25}


@pytest.mark.parametrize("name", ["scales.json", "scales.safetensors"])
def test_files(name: str, tmp_path: Path) -> None:
    calibration = Calibration()
    calibration.observe("layers.0.qkv", torch.tensor([7.0]))
    calibration.observe("layers.0.out", torch.tensor([0.3]))
    calibration.freeze()
    calibration.save(tmp_path / name, key="abc")
    other = Calibration()
    kept = other.scale("layers.0.qkv")
    assert kept.isnan()
    other.load(tmp_path / name, key="abc")
    assert other.scale("layers.0.qkv") is kept and other.scales() == calibration.scales()
    with pytest.raises(ArgumentError, match="has key 'abc'; expected 'xyz': calibrate again"):
        other.load(tmp_path / name, key="xyz")
    with pytest.raises(ArgumentError, match="has dtype"):
        Calibration(dtype=torch.int8).load(tmp_path / name, key="abc")
    (tmp_path / name).write_bytes(b"\0" * 40)
    with pytest.raises(ArgumentError, match="cannot be read as a calibration"):
        other.load(tmp_path / name)


def test_safetensors_files_are_those_of_the_package(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    calibration = Calibration()
    calibration.observe("x", torch.tensor([448.0]))
    calibration.freeze()
    calibration.save(tmp_path / "x.safetensors")
    assert torch_files.load_file(tmp_path / "x.safetensors")["x"].item() == 1.0


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="mode is 'mean'"):
        Calibration("mean")
    with pytest.raises(ArgumentError, match="nothing was recorded"):
        Calibration().freeze()
    calibration = Calibration()
    calibration.observe("fine", torch.ones(3))
    calibration.observe("broken", torch.tensor([1.0, float("nan")]))
    with pytest.raises(ArgumentError, match="broken: recorded NaN or infinity"):
        calibration.freeze()
    with pytest.warns(UserWarning, match="times the median: c"):
        wild = Calibration()
        for name, value in {"a": 1.0, "b": 1.0, "c": 1e3}.items():
            wild.observe(name, torch.tensor([value]))
        wild.freeze()


def test_keys_of_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a" * 70000)
    key = checkpoint_key(file)
    assert len(key) == 16 and int(key, 16) >= 0
    file.write_bytes(b"a" * 70001)
    assert checkpoint_key(file) != key


def test_balanced_channels_cancel() -> None:
    x, weight = torch.randn(6, 8) * torch.logspace(-2, 2, 8), torch.randn(4, 8)
    balanced, factor = balance_channels(weight, rtkernels.column_absmax(x))
    torch.testing.assert_close((x * factor) @ balanced.t(), x @ weight.t())
    assert factor.min() >= 0.25 and factor.max() <= 4
    with pytest.raises(ArgumentError, match=r"expected \[n, k\] and \[k\]"):
        balance_channels(weight, torch.ones(3))


def test_the_file_is_readable(tmp_path: Path) -> None:
    calibration = Calibration()
    calibration.observe("x", torch.tensor([1.0]))
    calibration.freeze()
    calibration.save(tmp_path / "s.json")
    assert json.loads((tmp_path / "s.json").read_text())["scales"] == calibration.scales()
