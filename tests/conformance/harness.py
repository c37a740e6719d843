"""Torch's own sample inputs (OpInfo) through an operator of torch and the same under ``rtkernels.use``, compared.

All uses of this private API of torch, which needs the package ``expecttest``, are in this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import rtkernels
from rtkernels.aten import table

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip


def operators() -> list[Any]:
    """Return the OpInfos that the rows of the table name."""
    names = {name for row in table.table().values() for name in row.opinfo}
    return [op for op in op_db if op.name in names]


def cases(device: str) -> list[tuple[Any, torch.dtype]]:
    """Return every OpInfo of the table with every dtype that it supports and that we claim."""
    return [(op, dtype) for op in operators() for dtype in DTYPES if dtype in op.supported_dtypes(device)]


def case_name(case: Any) -> str:
    """Return the readable name of a case: ``div-floor_rounding-bfloat16``."""
    op, dtype = case
    variant = f"-{op.variant_test_name}" if op.variant_test_name else ""
    return f"{op.name}{variant}-{str(dtype).removeprefix('torch.')}"


@contextlib.contextmanager
def overridden(device: str, families: Any = "all") -> Iterator[None]:
    """Run the block with every overload taken: by the emulator on the CPU, without threshold on a GPU."""
    limits = dict(table.MIN_ELEMENTS)
    table.MIN_ELEMENTS.update(dict.fromkeys(limits, 0))
    emulated = rtkernels.emulate("sm_80") if device == "cpu" else contextlib.nullcontext()
    try:
        with emulated, rtkernels.use(families):
            yield
    finally:
        table.MIN_ELEMENTS.update(limits)


def samples(
    op: Any, dtype: torch.dtype, device: str, *, limit: int | None = None, elements: int = 1 << 14
) -> Iterator[Any]:
    """Yield inputs, each also with other strides; at most `limit` of them, and none with more than `elements`."""
    grad = op.supports_autograd and dtype.is_floating_point
    try:
        given = list(op.reference_inputs(device, dtype, requires_grad=grad))
    except ValueError:  # some ask for gradients of integers
        given = list(op.sample_inputs(device, dtype, requires_grad=grad))
    given = [s for s in given if max((t.numel() for t in tensors((s.input, s.args, s.kwargs))), default=0) <= elements]
    if limit is not None and len(given) > limit:
        given = given[:: -(-len(given) // limit)]
    for sample in given:
        yield sample
        yield sample.noncontiguous()


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def fresh(tree: Any) -> Any:
    """Return arguments with tensors of their own memory, of the same strides."""

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        result = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        try:
            result.copy_(value.detach())
        except RuntimeError:  # expanded: elements share memory
            result = value.detach().clone()
        return result.requires_grad_(value.requires_grad)

    return tree_map(copied, tree)


def run(op: Any, sample: Any, grad: bool) -> tuple[Any, Any]:
    """Return the results of an operator, and the gradients of its inputs for gradients of ones."""
    i, args, kwargs = fresh((sample.input, sample.args, sample.kwargs))
    out = op(i, *args, **kwargs)
    outs = [o for o in tensors(out) if o.requires_grad]
    ins = [t for t in tensors((i, args, kwargs)) if t.requires_grad]
    if not (grad and outs and ins):
        return out, None
    return out, torch.autograd.grad(outs, ins, [torch.ones_like(o) for o in outs], allow_unused=True)


def compare(got: Any, want: Any, exact: Any) -> None:
    """Compare dtypes, shapes, strides and values: within torch's tolerances, or as near to `exact()` as torch's."""
    ours, theirs = tensors(got), tensors(want)
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.stride() == b.stride() or a.numel() <= 1, f"strides {a.stride()}, torch's {b.stride()}"
        try:
            torch.testing.assert_close(a, b, equal_nan=True)
        except AssertionError:
            if not a.is_floating_point() or exact is None:
                raise
            reference = tensors(exact())[i]
            mine, native = ((t.double() - reference).abs().nan_to_num(0, 0, 0).max() for t in (a, b))
            assert mine <= 2 * native, f"error {mine:.3g}, torch's {native:.3g}"


def _as_double(value: Any) -> Any:
    """Return a floating tensor in float64, and that dtype for one that an argument asks for."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def check(op: Any, dtype: torch.dtype, device: str, *, limit: int | None = None) -> int:
    """Compare one OpInfo for one dtype, forward and backward; return how many samples there were."""
    grad = op.supports_autograd and dtype.is_floating_point
    count = 0
    for sample in samples(op, dtype, device, limit=limit):
        try:
            want = run(op, sample, grad)
        except Exception:  # torch's own; its error inputs are another test's
            continue

        def exact(sample: Any = sample) -> Any:
            double = tree_map(_as_double, (sample.input, sample.args, sample.kwargs))
            return run(op, type(sample)(double[0], args=double[1], kwargs=double[2]), grad)

        with overridden(device):
            if device != "cpu":
                run(op, sample, grad)  # the next call is repeated without its handler
            got = run(op, sample, grad)
        try:
            compare(got, want, exact if dtype.is_floating_point else None)
        except AssertionError as error:
            raise AssertionError(f"{case_name((op, dtype))}: {sample}\n{error}") from error
        count += 1
    return count
