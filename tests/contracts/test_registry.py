"""What every op must offer, checked for all of them: operators, references, fakes, samples, docs, emulated tests."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
import torch
from support import pieces
from support.ops import op_named
from support.places import emulated
from support.recent import recent

import rtkernels
from bench.rows import rows_of
from contracts.samples import samples_of
from rtkernels import _public, emulator
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch import memory
from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.operator import TorchOp

OPS = {op.name: op for op in registry.ops()}
SAMPLES = [
    pytest.param(torch_op, args, id=f"{torch_op.name}-{index}")
    for op in OPS.values()
    for index, (torch_op, args) in enumerate(samples_of(op.name, "cpu"))
]
TESTS = Path(__file__).parents[1]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("torch_op", "args"), SAMPLES)
def test_opcheck(torch_op: TorchOp, args: tuple) -> None:
    _opcheck(torch_op, args)


def _opcheck(torch_op: TorchOp, args: tuple) -> None:
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(arg, torch.Tensor) and arg.is_floating_point() and arg.itemsize == 1 for arg in args):
        checks.remove("test_schema")  # which compares arguments by allclose, and torch has none for 8 bits
    torch.library.opcheck(torch_op.overload, args, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_opcheck_on_the_gpu(name: str) -> None:
    for torch_op, args in samples_of(name, "cuda"):
        _opcheck(torch_op, args)


@pytest.mark.parametrize("name", OPS)
def test_samples_reach_every_operator(name: str) -> None:
    problem = pieces.samples(OPS[name], samples_of(name, "cpu"))
    assert not problem, problem


@pytest.mark.parametrize("name", OPS)
def test_public_functions_are_documented(name: str) -> None:
    for public in OPS[name].public:
        function = getattr(rtkernels, public)
        assert function.__name__ == public
        problem = pieces.documentation(public, function)
        assert not problem, problem


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.public])
def test_op_has_a_test_file_and_bench_rows(name: str) -> None:
    problem = pieces.tests_of(OPS[name]) or pieces.bench_rows(OPS[name], [row.label for row in rows_of(name)])
    assert not problem, problem


@pytest.mark.every_op
def test_public_names_are_those_of_the_ops() -> None:
    problem = pieces.table_of_names(_public.OPS, [name for op in OPS.values() for name in op.public])
    assert not problem, problem


@pytest.mark.one_in(12)
@emulated
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.public])
def test_every_kernel_is_emulated_or_exempt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``emulated_coverage`` of the op's own tests, or its samples, launch each of its kernels (exempt ones say why)."""
    if pieces.emulated(OPS[name], emulator.launched()):
        own = None
        for path in TESTS.glob(f"ops/*/test_{name}.py"):
            monkeypatch.syspath_prepend(str(path.parent))
            own = getattr(importlib.import_module(path.stem), "emulated_coverage", None)
        own() if own is not None else _emulate_samples(name)
    problem = pieces.emulated(OPS[name], emulator.launched())
    assert not problem, problem


def _emulate_samples(name: str) -> None:
    for arch in ("sm_80", "sm_90"):
        for torch_op, args in samples_of(name, "cpu"):
            with rtkernels.emulate(arch), torch.no_grad():
                torch_op(*args)


def test_unknown_op() -> None:
    with pytest.raises(ArgumentError, match="there is no op 'nonsense'; known: "):
        op_named("nonsense")


def test_call_written_from_the_schema_takes_its_names() -> None:
    for op in OPS.values():
        for torch_op in op.torch_ops:
            wanted = [argument.name for argument in torch_op.overload._schema.arguments]
            assert list(inspect.signature(torch_op.call).parameters) == wanted


def test_an_operator_knows_that_the_dispatcher_called_it(monkeypatch: pytest.MonkeyPatch) -> None:
    op, seen = op_named("topk").torch_ops[0], []
    monkeypatch.setattr(op, "launch", lambda *args: seen.append(memory.dispatched()))
    op._run_cuda()
    assert seen == [True]
    assert not memory.dispatched()


@emulated
def test_a_call_like_the_one_before_runs_its_plan_again() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = op_named("glu").torch_ops[0]
    x, up, weight = torch.randn(4, 16), torch.randn(4, 16), torch.rand(4)
    for given in ((x, None, None), (x, up, None), (x, None, weight[:4]), (x, up, weight)):
        args, like = (*given, "silu"), (*(None if t is None else t.clone() for t in given), "silu")
        with rtkernels.emulate("sm_90"), emulator.recording():
            first = op._launch_slowly(op.call.__globals__, None, args)
            torch.testing.assert_close(first, op.reference(*args))
            assert torch.equal(recent(op, *like), first)
            assert recent(op, *given, "relu") is None
            assert recent(op, x[:2], *args[1:]) is None and recent(op, x.double(), *args[1:]) is None
            assert recent(op, torch.randn(65)[1:].view(4, 16), *args[1:]) is None  # its address
            others = (x, None if given[1] is not None else up, *args[2:])
            of_a_call_before = recent(op, *others)  # the last four are known
            assert of_a_call_before is None or torch.allclose(of_a_call_before, op.reference(*others))
            assert recent(op, x.clone().requires_grad_(), *args[1:]) is None  # of another kind
            with FakeTensorMode():
                assert recent(op, *like) is None
    with rtkernels.emulate("sm_90"), emulator.recording():
        seen = []
        op._launch_slowly(op.call.__globals__, None, (x, None, None, "silu"))
        torch.func.vmap(lambda row: (row, seen.append(recent(op, x, None, None, "silu")))[0])(x)
        assert seen == [None]
        with torch.inference_mode():
            assert recent(op, x, None, None, "silu") is None  # the result has to be an inference tensor
            op._launch_slowly(op.call.__globals__, None, (x, None, None, "silu"))
            assert recent(op, x, None, None, "silu").is_inference()
        assert recent(op, x, None, None, "silu") is None
