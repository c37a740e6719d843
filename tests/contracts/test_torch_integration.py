"""Ops under torch's machinery: modes, subclasses, transforms, checkpointing, fakes, export."""

from __future__ import annotations

import copy
import functools
import struct
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support.compare import running_on
from support.places import at
from support.recent import recent
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import rtkernels
from contracts.samples import samples_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.norm import rms_norm as module
from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.operator import TorchOp

rms_norm = rtkernels.rms_norm


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_forward_and_backward() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    with _Seen() as seen:
        rms_norm(x, weight).sum().backward()
    assert "rtkernels::rms_norm_fwd" in seen.names and "rtkernels::rms_norm_bwd" in seen.names


def test_selective_checkpointing_can_save_an_op() -> None:
    runs = []
    original = module.FORWARD.reference

    def counted(*args):
        runs.append(1)
        return original(*args)

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        save = op is torch.ops.rtkernels.rms_norm_fwd.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(4, 8, requires_grad=True)
    module.FORWARD.reference = counted
    try:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        y = checkpoint(lambda t: rms_norm(t).sin(), x, use_reentrant=False, context_fn=contexts)
        y.sum().backward()
    finally:
        module.FORWARD.reference = original
    assert len(runs) == 1, "the saved op ran again in backward"


def test_plain_checkpointing() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    checkpoint(lambda t: rms_norm(t).sin(), x, use_reentrant=False).sum().backward()
    copy = x.detach().requires_grad_()
    rms_norm(copy).sin().sum().backward()
    torch.testing.assert_close(x.grad, copy.grad)


def test_fake_tensors_get_shapes_and_launch_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(8)
        y = rms_norm(x, weight)
        assert y.shape == (4, 8) and y.dtype == torch.bfloat16
        assert rtkernels.glu(x).shape == (4, 4)


def test_meta_tensors() -> None:
    y, total = rms_norm(torch.empty(4, 8, device="meta"), residual=torch.empty(4, 8, device="meta"))
    assert y.is_meta and total.shape == (4, 8)
    labels = torch.empty(4, dtype=torch.int64, device="meta")
    assert rtkernels.linear_cross_entropy(y, torch.empty(5, 8, device="meta"), labels).is_meta


def test_vmap_works_and_func_grad_is_refused_clearly() -> None:
    x = torch.randn(3, 4, 8)
    torch.testing.assert_close(torch.vmap(rms_norm)(x), rms_norm(x))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda t: rms_norm(t).sum())(x)


def test_subclass_goes_through_its_own_dispatch() -> None:
    class Logged(Tensor):
        calls: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.calls.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.randn(4, 8).as_subclass(Logged)
    y = rms_norm(x)
    torch.testing.assert_close(y.as_subclass(Tensor), rms_norm(x.as_subclass(Tensor)))
    assert any("rms_norm" in name for name in Logged.calls)


def test_dtensors_work_by_rule_or_give_a_clear_error(tmp_path) -> None:
    """Operators with a rule for shards work, compiled too (test_sharded.py has more); others name themselves."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("needs a torch.distributed of its own")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
        weight = distribute_tensor(torch.randn(8), mesh, [Replicate()])
        wanted = rms_norm(x.to_local(), weight.to_local())
        for function in (rms_norm, torch.compile(rms_norm, fullgraph=True, backend="aot_eager")):
            y = function(x, weight)
            assert y.placements == (Shard(0),)
            torch.testing.assert_close(y.to_local(), wanted)
        with pytest.raises(Exception, match=r"rtkernels[.:]+row_dot"):
            rtkernels.row_dot(x, x)
    finally:
        dist.destroy_process_group()


def test_export() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return rms_norm(x, self.weight)

    model, x = Model(), torch.randn(4, 8)
    program = torch.export.export(model, (x,))
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    assert torch.ops.rtkernels.rms_norm_fwd.default in [node.target for graph in graphs for node in graph.nodes]
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_compiled_module_with_parameters(backend: str) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return rtkernels.glu(torch.cat([rms_norm(x, self.weight), x], -1))

    block, x = Block(), torch.randn(4, 8)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    compiled(x).sum().backward()
    grad, block.weight.grad = block.weight.grad, None
    block(x).sum().backward()
    torch.testing.assert_close(grad, block.weight.grad)


def _routed(x: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
    index = rtkernels.moe_index(torch.arange(12).view(6, 2) % 5, 5, rows=24)
    moved = rtkernels.moe_permute(x, index, probs=probs)
    coded = rtkernels.moe_permute_fp8(x, index, probs=probs)
    return moved.y, moved.probs, coded.probs, coded.y


def _picked(results: tuple, *indices: int) -> tuple[Tensor, ...]:
    """Return some of the results; torch.compile of torch 2.6 cannot cut a slice from a named tuple."""
    return tuple(results[index] for index in indices)


SEVERAL_RESULTS = {
    "rms_norm": lambda x, w: rms_norm(x, w[0], residual=2 * x),
    "layer_norm": lambda x, w: rtkernels.layer_norm(x, w[0], w[1], residual=2 * x),
    "rms_norm_fp8": lambda x, w: _picked(rtkernels.rms_norm_fp8(x, w[0], residual=2 * x, keep=True), 5, 6),
    "topk_router": lambda x, w: _picked(rtkernels.topk_router(x * w[0], 2), 0),
    "topk_router, dense": lambda x, w: _picked(rtkernels.topk_router(x * w[0], 2, dense_probs=True), 0, 3),
    "moe_permute": lambda x, w: _routed(x, w[:2, :6].t()),
}


@pytest.mark.parametrize("name", SEVERAL_RESULTS)
def test_compiled_gradients_of_one_result_of_several(name: str) -> None:
    """A compiled graph passes zeros as gradients of unused results."""
    function = SEVERAL_RESULTS[name]
    x, w = torch.randn(6, 128), torch.rand(2, 128)
    for used in range(len(function(x, w))):
        torch._dynamo.reset()
        grads = []
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
            result = call(*leaves)[used]
            g = torch.linspace(-1, 1, result.numel()).view(result.shape)
            grads.append(torch.autograd.grad(result, leaves, g, materialize_grads=True))
        for got, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(got, wanted)


def test_forward_mode_is_refused_clearly() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ArgumentError, match="rms_norm got a tensor with a tangent"):
        torch.func.jvp(rms_norm, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        for call in (rms_norm, rtkernels.softmax, rtkernels.quantize_fp8, lambda t: rtkernels.multi_norm([x, t])):
            call(x)
            with pytest.raises(ArgumentError, match="got a tensor with a tangent"):
                call(dual)
        with pytest.raises(ArgumentError, match="got a tensor with a tangent"):
            rms_norm(x, out=dual)


def test_second_derivatives_are_refused_even_of_sums() -> None:
    """The gradient of a sum comes in as a constant, and yet the gradient of x is none."""
    x = torch.randn(4, 8, requires_grad=True)
    labels = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.functional.hessian(lambda t: rtkernels.cross_entropy(t, labels, one_pass=True), x)
    for function in (rms_norm, rtkernels.softmax, rtkernels.glu):
        total = function(x).sum()
        (gradient,) = torch.autograd.grad(total, x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            (total + gradient.square().sum()).backward()
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.functional.hessian(lambda t, f=function: f(t).sum(), x)


def test_gradients_that_are_lazy_negatives() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    for function in (rms_norm, rtkernels.softmax, lambda t: rtkernels.embedding(torch.tensor([2, 0, 1, 1]), t)):
        grads = []
        for g in (torch._neg_view(torch.ones(4, 8)), -torch.ones(4, 8)):
            with rtkernels.emulate("sm_80"):
                grads += torch.autograd.grad(function(x), x, g)
        torch.testing.assert_close(*grads)


_LABELS = [1, 0, 7, -100]
BATCHED = {
    "rms_norm": lambda x, w: rms_norm(x, w, residual=2 * x),
    "layer_norm": lambda x, w: rtkernels.layer_norm(x, w, w),
    "softmax": lambda x, w: rtkernels.softmax(x * w),
    "act": lambda x, w: rtkernels.act(x * w, "silu", add=w),
    "transpose": lambda x, w: rtkernels.transpose(x * w),
    "repeat_heads": lambda x, w: rtkernels.repeat_heads((x * w).view(4, 2, 4), 2),
    "glu": lambda x, w: rtkernels.glu(x, x * w),
    "cross_entropy": lambda x, w: rtkernels.cross_entropy(x * w, torch.tensor(_LABELS), reduction="none"),
    "index_select": lambda x, w: rtkernels.index_select(x * w, torch.tensor([2, 0])),
    "embedding": lambda x, w: rtkernels.embedding(torch.tensor([2, 0]), x * w),
    "topk_router": lambda x, w: rtkernels.topk_router(x * w, 2)[:1],
    "rope": lambda x, w: rtkernels.rope((x * w).view(1, 4, 1, 8), torch.rand(4, 4), torch.rand(4, 4)),
}


@at("sm_80", "cuda")
@pytest.mark.parametrize("name", BATCHED)
def test_batches_of_gradients(name: str, place: str) -> None:
    """Jacobians by one vectorised pass, on device code: the gradients are tensors without memory then."""
    with running_on(place) as device, torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loops
        x, w = torch.randn(4, 8, requires_grad=True), torch.rand(8, requires_grad=True)
        results = BATCHED[name](x, w)
        results = list(results) if isinstance(results, tuple) else [results]
        batches = [torch.randn(3, *result.shape) for result in results]
        wanted = [torch.autograd.grad(results, (x, w), one, retain_graph=True) for one in zip(*batches, strict=True)]
        got = torch.autograd.grad(results, (x, w), batches, is_grads_batched=True, retain_graph=True)
        mapped = torch.func.vmap(lambda *g: torch.autograd.grad(results, (x, w), g, retain_graph=True))(*batches)
    for one, other, each in zip(got, mapped, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(each))
        torch.testing.assert_close(other, torch.stack(each))


def test_vectorised_jacobians() -> None:
    x = torch.randn(3, 4)
    with rtkernels.emulate("sm_80"):
        got = torch.autograd.functional.jacobian(rms_norm, x, vectorize=True)
        torch.testing.assert_close(got, torch.autograd.functional.jacobian(rms_norm, x))


def test_what_is_no_number_is_refused() -> None:
    x = torch.randn(4, 8)
    for eps in (torch.tensor(1e-6), "1e-6", None, 1j):
        with pytest.raises(ArgumentError, match=r"eps is .*; expected a number"):
            rms_norm(x, eps=eps)
    with pytest.raises(ArgumentError, match="where a number is expected"):
        module.FORWARD._find(x, None, torch.tensor(1e-6), 0.0)


def test_what_is_no_number_is_named_where_packing_a_launch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(Tensor):
        is_cuda = True

    x = torch.randn(4, 8).as_subclass(OnGpu)
    for operator, more in ((rtkernels.ops.reduce.softmax.FORWARD, (False,)), (module.FORWARD, (0.0,))):
        scope = operator.call.__globals__
        monkeypatch.setitem(scope, "TENSOR_TYPES", {OnGpu})
        for failing in (lambda *args: struct.pack("=d", args[2]), lambda *args: args[2] + 1):
            monkeypatch.setitem(scope, "launch", failing)
            with pytest.raises(ArgumentError, match=r"(scale|eps) is '1.0'; expected a number"):
                operator(x, None, "1.0", *more)
        monkeypatch.setitem(scope, "launch", lambda *args: args[2] + "")
        with pytest.raises(TypeError, match="unsupported operand"):  # of another origin: unchanged
            operator(x, None, 1.0, *more)


def test_tracing_device_code_is_refused() -> None:
    x = torch.randn(4, 8)
    with rtkernels.emulate("sm_80"), pytest.raises(RuntimeError, match=r"torch\.jit\.trace would record"):
        torch.jit.trace(rms_norm, (x,))


def test_plans_never_see_lazy_negatives(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SimpleNamespace(converted=None, matches=None, run=lambda *addresses: addresses)
    scope = module.FORWARD.call.__globals__
    monkeypatch.setattr(module.FORWARD, "_find", lambda *args: plan)
    monkeypatch.setitem(scope, "last_calls", scope["last_calls"])
    x, odd = torch.randn(4, 8), torch.randn(9)[1:]
    for t in (x, odd, x):
        assert module.FORWARD._launch_slowly(scope, None, (t, None, 1e-6, 0.0)) == (t.data_ptr(), 0)
        assert module.FORWARD._launch_slowly(scope, None, (torch._neg_view(t), None, 1e-6, 0.0)) != (t.data_ptr(), 0)
    assert recent(module.FORWARD, x, None, 1e-6, 0.0) == (x.data_ptr(), 0)
    assert recent(module.FORWARD, torch._neg_view(x), None, 1e-6, 0.0) is None


def _lazy(value: Any) -> Any:
    """Return tensors with the same values, kept as lazy negatives of memory with the opposite ones."""
    if isinstance(value, list):
        return [_lazy(v) for v in value]
    if not isinstance(value, Tensor) or value.dtype in (torch.bool, torch.uint8) or value.dtype.itemsize == 1:
        return value
    return torch._neg_view(torch.empty_like(value).copy_(-value))


def _one_sample_of_each() -> Iterator[Any]:
    for op in registry.ops():
        for torch_op, args in dict(samples_of(op.name, "cpu")).items():
            yield pytest.param(torch_op, args, id=torch_op.name)


@pytest.mark.parametrize(("torch_op", "args"), _one_sample_of_each())
def test_device_code_never_sees_lazy_negatives(torch_op: TorchOp, args: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in a plain call nor in one through the dispatcher, which materialises them."""
    seen = []

    def recorded(*got: Any) -> Any:
        seen.extend(t for arg in got for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor))
        return original(*got)

    original = torch_op.reference
    monkeypatch.setattr(torch_op, "reference", recorded)
    given = [_lazy(a) for a in args]
    schema = torch_op.overload._schema.arguments
    written = [i for i, a in enumerate(schema) if a.alias_info and a.alias_info.is_write and args[i] is not None]
    lazy = any(isinstance(given[i], list) or given[i].is_neg() for i in written)  # codes of one byte never are
    if lazy or isinstance(args[0], list):
        with pytest.raises(ArgumentError, match="is a lazy negative"):
            torch_op(*given)
        given = [args[i] if i in written or isinstance(a, list) else a for i, a in enumerate(given)]
    if torch_op.name == "multi_reduce":
        return  # there is nothing but a list
    wanted_args = copy.deepcopy(args)
    wanted = torch_op(*wanted_args)
    seen.clear()
    got = torch_op(*given)
    assert seen and not any(t.is_neg() for t in seen)
    torch.testing.assert_close((got, [given[i] for i in written]), (wanted, [wanted_args[i] for i in written]))


@at("sm_80", "cuda")
def test_lazy_negatives_and_conjugates_on_device_code(place: str) -> None:
    with running_on(place) as device, torch.device(device):
        x = torch.randn(4, 8)
        z = torch.randn(4, 8, dtype=torch.complex64)
        indices = torch.tensor([2, 0])
        torch.testing.assert_close(rtkernels.softmax(torch._neg_view(x)), torch.softmax(-x, -1))
        torch.testing.assert_close(rms_norm(torch._neg_view(x)), rms_norm(-x))
        torch.testing.assert_close(rtkernels.index_select(z.conj(), indices), z.conj()[indices])
        halves = torch.tensor([2, 2]), torch.tensor([1, 0])
        torch.testing.assert_close(rtkernels.sort_chunks(z.conj(), *halves), torch.cat((z[2:], z[:2])).conj())
        for call in (rtkernels.scale_, lambda t, by: rtkernels.softmax(t, scale=by, in_place=True)):
            with pytest.raises(ArgumentError, match=r"x is a lazy negative.*resolve_neg"):
                call(torch._neg_view(x), 2.0)
        same = [x.clone()]
        rtkernels.multi_norm(same)
        with pytest.raises(ArgumentError, match="resolve_neg"):  # nor is the list taken for the one before
            rtkernels.multi_norm([torch._neg_view(same[0])])


def test_inference_mode_and_no_grad() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with torch.inference_mode():
        assert rms_norm(x).is_inference()
    with torch.no_grad():
        assert not rms_norm(x).requires_grad


def test_autocast_leaves_dtypes_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rms_norm(torch.randn(4, 8), torch.randn(8)).dtype == torch.float32
        assert rtkernels.router_gemm(torch.randn(4, 8).half(), torch.randn(3, 8)).dtype == torch.float32


@pytest.mark.gpu
def test_graphs_that_torch_compile_records() -> None:
    """CUDA graphs of compiled code: what counts starts from zeros at every replay, and results follow the inputs."""

    def loss(x: Tensor, weight: Tensor, router: Tensor) -> Tensor:
        logits = rtkernels.router_gemm(rms_norm(x, weight), router)
        routing = rtkernels.topk_router(logits, 2)
        return (
            routing.probs.square().sum()
            + rtkernels.router_z_loss(logits, 0.1)
            + rtkernels.load_balancing_loss(logits, counts=routing.counts, k=2)
        )

    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    weight = torch.rand(256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    router = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(5):
        x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
        results = []
        for function in (compiled, loss):
            torch.compiler.cudagraph_mark_step_begin()
            weight.grad = router.grad = None
            value = function(x, weight, router)
            value.backward()
            results.append((value.detach().clone(), weight.grad.clone(), router.grad.clone()))
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
