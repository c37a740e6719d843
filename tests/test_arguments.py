"""Rules about arguments that hold for all public functions: what may be overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError

IDS = torch.tensor([0, 1, 2])
LABELS = torch.zeros(4, dtype=torch.int64)
ANGLES = torch.zeros(3, 4), torch.ones(3, 4)


# ---- tensors that are overwritten -----------------------------------------------------------------------------------


def _mla(q: Tensor) -> Any:
    return rtkernels.mla_rope(q, torch.randn(3, 1, 2, 8), torch.randn(3, 1, 1, 8), *ANGLES, in_place=True)


def _shard(scale: Tensor) -> Any:
    q = torch.zeros(4, 8, dtype=torch.float8_e4m3fn)
    return rtkernels.quantize_fp8_shard_(q, scale, torch.ones(32), 0)


# For each, the shape of what is overwritten, a call, and whether it is differentiable and so takes what is no leaf.
OVERWRITING: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any], bool]] = {
    "softmax": ((4, 8), lambda x: rtkernels.softmax(x, in_place=True), True),
    "softmax, another dim": ((4, 8), lambda x: rtkernels.softmax(x, 0, in_place=True), True),
    "log_softmax": ((4, 8), lambda x: rtkernels.log_softmax(x, in_place=True), True),
    "cross_entropy": ((4, 8), lambda x: rtkernels.cross_entropy(x, LABELS, in_place=True), True),
    "rope": ((1, 3, 2, 8), lambda x: rtkernels.rope(x, *ANGLES, in_place=True), True),
    "rope, k": ((1, 3, 2, 8), lambda x: rtkernels.rope(x.detach() * 1, *ANGLES, k=x, in_place=True)[1], True),
    "mla_rope": ((3, 1, 2, 16), _mla, True),
    "add_": ((4, 8), lambda x: rtkernels.add_(x, torch.ones(4, 8)), False),
    "scale_": ((4, 8), lambda x: rtkernels.scale_(x, 2.0), False),
    "multi_scale_": ((4, 8), lambda x: rtkernels.multi_scale_([torch.ones(2), x], 2.0), False),
    "multi_scale_, tensor_list": ((4, 8), lambda x: rtkernels.multi_scale_(rtkernels.tensor_list([x]), 2.0), False),
    "multi_copy_": ((4, 8), lambda x: rtkernels.multi_copy_([x], [torch.ones(4, 8)]), False),
    "multi_clip_norm_": ((4, 8), lambda x: rtkernels.multi_clip_norm_([x], 0.5), False),
    "embedding_grad_": ((4, 8), lambda x: rtkernels.embedding_grad_(x, IDS, torch.ones(3, 8)), False),
    "quantize_fp8_shard_": ((4,), _shard, False),
    "rms_norm": ((4, 8), lambda x: rtkernels.rms_norm(torch.randn(4, 8), out=x), False),
    "layer_norm": ((4, 8), lambda x: rtkernels.layer_norm(torch.randn(4, 8), out=x), False),
    "index_select": ((3, 8), lambda x: rtkernels.index_select(torch.randn(4, 8), IDS, out=x), False),
    "scatter_add": ((4, 8), lambda x: rtkernels.scatter_add(torch.randn(3, 8), IDS, out=x), False),
}


@pytest.mark.parametrize("emulated", (False, True), ids=("cpu", "sm_80"))
@pytest.mark.parametrize("name", OVERWRITING)
def test_leaves_that_require_grad_are_not_overwritten(name: str, emulated: bool) -> None:
    shape, call, differentiable = OVERWRITING[name]
    x = torch.randn(shape)
    leaf = x.clone().requires_grad_()
    message = "requires grad|needs gradients" if not differentiable else "is a leaf that requires grad"

    def run(t: Tensor) -> Any:
        if not emulated:
            return call(t)
        with rtkernels.emulate("sm_80"):
            return call(t)

    with pytest.raises(ArgumentError, match=message):
        run(leaf)
    assert torch.equal(leaf, x), "changed before it was refused"
    if differentiable:
        run(leaf * 1)
    else:
        with pytest.raises(ArgumentError, match=message):
            run(leaf * 1)
    with torch.no_grad():
        run(leaf)
    assert not torch.equal(leaf, x) or name == "cross_entropy"  # which has no gradient to write


def test_every_function_that_overwrites_is_tried() -> None:
    in_place = [name for name in rtkernels.__all__ if name.endswith("_") and not name.startswith("_")]
    assert set(in_place) <= OVERWRITING.keys()


def test_what_a_copy_reads_needs_no_grad_either() -> None:
    with pytest.raises(ArgumentError, match="multi_copy_ is not differentiable"):
        rtkernels.multi_copy_([torch.zeros(3)], [torch.ones(3, requires_grad=True)])
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3, requires_grad=True)  # as create_graph=True leaves it
    rtkernels.optim.clip_grad_norm_([parameter], 0.5)
    assert parameter.grad.norm() < 0.51
