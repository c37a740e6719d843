"""The guard of changes that should change no kernel: hashes of machine code (``tests/support/machine_code.py``)."""

import json
from pathlib import Path

import pytest

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
