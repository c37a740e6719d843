"""The guard of changes that should change no kernel: hashes of machine code (``tests/support/machine_code.py``)."""

import json
from pathlib import Path

import pytest

from rtkernels.runtime import targets
from rtkernels.runtime.build import nvrtc, sources
from tests.support import machine_code


def test_hashes_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hashes.json"
    options = [str(file), "--ops", "row_dot", "--targets", "sm_80"]
    assert machine_code.main(options) == 0
    assert machine_code.main([*options, "--compare"]) == 0
    kept = json.loads(file.read_text())
    first, *others = kept
    file.write_text(
        json.dumps({first: "another", "an op that is gone sm_80": "", **{name: kept[name] for name in others[1:]}})
    )
    assert machine_code.main([*options, "--compare"]) == 1
    told = capsys.readouterr().out
    assert f"differs {first}" in told and "gone an op that is gone sm_80" in told and f"new {others[0]}" in told


def test_a_comment_changes_no_code() -> None:
    unit, kernel = "norm/norm_fp8_tile.cu", "rtk::norm_fp8_tile<rtk::bf16, true, true, true, false>"
    files = sources.closure(unit)

    def code(old: bytes, new: bytes) -> bytes:
        changed = {**files, unit: files[unit].replace(old, new)}
        compiled = nvrtc.compile_unit(unit, [kernel], targets.parse("sm_80"), sources=changed)
        return machine_code.code_of(compiled.image)

    line = b"while (own < 0.0f)"
    plain = code(line, line)
    assert code(line, line + b"  // a comment\n") == plain
    assert code(line, b"while (own < 1.0f)") != plain
