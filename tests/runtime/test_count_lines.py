"""The counter of lines: what is a preamble, and which operators a function leads to."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.count_lines import Tree, by_feature, main

_OP = """
from rtkernels.runtime.operator.declared import Operator
from rtkernels.ops.other import through
from rtkernels.ops import other

FORWARD = Operator("forward")
_forward = FORWARD.call


class _Differentiable:
    def forward(ctx, x):
        return FORWARD(x)


def direct(x):
    '''Say something.

    In three lines.
    '''
    a = 1

    # a comment
    if x:
        b = 2
        return FORWARD.call(
            x
        )
    return x


def by_name(x):
    a = 1
    return _forward(x)


def by_class(x):
    return _Differentiable.apply(x)


def by_import(x):
    a = 1
    b = direct
    return through(x)


def by_module(x):
    a = (
        1
    )
    return other.through(x)


def by_method(x):
    run = FORWARD.call
    return run(x)


def without(x):
    return len(x)


OP = Op("op", torch_ops=(FORWARD,))
"""
_NAMES = ("direct", "by_name", "by_class", "by_import", "by_module", "by_method", "without")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "_public.py": f"OPS = {dict.fromkeys(_NAMES, 'ops.op')!r}",
        "ops/op.py": _OP,
        "ops/other.py": "from rtkernels.ops.op import FORWARD\n\n\ndef through(x):\n    return FORWARD(x)\n",
        "ops/__init__.py": "",
        "runtime/invariance.py": "a = 1\n\n# b\n",
        "aten/invariant_linear.py": "a = 1\n",
        "aten/row.py": "a = 1\nb = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "rtkernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_preamble_ends_where_an_operator_is_reached(tree: Path) -> None:
    assert Tree(tree).preambles() == {
        "direct": 3, "by_name": 1, "by_class": 0, "by_import": 2, "by_module": 3, "by_method": 0,
    }  # fmt: skip


def test_files_are_counted_by_feature(tree: Path) -> None:
    counts = by_feature(Tree(tree).files("runtime", "aten"))
    assert counts["batch invariance"] == 4
    assert sum(counts.values()) == 6


@pytest.mark.one_in(1000)
def test_two_trees_are_compared(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tree), str(tree), "--files", "--functions"]) == 0
    printed = capsys.readouterr().out
    assert "preambles of 6 functions" in printed and "+0" in printed
    assert "aten/invariant_linear.py" in printed
    assert main([]) == 0
