"""The call path of CUDA tensors without a GPU, on the stand-in device of ``support/stand_in``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import stand_in

from rtkernels import emulator

_CHECKS = Path(stand_in.__file__).with_name("checks.py")

pytestmark = [
    pytest.mark.skipif(emulator.unavailable() is not None, reason="no C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of a GPU"),
]


def _run(mode: str) -> str:
    """Run the checks in a process that has imported nothing of rtkernels yet."""
    environment = {key: value for key, value in os.environ.items() if key != "RTKERNELS_EMULATE"}
    done = subprocess.run(
        [sys.executable, str(_CHECKS), mode], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.one_in(3)
def test_repeated_calls_take_the_short_way():
    assert "12 functions" in _run("count")


@pytest.mark.one_in(1000)
def test_repeated_calls_compute_what_an_emulated_call_computes():
    assert "12 functions" in _run("emulate")


@pytest.mark.one_in(3)
def test_results_have_the_layouts_of_the_reference_at_every_size():
    assert "calls" in _run("sizes")
