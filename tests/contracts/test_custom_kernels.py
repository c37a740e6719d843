"""A user's own ``.cu``: the page's files outside of this repository, and what a unit elsewhere may include."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.interpreter import run_python

from rtkernels.errors import SourceError
from rtkernels.runtime import targets
from rtkernels.runtime.build import key, sources

ROOT = Path(__file__).resolve().parents[2]
USE = """
import rtkernels, torch
from softsign import softsign

x = torch.randn(7, 9, requires_grad=True)
expected = torch.nn.functional.softsign(x)
(slope,) = torch.autograd.grad(expected.sum(), x)


def check():
    y = softsign(x)
    torch.testing.assert_close(y, expected)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, slope)


check()
with rtkernels.emulate("sm_80"):
    check()
torch.library.opcheck(torch.ops.rtkernels.my_softsign_fwd, (torch.randn(3, 5),))
torch.library.opcheck(torch.ops.rtkernels.my_softsign_bwd, (torch.randn(3, 5), torch.randn(3, 5)))
try:
    softsign(torch.ones(3, dtype=torch.int64))
except rtkernels.errors.ArgumentError as error:
    assert str(error).startswith("x "), error
else:
    raise AssertionError("an integer tensor was accepted")
report = rtkernels.warm(["sm_80"], ["my_softsign"])
assert not hasattr(rtkernels, "softsign")
used = [use for row in rtkernels.cache.ls(op="my_softsign", target="sm_80") for use in row.meta["resources"].values()]
print(report.compiled >= 6, len(report.failures), len(used), max(use["spill_stores"] for use in used))
"""


def files_of(page: str) -> dict[str, str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.+?\n)```", text, re.DOTALL))


@pytest.mark.one_in(3)
def test_the_page_works_and_its_cache_does_not_know_the_folder(tmp_path: Path) -> None:
    files = files_of("tutorials/write_a_kernel.md")
    assert len(files) == 3
    said = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text, encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "RTKERNELS_CACHE_DIR": str(tmp_path / "cache")}
        done = run_python("-c", USE, cwd=tmp_path / folder, env=env)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split("\n")[-2])
    assert said == ["True 0 6 0", "False 0 6 0"]


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "inner.cuh").write_text("#pragma once\n")
    (tmp_path / "mine.cuh").write_text('#pragma once\n#include "mine/inner.cuh"\n')
    (tmp_path / "k.cu").write_text('#include "common/abi.cuh"\n#include "mine.cuh"\n')
    return tmp_path / "k.cu"


def test_own_headers_come_from_the_folder_of_the_unit(unit: Path) -> None:
    names = list(sources.closure(str(unit)))
    assert names[0] == "k.cu"
    assert {"mine.cuh", "mine/inner.cuh", "common/abi.cuh"} <= set(names)


def test_the_key_follows_every_file(unit: Path) -> None:
    def now() -> str:
        return key.make_request("softsign", str(unit), ["rtk::k<1>"], targets.parse("sm_80"), (), (13, 0)).key

    before = now()
    (unit.parent / "mine" / "inner.cuh").write_text("#pragma once\nint a;\n")
    assert now() != before


def test_a_header_of_ours_cannot_be_replaced(unit: Path) -> None:
    (unit.parent / "common").mkdir()
    (unit.parent / "common" / "abi.cuh").write_text("#pragma once\n")
    with pytest.raises(SourceError, match=r"'common/abi.cuh' is in .* and in .*; give the first another name"):
        sources.closure(str(unit))


def test_a_missing_header_names_both_places(unit: Path) -> None:
    unit.write_text('#include "none.cuh"\n')
    with pytest.raises(SourceError, match=rf"no such file.*{unit.parent} or .*cuda_src"):
        sources.closure(str(unit))
