"""Rules about arguments that hold for all ops: what may be overwritten, where tensors are, what a number is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import rtkernels
from rtkernels import _registry
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


# ---- where tensors are ----------------------------------------------------------------------------------------------


def _calls_with_several_tensors() -> Iterator[Any]:
    """Yield operators with arguments, and the places of the tensors among them."""
    for op in _registry.ops():
        for number, (torch_op, args) in enumerate(op.samples("cpu")):
            tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
            if len(tensors) > 1:
                yield pytest.param(torch_op, args, tensors, id=f"{torch_op.name}-{number}")


def _cloned(args: tuple[Any, ...]) -> list[Any]:
    return [a.clone() if isinstance(a, Tensor) else a for a in args]


@pytest.mark.parametrize(("torch_op", "args", "tensors"), _calls_with_several_tensors())
def test_tensors_on_meta_among_others_are_refused(torch_op: _registry.TorchOp, args: tuple, tensors: list[int]) -> None:
    for i in tensors:
        given = _cloned(args)
        given[i] = given[i].to("meta")
        with pytest.raises(ArgumentError, match=r"is on (meta|cpu); expected (cpu|meta), that of "):
            torch_op(*given)


# Gradients and what a forward saved are where autograd found them; lists are looked at in test_multi_tensor.
_BY_AUTOGRAD = ("_bwd", "cross_entropy_scale", "cross_entropy_bwd_in_place", "multi_adamw_")


@pytest.mark.parametrize(("torch_op", "args", "tensors"), _calls_with_several_tensors())
def test_launchers_refuse_tensors_of_another_gpu(
    torch_op: _registry.TorchOp, args: tuple, tensors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel would read an address that is not there."""
    if torch_op.name.endswith(_BY_AUTOGRAD):
        pytest.skip("its tensors come from autograd")
    elsewhere: set[int] = set()
    get_device = Tensor.get_device
    monkeypatch.setattr(Tensor, "get_device", lambda t: 1 if t.data_ptr() in elsewhere else get_device(t))
    for i in tensors[1:]:
        given = _cloned(args)
        if not given[i].numel():
            continue
        elsewhere.clear()
        elsewhere.add(given[i].data_ptr())
        with rtkernels.emulate("sm_90"), pytest.raises(ArgumentError, match="device"):
            torch_op.launch(*given)


def test_q_and_kv_have_the_same_tokens() -> None:
    def call(q: tuple[int, ...], kv: tuple[int, ...], layout: str = "sbhd", dtype: torch.dtype = torch.float32) -> Any:
        batch_and_length = (kv[0], kv[2]) if layout == "bhsd" else kv[:-2]
        k_pos = torch.randn(*batch_and_length, 8)
        return rtkernels.mla_rope(torch.randn(q, dtype=dtype), torch.randn(kv), k_pos, *ANGLES, layout=layout)

    call((3, 2, 4, 16), (3, 2, 1, 24))
    call((2, 4, 3, 16), (2, 1, 3, 24), "bhsd")
    call((3, 4, 16), (3, 1, 24))
    for wrong in (
        ((2, 2, 4, 16), (3, 2, 1, 24)),
        ((3, 1, 4, 16), (3, 2, 1, 24)),
        ((2, 4, 2, 16), (2, 1, 3, 24), "bhsd"),
        ((2, 4, 16), (3, 1, 24)),
        ((3, 4, 16), (3, 1, 1, 24)),
    ):
        with pytest.raises(ArgumentError, match="expected the batch and length of kv"):
            call(*wrong)
    with pytest.raises(ArgumentError, match="q has dtype bfloat16; expected float32, that of kv"):
        call((3, 2, 4, 16), (3, 2, 1, 24), dtype=torch.bfloat16)
